"""``specdec audit``: replay a run teacher-forced and count tokens that plain decoding would not have chosen."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import click
from click.core import ParameterSource

from specdec.cli import output
from specdec.cli.options import (
    FILE,
    KEYS,
    LARGEST,
    PATH,
    SAMPLE_PROMPT,
    Number,
    PromptOptions,
    configured,
    ignore_eos,
    interruptible,
    prompted,
)
from specdec.config import Override, RunConfig
from specdec.errors import PromptError

if TYPE_CHECKING:
    from specdec.measuring.audit import AuditReport, RecordedRun
    from specdec.pipeline import LanguageModel

SHOWN = 10  # divergences listed on a terminal; --json has all


@click.command()
@click.option(
    "--run", "run_file", metavar="FILE", type=FILE, help="Audit the output of generate --json instead of a new run."
)
@prompted
@configured("How many tokens to generate, at most.", also=("--tokens",))
@ignore_eos
@click.option(
    "--rows",
    type=click.IntRange(1, LARGEST),
    default=4,
    show_default=True,
    help="Rows of the control's passes; 1 disables it.",
)
@click.option(
    "--tolerance",
    type=Number(0.0),
    metavar="NATS",
    help="Exit with status 1 if a token is further below plain decoding's best one than this (greedy runs).",
)
@click.option("--plot", "--png", "plot_file", metavar="FILE", type=PATH, help="Draw a PNG (matplotlib).")
@output.json_option
@click.pass_context
def audit(
    ctx: click.Context,
    run_file: str | None,
    asked: PromptOptions,
    config: RunConfig,
    rows: int,
    tolerance: float | None,
    plot_file: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Replay a run and count divergent tokens.

    Compares every token with what plain decoding, one row at a time, chooses in the same context: the argmax, or above
    temperature 0 the choice of the same seed. The control decodes the same tokens in passes of several rows without
    speculation: differences there come from the backend.

    --run takes the prompt and generation settings from the file. The exit status is 1 if verifier and backend promise
    the tokens of plain decoding and some differ, or if --tolerance is exceeded.
    """
    prompt: str | list[int] = []
    if run_file is None:
        prompt = asked.read(config)
    elif own := list(_own_settings(ctx)):
        raise click.UsageError(f"{', '.join(own)}: with --run, prompt and generation settings are the file's.")

    import specdec
    from specdec.measuring.audit import audit as replay
    from specdec.measuring.audit import read_run
    from specdec.measuring.plots import plot_audit, require_matplotlib

    if plot_file is not None:
        require_matplotlib()  # before minutes of decoding
    recorded = read_run(run_file) if run_file is not None else None
    with output.status(f"loading {config.target.model}"):
        lm = specdec.load(config=config)
    if prompt is SAMPLE_PROMPT:
        click.echo("no prompt given: continuing a sample", err=True)
    if recorded is None:
        recorded = _run_now(lm, prompt, chat=asked.chat)
    elif recorded.fingerprint and recorded.fingerprint != lm.info.fingerprint:
        raise PromptError(
            "the run was made with another model",
            file=run_file,
            model=config.target.model,
            try_="the --model or CONFIG of the run",
        )
    with output.progress("auditing", then="auditing") as advance:
        report = replay(
            lm,
            recorded.prompt,
            recorded.tokens,
            rows=rows,
            tolerance=tolerance,
            generation=recorded.generation,
            progress=advance,
        )
    if plot_file is not None:
        plot_audit(report, plot_file)
    if as_json:
        output.print_json(
            {**report.to_dict(), "run_deviation": recorded.deviation, "png": str(plot_file) if plot_file else None}
        )
    else:
        _show(report, recorded, plot_file)
    if report.broken_promise:
        other = " (unless the run is of another backend, dtype or version)" if run_file else ""
        output.broken_promise(ctx, f"some differ{other}")
    if report.beyond:
        gap = f"the largest gap is {report.largest_gap:.4g} nats, the tolerance {tolerance:g}"
        click.echo(f"error: {output.count(report.beyond, 'token')} beyond the tolerance: {gap}", err=True)
        ctx.exit(output.BROKEN_PROMISE)


def _own_settings(ctx: click.Context) -> Iterator[str]:
    """Options that set what a run file already contains."""
    for param in ctx.command.params:
        about_the_run = param.name in ("prompt", "prompt_file", "prompt_tokens", "chat", *KEYS.keys() - {"model"})
        if about_the_run and ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            yield next(option for option in param.opts if option.startswith("--"))
    yield from (o.source for o in map(Override.parse, ctx.params["settings"]) if o.path[0] == "generation")


def _run_now(lm: LanguageModel, prompt: str | list[int], *, chat: bool) -> RecordedRun:
    from specdec.measuring.audit import RecordedRun

    stream = lm.stream(prompt, chat=chat)
    with interruptible(stream), output.status("generating"):
        result = stream.result
    return RecordedRun(
        prompt=result.prompt,
        tokens=result.tokens,
        generation=result.generation,
        fingerprint=result.fingerprint,
        deviation=attrs.asdict(result.deviation),
    )


# --- the report ------------------------------------------------------------------------------------------------------


def _show(report: AuditReport, recorded: RecordedRun, plot_file: pathlib.Path | None) -> None:
    from specdec.measuring.audit import bin_label

    console = output.console()
    console.print(output.facts(_summary(report, recorded.deviation)))
    console.print()
    bins = [(bin_label(low, high), str(all_), str(diverging)) for low, high, all_, diverging in report.histogram()]
    console.print(output.table(("top-two gap (nats)", "positions", "divergences"), bins))
    if report.divergences:
        console.print()
        headings = ("position", "token", "plain decoding", "gap", "top-two gap")
        console.print(output.table(headings, _divergences(report), left=()))
    if plot_file is not None:
        console.print(f"\nplot: {plot_file}")


def _summary(report: AuditReport, deviation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    count, control = len(report.divergences), report.control
    choice = "argmax" if report.temperature == 0 else f"the seed's choice at temperature {report.temperature:g}"
    yield (
        "audited",
        f"{output.count(report.tokens, 'token')} after a prompt of {report.prompt_tokens}, against {choice}",
    )
    yield "guarantee", f"{report.guarantee}, with {report.parity} parity"
    yield "divergences", f"{count}, {report.rate:.3%} of the tokens" if count else "none"
    if count:
        yield "first", f"position {report.first} after the prompt"
        yield "largest gap", f"{report.largest_gap:.4g} nats below the best logit"
    if report.tolerance is not None:
        yield "tolerance", f"{report.tolerance:g} nats: {report.beyond or 'no'} tokens beyond it"
    if deviation:
        off = deviation.get("count")
        gap = f", by {deviation.get('largest_gap'):.4g} nats at most" if off else ""
        yield "run's own", f"{off or 'no'} deviations counted{gap}"
    if count and report.guarantee == "distribution" and report.temperature > 0:
        yield "note", "this verifier keeps the distribution, not the tokens of plain decoding"
    if control is None:
        yield "control", "none"
        return
    yield (
        "control",
        f"plain decoding by {control.rows} rows: {control.equal_rows} of {control.compared} rows bit-equal to one row "
        f"alone, {output.count(control.argmax_disagreements, 'argmax disagreement')}, largest difference of a logit "
        f"{control.largest_difference:.3g}",
    )


def _divergences(report: AuditReport) -> Iterator[tuple[str, ...]]:
    for found in report.divergences[:SHOWN]:
        yield str(found.position), str(found.token), str(found.chosen), f"{found.gap:.4g}", f"{found.top_two:.4g}"
    if len(report.divergences) > SHOWN:
        yield f"... {len(report.divergences) - SHOWN} more with --json", "", "", "", ""

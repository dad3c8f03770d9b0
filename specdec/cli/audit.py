"""``specdec audit``: replay a run teacher-forced and count the tokens that plain decoding would not have chosen."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec.cli import output
from specdec.cli.run_options import SAMPLE_PROMPT, flag_overrides, interruptible, prompt_of
from specdec.config import Override, load_config
from specdec.errors import PromptError

if TYPE_CHECKING:
    from rich.table import Table

    from specdec.measuring.audit import AuditReport, RecordedRun
    from specdec.pipeline import LanguageModel

BROKEN_PROMISE = 1  # exit status when exact, bitwise decoding diverges
SHOWN = 10  # divergences listed on a terminal; --json has all


@click.command()
@click.argument("config_file", metavar="[CONFIG]", required=False, type=click.Path(path_type=pathlib.Path))
@click.option("--run", "run_file", metavar="FILE", help="Audit the output of generate --json instead of a new run.")
@click.option("-p", "--prompt", help="Text to continue.")
@click.option("--prompt-file", metavar="FILE", help="A UTF-8 file with the text to continue; - for stdin.")
@click.option("--prompt-tokens", metavar="1,2,3", help="Token ids to continue.")
@click.option("--chat", is_flag=True, help="Put the prompt into the checkpoint's chat template.")
@click.option("-m", "--model", help='A folder, a hub id or "demo"; short for -s target.model=...')
@click.option("-n", "--tokens", type=click.IntRange(1), metavar="N", help="How many tokens to generate, at most.")
@click.option("-t", "--temperature", type=float, metavar="X", help="0 is greedy.")
@click.option("--seed", type=int, metavar="S", help="One seed, one output.")
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-text token.")
@click.option(
    "--rows", type=click.IntRange(1), default=4, show_default=True, help="Rows of the control's passes; 1 for none."
)
@click.option("-s", "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key: depth.depth=4.")
@click.option("--png", metavar="FILE", type=click.Path(path_type=pathlib.Path), help="Draw the result (matplotlib).")
@output.json_option
@click.pass_context
def audit(
    ctx: click.Context,
    config_file: pathlib.Path | None,
    run_file: str | None,
    prompt: str | None,
    prompt_file: str | None,
    prompt_tokens: str | None,
    chat: bool,
    model: str | None,
    tokens: int | None,
    temperature: float | None,
    seed: int | None,
    ignore_eos: bool,
    rows: int,
    settings: tuple[str, ...],
    png: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Replay a run and count divergent tokens.

    Every token of the run is compared with what plain decoding, one row at a time, chooses after the same tokens: the
    argmax, or above temperature 0 the choice of the same seed. The control decodes the same tokens in passes of
    several rows without any speculation: what differs there is the backend's own.

    With --run the prompt and the generation settings are the file's. The exit status is 1 when verifier and backend
    promise the tokens of plain decoding and some are not.
    """
    flags: dict[str, Any] = {
        "target.model": model,
        "generation.max_new_tokens": tokens,
        "generation.temperature": temperature,
        "generation.seed": seed,
        "generation.ignore_eos": ignore_eos or None,
    }
    overrides = [*map(Override.parse, settings), *flag_overrides(flags)]
    config = load_config(config_file, overrides)
    prompts = {"--prompt": prompt, "--prompt-file": prompt_file, "--prompt-tokens": prompt_tokens, "--chat": chat}
    given: str | list[int] = []
    if run_file is not None:
        own = [option for option, value in prompts.items() if value]
        own += ["--tokens" if o.path[-1] == "max_new_tokens" else o.source for o in overrides if "generation" in o.path]
        if own:
            raise click.UsageError(f"{', '.join(own)}: with --run, prompt and generation settings are the file's.")
    else:
        given = prompt_of(prompt, prompt_file, prompt_tokens, config)
        if chat and not isinstance(given, str):
            raise click.UsageError("--chat takes text, not --prompt-tokens.")
        if given is SAMPLE_PROMPT:
            click.echo("no prompt given: continuing a sample", err=True)

    import specdec
    from specdec.measuring.audit import audit as replay
    from specdec.measuring.audit import plot, read_run, require_matplotlib

    if png is not None:
        require_matplotlib()  # before minutes of decoding
    recorded = read_run(run_file) if run_file is not None else None
    with output.status(f"loading {config.target.model}"):
        lm = specdec.load(config=config)
    if recorded is None:
        recorded = _run_now(lm, given, chat=chat)
    elif recorded.fingerprint and recorded.fingerprint != lm.info.fingerprint:
        raise PromptError(
            "the run was made with another model",
            file=run_file,
            model=config.target.model,
            try_="the --model or CONFIG of the run",
        )
    with _progress("auditing", len(recorded.tokens)) as advance:
        report = replay(
            lm, recorded.prompt, recorded.tokens, rows=rows, generation=recorded.generation, progress=advance
        )
    if png is not None:
        plot(report, png)
    if as_json:
        output.print_json({**report.to_dict(), "run_deviation": recorded.deviation, "png": str(png) if png else None})
    else:
        _show(report, recorded, png)
    if report.broken_promise:
        click.echo(
            "the verifier promises the tokens of plain decoding and the backend its bits, and some differ: this is a "
            "bug (or, with --run, a run of another backend, dtype or version)",
            err=True,
        )
        ctx.exit(BROKEN_PROMISE)


def _run_now(lm: LanguageModel, prompt: str | Sequence[int], *, chat: bool) -> RecordedRun:
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


@contextlib.contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr; nothing when that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=total, label=label, file=sys.stderr) as bar:
        yield lambda done: bar.update(done - bar.pos)


# --- the report ------------------------------------------------------------------------------------------------------


def _show(report: AuditReport, recorded: RecordedRun, png: pathlib.Path | None) -> None:
    console = output.console()
    console.print(output.facts(_summary(report, recorded.deviation)))
    console.print()
    console.print(_histogram(report))
    if report.divergences:
        console.print()
        console.print(_divergences(report))
    if png is not None:
        console.print(f"\nplot: {png}")


def _summary(report: AuditReport, deviation: Mapping[str, Any]) -> list[tuple[str, str]]:
    count, control = len(report.divergences), report.control
    choice = "argmax" if report.temperature == 0 else f"the seed's choice at temperature {report.temperature:g}"
    audited = f"{output.count(report.tokens, 'token')} after a prompt of {report.prompt_tokens}, against {choice}"
    rows = [
        ("audited", audited),
        ("guarantee", f"{report.guarantee}, with {report.parity} parity"),
        ("divergences", f"{count}, {report.rate:.3%} of the tokens" if count else "none"),
    ]
    if count:
        rows += [
            ("first", f"position {report.first} after the prompt"),
            ("largest gap", f"{report.largest_gap:.4g} nats below the best logit"),
        ]
    if deviation:
        off = deviation.get("count")
        gap = f", by {deviation.get('largest_gap'):.4g} nats at most" if off else ""
        rows.append(("run's own", f"{off or 'no'} deviations counted{gap}"))
    if count and report.guarantee == "distribution" and report.temperature > 0:
        rows.append(("note", "this verifier keeps the distribution, not the tokens of plain decoding"))
    if control is None:
        rows.append(("control", "none"))
    else:
        rows.append(
            (
                "control",
                f"plain decoding by {control.rows} rows: {control.equal_rows} of {control.compared} rows bit-equal "
                f"to one row alone, {output.count(control.argmax_disagreements, 'argmax disagreement')}, largest "
                f"difference of a logit {control.largest_difference:.3g}",
            )
        )
    return rows


def _histogram(report: AuditReport) -> Table:
    from specdec.measuring.audit import bin_label

    table = output.table("top-two gap (nats)", "positions", "divergences", right=("positions", "divergences"))
    for low, high, everywhere, diverging in report.histogram():
        table.add_row(bin_label(low, high), str(everywhere), str(diverging))
    return table


def _divergences(report: AuditReport) -> Table:
    columns = ("position", "token", "plain decoding", "gap", "top-two gap")
    table = output.table(*columns, right=columns)
    for found in report.divergences[:SHOWN]:
        table.add_row(
            str(found.position), str(found.token), str(found.chosen), f"{found.gap:.4g}", f"{found.top_two:.4g}"
        )
    if len(report.divergences) > SHOWN:
        table.add_row(f"... {len(report.divergences) - SHOWN} more with --json", "", "", "", "")
    return table

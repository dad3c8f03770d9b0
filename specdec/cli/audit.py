"""``specdec audit``: count tokens that plain decoding would not have chosen, of our own runs and of other engines."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import click
from click.core import ParameterSource

from specdec.cli import measuring, output
from specdec.cli.options import (
    FILE,
    KEYS,
    LARGEST,
    PATH,
    SAMPLE_PROMPT,
    TEXT,
    Number,
    PromptOptions,
    configured,
    ignore_eos,
    interruptible,
    prompted,
)
from specdec.config import Override, RunConfig
from specdec.errors import PromptError, shown

if TYPE_CHECKING:
    from specdec.measuring.audit import AuditReport, RecordedRun
    from specdec.measuring.comparison import ComparisonReport
    from specdec.measuring.divergences import GapReport
    from specdec.measuring.engines.engine import Engine
    from specdec.measuring.prompts import Prompt
    from specdec.pipeline import LanguageModel

SHOWN = 10  # divergences listed on a terminal; --json has all
SHORT = 24  # characters of a token there


@click.command()
@click.option(
    "--server",
    "servers",
    metavar="URL",
    type=TEXT,
    multiple=True,
    help="Compare two OpenAI-compatible servers, first the plain one; the same twice shows its own noise.",
)
@click.option(
    "--engine",
    type=click.Choice(["specdec", "transformers", "llamacpp", "vllm"]),
    help="Compare plain decoding with speculation in this process.",
)
@click.option(
    "--prompts",
    "prompts_file",
    metavar="FILE",
    type=FILE,
    help="With --server or --engine: prompts as for accept; specdec's own if unset.",
)
@click.option(
    "--per-class", type=click.IntRange(1, LARGEST), metavar="N", help="The first N prompts of each class; 4 if unset."
)
@click.option("--timeout", type=Number(0.001, LARGEST), metavar="S", help="For an answer of a server; 300 if unset.")
@click.option(
    "--api-key", envvar="SPECDEC_API_KEY", metavar="KEY", type=TEXT, help="For servers. Better as SPECDEC_API_KEY."
)
@click.option(
    "--run", "run_file", metavar="FILE", type=FILE, help="Audit the output of generate --json instead of a new run."
)
@prompted
@configured("How many tokens to generate, at most.")
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
    help="Exit with status 1 if a token is further below plain decoding's best one than this (greedy runs); of other "
    "engines, what rounding may explain.",
)
@click.option("--plot", "plot_file", metavar="FILE", type=PATH, help="Draw a PNG (matplotlib).")
@output.json_option
@click.pass_context
def audit(
    ctx: click.Context,
    servers: tuple[str, ...],
    engine: str | None,
    prompts_file: str | None,
    per_class: int | None,
    timeout: float | None,
    api_key: str | None,
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

    With --server, twice, or --engine, requests are answered plain, with speculation, and plain again. A request that
    differs is a "tie within rounding", has an "other token with a real gap", or one "cannot tell", judged by the
    plain answer's log-probabilities. --tolerance says how many nats rounding may explain; the exit status is 1 if a gap
    is real.
    """
    if servers or engine is not None:
        _compare(ctx, config, asked, tolerance, plot_file, as_json=as_json)
        return
    _refuse(ctx, ("prompts_file", "per_class", "timeout", "api_key"), "it needs --server or --engine.")
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
    console = output.console()
    console.print(output.facts(_summary(report, recorded.deviation)))
    _histogram(report)
    if report.divergences:
        console.print()
        headings = ("position", "token", "plain decoding", "gap", "top-two gap", "verdict")
        console.print(output.table(headings, _divergences(report), left=("verdict",)))
    if plot_file is not None:
        console.print(f"\nplot: {plot_file}")


def _histogram(report: GapReport) -> None:
    from specdec.measuring.divergences import bin_label

    console = output.console()
    bins = [(bin_label(low, high), str(all_), str(diverging)) for low, high, all_, diverging in report.histogram()]
    console.print()
    console.print(output.table(("top-two gap (nats)", "positions", "divergences"), bins))


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
        names = (str(found.position), str(found.token), str(found.chosen))
        yield *names, f"{found.gap:.4g}", f"{found.top_two:.4g}", report.verdict(found).value
    if len(report.divergences) > SHOWN:
        yield f"... {len(report.divergences) - SHOWN} more with --json", "", "", "", "", ""


# --- other engines ---------------------------------------------------------------------------------------------------

PER_CLASS = 4  # of specdec's own prompts
TIMEOUT = 300.0
_OF_A_REPLAY = ("run_file", "rows", "prompt_tokens", "chat")
_OF_AN_ENGINE = ("timeout", "api_key")
_OF_A_MODEL = ("source", "drafter_part", "verifier_part", "depth_part")
_ASKED = ("max_new_tokens", "temperature", "seed", "ignore_eos")


def _refuse(ctx: click.Context, names: Sequence[str], why: str) -> None:
    """Raises: UsageError for the first of these options that the command line has."""
    for param in ctx.command.params:
        if param.name in names and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            option = next((one for one in param.opts if one.startswith("--")), "MODEL")
            raise click.UsageError(f"{option}: {why}")


def _compare(
    ctx: click.Context,
    config: RunConfig,
    asked: PromptOptions,
    tolerance: float | None,
    plot_file: pathlib.Path | None,
    *,
    as_json: bool,
) -> None:
    """``audit --server`` and ``audit --engine``."""
    from specdec.measuring.comparison import Comparison
    from specdec.measuring.divergences import Verdict
    from specdec.measuring.engines.engine import Asked
    from specdec.measuring.plots import plot_audit

    _check_asked(ctx, config)
    prompts = _prompts(ctx, asked)
    measuring.check_writable(plot=plot_file)
    settings = Asked(**{name: getattr(config.generation, name) for name in _ASKED})
    plain, speculative = _engines(ctx, config)
    with output.progress("asking", then="requests", silent=as_json) as advance:
        comparison = Comparison(plain, speculative, prompts, settings, tolerance=tolerance, progress=advance)
        with interruptible(comparison):
            report = comparison.run()
    if report.done and not report.tokens and not report.divergences:
        raise PromptError("every answer is empty: nothing was compared", try_="--ignore-eos, or other prompts")
    if plot_file is not None:
        plot_audit(report, plot_file)
    if as_json:
        output.print_json({**report.to_dict(), "png": str(plot_file) if plot_file else None})
    else:
        _show_comparison(report, plot_file)
    if report.failure is not None:
        click.echo(f"ended early: this covers {report.done} of {report.planned} requests", err=True)
        raise report.failure
    real = report.verdicts()[Verdict.REAL]
    if real:
        click.echo(
            f"error: {output.count(real, 'request')} got another token with a real gap: this is a bug, unless the "
            f"speculation is lossy on purpose; then --tolerance says by how much",
            err=True,
        )
        ctx.exit(output.BROKEN_PROMISE)
    if report.partial:
        click.echo(f"interrupted: this covers {report.done} of {report.planned} requests", err=True)
        ctx.exit(output.INTERRUPTED)


def _check_asked(ctx: click.Context, config: RunConfig) -> None:
    """Raises: UsageError for options that engines do not have."""
    servers, engine = ctx.params["servers"], ctx.params["engine"]
    if servers and engine is not None:
        raise click.UsageError("--server and --engine: give one of them.")
    _refuse(ctx, _OF_A_REPLAY, "it is for specdec's own runs, without --server and --engine.")
    if servers:
        _refuse(ctx, _OF_A_MODEL, "with --server, the servers have their models and drafters.")
        if len(servers) != 2:
            raise click.UsageError(
                f"--server: give two, a plain and a speculative one, got {len(servers)}; the same one twice shows its "
                f"own noise."
            )
    else:
        _refuse(ctx, _OF_AN_ENGINE, "it needs --server.")
    taken = {f"generation.{name}" for name in _ASKED} | (set() if servers else {"target", "drafter", "depth"})
    for override in map(Override.parse, ctx.params["settings"]):
        key = ".".join(override.path)
        if engine != "specdec" and key not in taken and override.path[0] not in taken:
            raise click.UsageError(f"{override.source}: it means nothing to {engine or 'a server'} here.")
    if config.generation.temperature > 0 and ctx.params["tolerance"] is not None:
        raise click.UsageError("--tolerance: it is a distance from the best token, and these requests are sampled.")


def _prompts(ctx: click.Context, asked: PromptOptions) -> list[Prompt]:
    from specdec.measuring.prompts import Prompt, choose_prompts, load_prompts, own_prompts

    file, per_class = ctx.params["prompts_file"], ctx.params["per_class"]
    text = asked.given()
    if text is not None:
        if file is not None or per_class is not None:
            raise click.UsageError("--prompts and --per-class: with one prompt of your own, leave them out.")
        return [Prompt(kind="prompts", text=text)]
    known = own_prompts() if file is None else load_prompts(file)
    chosen = choose_prompts(known, per_class=per_class or (PER_CLASS if file is None else None))
    return [prompt for group in chosen.values() for prompt in group]


def _engines(ctx: click.Context, config: RunConfig) -> tuple[Engine, Engine]:
    """The plain and the speculative one."""
    servers = ctx.params["servers"]
    if servers:
        from specdec.measuring.engines.server import ServerEngine

        made = [
            ServerEngine(
                url, ctx.params["model"], api_key=ctx.params["api_key"], timeout=ctx.params["timeout"] or TIMEOUT
            )
            for url in servers
        ]
        return made[0], made[1]
    with output.status(f"loading {config.target.model}"):
        if ctx.params["engine"] == "transformers":
            from specdec.measuring.engines.assisted import TransformersEngine

            return TransformersEngine.pair(config)
        if ctx.params["engine"] == "llamacpp":
            from specdec.measuring.engines.llamacpp import LlamaCppEngine

            return LlamaCppEngine.pair(config)
        if ctx.params["engine"] == "vllm":
            from specdec.measuring.engines.vllm import VllmEngine

            return VllmEngine.pair(config)
        import specdec
        from specdec.measuring.engines.own import OwnEngine

        return OwnEngine.pair(specdec.load(config=config))


def _show_comparison(report: ComparisonReport, plot_file: pathlib.Path | None) -> None:
    console = output.console()
    console.print(output.facts(_comparison(report)))
    _histogram(report)
    judged = report.judged()
    if judged:
        console.print()
        headings = ("request", "position", "plain", "speculative", "gap", "top-two gap", "verdict")
        rows = [
            (
                str(one.found.request),
                str(one.found.position),
                *(shown(token, SHORT) for token in (one.found.chosen, one.found.token)),
                f"{one.found.gap:.3g}",
                f"{one.found.top_two:.3g}",
                one.verdict.value,
            )
            for one in judged[:SHOWN]
        ]
        if len(judged) > SHOWN:
            rows.append((f"... {len(judged) - SHOWN} more with --json", *[""] * 6))
        console.print(output.table(headings, rows, left=("plain", "speculative", "verdict")))
        console.print()
        output.lines(console, "why", (f"request {one.found.request}: {one.reason}" for one in judged[:SHOWN]))
    if plot_file is not None:
        console.print(f"\nplot: {plot_file}")


def _comparison(report: ComparisonReport) -> Iterator[tuple[str, str]]:
    asked = report.asked
    how = "greedy" if asked.temperature == 0 else f"temperature {asked.temperature:g}, seed {asked.seed}"
    yield "plain", report.plain
    yield "speculative", report.speculative
    yield "asked", f"{output.count(report.done, 'request')}, {how}, {asked.max_new_tokens} tokens at most"
    if report.drafted is not None:
        nothing = "nothing, so this says nothing about speculation"
        yield "drafted", output.count(report.drafted, "token") if report.drafted else nothing
    yield "differ", _differ(len(report.divergences), report)
    if report.divergences:
        yield "verdicts", ", ".join(f"{number} {verdict.value}" for verdict, number in report.verdicts().items())
        yield "first", f"position {min(one.position for one in report.divergences)} after the prompt"
    yield "control", f"plain against plain: {_differ(len(report.control.differences), report)}"
    yield (
        "logprobs",
        f"{report.speculation.apart:.3g} nats apart at most (same token, same context); control "
        f"{report.control.apart:.3g}",
    )
    tie, real = report.limits.tie, report.limits.real
    between = "" if tie == real else f", beyond {real:.3g} none is; between them nobody can tell without --tolerance"
    yield "rounding", f"gaps up to {tie:.3g} nats are ties{between}"


def _differ(number: int, report: ComparisonReport) -> str:
    return f"{number} of {output.count(report.done, 'request')} ({number / report.done:.1%})"

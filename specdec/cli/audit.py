"""``specdec audit``: count tokens that plain decoding would not have chosen, in specdec's runs and servers' answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec.cli import measuring, output
from specdec.cli.options import (
    EXTRA_ARGUMENTS,
    FILE,
    LARGEST,
    SAMPLE_PROMPT,
    TEXT,
    Number,
    PromptOptions,
    configured,
    ignore_eos,
    integer,
    interruptible,
    prompted,
    refuse,
)
from specdec.config import Override, RunConfig
from specdec.errors import PromptError, shown

if TYPE_CHECKING:
    from specdec.measuring.audit import AuditReport
    from specdec.measuring.comparison import ComparisonReport
    from specdec.measuring.divergences import GapReport
    from specdec.measuring.prompts import Prompt

SHOWN = 10  # divergences listed on a terminal; --json has all
SHORT = 24  # characters of a token there
PER_CLASS = 4  # of specdec's own prompts


@click.command(context_settings=EXTRA_ARGUMENTS)
@click.option(
    "--server",
    "servers",
    metavar="URL",
    type=TEXT,
    multiple=True,
    help="Compare two OpenAI-compatible servers, the plain one first. The same one twice shows its own noise.",
)
@click.option(
    "--prompts", "prompts_file", metavar="FILE", type=FILE, help="With --server: texts to continue, as for accept."
)
@integer("--per-class", "Prompts per class (default 4 of specdec's own)")
@integer(
    "--batch", "Send N requests together, each beside a sampled one that is not judged (default 1, alone)", high=256
)
@click.option("--timeout", type=Number(0.001, LARGEST), metavar="S", help="Seconds per response (default 300).")
@click.option(
    "--api-key", envvar="SPECDEC_API_KEY", metavar="KEY", type=TEXT, help="For servers. Better as SPECDEC_API_KEY."
)
@prompted
@configured()
@ignore_eos
@click.option(
    "--tolerance",
    type=Number(0.0),
    metavar="NATS",
    help="Exit with status 1 if a greedy token is further below the best one than this. With --server: the gap that "
    "rounding may explain.",
)
@output.json_option
@click.pass_context
def audit(
    ctx: click.Context,
    /,
    servers: tuple[str, ...],
    prompt_options: PromptOptions,
    config: RunConfig,
    tolerance: float | None,
    as_json: bool,
    **of_servers: Any,
) -> None:
    """Replay a run and count divergent tokens.

    Compares every token with what plain decoding, one row at a time, chooses in the same context: the argmax, or above
    temperature 0 the choice of the same seed.

    The exit status is 1 if verifier and backend promise the tokens of plain decoding and some differ, or if --tolerance
    is exceeded.

    With --server, given twice, requests are answered plain, with speculation, and plain again. A request that differs
    is a "tie within rounding", has an "other token with a real gap", or one "cannot tell", judged by the plain answer's
    log-probabilities. After a tie both go on from the plain token. The exit status is 1 if a gap is real. With --batch,
    the plain answers come one at a time, and the others together, as a busy server decodes them.
    """
    if servers:
        _compare(ctx, config, prompt_options, tolerance, as_json=as_json)
        return
    refuse(of_servers, "it needs --server.")
    prompt = prompt_options.read(config)

    import specdec
    from specdec.measuring.audit import audit as replay

    with output.status(f"loading {config.target.model}"):
        lm = specdec.load(config=config)
    if prompt is SAMPLE_PROMPT:
        click.echo("no prompt given: continuing a sample", err=True)
    stream = lm.stream(prompt_options.in_template(lm, prompt))
    with interruptible(stream), output.status("generating"):
        result = stream.result
    deviation = attrs.asdict(result.deviation)
    with output.progress("auditing", then="auditing") as advance:
        report = replay(
            lm, result.prompt, result.tokens, tolerance=tolerance, generation=result.generation, progress=advance
        )
    _finish(report, _summary(report, deviation), as_json, run_deviation=deviation)
    if report.broken_promise:
        output.broken_promise(ctx, "some differ")
    if report.beyond:
        gap = f"the largest gap is {report.largest_gap:.4g} nats, the tolerance {tolerance:g}"
        click.echo(f"error: {output.count(report.beyond, 'token')} beyond the tolerance: {gap}", err=True)
        ctx.exit(output.BROKEN_PROMISE)


# --- the report ------------------------------------------------------------------------------------------------------


def _finish(
    report: AuditReport | ComparisonReport, summary: Iterator[tuple[str, str]], as_json: bool, **more: Any
) -> None:
    """Print a report."""
    if as_json:
        output.print_json({**report.to_dict(), **more})
        return
    console = output.console()
    console.print(output.facts(summary))
    _show_gaps(report, console)


def _show_gaps(report: GapReport, console: output.Printer) -> None:
    """The histogram of gaps, and the first divergences."""
    from specdec.measuring.comparison import Difference
    from specdec.measuring.divergences import bin_label

    bins = [(bin_label(low, high), str(all_), str(diverging)) for low, high, all_, diverging in report.histogram()]
    console.print()
    console.print(output.table(("top-two gap (nats)", "positions", "divergences"), bins))
    if not report.divergences:
        return
    headings: tuple[str, ...] = ("position", "token", "plain decoding", "gap", "top-two gap", "verdict")
    rows: list[tuple[str, ...]] = []
    reasons: list[str] = []
    for divergence in report.divergences[:SHOWN]:
        tokens = (
            shown(token, SHORT) if isinstance(token, str) else str(token)
            for token in (divergence.token, divergence.chosen)
        )
        gaps = (f"{divergence.gap:.4g}", f"{divergence.top_two:.4g}")
        rows.append((str(divergence.position), *tokens, *gaps, report.verdict(divergence).value))
        if isinstance(divergence, Difference):
            rows[-1] = (str(divergence.request), *rows[-1])
            reasons.append(f"request {divergence.request}: {divergence.reason}")
    if reasons:
        headings = ("request", *headings)
    if len(report.divergences) > SHOWN:
        rows.append((f"... {len(report.divergences) - SHOWN} more with --json", *[""] * (len(headings) - 1)))
    console.print()
    console.print(output.table(headings, rows, left=("verdict",)))
    output.lines(console, "why", reasons)


def _summary(report: AuditReport, deviation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    count = len(report.divergences)
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
    off = deviation["count"]
    gap = f", by {deviation['largest_gap']:.4g} nats at most" if off else ""
    yield "run's own", f"{off or 'no'} deviations counted{gap}"
    if count and report.guarantee == "distribution" and report.temperature > 0:
        yield "note", "this verifier keeps the distribution, not the tokens of plain decoding"


# --- servers ---------------------------------------------------------------------------------------------------------

_REQUEST = ("max_new_tokens", "temperature", "seed", "ignore_eos")
_NOT_OF_SERVERS = {
    ("prompt_tokens", "chat", "system"): "it is for specdec's own runs, without --server.",
    ("source", "drafter_part", "verifier_part", "depth_part", "weights"): "with --server, the servers have their "
    "models and drafters.",
    ("top_k", "top_p", "min_p"): "it means nothing to a server here.",
}


def _compare(
    ctx: click.Context, config: RunConfig, prompt_options: PromptOptions, tolerance: float | None, *, as_json: bool
) -> None:
    """``audit --server``."""
    from specdec.decoding.parts import with_seed
    from specdec.measuring.comparison import Comparison
    from specdec.measuring.divergences import Verdict
    from specdec.measuring.server import Request, ServerEngine

    _check_options(ctx, config)
    options = ctx.params
    prompts = _prompts(options, prompt_options)
    plain, speculative = (
        ServerEngine(url, options["model"], api_key=options["api_key"], timeout=options["timeout"] or 300.0)
        for url in options["servers"]
    )
    settings = attrs.asdict(with_seed(config.generation), recurse=False)
    request = Request(**{name: settings[name] for name in _REQUEST if settings[name] is not None})
    with output.progress("asking", then="requests", silent=as_json) as advance:
        batch = options["batch"] or 1
        comparison = Comparison(
            plain, speculative, prompts, request, tolerance=tolerance, batch=batch, progress=advance
        )
        with interruptible(comparison):
            report = comparison.run()
    if report.done and not report.tokens and not report.divergences:
        raise PromptError("every answer is empty: nothing was compared", try_="--ignore-eos, or other prompts")
    _finish(report, _comparison(report), as_json)
    if report.failure is not None:
        click.echo(f"ended early: this covers {report.done} of {report.planned} requests", err=True)
        raise report.failure
    if report.logprobs_verdict is Verdict.REAL:
        apart = f"{report.speculation.apart:.3g} nats, which rounding does not explain"
        click.echo(f"warning: log-probabilities of equal tokens in the same context differ by {apart}", err=True)
    real = {difference.request for difference in report.divergences if difference.verdict is Verdict.REAL}
    if real:
        click.echo(
            f"error: {output.count(len(real), 'request')} got another token with a real gap: this is a bug, unless the "
            f"speculation is lossy on purpose; then --tolerance says by how much",
            err=True,
        )
        ctx.exit(output.BROKEN_PROMISE)
    if report.partial:
        click.echo(f"interrupted: this covers {report.done} of {report.planned} requests", err=True)
        ctx.exit(output.INTERRUPTED)


def _check_options(ctx: click.Context, config: RunConfig) -> None:
    """Raises: UsageError for options that servers do not have."""
    for names, why in _NOT_OF_SERVERS.items():
        refuse(names, why)
    if (number := len(ctx.params["servers"])) != 2:
        raise click.UsageError(
            f"--server: give two, a plain and a speculative one, got {number}; the same one twice shows its own noise."
        )
    for override in map(Override.parse, ctx.params["settings"]):
        if override.path[0] != "generation" or override.path[-1] not in _REQUEST:
            raise click.UsageError(f"{override.source}: it means nothing to a server here.")
    if config.generation.temperature > 0 and ctx.params["tolerance"] is not None:
        raise click.UsageError("--tolerance: it is a distance from the best token, and these requests are sampled.")


def _prompts(options: Mapping[str, Any], prompt_options: PromptOptions) -> list[Prompt]:
    from specdec.measuring.prompts import Prompt

    file, per_class = options["prompts_file"], options["per_class"]
    text = prompt_options.chosen_text()
    if text is not None:
        if file is not None or per_class is not None:
            raise click.UsageError("--prompts and --per-class: with one prompt of your own, leave them out.")
        return [Prompt(kind="prompts", text=text)]
    chosen = measuring.chosen_prompts(file, per_class or (PER_CLASS if file is None else None), chat=False)
    return [prompt for group in chosen.values() for prompt in group]


def _comparison(report: ComparisonReport) -> Iterator[tuple[str, str]]:
    request = report.request
    how = f"{measuring.sampling(request)}, {request.max_new_tokens} tokens at most"
    yield "plain", report.plain
    yield "speculative", report.speculative
    together = f", {report.batch} together, each beside a sampled one" if report.batch > 1 else ""
    yield "asked", f"{output.count(report.done, 'request')}, {how}{together}"
    yield "differ", _differ(report.speculation.requests, report)
    if report.divergences:
        yield "verdicts", ", ".join(f"{number} {verdict.value}" for verdict, number in report.verdicts().items())
        yield "first", f"position {min(difference.position for difference in report.divergences)} after the prompt"
    yield "control", f"plain against plain: {_differ(report.control.requests, report)}"
    yield (
        "logprobs",
        f"{report.speculation.apart:.3g} nats apart at most (same token, same context); control "
        f"{report.control.apart:.3g}: {report.logprobs_verdict.value}",
    )
    tie, real = report.limits.tie, report.limits.real
    between = "" if tie == real else f", beyond {real:.3g} none is; between them nobody can tell without --tolerance"
    yield "rounding", f"gaps up to {tie:.3g} nats are ties{between}"


def _differ(number: int, report: ComparisonReport) -> str:
    return f"{number} of {output.count(report.done, 'request')} ({number / report.done:.1%})"

"""``specdec audit``: compare a server's answers with and without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec.cli import measuring, output
from specdec.cli.options import (
    FILE,
    LARGEST,
    TEXT,
    Number,
    flag_overrides,
    ignore_eos,
    integer,
    interruptible,
    max_new_tokens,
    seed,
    temperature,
)
from specdec.config import load_config
from specdec.errors import PromptError, shown

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.measuring.comparison import ComparisonReport
    from specdec.measuring.prompts import Prompt

SHOWN = 10  # differences listed on a terminal; --json has all
SHORT = 24  # characters of a token there
PER_CLASS = 4  # of specdec's own prompts
REQUEST = ("max_new_tokens", "temperature", "seed", "ignore_eos")


@click.command()
@click.option(
    "--server",
    "servers",
    metavar="URL",
    type=TEXT,
    multiple=True,
    required=True,
    help="An OpenAI-compatible server; give two, the plain one first. The same one twice shows its own noise.",
)
@click.option("-m", "--model", metavar="NAME", type=TEXT, help="The servers' model, if they have several.")
@click.option("-p", "--prompt", metavar="TEXT", type=TEXT, help="One text to continue.")
@click.option("--prompts", "prompts_file", metavar="FILE", type=FILE, help="Texts to continue, as for accept.")
@integer("--per-class", "Prompts per class (default 4 of specdec's own)")
@integer("--batch", "Send N requests together, each beside a sampled one that is not judged", 1, high=256)
@click.option(
    "--timeout", type=Number(0.001, LARGEST), default=300, metavar="S", help="Seconds without a byte (default 300)."
)
@click.option("--api-key", envvar="SPECDEC_API_KEY", metavar="KEY", type=TEXT, help="Better as SPECDEC_API_KEY.")
@max_new_tokens("Maximum new tokens.")
@temperature
@seed
@ignore_eos
@click.option(
    "--tolerance",
    type=Number(0.0),
    metavar="NATS",
    help="The gap that rounding may explain; without it, what any number format explains is not judged.",
)
@output.json_option
@click.pass_context
def audit(
    ctx: click.Context,
    /,
    servers: tuple[str, ...],
    model: str | None,
    prompt: str | None,
    prompts_file: str | None,
    per_class: int | None,
    batch: int,
    timeout: float,
    api_key: str | None,
    tolerance: float | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Compare servers' answers with and without speculation.

    Requests are answered plain, with speculation, and plain again. A request that differs is a "tie within rounding",
    has an "other token with a real gap", or one "cannot tell", judged by the plain answer's log-probabilities. After a
    tie both go on from the plain token. The exit status is 1 if a gap is real. With --batch, the plain answers come
    one at a time, and the others together, as a busy server decodes them.

    The prompts are specdec's own, those of --prompts, or one of --prompt; they are sent as texts, without a chat
    template.
    """
    if len(servers) != 2:
        raise click.UsageError(
            f"--server: give two, a plain and a speculative one, got {len(servers)}; the same one twice shows its own "
            "noise."
        )
    generation = load_config(None, list(flag_overrides(settings))).generation
    if generation.temperature > 0 and tolerance is not None:
        raise click.UsageError("--tolerance: it is a distance from the best token, and these requests are sampled.")

    from specdec.decoding.parts import with_seed
    from specdec.measuring.comparison import Comparison, Verdict
    from specdec.measuring.server import Request, ServerEngine

    prompts = _prompts(prompt, prompts_file, per_class)
    plain, speculative = (ServerEngine(url, model, api_key=api_key, timeout=timeout) for url in servers)
    sent = attrs.asdict(with_seed(generation), recurse=False)
    request = Request(**{name: sent[name] for name in REQUEST if sent[name] is not None})
    with output.progress("asking", then="requests", silent=as_json) as advance:
        comparison = Comparison(
            plain, speculative, prompts, request, tolerance=tolerance, batch=batch, progress=advance
        )
        with interruptible(comparison):
            report = comparison.run()
    if report.done and not report.tokens and not report.differences:
        raise PromptError("every answer is empty: nothing was compared", try_="--ignore-eos, or other prompts")
    if as_json:
        output.print_json(report.to_dict())
    else:
        _show(report, output.console())
    if report.failure is not None:
        click.echo(f"ended early: this covers {report.done} of {report.planned} requests", err=True)
        raise report.failure
    if report.logprobs_verdict is Verdict.REAL:
        apart = f"{report.speculation.apart:.3g} nats, which rounding does not explain"
        click.echo(f"warning: log-probabilities of equal tokens in the same context differ by {apart}", err=True)
    real = {difference.request for difference in report.differences if difference.verdict is Verdict.REAL}
    if real:
        click.echo(
            f"error: {output.count(len(real), 'request')} got another token with a real gap: this is a bug, unless the "
            f"speculation is lossy on purpose; then --tolerance says by how much",
            err=True,
        )
        ctx.exit(output.BROKEN_PROMISE)
    if report.partial:
        output.interrupted(ctx, f"this covers {report.done} of {report.planned} requests")


def _prompts(text: str | None, file: str | None, per_class: int | None) -> list[Prompt]:
    from specdec.measuring.prompts import Prompt

    if text is not None:
        if file is not None or per_class is not None:
            raise click.UsageError("--prompts and --per-class: with one prompt of your own, leave them out.")
        return [Prompt(kind="prompts", text=text)]
    chosen = measuring.chosen_prompts(file, per_class or (PER_CLASS if file is None else None), chat=False)
    return [prompt for group in chosen.values() for prompt in group]


# --- the report ------------------------------------------------------------------------------------------------------


def _show(report: ComparisonReport, console: Console) -> None:
    """The summary, the histogram of gaps, and the first differences."""
    console.print(output.facts(_summary(report)))
    bins = [
        (f"{low:g} and more" if high == float("inf") else f"{low:g} to {high:g}", str(positions), str(differing))
        for low, high, positions, differing in report.histogram()
    ]
    console.print()
    console.print(output.table(("top-two gap (nats)", "positions", "differences"), bins))
    if not report.differences:
        return
    headings = ("request", "position", "token", "plain decoding", "gap", "top-two gap", "verdict")
    rows = [
        (
            *map(str, (difference.request, difference.position)),
            *(
                shown(token, SHORT) if isinstance(token, str) else str(token)
                for token in (difference.token, difference.chosen)
            ),
            *(f"{gap:.4g}" for gap in (difference.gap, difference.top_two)),
            difference.verdict.value,
        )
        for difference in report.differences[:SHOWN]
    ]
    if len(report.differences) > SHOWN:
        rows.append((f"... {len(report.differences) - SHOWN} more with --json", *[""] * (len(headings) - 1)))
    console.print()
    console.print(output.table(headings, rows, left=("verdict",)))
    reasons = (f"request {difference.request}: {difference.reason}" for difference in report.differences[:SHOWN])
    output.lines(console, "why", reasons)


def _summary(report: ComparisonReport) -> Iterator[tuple[str, str]]:
    request = report.request
    how = f"{measuring.sampling(request)}, {request.max_new_tokens} tokens at most"
    yield "plain", report.plain
    yield "speculative", report.speculative
    together = f", {report.batch} together, each beside a sampled one" if report.batch > 1 else ""
    yield "asked", f"{output.count(report.done, 'request')}, {how}{together}"
    yield "differ", _differ(report.speculation.requests, report)
    if report.differences:
        yield "verdicts", ", ".join(f"{number} {verdict.value}" for verdict, number in report.verdicts().items())
        yield "first", f"position {min(difference.position for difference in report.differences)} after the prompt"
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

"""``specdec accept``: acceptance by prompt class and lookahead position, and whether speculation pays."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec.cli import measuring, output
from specdec.cli.measuring import between
from specdec.cli.options import PATH, SAMPLING, configured, integer, interruptible, refuse
from specdec.cli.run_report import acceptance_table
from specdec.config import Choice, Override, RunConfig

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.measuring.acceptance import AcceptanceReport, ClassReport
    from specdec.measuring.prompts import PromptSet

SHOWN_DEPTHS = 8  # speed-up columns on a terminal; --json has all
SHOWN_MISMATCHES = 5


@click.command()
@configured("Maximum tokens per prompt", new_tokens=48, example="drafter.max_order=3", own=("depth",))
@measuring.measured(per_class=None)
@integer("--depth", "Tokens drafted per cycle", 4)
@click.option("--passive", is_flag=True, help="Draft at every plain step and verify nothing: the output cannot change.")
@click.option("--ablate", metavar="A,B", help='Also measure the MTP head with known mistakes: a list, or "all".')
@click.option(
    "--log", "log_file", metavar="FILE", type=PATH, help="Write each draft with the actual output (JSON lines)."
)
@click.option(
    "--trace", "trace_file", metavar="FILE", type=PATH, help="Judge the drafter on recorded traffic; no model runs."
)
@output.json_option
@click.pass_context
def accept(
    ctx: click.Context,
    config: RunConfig,
    prompts: PromptSet,
    html: pathlib.Path | None,
    depth: int,
    passive: bool,
    ablate: str | None,
    log_file: pathlib.Path | None,
    trace_file: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Measure acceptance and say whether speculation pays.

    Generates from prompts of several classes at one fixed depth, counts accepted tokens by lookahead position, measures
    the cost of a cycle, and predicts the speed-up of every depth. The verdict on a class is "turn on" if the lower end
    of the predicted speed-up is above 1.05 at the best depth, "not worth it" if its upper end is below 1.02, otherwise
    "worth trying".

    With --passive the target decodes plainly, and each draft is compared with what it then generated. Use it where
    parity is numeric: there a pass of several rows may change the output that is being measured.

    A configuration's depth policy is not used: an adaptive policy drafts deep only where drafts are good. Without
    --prompts, specdec's own are used: factual, verbose-thinking, code, instruction and copy (texts to repeat with a
    small change).

    With --trace, what was generated is taken from a recording of specdec generate --trace or of another engine
    (SPECDEC_TRACE), and compared with what --drafter drafts: how many passes of the target would it have saved?

    Ctrl-C ends the measurement; the report then covers the finished prompts. The exit status is 1 if a mistake
    switched on with --ablate changed the output although verifier and backend promise that no draft can.
    """
    for override in map(Override.parse, ctx.params["settings"]):
        if override.path[0] == "depth":
            raise click.UsageError(f"{override.source}: the depth is fixed here, give it with --depth.")
    if trace_file is not None:
        _judge_traffic(ctx, config, trace_file, depth, as_json=as_json)
        return
    from specdec.measuring.ablations import parse_switches
    from specdec.measuring.acceptance import AcceptanceMeasurement
    from specdec.measuring.drafts import DraftLog
    from specdec.measuring.plots import plot_acceptance

    switches = () if ablate is None else parse_switches(ablate)
    measuring.check_writable(log_file)

    log: DraftLog | None = None

    def make(lm: Any, **options: Any) -> AcceptanceMeasurement:
        nonlocal log
        if log_file is not None:
            log = DraftLog(log_file, lm.tokenizer)
            options["on_run"] = log.add
        return AcceptanceMeasurement(lm, prompts, depth=depth, ablations=switches, passive=passive, **options)

    config = attrs.evolve(config, depth=Choice("fixed"))
    report = measuring.measure(config, make, "measuring costs", silent=as_json)
    measuring.finish(
        ctx,
        report,
        html,
        show=show,
        plot=plot_acceptance,
        as_json=as_json,
        changed="a mistake in the head changed some",
        done=f"{report.done} of {report.planned} prompts",
        log=log,
    )


# --- recorded traffic ------------------------------------------------------------------------------------------------

_OF_A_MODEL = (
    *("prompts_file", "classes", "per_class", "html_file", "passive", "ablate", "log_file"),
    *("max_new_tokens", *SAMPLING, "weights", "verifier_part"),
)


def _judge_traffic(
    ctx: click.Context, config: RunConfig, trace_file: pathlib.Path, depth: int, *, as_json: bool
) -> None:
    """``accept --trace``."""
    why = "with --trace no model runs, and the prompts are the file's."
    refuse(_OF_A_MODEL, why)
    for override in map(Override.parse, ctx.params["settings"]):
        if override.path[0] != "drafter" and override.path not in (("target", "model"), ("target", "revision")):
            raise click.UsageError(f"{override.source}: {why}")
    if config.drafter.name == "auto":
        raise click.UsageError("--trace: name the drafter to judge, such as --drafter ngram.")
    from specdec.checkpoints import locate
    from specdec.measuring.traffic import TrafficReplay
    from specdec.text import Tokenizer

    tokenizer = Tokenizer.from_checkpoint(locate(config.target.model, revision=config.target.revision))
    with output.progress("replaying", silent=as_json) as advance:
        traffic = TrafficReplay(trace_file, config.drafter, depth=depth, tokenizer=tokenizer, progress=advance)
        with interruptible(traffic):
            report = traffic.run()
    if as_json:
        output.print_json(report)
    else:
        _show_traffic(report)
    if report["done"] < report["planned"]:
        output.interrupted(ctx, f"this covers {report['done']} of {report['planned']} requests")


def _show_traffic(report: Mapping[str, Any]) -> None:
    console = output.console()
    passes, each = report["passes"], report["tokens_per_pass"]
    rows = [
        ("drafter", f"{report['drafter']} at depth {report['depth']}"),
        ("traffic", f"{output.count(report['done'], 'request')} recorded by {', '.join(report['hosts'])}"),
        ("generated", output.count(report["tokens"], "token")),
        ("passes", f"{passes} instead of {report['tokens']}: {each:.2f} tokens per pass" if each else "none"),
        ("drafting", f"{1e3 * report['draft_seconds'] / max(passes, 1):.3g} ms per pass, on this machine"),
    ]
    if report["failed"]:
        rows.append(("switched off", f"in {report['failed']} requests: {report['reason']}"))
    if report["cut_line"]:
        rows.append(("left out", f"line {report['cut_line']}, the last one, which is incomplete"))
    console.print(output.facts(rows))
    if report["offered"]:
        console.print()
        console.print(acceptance_table(report))
    console.print("\nPasses are counted, not timed: specdec accept without --trace prices them on a model.")


# --- the report ------------------------------------------------------------------------------------------------------


def show(report: AcceptanceReport, console: Console) -> None:
    """Tables and notes."""
    section = functools.partial(output.section, console)
    groups = [*report.classes, report.overall] if len(report.classes) > 1 else list(report.classes)
    console.print(output.facts(_summary(report)))
    headings = ["class", "position", "offered", "reached", "accepted", "cond.", "cumul.", "interval"]
    section(
        "Acceptance by lookahead position",
        output.table(headings, _positions(groups)),
        "Position 0 is the next token. Conditional = accepted / reached: right, given that the tokens before were. "
        "Cumulative = accepted / offered: the share of drafted tokens that became output. The interval is the 95% "
        "interval of the cumulative rate over such prompts.",
    )
    section(
        "Cost and break-even of each depth",
        output.table(("depth", "cycle (ms)", "plain steps", "break-even"), _costs(report), left=()),
        "A plain step emits one token. break-even: the conditional acceptance, equal at every position, at which "
        "the depth is as fast as plain decoding.",
    )
    depths = range(1, min(report.depth, SHOWN_DEPTHS) + 1)
    section(
        "Predicted speed-up over plain decoding, by depth",
        output.table(("class", *(f"depth {k}" for k in depths)), (_speedups(group, depths) for group in groups)),
        "Expected tokens per cycle over its cost in plain steps. This is a prediction: specdec generate shows the "
        "speed of a run.",
    )
    headings = ["class", "verdict", "best depth", "speed-up", "interval", "tokens per cycle", "decided by"]
    left = ("class", "verdict", "decided by")
    passive = "Passive: no draft was verified; the speed-ups follow from the rates and the costs above."
    section("Verdict", output.table(headings, map(_verdict, groups), left=left), *([passive] if report.passive else []))
    rows = [(one.kind, str(one.accepted), str(one.rejected), output.share(one.rate)) for one in report.kinds]
    section(
        "Accepted and rejected by kind of token",
        output.table(("token", "accepted", "rejected", "rate"), rows),
        "The kind is that of the output's token. Special ones are the tokenizer's; of the others, the most frequent "
        "ones that make up half of the tokens of this measurement are common.",
    )
    if report.mismatches:
        rows = [
            (repr(one.drafted), repr(one.actual), str(one.count), f"{one.share:.1%}")
            for one in report.mismatches[:SHOWN_MISMATCHES]
        ]
        headings = ["drafted", "became", "times", "of all mismatches"]
        section("Commonest mismatches", output.table(headings, rows, left=headings[:2]))
    if report.ablations:
        positions = [f"at {i}" for i in range(min(report.depth, SHOWN_DEPTHS))]
        headings = ["mistake", *positions, "tokens per cycle", "change", "interval", "same output"]
        section(
            "The MTP head with one mistake at a time",
            output.table(headings, _ablations(report)),
            "at i: the cumulative rate at position i, over the same prompts. same output: prompts with the same tokens "
            "as the correct head; a drafter's mistake must never change them.",
            *(f"{one.switch}: {one.mistake}{f' ({one.note})' if one.note else ''}." for one in report.ablations),
        )
    output.lines(console, "note", report.notices)


def _summary(report: AcceptanceReport) -> list[tuple[str, str]]:
    done = output.count(report.done, "prompt")
    if report.partial:
        done = f"{report.done} of {report.planned} prompts, interrupted"
    chat = f", {report.overall.chat} of them in the chat template" if report.overall.chat else ""
    drafts = f"drafter {report.drafter} at depth {report.depth}{', passive' if report.passive else ''}"
    how = f"{drafts}, {measuring.sampling(report)}, verifier {report.verifier}"
    return [
        ("measured", how),
        ("prompts", f"{done}{chat}, at most {output.count(report.max_new_tokens, 'token')} each"),
        *measuring.environment(report.environment),
    ]


def _positions(groups: Sequence[ClassReport]) -> Iterator[tuple[str, ...]]:
    for group in groups:
        for place in group.positions:
            yield (
                group.name if place.position == 0 else "",
                *map(str, (place.position, place.offered, place.reached, place.accepted)),
                output.share(place.conditional),
                output.share(place.cumulative),
                between(place.cumulative_interval),
            )


def _costs(report: AcceptanceReport) -> Iterator[tuple[str, ...]]:
    yield "0", f"{1e3 * report.costs[0].seconds / report.costs[0].cost:.3f}", "1.00", "-"
    for one in report.costs:
        needed = "never" if one.break_even is None else f"{one.break_even:.3f}"
        yield str(one.depth), f"{1e3 * one.seconds:.3f}", f"{one.cost:.2f}", needed


def _speedups(group: ClassReport, depths: range) -> tuple[str, ...]:
    by_depth = {one.depth: f"{one.speedup:.2f}x" for one in group.predictions}
    return (group.name, *(by_depth.get(k, "-") for k in depths))


def _verdict(group: ClassReport) -> tuple[str, ...]:
    best, verdict = group.best, group.verdict.value if group.verdict else "-"
    if best is None:
        return group.name, verdict, "-", "-", "-", "-", group.decided_by
    figures = (str(best.depth), f"{best.speedup:.2f}x", between(best.interval, ".2f", "x"), f"{best.tokens:.2f}")
    return group.name, verdict, *figures, group.decided_by


def _ablations(report: AcceptanceReport) -> Iterator[tuple[str, ...]]:
    def row(name: str, rates: Sequence[float | None], tokens: float, *rest: str) -> tuple[str, ...]:
        return (name, *map(output.share, rates[:SHOWN_DEPTHS]), f"{tokens:.2f}", *rest)

    first = report.ablations[0]
    yield row("none", first.cumulative_right, first.tokens_per_cycle_right, "", "", "")
    for one in report.ablations:
        change = (f"{one.change:+.1%}", between(one.change_interval, "+.1%"), f"{one.equal} of {one.prompts}")
        yield row(one.switch, one.cumulative, one.tokens_per_cycle, *change)

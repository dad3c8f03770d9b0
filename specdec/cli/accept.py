"""``specdec accept``: acceptance by prompt class and lookahead position, and whether speculation pays."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec.cli import measuring, output
from specdec.cli.measuring import (
    check_writable,
    chosen_prompts,
    config_of_length,
    named_files,
    progress,
    tell_files,
    write_csv,
)
from specdec.cli.run_options import flag_overrides, interruptible
from specdec.config import Choice, Override, RunConfig

if TYPE_CHECKING:
    from rich.table import Table

    from specdec.measuring import AcceptanceReport, ClassReport

NEW_TOKENS = 48  # per prompt, where neither the configuration nor an option says
SHOWN_DEPTHS = 8  # columns of predicted speed-ups on a terminal; --json and --csv have all
SHOWN_MISMATCHES = 5


@click.command()
@click.argument("config_file", metavar="[CONFIG]", required=False, type=click.Path(path_type=pathlib.Path))
@click.option("-m", "--model", help='A folder, a hub id or "demo"; short for -s target.model=...')
@click.option(
    "--prompts",
    "prompts_file",
    metavar="FILE",
    help='Your prompts: JSON lines with "class" and "prompt", or plain text, one prompt per line.',
)
@click.option("--classes", metavar="A,B", help="Measure these prompt classes only.")
@click.option(
    "--per-class", type=click.IntRange(1), metavar="N", help="The first N prompts of each class; all if unset."
)
@click.option("--depth", type=click.IntRange(1), default=4, show_default=True, help="Tokens drafted per cycle.")
@click.option(
    "-n", "--max-new-tokens", type=int, metavar="N", help=f"Tokens per prompt, at most; {NEW_TOKENS} if unset."
)
@click.option("-t", "--temperature", type=float, metavar="X", help="0 is greedy.")
@click.option("--seed", type=int, metavar="S", help="One seed, one output.")
@click.option("--ablate", metavar="A,B", help='Measure the MTP head with known mistakes too: a list of them, or "all".')
@click.option(
    "--log",
    "log_file",
    metavar="FILE",
    type=click.Path(path_type=pathlib.Path),
    help="Write each draft beside what became output (JSON lines).",
)
@click.option("--csv", "csv_file", metavar="FILE", type=click.Path(path_type=pathlib.Path), help="Write the table.")
@click.option(
    "--plot", "plot_file", metavar="FILE", type=click.Path(path_type=pathlib.Path), help="Draw a PNG (matplotlib)."
)
@click.option("-s", "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key: drafter.name=ngram.")
@output.json_option
@click.pass_context
def accept(
    ctx: click.Context,
    config_file: pathlib.Path | None,
    model: str | None,
    prompts_file: str | None,
    classes: str | None,
    per_class: int | None,
    depth: int,
    max_new_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    ablate: str | None,
    log_file: pathlib.Path | None,
    csv_file: pathlib.Path | None,
    plot_file: pathlib.Path | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure acceptance and say whether speculation pays.

    Generates from prompts of several classes at one fixed depth, counts what was accepted by lookahead position,
    measures what a cycle costs here, and predicts the speed-up of every depth from both. The verdict on a class is
    "turn on" when the lower end of the predicted speed-up is above 1.05 at the best depth, "not worth it" when its
    upper end is below 1.02, otherwise "worth trying".

    The depth policy of CONFIG is not used: a policy that adapts would draft deep only where drafts are good. Without
    --prompts specdec's own are used: factual, verbose-thinking, code and instruction.

    Ctrl-C ends the measurement; the report then is of the prompts that were done. The exit status is 1 when a mistake
    that was switched on with --ablate changed the output although verifier and backend promise that no draft can.
    """
    flags: dict[str, Any] = {
        "target.model": model,
        "generation.max_new_tokens": max_new_tokens,
        "generation.temperature": temperature,
        "generation.seed": seed,
    }
    config = _config(config_file, [*map(Override.parse, settings), *flag_overrides(flags)])

    import specdec
    from specdec.measuring.acceptance import AcceptanceRun
    from specdec.measuring.patterns import PatternLog

    # all that can be wrong is said before weights are read
    chosen = chosen_prompts(prompts_file, classes, per_class)
    switches: tuple[str, ...] = ()
    if ablate is not None:
        from specdec.models.ablation import parse_switches

        switches = parse_switches(ablate)
    check_writable(csv_file, log_file, plot=plot_file)

    log: PatternLog | None = None
    try:
        with output.status(f"loading {config.target.model}"):
            lm = specdec.load(config=config)
        with progress("measuring costs", silent=as_json) as advance:
            run = AcceptanceRun(
                lm,
                chosen,
                depth=depth,
                ablations=switches,
                progress=advance,
                on_run=lambda one: log.add(one, lm.tokenizer) if log is not None else None,
                model=config.target.model,
            )
            if log_file is not None:  # not before: a measurement that cannot start must not empty an older log
                log = PatternLog(log_file)
            with interruptible(run):
                report = run.run()
    finally:
        if log is not None:
            log.close()
    files = {"log": log_file, "csv": csv_file, "plot": plot_file}
    if as_json:
        output.print_json({**report.to_dict(), **named_files(files)})
    else:
        show(report)
    if csv_file is not None:
        write_csv(report.rows(), csv_file)
    if plot_file is not None:
        from specdec.measuring.plots import plot_acceptance

        plot_acceptance(report, plot_file)
    if not as_json:
        tell_files(files)
    if report.broken_promise:
        click.echo(
            "the verifier promises the tokens of plain decoding and the backend its bits, and a mistake in the head "
            "changed some: this is a bug",
            err=True,
        )
        ctx.exit(measuring.BROKEN_PROMISE)
    if report.partial:
        click.echo(f"interrupted: this is of {report.done} of {report.planned} prompts", err=True)
        ctx.exit(output.INTERRUPTED)


def _config(file: pathlib.Path | None, overrides: Sequence[Override]) -> RunConfig:
    """The configuration with the depth policy put aside, and shorter generations where nobody gave a length."""
    for override in overrides:
        if override.path[0] == "depth":
            raise click.UsageError(f"{override.source}: the depth is fixed here, give it with --depth.")
    return attrs.evolve(config_of_length(file, overrides, NEW_TOKENS), depth=Choice("fixed"))


# --- the report ------------------------------------------------------------------------------------------------------


def show(report: AcceptanceReport) -> None:
    """Tables on stdout, for people."""
    console = output.console()
    groups = [*report.classes, report.overall] if len(report.classes) > 1 else list(report.classes)
    console.print(output.facts(_summary(report)))

    def section(title: str, table: Table, *explained: str) -> None:
        console.print()
        console.print(title, style="bold")
        console.print(table)
        for line in explained:
            console.print(line, style="dim")

    section(
        "Acceptance by lookahead position",
        _positions(groups),
        "Position 0 is the next token. conditional = accepted / reached: right, given that the tokens before were. "
        "cumulative = accepted / offered: a token drafted there became output, which is what pays. The interval holds "
        "95 % of what other prompts like these would give for the cumulative rate.",
    )
    section(
        "What a depth costs and must earn",
        _costs(report),
        "A plain step emits one token. break-even: the conditional acceptance, the same at every position, with which "
        "the depth is as fast as plain decoding.",
    )
    section(
        "Predicted speed-up over plain decoding, by depth",
        _predictions(groups, report.depth),
        "Tokens that a cycle is expected to emit, over what it costs in plain steps. It is a prediction: "
        "specdec generate shows the speed of a run.",
    )
    section("Verdict", _verdicts(groups, report.depth), _cycle_line(report))
    if report.mismatches:
        section("Commonest mismatches", _mismatches(report))
    if report.ablations:
        section(
            "The MTP head with one mistake at a time",
            _ablations(report),
            "at i: the cumulative rate at position i, over the same prompts. same output: prompts whose tokens are "
            "those of the right head; a mistake in a drafter must never change them.",
            *(f"{one.switch}: {one.mistake}{f' ({one.note})' if one.note else ''}." for one in report.ablations),
        )
    for notice in report.notices:
        console.print(f"note: {notice}")


def _summary(report: AcceptanceReport) -> list[tuple[str, str]]:
    env = report.environment
    how = "greedy" if report.temperature == 0 else f"temperature {report.temperature:g}, seed {report.seed}"
    done = output.count(report.done, "prompt")
    if report.partial:
        done = f"{report.done} of {report.planned} prompts, interrupted"
    chat = f", {report.overall.chat} of them in the chat template" if report.overall.chat else ""
    load = "" if env.load_1min is None else f", load {env.load_1min:.2f}"
    commit = f" ({env.commit})" if env.commit else ""
    return [
        ("measured", f"drafter {report.drafter} at depth {report.depth}, {how}, verifier {report.verifier}"),
        ("prompts", f"{done}{chat}, at most {output.count(report.max_new_tokens, 'token')} each"),
        ("model", f"{env.model}, {env.family}, {env.dtype} on {env.device}"),
        ("machine", f"{env.processor}, {output.count(env.threads, 'thread')}{load}; specdec {env.specdec}{commit}"),
    ]


def _positions(groups: Sequence[ClassReport]) -> Table:
    numbers = ("position", "offered", "reached", "accepted", "conditional", "cumulative", "95 % interval")
    table = output.table("class", *numbers, right=numbers)
    for group in groups:
        for place in group.positions:
            table.add_row(
                group.name if place.position == 0 else "",
                str(place.position),
                str(place.offered),
                str(place.reached),
                str(place.accepted),
                _share(place.conditional),
                _share(place.cumulative),
                _between(place.cumulative_interval),
            )
    return table


def _costs(report: AcceptanceReport) -> Table:
    columns = ("depth", "cycle (ms)", "plain steps", "break-even")
    table = output.table(*columns, right=columns)
    table.add_row("0", f"{1e3 * report.costs[0].seconds / report.costs[0].cost:.3f}", "1.00", "-")
    for one in report.costs:
        needed = "never" if one.break_even is None else f"{one.break_even:.3f}"
        table.add_row(str(one.depth), f"{1e3 * one.seconds:.3f}", f"{one.cost:.2f}", needed)
    return table


def _predictions(groups: Sequence[ClassReport], depth: int) -> Table:
    shown = range(1, min(depth, SHOWN_DEPTHS) + 1)
    numbers = [f"depth {k}" for k in shown]
    table = output.table("class", *numbers, right=numbers)
    for group in groups:
        by_depth = {one.depth: one for one in group.predictions}
        table.add_row(group.name, *(f"{by_depth[k].speedup:.2f}x" if k in by_depth else "-" for k in shown))
    return table


def _verdicts(groups: Sequence[ClassReport], depth: int) -> Table:
    numbers = ("best depth", "speed-up", "95 % interval", "tokens per cycle")
    table = output.table("class", "verdict", *numbers, "decided by", right=numbers)
    for group in groups:
        found = group.best
        table.add_row(
            group.name,
            group.verdict.value if group.verdict else "-",
            str(found.depth) if found else "-",
            f"{found.speedup:.2f}x" if found else "-",
            _between(found.interval if found else None, "x", 2),
            f"{found.tokens:.2f}" if found else "-",
            group.decided_by,
        )
    return table


def _cycle_line(report: AcceptanceReport) -> str:
    overall, table = report.overall, report.costs[-1]
    if overall.cycle_seconds is None or overall.clocked is None or not overall.predictions:
        return "No cycle ran at the full depth."
    parts = ", ".join(f"{phase} {1e3 * seconds:.3f}" for phase, seconds in overall.seconds_per_cycle.items())
    return (
        f"A cycle of depth {report.depth} took {1e3 * overall.cycle_seconds:.3f} ms in this run ({parts}; medians), "
        f"against {1e3 * table.seconds:.3f} in the costs above: {overall.clocked:.2f}x by this run's clock, "
        f"{overall.predictions[-1].speedup:.2f}x predicted."
    )


def _mismatches(report: AcceptanceReport) -> Table:
    table = output.table("drafted", "became", "times", "of all mismatches", right=("times", "of all mismatches"))
    for one in report.mismatches[:SHOWN_MISMATCHES]:
        table.add_row(repr(one.drafted), repr(one.actual), str(one.count), f"{one.share:.1%}")
    return table


def _ablations(report: AcceptanceReport) -> Table:
    numbers = [f"at {i}" for i in range(min(report.depth, SHOWN_DEPTHS))]
    numbers += ["tokens per cycle", "change", "95 % interval", "same output"]
    table = output.table("mistake", *numbers, right=numbers)

    def row(name: str, rates: Sequence[float | None], tokens: float, *rest: str) -> None:
        table.add_row(name, *(_share(rate) for rate in rates[:SHOWN_DEPTHS]), f"{tokens:.2f}", *rest)

    first = report.ablations[0]
    row("none", first.cumulative_right, first.tokens_per_cycle_right, "", "", "")
    for one in report.ablations:
        ends = "-" if one.change_interval is None else " to ".join(f"{end:+.1%}" for end in one.change_interval)
        same = f"{one.equal} of {one.prompts}"
        row(one.switch, one.cumulative, one.tokens_per_cycle, f"{one.change:+.1%}", ends, same)
    return table


def _share(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3f}"


def _between(ends: tuple[float, float] | None, unit: str = "", digits: int = 3) -> str:
    return "-" if ends is None else f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}{unit}"

"""``specdec bench``: plain against speculative decoding, with the time taken apart."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
from specdec.config import Override

if TYPE_CHECKING:
    from rich.table import Table

    from specdec.measuring.bench import BenchReport, ClassBench

NEW_TOKENS = 96
PER_CLASS = 3

_PATH = click.Path(path_type=pathlib.Path)


@click.command()
@click.argument("config_file", metavar="[CONFIG]", required=False, type=_PATH)
@click.option("-m", "--model", help='A folder, a hub id or "demo"; short for -s target.model=...')
@click.option(
    "--prompts",
    "prompts_file",
    metavar="FILE",
    help='Your prompts: JSON lines with "class" and "prompt", or plain text, one prompt per line.',
)
@click.option("--classes", metavar="A,B", help="Only these classes of prompts.")
@click.option("--per-class", type=click.IntRange(min=1), default=PER_CLASS, show_default=True, metavar="N")
@click.option("-n", "--max-new-tokens", type=int, metavar="N", help=f"Generated per prompt; {NEW_TOKENS} unless given.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="A B B A rounds per prompt.")
@click.option("--temperature", type=float, metavar="X", help="0 (the default) is greedy.")
@click.option("--seed", type=int, metavar="S", help="One seed, one output.")
@click.option("--contexts", metavar="N,N", help="Also measure prefill and generation after so many tokens of context.")
@click.option(
    "--synthetic",
    metavar="PROFILE",
    help='Impose an acceptance: "code", "mixed", "prose", or cumulative rates like 0.8,0.6. A timing, not a result.',
)
@click.option("--csv", "csv_file", metavar="FILE", type=_PATH, help="Write every run.")
@click.option("--plot", "plot_file", metavar="FILE", type=_PATH, help="Draw a PNG (matplotlib).")
@click.option("-s", "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key: depth.depth=4.")
@output.json_option
@click.pass_context
def bench(
    ctx: click.Context,
    config_file: pathlib.Path | None,
    model: str | None,
    prompts_file: str | None,
    classes: str | None,
    per_class: int,
    max_new_tokens: int | None,
    repeats: int,
    temperature: float | None,
    seed: int | None,
    contexts: str | None,
    synthetic: str | None,
    csv_file: pathlib.Path | None,
    plot_file: pathlib.Path | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare speculative with plain decoding.

    Both arms run in one process on the same weights, every prompt as plain, speculative, speculative, plain. Their
    outputs are compared, and the time of a cycle is taken apart: what a plain step, a pass of more rows and a draft
    cost, what the costs predicted, and what keeps the speed-up from being larger. End tokens are ignored, so that both
    arms generate as much.

    Ctrl-C ends the comparison; the report then is of the prompts that were done. The exit status is 1 when the outputs
    differ although verifier and backend promise that they cannot.
    """
    flags: dict[str, Any] = {
        "target.model": model,
        "generation.max_new_tokens": max_new_tokens,
        "generation.temperature": temperature,
        "generation.seed": seed,
    }
    config = config_of_length(config_file, [*map(Override.parse, settings), *flag_overrides(flags)], NEW_TOKENS)
    lengths = _lengths(contexts)

    import specdec
    from specdec.measuring.bench import BenchRun
    from specdec.measuring.synthetic import parse_profile

    # all that can be wrong is said before weights are read
    chosen = chosen_prompts(prompts_file, classes, per_class)
    profile = None if synthetic is None else parse_profile(synthetic)
    check_writable(csv_file, plot=plot_file)

    with output.status(f"loading {config.target.model}"):
        lm = specdec.load(config=config)
    with progress("warming up", silent=as_json) as advance:
        run = BenchRun(
            lm,
            chosen,
            repeats=repeats,
            synthetic=profile,
            contexts=lengths,
            progress=advance,
            model=config.target.model,
        )
        with interruptible(run):
            report = run.run()
    files = {"csv": csv_file, "plot": plot_file if report.overall is not None else None}  # nothing to draw then
    if as_json:
        output.print_json({**report.to_dict(), **named_files(files)})
    else:
        show(report)
    if csv_file is not None:
        write_csv(report.rows(), csv_file)
    if files["plot"] is not None:
        from specdec.measuring.bench_plot import plot_bench

        plot_bench(report, files["plot"])
    if not as_json:
        tell_files(files)
    if report.broken_promise:
        click.echo(
            "the verifier promises the tokens of plain decoding and the backend its bits, and outputs differ: "
            "this is a bug",
            err=True,
        )
        ctx.exit(measuring.BROKEN_PROMISE)
    if report.partial:
        click.echo(f"interrupted: this is of {output.count(len(report.prompts), 'prompt')}", err=True)
        ctx.exit(output.INTERRUPTED)


def _lengths(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise click.BadParameter(f"contexts are lengths in tokens, from 1, got {text!r}.", param_hint="--contexts")
    return tuple(sorted({int(word) for word in words}))


# --- the report ------------------------------------------------------------------------------------------------------


def show(report: BenchReport) -> None:
    """Tables on stdout, for people."""
    console = output.console()
    console.print(output.facts(_summary(report)))

    def section(title: str, table: Table, *explained: str) -> None:
        console.print()
        console.print(title, style="bold")
        console.print(table)
        for line in explained:
            console.print(line, style="dim")

    if report.overall is not None:
        groups = [*report.classes, report.overall] if len(report.classes) > 1 else list(report.classes)
        section("Speed", _speeds(groups), _equality(report))
        section(
            "What the steps cost",
            _timings(report),
            "Medians and quartiles over cycles. A plain step is a whole cycle of plain decoding. A pass that verifies "
            "more rows reads the same weights once; how much more it costs decides what speculation can give.",
        )
        section("A mean speculative cycle", _terms(report), *_explained(report))
    if report.frontiers:
        section(
            "By length of the context",
            _frontiers(report),
            "Tokens per second. Prefill is over the tokens since the length before. Each generation starts from a "
            "restored copy of the state.",
        )
    if report.reasons:
        most = max(report.reasons, key=lambda reason: report.reasons[reason])
        runs = sum(len(one.speculative) for one in report.prompts)
        off = sum(report.reasons.values())
        console.print(f"note: speculation was off at the end of {off} of {output.count(runs, 'run')}: {most}")
    for notice in report.notices:
        console.print(f"note: {notice}")


def _summary(report: BenchReport) -> list[tuple[str, str]]:
    env = report.environment
    how = "greedy" if report.temperature == 0 else f"temperature {report.temperature:g}, seed {report.seed}"
    load = "" if env.load_1min is None else f", load {env.load_1min:.2f}"
    commit = f" ({env.commit})" if env.commit else ""
    rounds = output.count(report.repeats, "A B B A round")
    lines = [
        ("compared", f"drafter {report.drafter}, depth {report.depth_policy}, verifier {report.verifier}, {how}"),
        ("prompts", f"{len(report.prompts)}, {output.count(report.max_new_tokens, 'token')} each, {rounds}"),
        ("model", f"{env.model}, {env.family}, {env.dtype} on {env.device}"),
        ("machine", f"{env.processor}, {output.count(env.threads, 'thread')}{load}; specdec {env.specdec}{commit}"),
    ]
    if report.synthetic is not None:
        rates = ", ".join(f"{rate:g}" for rate in report.synthetic)
        lines.insert(0, ("SYNTHETIC", f"acceptance imposed (cumulative {rates}): a timing, not a result"))
    return lines


def _speeds(groups: Sequence[ClassBench]) -> Table:
    numbers = ("prompts", "plain", "speculative", "speed-up", "95 % interval", "tokens per cycle", "accepted at 0")
    table = output.table("class", *numbers, right=numbers)
    for group in groups:
        ends = "-" if group.interval is None else f"{group.interval[0]:.2f} to {group.interval[1]:.2f}x"
        first = f"{group.accepted[0] / group.offered[0]:.3f}" if group.offered else "-"
        table.add_row(
            group.name,
            str(group.prompts),
            f"{group.plain:.1f}",
            f"{group.speculative:.1f}",
            f"{group.speedup:.2f}x",
            ends,
            f"{group.tokens_per_cycle:.2f}",
            first,
        )
    return table


def _equality(report: BenchReport) -> str:
    about = "Tokens per second of decoding, prefill left out. "
    if report.synthetic is not None:
        return about + "Outputs were not compared: the acceptance was imposed."
    different = [one.prompt for one in report.prompts if one.differs_at is not None]
    if not different:
        return about + "All runs of every prompt gave the same tokens."
    return about + f"OUTPUTS DIFFER on {len(different)} of {len(report.prompts)} prompts, first on {different[0]}."


def _timings(report: BenchReport) -> Table:
    numbers = ("cycles", "median (ms)", "quartiles (ms)", "plain steps")
    table = output.table("step", *numbers, right=numbers)
    for one in report.timings:
        table.add_row(
            one.what,
            str(one.cycles),
            f"{one.median_ms:.3f}",
            f"{one.low_ms:.3f} to {one.high_ms:.3f}",
            f"{one.in_plain_steps:.3f}",
        )
    return table


def _terms(report: BenchReport) -> Table:
    numbers = ("predicted (ms)", "measured (ms)", "speed-up if free")
    table = output.table("part", *numbers, right=numbers)
    for term in report.terms:
        table.add_row(term.name, f"{term.predicted_ms:.3f}", f"{term.measured_ms:.3f}", f"{term.speedup_if_free:.2f}x")
    if report.speedup_if_accepted is not None:
        table.add_row("every draft accepted", "", "", f"{report.speedup_if_accepted:.2f}x")
    return table


def _explained(report: BenchReport) -> list[str]:
    lines = ["free: what the speed-up would be if this part cost no more than a plain step needs of it."]
    if not report.terms:
        lines = ["Cycles ran whole on the device, which does not tell their parts apart."]
    overall, blame = report.overall, report.blame
    if overall is not None and report.predicted_speedup is not None and blame is not None:
        lines.append(
            f"The costs measured beforehand predict {report.predicted_speedup:.2f}x at this acceptance, and "
            f"{overall.speedup:.2f}x was measured; {blame.name} differs most "
            f"({blame.measured_ms - blame.predicted_ms:+.3f} ms per cycle). What would gain most: {report.limit}."
        )
    shares = ", ".join(f"{share:.1%} of the {arm} arm" for arm, share in report.explained.items())
    lines.append(f"speed = tokens / (draft + verify + commit): the phases account for {shares}.")
    return lines


def _frontiers(report: BenchReport) -> Table:
    numbers = ("prefill plain", "prefill spec.", "plain", "speculative", "speed-up", "state", "save+restore", "same")
    table = output.table("context", *numbers, right=numbers)
    for one in report.frontiers:
        table.add_row(
            str(one.context),
            f"{one.prefill_plain:.0f}",
            f"{one.prefill_speculative:.0f}",
            f"{one.plain:.1f}",
            f"{one.speculative:.1f}",
            f"{one.speedup:.2f}x",
            f"{one.state_bytes / 2**20:.1f} MiB",
            f"{1e3 * one.save_seconds:.1f} ms",
            "yes" if one.equal else "NO",
        )
    return table

"""``specdec bench``: compare plain and speculative decoding, with a breakdown of the time."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from specdec.cli import measuring, output
from specdec.cli.measuring import between
from specdec.cli.options import configured, integer
from specdec.config import RunConfig

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.measuring.bench import BenchReport, ClassBench
    from specdec.measuring.prompts import PromptSet


@click.command()
@configured("Tokens to generate per prompt", new_tokens=96)
@measuring.measured(per_class=3)
@integer("--repeats", "A B B A rounds per prompt", 1, high=1_000_000)
@click.option(
    "--synthetic",
    metavar="PROFILE",
    help='Impose acceptance: "code", "mixed", "prose", or cumulative rates like 0.8,0.6. A timing, not a result.',
)
@output.json_option
@click.pass_context
def bench(
    ctx: click.Context,
    config: RunConfig,
    prompts: PromptSet,
    html: pathlib.Path | None,
    repeats: int,
    synthetic: str | None,
    as_json: bool,
) -> None:
    """Compare speculative with plain decoding.

    Both arms run in one process on the same weights: each prompt runs plain, speculative, speculative, plain. Compares
    the outputs and breaks down the time of a cycle: what a plain step, a pass of more rows and a draft cost, what the
    measured costs predicted, and what limits the speed-up. End tokens are ignored, so that both arms generate equally
    many tokens.

    Ctrl-C ends the comparison; the report then covers the finished prompts. The exit status is 1 if the outputs differ
    although verifier and backend promise that they cannot.
    """
    from specdec.measuring.bench import BenchMeasurement
    from specdec.measuring.plots import plot_bench
    from specdec.measuring.synthetic import parse_profile

    make = functools.partial(
        BenchMeasurement,
        prompts=prompts,
        repeats=repeats,
        synthetic=None if synthetic is None else parse_profile(synthetic),
    )
    report = measuring.measure(config, make, "warming up", silent=as_json)
    measuring.finish(
        ctx,
        report,
        html,
        show=show,
        plot=plot_bench if report.overall is not None else None,
        as_json=as_json,
        changed="outputs differ",
        done=output.count(len(report.prompts), "prompt"),
    )


# --- the report ------------------------------------------------------------------------------------------------------


def show(report: BenchReport, console: Console) -> None:
    """Tables and notes."""
    section = functools.partial(output.section, console)
    console.print(output.facts(_summary(report)))
    if report.overall is not None:
        groups = [*report.classes, report.overall] if len(report.classes) > 1 else list(report.classes)
        headings = ["class", "prompts", "plain", "spec.", "speed-up", "interval", "tokens per cycle", "accepted at 0"]
        section("Speed", output.table(headings, map(_speed, groups)), _equality(report))
        section(
            "What the steps cost",
            output.table(("step", "cycles", "median (ms)", "quartiles (ms)", "plain steps"), _timings(report)),
            "Medians and quartiles over cycles. A plain step is a whole cycle of plain decoding. A pass over more rows "
            "reads the same weights once; its extra cost limits the gain from speculation.",
        )
        headings = ["part", "predicted (ms)", "measured (ms)", "speed-up if free"]
        section("A mean speculative cycle", output.table(headings, _terms(report)), *_explained(report))
    if report.reasons:
        most = max(report.reasons, key=lambda reason: report.reasons[reason])
        runs = sum(len(one.speculative) for one in report.prompts)
        off = sum(report.reasons.values())
        console.print(f"note: speculation was off at the end of {off} of {output.count(runs, 'run')}: {most}")
    output.lines(console, "note", report.notices)


def _summary(report: BenchReport) -> list[tuple[str, str]]:
    how = f"verifier {report.verifier}, {measuring.sampling(report)}"
    rounds = output.count(report.repeats, "A B B A round")
    lines = [
        ("compared", f"drafter {report.drafter}, depth {report.depth_policy}, {how}"),
        ("prompts", f"{len(report.prompts)}, {output.count(report.max_new_tokens, 'token')} each, {rounds}"),
        *measuring.environment(report.environment),
    ]
    if report.synthetic is not None:
        rates = ", ".join(f"{rate:g}" for rate in report.synthetic)
        lines.insert(0, ("SYNTHETIC", f"acceptance imposed (cumulative {rates}): a timing, not a result"))
    return lines


def _speed(group: ClassBench) -> tuple[str, ...]:
    return (
        group.name,
        str(group.prompts),
        f"{group.plain:.1f}",
        f"{group.speculative:.1f}",
        f"{group.speedup:.2f}x",
        between(group.interval, ".2f", "x"),
        f"{group.tokens_per_cycle:.2f}",
        output.share(group.accepted[0] / group.offered[0] if group.offered else None),
    )


def _equality(report: BenchReport) -> str:
    about = "Tokens per second of decoding, prefill left out; 95 % intervals over prompts. "
    if report.synthetic is not None:
        return about + "Outputs were not compared: the acceptance was imposed."
    different = [one.prompt for one in report.prompts if one.differs_at is not None]
    if not different:
        return about + "All runs of every prompt gave the same tokens."
    return about + f"OUTPUTS DIFFER on {len(different)} of {len(report.prompts)} prompts, first on {different[0]}."


def _timings(report: BenchReport) -> Iterator[tuple[str, ...]]:
    for one in report.timings:
        quartiles = between((one.low_ms, one.high_ms))
        yield one.what, str(one.cycles), f"{one.median_ms:.3f}", quartiles, f"{one.in_plain_steps:.3f}"


def _terms(report: BenchReport) -> Iterator[tuple[str, ...]]:
    for term in report.terms:
        yield term.name, f"{term.predicted_ms:.3f}", f"{term.measured_ms:.3f}", f"{term.speedup_if_free:.2f}x"
    if report.speedup_if_accepted is not None:
        yield "every draft accepted", "", "", f"{report.speedup_if_accepted:.2f}x"


def _explained(report: BenchReport) -> Sequence[str]:
    lines = ["free: the speed-up if this part cost no more than in a plain step."]
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

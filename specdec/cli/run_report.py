"""The summary of a run: speed, speculation, guarantee, acceptance by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from specdec.cli import output


def report(told: Mapping[str, Any]) -> None:
    stats = told["stats"]
    console = output.console(stderr=True)
    console.print()
    console.print(output.facts(_summary(told)))
    if stats["offered"]:
        console.print()
        console.print(acceptance_table(stats))
    for notice in told["notices"]:
        console.print(f"note: {notice}")


def _summary(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    stats, deviation = told["stats"], told["deviation"]
    produced, cycles, speculation = len(told["tokens"]), stats["cycles"], stats["speculation"]
    off = deviation["count"]
    rows = [
        (
            "speed",
            f"{stats['tokens_per_second']:.1f} tokens/s, {output.count(produced, 'token')} after a prompt of "
            f"{told['prompt_tokens']}, ended by {told['finish_reason']!r}",
        ),
        (
            "seconds",
            ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in stats["seconds"].items())
            + _whole(stats["whole_cycles"]),
        ),
        ("cycles", f"{cycles}, {produced / cycles:.2f} tokens each" if cycles else "0"),
        ("speculation", speculation_line(speculation)),
        ("depth", ", ".join(f"{depth} ({n}x)" for depth, n in stats["depth"].items()) or "no draft"),
        ("guarantee", f"{told['guarantee']}, with {told['parity']} parity"),
        (
            "deviation",
            f"{output.count(off, 'token')} off the target's best, by {deviation['largest_gap']:.4g} nats at most"
            if off
            else "none",
        ),
    ]
    if stats["draft"]:
        rows.insert(5, ("draft", draft_line(stats["draft"])))
    return rows


def _whole(cycles: int) -> str:
    if not cycles:
        return ""
    return f" ({output.count(cycles, 'cycle')} ran whole on the device: all of their time is in verify)"


def draft_line(told: Mapping[str, Any]) -> str:
    """What a drafter reports of itself, in one line; what is empty is left out."""
    parts = []
    for name, value in told.items():
        if isinstance(value, Mapping):
            parts += [
                f"{inner} ({draft_line(facts)})" if isinstance(facts, Mapping) else f"{inner} {facts}"
                for inner, facts in value.items()
            ]
        elif value not in ("", None):
            parts.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts)


def speculation_line(speculation: Mapping[str, Any]) -> str:
    """Whether tokens were drafted and by whom. A reason beside drafts tells why it was off in the end."""
    active, reason = speculation["active"], speculation["reason"]
    state = "active" if active else "inactive"
    told = f"{'; off in the end' if active else ''}: {reason}" if reason else ""
    return f"{state}, drafter {speculation['drafter']}{told}"


def acceptance_table(stats: Mapping[str, Any]) -> Table:
    """Position 0 is the next token. Conditional rate = accepted / reached, cumulative rate = accepted / offered."""
    columns = ("position", "offered", "reached", "accepted", "conditional", "cumulative")
    table = output.table(*columns, right=columns)
    for position, (offered, reached, accepted) in enumerate(
        zip(stats["offered"], stats["reached"], stats["accepted"], strict=True)
    ):
        table.add_row(
            str(position), str(offered), str(reached), str(accepted), _rate(accepted, reached), _rate(accepted, offered)
        )
    return table


def _rate(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "-"

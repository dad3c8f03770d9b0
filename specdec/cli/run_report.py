"""Summarise a run: speed, speculation, guarantee, acceptance by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from specdec.cli import output


def report(data: Mapping[str, Any]) -> None:
    """Print the summary of ``Result.to_dict`` on stderr."""
    stats = data["stats"]
    console = output.console(stderr=True)
    console.print()
    console.print(output.facts(_summary(data)))
    if stats["offered"]:
        console.print()
        console.print(acceptance_table(stats))
    for notice in data["notices"]:
        console.print(f"note: {notice}")


def _summary(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    stats, deviation = data["stats"], data["deviation"]
    produced, cycles, whole, off = len(data["tokens"]), stats["cycles"], stats["whole_cycles"], deviation["count"]
    after = f"{output.count(produced, 'token')} after a prompt of {data['prompt_tokens']}"
    yield "speed", f"{stats['tokens_per_second']:.1f} tokens/s, {after}, ended by {data['finish_reason']!r}"
    seconds = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in stats["seconds"].items())
    if whole:
        seconds += f" ({output.count(whole, 'cycle')} ran in one piece on the device: all of their time is in verify)"
    yield "seconds", seconds
    yield "cycles", f"{cycles}, {produced / cycles:.2f} tokens each" if cycles else "0"
    yield "speculation", speculation_line(stats["speculation"])
    yield "depth", ", ".join(f"{depth} ({n}x)" for depth, n in stats["depth"].items()) or "no draft"
    if stats["draft"]:
        yield "draft", draft_line(stats["draft"])
    yield "guarantee", f"{data['guarantee']}, with {data['parity']} parity"
    largest = f"{output.count(off, 'token')} off the target's best, by {deviation['largest_gap']:.4g} nats at most"
    yield "deviation", largest if off else "none"


def draft_line(report: Mapping[str, Any]) -> str:
    """A drafter's own report in one line, without empty values."""
    parts = []
    for name, value in report.items():
        if isinstance(value, Mapping):
            parts += [
                f"{inner} ({draft_line(facts)})" if isinstance(facts, Mapping) else f"{inner} {facts}"
                for inner, facts in value.items()
            ]
        elif value not in ("", None):
            parts.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts)


def speculation_line(speculation: Mapping[str, Any]) -> str:
    """Whether tokens were drafted, and by which drafter. A reason next to drafts says why speculation ended off."""
    active, reason = speculation["active"], speculation["reason"]
    state = "active" if active else "inactive"
    why = f"{'; off in the end' if active else ''}: {reason}" if reason else ""
    return f"{state}, drafter {speculation['drafter']}{why}"


def acceptance_table(stats: Mapping[str, Any]) -> Table:
    """Position 0 is the next token. Conditional rate = accepted / reached, cumulative rate = accepted / offered."""
    headings = ("position", "offered", "reached", "accepted", "conditional", "cumulative")
    rows = []
    for position, counts in enumerate(zip(stats["offered"], stats["reached"], stats["accepted"], strict=True)):
        offered, reached, accepted = counts
        rates = (accepted / whole if whole else None for whole in (reached, offered))
        rows.append((str(position), *map(str, counts), *map(output.share, rates)))
    return output.table(headings, rows, left=())

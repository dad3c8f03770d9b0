"""Summarise a run: speed, speculation, guarantee, acceptance by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from specdec.cli import output

FEWEST_COMPARED = 64  # tokens; with fewer, the ratio of two speeds is noise


def three_lines(data: Mapping[str, Any], compared: Mapping[str, Any] | None) -> None:
    """Print the speed, what is promised about the tokens, and what drafting cost; then the notices.

    ``compared`` has the speeds of both arms, and whether their tokens were the same.
    """
    console = output.console(stderr=True)
    console.print()
    console.print(output.facts(_essence(data, compared)))
    output.lines(console, "note", data["notices"])


def _essence(data: Mapping[str, Any], compared: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    stats, produced = data["stats"], len(data["tokens"])
    tokens = output.count(produced, "token")
    cycles = f"{produced / stats['cycles']:.2f} tokens per cycle" if stats["cycles"] else "no cycle"
    if compared is None:
        ended = "" if data["finish_reason"] in ("stop", "length") else f", ended by {data['finish_reason']!r}"
        yield "speed", f"{stats['tokens_per_second']:.1f} tokens/s: {tokens}, {cycles}{ended}"
    else:
        fast, plain = compared["speculative"], compared["plain"]
        speeds = f"{fast:.0f} against {plain:.0f} tokens/s, {cycles}"
        if produced < FEWEST_COMPARED:
            yield "speed", f"{speeds}; {tokens} are too few for a ratio ({FEWEST_COMPARED} or more)"
        else:
            yield "speed", f"{fast / plain:.2f} times plain decoding: {speeds}"
    if (settings := data["generation"]).get("temperature"):
        yield "sampled", f"temperature {settings['temperature']:g}, seed {settings['seed']}"
    if compared is not None:
        same = f"the same {tokens} as plain decoding" if compared["same"] else "NOT the tokens of plain decoding"
        yield "output", f"{same} ({data['guarantee']}, with {data['parity']} parity)"
    else:
        yield "output", promise(data["guarantee"], data["parity"])
    drafted, accepted, active = sum(stats["offered"]), sum(stats["accepted"]), stats["speculation"]["active"]
    if not active:
        yield "drafting", speculation_line(stats["speculation"])
        return
    spent = sum(seconds for phase, seconds in stats["seconds"].items() if phase != "prefill")
    share = f"{stats['seconds']['draft'] / spent:.0%} of the time, " if spent else ""
    predicted, sources = stats["prediction"], [stats["speculation"]["drafter"]]
    if predicted["offered"]:
        sources = [name for name in sources if name != "none"]
        sources.append(f"{predicted['accepted']} of {predicted['offered']} from the prediction")
    yield "drafting", f"{share}{accepted} of {output.count(drafted, 'drafted token')} kept ({'; '.join(sources)})"


def promise(guarantee: str, parity: str) -> str:
    """What a verifier and a backend promise about the tokens."""
    words = f"{guarantee}, with {parity} parity"
    return f"the tokens of plain decoding ({words})" if (guarantee, parity) == ("exact", "bitwise") else words


def report(data: Mapping[str, Any]) -> None:
    """Print what ``three_lines`` leave out of ``Result.to_dict`` on stderr."""
    stats = data["stats"]
    console = output.console(stderr=True)
    console.print()
    console.print(output.facts(_summary(data)))
    if stats["offered"]:
        console.print()
        console.print(acceptance_table(stats))


def _summary(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    stats, deviation = data["stats"], data["deviation"]
    produced, cycles, off = len(data["tokens"]), stats["cycles"], deviation["count"]
    after = f"{output.count(produced, 'token')} after a prompt of {data['prompt_tokens']}"
    yield "length", f"{after}, ended by {data['finish_reason']!r}"
    yield "seconds", ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in stats["seconds"].items())
    yield "cycles", f"{cycles}, {produced / cycles:.2f} tokens each" if cycles else "0"
    yield "speculation", speculation_line(stats["speculation"])
    yield "depth", ", ".join(f"{depth} ({n}x)" for depth, n in stats["depth"].items()) or "no draft"
    if stats["draft"]:
        yield "draft", draft_line(stats["draft"])
    if data.get("weights"):
        yield "weights", data["weights"]
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

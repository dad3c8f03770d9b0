"""Counters of a generation: draft acceptance and time by phase."""

from __future__ import annotations

from typing import Any

import attrs

from specdec.contract import CycleRecord, Deviation, Stats
from specdec.decoding.notebook import html_table

PHASES = ("prefill", "draft", "verify", "commit")


@attrs.define(kw_only=True)
class RunStats(Stats):
    """Everything counted during one generation."""

    rows: int = 0  # computed by verification: sum(offered) + cycles
    prefilled: int = 0  # prompt tokens run through the target (the rest came from the session's state)
    # wall-clock by phase; the time of a whole cycle on the device counts as "verify"
    seconds: dict[str, float] = attrs.field(factory=lambda: dict.fromkeys(PHASES, 0.0))
    draft_lengths: dict[int, int] = attrs.field(factory=dict)  # verified draft tokens of a cycle -> cycles
    whole_cycles: int = 0  # cycles that ran on the device; their phases are not timed separately
    deviation: Deviation = Deviation()
    decode_seconds: float = 0.0  # wall-clock of all cycles, bookkeeping included
    drafter: str = "none"
    inactive_reason: str = ""  # why nothing was drafted or speculation went off, if known
    faults: dict[str, int] = attrs.field(factory=dict)  # faults of drafts -> how often
    forbidden: int = 0  # draft tokens cut because a logits processor does not allow them
    draft: dict[str, Any] = attrs.field(factory=dict)  # ``Drafter.report()`` at the end

    def add(self, cycle: CycleRecord, deviation: Deviation) -> None:
        """Count one cycle."""
        self.cycles += 1
        self.tokens += len(cycle.emitted)
        self.rows += cycle.offered + 1
        self.count(cycle.offered, cycle.accepted)
        self.draft_lengths[cycle.offered] = self.draft_lengths.get(cycle.offered, 0) + 1
        self.whole_cycles += cycle.on_device
        seconds = self.seconds
        seconds["draft"] += cycle.draft_seconds
        seconds["verify"] += cycle.verify_seconds
        seconds["commit"] += cycle.commit_seconds
        if deviation.count:
            gap = max(self.deviation.largest_gap, deviation.largest_gap)
            self.deviation = Deviation(self.deviation.count + deviation.count, gap)

    def fault(self, what: str) -> None:
        """Count a draft that had to be cut because it was faulty."""
        self.faults[what] = self.faults.get(what, 0) + 1

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding, prefill excluded; 0 when nothing was generated."""
        return self.tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def facts(self) -> list[tuple[str, str]]:
        """Labels and values for people."""
        drafted, kept, about = sum(self.offered), sum(self.accepted), self.speculation()
        each = f", {self.tokens / self.cycles:.2f} tokens each" if self.cycles else ""
        return [
            ("speed", f"{self.tokens_per_second:.1f} tokens/s"),
            ("cycles", f"{self.cycles}{each}"),
            ("drafts", f"{kept} of {drafted} tokens kept ({self.drafter})" if drafted else str(about["reason"])),
        ]

    def __repr__(self) -> str:
        return f"<RunStats {', '.join(f'{label}: {value}' for label, value in self.facts())}>"

    def _repr_html_(self) -> str:
        return html_table(self.facts())

    def speculation(self) -> dict[str, object]:
        """Whether any draft token was verified, and if not, why."""
        if self.offered:
            return {"active": True, "drafter": self.drafter, "reason": self.inactive_reason}
        reason = self.inactive_reason or ("no cycle ran" if self.cycles == 0 else "the drafter made no draft")
        cut = [f"{what} ({count})" for what, count in self.faults.items()]
        cut += [f"forbidden by a logits processor ({self.forbidden})"] * bool(self.forbidden)
        if cut and not self.inactive_reason:
            reason = f"every draft was cut before it was verified: {', '.join(cut)}"
        return {"active": False, "drafter": self.drafter, "reason": reason}

    def to_dict(self) -> dict[str, Any]:
        """The ``stats`` object of ``--json``."""
        return {
            "cycles": self.cycles,
            "tokens": self.tokens,
            "rows": self.rows,
            "prefilled": self.prefilled,
            "offered": list(self.offered),
            "reached": list(self.reached),
            "accepted": list(self.accepted),
            "tokens_per_second": self.tokens_per_second,
            "seconds": dict(self.seconds),
            "whole_cycles": self.whole_cycles,
            "depth": {str(depth): count for depth, count in sorted(self.draft_lengths.items())},
            "speculation": self.speculation(),
            "faults": dict(self.faults),
            "forbidden": self.forbidden,
            "draft": dict(self.draft),
        }

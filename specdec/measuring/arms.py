"""The two arms of a comparison: the same weights and build, with and without speculation, every cycle kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from specdec.config import Choice
from specdec.contract import CycleRecord, DepthPolicy, Stats
from specdec.decoding.parts import DepthPart, DrafterPart

if TYPE_CHECKING:
    from specdec.decoding.session import Session
    from specdec.pipeline import LanguageModel


class WatchedPolicy(DepthPolicy):
    """Another depth policy; keeps what it records."""

    def __init__(self, inner: DepthPolicy, kept: list[CycleRecord]) -> None:
        self._inner = inner
        self._kept = kept

    @property
    def reason(self) -> str:
        return self._inner.reason

    def next_depth(self, stats: Stats) -> int:
        return self._inner.next_depth(stats)

    def record(self, cycle: CycleRecord) -> None:
        self._inner.record(cycle)
        self._kept.append(cycle)


@attrs.frozen(kw_only=True)
class ArmRun:
    """One generation of one arm."""

    tokens: tuple[int, ...]
    seconds: float  # of all cycles, by one clock around each: drafting, verifying, committing, and what lies between
    prefill_seconds: float
    cycles: tuple[CycleRecord, ...]
    reason: str  # why speculation was off, or ""

    @property
    def rate(self) -> float:
        """Generated tokens per second of decoding."""
        return len(self.tokens) / self.seconds

    @property
    def explained(self) -> float:
        """The share of the time that the phases of the cycles account for."""
        phases = (cycle.draft_seconds + cycle.verify_seconds + cycle.commit_seconds for cycle in self.cycles)
        return sum(phases) / self.seconds


class Arm:
    """A pipeline whose cycles are kept, generation by generation."""

    def __init__(self, lm: LanguageModel) -> None:
        self._kept: list[CycleRecord] = []
        make, kept = lm.depth.spec.factory, self._kept
        spec = attrs.evolve(lm.depth.spec, factory=lambda *arguments: WatchedPolicy(make(*arguments), kept))
        self.lm = attrs.evolve(lm, depth=attrs.evolve(lm.depth, spec=spec))

    def run(self, prompt: Sequence[int], **settings: Any) -> ArmRun:
        """Generate in a fresh session."""
        return self.go_on(self.lm.session(), prompt, **settings)

    def go_on(self, session: Session, prompt: Sequence[int] | None = None, **settings: Any) -> ArmRun:
        """Generate in ``session``, which belongs to this arm. ``settings`` as for ``Session.stream``."""
        self._kept.clear()
        result = session.stream(prompt, **settings).result
        return ArmRun(
            tokens=tuple(result.tokens),
            seconds=result.stats.decode_seconds,
            prefill_seconds=result.stats.seconds["prefill"],
            cycles=tuple(self._kept),
            reason=result.stats.inactive_reason,
        )


def plain(lm: LanguageModel) -> LanguageModel:
    """The same target, verifier and settings without a drafter: our own best decoding, not a slower stand-in."""
    return attrs.evolve(lm, drafter=DrafterPart.of(Choice("none")), depth=DepthPart.of(Choice("fixed", {"depth": 0})))

"""Broken depth policies: each has one fault of those that a policy's author makes, and otherwise works.

Every docstring quotes the sentence of the contract that the class breaks; "missing:" starts one that it ought to have.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from specdec import CycleRecord, DepthPolicy, DepthPolicySpec, Stats

BROKEN: dict[type[DepthPolicy], str] = {}


def broken(fault: str) -> Callable[[type[Any]], type[Any]]:
    """Enter the class into the table under its class of fault."""

    def enter(kind: type[Any]) -> type[Any]:
        BROKEN[kind] = fault
        return kind

    return enter


def spec(kind: type[Any]) -> DepthPolicySpec:
    """How the policy is registered."""
    return DepthPolicySpec(name=f"stranger-{kind.__name__}", factory=kind, prepare=kind.prepare)


# --- right ones, of which the broken ones change a part ---------------------------------------------------------------


class Streak(DepthPolicy):
    """One deeper after a draft that was accepted whole, half as deep after one that was rejected whole."""

    prepare: ClassVar[Callable[..., Any] | None] = None
    deepest = 6

    def __init__(self, config: Any, shared: Any = None) -> None:
        self.depth = 2

    def next_depth(self, stats: Stats) -> int:
        return self.depth

    def deeper(self, cycle: CycleRecord) -> None:
        self.depth = min(self.depth + 1, self.deepest)

    def flatter(self, cycle: CycleRecord) -> None:
        self.depth = max(self.depth // 2, 1)

    def record(self, cycle: CycleRecord) -> None:
        if cycle.offered and cycle.accepted == cycle.offered:
            self.deeper(cycle)
        elif cycle.offered and not cycle.accepted:
            self.flatter(cycle)


class Pausing(DepthPolicy):
    """Stops drafting for 16 cycles after four drafts that were rejected whole, and says so."""

    prepare: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, config: Any, shared: Any = None) -> None:
        self.rejected = self.pause = 0

    @property
    def reason(self) -> Any:
        return "the last four drafts were rejected" if self.pause else ""

    def next_depth(self, stats: Stats) -> int:
        return 0 if self.pause else 3

    def record(self, cycle: CycleRecord) -> None:
        self.pause = max(self.pause - 1, 0)
        if cycle.offered:
            self.rejected = 0 if cycle.accepted else self.rejected + 1
        if self.rejected >= 4:
            self.rejected, self.pause = 0, 16


def notebook(config: Any, env: Any) -> dict[str, int]:
    return {}


class Learning(Streak):
    """Starts with the depth that the last generation ended with."""

    prepare: ClassVar[Callable[..., Any] | None] = staticmethod(notebook)

    def __init__(self, config: Any, shared: Any = None) -> None:
        super().__init__(config)
        self.shared = {} if shared is None else shared
        self.depth = self.shared.get("depth", self.depth)

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        self.shared["depth"] = self.depth


# --- faults that begin late -------------------------------------------------------------------------------------------


@broken("late")
class GrowsAfterLong(Streak):
    """Drops its limit once 64 drafts in a row were accepted whole.

    "Depths stay bounded, however many drafts are accepted" (P4).
    """

    streak = 0

    def deeper(self, cycle: CycleRecord) -> None:
        self.streak += 1
        self.depth = self.depth + 1 if self.streak > 64 else min(self.depth + 1, self.deepest)

    def flatter(self, cycle: CycleRecord) -> None:
        self.streak = 0
        super().flatter(cycle)


@broken("late")
class MeanDepth(Streak):
    """From the fortieth cycle on it returns the mean of its last depths, a float.

    "``next_depth`` returns a plain int of 0 or more" (P1).
    """

    def __init__(self, config: Any, shared: Any = None) -> None:
        super().__init__(config)
        self.depths: list[int] = []

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        self.depths = [*self.depths[-40:], self.depth]

    def next_depth(self, stats: Stats) -> Any:
        return self.depth if len(self.depths) < 40 else sum(self.depths) / len(self.depths)


@broken("late")
class EightBits(Streak):
    """Counts accepted tokens in eight bits, which makes the count negative, and the depth with it.

    "``next_depth`` returns a plain int of 0 or more" (P1).
    """

    def __init__(self, config: Any, shared: Any = None) -> None:
        super().__init__(config)
        self.counts = np.zeros(1, np.int8)

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        self.counts += cycle.accepted

    def next_depth(self, stats: Stats) -> int:
        return min(self.depth, 2 + int(self.counts[0]) // 4)


@broken("late")
class PositionTable(Streak):
    """Keeps a depth for each position, in a table of 256.

    "Records of any kind are accepted" (P3). missing: "of positions up to the capacity of a state".
    """

    def __init__(self, config: Any, shared: Any = None) -> None:
        super().__init__(config)
        self.table = [2] * 256

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        self.table[cycle.position] = self.depth


@broken("late")
class DecaysStats(Streak):
    """Halves the counters every hundred cycles, so that old drafts count less.

    "a policy reads them but does not change them" (P5).
    """

    def next_depth(self, stats: Stats) -> int:
        if stats.cycles and stats.cycles % 100 == 0:
            for counters in (stats.offered, stats.reached, stats.accepted):
                counters[:] = [count // 2 for count in counters]
        return self.depth


# --- faults at edges --------------------------------------------------------------------------------------------------


@broken("edge")
class DividesByTime(Streak):
    """Computes tokens per second of each cycle.

    "Records of any kind are accepted in any order: unasked, capped, of zero seconds" (P3).
    """

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        rate = len(cycle.emitted) / (cycle.draft_seconds + cycle.verify_seconds + cycle.commit_seconds)
        self.deepest = 6 if rate > 0.001 else 2


@broken("edge")
class ExpectsItsDepth(Streak):
    """Looks the outcome up under the depth that it asked for, but the engine caps depths.

    "Records of any kind are accepted in any order: unasked, capped" (P3).
    """

    def __init__(self, config: Any, shared: Any = None) -> None:
        super().__init__(config)
        self.asked: dict[int, int] = {}

    def next_depth(self, stats: Stats) -> int:
        self.asked.setdefault(self.depth, 0)
        return self.depth

    def record(self, cycle: CycleRecord) -> None:
        if cycle.depth:
            self.asked[cycle.depth] += cycle.accepted
        super().record(cycle)


@broken("edge")
class FirstToken(Streak):
    """Reads the rate of the first lookahead position, which has no entry before the first draft.

    "drafters give fewer tokens than asked for" (P3); "The first cycle has no history" (P2).
    """

    def next_depth(self, stats: Stats) -> int:
        if not stats.cycles and not stats.tokens:
            return self.depth
        return self.depth if stats.accepted[0] / stats.reached[0] > 0.2 else 1


@broken("edge")
class BelowZero(Streak):
    """Takes two off for every draft that is rejected whole, and does not stop at 0.

    "``next_depth`` returns a plain int of 0 or more" (P1).
    """

    def flatter(self, cycle: CycleRecord) -> None:
        self.depth -= 2

    def deeper(self, cycle: CycleRecord) -> None:
        self.depth = min(max(self.depth, 0) + 1, self.deepest)


@broken("edge")
class BooleanDepth(Pausing):
    """Returns True for a depth of 1 while it tries again after a pause.

    "``next_depth`` returns a plain int of 0 or more" (P1).
    """

    paused = False

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        self.paused |= bool(self.pause)

    def next_depth(self, stats: Stats) -> int:
        return super().next_depth(stats) and (True if self.paused else 3)


@broken("edge")
class NumpyDepth(Streak):
    """Chooses with ``numpy.argmax`` among expected rates once there are eight records.

    "``next_depth`` returns a plain int of 0 or more" (P1).
    """

    records = 0

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        self.records += 1

    def next_depth(self, stats: Stats) -> Any:
        return self.depth if self.records < 8 else np.argmax([depth == self.depth for depth in range(7)])


@broken("edge")
class ByProgress(Streak):
    """Sets the depth from how far the position moved, which is backwards after a rewind.

    "Records of any kind are accepted in any order" (P3); "a plain int of 0 or more" (P1).
    """

    position: int | None = None

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        moved = 1 if self.position is None else cycle.position - self.position
        self.position, self.depth = cycle.position, min(self.depth, moved + 1)


@broken("edge")
class ReadsDrafted(Streak):
    """Looks at the first drafted token of every record, also where nothing was drafted.

    "Records of any kind are accepted in any order: ... with fewer tokens drafted" (P3).
    """

    last = -1

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        if cycle.depth:
            self.last = cycle.drafted[0]


# --- faults in what is handed over ------------------------------------------------------------------------------------


@broken("handover")
class PadsStats(Streak):
    """Lengthens the counters to its deepest depth, to index them freely.

    "Stats belong to the engine: a policy reads them but does not change them" (P5).
    """

    def next_depth(self, stats: Stats) -> int:
        if stats.cycles > 10:
            for counters in (stats.offered, stats.reached, stats.accepted):
                counters.extend([0] * (self.deepest - len(counters)))
        return self.depth


# --- faults of policies -----------------------------------------------------------------------------------------------


@broken("policy")
class CountsQuestions(Pausing):
    """Counts its pause by questions, not by records; a question that is asked twice shortens it.

    "the same records give the same depths" (P6). missing: "Asking changes nothing".
    """

    def next_depth(self, stats: Stats) -> int:
        depth = super().next_depth(stats)
        self.pause = max(self.pause - 1, 0)
        return depth


@broken("policy")
class AlwaysReasons(Streak):
    """Explains its depth while it speculates.

    "Why the depth is 0 at present; empty otherwise" (``DepthPolicy.reason``).
    """

    @property
    def reason(self) -> str:
        return f"depth {self.depth} is the best of 1 to {self.deepest}"


@broken("policy")
class GivesNoReason(Pausing):
    """Pauses without a reason.

    "Why the depth is 0 at present" (``DepthPolicy.reason``).
    """

    @property
    def reason(self) -> Any:
        return ""


@broken("policy")
class AsDeepAsPossible(Streak):
    """Asks for a billion tokens when everything was accepted, and leaves it to the engine to cap this.

    "Depths stay bounded ... The engine's cap hides that from the output, but not from the cost" (P4).
    """

    def deeper(self, cycle: CycleRecord) -> None:
        self.depth = 10**9 if self.depth >= self.deepest else self.depth + 1


@broken("policy")
class ReadsShared(Learning):
    """Reads what other generations wrote while it runs, not only when it is made.

    "What earlier generations left in ``shared`` is read when a policy is made" (P6).
    """

    def next_depth(self, stats: Stats) -> int:
        return int(self.shared.get("depth", self.depth))


@broken("other")
class ClassStreak(Streak):
    """Counts rejections in a list of the class, which all sequences share.

    "A policy decides from the records of its own sequence" (P6).
    """

    rejected: ClassVar[list[int]] = []

    def flatter(self, cycle: CycleRecord) -> None:
        self.rejected.append(cycle.position)
        self.depth = 1 if len(self.rejected) > 20 else max(self.depth // 2, 1)


# --- randomness and resources -----------------------------------------------------------------------------------------


@broken("randomness")
class Explores(Streak):
    """Tries a random depth every 32nd cycle.

    "the same records give the same depths" (P6). missing: "No plugin reads or advances a global generator".
    """

    def next_depth(self, stats: Stats) -> int:
        return random.randint(1, self.deepest) if stats.cycles % 32 == 31 else self.depth


@broken("randomness")
class WallClock(Streak):
    """Measures the time between records itself, in place of the seconds in them.

    "A policy decides from the records of its own sequence: the same records give the same depths" (P6).
    """

    before: float | None = None

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        now = time.monotonic()
        if self.before is not None and now - self.before > 0.5:
            self.depth = 1
        self.before = now


@broken("resources")
class KeepsRecords(Streak):
    """Keeps all records of a generation.

    missing: "What a policy keeps does not grow with the number of cycles".
    """

    def __init__(self, config: Any, shared: Any = None) -> None:
        super().__init__(config)
        self.records: list[CycleRecord] = []

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        self.records.append(cycle)


# --- a second set, written from the contract alone -------------------------------------------------------------------


@broken("late")
class Compounds(Streak):
    """Keeps a wish that grows by half with each draft that is accepted whole, and limits only what it answers.

    "Records of any kind are accepted in any order" (P3): after 1,750 of them the wish is infinite.
    """

    def __init__(self, config: Any, shared: Any = None) -> None:
        super().__init__(config)
        self.wish = 2.0

    def next_depth(self, stats: Stats) -> int:
        return min(int(self.wish), self.deepest)

    def deeper(self, cycle: CycleRecord) -> None:
        self.wish *= 1.5

    def flatter(self, cycle: CycleRecord) -> None:
        self.wish = max(min(self.wish, self.deepest) / 2, 1.0)


@broken("randomness")
class ByHash(Streak):
    """Tries another depth now and then, chosen by the hash of a text, which differs from process to process.

    "the same records give the same depths" (P6).
    """

    seen = 0

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        self.seen += 1
        if self.seen % 16 == 0:
            self.depth = 1 + hash(f"cycle {self.seen}") % self.deepest


@broken("resources")
class SharedHistory(Learning):
    """Leaves the rate of every cycle to the next generations.

    "What a policy keeps does not grow with the number of cycles" (P10).
    """

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        self.shared.setdefault("rates", []).append(cycle.accepted / max(cycle.offered, 1))


@broken("edge")
class ShareOfTime(Streak):
    """Computes the drafter's share of the time, which is infinite where the target's seconds are 0.

    "Records of any kind and number are accepted in any order: unasked, of zero seconds" (P3).
    """

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        if cycle.draft_seconds or cycle.verify_seconds:
            with np.errstate(divide="ignore"):
                share = np.float64(cycle.draft_seconds) / np.float64(cycle.verify_seconds)
            self.depth = max(1, self.depth - int(share > 4) * int(share))


@broken("edge")
class LastEmitted(Streak):
    """Looks at the last token of every record, also where a device's cycle began after the end.

    "a cycle that a device began after the end emits nothing" (P3).
    """

    last = 0

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        self.last = cycle.emitted[-1]


@broken("resources")
class KeepsBlocks(Streak):
    """Keeps every block of tokens that came, to count the different ones.

    "What a policy keeps does not grow with the number of cycles" (P10).
    """

    def __init__(self, config: Any, shared: Any = None) -> None:
        super().__init__(config)
        self.blocks: set[tuple[int, ...]] = set()

    def record(self, cycle: CycleRecord) -> None:
        super().record(cycle)
        self.blocks.add(cycle.emitted)

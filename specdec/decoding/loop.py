"""The cycles of one generation: step by step through the engine, or whole ones on the device where that is possible.

A device that drafts, verifies, decides and commits by itself (``ForwardPass.greedy_cycles``) needs the host for nothing
but text and the end of generation. Its cycles give the same tokens as the engine's, so this is a matter of speed alone.
The host then works one cycle behind: the next one runs while it looks at the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import structlog

from specdec.contract import NO_DEVIATION, CycleRecord, GreedyCycle, GreedyCycles
from specdec.decoding import cycle as engine
from specdec.decoding.result import RunStats

log = structlog.get_logger(__name__)


class Cycles:
    """Runs cycles, one record after the other.

    Args:
        sequence: what the engine works on.
        cut: how many of a cycle's tokens may stay, as in ``engine.run_cycle``.
        stats: counters of this generation.
        stop_tokens: ids after which generation ends.
        host_cuts: whether ``cut`` may end generation at other places than ``stop_tokens`` and the room: then no cycle
            runs ahead of it.
    """

    def __init__(
        self,
        sequence: engine.Sequence,
        cut: engine.Cut,
        stats: RunStats,
        *,
        stop_tokens: Sequence[int] = (),
        host_cuts: bool = True,
    ) -> None:
        self._sequence = sequence
        self._cut = cut
        self._stats = stats
        self._stop_tokens = tuple(stop_tokens)
        self._ahead = not host_cuts
        self._device: GreedyCycles | None = None
        self._flying: list[int] = []  # depths of the cycles in flight
        self._since = 0.0  # when the device began with the oldest of them
        self._possible = (
            sequence.target.runs_greedy_cycles
            and sequence.verifier.greedy_is_argmax
            and sequence.context.sampling.logprobs is None
        )

    @property
    def flying(self) -> bool:
        """Whether a cycle is on the device that has not been told of yet."""
        return bool(self._flying)

    def run(self, depth: int, room: int) -> CycleRecord:
        """The next cycle. ``room``: tokens that may still be emitted, ``depth`` + 1 at least.

        Cycles in flight come first, with the depths that they were submitted with. Raises what ``run_cycle`` does.
        """
        if self._flying or (depth > 0 and self._open(room)):
            return self._on_device(depth, room)
        self.close()
        return engine.run_cycle(self._sequence, depth, self._cut, self._stats)

    def close(self) -> None:
        """Take the state back from the device. Cycles in flight are waited for, and what they emitted is kept."""
        while self._flying:
            self._on_device(0, 0)
        device, self._device = self._device, None
        if device is not None:
            hidden = device.close()
            sequence = self._sequence
            engine.guarded(sequence, self._stats, "take_back", lambda: sequence.drafter.take_back(hidden))

    def abandon(self) -> None:
        """After an error: what the device holds is lost, and the states must be built again from the tokens."""
        if self._device is not None:
            self._sequence.intact = False

    def _open(self, room: int) -> bool:
        """Whether the device runs the cycles from here on."""
        sequence = self._sequence
        if self._device is not None:
            return True
        if not self._possible or not sequence.speculating:
            return False
        start = None

        def hand_over() -> None:
            nonlocal start
            start = sequence.drafter.hand_over(sequence.context)

        engine.guarded(sequence, self._stats, "hand_over", hand_over)
        if start is None:
            self._possible = False  # neither the settings nor the drafter change during a generation
            return False
        self._device = sequence.target.greedy_cycles(sequence.state, start, stop_tokens=self._stop_tokens, limit=room)
        if self._device is None:
            self._possible = False
            sequence.drafter.take_back(start.hidden)
        return self._device is not None

    def _on_device(self, depth: int, room: int) -> CycleRecord:
        """Submit what fits, and tell of the oldest cycle in flight."""
        device, sequence = self._device, self._sequence
        assert device is not None
        position = len(sequence.tokens)
        sequence.context.cycle += 1
        sequence.intact = False  # until the host has seen everything that the device did
        if not self._flying:
            self._since = perf_counter()
            self._submit(device, depth)
        used = sum(self._flying) + len(self._flying)
        if self._ahead and depth > 0 and len(self._flying) == 1 and used + depth + 1 <= room:
            self._submit(device, depth)
        asked = self._flying[0]
        cycle = device.collect()
        began, self._since = self._since, perf_counter()
        del self._flying[0]
        emitted = cycle.emitted
        kept = self._cut(emitted) if emitted else 0
        if kept < len(emitted):
            device.keep(kept)
            emitted = emitted[:kept]
        sequence.tokens.extend(emitted)
        sequence.intact = not self._flying
        record = CycleRecord(
            position=position,
            depth=asked,
            offered=len(cycle.drafted),
            accepted=cycle.accepted,
            emitted=emitted,
            draft_seconds=0.0,
            verify_seconds=self._since - began,
            commit_seconds=0.0,
            whole=True,
            drafted=cycle.drafted,
        )
        if emitted:  # else it came behind the end
            self._stats.add(record, NO_DEVIATION)
        self._check(cycle)
        return record

    def _submit(self, device: GreedyCycles, depth: int) -> None:
        device.submit(depth)
        self._flying.append(depth)

    def _check(self, cycle: GreedyCycle) -> None:
        """Give up drafting where the head computes nonsense, as a drafter that fails is given up."""
        if -1 not in cycle.drafted or not self._sequence.speculating:
            return
        self.close()
        self._sequence.speculating = False
        self._stats.inactive_reason = "the drafter failed on the device: the draft head's logits are not finite"
        log.warning("drafter_failed", moment="greedy_cycles", error=self._stats.inactive_reason)

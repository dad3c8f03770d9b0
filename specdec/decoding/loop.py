"""The decoding loop: submit a cycle, collect its outcome, keep what may stay.

An executor runs the cycles: on the host step by step, or on the device as whole cycles. Both give the same tokens. If
only the device's own rules can end generation, the loop submits one cycle ahead, so that the device works while the
host processes the previous outcome.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from time import perf_counter

import attrs

from specdec.contract import CycleRecord, Deviation, DeviceDraft, Executor, Guarantee, Outcome, Sampling
from specdec.decoding.cycle import HostExecutor, LiveSequence
from specdec.decoding.statistics import RunStats
from specdec.registry import Guard, answers

Cut = Callable[[tuple[int, ...]], int]
"""How many of a cycle's emitted tokens to keep: at least 1, and not all of them if generation ends within them."""


class DecodingLoop:
    """Runs the cycles of one generation. The sequence must be marked as ``changing`` from the first step to ``close``.

    Args:
        sequence: what is decoded.
        cut: called once with the tokens of every cycle.
        stats: counters of this generation.
        stop_tokens: ids after which generation ends.
        ahead: whether ``cut`` ends generation only at ``stop_tokens`` and at the end of the room.
        executor: runs the cycles; chosen at the first cycle unless given.
    """

    def __init__(
        self,
        sequence: LiveSequence,
        cut: Cut,
        stats: RunStats,
        *,
        stop_tokens: Sequence[int] = (),
        ahead: bool = False,
        executor: Executor | None = None,
    ) -> None:
        self._sequence = sequence
        self._cut = cut
        self._stats = stats
        self._stop_tokens = stop_tokens
        self._ahead = ahead
        self._executor = executor
        self._on_device = False
        self._in_flight: list[int] = []  # depths
        self._since = 0.0  # when the oldest cycle in flight began

    @property
    def in_flight(self) -> bool:
        """Whether a submitted cycle has not been collected yet."""
        return bool(self._in_flight)

    def step(self, depth: int | None, room: int) -> CycleRecord:
        """Run the next cycle. A cycle already in flight comes first, at the depth it was submitted with.

        Args:
            depth: draft tokens to ask for; None collects what is in flight and submits nothing.
            room: tokens that may still be emitted, at least ``depth + 1``.

        Raises: ContractError when the verifier breaks its contract, or the target's logits are not finite.
        """
        executor = self._executor or self._open(room)
        if depth is not None:
            if not self._in_flight:
                self._since = perf_counter()
                self._submit(executor, depth)
            if self._ahead and self._on_device and len(self._in_flight) == 1 and self._in_flight[0] + depth + 2 <= room:
                self._submit(executor, depth)
        return self._collect(executor)

    def close(self) -> None:
        """Wait for cycles in flight, keep their tokens, and leave the target's state as single passes would."""
        if self._executor is None:
            return
        while self._in_flight:
            self._collect(self._executor)
        self._executor.close()
        self._executor = None

    def _open(self, room: int) -> Executor:
        """The device's executor if target, drafter, verifier and settings allow it, else the host's."""
        sequence, device = self._sequence, None
        if self._decided_on_device(sequence.context.sampling):
            draft = self._device_draft()
            if draft is not None:
                make = functools.partial(sequence.target.device_executor, stop_tokens=self._stop_tokens, limit=room)
                owner = types.SimpleNamespace(device_executor=make)
                device = sequence.running.call(
                    owner, "device_executor", sequence.state, sequence.context, draft, check=answers.executor
                )
        self._on_device = device is not None
        self._executor = (
            HostExecutor(sequence, self._stats) if device is None else _GuardedExecutor(device, sequence.running)
        )
        return self._executor

    def _decided_on_device(self, sampling: Sampling) -> bool:
        """Whether verifier and target leave the decision to the device under these settings."""
        sequence = self._sequence
        if sampling.logprobs is not None:
            return False
        if sampling.temperature > 0:
            if sequence.verifier.guarantee is not Guarantee.EXACT or not sequence.running.call(
                sequence.target, "device_samples", sampling, check=answers.flag
            ):
                return False
            sampling = attrs.evolve(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        argmax: bool = sequence.verifying.call(sequence.verifier, "is_argmax", sampling, check=answers.flag)
        return argmax

    def _device_draft(self) -> DeviceDraft | None:
        """How the device would draft; a failed drafter drafts nothing."""
        sequence = self._sequence
        draft: DeviceDraft | None = sequence.ask(
            "device_draft", sequence.context, check=answers.device_draft, otherwise=DeviceDraft(mtp=False)
        )
        return draft

    def _submit(self, executor: Executor, depth: int) -> None:
        sequence = self._sequence
        sequence.context.change("cycle", sequence.counts.cycle + len(self._in_flight) + 1)
        executor.submit(depth)
        self._in_flight.append(depth)

    def _collect(self, executor: Executor) -> CycleRecord:
        sequence = self._sequence
        position = len(sequence.tokens)
        outcome = executor.collect()
        depth = self._in_flight.pop(0)
        kept = self._cut(outcome.emitted) if outcome.emitted else 0
        decided = perf_counter()
        if outcome.emitted:  # else the cycle started after the end
            sequence.extend(outcome.emitted[:kept], offered=len(outcome.drafted), accepted=outcome.accepted)
            executor.keep(kept)
        began, self._since = self._since, perf_counter()
        record = CycleRecord(
            position=position,
            depth=depth,
            offered=len(outcome.drafted),
            accepted=outcome.accepted,
            emitted=outcome.emitted[:kept],
            draft_seconds=outcome.draft_seconds,
            verify_seconds=self._since - began if self._on_device else outcome.verify_seconds,
            commit_seconds=0.0 if self._on_device else self._since - decided,
            on_device=self._on_device,
            drafted=outcome.drafted,
        )
        if kept:
            self._stats.add(record, _deviation(outcome, kept))
        if -1 in outcome.drafted and not sequence.failure:
            self._leave_device()
        return record

    def _leave_device(self) -> None:
        """Switch off drafting because the draft head's logits on the device are not finite."""
        drafting = self._sequence.drafting
        drafting.fail(f"{drafting.guard} failed on the device: the draft head's logits are not finite")
        self.close()


class _GuardedExecutor(Executor):
    """A device's executor behind the target's guard. On the host every part has its own."""

    def __init__(self, inner: Executor, guard: Guard) -> None:
        check = answers.an(Outcome)
        self._submit = guard.bind("submit", lambda depth: inner.submit(depth))
        self._collect = guard.bind("collect", lambda: check(inner.collect()))
        self._keep = guard.bind("keep", lambda tokens: inner.keep(tokens))
        self._close = guard.bind("close", lambda: inner.close())

    def submit(self, depth: int) -> None:
        self._submit(depth)

    def collect(self) -> Outcome:
        outcome: Outcome = self._collect()
        return outcome

    def keep(self, tokens: int) -> None:
        self._keep(tokens)

    def close(self) -> None:
        self._close()


def _deviation(outcome: Outcome, kept: int) -> Deviation:
    gaps = [gap for position, gap in outcome.deviations if position < kept]
    return Deviation(len(gaps), max(gaps, default=0.0))


def run_cycle(sequence: LiveSequence, depth: int, cut: Cut, stats: RunStats) -> CycleRecord:
    """Run a single cycle on the host."""
    with sequence.changing():
        return DecodingLoop(sequence, cut, stats, executor=HostExecutor(sequence, stats)).step(depth, depth + 1)

"""Whole greedy cycles as one lazy graph each: settle, draft, verify, decide.

    settle   the rows that the last cycle kept are committed, and become the pairs that wait for the head
    draft    the head's pass over those pairs, its first token, and K - 1 chained steps
    verify   the target's pass over the pending token and the draft, and the best token of every row
    decide   what is emitted and kept, and whether generation ends

Nothing of it is read by the host before the outcome is, so a cycle can be started behind one that still runs. How many
pairs wait is known to the device alone: the head's pass has one row for each that there can be, and what it computes
behind the last of them is garbage that nobody reads and the chained steps overwrite.

Source of the decision: greedy case of Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx

from specdec.backends.metal.caches import MetalDeltaCache, Placed
from specdec.backends.metal.device import DeviceLength, DeviceTokens, number, rows_from
from specdec.backends.metal.passes import MetalPass, explained, start
from specdec.contract import GreedyCycle
from specdec.errors import ContractError, StateError

if TYPE_CHECKING:
    from specdec.backends.metal.arrays import MetalHeadRows
    from specdec.backends.metal.ops import MetalOps
    from specdec.backends.passes import CycleSetup

IN_FLIGHT = 2  # one cycle runs while the host looks at another
_NEVER = 2**30  # the place of a stop token in rows that have none


@attrs.frozen(kw_only=True, eq=False)
class _Waiting:
    """Pairs that wait for the head: the first ``count`` rows of both arrays, the pending token last."""

    ids: mx.array  # [n] int32
    hidden: mx.array  # [n, H]
    count: mx.array  # [1] int32


@attrs.frozen(kw_only=True, eq=False)
class _Decision:
    """What a verification led to; int32 ``[1]`` but for ``report``."""

    kept: mx.array
    remaining: mx.array  # tokens that may still be emitted
    halted: mx.array  # 1 behind the end
    report: mx.array  # kept, accepted, halted, K + 1 best tokens, K draft tokens


@attrs.frozen(kw_only=True, eq=False)
class _Flight:
    """A cycle that the host has not collected; without a report where it knew that generation had ended."""

    depth: int
    report: mx.array | None


class MetalCycles:
    """Cycles of one sequence.

    At most two are in flight, so that when one is submitted, the outcome of the one before the last is known: whether
    the last one ran at all, or came behind the end. Only its own outcome may be open, which the device knows.
    """

    def __init__(self, ops: MetalOps, target: MetalPass, mtp: MetalPass, setup: CycleSetup) -> None:
        self._ops = ops
        self._target, self._mtp = target, mtp
        self._lm_head = [setup.lm_head]
        rows: MetalHeadRows | None = setup.draft_head if setup.pruned else None  # type: ignore[assignment]
        self._draft_head = [setup.draft_head] if rows is None else list(rows.parts)
        self._draft_ids = None if rows is None else rows.part_ids
        self._stops = mx.array(list(setup.stop_tokens), mx.int32) if setup.stop_tokens else None
        count = len(setup.tokens)
        # where the newest cycle began
        self._waiting = _Waiting(ids=mx.array(setup.tokens, mx.int32), hidden=setup.hidden, count=number(count))
        self._length = number(target.caches[0].length)
        self._pairs = number(mtp.caches[0].length)
        # what it left behind: best tokens and hidden states of its rows
        self._verified: tuple[mx.array, mx.array] | None = None
        self._remaining, self._halted = number(setup.limit), number(0)
        self._kept = number(0)
        # what the host knows
        self._flights: list[_Flight] = []
        self._last = GreedyCycle((), 0, ())
        self._over = False
        self._ran = False  # the cycle that was submitted last, where it is collected: else it came behind the end
        self._left = setup.limit
        self._known_length = int(target.caches[0].length)  # with all rows kept that were collected
        self._known_pairs = int(mtp.caches[0].length)
        self._known_waiting = count

    def submit(self, depth: int) -> None:
        most = self._ops.capabilities.max_rows - 1
        if not 1 <= depth <= most:
            raise StateError(f"a cycle on the device drafts 1 to {most} tokens, got {depth}")
        if len(self._flights) >= IN_FLIGHT:
            raise StateError(f"{IN_FLIGHT} cycles are in flight already")
        if self._over:
            self._flights.append(_Flight(depth=depth, report=None))
            return
        bound = self._known_length + sum(flight.depth + 1 for flight in self._flights)
        fed = self._waiting.ids.shape[0] if self._verified is None else self._verified[0].shape[0]
        for cache in self._target.caches:
            if not isinstance(cache, MetalDeltaCache):
                cache.reserve(bound + depth + 1)
        for cache in self._mtp.caches:
            cache.reserve(bound + max(fed, depth))
        with explained():
            self._run(depth, bound)

    def _run(self, depth: int, bound: int) -> None:
        self._settle()
        drafted = self._draft(depth, bound)
        hidden = self._verify(drafted, bound)
        best = self._ops.best(hidden, self._lm_head)
        decision = self._decide(drafted, best)
        self._verified = best, hidden
        self._kept, self._remaining, self._halted = decision.kept, decision.remaining, decision.halted
        self._flights.append(_Flight(depth=depth, report=decision.report))
        kept = [best, hidden, *attrs.astuple(decision, recurse=False), *attrs.astuple(self._waiting, recurse=False)]
        start([*kept, self._length, self._pairs], [*self._target.caches, *self._mtp.caches])

    def _settle(self) -> None:
        """Commit what the last cycle kept; it ran, for otherwise the host would know that all is over."""
        if self._verified is None:
            return
        best, hidden = self._verified
        self._waiting = _Waiting(ids=mx.maximum(best, 0), hidden=hidden, count=self._kept)
        self._length = self._length + self._kept
        for cache in self._target.caches:
            if isinstance(cache, MetalDeltaCache):
                cache.settle(self._kept)
        self._verified = None

    def _draft(self, depth: int, bound: int) -> mx.array:
        """K tokens int32 ``[K]``, -1 from where the head's logits are not finite."""
        waiting, mtp = self._waiting, self._mtp
        x = mtp.body(self._placed(mtp, self._pairs, bound), DeviceTokens(waiting.ids), waiting.hidden)
        x = rows_from(x, waiting.count - 1, 1)
        drafted = [self._ops.best(x, self._draft_head, self._draft_ids)]
        at = self._pairs + waiting.count
        self._pairs = at  # also behind the end: no cycle follows one that came there
        while len(drafted) < depth:
            token = drafted[-1]
            x = mtp.body(self._placed(mtp, at, bound + len(drafted)), DeviceTokens(mx.maximum(token, 0)), x)
            best = self._ops.best(x, self._draft_head, self._draft_ids)
            drafted.append(mx.where(token < 0, -1, best))
            at = at + 1
        return mx.concatenate(drafted)

    def _verify(self, drafted: mx.array, bound: int) -> mx.array:
        """Hidden states ``[K + 1, H]`` of the pending token and the draft."""
        pending = rows_from(self._waiting.ids, self._waiting.count - 1, 1)
        tokens = mx.concatenate([pending, mx.maximum(drafted, 0)])
        return self._target.body(self._placed(self._target, self._length, bound), DeviceTokens(tokens), None)

    def _placed(self, over: MetalPass, length: mx.array, bound: int) -> list[Any]:
        at = DeviceLength(length, bound)
        return [cache if isinstance(cache, MetalDeltaCache) else Placed(cache, at) for cache in over.caches]

    def _decide(self, drafted: mx.array, best: mx.array) -> _Decision:
        depth = drafted.shape[0]
        right = (drafted == best[:depth]).astype(mx.int32)  # two that are -1 end in an error all the same
        accepted = mx.cumprod(right).sum(keepdims=True)
        kept = mx.minimum(accepted + 1, self._remaining)
        first = _NEVER
        if self._stops is not None:
            stops = (best[:, None] == self._stops).any(axis=1)
            first = mx.where(stops, mx.arange(depth + 1), _NEVER).min(keepdims=True)
            kept = mx.minimum(kept, first + 1)
        over = (kept == self._remaining) | (first < kept)
        kept = mx.where(self._halted > 0, 0, kept).astype(mx.int32)
        halted = mx.maximum(self._halted, over.astype(mx.int32))
        report = mx.concatenate([kept, accepted.astype(mx.int32), halted, best, drafted])
        return _Decision(kept=kept, remaining=self._remaining - kept, halted=halted, report=report)

    def collect(self) -> GreedyCycle:
        flight = self._flights.pop(0)
        self._last = GreedyCycle((), 0, ())
        if flight.report is None:
            return self._last
        kept, accepted, halted, *tokens = flight.report.tolist()
        self._over, self._ran = bool(halted), kept > 0
        if not kept:
            return self._last
        best, drafted = tokens[: flight.depth + 1], tokens[flight.depth + 1 :]
        if -1 in best[: accepted + 1]:
            raise ContractError(
                f"the target's logits of row {best.index(-1)} are not finite",
                try_="specdec info MODEL (the weight audit), or dtype = float32",
            )
        self._last = GreedyCycle(tuple(drafted), accepted, tuple(best[:kept]))
        self._known_length += kept
        self._known_pairs += self._known_waiting
        self._known_waiting = kept
        self._left -= kept
        return self._last

    def keep(self, tokens: int) -> None:
        emitted = self._last.emitted
        if self._flights or not 1 <= tokens <= len(emitted):
            raise StateError(
                f"of {len(emitted)} tokens {tokens} are kept, of a cycle that is the last one and collected"
            )
        back = len(emitted) - tokens
        self._last = attrs.evolve(self._last, emitted=emitted[:tokens])
        self._over = False
        self._known_length -= back
        self._known_waiting = tokens
        self._left += back
        self._kept, self._remaining, self._halted = number(tokens), mx.array([self._left], mx.int32), number(0)

    def close(self) -> mx.array:
        if self._flights:
            raise StateError("cycles are closed while one is in flight")
        waits = self._waiting.hidden if self._verified is None or not self._ran else self._verified[1]
        for cache in self._target.caches:
            if isinstance(cache, MetalDeltaCache):
                cache.commit(self._known_waiting if self._ran else 0)
            cache.length = self._known_length
        for cache in self._mtp.caches:
            cache.length = self._known_pairs
        self._verified = None
        hidden = waits[: self._known_waiting]
        mx.async_eval(hidden)
        return hidden


def cycles_over(ops: MetalOps, target: Any, mtp: Any, setup: CycleSetup) -> MetalCycles | None:
    """Cycles over two passes of ``ops``; None where these do not fit."""
    if not (isinstance(target, MetalPass) and isinstance(mtp, MetalPass)):
        return None
    recurrent = any(isinstance(cache, MetalDeltaCache) for cache in mtp.caches)
    if recurrent or len(setup.tokens) > ops.capabilities.max_rows:
        return None
    return MetalCycles(ops, target, mtp, setup)

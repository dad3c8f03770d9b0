"""The executor that runs each greedy cycle as one lazy graph: settle, draft, verify, decide.

    settle   commit the rows that the last cycle kept, and add their MTP pairs to the waiting ones
    draft    run the head's pass over all waiting pairs, choose its token, and run K - 1 chained steps
    verify   run the target's pass over the pending token and the draft, and find the best token of every row
    decide   determine the emitted and kept tokens, and whether generation ends

A cycle of depth 0 drafts nothing, and its pairs keep waiting until a pass has no row for more. Without an MTP head
there are no pairs, and all cycles have depth 0.

The host reads nothing before it collects the outcome, so a cycle can be started while the one before still runs. Only
the device knows how many pairs wait. The head's pass has rows for the maximum; its unused rows hold garbage that is
never read and that the chained steps overwrite.

Source of the decision: greedy case of Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx

from specdec.backends.metal.arrays import MetalHeadRows
from specdec.backends.metal.caches import MetalDeltaCache, Placed
from specdec.backends.metal.device import DeviceLength, DeviceTokens, number, rows_from
from specdec.backends.metal.passes import MetalPass, explained, start
from specdec.backends.passes import ExecutorSetup, Pass
from specdec.contract import Executor, Outcome
from specdec.errors import ContractError, StateError

_IN_FLIGHT = 2  # one cycle runs while the host processes another
_NEVER = 2**30  # the index of the stop token if there is none
_NOTHING = Outcome((), 0, ())

Best = Callable[..., mx.array]


@attrs.frozen(kw_only=True, eq=False)
class _Rows:
    """Rows whose number only the device knows: the first ``count`` of both arrays."""

    ids: mx.array  # [n] int32, the token after each row
    hidden: mx.array  # [n, H], the hidden state of the row
    count: mx.array  # [1] int32

    def arrays(self) -> tuple[mx.array, ...]:
        return self.ids, self.hidden, self.count

    def joined(self, more: _Rows) -> _Rows:
        """Append the rows of ``more`` after these."""

        def both(ours: mx.array, theirs: mx.array) -> mx.array:
            return mx.slice_update(mx.concatenate([ours, theirs]), theirs, self.count, axes=[0])

        ids, hidden = both(self.ids, more.ids), both(self.hidden, more.hidden)
        return _Rows(ids=ids, hidden=hidden, count=self.count + more.count)


@attrs.frozen(kw_only=True, eq=False)
class _Flight:
    """A cycle that the host has not collected; without a report if it was submitted after the end of generation."""

    depth: int
    fed: bool
    report: mx.array | None  # int32: kept, accepted, halted, K + 1 best tokens, K draft tokens


class MetalExecutor(Executor):
    """Cycles of one sequence. See ``specdec.backends.passes.ExecutorSetup``.

    At most two are in flight. So when a cycle is submitted, the outcome of the last but one is known, and with it
    whether the last one ran or came after the end. Only the last one's own outcome may still be on the device.
    """

    def __init__(
        self, best: Best, max_rows: int, target: MetalPass, mtp: MetalPass | None, setup: ExecutorSetup
    ) -> None:
        self._best, self._max_rows, self._setup = best, max_rows, setup
        self._target, self._mtp = target, mtp
        self._lm_head = [setup.lm_head]
        self._stops = mx.array(list(setup.stop_tokens), mx.int32) if setup.stop_tokens else None
        self._flights: list[_Flight] = []
        # on the device: the start and the outcome of the newest cycle
        self._waiting: _Rows | None = None  # pairs, including those that it fed
        self._fed = False  # whether it fed the pairs
        self._length, self._pending = number(target.caches[0].length), number(setup.pending)
        self._verified: _Rows | None = None  # its rows; the first ``count`` are kept
        self._remaining, self._halted = number(setup.limit), number(0)
        # on the host: the same after the last collected cycle, with all of its rows committed
        self._known_length = int(target.caches[0].length)
        self._known_waiting = 0
        self._end = self._known_length + setup.limit
        self._emitted: tuple[int, ...] = ()  # by the newest cycle, if it is collected; nothing after the end
        self._over = False
        if setup.waiting is not None:
            given = setup.waiting
            self._known_waiting = len(given.tokens)
            count = number(self._known_waiting)
            self._waiting = _Rows(ids=mx.array(given.tokens, mx.int32), hidden=given.hidden, count=count)
            gathered = given.head if isinstance(given.head, MetalHeadRows) else None
            self._draft_head = [given.head] if gathered is None else list(gathered.parts)
            self._draft_ids = None if gathered is None else gathered.part_ids

    def submit(self, depth: int) -> None:
        if self._mtp is None:
            depth = 0
        if not 0 <= depth < self._max_rows:
            raise StateError(f"a cycle on the device drafts 0 to {self._max_rows - 1} tokens, got {depth}")
        if len(self._flights) >= _IN_FLIGHT:
            raise StateError(f"{_IN_FLIGHT} cycles are in flight already")
        if self._over:
            self._flights.append(_Flight(depth=depth, fed=False, report=None))
            return
        bound = self._known_length + sum(flight.depth + 1 for flight in self._flights)
        for cache in self._target.caches:
            if not isinstance(cache, MetalDeltaCache):
                cache.reserve(bound + depth + 1)
        with explained():
            self._run(depth, bound)

    def _run(self, depth: int, bound: int) -> None:
        self._settle()
        rows = 0 if self._waiting is None else len(self._waiting.ids)
        self._fed = rows > 0 and (depth > 0 or rows == self._max_rows)
        drafted = self._draft(depth, bound) if self._fed else []
        tokens = mx.concatenate([self._pending, *(mx.maximum(token, 0) for token in drafted)])
        hidden = self._target.body(self._placed(self._target, self._length, bound), DeviceTokens(tokens), None)
        best = self._best(hidden, self._lm_head)
        kept, report = self._decide(drafted, best)
        self._verified = _Rows(ids=mx.maximum(best, 0), hidden=hidden, count=kept)
        self._flights.append(_Flight(depth=depth, fed=self._fed, report=report))
        left = [array for rows in (self._verified, self._waiting) if rows for array in rows.arrays()]
        caches = [*self._target.caches, *(self._mtp.caches if self._mtp else ())]
        start([*left, report, self._length, self._pending, self._remaining, self._halted], caches)

    def _settle(self) -> None:
        """Commit what the last cycle kept. That cycle ran, or the host would know that generation has ended."""
        rows = self._verified
        if rows is None:
            return
        if self._waiting is not None:
            self._waiting = self._waiting_with(rows)
        self._length = self._length + rows.count
        self._pending = rows_from(rows.ids, rows.count - 1, 1)
        for cache in self._target.caches:
            if isinstance(cache, MetalDeltaCache):
                cache.settle(rows.count)
        self._verified = None

    def _waiting_with(self, rows: _Rows) -> _Rows:
        """Return the pairs that wait after the newest cycle, which keeps ``rows``."""
        return rows if self._fed or self._waiting is None else self._waiting.joined(rows)

    def _draft(self, depth: int, bound: int) -> list[mx.array]:
        """Feed the waiting pairs and draft: K arrays int32 ``[1]``, -1 from the first logits that are not finite."""
        waiting, mtp = self._waiting, self._mtp
        assert waiting is not None
        assert mtp is not None
        for cache in mtp.caches:
            cache.reserve(bound + max(len(waiting.ids), depth))
        first = self._placed(mtp, self._length - waiting.count, bound)  # after the pairs in the cache
        x = mtp.body(first, DeviceTokens(waiting.ids), waiting.hidden)
        x = rows_from(x, waiting.count - 1, 1)
        drafted: list[mx.array] = []
        while len(drafted) < depth:
            if drafted:
                at = self._placed(mtp, self._length + (len(drafted) - 1), bound + len(drafted) - 1)
                x = mtp.body(at, DeviceTokens(mx.maximum(drafted[-1], 0)), x)
            best = self._best(x, self._draft_head, self._draft_ids)
            drafted.append(mx.where(drafted[-1] < 0, -1, best) if drafted else best)
        return drafted

    def _placed(self, over: MetalPass, length: mx.array, bound: int) -> list[Any]:
        at = DeviceLength(length, bound)
        return [cache if isinstance(cache, MetalDeltaCache) else Placed(cache, at) for cache in over.caches]

    def _decide(self, drafted: list[mx.array], best: mx.array) -> tuple[mx.array, mx.array]:
        """Return the number of kept rows, int32 ``[1]``, and the report."""
        depth = len(drafted)
        accepted = number(0)
        if drafted:  # if both are -1, the host raises an error anyway
            right = (mx.concatenate(drafted) == best[:depth]).astype(mx.int32)
            accepted = mx.cumprod(right).sum(keepdims=True).astype(mx.int32)
        kept = mx.minimum(accepted + 1, self._remaining)
        first = _NEVER
        if self._stops is not None:
            stops = (best[:, None] == self._stops).any(axis=1)
            first = mx.where(stops, mx.arange(depth + 1), _NEVER).min(keepdims=True)
            kept = mx.minimum(kept, first + 1)
        over = (kept == self._remaining) | (first < kept)
        kept = mx.where(self._halted > 0, 0, kept).astype(mx.int32)
        self._remaining = self._remaining - kept
        self._halted = mx.maximum(self._halted, over.astype(mx.int32))
        return kept, mx.concatenate([kept, accepted, self._halted, best, *drafted])

    def collect(self) -> Outcome:
        if not self._flights:
            raise StateError("no cycle is in flight")
        flight = self._flights.pop(0)
        if flight.report is None:
            return _NOTHING
        kept, accepted, halted, *tokens = flight.report.tolist()
        best, drafted = tokens[: flight.depth + 1], tokens[flight.depth + 1 :]
        self._over, self._emitted = bool(halted), tuple(best[:kept])
        if not kept:
            return _NOTHING
        if -1 in best[: accepted + 1]:
            raise ContractError(
                f"the target's logits of row {best.index(-1)} are not finite",
                try_="specdec info MODEL (the weight check), or dtype = float32",
            )
        self._known_length += kept
        self._known_waiting = (0 if flight.fed else self._known_waiting) + kept
        return Outcome(tuple(drafted), accepted, self._emitted)

    def keep(self, tokens: int) -> None:
        emitted = len(self._emitted)
        if not 1 <= tokens <= emitted or (self._flights and tokens < emitted):
            raise StateError(f"of {emitted} tokens {tokens} are kept; fewer than all only with no cycle in flight")
        if tokens == emitted:
            return
        assert self._verified is not None
        self._verified = attrs.evolve(self._verified, count=number(tokens))
        self._known_length -= emitted - tokens
        self._known_waiting -= emitted - tokens
        self._emitted = self._emitted[:tokens]
        self._over = False
        self._remaining, self._halted = mx.array([self._end - self._known_length], mx.int32), number(0)

    def close(self) -> None:
        if self._flights:
            raise StateError("an executor is closed while a cycle is in flight")
        kept, left = len(self._emitted), None
        for cache in self._target.caches:
            if isinstance(cache, MetalDeltaCache):
                cache.commit(kept)
            cache.length = self._known_length
        if self._mtp is not None:
            for cache in self._mtp.caches:
                cache.length = self._known_length - self._known_waiting
            rows = self._waiting_with(self._verified) if kept and self._verified else self._waiting
            assert rows is not None
            left = rows.hidden[: self._known_waiting]
            mx.async_eval(left)
        self._setup.closed(left)


def device_executor(
    best: Best, max_rows: int, target: Pass, mtp: Pass | None, setup: ExecutorSetup
) -> MetalExecutor | None:
    """Return an executor over Metal passes; None if the cycles do not fit. ``best`` is ``MetalOps.best``."""
    if not isinstance(target, MetalPass) or not isinstance(mtp, MetalPass | None):
        return None
    if mtp is not None:
        recurrent = any(isinstance(cache, MetalDeltaCache) for cache in mtp.caches)
        if recurrent or setup.waiting is None or len(setup.waiting.tokens) > max_rows:
            return None
    return MetalExecutor(best, max_rows, target, mtp, setup)

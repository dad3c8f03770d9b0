"""What ``ForwardPass.greedy_cycles`` means, in the passes that every target has: the reference for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.contract import ForwardPass, GreedyCycle, GreedyCycles, GreedyStart, Hidden, State
from specdec.errors import StateError


class StepwiseCycles(GreedyCycles):
    """Greedy cycles by ``decode_mtp``, ``decode`` and ``commit``; each runs when it is submitted.

    As on a device, the rows of a cycle are committed when the next one begins, so that ``keep`` can still change them.
    """

    def __init__(
        self, target: ForwardPass, state: State, start: GreedyStart, *, stop_tokens: Sequence[int], limit: int
    ) -> None:
        self._target = target
        self._state = state
        self._tokens = list(start.tokens)  # of the waiting pairs; the last one is pending
        self._hidden = start.hidden
        self._options: dict[str, Any] = {} if start.head is None else {"head": start.head}
        self._stop = frozenset(stop_tokens)
        self._left = limit
        self._over = False
        self._rows: Hidden | None = None  # of the last verification, not committed yet
        self._emitted: tuple[int, ...] = ()
        self._flying: list[GreedyCycle] = []

    def submit(self, depth: int) -> None:
        self._settle()
        if self._over:
            self._flying.append(GreedyCycle((), 0, ()))
            return
        target, state = self._target, self._state
        step = target.decode_mtp(state, self._tokens, self._hidden, **self._options)
        drafted = step.need_logits().argmax()
        while len(drafted) < depth:
            hidden = step.need_hidden()[-1:]
            step = target.decode_mtp(state, drafted[-1:], hidden, provisional=True, **self._options)
            drafted += step.need_logits().argmax()
        output = target.decode(state, [self._tokens[-1], *drafted])
        best = output.need_logits().argmax()
        accepted = 0
        while accepted < depth and drafted[accepted] == best[accepted]:
            accepted += 1
        emitted = best[: accepted + 1]
        ends = [i for i, token in enumerate(emitted, start=1) if token in self._stop]
        kept = min([self._left, len(emitted), *ends])
        self._over = bool(ends) and ends[0] <= kept or kept == self._left
        self._left -= kept
        self._rows = output.need_hidden()
        self._emitted = tuple(emitted[:kept])
        self._flying.append(GreedyCycle(tuple(drafted), accepted, self._emitted))

    def _settle(self) -> None:
        """Commit the last cycle: its rows, and the pairs that wait for the next draft."""
        if self._rows is not None:
            self._target.commit(self._state, len(self._emitted))
            self._hidden = self._rows[: len(self._emitted)]
            self._tokens = list(self._emitted)
            self._rows = None

    def collect(self) -> GreedyCycle:
        return self._flying.pop(0)

    def keep(self, tokens: int) -> None:
        if self._flying or self._rows is None:
            raise StateError("the tokens of a cycle are taken back while another one runs, or before one ran")
        self._left += len(self._emitted) - tokens
        self._emitted = self._emitted[:tokens]
        self._over = False

    def close(self) -> Hidden:
        if self._flying:
            raise StateError("cycles are closed while one is in flight")
        self._settle()
        return self._hidden

"""How a pass is launched: op by op, or as a backend has recorded it.

A family's code runs once per pass and mostly does the same thing each time: the same ops over the same weights, with
other tokens, caches and lengths. A backend whose launches cost something (function calls, CUDA launches) may run that
code once per number of rows, keep what it launched, and launch it again as one piece. That is the backend's own affair;
this file is the joint. Ops that offer nothing run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from specdec.backends.caches import Array, Cache, HeadRows
from specdec.contract import GreedyCycle

Body = Callable[[Sequence[Any], Sequence[int], Array | None], Array]
"""``body(caches, tokens, hidden)``: a pass over T tokens, and hidden states ``[T, H]`` where it takes some.

It gives an array ``[T, H]`` and appends provisional rows to the caches. What it launches may depend on T alone.
"""


class Pass(Protocol):
    """One kind of pass over the caches of one sequence."""

    def run(self, tokens: Sequence[int], hidden: Array | None = None) -> Array:
        """What the body gives for these tokens; it stays valid whatever runs later."""

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last run in all caches; 0 keeps nothing."""


@runtime_checkable
class ChainsGreedily(Pass, Protocol):
    """A pass that can draft: run several times, each time over the token that its last output led to."""

    def chain(self, tokens: Sequence[int], hidden: Array, depth: int, head: Array) -> tuple[int, ...] | None:
        """``depth`` >= 1 tokens: each the best, by the head ``[V, H]``, for the last row of a pass.

        The first pass runs over ``tokens`` and ``hidden``, every other over the token before it and that last row. All
        their rows are kept in the caches, those of a pass that is followed by no token too. Same bits as pass by pass.
        None: not offered for these arguments; nothing happened. Raises: ContractError for logits that are not finite.
        """


class Passes(Protocol):
    """One kind of pass, for any sequence."""

    eager_reason: str  # why the passes run op by op; "" where they are recorded

    def bind(self, caches: Sequence[Cache]) -> Pass:
        """The pass over these caches."""


@attrs.frozen(kw_only=True)
class CycleSetup:
    """What cycles over a target's pass and its head's pass start from; see ``specdec.contract.GreedyStart``.

    Attributes:
        tokens: of the pairs that wait, the pending token last.
        hidden: their hidden states ``[n, H]``.
        lm_head: the target's output head ``[V, H]``, as ``weight()`` returned it.
        draft_head: the one that drafts are made with: a weight, or rows that ``head_rows`` gathered where ``pruned``.
        stop_tokens: generation ends after one of these.
        limit: and after so many tokens.
    """

    tokens: tuple[int, ...]
    hidden: Array
    lm_head: Array
    draft_head: Array | HeadRows
    pruned: bool
    stop_tokens: tuple[int, ...]
    limit: int


class PassCycles(Protocol):
    """Greedy cycles over the caches of one sequence: ``specdec.contract.GreedyCycles`` over passes."""

    def submit(self, depth: int) -> None:
        """Start a cycle behind those in flight."""

    def collect(self) -> GreedyCycle:
        """The outcome of the oldest cycle in flight."""

    def keep(self, tokens: int) -> None:
        """Take back all but the first ``tokens`` tokens of the last collected cycle; none is in flight."""

    def close(self) -> Array:
        """Leave both passes' caches as single passes would; hidden states ``[n, H]`` of the pairs that wait then."""


@runtime_checkable
class RunsGreedyCycles(Protocol):
    """Ops that can run whole greedy cycles without the host."""

    def greedy_cycles(self, target: Pass, mtp: Pass, setup: CycleSetup) -> PassCycles | None:
        """Cycles over these passes, which the same ops bound; None where they cannot run these. Nothing happened then.

        The head's cache holds true pairs alone when this is called.
        """


class EagerPass:
    """The ops of a body one by one."""

    def __init__(self, body: Body, caches: Sequence[Cache]) -> None:
        self._body = body
        self._caches = caches

    def run(self, tokens: Sequence[int], hidden: Array | None = None) -> Array:
        return self._body(self._caches, tokens, hidden)

    def commit(self, rows: int) -> None:
        for cache in self._caches:
            cache.commit(rows)


class EagerPasses:
    """Passes that are not recorded."""

    def __init__(self, body: Body, eager_reason: str = "") -> None:
        self.eager_reason = eager_reason
        self._body = body

    def bind(self, caches: Sequence[Cache]) -> EagerPass:
        return EagerPass(self._body, caches)

"""How a pass is launched: op by op, or as a backend has recorded it.

A family's code runs once per pass and mostly does the same thing each time: the same ops over the same weights, with
other tokens, caches and lengths. A backend whose launches cost something (function calls, CUDA launches) may run that
code once per number of rows, keep what it launched, and launch it again as one piece. That is the backend's own affair;
this file is the joint. Ops that offer nothing run eagerly.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs

from specdec.backends.caches import Array, Cache, HeadRows

Body = Callable[[Sequence[Any], Sequence[int], Array | None], Array]
"""``body(caches, tokens, hidden)``: a pass over T tokens, and hidden states ``[T, H]`` where it takes some.

It gives an array ``[T, H]`` and appends provisional rows to the caches. What it launches may depend on T alone.
"""


class Pass(abc.ABC):
    """One kind of pass over the caches of one sequence."""

    @abc.abstractmethod
    def run(self, tokens: Sequence[int], hidden: Array | None = None) -> Array:
        """What the body gives for these tokens; it stays valid whatever runs later."""

    @abc.abstractmethod
    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last run in all caches; 0 keeps nothing."""

    def chain(self, tokens: Sequence[int], hidden: Array, depth: int, head: Array) -> tuple[int, ...] | None:
        """Draft greedily: ``depth`` >= 1 tokens, each the best, by the head ``[V, H]``, for the last row of a pass.

        The first pass runs over ``tokens`` and ``hidden``, every other over the token before it and that last row. All
        their rows are kept in the caches, those of a pass that is followed by no token too. Same bits as pass by pass.
        None: not offered for these arguments; nothing happened. Raises: ContractError for logits that are not finite.
        """
        return None


class Passes(Protocol):
    """One kind of pass, for any sequence."""

    eager_reason: str  # why the passes run op by op; "" where they are recorded

    def bind(self, caches: Sequence[Cache]) -> Pass:
        """The pass over these caches."""


@attrs.frozen(kw_only=True)
class WaitingPairs:
    """The MTP pairs that wait when a device takes the cycles over, and the head to draft with.

    Attributes:
        tokens: of the pairs, the pending token last.
        hidden: their hidden states ``[n, H]``.
        head: a weight, or the rows of one that ``head_rows`` gathered.
    """

    tokens: tuple[int, ...]
    hidden: Array
    head: Array | HeadRows


@attrs.frozen(kw_only=True)
class ExecutorSetup:
    """What a device's executor starts from.

    Attributes:
        pending: the token that rides in the first verification pass.
        waiting: None where nothing is drafted; then all cycles have depth 0.
        lm_head: the target's output head ``[V, H]``, as ``weight()`` returned it.
        stop_tokens: generation ends after one of these.
        limit: and after so many tokens.
        closed: called by ``close`` with the hidden states ``[n, H]`` of the pairs that wait then (None without
            ``waiting``), once all caches are as single passes would have left them.
    """

    pending: int
    waiting: WaitingPairs | None
    lm_head: Array
    stop_tokens: tuple[int, ...]
    limit: int
    closed: Callable[[Array | None], None]


class EagerPass(Pass):
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

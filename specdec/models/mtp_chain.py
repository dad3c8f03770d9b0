"""Chain several MTP modules: each one reads the output of the module before it and predicts one token further ahead.

For position i, module k (of D) joins the output of module k - 1 there with token i + k and predicts token i + k + 1;
module 1 starts from the target's hidden state. Tokens that are not known yet are those that the draft has so far, so a
draft takes one pass of each module over the positions that some module has not seen with true tokens. Drafts of more
than D tokens go on with the last module's own output, as those of a single module do.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2 (equations 21 to 24).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.backends.ops import Array, Cache
from specdec.backends.passes import Pass

if TYPE_CHECKING:
    from specdec.contract import Hidden


class LaterModules:
    """The modules after the first one, over one sequence.

    Attributes:
        caches: one per module.
        start: pairs that every module has seen with true tokens.
        tokens, hidden: the pairs after those that the first module has seen, with the target's hidden states.
    """

    def __init__(self, passes: Sequence[Pass], caches: Sequence[Cache]) -> None:
        self._passes, self.caches = passes, caches
        self.restart(0)

    def restart(self, start: int, tokens: Sequence[int] = (), hidden: Hidden | None = None) -> None:
        """Continue from ``start`` pairs in all caches and these later ones."""
        self.start, self.tokens, self.hidden = start, list(tokens), hidden
        self._output: Array | None = None  # of the last module that ran, a row per pair from ``start`` on
        self._ran, self._drafted = 0, list[int]()  # modules that ran, and tokens drafted, since the last true pair

    @property
    def module(self) -> int:
        """Which module ran last, from 0 for the first."""
        return max(0, self._ran - 1)

    @property
    def drafting(self) -> bool:
        """Whether true pairs went before, so that a further token can be drafted."""
        return self._output is not None

    def joined(self, tokens: Sequence[int], hidden: Hidden) -> tuple[list[int], Hidden]:
        """The pairs that the first module runs again, because later ones need its output, and these true ones."""
        self.settle()
        return [*self.tokens, *tokens], hidden if self.hidden is None else self.hidden.join([hidden])

    def begin(self, tokens: list[int], hidden: Hidden, output: Array) -> None:
        """The first module has run over these pairs from ``start`` on, all of them true."""
        self.restart(self.start, tokens, hidden)
        self._output, self._ran = output, 1

    def step(self, token: int) -> Array:
        """The output of the next module for all rows, after another drafted token."""
        assert self._output is not None
        self._drafted.append(token)
        if self._ran <= len(self._passes):
            self._output = self._run([*self.tokens, *self._drafted][self._ran :], self._output)
        else:
            self._output = self._passes[-1].run([token], self._output[-1:])
            self._passes[-1].commit(1)
        return self._output

    def settle(self) -> None:
        """Run the modules that the last draft did not reach over the true tokens, so that pairs need not wait."""
        if self._output is None:
            return
        while self._ran <= len(self._passes) and len(self.tokens) > self._ran:
            self._output = self._run(self.tokens[self._ran :], self._output[: len(self.tokens) - self._ran])
        known = max(0, len(self.tokens) - len(self._passes))
        left = self.tokens[known:]
        self.restart(self.start + known, left, self.hidden[known:] if self.hidden is not None and left else None)

    def cut(self, fed: int) -> None:
        """Forget the pairs from ``fed`` on, and what drafts have left; the tokens in the pairs before it stay true."""
        self.settle()
        start = min(self.start, fed)
        left = max(0, fed - self.start)
        self.restart(start, self.tokens[:left], self.hidden[:left] if self.hidden is not None and left else None)
        for cache in self.caches:
            cache.truncate(min(cache.length, self.start))

    def _run(self, tokens: Sequence[int], hidden: Array) -> Array:
        number = self._ran - 1
        self.caches[number].truncate(self.start)
        output = self._passes[number].run(tokens, hidden)
        self._passes[number].commit(len(tokens))
        self._ran += 1
        return output

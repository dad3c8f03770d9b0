"""Guards a logits processor, and finds out whether its answers depend on anything but their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from specdec.contract import LogitsProcessor
from specdec.errors import ConfigError, ContractError, SpecdecError
from specdec.registry import Guard, answers

if TYPE_CHECKING:
    from specdec.contract import Float32

FIRST_ROWS = 4  # asked twice at once, and then every row whose number is a power of two
KEPT_ROWS = 4  # asked once more at the end: the first, and the last of those asked twice


@attrs.frozen
class _Sample:
    """A row, and the answer to it."""

    logits: Float32
    history: tuple[int, ...]
    answer: Float32


class GuardedProcessor(LogitsProcessor):
    """A processor behind its guard.

    It gets copies of its arguments. A few rows are asked twice, at once and again when the generation ends: an answer
    that differs follows a clock, a generator or a counter, and then the output depends on more than the target. State
    that serves as a cache gives the same answers and is not flagged.

    Attributes:
        unstable: why its answers cannot be relied on; empty while they can.
    """

    def __init__(self, inner: LogitsProcessor, guard: Guard) -> None:
        self._guard = guard
        self._process = guard.bind("process", lambda row, history: answers.row(inner.process(row.copy(), history), row))
        self._legal = guard.bind("legal", lambda draft, seen: answers.legal(inner.legal(draft, seen), len(draft)))
        self._forced = guard.bind("forced", lambda seen: answers.forced(inner.forced(seen)))
        self._rows = 0
        self._samples: list[_Sample] = []
        self.unstable = ""

    def process(self, logits: Float32, history: Sequence[int]) -> Float32:
        answer = self._ask(logits, history)
        self._rows += 1
        if self._rows <= FIRST_ROWS or self._rows & (self._rows - 1) == 0:
            sample = _Sample(logits.copy(), tuple(history), answer.copy())
            self._compare(sample)
            self._samples.append(sample)
            del self._samples[1 : -(KEPT_ROWS - 1)]
        return answer

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        count: int = self._legal(tuple(draft), history)
        return count

    def forced(self, history: Sequence[int]) -> Sequence[int]:
        tokens: Sequence[int] = self._forced(list(history))
        return tokens

    def settle(self) -> str:
        """Ask the kept rows once more, when the generation is over; returns ``unstable``."""
        try:
            for sample in self._samples:
                self._compare(sample)
        except SpecdecError as error:
            self.unstable = f"asked again, {error.message}"
        self._samples.clear()
        return self.unstable

    def _ask(self, logits: Float32, history: Sequence[int]) -> Float32:
        if not np.all(logits < np.inf):
            raise ContractError("the target's logits are not finite", processor=self._guard.label)
        answer: Float32 = self._process(logits, list(history))
        if answer.max() == -np.inf and logits.max() > -np.inf:
            error = ConfigError(
                f"no token is allowed here: {self._guard} forbids every token that is left after a history of "
                f"{len(history)}",
                plugin=self._guard.label,
                try_="fewer bans, a smaller min_new_tokens (no end before that), or a grammar that can end",
            )
            error.plugin = self._guard.kind, self._guard.name
            raise error
        return answer

    def _compare(self, sample: _Sample) -> None:
        if not self.unstable and not np.array_equal(self._ask(sample.logits, sample.history), sample.answer):
            self.unstable = (
                f"{self._guard} answered twice for the same history of {len(sample.history)} tokens, differently"
            )

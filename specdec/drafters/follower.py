"""The sequence of a draft model: follows the committed tokens, and drafts on provisional rows."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.contract import WAITING_ROWS, ForwardOutput, ForwardPass, Logits, Passes, PassRequest, State
from specdec.text import common_prefix


class Follower:
    """Tracks the tokens in the model's state, and the provisional rows of the last decode.

    Drafting uses provisional rows: step i decodes ``[waiting ..., x_1 .. x_i]`` from the committed prefix. Afterwards
    only the rows of the last decode that match the target's decision are committed, so rollback is free for every
    family, recurrent ones included. The last drafted token has not been decoded; if accepted, it waits for the next
    decode. Tokens also wait while nothing is drafted.

    In every method, ``tokens`` are all committed tokens in this model's ids; the state holds the first ``held``.
    """

    def __init__(self, model: ForwardPass, state: State) -> None:
        self.model = model
        self.state = state
        self._decoded: list[int] = []
        self.passes = 0
        self.prefilled = 0

    @property
    def held(self) -> int:
        """The number of tokens in the state."""
        return self.state.length

    @property
    def waits(self) -> bool:
        """Whether rows of a decode wait for a decision."""
        return bool(self._decoded)

    def settle(self, tokens: Sequence[int], stable: int) -> None:
        """Commit the rows of the last decode that match ``tokens`` before position ``stable``."""
        if self._decoded:
            decided = tokens[self.held : min(stable, self.held + len(self._decoded))]
            self.model.commit(self.state, common_prefix(self._decoded, decided))
            self._decoded = []

    def cut(self, length: int) -> None:
        """Hold at most the first ``length`` tokens."""
        if self._decoded:
            self.model.commit(self.state, 0)
            self._decoded = []
        if self.held > length:
            self.model.rewind(self.state, length)

    def prefill(self, tokens: Sequence[int], end: int) -> None:
        """Hold the first ``end`` tokens."""
        self.settle(tokens, end)
        missing = tokens[self.held : end]
        if missing:
            self.model.prefill(self.state, missing)
            self.prefilled += len(missing)

    def make_room(self, tokens: Sequence[int], stable: int, depth: int) -> int:
        """How many steps a draft of ``depth`` tokens can take; prefills if too many tokens wait.

        The last drafted token is not decoded, so a draft of k tokens takes k - 1 places in the state and k rows. At
        least one committed token is left to decode.
        """
        self.settle(tokens, stable)  # an engine may ask for drafts and verify none
        steps = min(depth, self.state.capacity - len(tokens) + 1, self.model.info.max_rows)
        rows = min(WAITING_ROWS + steps - 1, self.model.info.max_rows)
        for end in (min(stable, len(tokens) - 1), len(tokens) - 1):
            if len(tokens) - self.held + steps - 1 > rows:
                self.prefill(tokens, end)
        return steps

    def step(self, tokens: Sequence[int], drafted: Sequence[int]) -> Passes[Logits]:
        """The logits after ``tokens`` and ``drafted``, in the last row."""
        self._decoded = [*tokens[self.held :], *drafted]
        self.passes += 1
        output: ForwardOutput = yield from PassRequest(self.model, self.state, self._decoded)
        return output.need_logits()

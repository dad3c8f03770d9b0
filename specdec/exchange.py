"""What targets, families and drafters exchange beside tokens and logits: hidden states, MTP pairs, shared weights.

A plugin that drafts from tokens needs nothing of this. Everything here is also a name of ``specdec.contract``.
"""

from __future__ import annotations

import abc
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]
    Float64 = NDArray[np.float64]


class Hidden(abc.ABC):
    """Hidden states of T rows, left on the device: they can be sliced, joined and handed back to the target."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """T."""

    @abc.abstractmethod
    def __getitem__(self, rows: slice) -> Hidden:
        """A contiguous run of rows."""

    @abc.abstractmethod
    def join(self, others: Sequence[Hidden]) -> Hidden:
        """These rows followed by those of ``others``."""

    @abc.abstractmethod
    def rows(self) -> Float32:
        """All states on the host, ``[T, H]`` float32. Costly; for drafters that compute there."""


WAITING_ROWS = 8  # most pairs in the pass that gives the first draft token; any more are fed before it
IDLE_ROWS = 1024  # pairs that may wait while nothing is drafted; one long pass is cheaper than many short ones


class MtpPairs:
    """The ledger of one sequence's MTP pairs: which are in the head's cache, and which wait to be fed.

    Pair j is (h_j, x_{j+1}): the target's hidden state of position j after the final norm, and the token after it.
    Pairs ``0 .. fed - 1`` are in the cache. The hidden states of positions ``fed .. length - 1`` wait; the token of the
    last one is still pending. The target adds what it commits; the head's passes advance ``fed``.

    Attributes:
        fed: pairs in the cache.
        waiting: positions whose pair is not in the cache.
    """

    fed: int
    waiting: int

    def __init__(self) -> None:
        self.fed = 0
        self.waiting = 0
        self._hidden: list[Hidden] = []  # of positions fed .. length - 1
        self._tokens: list[int] = []  # the tokens after them, without the pending one
        self._marks: dict[int, Hidden] = {}  # length -> last hidden state there, for a rewind

    @property
    def length(self) -> int:
        """Positions known. Less than the state's length if the state was built without the ledger."""
        return self.fed + self.waiting

    @property
    def last(self) -> Hidden | None:
        """The hidden state of the last position, while it waits."""
        return self._hidden[-1][-1:] if self._hidden else None

    def add(self, tokens: Sequence[int], hidden: Hidden, length: int) -> None:
        """Add committed rows: their tokens and hidden states. ``length`` is the state's length before them.

        Does nothing after a gap: a state that was built without the ledger has lost hidden states for good.
        """
        if length != self.length:
            return
        # x_0 is in no pair, and after a cut the pair of x_fed is in the cache
        self._tokens += tokens if self._hidden else tokens[1:]
        self._hidden.append(hidden)
        self.waiting += len(tokens)

    def take(self, pending: int | None = None) -> tuple[list[int], Hidden]:
        """Remove the waiting pairs, for a pass of the head. Without ``pending``, the last hidden state stays."""
        tokens, hidden = self._tokens, self._hidden[0].join(self._hidden[1:]) if self._hidden[1:] else self._hidden[0]
        self._tokens = []
        if pending is None:
            self._hidden, self.waiting = [hidden[-1:].join([])], 1  # a copy, so that a prompt's rows are freed
            return tokens, hidden[:-1]
        self._hidden, self.waiting = [], 0
        return [*tokens, pending], hidden

    def resume(self, fed: int, tokens: Sequence[int], hidden: Hidden) -> None:
        """Continue from ``fed`` pairs in the cache and these waiting ones; ``tokens`` lacks the pending token."""
        self.fed, self._tokens, self._hidden, self.waiting = fed, list(tokens), [hidden], len(hidden)

    def mark(self, points: Iterable[int]) -> None:
        """Keep the last hidden state, for a rewind to the present length. Earlier marks stay only at ``points``."""
        if self.last is not None:
            self._marks[self.length] = self.last
        kept = set(points)
        self._marks = {length: hidden for length, hidden in self._marks.items() if length in kept}

    def knows(self, length: int) -> bool:
        """Whether the next pair is known after ``cut(length)``: position ``length - 1`` waits, or was marked."""
        return length == 0 or length > self.fed or length in self._marks

    def cut(self, length: int) -> None:
        """Forget the positions from ``length`` on. If ``knows(length)`` is False, the same token must come next."""
        if length > self.fed and self._hidden:
            hidden = self._hidden[0].join(self._hidden[1:])
            self._hidden, self._tokens = [hidden[: length - self.fed]], self._tokens[: length - self.fed - 1]
        else:
            marked = self._marks.get(length)
            self.fed = min(length, self.fed) if marked is None else length - 1
            self._hidden, self._tokens = [] if marked is None else [marked], []
        self.waiting = sum(map(len, self._hidden))
        self._marks = {at: hidden for at, hidden in self._marks.items() if at <= length}


@attrs.frozen(kw_only=True, eq=False)
class SharedWeights:
    """The weights that a trained draft head has in common with its target.

    Attributes:
        ops: the ``specdec.backends.ops.Ops`` whose arrays these are; None for arrays in host memory, as
            ``torch.as_tensor`` takes them.
        embed_tokens: the embedding table ``[V, H]``.
        lm_head: the output head ``[V, H]``; the same object if the two are tied.
        embed_scale: what the target multiplies embeddings by.
    """

    ops: Any = None
    embed_tokens: Any
    lm_head: Any
    embed_scale: float = 1.0


class Seen:
    """The distinct tokens of a context, in the order of their first appearance, and how often each was generated.

    Attributes:
        ids: int32 token ids.
        generated: int32 counts, one for each id, of the tokens from ``generated_from`` on.
    """

    __slots__ = ("_generated_from", "_places", "_tokens", "generated", "ids")

    def __init__(self, generated_from: int) -> None:
        self._generated_from = generated_from
        self._places: dict[int, int] = {}
        self._tokens: list[int] = []
        self.ids = array("i")
        self.generated = array("i")

    def follows(self, tokens: Sequence[int], generated_from: int) -> bool:
        """Whether the tokens counted so far are the first ones of ``tokens``."""
        counted = self._tokens
        return generated_from == self._generated_from and tokens[: len(counted)] == counted

    def extend(self, tokens: Sequence[int]) -> None:
        """Count those of ``tokens`` that are new."""
        for position in range(len(self._tokens), len(tokens)):
            token = tokens[position]
            place = self._places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.generated.append(0)
            self.generated[place] += position >= self._generated_from
            self._tokens.append(token)


class FamilyConfig(Protocol):
    """What specdec reads from the config of any family."""

    @property
    def vocab_size(self) -> int:
        """Token ids, V."""

    @property
    def hidden_size(self) -> int:
        """H."""

    @property
    def layers(self) -> int:
        """Decoder layers, without those of the MTP head."""

    @property
    def max_positions(self) -> int:
        """Most tokens that a sequence may hold."""

    @property
    def mtp_layers(self) -> int:
        """Layers of the MTP head; 0 without one."""

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding table."""

    @property
    def expert_share(self) -> float:
        """The share of routed experts that one row reads; 1.0 for dense models."""

    def state_bytes(self, width: int, *, mtp: bool = True) -> tuple[int, int]:
        """Bytes of state per token, the MTP head's included with ``mtp``, and per sequence.

        ``width`` is the bytes of an activation.
        """


@attrs.frozen(kw_only=True)
class ModelSpec:
    """A family: which ``model_type`` values it reads and what builds it over a backend's ops."""

    name: str
    model_types: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], FamilyConfig]  # config.json -> the family's own attrs class
    build: Callable[[Any, Any], Any]  # (family config, specdec.models.weights.Weights) -> DecoderModel
    help: str = ""

"""From a block's hidden states to its tokens: the hook of DFlash heads, and DSpark's refiner behind it.

A block's rows know nothing of the tokens that are drafted in the same block. A refiner may: it is a generator that
yields the logits of each next token and gets the token that was drafted from them. What it yields may depend on the
block and on the tokens it got, never on a draw that is still to come, so a draft's distributions stay those its tokens
were drawn from. Returning ends the draft; that decision may depend on the same.
"""

from __future__ import annotations

import abc
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Self

import attrs
import numpy as np

from specdec.backends.arrays import HostLogits
from specdec.backends.ops import Array, Ops
from specdec.contract import Logits
from specdec.drafters.heads.layout import Layout
from specdec.models.weights import Weights

if TYPE_CHECKING:
    from specdec.contract import Float32


@attrs.frozen(kw_only=True, eq=False)
class Block:
    """One pass of a block head, as a refiner sees it.

    Attributes:
        pending: the last committed token.
        hidden: the rows that draft, after the final norm, float32 ``[K, H_d]``.
        logits: their logits over the head's vocabulary, ``[K, V_d]``.
        ids: the target's id of each token of that vocabulary, ascending; None if they are the same.
    """

    pending: int
    hidden: Float32
    logits: Logits
    ids: np.ndarray[Any, np.dtype[np.int64]] | None

    def __len__(self) -> int:
        return len(self.hidden)


Refined = Generator[Logits, int, None]


class Refiner(abc.ABC):
    """Makes the logits of a block's tokens; one object per head, without state of its own."""

    @classmethod
    def of(cls, weights: Weights, layout: Layout) -> Self:
        """Build from tensors of the head's checkpoint, or record their names in a dry run. Reads none by default."""
        return cls()

    @abc.abstractmethod
    def refine(self, block: Block) -> Refined:
        """Yield one row of logits over the head's vocabulary for each token; ``yield`` returns the drafted id."""


@attrs.frozen(kw_only=True, eq=False)
class MarkovRefiner(Refiner):
    """DSpark: a bias of low rank from the token before, and a confidence that may end the draft.

        logits_j = base_j + W2 (gate * W1[prev])    gated by the state and the embedding; "rnn" keeps a state

    Source: DeepSpec's DSpark heads; ``W1 [V, r]``, ``W2 [V_d, r]``. ``least``: a row whose predicted acceptance is
    below it ends the draft before its token.
    """

    ops: Ops
    kind: str
    first: Array  # W1 on the backend, read row by row
    second: Array
    gate: tuple[Float32, Float32] | None = None  # of gate_proj or joint_proj: weight and bias
    proj: tuple[Float32, Float32] | None = None  # of the confidence head
    joined: bool = False
    least: float = 0.0

    @classmethod
    def of(cls, weights: Weights, layout: Layout) -> Self:
        rank, hidden = layout.markov_rank, layout.geometry.hidden
        own = weights.under("markov_head.")
        vocab = layout.target_vocab or (own.shape_of("markov_w1.weight") or (0,))[0]
        second = own.tensor("markov_w2.weight", (layout.draft_vocab, rank))
        gate = proj = None
        if layout.markov == "gated":
            gate = _dense(own, "gate_proj", rank, hidden + rank)
        elif layout.markov == "rnn":
            gate = _dense(own, "joint_proj", 3 * rank, 2 * rank + hidden)
        if layout.confidence:
            width = hidden + rank if layout.confidence_joined else hidden
            proj = _dense(weights.under("confidence_head."), "proj", 1, width)
        return cls(
            ops=weights.ops,
            kind=layout.markov,
            first=own.matrix("markov_w1.weight", (vocab, rank)),
            second=weights.ops.weight(second[list(layout.order)] if layout.order else second),
            gate=gate,
            proj=proj,
            joined=layout.confidence_joined,
        )

    def refine(self, block: Block) -> Refined:
        previous, state = block.pending, np.zeros(self.second.shape[1], np.float32)
        for row, hidden in enumerate(block.hidden):
            embedded = self.ops.embed(self.first, [previous])
            known = self.ops.to_host(embedded).float().numpy()[0]
            if self.least > 0 and self.proj is not None and self._confidence(hidden, known) < self.least:
                return
            if self.gate is not None:
                mixed, state = self._gated(hidden, known, state)
                embedded = self.ops.from_host(self.ops.to_host(embedded).new_tensor(mixed[None]))
            bias = self.ops.head(embedded, self.second).rows()[0]
            previous = yield HostLogits((block.logits.rows()[row] + bias)[None])

    def _confidence(self, hidden: Float32, known: Float32) -> float:
        assert self.proj is not None
        weight, bias = self.proj
        features = np.concatenate([hidden, known]) if self.joined else hidden
        return float(_sigmoid(weight @ features + bias)[0])

    def _gated(self, hidden: Float32, known: Float32, state: Float32) -> tuple[Float32, Float32]:
        """What W2 reads, and the next state."""
        assert self.gate is not None
        weight, bias = self.gate
        if self.kind == "gated":
            return _sigmoid(weight @ np.concatenate([hidden, known]) + bias) * known, state
        keep, candidate, out = np.split(weight @ np.concatenate([state, known, hidden]) + bias, 3)
        keep = _sigmoid(keep)
        return np.tanh(out), keep * state + (1 - keep) * np.tanh(candidate)


def _dense(weights: Weights, name: str, rows: int, columns: int) -> tuple[Any, Any]:
    """A small matrix and its bias, computed on the host in float32; in a dry run, tensors without data."""
    pair = (weights.tensor(f"{name}.weight", (rows, columns)), weights.tensor(f"{name}.bias", (rows,)))
    return pair if pair[0].is_meta else (pair[0].float().numpy(), pair[1].float().numpy())


def _sigmoid(x: Float32) -> Float32:
    values: Float32 = (1 / (1 + np.exp(-x))).astype(np.float32)
    return values

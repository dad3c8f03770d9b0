"""Pruned heads: gathered rows of an output head, and their logits, addressed by token id (-inf for other ids)."""

from __future__ import annotations

import abc
import bisect
import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec.backends.arrays import HostLogits, not_finite
from specdec.backends.cpu.arrays import CPU
from specdec.contract import Choosing, Context, Logits, Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.backends.cpu.library import Kernels
    from specdec.contract import Float32

    Int32 = NDArray[np.int32]

_I64x2 = ctypes.c_int64 * 2
_F32x2 = ctypes.c_float * 2


class SearchKernels:
    """The functions of kernels/choice.cpp and kernels/search.cpp on rows of float32 logits, passed by address.

    ``ids`` is the address of the int32 token ids of a pruned row, 0 for a full row.
    """

    __slots__ = ("_best_two", "_prepared", "choose_rows", "greedy", "logsumexp")

    def __init__(self, kernels: Kernels, choose_rows: Callable[..., None]) -> None:
        """``choose_rows``: the kernel of this name, without the number of threads."""
        self._best_two = kernels.function("best_two", "ppipp", ctypes.c_int64)
        self.logsumexp = kernels.function("logsumexp", "pi", ctypes.c_double)
        self.choose_rows = choose_rows
        self._prepared: ChoiceSettings | None = None
        self.greedy, _ = self.choice(GREEDY)

    def best(self, at: int, size: int, ids: int = 0) -> tuple[list[int], list[float]] | None:
        """Return up to two best tokens and their logits; None for a row with a NaN."""
        tokens, values = _I64x2(), _F32x2()
        count = self._best_two(at, ids, size, tokens, values)
        return None if count < 0 else (tokens[:count], values[:count])

    def choice(self, choosing: Choosing) -> tuple[Any, Any]:
        """Return the ``Choice`` of kernels/choice.cpp, and what must live as long."""
        prepared = self._prepared
        if prepared is None or prepared.sampling is not choosing.sampling:
            prepared = self._prepared = ChoiceSettings(choosing.sampling)
        return prepared.of(choosing)


GREEDY = Choosing((), Context([]))
_NOT_FINITE = -2  # kernels/choice.cpp
_Choice = ctypes.c_int64 * 22
_SEEN, _GENERATED, _SEEN_COUNT, CHOICE_DRAFTED, _FIRST, _POSITION, _END_AFTER = range(15, 22)


class ChoiceSettings:
    """A ``Sampling`` in the form of kernels/choice.cpp."""

    __slots__ = ("_alive", "_bytes", "_counts", "sampling")

    def __init__(self, sampling: Sampling) -> None:
        s = self.sampling = sampling
        self._counts = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        biased = array("i", s.logit_bias.keys()), array("d", s.logit_bias.values())
        banned, ends = array("i", s.banned), array("i", s.end_tokens)
        self._alive = *biased, banned, ends
        at = [one.buffer_info()[0] for one in self._alive]
        self._bytes = struct.pack(
            "6d16q",
            *(s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty),
            *(s.top_k, s.seed, at[0], at[1], len(biased[0]), at[2], len(banned), at[3], len(ends)),
            *[0] * 7,
        )

    def of(self, choosing: Choosing) -> tuple[Any, Any]:
        """Return the ``Choice`` of a pass, and what must live as long."""
        context, drafted = choosing.context, choosing.drafted
        choice = _Choice.from_buffer_copy(self._bytes)
        choice[_POSITION] = len(context) + choosing.first
        choice[_END_AFTER] = context.generated_from + self.sampling.min_new_tokens
        if not self._counts:
            return choice, self
        seen = context.seen()
        tokens = (ctypes.c_int64 * len(drafted))(*drafted)
        choice[_SEEN], choice[_SEEN_COUNT] = seen.ids.buffer_info()
        choice[_GENERATED] = seen.generated.buffer_info()[0]
        choice[CHOICE_DRAFTED], choice[_FIRST] = ctypes.addressof(tokens), choosing.first
        return choice, (self, seen, tokens)


class SearchedLogits(Logits):
    """Logits whose rows are searched and sampled by native kernels; what those leave open goes to the next class."""

    __slots__ = ()

    _search: SearchKernels

    @abc.abstractmethod
    def _memory(self) -> tuple[int, int, int, int, int]:
        """Address of the rows, their number, elements of a row, address of their token ids (or 0), and V."""

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        at, rows, size, of_ids, _ = self._memory()
        ids: list[list[int]] = []
        values: list[list[float]] = []
        for row in range(rows if k <= 2 else 0):
            best = self._search.best(at + 4 * size * row, size, of_ids)
            if best is None or len(best[0]) < k or best[1][k - 1] == -np.inf:  # a NaN, or fewer than k finite logits
                break
            ids.append(best[0][:k])
            values.append(best[1][:k])
        return (ids, values) if len(ids) == rows else super().topk(k)  # type: ignore[safe-super]

    def logsumexp(self) -> list[float]:
        at, rows, size, _, _ = self._memory()
        return [self._search.logsumexp(at + 4 * size * row, size) for row in range(rows)]

    def argmax(self) -> list[int]:
        tokens = self._chosen(self._search.greedy)
        return super().argmax() if min(tokens, default=0) < 0 else tokens  # type: ignore[safe-super]  # which raises

    def choose(self, choosing: Choosing) -> Sequence[int | None]:
        choice, alive = self._search.choice(choosing)
        tokens = self._chosen(choice)
        del alive  # the kernel has read its addresses
        if _NOT_FINITE in tokens:
            raise not_finite(tokens.index(_NOT_FINITE))
        return [token if token >= 0 else None for token in tokens]

    def _chosen(self, choice: Any) -> list[int]:
        """The token of every row, or a negative number."""
        at, rows, size, ids, vocab = self._memory()
        tokens = (ctypes.c_int64 * rows)()
        self._search.choose_rows(at, rows, size, ids, vocab, choice, tokens)
        return list(tokens)


class HeadRows:
    """Gathered rows of a head: rows shared with other heads, then a few of its own.

    The head's own rows are in a block with spare room, so extending the newest head of a block copies no rows.

    Attributes:
        parts: one or two weights ``[n, H]``, in the form that the ops take.
        ids: token id of every row ``[n]`` int32, in the order of the parts.
        vocab_size: V.
    """

    __slots__ = ("_block", "_tokens", "base", "ids", "parts", "vocab_size")

    def __init__(
        self,
        parts: tuple[Tensor, ...],
        ids: Int32,
        vocab_size: int,
        *,
        base: HeadRows | None = None,
        block: _Block | None = None,
    ) -> None:
        self.parts = parts
        self.ids = ids
        self.vocab_size = vocab_size
        self.base = self if base is None else base
        self._block = block
        self._tokens: tuple[int, ...] | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids, ascending."""
        if self._tokens is None:
            self._tokens = tuple(np.sort(self.ids).tolist())
        return self._tokens

    def missing(self, tokens: Sequence[int]) -> list[int]:
        """Return the distinct ``tokens`` without a row here, in order."""
        own = self.tokens
        return [token for token in dict.fromkeys(tokens) if not _contains(own, token)]

    def extended(self, tokens: Sequence[int], rows: Tensor) -> HeadRows:
        """Return these rows plus the given new ones ``[len(tokens), H]``."""
        used = 0 if self._block is None else len(self.ids) - len(self.base.ids)
        block = self._block
        if block is None or block.used != used or used + len(tokens) > len(block.rows):
            block = _Block.holding(self.parts[1][:used] if block is not None else None, rows)
        block.rows[used : used + len(tokens)] = rows
        block.used = used + len(tokens)
        return HeadRows(
            (self.base.parts[0], block.rows[: block.used]),
            np.concatenate([self.ids, np.array(tokens, np.int32)]),
            self.vocab_size,
            base=self.base,
            block=block,
        )


class _Block:
    """Memory for added rows, of which ``used`` are taken."""

    __slots__ = ("rows", "used")

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.used = 0

    @classmethod
    def holding(cls, old: Tensor | None, new: Tensor) -> _Block:
        """Allocate twice the room of the old and new rows, and copy the old ones."""
        kept = 0 if old is None else len(old)
        made = cls(torch.empty(2 * (kept + len(new)), new.shape[1], dtype=new.dtype, device=CPU))
        if old is not None:
            made.rows[:kept] = old
        return made


def _contains(ascending: Sequence[int], value: int) -> bool:
    at = bisect.bisect_left(ascending, value)
    return at < len(ascending) and ascending[at] == value


class PrunedLogits(HostLogits):
    """Logits ``[T, n]`` float32 of n token ids; all other ids have -inf. The numpy reference: full rows."""

    __slots__ = ("_full", "_ids", "_vocab_size")

    def __init__(self, values: Float32, ids: Int32, vocab_size: int) -> None:
        super().__init__(values)
        self._ids = ids
        self._vocab_size = vocab_size
        self._full: Float32 | None = None

    def rows(self) -> Float32:
        if self._full is None:
            self._full = np.full((len(self), self._vocab_size), -np.inf, dtype=np.float32)
            self._full[:, self._ids] = self.array
        return self._full


class NativePrunedLogits(SearchedLogits, PrunedLogits):
    """Pruned logits that are searched and sampled by native kernels, without a full row."""

    __slots__ = ("_search",)

    def __init__(self, values: Float32, head: HeadRows, search: SearchKernels) -> None:
        super().__init__(np.ascontiguousarray(values), head.ids, head.vocab_size)
        self._search = search

    def _memory(self) -> tuple[int, int, int, int, int]:
        return self.array.ctypes.data, *self.array.shape, self._ids.ctypes.data, self._vocab_size

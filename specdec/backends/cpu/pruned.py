"""Pruned heads: gathered rows of an output head, and their logits, addressed by token id (-inf for other ids)."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.backends.arrays import not_finite
from specdec.contract import Logits
from specdec.sampling import Purpose

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.backends.cpu.compiler import Kernels
    from specdec.contract import Float32

    Int32 = NDArray[np.int32]

_I64x2 = ctypes.c_int64 * 2
_F32x2 = ctypes.c_float * 2


class SearchKernels:
    """The functions of kernels/sampling.cpp on rows of float32 logits, passed by address.

    ``ids`` is the address of the int32 token ids of a pruned row, 0 for a full row.
    """

    __slots__ = ("_best_two", "_logsumexp", "_noisy_argmax_of")

    def __init__(self, kernels: Kernels) -> None:
        self._best_two = kernels.function("best_two", "ppipp", ctypes.c_int64)
        self._logsumexp = kernels.function("logsumexp", "pi", ctypes.c_double)
        self._noisy_argmax_of = kernels.function("noisy_argmax_of", "ppifiii", ctypes.c_int64)

    def best(self, at: int, size: int, ids: int = 0) -> tuple[list[int], list[float]] | None:
        """Return up to two best tokens and their logits; None for a row with a NaN."""
        tokens, values = _I64x2(), _F32x2()
        found = self._best_two(at, ids, size, tokens, values)
        return None if found < 0 else (tokens[:found], values[:found])

    def logsumexp(self, at: int, size: int) -> float:
        """Return the log-sum-exp; its bits do not depend on the order of the logits or on -inf entries."""
        value: float = self._logsumexp(at, size)
        return value

    def noisy_argmax(self, at: int, ids: int, size: int, scale: float, seed: int, position: int) -> int:
        """Sample a token from a pruned row; -1 if no logit is finite or one is NaN."""
        token: int = self._noisy_argmax_of(at, ids, size, scale, seed, position, int(Purpose.TOKEN))
        return token


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
        made = cls(torch.empty(2 * (kept + len(new)), new.shape[1], dtype=new.dtype))
        if old is not None:
            made.rows[:kept] = old
        return made


def _contains(ascending: Sequence[int], value: int) -> bool:
    at = bisect.bisect_left(ascending, value)
    return at < len(ascending) and ascending[at] == value


class PrunedLogits(Logits):
    """Logits ``[T, n]`` float32 of n token ids; all other ids have -inf. The numpy reference."""

    __slots__ = ("_full", "_ids", "_values", "_vocab_size")

    def __init__(self, values: Float32, ids: Int32, vocab_size: int) -> None:
        self._values = values
        self._ids = ids
        self._vocab_size = vocab_size
        self._full: Float32 | None = None

    def __len__(self) -> int:
        return int(self._values.shape[0])

    def argmax(self) -> list[int]:
        tokens = []
        for row, values in enumerate(self._values):
            best = values.max() if len(values) else -np.inf
            if not np.isfinite(best):
                raise not_finite(row)
            tokens.append(int(self._ids[values == best].min()))
        return tokens

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        ids: list[list[int]] = []
        values: list[list[float]] = []
        for row in self._values:
            order = np.lexsort((self._ids, -row))[:k]
            order = order[row[order] > -np.inf]
            best = self._ids[order].tolist()
            ids.append(best + self._others(best, min(k, self._vocab_size) - len(best)))
            values.append(row[order].tolist() + [-np.inf] * (len(ids[-1]) - len(best)))
        return ids, values

    def _others(self, taken: Sequence[int], count: int) -> list[int]:
        """Return the lowest ids not in ``taken``: they all have -inf, and ties are ordered by id."""
        found: list[int] = []
        token = 0
        while len(found) < count:
            if token not in taken:
                found.append(token)
            token += 1
        return found

    def gather(self, tokens: Sequence[int]) -> list[float]:
        found = []
        for row, token in enumerate(tokens):
            at = np.flatnonzero(self._ids == token)
            found.append(float(self._values[row, at[0]]) if len(at) else -np.inf)
        return found

    def rows(self) -> Float32:
        if self._full is None:
            self._full = np.full((len(self), self._vocab_size), -np.inf, dtype=np.float32)
            self._full[:, self._ids] = self._values
        return self._full


class NativePrunedLogits(PrunedLogits):
    """Pruned logits that are searched and sampled by native kernels, without a full row."""

    __slots__ = ("_kernels",)

    def __init__(self, values: Float32, head: HeadRows, kernels: SearchKernels) -> None:
        super().__init__(np.ascontiguousarray(values), head.ids, head.vocab_size)
        self._kernels = kernels

    def _at(self, row: int) -> tuple[int, int]:
        size = self._values.shape[1]
        return self._values.ctypes.data + 4 * size * row, size

    def argmax(self) -> list[int]:
        tokens = []
        for row in range(len(self)):
            found = self._kernels.best(*self._at(row), self._ids.ctypes.data)
            if found is None or not found[0] or not np.isfinite(found[1][0]):
                raise not_finite(row)
            tokens.append(found[0][0])
        return tokens

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        if k > 2:
            return super().topk(k)
        ids: list[list[int]] = []
        values: list[list[float]] = []
        for row in range(len(self)):
            found = self._kernels.best(*self._at(row), self._ids.ctypes.data)
            if found is None or len(found[0]) < k or found[1][k - 1] == -np.inf:
                return super().topk(k)  # a NaN, or fewer than k finite logits
            ids.append(found[0][:k])
            values.append(found[1][:k])
        return ids, values

    def logsumexp(self) -> list[float]:
        return [self._kernels.logsumexp(*self._at(row)) for row in range(len(self))]

    def noisy_argmax(self, row: int, scale: float, seed: int, position: int) -> int:
        at, size = self._at(row)
        token = self._kernels.noisy_argmax(at, self._ids.ctypes.data, size, scale, seed, position)
        if token < 0:
            raise not_finite(row)
        return token

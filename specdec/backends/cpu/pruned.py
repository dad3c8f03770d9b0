"""Pruned heads: gathered rows of an output head, and their logits, addressed by token id (-inf for other ids)."""

from __future__ import annotations

import bisect
import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec.backends.arrays import not_finite
from specdec.backends.cpu.arrays import CPU
from specdec.contract import Choosing, Logits, Sampling

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

    __slots__ = ("_best_two", "_choose_rows", "_exponential_sum", "_logsumexp", "_prepared")

    def __init__(self, kernels: Kernels, choose_rows: Callable[..., None]) -> None:
        """``choose_rows``: the kernel of this name, without the number of threads."""
        self._best_two = kernels.function("best_two", "ppipp", ctypes.c_int64)
        self._logsumexp = kernels.function("logsumexp", "pi", ctypes.c_double)
        self._exponential_sum = kernels.function("exponential_sum", "pifp")
        self._choose_rows = choose_rows
        self._prepared: ChoiceSettings | None = None

    def best(self, at: int, size: int, ids: int = 0) -> tuple[list[int], list[float]] | None:
        """Return up to two best tokens and their logits; None for a row with a NaN."""
        tokens, values = _I64x2(), _F32x2()
        found = self._best_two(at, ids, size, tokens, values)
        return None if found < 0 else (tokens[:found], values[:found])

    def logsumexp(self, at: int, size: int) -> float:
        """Return the log-sum-exp; its bits do not depend on the order of the logits or on -inf entries."""
        value: float = self._logsumexp(at, size)
        return value

    def noisy_argmax(self, at: int, size: int, scale: float, seed: int, position: int, ids: int, vocab: int) -> int:
        """Sample a token from a row; negative if no logit is finite or one is NaN."""
        choice = ChoiceSettings(Sampling(temperature=1.0)).fields(position=position)
        choice[CHOICE_SEED] = seed
        ctypes.c_double.from_buffer(choice).value = 1 / scale
        token = ctypes.c_int64()
        self._choose_rows(at, 1, size, ids, vocab, choice, ctypes.byref(token))
        return token.value if token.value >= 0 or token.value <= NOT_FINITE else ~token.value

    def choose(
        self, at: int, rows: int, size: int, choosing: Choosing, ids: int = 0, vocab: int = 0
    ) -> Sequence[int | None]:
        """Return the token of every row; None for a row that the kernel cannot decide."""
        choice, alive = self.choice(choosing)
        tokens = (ctypes.c_int64 * rows)()
        self._choose_rows(at, rows, size, ids, vocab or size, choice, tokens)
        del alive  # the kernel has read its addresses
        return [token if token >= 0 else None for token in tokens]

    def choice(self, choosing: Choosing) -> tuple[Any, Any]:
        """Return the ``Choice`` of kernels/choice.cpp, and what must live as long."""
        prepared = self._prepared
        if prepared is None or prepared.sampling is not choosing.sampling:
            prepared = self._prepared = ChoiceSettings(choosing.sampling)
        return prepared.of(choosing)

    def exponential_sum(self, at: int, size: int, best: float) -> int:
        """Return ``specdec.sampling.exponential_sum``."""
        sums = _I64x2()
        self._exponential_sum(at, size, best, sums)
        return (sums[0] << 40) + sums[1]


NOT_FINITE = -(2**63) + 1  # kernels/choice.cpp
_Choice = ctypes.c_int64 * 22
CHOICE_SEED, _SEEN, _GENERATED, _SEEN_COUNT, CHOICE_DRAFTED, _FIRST, _POSITION, _END_AFTER = (
    7,
    15,
    16,
    17,
    18,
    19,
    20,
    21,
)


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

    def fields(self, *, position: int) -> Any:
        """Return a ``Choice`` without history."""
        choice = _Choice.from_buffer_copy(self._bytes)
        choice[_POSITION] = position
        return choice

    def of(self, choosing: Choosing) -> tuple[Any, Any]:
        """Return the ``Choice`` of a pass, and what must live as long."""
        context, drafted = choosing.context, choosing.drafted
        choice = self.fields(position=len(context) + choosing.first)
        choice[_END_AFTER] = context.generated_from + self.sampling.min_new_tokens
        if not self._counts:
            return choice, self
        seen = context.seen()
        tokens = (ctypes.c_int64 * len(drafted))(*drafted)
        choice[_SEEN], choice[_SEEN_COUNT] = seen.ids.buffer_info()
        choice[_GENERATED] = seen.generated.buffer_info()[0]
        choice[CHOICE_DRAFTED], choice[_FIRST] = ctypes.addressof(tokens), choosing.first
        return choice, (self, seen, tokens)


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
        token = self._kernels.noisy_argmax(at, size, scale, seed, position, self._ids.ctypes.data, self._vocab_size)
        if token < 0:
            raise not_finite(row)
        return token

    def choose(self, choosing: Choosing) -> Sequence[int | None]:
        (at, size), ids = self._at(0), self._ids.ctypes.data
        return checked_rows(self._kernels.choose(at, len(self), size, choosing, ids, self._vocab_size), self._values)


def checked_rows(tokens: Sequence[int | None], rows: Float32) -> Sequence[int | None]:
    """``tokens``. Raises: ContractError where a row has no token because its logits are not finite."""
    if None in tokens:
        for number, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            if token is None and not (len(row) and np.isfinite(row.max())):
                raise not_finite(number)
    return tokens

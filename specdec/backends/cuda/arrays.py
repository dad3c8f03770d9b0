"""Logits, hidden states and gathered head rows on the device, and results that wait for the op that takes them along.

Logits are computed when somebody asks, and only as much as is asked for: the best tokens of a greedy pass need no row
of the vocabulary in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.backends.arrays import ArrayHidden, not_finite
from specdec.backends.cpu.pruned import PrunedLogits
from specdec.contract import Logits
from specdec.sampling import Purpose, gumbel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.contract import Float32


class Stats(Protocol):
    """What a head kernel says about every row, on the device."""

    @property
    def ids(self) -> Tensor:
        """Best token ids ``[T]`` int32, the lowest of equals; -1 in a row with a NaN."""

    @property
    def values(self) -> Tensor:
        """Their logits ``[T]`` float32."""

    @property
    def log_sum(self) -> Tensor:
        """Log-sum-exp of the logits ``[T]`` float32."""


class CudaHidden(ArrayHidden):
    """``[T, H]`` in act dtype."""

    __slots__ = ()

    @staticmethod
    def concatenate(arrays: list[Any]) -> Any:
        return torch.cat(arrays)


class HeadProducts(Protocol):
    """The three ways through an output head that logits need, for some rows of hidden states."""

    def logits(self) -> Tensor:
        """``[T, n]`` float32."""

    def best(self) -> Stats:
        """The best of every row."""

    def sample(self, scale: float, seed: int, position: int) -> Stats:
        """The best of every row of ``scale * logits + noise``; row t has the noise of ``position + t``."""


class _Rows:
    """What kernels told about the rows of a pass, kept on the host once it was asked for."""

    def __init__(self, parts: Sequence[HeadProducts]) -> None:
        self._parts = parts
        self._best: tuple[list[int], list[float]] | None = None
        self._log_sum: list[float] | None = None
        self._stats: list[Stats] | None = None
        self._sampled: dict[tuple[float, int, int], list[int]] = {}

    def _asked(self) -> list[Stats]:
        if self._stats is None:
            self._stats = [part.best() for part in self._parts]
        return self._stats

    def best(self) -> tuple[list[int], list[float]]:
        """Ids and logits of the best tokens; an id of -1 where a row has no finite best."""
        if self._best is None:
            self._best = _winners(self._asked())
        return self._best

    def log_sum(self) -> list[float]:
        if self._log_sum is None:
            sums = np.array([stats.log_sum.tolist() for stats in self._asked()], dtype=np.float64)
            self._log_sum = np.logaddexp.reduce(sums, axis=0).tolist()
        return self._log_sum

    def sampled(self, row: int, scale: float, seed: int, position: int) -> int:
        """The token chosen for ``row`` at ``position``; all rows are chosen in one launch, as they are in line."""
        key = scale, seed, position - row
        if key not in self._sampled:

            def score(row: int, token: int, value: float) -> float:  # of the few winners of parts, to compare them
                noise = gumbel(seed, key[2] + row, np.array([token]), Purpose.TOKEN)
                return scale * value + float(noise[0])

            self._sampled[key] = _winners([part.sample(*key) for part in self._parts], score)[0]
        return self._sampled[key][row]


def _winners(
    parts: Sequence[Stats], score: Callable[[int, int, float], float] = lambda row, token, value: value
) -> tuple[list[int], list[float]]:
    """The best of several parts of a vocabulary, and their logits; an id of -1 where a row has no finite best."""
    found = [(stats.ids.tolist(), stats.values.tolist()) for stats in parts]
    ids, values = found[0]
    for other_ids, other_values in found[1:]:
        for row, (token, value) in enumerate(zip(other_ids, other_values, strict=True)):
            if token < 0 or ids[row] < 0:
                ids[row] = -1
                continue
            ours, theirs = score(row, ids[row], values[row]), score(row, token, value)
            if theirs > ours or (theirs == ours and token < ids[row]):
                ids[row], values[row] = token, value
    return [token if math.isfinite(value) else -1 for token, value in zip(ids, values, strict=True)], values


def checked(tokens: Sequence[int]) -> list[int]:
    """``tokens``, the best of their rows. Raises: ContractError where a row has none."""
    for row, token in enumerate(tokens):
        if token < 0:
            raise not_finite(row)
    return list(tokens)


class CudaLogits(Logits):
    """``[T, V]`` float32 logits of hidden states that are still there."""

    def __init__(self, rows: int, products: HeadProducts) -> None:
        self._count = rows
        self._products = products
        self._rows = _Rows([products])
        self._array: Tensor | None = None
        self._host: Float32 | None = None

    @property
    def array(self) -> Tensor:
        """The logits on the device."""
        if self._array is None:
            self._array = self._products.logits()
        return self._array

    def __len__(self) -> int:
        return self._count

    def argmax(self) -> list[int]:
        return checked(self._rows.best()[0])

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        logits = self.array
        ids = _ordered(logits).topk(min(k, logits.shape[1]), dim=1, sorted=True).indices
        values: list[list[float]] = logits.gather(1, ids).tolist()
        return ids.tolist(), values

    def gather(self, tokens: Sequence[int]) -> list[float]:
        if not tokens:
            return []
        at = torch.tensor(list(tokens), device=self.array.device)[:, None]
        values: list[float] = self.array[: len(tokens)].gather(1, at)[:, 0].tolist()
        return values

    def logsumexp(self) -> list[float]:
        return self._rows.log_sum()

    def noisy_argmax(self, row: int, scale: float, seed: int, position: int) -> int | None:
        if position < row:
            return None
        return checked([self._rows.sampled(row, scale, seed, position)])[0]

    def rows(self) -> Float32:
        if self._host is None:
            host: Float32 = self.array.cpu().numpy()
            self._host = host
        return self._host


def _ordered(logits: Tensor) -> Tensor:
    """int64 keys ``[T, V]``, all different, ordered as the logits are and by descending id where those are equal.

    The bits of a float, with all but the sign flipped where it is negative, are ordered as the floats are.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return order * 2**32 - torch.arange(logits.shape[1], device=logits.device)


class CudaHeadRows:
    """Rows of a head, gathered: those that other heads share, and behind them those that were added.

    Attributes:
        parts: weights as the head kernels take them, one or two.
        part_ids: token ids of their rows, int32 on the device; ascending in each part.
        ids: the same on the host, one part behind the other.
        vocab_size: V.
    """

    __slots__ = ("ids", "part_ids", "parts", "tokens", "vocab_size")

    def __init__(
        self, parts: tuple[Any, ...], part_ids: tuple[Tensor, ...], ids: NDArray[np.int32], vocab_size: int
    ) -> None:
        self.parts = parts
        self.part_ids = part_ids
        self.ids = ids
        self.vocab_size = vocab_size
        self.tokens: tuple[int, ...] = tuple(np.sort(ids).tolist())

    @classmethod
    def of(
        cls, gather: Callable[[list[int]], tuple[Any, Tensor]], tokens: Sequence[int], vocab_size: int
    ) -> CudaHeadRows:
        """The rows for these ids; ``gather`` gives some rows as a weight, and their ids on the device."""
        ids = np.unique(np.array(list(tokens), dtype=np.int32))
        part, on_device = gather(ids.tolist())
        return cls((part,), (on_device,), ids, vocab_size)

    def extended(self, gather: Callable[[list[int]], tuple[Any, Tensor]], tokens: Sequence[int]) -> CudaHeadRows:
        """These rows and those for ids that are not here; the first part is shared, not copied."""
        missing = np.setdiff1d(np.array(list(tokens), dtype=np.int32), self.ids)
        if not len(missing):
            return self
        first = len(self.part_ids[0])
        added = np.union1d(self.ids[first:], missing).astype(np.int32)  # few: those of the sequence
        part, on_device = gather(added.tolist())
        ids = np.concatenate([self.ids[:first], added])
        return CudaHeadRows((self.parts[0], part), (self.part_ids[0], on_device), ids, self.vocab_size)


class CudaPrunedLogits(PrunedLogits):
    """Logits of gathered rows; the best token of a row is found on the device, everything else on the host."""

    __slots__ = ("_count", "_head", "_products", "_rows_", "_there")

    def __init__(self, rows: int, products: Sequence[HeadProducts], head: CudaHeadRows) -> None:
        super().__init__(np.empty((0, 0), np.float32), head)  # type: ignore[arg-type]  # it has the same two fields
        self._count = rows
        self._products = products
        self._rows_ = _Rows(products)
        self._there = False

    def __len__(self) -> int:
        return self._count

    def _fetch(self) -> None:
        if not self._there:
            self._values = torch.cat([part.logits() for part in self._products], dim=1).cpu().numpy()
            self._there = True

    def argmax(self) -> list[int]:
        return checked(self._rows_.best()[0])

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        self._fetch()
        return super().topk(k)

    def gather(self, tokens: Sequence[int]) -> list[float]:
        self._fetch()
        return super().gather(tokens)

    def logsumexp(self) -> list[float]:
        return self._rows_.log_sum()

    def noisy_argmax(self, row: int, scale: float, seed: int, position: int) -> int | None:
        if position < row:
            return None
        return checked([self._rows_.sampled(row, scale, seed, position)])[0]

    def rows(self) -> Float32:
        self._fetch()
        return super().rows()


# --- results that wait ------------------------------------------------------------------------------------------------


class Deferred:
    """The result of an op that the next one may take along into its own kernel.

    Whoever does anything else with it gets the tensor: it is computed then, once, by a kernel that gives the same bits.
    """

    def __init__(self, shape: Sequence[int], compute: Callable[[], Tensor]) -> None:
        self.shape = torch.Size(shape)
        self._compute: Callable[[], Tensor] | None = compute
        self._made: Tensor | None = None

    def tensor(self) -> Tensor:
        """The result itself."""
        if self._made is None:
            assert self._compute is not None
            self._made = self._compute()
            self._compute = None
        return self._made

    @property
    def computed(self) -> bool:
        """Whether somebody has asked for the tensor already."""
        return self._made is not None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


class Normed(Deferred):
    """``rms_norm(x)``: the prologue of a product."""

    def __init__(self, x: Tensor, weight: Tensor, eps: float, compute: Callable[[], Tensor]) -> None:
        super().__init__(x.shape, compute)
        self.x, self.weight, self.eps = x, weight, eps


class GatedNormed(Deferred):
    """``gated_rms_norm(x, z)``: likewise."""

    def __init__(self, x: Tensor, z: Tensor, weight: Tensor, eps: float, compute: Callable[[], Tensor]) -> None:
        super().__init__((x.shape[0], x.shape[1] * x.shape[2]), compute)
        self.x, self.z, self.weight, self.eps = x, z, weight, eps


class Rotated(Deferred):
    """``norm_rope(x)``: a query or key on its way to attention."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor | None,
        eps: float,
        frequencies: Tensor,
        position: Any,
        compute: Callable[[], Tensor],
    ) -> None:
        super().__init__(x.shape, compute)
        self.x, self.weight, self.eps, self.frequencies, self.position = x, weight, eps, frequencies, position


class Convolved(Deferred):
    """``conv_window(x)``: the delta rule convolves it itself."""

    def __init__(self, x: Tensor, weight: Tensor, cache: Any, compute: Callable[[], Tensor]) -> None:
        super().__init__(x.shape, compute)
        self.x, self.weight, self.cache = x, weight, cache


def materialised(x: Any) -> Tensor:
    """``x`` as a tensor, whether it waits or not."""
    return x.tensor() if isinstance(x, Deferred) else x

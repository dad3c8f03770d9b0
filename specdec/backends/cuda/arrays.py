"""Logits, hidden states and gathered head rows on the device, and deferred results that the next op can fuse.

Logits are computed on demand and only as far as needed: greedy decoding never writes full rows of logits to memory.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np
import torch
from torch import Tensor

from specdec.backends.arrays import ArrayHidden, not_finite
from specdec.backends.cpu.pruned import PrunedLogits
from specdec.backends.cuda.choosing import choose
from specdec.contract import Choosing, Logits
from specdec.sampling import Purpose, gumbel, is_plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.contract import Float32


class Stats(Protocol):
    """Statistics of every row from a head kernel, on the device."""

    @property
    def ids(self) -> Tensor:
        """Best token ids ``[T]`` int32; ties go to the lowest id; -1 in a row with a NaN."""

    @property
    def values(self) -> Tensor:
        """Logits of the best tokens ``[T]`` float32."""

    @property
    def log_sum(self) -> Tensor:
        """Log-sum-exp of the logits ``[T]`` float32."""


class CudaHidden(ArrayHidden):
    """``[T, H]`` in act dtype."""

    __slots__ = ()

    @staticmethod
    def concatenate(arrays: list[Any]) -> Any:
        return torch.cat(arrays)

    def rows(self) -> Float32:
        rows: Float32 = self.array.float().cpu().numpy()
        return rows


class HeadProducts(Protocol):
    """The three head computations that logits use, for given rows of hidden states."""

    def logits(self) -> Tensor:
        """``[T, n]`` float32."""

    def best(self) -> Stats:
        """Find the best token of every row."""

    def sample(self, scale: float, seed: int, position: int) -> Stats:
        """Find the best token of ``scale * logits + noise``; row t uses the noise of ``position + t``."""


class _DeviceLogits(Logits):
    """Logits whose best and sampled tokens are found on the device, once, in parts of the vocabulary."""

    def __init__(self, rows: int, parts: Sequence[HeadProducts]) -> None:
        self._count = rows
        self._parts = parts
        self._sampled: dict[tuple[float, int, int], list[int]] = {}

    def __len__(self) -> int:
        return self._count

    @functools.cached_property
    def _stats(self) -> list[Stats]:
        return [part.best() for part in self._parts]

    @functools.cached_property
    def _best(self) -> list[int]:
        return _winners(self._stats)

    def argmax(self) -> list[int]:
        return checked(self._best)

    def logsumexp(self) -> list[float]:
        sums = np.array([stats.log_sum.tolist() for stats in self._stats], dtype=np.float64)
        found: list[float] = np.logaddexp.reduce(sums, axis=0).tolist()
        return found

    def noisy_argmax(self, row: int, scale: float, seed: int, position: int) -> int | None:
        if position < row:
            return None
        key = scale, seed, position - row  # one launch samples all rows: their positions are consecutive
        if key not in self._sampled:

            def score(row: int, token: int, value: float) -> float:  # only for the winners of parts
                noise = gumbel(seed, key[2] + row, np.array([token]), Purpose.TOKEN)
                return scale * value + float(noise[0])

            self._sampled[key] = _winners([part.sample(*key) for part in self._parts], score)
        return checked([self._sampled[key][row]])[0]

    def choose(self, choosing: Choosing) -> Sequence[int | None]:
        if is_plain(choosing.sampling):
            return ()  # ``argmax`` and ``noisy_argmax`` need no logits in memory
        return choose(self.columns(), choosing, self.column_ids)

    @property
    def column_ids(self) -> NDArray[np.int32] | None:
        """Token ids of ``columns``, ascending; None: 0 to V - 1."""
        return None

    @abc.abstractmethod
    def columns(self) -> Tensor:
        """The logits on the device, float32 ``[T, n]``."""


def _winners(
    parts: Sequence[Stats], score: Callable[[int, int, float], float] = lambda row, token, value: value
) -> list[int]:
    """Merge the best tokens of several parts of a vocabulary; -1 for a row without a finite best."""
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
    return [token if math.isfinite(value) else -1 for token, value in zip(ids, values, strict=True)]


def checked(tokens: Sequence[int]) -> list[int]:
    """Return ``tokens``, the best of each row. Raises: ContractError if one is -1."""
    for row, token in enumerate(tokens):
        if token < 0:
            raise not_finite(row)
    return list(tokens)


class CudaLogits(_DeviceLogits):
    """Logits ``[T, V]`` float32, computed on demand from hidden states."""

    def __init__(self, rows: int, products: HeadProducts) -> None:
        super().__init__(rows, [products])

    @functools.cached_property
    def array(self) -> Tensor:
        """The logits on the device."""
        return self._parts[0].logits()

    def columns(self) -> Tensor:
        return self.array

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

    @functools.cached_property
    def _host(self) -> Float32:
        host: Float32 = self.array.cpu().numpy()
        return host

    def rows(self) -> Float32:
        return self._host


def _ordered(logits: Tensor) -> Tensor:
    """Distinct int64 keys ``[T, V]`` with the order of the logits; ties are ordered by descending id.

    Flipping all bits but the sign of negative floats makes the order of the bits the order of the floats.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return order * 2**32 - torch.arange(logits.shape[1], device=logits.device)


class CudaHeadRows:
    """Gathered rows of a head: rows shared with other heads, then added ones.

    Attributes:
        parts: one or two weights, in the form that the head kernels take.
        part_ids: token ids of their rows, int32 on the device; ascending in each part.
        ids: the same on the host, concatenated.
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
        """Gather the rows for these ids; ``gather`` returns rows as a weight, and their ids on the device."""
        ids = np.unique(np.array(list(tokens), dtype=np.int32))
        part, on_device = gather(ids.tolist())
        return cls((part,), (on_device,), ids, vocab_size)

    def extended(self, gather: Callable[[list[int]], tuple[Any, Tensor]], tokens: Sequence[int]) -> CudaHeadRows:
        """Return these rows plus those for missing ids; the first part is shared, not copied."""
        missing = np.setdiff1d(np.array(list(tokens), dtype=np.int32), self.ids)
        if not len(missing):
            return self
        first = len(self.part_ids[0])
        added = np.union1d(self.ids[first:], missing).astype(np.int32)  # few
        part, on_device = gather(added.tolist())
        ids = np.concatenate([self.ids[:first], added])
        return CudaHeadRows((self.parts[0], part), (self.part_ids[0], on_device), ids, self.vocab_size)


class CudaPrunedLogits(_DeviceLogits):
    """Logits of gathered rows; the best tokens are found on the device, everything else on the host."""

    def __init__(self, rows: int, products: Sequence[HeadProducts], head: CudaHeadRows) -> None:
        super().__init__(rows, products)
        self._head = head

    @functools.cached_property
    def _host(self) -> PrunedLogits:
        values = torch.cat([part.logits() for part in self._parts], dim=1).cpu().numpy()
        return PrunedLogits(values, self._head.ids, self._head.vocab_size)

    @functools.cached_property
    def _order(self) -> NDArray[np.intp]:
        return np.argsort(self._head.ids)

    @property
    def column_ids(self) -> NDArray[np.int32]:
        return self._head.ids[self._order]

    def columns(self) -> Tensor:
        logits = torch.cat([part.logits() for part in self._parts], dim=1)
        return logits[:, torch.from_numpy(self._order).to(logits.device)]

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        return self._host.topk(k)

    def gather(self, tokens: Sequence[int]) -> list[float]:
        return self._host.gather(tokens)

    def rows(self) -> Float32:
        return self._host.rows()


# --- deferred results ------------------------------------------------------------------------------------------------


@attrs.define(eq=False, slots=False)
class Deferred:
    """A delayed result that the next op may compute inside its own kernel.

    Any other use computes the tensor once, with a kernel that gives the same bits.
    """

    compute: Callable[[], Tensor]
    x: Tensor
    _tensor: Tensor | None = attrs.field(default=None, init=False)

    @property
    def shape(self) -> torch.Size:
        """The shape of the result."""
        return self.x.shape

    def tensor(self) -> Tensor:
        """Return the result, computed if necessary."""
        if self._tensor is None:
            self._tensor = self.compute()
        return self._tensor

    @property
    def computed(self) -> bool:
        """Whether the tensor is already computed."""
        return self._tensor is not None

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


@attrs.define(eq=False, slots=False)
class Normed(Deferred):
    """A delayed ``rms_norm(x)``, which can be the prologue of a product."""

    weight: Tensor
    eps: float


@attrs.define(eq=False, slots=False)
class GatedNormed(Deferred):
    """A delayed ``gated_rms_norm(x, z)``, ``[T, n * D]``, which can be the prologue of a product."""

    z: Tensor
    weight: Tensor
    eps: float

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.x.shape[0], self.x.shape[1] * self.x.shape[2]))


@attrs.define(eq=False, slots=False)
class Rotated(Deferred):
    """A delayed ``norm_rope(x)``: a query or key for attention."""

    weight: Tensor | None
    eps: float
    frequencies: Tensor
    position: Any


@attrs.define(eq=False, slots=False)
class Convolved(Deferred):
    """A delayed ``conv_window(x)``, which the delta rule kernel computes itself."""

    weight: Tensor
    cache: Any


def materialised(x: Any) -> Tensor:
    """Return ``x`` as a tensor, computing a deferred result."""
    return x.tensor() if isinstance(x, Deferred) else x

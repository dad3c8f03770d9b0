"""Logits, hidden states and gathered head rows on the device, and deferred results that the next op can fuse.

Logits stay on the device until their rows are read: a choice of tokens brings one integer per row to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch import Tensor

from specdec.backends.arrays import ArrayHidden, read_tokens
from specdec.backends.cpu.pruned import PrunedLogits
from specdec.backends.cuda import choosing
from specdec.contract import Choosing, Logits
from specdec.sampling import keeps_logits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specdec.contract import Float32


class CudaHidden(ArrayHidden):
    """``[T, H]`` in act dtype."""

    __slots__ = ()

    @staticmethod
    def concatenate(arrays: list[Any]) -> Any:
        return torch.cat(arrays)

    def rows(self) -> Float32:
        rows: Float32 = self.array.float().cpu().numpy()
        return rows


class _DeviceLogits(Logits):
    """Logits whose tokens are chosen on the device; everything else differs between full and pruned rows.

    Args:
        product: computes ``[T, n]`` float32 on the device.
        ids: int32 ``[n]`` on the device, the token ids of the columns, ascending; None: 0 to V - 1.
    """

    def __init__(self, rows: int, product: Callable[[], Tensor], ids: Tensor | None = None) -> None:
        self._count = rows
        self._product = product
        self._ids = ids

    def __len__(self) -> int:
        return self._count

    @functools.cached_property
    def array(self) -> Tensor:
        """The logits on the device."""
        return self._product()

    @functools.cached_property
    def _best(self) -> list[int]:
        return read_tokens(choosing.best(self.array, self._ids))

    def argmax(self) -> list[int]:
        return list(self._best)

    def logsumexp(self) -> list[float]:
        sums: list[float] = torch.logsumexp(self.array, 1).tolist()
        return sums

    def choose(self, request: Choosing) -> Sequence[int | None]:
        """Tokens of the device's sampler; empty where history, bans, bias or processors change the logits."""
        sampling = request.sampling
        if sampling.temperature == 0 or not keeps_logits(sampling):
            return ()
        position = len(request.context) + request.first
        tokens = choosing.sample(self.array, sampling, position, self._ids).tolist()
        return [None if token < 0 else token for token in tokens]


class CudaLogits(_DeviceLogits):
    """Logits ``[T, V]`` float32."""

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        logits = self.array
        ids = _ordered(logits).topk(min(k, logits.shape[1]), dim=1, sorted=True).indices
        values: list[list[float]] = logits.gather(1, ids).tolist()
        return ids.tolist(), values

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
        order: the columns of all parts side by side, by ascending id, on the device.
        ascending: the ids in that order, int32 on the device.
        vocab_size: V.
    """

    def __init__(
        self, parts: tuple[Any, ...], part_ids: tuple[Tensor, ...], ids: NDArray[np.int32], vocab_size: int
    ) -> None:
        self.parts = parts
        self.part_ids = part_ids
        self.ids = ids
        self.vocab_size = vocab_size
        order = np.argsort(ids)
        self.tokens: tuple[int, ...] = tuple(ids[order].tolist())
        self.order = torch.from_numpy(order).to(part_ids[0].device)
        self.ascending = torch.cat(part_ids)[self.order]

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
    """Logits of gathered rows; tokens are chosen on the device, everything else is computed on the host."""

    def __init__(self, rows: int, product: Callable[[], Tensor], head: CudaHeadRows) -> None:
        """``product``: the logits of the rows of ``head`` in the order of its parts."""
        super().__init__(rows, lambda: product()[:, head.order], head.ascending)
        self._head = head

    @functools.cached_property
    def _host(self) -> PrunedLogits:
        return PrunedLogits(self.array.cpu().numpy(), np.sort(self._head.ids), self._head.vocab_size)

    def topk(self, k: int) -> tuple[list[list[int]], list[list[float]]]:
        return self._host.topk(k)

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

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


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

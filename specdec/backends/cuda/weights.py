"""Weights in the layouts of the CUDA kernels: dense, FP8 with block scales, NVFP4, and stacks of experts.

Model code passes these holders instead of tensors, so that ``fuse`` can later move their memory together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from specdec.errors import ShapeError

GROUP = 16  # columns that share an NVFP4 scale


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


class _Held:
    """Where the tensors of a weight are."""

    names: ClassVar[tuple[str, ...]]  # of the tensors, codes first

    @property
    def device(self) -> torch.device:
        return parts(self)[0].device  # type: ignore[arg-type]


@attrs.define(eq=False)
class DenseWeight(_Held):
    """A weight in act dtype: ``tensor [N, K]`` (or ``[N]``, a bias), contiguous."""

    names: ClassVar = ("tensor",)
    tensor: Tensor = attrs.field(converter=_contiguous)
    fused: bool = attrs.field(default=False, init=False)  # a view of a tensor shared with other weights

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def decode(self) -> Tensor:
        """Return the tensor."""
        return self.tensor


@attrs.define(eq=False)
class Fp8BlockWeight(_Held):
    """E4M3 codes with one float32 scale per block: ``W[n, k] = code[n, k] * scales[n // bn, k // bk]``.

    ``codes`` uint8 ``[N, K]``, ``scales`` float32 ``[ceil(N / bn), ceil(K / bk)]``. One scale per row is the block
    ``(1, K)``, one per tensor ``(N, K)``. Source of the layout: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.
    """

    names: ClassVar = ("codes", "scales")
    codes: Tensor = attrs.field(converter=_contiguous)
    scales: Tensor = attrs.field(converter=_contiguous)
    block: tuple[int, int]
    fused: bool = attrs.field(default=False, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def decode(self) -> Tensor:
        """float32 ``[N, K]``, each value rounded once."""
        (bn, bk), (rows, columns) = self.block, self.shape
        scales = self.scales.repeat_interleave(bn, 0)[:rows].repeat_interleave(bk, 1)[:, :columns]
        return self.codes.view(torch.float8_e4m3fn).float() * scales


@attrs.define(eq=False)
class Nvfp4Weight(_Held):
    """E2M1 codes, two per byte (even column in the low half), with an E4M3 scale per 16 columns and one scale per row.

    ``codes`` uint8 ``[N, K / 2]``, ``scales`` uint8 (E4M3, never negative) ``[N, K / 16]``, ``global_scale`` float32
    ``[N]``; a scalar is expanded to all rows, so that weights with different scalars can be fused.
    ``W = code * scale * global_scale``. Raises: ShapeError if K is not a multiple of 16.
    """

    names: ClassVar = ("codes", "scales", "global_scale")
    codes: Tensor = attrs.field(converter=_contiguous)
    scales: Tensor = attrs.field(converter=_contiguous)
    global_scale: Tensor
    fused: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        rows, columns = self.shape
        if columns % GROUP:
            raise ShapeError(f"NVFP4 weights have a multiple of {GROUP} columns, this one has {columns}")
        if self.global_scale.numel() == 1:
            self.global_scale = self.global_scale.reshape(1).expand(rows)
        self.global_scale = self.global_scale.contiguous()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.codes.shape[0], 2 * self.codes.shape[1])

    def decode(self) -> Tensor:
        """float32 ``[N, K]``, each value rounded once: code times scale is exact."""
        rows, columns = self.shape
        table = torch.tensor(_E2M1, device=self.device)
        halves = torch.stack([self.codes & 15, self.codes >> 4], dim=-1)
        values = table[halves.int()].view(rows, columns // GROUP, GROUP)
        values = values * self.scales.view(torch.float8_e4m3fn).float()[..., None]
        return values.view(rows, columns) * self.global_scale[:, None]


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

Weight = DenseWeight | Fp8BlockWeight | Nvfp4Weight


@attrs.define(eq=False)
class ExpertStack:
    """Weights of one kind and shape, one per expert, with a table of their addresses on the device.

    The memory of every tensor begins at a multiple of 16 bytes.
    """

    experts: tuple[Weight, ...] = attrs.field(converter=tuple)

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, index: int) -> Weight:
        return self.experts[index]

    @property
    def shape(self) -> tuple[int, ...]:
        """``(E, N, K)``."""
        return (len(self.experts), *self.experts[0].shape)

    @property
    def device(self) -> torch.device:
        return self.experts[0].device

    @functools.cached_property
    def addresses(self) -> Tensor:
        """int64 ``[E, 3]``: codes (or the dense tensor), scales, global scales; 0 for what a format lacks."""
        rows = [[part.data_ptr() for part in parts(expert)] for expert in self.experts]
        return torch.tensor([row + [0] * (3 - len(row)) for row in rows], dtype=torch.int64, device=self.device)

    def decode(self) -> Tensor:
        """``[E, N, K]``."""
        return torch.stack([expert.decode() for expert in self.experts])


def parts(weight: Weight) -> tuple[Tensor, ...]:
    """Return the tensors of a weight, codes first."""
    return tuple(getattr(weight, name) for name in weight.names)


def fuse(weights: Sequence[Weight]) -> bool:
    """Move weights that are projected together into contiguous memory, so that one launch can read them.

    Their tensors become views of new ones, and the old memory is freed. Returns False, with nothing changed, for
    different formats or K, FP8 blocks that would straddle two weights, or a weight that is already fused.
    """
    first = weights[0]
    if any(w.fused or _format(w) != _format(first) or w.shape[1:] != first.shape[1:] for w in weights):
        return False
    if isinstance(first, Fp8BlockWeight) and any(w.shape[0] % first.block[0] for w in weights[:-1]):
        return False
    for name in first.names:
        whole = torch.cat([getattr(w, name) for w in weights])
        at = 0
        for weight in weights:
            rows = len(getattr(weight, name))
            setattr(weight, name, whole[at : at + rows])
            at += rows
    for weight in weights:
        weight.fused = True
    return True


def runs(weights: Sequence[Weight]) -> list[list[Weight]]:
    """The weights in groups that are contiguous in memory."""
    groups = [[weights[0]]]
    for before, weight in zip(weights, weights[1:], strict=False):
        joined = before.fused and weight.fused and _format(before) == _format(weight)
        if joined and all(_ends(a) == b.data_ptr() for a, b in zip(parts(before), parts(weight), strict=True)):
            groups[-1].append(weight)
        else:
            groups.append([weight])
    return groups


def joined(run: Sequence[Weight]) -> Tensor:
    """Dense weights that are contiguous in memory (``runs``) as one matrix, without a copy."""
    first = run[0]
    assert isinstance(first, DenseWeight)
    size = (sum(w.shape[0] for w in run), *first.shape[1:])
    return first.tensor if len(run) == 1 else first.tensor.as_strided(size, first.tensor.stride())


def _ends(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes


def _format(weight: Weight) -> tuple[object, ...]:
    return (
        type(weight),
        parts(weight)[0].dtype,
        weight.device,
        weight.block if isinstance(weight, Fp8BlockWeight) else None,
    )

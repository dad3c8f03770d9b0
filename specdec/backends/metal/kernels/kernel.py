"""Kernels in the Metal shading language as data, and the executor that runs them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import mlx.core as mx

from specdec.backends.metal.kernels.lanes import OVER_LANES


@attrs.frozen(kw_only=True)
class MslKernel:
    """The source of a kernel, for ``mx.fast.metal_kernel``.

    Attributes:
        name: a unique identifier.
        inputs: names of the arrays it reads.
        outputs: names of the arrays it writes.
        source: the body of the kernel function; MLX generates the signature.
        header: code before the function.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str = OVER_LANES


@attrs.frozen(kw_only=True)
class Launch:
    """The parameters of a kernel call, except the arrays.

    Attributes:
        template: names and values of the kernel's template arguments: a dtype, an int or a bool.
        grid: threads in each dimension (not threadgroups).
        threadgroup: threads of a threadgroup in each dimension.
        output_shapes: shape of each output.
        output_dtypes: dtype of each output.
    """

    template: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]


class Executor(Protocol):
    """Runs a kernel; the outputs may be lazy."""

    def run(self, kernel: MslKernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]: ...


class OnMetal:
    """Runs kernels on Apple's GPU. MLX compiles each text and template once per process."""

    def run(self, kernel: MslKernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        """Return lazy outputs.

        Raises:
            RuntimeError: MLX has no Metal; raised here or when the outputs are evaluated.
        """
        outputs: list[mx.array] = _compiled(kernel)(
            inputs=list(inputs),
            template=list(launch.template),
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            output_shapes=list(launch.output_shapes),
            output_dtypes=list(launch.output_dtypes),
        )
        return outputs


@functools.cache
def _compiled(kernel: MslKernel) -> Any:
    return mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=kernel.header,
        ensure_row_contiguous=True,
        atomic_outputs=False,
    )

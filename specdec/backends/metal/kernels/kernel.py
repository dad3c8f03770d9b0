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


class Executor(Protocol):
    """Runs kernels."""

    def run(
        self,
        kernel: MslKernel,
        inputs: Sequence[mx.array],
        *,
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Return the outputs, which may be lazy.

        Args:
            kernel: what to run.
            inputs: the arrays that it reads.
            template: names and values of its template arguments: a dtype, an int or a bool.
            grid: threads in each dimension (not threadgroups).
            threadgroup: threads of a threadgroup in each dimension.
            output_shapes: shape of each output.
            output_dtypes: dtype of each output.
        """


class OnMetal:
    """Runs kernels on Apple's GPU. MLX compiles each text and template once per process."""

    def run(self, kernel: MslKernel, inputs: Sequence[mx.array], **launch: Any) -> list[mx.array]:
        """Return lazy outputs.

        Raises:
            RuntimeError: MLX has no Metal; raised here or when the outputs are evaluated.
        """
        outputs: list[mx.array] = _compiled(kernel)(inputs=list(inputs), **launch)
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

"""What every launch asks of a GPU, and what happens without one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.kernels.attention import attend  # noqa: E402
from specdec.backends.metal.kernels.delta import DeltaInputs, DeltaRows, flush, gated_delta  # noqa: E402
from specdec.backends.metal.kernels.kernel import Launch, MslKernel, OnMetal  # noqa: E402
from specdec.backends.metal.kernels.matvec import expert_matvec, matvec  # noqa: E402
from tests.backends.metal.kernel_runs import affine  # noqa: E402


@attrs.define
class Recorder:
    """Writes launches down and gives zeros."""

    launches: list[tuple[MslKernel, Sequence[Any], Launch]] = attrs.Factory(list)

    def run(self, kernel, inputs, launch):
        self.launches.append((kernel, inputs, launch))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True)]


def every_kernel(executor, rows):
    """Each wrapper with ``rows`` rows and sizes that divide nothing."""
    x, w = mx.zeros((rows, 136), mx.bfloat16), mx.zeros((83, 136), mx.bfloat16)
    quantised, _ = affine(np.random.default_rng(0), 83, 128, group=32, bits=8, dtype=mx.bfloat16)
    codes, scales, biases = (part[None] for part in quantised.parts())
    stack = attrs.evolve(quantised, codes=codes, scales=scales, biases=biases)
    base, past, kept = mx.zeros((6, 10, 24)), DeltaRows.none(3, 24, 6, 10), mx.array([0])
    keys, heads = mx.zeros((rows, 3, 24)), mx.zeros((rows, 6))
    inputs = DeltaInputs(q=keys, k=keys, v=mx.zeros((rows, 6, 10)), g=heads, beta=heads)
    cache = mx.zeros((1, 3, 300, 24))
    return [
        matvec(x, w, dtype=mx.bfloat16, executor=executor),
        matvec(x, w, mx.zeros((83,)), dtype=mx.float32, executor=executor),
        matvec(x[:, :128], quantised, dtype=mx.bfloat16, executor=executor),
        matvec(x[:, :128], quantised, mx.zeros((rows, 83)), dtype=mx.bfloat16, executor=executor),
        expert_matvec(
            x[:, None], mx.zeros((4, 7, 136)), mx.zeros((rows, 3), mx.int32), dtype=mx.float32, executor=executor
        ),
        expert_matvec(x[:, None, :128], stack, mx.zeros((rows, 3), mx.int32), dtype=mx.bfloat16, executor=executor),
        attend(mx.zeros((rows, 9, 24)), cache, cache, kept, scale=1.0, dtype=mx.float32, executor=executor),
        *gated_delta(base, past, kept, inputs, dtype=mx.bfloat16, executor=executor)[:2],
        flush(base, past, kept, executor=executor),
    ]


@pytest.mark.parametrize("rows", [1, 3, 8, 19])
def test_launches_fit_every_gpu(rows):
    recorder = Recorder()
    every_kernel(recorder, rows)
    assert len({kernel.name for kernel, _, _ in recorder.launches}) == len(
        {kernel for kernel, _, _ in recorder.launches}
    )
    for kernel, inputs, launch in recorder.launches:
        assert len(inputs) == len(kernel.inputs), kernel.name
        assert len(launch.output_shapes) == len(launch.output_dtypes) == len(kernel.outputs), kernel.name
        assert launch.threadgroup[0] == 32, kernel.name  # a simdgroup is a line of the threadgroup
        assert np.prod(launch.threadgroup) <= 256, kernel.name  # what a kernel of many registers is still given
        assert all(grid % group == 0 for grid, group in zip(launch.grid, launch.threadgroup, strict=True)), kernel.name


def test_texts_leave_nothing_to_the_device():
    recorder = Recorder()
    every_kernel(recorder, 3)
    for kernel in {kernel for kernel, _, _ in recorder.launches}:
        text = kernel.header + kernel.source
        # sums over lanes in an order that is written out; nothing is shared, so that no barrier can be missing
        assert set(re.findall(r"\bsimd_\w+|\bthreadgroup\b|\w*barrier\w*", text)) <= {"simd_shuffle_xor"}, kernel.name


def test_shapes_and_dtypes_are_those_of_the_references():
    for made, wanted in zip(every_kernel(Recorder(), 3), every_kernel(None, 3), strict=True):
        assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)


@pytest.mark.skipif(mx.metal.is_available(), reason="there is Metal")
def test_without_metal_the_executor_says_so():
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        mx.eval(every_kernel(OnMetal(), 1))

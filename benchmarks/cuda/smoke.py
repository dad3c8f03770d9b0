"""A stand-in for the GPU: Triton's interpreter, graphs as lists of launches, a toy shape, a few tokens.

It shows that the benchmark's own code runs; it measures nothing. Import it before anything that imports triton.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from typing import Any

import numpy as np
import torch

from benchmarks.cuda.timing import Lab


def lab() -> Lab:
    """Set up a host device. Raises: UnsupportedError if triton was imported for a device."""
    from specdec.backends.cuda.kernels.launch import interpreting
    from specdec.errors import UnsupportedError

    if not interpreting():
        raise UnsupportedError("triton was set up for a device", try_="TRITON_INTERPRET=1 in the environment")
    from tests.backends.cuda.fake import FakeDevice

    rows_alike()
    torch.set_num_threads(1)
    return Lab(device=FakeDevice(), real=False, replays=1, repeats=1, cache_bytes=0, stream_bytes=1 << 16)


def rows_alike() -> None:
    """Make the interpreter multiply row by row: numpy's BLAS sums rows in ways that depend on their position."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        kind = d.data.dtype
        product = np.concatenate([np.matmul(a.data[i : i + 1], b.data, dtype=kind) for i in range(len(a.data))])
        return TensorHandle(product + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot

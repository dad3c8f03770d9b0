"""A stand-in for the GPU: Triton's interpreter, graphs as lists of launches, a toy shape, a few tokens.

It shows that the benchmark's own code runs; it measures nothing. Import it before anything that imports triton.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from benchmarks.cuda.timing import Lab


def lab() -> Lab:
    """Set up a host device. Raises: UnsupportedError if triton was imported for a device."""
    from specdec.backends.cuda.kernels.launch import interpreting
    from specdec.errors import UnsupportedError

    if not interpreting():
        raise UnsupportedError("triton was set up for a device", try_="TRITON_INTERPRET=1 in the environment")
    from tests.backends.cuda.fake import FakeDevice, dot_row_by_row

    dot_row_by_row()

    torch.set_num_threads(1)
    return Lab(device=FakeDevice(), real=False, replays=1, repeats=1, stream_bytes=1 << 16)

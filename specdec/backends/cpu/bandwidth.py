"""Measure what a pass waits for: how fast the CPU kernels read memory, and how fast their products read weights."""

from __future__ import annotations

import ctypes
from time import perf_counter

import torch

from specdec.backends.cpu.library import Kernels
from specdec.backends.cpu.native import NativeOps
from specdec.backends.cpu.threads import Threads

ROUNDS = 4
FEATURES, HIDDEN = 4096, 2048
WEIGHT_BYTES = 2 * FEATURES * HIDDEN
COPIES = 10  # 160 MiB exceed the last cache, or most of it


def bandwidths(kernels: Kernels) -> tuple[float, float]:
    """Bytes per second of a plain read, and of products of bfloat16 weights with one row.

    Both read the same amount by the same threads, in turns; the best of each, since other programs only slow them down.
    """
    threads = Threads()
    ops = NativeOps(torch.bfloat16, kernels, threads)
    stream = kernels.function("stream_read", "pii", ctypes.c_double)
    buffer = torch.ones(COPIES, WEIGHT_BYTES, dtype=torch.uint8)
    weights = [torch.full((FEATURES, HIDDEN), 0.01, dtype=torch.bfloat16) for _ in range(COPIES)]
    for weight in weights:
        ops.pack(weight)
    row = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    read, multiplied = [], []
    for _ in range(ROUNDS):
        for copy, weight in zip(buffer, weights, strict=True):
            started = perf_counter()
            stream(copy.data_ptr(), WEIGHT_BYTES, threads.count())
            between = perf_counter()
            ops.linear(row, weight)
            read.append(between - started)
            multiplied.append(perf_counter() - between)
    return WEIGHT_BYTES / min(read), WEIGHT_BYTES / min(multiplied)

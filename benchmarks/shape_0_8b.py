"""Measure the 0.8B shape with random BF16 weights: decode against stream-read bandwidth, rows, memory.

    python -m benchmarks.shape_0_8b [--context 256] [--repeats 15] [--folder DIR] [--json FILE]

Prints shares of the bandwidth, the cost of more rows, and the memory that loading takes. The checkpoint (1.5 GB) is
written to a temporary folder unless ``--folder`` names one.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.common import BYTE_TOKENS, arguments, median, resident_bytes, save, seconds, shape_0_8b

ROWS = (1, 2, 4, 8, 16)
STREAM_BYTES = 1 << 30  # many times the cache size


def measure(folder: Path, context: int, repeats: int) -> dict[str, Any]:
    """Times of passes by row count and of reading as many bytes, interleaved.

    On a shared machine the bandwidth changes from minute to minute, so shares and ratios are taken within each repeat,
    where their parts are milliseconds apart; their medians count. Fastest times are recorded too, but those of
    different arms may belong to different minutes.
    """
    import specdec

    before = resident_bytes()
    loading = perf_counter()
    lm = specdec.load(str(folder), dtype="bfloat16")
    loading = perf_counter() - loading
    loaded = resident_bytes()
    target, state = lm.target, lm.target.new_state(context + 64)
    tokens = [(37 * i) % BYTE_TOKENS for i in range(context)]
    prefill = seconds(lambda: target.prefill(state, tokens))
    weight_bytes = (folder / "model.safetensors").stat().st_size
    resident = resident_bytes()
    decode_bytes = sum(tensor.nbytes for tensor in _main_weights(target) if tensor.dtype == torch.bfloat16)
    streams = _streams()

    def step(rows: int) -> None:
        target.decode(state, tokens[:rows]).need_logits().argmax()

    arms: dict[str | int, Callable[[], Any]] = {rows: functools.partial(step, rows) for rows in ROWS}
    arms |= {name: functools.partial(read, decode_bytes) for name, read in streams.items()}
    times: dict[str | int, list[float]] = {arm: [] for arm in arms}
    for arm in arms:
        arms[arm]()
    for _ in range(repeats):
        once: dict[str | int, float] = {}
        for arm in (*arms, *reversed(arms)):
            once[arm] = min(once.get(arm, math.inf), seconds(arms[arm]))
        for arm, value in once.items():
            times[arm].append(value)
    reads = [min(values) for values in zip(*(times[name] for name in streams), strict=True)]
    shares = [read / plain for read, plain in zip(reads, times[1], strict=True)]
    return {
        "weight_bytes": weight_bytes,
        "bytes_read_per_token": decode_bytes,
        "stream_bandwidth": {"median": decode_bytes / median(reads), "best": decode_bytes / min(reads)},
        "decode_share_of_bandwidth": median(shares),
        "decode_share_of_bandwidth_fastest": min(reads) / min(times[1]),
        "ratio_to_one_row": {
            rows: median([many / one for many, one in zip(times[rows], times[1], strict=True)]) for rows in ROWS
        },
        "ratio_to_one_row_fastest": {rows: min(times[rows]) / min(times[1]) for rows in ROWS},
        "milliseconds": {arm: min(values) * 1e3 for arm, values in times.items()},
        "median_milliseconds": {arm: median(values) * 1e3 for arm, values in times.items()},
        "load_seconds": loading,
        "resident_before_load": before,
        "resident_after_load_and_prefill": resident,
        "resident_share_of_weights": resident / weight_bytes,
        "loaded_share_of_weights": (loaded - before) / weight_bytes,
        "loaded_and_prefilled_share_of_weights": (resident - before) / weight_bytes,
        "prefill_tokens_per_second": context / prefill,
        "parity": lm.info.parity.value,
        "kernels": lm.info.kernels,
    }


def _streams() -> dict[str, Callable[[int], Any]]:
    """Ways to read that many bytes as fast as possible: torch's sum, and the kernels' own read."""
    from specdec.backends.cpu.compiler import KernelsUnavailable, load_kernels

    words = torch.ones(STREAM_BYTES // 8, dtype=torch.int64)

    def by_torch(count: int) -> None:
        for at in range(0, count // 8, len(words)):
            words[: min(len(words), count // 8 - at)].sum()

    kernels = load_kernels()
    if isinstance(kernels, KernelsUnavailable):
        return {"stream (torch)": by_torch}
    read = kernels.function("stream_read", "pii", ctypes.c_double)

    def by_kernel(count: int) -> None:
        for at in range(0, count, STREAM_BYTES):
            read(words.data_ptr(), min(STREAM_BYTES, count - at), torch.get_num_threads())

    return {"stream (torch)": by_torch, "stream (kernel)": by_kernel}


def _main_weights(target: Any) -> list[torch.Tensor]:
    """The tensors that a decode step reads: every layer, and the head (tied: the embedding matrix, once)."""
    import attrs

    found: dict[int, torch.Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[value.data_ptr()] = value
        elif attrs.has(type(value)):
            for field in attrs.fields(type(value)):
                if field.name not in ("mtp", "mtp_lm_head"):
                    visit(getattr(value, field.name))
        elif isinstance(value, tuple):
            for item in value:
                visit(item)

    visit(target.model)
    return list(found.values())


def main() -> None:
    options = arguments(__doc__, context=256, repeats=15, folder=None)
    with shape_0_8b(options.folder) as folder:
        save(measure(folder, options.context, options.repeats), options)


if __name__ == "__main__":
    main()

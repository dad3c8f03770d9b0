"""Measure the 0.8B shape with random BF16 weights: decode against stream-read bandwidth, rows, memory.

    python -m benchmarks.shape_0_8b [--context 256] [--repeats 15] [--folder PATH] [--instruction-set avx2]
        [--weights auto int8 int4] [--cache DIR] [--rows 1 2 4 8 16] [--json FILE]

Prints shares of the bandwidth, the cost of more rows, and the memory that loading takes. The checkpoint (1.5 GB) is
written to a temporary folder unless ``--folder`` names one; a GGUF file is measured in its place. Several ``--weights``
are loaded side by side and measured in turns; ``--cache`` keeps rounded ones (``target.decoded_cache``).
"""

from __future__ import annotations

import argparse
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


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Times of passes by weights and row count, and of reading as many bytes, interleaved.

    On a shared machine the bandwidth changes from minute to minute, so shares and ratios are taken within each repeat,
    where their parts are milliseconds apart; their medians count. Fastest times are recorded too, but those of
    different arms may belong to different minutes.
    """
    tokens = [(37 * i) % BYTE_TOKENS for i in range(options.context)]
    models = {weights: _Model(options, folder, weights, tokens) for weights in options.weights}
    streams = _streams()
    arms: dict[tuple[str, str | int], Callable[[], Any]] = {}
    for weights, model in models.items():
        arms |= {(weights, rows): functools.partial(model.step, tokens[:rows]) for rows in options.rows}
        arms |= {(weights, name): functools.partial(read, model.bytes_read) for name, read in streams.items()}
    times: dict[tuple[str, str | int], list[float]] = {arm: [] for arm in arms}
    for arm in arms:
        arms[arm]()
    for _ in range(options.repeats):
        once: dict[tuple[str, str | int], float] = {}
        for arm in (*arms, *reversed(arms)):
            once[arm] = min(once.get(arm, math.inf), seconds(arms[arm]))
        for arm, value in once.items():
            times[arm].append(value)

    def figures(weights: str) -> dict[str, Any]:
        own = {arm: values for (name, arm), values in times.items() if name == weights}
        reads = [min(values) for values in zip(*(own[name] for name in streams), strict=True)]
        bytes_read = models[weights].bytes_read
        return {
            "bytes_read_per_token": bytes_read,
            "stream_bandwidth": {"median": bytes_read / median(reads), "best": bytes_read / min(reads)},
            "decode_share_of_bandwidth": _ratio(reads, own[1]),
            "decode_share_of_bandwidth_fastest": min(reads) / min(own[1]),
            "speed_of_the_first": _ratio(times[options.weights[0], 1], own[1]),
            "ratio_to_one_row": {rows: _ratio(own[rows], own[1]) for rows in options.rows},
            "ratio_to_one_row_fastest": {rows: min(own[rows]) / min(own[1]) for rows in options.rows},
            "milliseconds": {arm: min(values) * 1e3 for arm, values in own.items()},
            "median_milliseconds": {arm: median(values) * 1e3 for arm, values in own.items()},
            **models[weights].facts,
        }

    first, *others = options.weights
    return {**figures(first), **({"others": {weights: figures(weights) for weights in others}} if others else {})}


def _ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median of the ratios within each repeat."""
    return median([one / other for one, other in zip(numerators, denominators, strict=True)])


class _Model:
    """The shape with some ``target.weights``, and what loading it took."""

    def __init__(self, options: argparse.Namespace, folder: Path, weights: str, tokens: list[int]) -> None:
        import specdec
        from specdec.config import RunConfig, TargetConfig

        rounded = weights in ("int8", "int4") and options.cache is not None
        config = RunConfig(target=TargetConfig(decoded_cache=str(options.cache) if rounded else None))
        before = resident_bytes()
        loading = perf_counter()
        lm = specdec.load(
            str(folder), config=config, dtype="bfloat16", weights=weights, instruction_set=options.instruction_set
        )
        loading = perf_counter() - loading
        loaded = resident_bytes()
        self._target, self._state = lm.target, lm.target.new_state(options.context + 64)
        prefill = seconds(lambda: self._target.prefill(self._state, tokens))
        weight_bytes = (folder if folder.is_file() else folder / "model.safetensors").stat().st_size
        resident = resident_bytes()
        self.bytes_read = _bytes_read(lm.target)
        self.facts = {
            "weights": lm.info.weights,
            "weight_bytes": weight_bytes,
            "load_seconds": loading,
            "resident_before_load": before,
            "resident_after_load_and_prefill": resident,
            "resident_share_of_weights": resident / weight_bytes,
            "loaded_share_of_weights": (loaded - before) / weight_bytes,
            "loaded_and_prefilled_share_of_weights": (resident - before) / weight_bytes,
            "prefill_tokens_per_second": len(tokens) / prefill,
            "parity": lm.info.parity.value,
            "kernels": lm.info.kernels,
        }

    def step(self, tokens: list[int]) -> None:
        self._target.decode(self._state, tokens).need_logits().argmax()


def _streams() -> dict[str, Callable[[int], Any]]:
    """Ways to read that many bytes as fast as possible: torch's sum, and the kernels' own read."""
    from specdec.backends.cpu.library import KernelsUnavailable, load_kernels

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


def _bytes_read(target: Any) -> int:
    """Bytes of the matrices that a decode step reads: every layer's, and the head (tied: the embedding, once)."""
    import attrs

    found: dict[int, torch.Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif attrs.has(type(value)):
            for field in attrs.fields(type(value)):
                if field.name != "mtp":
                    visit(getattr(value, field.name))
        elif isinstance(value, tuple):
            for item in value:
                visit(item)

    visit(target.model)
    return sum(target.ops.inner.bytes_of(tensor) for tensor in found.values() if tensor.dtype == torch.bfloat16)


def main() -> None:
    options = arguments(
        __doc__,
        context=256,
        repeats=15,
        folder=None,
        instruction_set="auto",
        weights=["auto"],
        cache=None,
        rows=list(ROWS),
    )
    with shape_0_8b(options.folder) as folder:
        save(measure(options, folder), options)


if __name__ == "__main__":
    main()

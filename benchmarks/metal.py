"""Benchmark the kernels of the metal backend on this machine, specdec's beside MLX's, in the sizes of a 0.8B model.

    python -m benchmarks.metal [--repeats 7] [--json FILE]
    python -m benchmarks.metal --sizes smoke  tiny sizes: shows that everything runs, and measures nothing

Prints a Markdown table, and writes all figures with ``--json``. Needs MLX. Without a Metal device it runs slowly on
MLX's CPU device and says so: own kernels are then their MLX references, and no figure describes a GPU. For whole models
see ``specdec accept`` (cost by depth) and ``specdec bench``.

Everything runs in one process. Arms alternate within each repeat, ratios are taken within a repeat, and medians are
printed. A kernel is timed in chains: each call depends on the previous one through two tiny operations and reads
another copy of its weights or caches, so that nothing is cached. A chain's graph is built before the clock starts.
``of stream`` is the bytes that a call must move, over its time, over the bandwidth of reading a large array in this
process. ``bits`` compares every row of a call with the same row alone, ``off`` compares values with MLX's kernels.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from benchmarks.common import arguments, in_turns, median, seconds
from specdec.backends.metal.kernel_sets import KernelSet, OwnKernels, StockKernels
from specdec.backends.metal.kernels.delta import DeltaInputs
from specdec.backends.metal.kernels.kernel import OnMetal
from specdec.backends.metal.quantised import Matrix, PackedMatrix

GROUP, BITS = 64, 4  # of quantised weights
EXACT_ROWS = 8  # rows of a call whose bits are compared
BF16 = mx.bfloat16


@attrs.frozen(kw_only=True)
class Sizes:
    """What to run, and its sizes."""

    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 16)
    hidden: int = 1024
    intermediate: int = 3584
    vocab: int = 248320
    heads: tuple[int, int, int] = (8, 2, 256)  # query heads, key-value heads, their size
    delta: tuple[int, int] = (16, 128)  # heads of a linear layer, their size
    experts: tuple[int, int, int, int] = (64, 8, 512, 2048)  # E, k per row, features, length
    contexts: tuple[int, ...] = (256, 2048, 8192)
    stream_bytes: int = 1 << 30
    rotate_bytes: int = 512 << 20  # total size of rotating copies, above a GPU's last-level cache
    chain_seconds: float = 0.05
    chain_calls: int = 100  # at most


SMOKE = Sizes(
    rows=(1, 2, 3),
    hidden=64,
    intermediate=128,
    vocab=512,
    heads=(4, 2, 32),
    delta=(2, 32),
    experts=(4, 2, 32, 64),
    contexts=(8,),
    stream_bytes=1 << 20,
    rotate_bytes=1 << 16,
    chain_seconds=0.0,
    chain_calls=2,
)


# --- kernels ---------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Case:
    """One operation.

    Attributes:
        what: the operation and its sizes.
        run: ``run(kernels, first, rows, copy, link)`` returns ``[rows, ...]`` for the rows from ``first`` on; ``link``
            is a zero of shape ``[1]`` that must be added to an input.
        moved: bytes that a call must move.
        copies: number of rotating copies of weights or caches.
    """

    what: str
    run: Callable[[KernelSet, int, int, int, mx.array], mx.array]
    moved: int
    copies: int = 1


class Lab:
    """Random arrays, and both sets of kernels by name."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.most = max(sizes.rows)
        self.on_gpu = mx.default_device().type == mx.DeviceType.gpu
        own = "own" if self.on_gpu else "own (reference)"
        self.arms: dict[str, KernelSet] = {
            "stock": StockKernels(wide=not self.on_gpu),
            own: OwnKernels(OnMetal() if self.on_gpu else None),
        }
        mx.random.seed(0)

    def normal(self, *shape: int, std: float = 1.0, dtype: mx.Dtype = BF16) -> mx.array:
        array = (mx.random.normal(shape) * std).astype(dtype)
        mx.eval(array)
        return array

    def copies(self, nbytes: int) -> int:
        """How many copies of that size a chain needs."""
        return max(1, min(64, -(-self.sizes.rotate_bytes // nbytes)))

    def stored(self, *shape: int) -> Iterator[tuple[str, Callable[[], Matrix], int]]:
        """How a matrix may be stored: name, maker and bytes."""
        values, std = math.prod(shape), shape[-1] ** -0.5

        def packed() -> PackedMatrix:
            parts = mx.quantize(self.normal(*shape, std=std), group_size=GROUP, bits=BITS)
            codes, *sides = (
                part if self.on_gpu or part.dtype == mx.uint32 else part.astype(mx.float32) for part in parts
            )
            mx.eval(codes, *sides)
            return PackedMatrix(codes=codes, scales=sides[0], biases=sides[1], group=GROUP, bits=BITS)

        yield "bf16", lambda: self.normal(*shape, std=std), 2 * values
        yield "4-bit", packed, values * BITS // 8 + 4 * values // GROUP


def cases(lab: Lab) -> Iterator[Case]:
    """Each operation with its inputs."""
    sizes = lab.sizes
    values = math.prod(sizes.delta)
    shapes = {
        "q, k, v of a linear layer": (3 * values, sizes.hidden),
        "out of a linear layer": (sizes.hidden, values),
        "gate or up": (sizes.intermediate, sizes.hidden),
        "down": (sizes.hidden, sizes.intermediate),
        "head": (sizes.vocab, sizes.hidden),
    }
    for name, shape in shapes.items():
        yield from _products(lab, name, shape)
    yield from _experts(lab)
    for context in sizes.contexts:
        yield _attention(lab, context)
    yield _delta(lab)


def _products(lab: Lab, name: str, shape: tuple[int, int]) -> Iterator[Case]:
    x = lab.normal(lab.most, shape[1])
    for storage, make, nbytes in lab.stored(*shape):
        weights = [make() for _ in range(lab.copies(nbytes))]

        def run(
            kernels: KernelSet, first: int, rows: int, copy: int, link: mx.array, weights: list[Matrix] = weights
        ) -> mx.array:
            return kernels.product(x[first : first + rows] + link, weights[copy], dtype=BF16)

        yield Case(what=f"{name} {shape[0]}x{shape[1]} {storage}", run=run, moved=nbytes, copies=len(weights))


def _experts(lab: Lab) -> Iterator[Case]:
    """One matrix of the experts that a router chose, different ones for every row."""
    count, slots, features, length = lab.sizes.experts
    x = lab.normal(lab.most, 1, length)
    ids = mx.argsort(lab.normal(lab.most, count), axis=-1)[:, :slots].astype(mx.int32)
    mx.eval(ids)
    for storage, make, nbytes in lab.stored(count, features, length):
        stack = make()

        def run(
            kernels: KernelSet, first: int, rows: int, copy: int, link: mx.array, stack: Matrix = stack
        ) -> mx.array:
            part = slice(first, first + rows)
            return kernels.expert_product(x[part] + link, stack, ids[part], dtype=BF16)

        moved = nbytes * slots // count  # at one row; more rows may share experts
        yield Case(what=f"{slots} of {count} experts {features}x{length} {storage}", run=run, moved=moved)


def _attention(lab: Lab, context: int) -> Case:
    heads, kv_heads, dim = lab.sizes.heads
    bucket = -(-(context + lab.most) // 256) * 256
    nbytes = 2 * context * kv_heads * dim * 2
    copies = lab.copies(nbytes)
    keys, values = ([lab.normal(1, kv_heads, bucket, dim) for _ in range(copies)] for _ in range(2))
    q = lab.normal(lab.most, heads, dim)

    def run(kernels: KernelSet, first: int, rows: int, copy: int, link: mx.array) -> mx.array:
        at, scale = context + first, dim**-0.5
        return kernels.attend(q[first : first + rows] + link, keys[copy], values[copy], at, scale=scale, dtype=BF16)

    what = f"attention {heads}/{kv_heads} heads of {dim}, {context} tokens"
    return Case(what=what, run=run, moved=nbytes, copies=copies)


def _delta(lab: Lab) -> Case:
    """Rows of the delta rule. A call begins with row 0, so a row alone is the last row of a call that ends with it."""
    heads, dim = lab.sizes.delta
    nbytes = 2 * heads * dim * dim * 4  # read and written
    states = [lab.normal(heads, dim, dim, dtype=mx.float32) for _ in range(lab.copies(nbytes // 2))]
    q, k = (lab.normal(lab.most, heads, dim, std=dim**-0.5, dtype=mx.float32) for _ in range(2))
    v = lab.normal(lab.most, heads, dim)
    g, beta = (mx.sigmoid(lab.normal(lab.most, heads, dtype=mx.float32)) for _ in range(2))
    mx.eval(g, beta)

    def run(kernels: KernelSet, first: int, rows: int, copy: int, link: mx.array) -> mx.array:
        upto = first + rows
        inputs = DeltaInputs(q=q[:upto], k=k[:upto], v=v[:upto] + link, g=g[:upto], beta=beta[:upto])
        out, _, past = kernels.delta(states[copy], None, 0, inputs, dtype=BF16)
        after = kernels.fold(states[copy], past, upto)  # a call that leaves the matrix uncomputed would be cheap
        return out[first:] + (after[0, 0, :1] * 0).astype(out.dtype)

    return Case(what=f"delta rule {heads} heads of {dim}x{dim}", run=run, moved=nbytes, copies=len(states))


def time_kernels(lab: Lab, repeats: int, bandwidth: float) -> list[dict[str, Any]]:
    """All arms of all kernels; arms alternate within each repeat.

    Of each: milliseconds by row count and their ratio to one row, the share of the bandwidth at one row, whose bits
    differ from a row alone, and how far the values are off the stock kernel's, of the largest one.
    """
    sizes = lab.sizes
    timed: list[dict[str, Any]] = []
    for case in cases(lab):
        print(case.what, file=sys.stderr, flush=True)
        arms = {
            (arm, rows): functools.partial(_seconds_of, lab, case, kernels, rows)
            for arm, kernels in lab.arms.items()
            for rows in sizes.rows
        }
        times = in_turns(arms, repeats, warm_up=1, measure=operator.call)  # the first round compiles
        stock = _rows(case, lab.arms["stock"], 0, lab.most)
        for arm, kernels in lab.arms.items():
            one = times[arm, 1]
            off = np.abs(_rows(case, kernels, 0, lab.most) - stock).max() / max(np.abs(stock).max(), 1e-9)
            ratio = {rows: median([a / b for a, b in zip(times[arm, rows], one, strict=True)]) for rows in sizes.rows}
            timed.append(
                {
                    "what": case.what,
                    "arm": arm,
                    "milliseconds": {rows: 1e3 * median(times[arm, rows]) for rows in sizes.rows},
                    "ratio": ratio,
                    "of_stream": case.moved / median(one) / bandwidth,
                    "bits": differing_rows(lab, case, kernels),
                    "off": float(off),
                }
            )
        mx.clear_cache()
    return timed


def _seconds_of(lab: Lab, case: Case, kernels: KernelSet, rows: int) -> float:
    """Seconds per call of a chain, in which each call waits for the previous one."""

    def chain(calls: int) -> float:
        link = mx.zeros(1)
        mx.eval(link)
        for call in range(calls):
            out = case.run(kernels, 0, rows, call % case.copies, link.astype(BF16))
            link = out.reshape(-1)[:1].astype(mx.float32) * 0
        return seconds(lambda: mx.eval(link))

    first = chain(2) / 2
    calls = max(2, min(lab.sizes.chain_calls, int(lab.sizes.chain_seconds / max(first, 1e-7))))
    return chain(calls) / calls


def _rows(case: Case, kernels: KernelSet, first: int, rows: int) -> np.ndarray[Any, Any]:
    return np.array(case.run(kernels, first, rows, 0, mx.zeros(1, dtype=BF16)).astype(mx.float32))


def differing_rows(lab: Lab, case: Case, kernels: KernelSet) -> str:
    """The row counts at which a row has other bits than alone."""
    most = min(EXACT_ROWS, lab.most)
    alone = np.concatenate([_rows(case, kernels, row, 1) for row in range(most)])
    differing = [n for n in range(2, most + 1) if not np.array_equal(_rows(case, kernels, 0, n), alone[:n])]
    return f"equal 2-{most}" if not differing else f"differ {','.join(map(str, differing))}"


def stream_bandwidth(nbytes: int, repeats: int) -> float:
    """Bytes per second of reading an array much larger than any cache: the median."""
    words = mx.ones((nbytes // 4,), dtype=mx.float32)
    mx.eval(words)
    mx.eval(words.max())
    return nbytes / median([seconds(lambda: mx.eval(words.max())) for _ in range(max(3, repeats))])


# --- the report ------------------------------------------------------------------------------------------------------


def kernel_table(kernels: list[dict[str, Any]]) -> Iterator[str]:
    counts = list(kernels[0]["ratio"])
    headings = ("kernel", "arm", "ms (1 row)", "of stream", *(f"r({rows})" for rows in counts[1:]), "bits", "off")
    rows = [
        (
            each["what"],
            each["arm"],
            f"{each['milliseconds'][counts[0]]:.4f}",
            f"{each['of_stream']:.0%}",
            *(f"{each['ratio'][rows]:.2f}" for rows in counts[1:]),
            each["bits"],
            f"{each['off']:.1e}",
        )
        for each in kernels
    ]
    lines = (headings, ["---"] * len(headings), *rows)
    yield from (" | ".join(("", *line, "")).strip() for line in lines)


def main() -> None:
    options = arguments(__doc__, repeats=7, sizes=("real", "smoke"))
    sizes, on_gpu = {"real": Sizes(), "smoke": SMOKE}[options.sizes], mx.default_device().type == mx.DeviceType.gpu
    bandwidth = stream_bandwidth(sizes.stream_bytes, options.repeats)
    kernels = time_kernels(Lab(sizes), options.repeats, bandwidth)
    name = mx.device_info().get("device_name", "") if on_gpu else "MLX's CPU device"
    record = {"machine": options.machine, "mlx": mx.__version__, "device": str(name), "sizes": options.sizes}
    print(f"## specdec {options.machine['commit']} on {name} (MLX {mx.__version__})\n")
    if not on_gpu:
        print("**No Metal device: this ran on MLX's CPU device. No figure here says anything about a GPU.**\n")
    if options.sizes == "smoke":
        print("**Tiny sizes: no figure here means anything.**\n")
    print(f"Stream read: {bandwidth / 1e9:.1f} GB/s\n", *kernel_table(kernels), sep="\n")
    if options.json is not None:
        whole = {**record, "stream": bandwidth, "kernels": kernels}
        options.json.write_text(json.dumps(whole, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()

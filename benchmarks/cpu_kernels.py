"""Time the CPU kernels on the shapes of Qwen3.5-0.8B against this machine's read bandwidth.

    python -m benchmarks.cpu_kernels [--dtype bfloat16] [--rounds 6] [--only linear,head] [--weights panels]
                                     [--instruction-set avx2 avx512] [--activations int8]

Measurements are interleaved in one process. Each round reads a large buffer once, in pieces of a few milliseconds (the
reference bandwidth), then times every op for every T in turn. Each call uses another copy of its weights or caches, so
that nothing is cached. Prints minima of the pieces and calls, since on a shared machine only minima measure the kernel.
``--weights`` is how matrices are held: ``panels``, ``plain`` (as a checkpoint holds them, unpacked), ``int8``
or ``int4``; the last two also with ``--activations int8``.

``of BW`` is (bytes that must move) / time / bandwidth; ``x T=1`` is the cost of more rows in a pass.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from benchmarks.common import arguments, in_turns, seconds
from specdec.backends.cpu.library import Kernels, KernelsUnavailable, load_kernels
from specdec.backends.cpu.native import NativeOps
from specdec.backends.cpu.packed import INT8
from specdec.backends.ops import DeltaShape, Rope
from specdec.checkpoints.quantised import ROUNDED_BITS, rounded

HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 3584, 248320
HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 8, 2, 256, 2048
DELTA = DeltaShape(key_heads=16, value_heads=16, key_dim=128, value_dim=128, kernel=4)
ROWS = (1, 2, 4, 8, 16)
ROTATE_BYTES = 160 << 20  # exceeds any L3
STREAM_BYTES, PIECE = 2 << 30, 64 << 20


@attrs.frozen
class Case:
    """One op: ``run(n, copy)``, the number of rotating copies, and the bytes that a call with n rows must move."""

    name: str
    run: Callable[[int, int], object]
    copies: int
    moved: Callable[[int], int]


def cases(ops: NativeOps, form: str) -> list[Case]:
    dtype, size = ops.dtype, torch.tensor([], dtype=ops.dtype).element_size()
    inputs: dict[tuple[int, ...], Tensor] = {}

    def rows(*shape: int) -> Tensor:
        if shape not in inputs:
            inputs[shape] = torch.randn(*shape).to(dtype)
        return inputs[shape]

    def products(name: str, run: Callable[[Tensor, list[Tensor]], object], k: int, *features: int) -> Case:
        weight_bytes = sum(features) * k * size
        copies = max(1, -(-ROTATE_BYTES * 8 // (weight_bytes * ROUNDED_BITS.get(form, 8))))
        weights = [[torch.empty(n, k, dtype=dtype).normal_(std=0.05) for n in features] for _ in range(copies)]
        if form in ROUNDED_BITS:
            weights = [[ops.weight(rounded(one, ROUNDED_BITS[form], dtype)) for one in group] for group in weights]
        elif form == "panels":
            for weight in itertools.chain(*weights):
                ops.pack(weight)
        moved = sum(map(ops.bytes_of, weights[0]))
        return Case(name, lambda n, copy: run(rows(n, k), weights[copy]), copies, lambda n: moved)

    value = DELTA.value_heads * DELTA.value_dim
    residual = {n: torch.randn(n, HIDDEN).to(dtype) for n in ROWS}
    found = [
        products("project qkv z b a", lambda x, w: ops.project(x, w), HIDDEN, DELTA.channels, value, 16, 16),
        products("project q k v", lambda x, w: ops.project(x, w), HIDDEN, 2 * HEADS * HEAD_DIM, 512, 512),
        products("linear out + residual", lambda x, w: ops.linear(x, w[0], residual[len(x)]), value, HIDDEN),
        products("swiglu", lambda x, w: ops.swiglu(x, w[0], w[1]), HIDDEN, INTERMEDIATE, INTERMEDIATE),
        products("linear down + residual", lambda x, w: ops.linear(x, w[0], residual[len(x)]), INTERMEDIATE, HIDDEN),
        products("head", lambda x, w: ops.head(x, w[0]), HIDDEN, VOCABULARY),
        products("linear 256 x 768 (hot)", lambda x, w: ops.linear(x, w[0]), 256, 768),
    ]
    found[-1] = attrs.evolve(found[-1], copies=1)  # a small model stays in L2, where overhead dominates

    kv_bytes = 2 * CONTEXT * KV_HEADS * HEAD_DIM * size
    kv = [ops.new_kv(CONTEXT + 16, KV_HEADS, HEAD_DIM) for _ in range(-(-ROTATE_BYTES // kv_bytes))]
    for cache in kv:
        cache.keys.normal_()
        cache.values.normal_()
        cache.length = CONTEXT

    def attend(n: int, copy: int) -> Tensor:
        both = rows(n, HEADS, 2 * HEAD_DIM)
        k = rows(n, KV_HEADS, HEAD_DIM)
        return ops.attend(both[:, :, :HEAD_DIM], k, k, kv[copy], scale=HEAD_DIM**-0.5, gate=both[:, :, HEAD_DIM:])

    found.append(Case(f"attend, {CONTEXT} keys", attend, len(kv), lambda n: kv_bytes))

    state_bytes = 4 * DELTA.value_heads * DELTA.key_dim * DELTA.value_dim
    layers = [ops.new_delta(DELTA) for _ in range(-(-ROTATE_BYTES // (2 * state_bytes)))]
    for layer in layers:
        layer.state.normal_(std=0.1)
        layer.after.zero_()
    a_log, dt_bias, taps = torch.randn(16), torch.randn(16), torch.randn(DELTA.channels, 4)

    def delta(n: int, copy: int) -> Tensor:
        gates = rows(n, 16)
        return ops.gated_delta(rows(n, DELTA.channels), gates, gates, a_log, dt_bias, layers[copy], DELTA)

    def replay(n: int, copy: int) -> None:
        again = layers[copy].replay
        assert again is not None
        again(n)

    found.append(Case("gated_delta", delta, len(layers), lambda n: 2 * state_bytes))
    found.append(Case("gated_delta, replay", replay, len(layers), lambda n: 2 * state_bytes))
    conv = [ops.new_delta(DELTA) for _ in range(4)]
    scale, head_scale, value_scale = torch.ones(HIDDEN), torch.ones(HEAD_DIM), torch.ones(DELTA.value_dim)
    rope = Rope.of(1e7, 64)
    table = torch.empty(VOCABULARY, HIDDEN, dtype=dtype)
    logits = {n: ops.head(rows(n, 64), torch.randn(VOCABULARY, 64).to(dtype)) for n in ROWS}

    def small(name: str, run: Callable[[int, int], object], values: Callable[[int], int], copies: int = 1) -> None:
        """An op that moves ``values`` values, in the cache."""
        found.append(Case(name, run, copies, lambda n: size * values(n)))

    def gate(n: int, copy: int) -> Tensor:
        return ops.gated_rms_norm(rows(n, 16, 128), rows(n, 16, 128), value_scale, 1e-6)

    def rotate(n: int, copy: int) -> Tensor:
        return ops.norm_rope(rows(n, HEADS, HEAD_DIM), head_scale, 1e-6, rope, CONTEXT)

    def window(n: int, copy: int) -> Tensor:
        return ops.conv_window(rows(n, DELTA.channels), taps, conv[copy])

    small("conv_window (hot)", window, lambda n: DELTA.channels * (16 // size + 6 + 3 * n), len(conv))
    small("rms_norm (hot)", lambda n, copy: ops.rms_norm(rows(n, HIDDEN), scale, 1e-6), lambda n: 2 * n * HIDDEN)
    small("norm_rope q (hot)", rotate, lambda n: 2 * n * HEADS * HEAD_DIM)
    small("gated_rms_norm (hot)", gate, lambda n: 3 * n * value)
    small("embed", lambda n, copy: ops.embed(table, range(n)), lambda n: 2 * n * HIDDEN)
    small("argmax (hot)", lambda n, copy: logits[n].argmax(), lambda n: n * VOCABULARY * 4 // size)
    return found


def main() -> None:
    forms = {"weights": ("panels", "plain", *ROUNDED_BITS), "activations": tuple(INT8)}
    options = arguments(__doc__, dtype=("bfloat16", "float32"), rounds=6, only="", **forms, instruction_set=["auto"])
    for name in options.instruction_set:
        kernels = load_kernels(name)
        if isinstance(kernels, KernelsUnavailable):
            raise SystemExit(f"no native kernels: {kernels.reason}")
        measure(kernels, options)


def measure(kernels: Kernels, options: argparse.Namespace) -> None:
    ops = NativeOps(getattr(torch, options.dtype), kernels, int8=INT8[options.activations])
    wanted = tuple(options.only.split(","))
    chosen = [case for case in cases(ops, options.weights) if case.name.startswith(wanted)]
    stream = kernels.function("stream_read", "pii", ctypes.c_double)
    buffer = torch.zeros(STREAM_BYTES // 8, dtype=torch.int64)
    best: dict[tuple[str, int], float] = {}
    bandwidth = 0.0
    for _ in range(options.rounds):
        for case in chosen:
            for at in range(0, STREAM_BYTES, PIECE):
                took = seconds(lambda at=at: stream(buffer.data_ptr() + at, PIECE, torch.get_num_threads()))
                bandwidth = max(bandwidth, PIECE / took)
            repeats = max(1, 24 // case.copies)
            for copy in range(case.copies * repeats):
                for n in (ROWS, ROWS[::-1])[copy % 2]:  # ABBA: varies the order of n
                    # A second n on the same copy would find it cached, so each n has its own place in the rotation.
                    own = (copy + ROWS.index(n) * case.copies // len(ROWS)) % case.copies
                    elapsed = seconds(functools.partial(case.run, n, own))
                    best[case.name, n] = min(best.get((case.name, n), elapsed), elapsed)
    print(f"{kernels.description}\n{options.dtype}, {torch.get_num_threads()} threads")
    print(f"stream read {bandwidth / 1e9:.1f} GB/s ({STREAM_BYTES >> 30} GiB in pieces of {PIECE >> 20} MiB)\n")
    print(f"{'':24}" + "".join(f"T = {n:<20}" for n in ROWS))
    for case in chosen:
        line = f"{case.name:24}"
        for n in ROWS:
            elapsed = best[case.name, n]
            share = case.moved(n) / elapsed / bandwidth
            cell = f"{elapsed * 1e6:.1f} us {share:.2f} BW"
            line += f"{cell if n == 1 else cell + f' x{elapsed / best[case.name, 1]:.2f}':<24}"
        print(line)
    print()
    prefill(ops)


def prefill(ops: NativeOps, rows: int = 512) -> None:
    """Arithmetic rate of a long pass, next to torch's product."""
    x, w = torch.randn(rows, HIDDEN).to(ops.dtype), torch.randn(INTERMEDIATE, HIDDEN).to(ops.dtype)
    packed = w.clone()
    ops.pack(packed)
    work = 2 * rows * HIDDEN * INTERMEDIATE
    runs: dict[str, Callable[[], Tensor]] = {
        "packed": lambda: ops.linear(x, packed),
        "plain": lambda: ops.linear(x, w),
        "torch": lambda: torch.nn.functional.linear(x, w),
    }
    for name, times in in_turns(runs, 20).items():
        print(f"{name:8} {rows} x {HIDDEN} x {INTERMEDIATE}: {work / min(times) / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()

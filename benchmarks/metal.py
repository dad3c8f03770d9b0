"""Benchmark the metal backend on this machine: kernels, row costs of the 0.8B shape, the demo model.

    python -m benchmarks.metal [--only kernels,models,demo] [--repeats 7] [--folder DIR] [--json FILE]
    python -m benchmarks.metal --smoke        tiny sizes: shows that everything runs, and measures nothing

Prints Markdown tables for a report, and writes all figures with ``--json``. Needs MLX. Without a Metal device it runs
slowly on MLX's CPU device and says so in the first line: own kernels are then their MLX references, and no figure
describes a GPU. The 0.8B checkpoints (random weights, bfloat16 and 4 bits, 2 GB) go to a temporary folder unless
``--folder`` names one.

Everything runs in one process. Arms alternate within each repeat, ratios are taken within a repeat, and medians are
printed. A kernel is timed in chains: each call depends on the previous one through two tiny operations and reads
another copy of its weights or caches, so that nothing is cached. A chain's graph is built before the clock starts. A
link is the time per call of such a chain without a kernel; it is printed, not subtracted. ``of stream`` is the bytes
that a call must move, over its time, over the bandwidth of reading a large array in this process. ``bits`` compares
every row of a call with the same row alone, ``off`` compares values with those of the first arm.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from benchmarks.common import machine, qwen3_5_config, random_checkpoint, seconds
from specdec.backends.metal.kernels.attention import attend
from specdec.backends.metal.kernels.delta import DeltaRows, gated_delta
from specdec.backends.metal.kernels.expert_matvec import expert_matvec
from specdec.backends.metal.kernels.greedy_head import greedy_head
from specdec.backends.metal.kernels.kernel import Executor, OnMetal
from specdec.backends.metal.kernels.matvec import matvec
from specdec.backends.metal.kernels.quantised_matvec import quantised_matvec
from specdec.backends.metal.quantised import PackedMatrix

PARTS = ("kernels", "models", "demo")
GROUP, BITS = 64, 4  # of quantised weights
EXACT_ROWS = 8  # rows of a call whose bits are compared


@attrs.frozen(kw_only=True)
class Sizes:
    """What to run, and its sizes."""

    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 16)
    hidden: int = 1024
    intermediate: int = 3584
    vocab: int = 248320
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 256
    delta_heads: int = 16
    delta_dim: int = 128
    experts: tuple[int, int, int, int] = (64, 8, 512, 2048)  # E, k per row, features, length
    contexts: tuple[int, ...] = (256, 2048, 8192)
    stream_bytes: int = 1 << 30
    rotate_bytes: int = 512 << 20  # total size of rotating copies, above a GPU's last-level cache
    chain_seconds: float = 0.05
    chain_calls: int = 100  # at most
    demo_tokens: int = 128
    demo_prompts: int = 2  # per class
    config: dict[str, Any] = attrs.field(factory=qwen3_5_config)


SMOKE = Sizes(
    rows=(1, 2, 3),
    hidden=64,
    intermediate=128,
    vocab=512,
    heads=4,
    kv_heads=2,
    head_dim=32,
    delta_heads=2,
    delta_dim=32,
    experts=(4, 2, 32, 64),
    contexts=(8,),
    stream_bytes=1 << 20,
    rotate_bytes=1 << 16,
    chain_seconds=0.0,
    chain_calls=2,
    demo_tokens=6,
    demo_prompts=1,
    config=qwen3_5_config(
        hidden=64,
        layers=4,
        intermediate=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        key_heads=2,
        value_heads=2,
        linear_dim=32,
        vocab=512,
        max_positions=512,
    ),
)


# --- kernels ---------------------------------------------------------------------------------------------------------


Run = Callable[[int, int, int, mx.array], mx.array]


@attrs.frozen(kw_only=True)
class Case:
    """One implementation of one operation.

    Attributes:
        what: the operation and its sizes; arms with the same ``what`` compute the same.
        arm: whose kernel.
        run: ``run(first, rows, copy, link)`` returns ``[rows, ...]`` for the rows ``first`` to ``first + rows``;
            ``link`` is a zero of shape ``[1]`` that must be added to an input.
        moved: bytes that a call must move.
        copies: number of rotating copies of weights or caches.
    """

    what: str
    arm: str
    run: Run
    moved: int
    copies: int


class Lab:
    """Random arrays, and the device of our kernels."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.on_gpu = mx.default_device().type == mx.DeviceType.gpu
        self.executor: Executor | None = OnMetal() if self.on_gpu else None
        self.own = "own" if self.on_gpu else "own (reference)"
        mx.random.seed(0)

    def normal(self, *shape: int, std: float = 1.0, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        made = (mx.random.normal(shape) * std).astype(dtype)
        mx.eval(made)
        return made

    def copies(self, nbytes: int) -> int:
        """How many copies of that size a chain needs."""
        return max(1, min(64, -(-self.sizes.rotate_bytes // nbytes)))

    def stock_product(self, x: mx.array, weight: mx.array | PackedMatrix) -> mx.array:
        if not isinstance(weight, PackedMatrix):
            return x @ weight.T
        if self.on_gpu:
            return weight.product(x)
        return _wide(weight).product(x.astype(mx.float32))


def cases(lab: Lab) -> Iterator[list[Case]]:
    """Groups of equivalent arms, each with its inputs."""
    sizes = lab.sizes
    values = sizes.delta_heads * sizes.delta_dim
    shapes = {
        "q, k, v of a linear layer": (3 * values, sizes.hidden),
        "z of a linear layer": (values, sizes.hidden),
        "out of a linear layer": (sizes.hidden, values),
        "gate or up": (sizes.intermediate, sizes.hidden),
        "down": (sizes.hidden, sizes.intermediate),
    }
    for name, (features, length) in shapes.items():
        yield from _products(lab, f"{name} {features}x{length}", features, length)
    yield from _experts(lab)
    yield from _heads(lab)
    for context in sizes.contexts:
        yield _attention(lab, context)
    yield _delta(lab)


def _pair(lab: Lab, what: str, stock: Run, own: Run, *, moved: int, copies: int = 1) -> list[Case]:
    """MLX's implementation and ours."""
    return [
        Case(what=what, arm=arm, run=run, moved=moved, copies=copies) for arm, run in (("stock", stock), (lab.own, own))
    ]


def _stored(lab: Lab, *shape: int) -> tuple[tuple[str, Callable[[], Any], int], ...]:
    """How a matrix is stored: name, maker and bytes, in bfloat16 and in 4 bits."""
    values = math.prod(shape)
    return (
        ("bf16", lambda: lab.normal(*shape, std=shape[-1] ** -0.5), 2 * values),
        ("4-bit", lambda: _packed(lab, *shape), values * BITS // 8 + 4 * values // GROUP),
    )


def _products(lab: Lab, what: str, features: int, length: int) -> Iterator[list[Case]]:
    x = lab.normal(max(lab.sizes.rows), length)
    for storage, make, nbytes in _stored(lab, features, length):
        weights = [make() for _ in range(lab.copies(nbytes))]

        def stock(first: int, rows: int, copy: int, link: mx.array, weights: Any = weights) -> mx.array:
            return lab.stock_product(x[first : first + rows] + link, weights[copy])

        def own(first: int, rows: int, copy: int, link: mx.array, weights: Any = weights) -> mx.array:
            ours = quantised_matvec if isinstance(weights[copy], PackedMatrix) else matvec
            return ours(x[first : first + rows] + link, weights[copy], dtype=mx.bfloat16, executor=lab.executor)

        yield _pair(lab, f"{what} {storage}", stock, own, moved=nbytes, copies=len(weights))


def _packed(lab: Lab, *shape: int) -> PackedMatrix:
    codes, scales, biases = mx.quantize(lab.normal(*shape, std=shape[-1] ** -0.5), group_size=GROUP, bits=BITS)
    mx.eval(codes, scales, biases)
    return PackedMatrix(codes=codes, scales=scales, biases=biases, group=GROUP, bits=BITS)


def _experts(lab: Lab) -> Iterator[list[Case]]:
    """One matrix of the experts that a router chose, different ones for every row."""
    count, slots, features, length = lab.sizes.experts
    x = lab.normal(max(lab.sizes.rows), 1, length)
    ids = mx.argsort(lab.normal(max(lab.sizes.rows), count), axis=-1)[:, :slots].astype(mx.int32)
    mx.eval(ids)
    for storage, make, nbytes in _stored(lab, count, features, length):

        def stock(first: int, rows: int, copy: int, link: mx.array, weight: Any) -> mx.array:
            part = slice(first, first + rows)
            given = (x[part] + link)[:, :, None]
            if isinstance(weight, PackedMatrix):
                kept = weight if lab.on_gpu else _wide(weight)
                return kept.product(given if lab.on_gpu else given.astype(mx.float32), ids[part])[:, :, 0]
            matrices = weight.swapaxes(-1, -2)
            if not lab.on_gpu:  # MLX's CPU device has this product in float32 only
                given, matrices = given.astype(mx.float32), matrices.astype(mx.float32)
            return mx.gather_mm(given, matrices, rhs_indices=ids[part])[:, :, 0]

        def own(first: int, rows: int, copy: int, link: mx.array, weight: Any) -> mx.array:
            part = slice(first, first + rows)
            return expert_matvec(x[part] + link, weight, ids[part], dtype=mx.bfloat16, executor=lab.executor)

        held, moved = make(), nbytes * slots // count  # at one row; more rows may share experts
        what = f"{slots} of {count} experts {features}x{length} {storage}"
        yield _pair(lab, what, functools.partial(stock, weight=held), functools.partial(own, weight=held), moved=moved)


def _wide(weight: PackedMatrix) -> PackedMatrix:
    """Scales in float32: MLX's CPU device sums in their dtype."""
    return attrs.evolve(weight, scales=weight.scales.astype(mx.float32), biases=weight.biases.astype(mx.float32))


def _heads(lab: Lab) -> Iterator[list[Case]]:
    """The choice of a token: logits and argmax, against one kernel without logits."""
    sizes = lab.sizes
    x = lab.normal(max(sizes.rows), sizes.hidden)
    for storage, make, nbytes in _stored(lab, sizes.vocab, sizes.hidden):

        def stock(first: int, rows: int, copy: int, link: mx.array, weight: Any) -> mx.array:
            logits = lab.stock_product(x[first : first + rows] + link, weight)
            return mx.argmax(logits, axis=-1).astype(mx.int32)[:, None]

        def own(first: int, rows: int, copy: int, link: mx.array, weight: Any) -> mx.array:
            return greedy_head(x[first : first + rows] + link, [weight], executor=lab.executor)[:, None]

        held, what = make(), f"head and argmax {sizes.vocab}x{sizes.hidden} {storage}"
        yield _pair(lab, what, functools.partial(stock, weight=held), functools.partial(own, weight=held), moved=nbytes)


def _attention(lab: Lab, context: int) -> list[Case]:
    sizes, most = lab.sizes, max(lab.sizes.rows)
    bucket = -(-(context + most) // 256) * 256
    shape = (1, sizes.kv_heads, bucket, sizes.head_dim)
    nbytes = 2 * context * sizes.kv_heads * sizes.head_dim * 2
    copies = lab.copies(nbytes)
    keys, values = ([lab.normal(*shape) for _ in range(copies)] for _ in range(2))
    q = lab.normal(most, sizes.heads, sizes.head_dim)
    scale = sizes.head_dim**-0.5
    lengths = [mx.array([context + first], mx.int32) for first in range(most)]
    mx.eval(lengths)

    def stock(first: int, rows: int, copy: int, link: mx.array) -> mx.array:
        given = (q[first : first + rows] + link).transpose(1, 0, 2)[None]
        end = context + first + rows
        k, v = keys[copy][:, :, :end], values[copy][:, :, :end]
        if not lab.on_gpu:
            given, k, v = (array.astype(mx.float32) for array in (given, k, v))
        mask = "causal" if rows > 1 else None
        out = mx.fast.scaled_dot_product_attention(given, k, v, scale=scale, mask=mask)
        return out[0].transpose(1, 0, 2).astype(mx.bfloat16)

    def own(first: int, rows: int, copy: int, link: mx.array) -> mx.array:
        given, how = q[first : first + rows] + link, {"scale": scale, "dtype": mx.bfloat16, "executor": lab.executor}
        return attend(given, keys[copy], values[copy], lengths[first], **how)

    what = f"attention {sizes.heads}/{sizes.kv_heads} heads of {sizes.head_dim}, {context} tokens"
    return _pair(lab, what, stock, own, moved=nbytes, copies=copies)


def _delta(lab: Lab) -> list[Case]:
    """Rows of the delta rule. A call begins with row 0, so a row alone is the last row of a call that ends with it."""
    sizes, most = lab.sizes, max(lab.sizes.rows)
    heads, dim = sizes.delta_heads, sizes.delta_dim
    nbytes = 2 * heads * dim * dim * 4  # read and written
    copies = lab.copies(nbytes // 2)
    states = [lab.normal(heads, dim, dim, dtype=mx.float32) for _ in range(copies)]
    q, k = (_unit(lab.normal(most, heads, dim, dtype=mx.float32)) for _ in range(2))
    v = lab.normal(most, heads, dim)
    g, beta = (mx.sigmoid(lab.normal(most, heads, dtype=mx.float32)) for _ in range(2))
    past, kept = DeltaRows.none(heads, dim, heads, dim), mx.array([0], mx.int32)
    mx.eval(q, k, g, beta, kept)

    def stock(first: int, rows: int, copy: int, link: mx.array) -> mx.array:
        upto = first + rows
        given = v[:upto].astype(mx.float32) + link
        out, after = mx.fast.gated_delta_update(
            q[None, :upto], k[None, :upto], given[None], g[None, :upto], beta[None, :upto], states[copy][None]
        )
        return _with_state(out[0, first:], after[0])

    def own(first: int, rows: int, copy: int, link: mx.array) -> mx.array:
        upto = first + rows
        given = (q[:upto], k[:upto], v[:upto] + link, g[:upto], beta[:upto])
        out, state, _ = gated_delta(states[copy], past, kept, *given, dtype=mx.bfloat16, executor=lab.executor)
        return _with_state(out[first:], state)

    return _pair(lab, f"delta rule {heads} heads of {dim}x{dim}", stock, own, moved=nbytes, copies=copies)


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt(x.square().sum(axis=-1, keepdims=True) + 1e-6)


def _with_state(out: mx.array, state: mx.array) -> mx.array:
    """The result, made dependent on the matrix: a call that leaves it uncomputed would be cheap."""
    return out + (state[0, 0, :1] * 0).astype(out.dtype)


@attrs.frozen(kw_only=True)
class Timed:
    """One arm of one kernel at every row count."""

    what: str
    arm: str
    milliseconds: dict[int, float]
    ratio: dict[int, float]  # to one row
    of_stream: float  # at one row
    bits: str  # whether rows have the bits that they have alone
    off: float | None  # largest difference from the stock arm, in shares of its largest value; None for that arm


def time_kernels(lab: Lab, repeats: int, bandwidth: float) -> tuple[list[Timed], float]:
    """Every arm of every case, and the seconds of a chain's link."""
    sizes = lab.sizes
    link = _seconds_of(lab, lambda first, rows, copy, zero: zero + 1.0, 1, 1)
    timed: list[Timed] = []
    for group in cases(lab):
        print(group[0].what, file=sys.stderr, flush=True)
        times: dict[tuple[str, int], list[float]] = {(case.arm, rows): [] for case in group for rows in sizes.rows}
        for repeat in range(repeats + 1):
            for case in group if repeat % 2 else reversed(group):
                for rows in sizes.rows:
                    took = _seconds_of(lab, case.run, rows, case.copies)
                    if repeat:  # the first compiles
                        times[case.arm, rows].append(took)
        stock = _host(group[0].run(0, max(sizes.rows), 0, mx.zeros(1)))
        for case in group:
            one = times[case.arm, 1]
            median = {rows: statistics.median(times[case.arm, rows]) for rows in sizes.rows}
            got = _host(case.run(0, max(sizes.rows), 0, mx.zeros(1)))
            timed.append(
                Timed(
                    what=case.what,
                    arm=case.arm,
                    milliseconds={rows: 1e3 * took for rows, took in median.items()},
                    ratio={
                        rows: statistics.median(a / b for a, b in zip(times[case.arm, rows], one, strict=True))
                        for rows in sizes.rows
                    },
                    of_stream=case.moved / median[1] / bandwidth,
                    bits=_bits(case, sizes),
                    off=None if case is group[0] else float(np.abs(got - stock).max() / max(np.abs(stock).max(), 1e-9)),
                )
            )
        mx.clear_cache()
    return timed, link


def _seconds_of(lab: Lab, run: Run, rows: int, copies: int) -> float:
    """Seconds per call of a chain, in which each call waits for the previous one."""

    def chain(calls: int) -> float:
        zero = mx.zeros(1)
        mx.eval(zero)

        link = zero
        for call in range(calls):
            link = run(0, rows, call % copies, link.astype(mx.bfloat16)).reshape(-1)[:1].astype(mx.float32) * 0
        return seconds(lambda: mx.eval(link))

    first = chain(2) / 2
    calls = max(2, min(lab.sizes.chain_calls, int(lab.sizes.chain_seconds / max(first, 1e-7))))
    return chain(calls) / calls


def _bits(case: Case, sizes: Sizes) -> str:
    """The row counts at which a row has other bits than alone."""
    zero = mx.zeros(1, dtype=mx.bfloat16)
    most = min(EXACT_ROWS, max(sizes.rows))
    alone = np.concatenate([_host(case.run(row, 1, 0, zero)) for row in range(most)])
    differing = [
        rows for rows in range(2, most + 1) if not np.array_equal(_host(case.run(0, rows, 0, zero)), alone[:rows])
    ]
    return f"equal 2-{most}" if not differing else f"differ {','.join(map(str, differing))}"


def _host(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32))


def stream_bandwidth(nbytes: int, repeats: int) -> dict[str, float]:
    """Bytes per second of reading an array much larger than any cache: best and median of ``repeats``."""
    words = mx.ones((nbytes // 4,), dtype=mx.float32)
    mx.eval(words)
    mx.eval(words.max())
    times = [seconds(lambda: mx.eval(words.max())) for _ in range(max(3, repeats))]
    return {"best": nbytes / min(times), "median": nbytes / statistics.median(times)}


# --- models ----------------------------------------------------------------------------------------------------------


def write_quantised(source: Path, folder: Path) -> None:
    """The checkpoint of ``source`` with its matrices in MLX's 4-bit affine layout."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = {"group_size": GROUP, "bits": BITS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    weights: dict[str, mx.array] = {}
    loaded: Any = mx.load(str(source / "model.safetensors"))
    for name, array in loaded.items():
        if array.ndim == 2 and array.shape[1] % GROUP == 0 and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            parts = mx.quantize(array, group_size=GROUP, bits=BITS)
            weights |= {f"{module}.{part}": made for part, made in zip(("weight", "scales", "biases"), parts)}  # noqa: B905
        else:
            weights[name] = array
        mx.eval(list(weights.values()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def measure_models(folder: Path, sizes: Sizes, repeats: int, bandwidth: float) -> dict[str, Any]:
    """r(M), a draft step and the share of the stream's bandwidth, for bfloat16 and 4-bit weights."""
    from specdec.config import RunConfig, TargetConfig
    from specdec.doctor import measure_row_costs
    from specdec.models.loading import load_target

    plain, packed = folder / "bf16", folder / "4-bit"
    if not (plain / "model.safetensors").exists():
        random_checkpoint(plain, sizes.config)
    if not (packed / "model.safetensors").exists():
        write_quantised(plain, packed)
    found: dict[str, Any] = {}
    for name, path in (("bf16", plain), ("4-bit", packed)):
        target = load_target(RunConfig(target=TargetConfig(model=str(path), backend="metal"))).target
        costs = measure_row_costs(target, context=min(256, target.info.max_positions // 2), repeats=repeats)
        loaded: Any = mx.load(str(path / "model.safetensors"))
        step_bytes = sum(array.nbytes for key, array in loaded.items() if not key.startswith("mtp."))
        del loaded
        found[name] = {
            "bytes_per_step": step_bytes,
            "of_stream": step_bytes / costs.rows[0].seconds / bandwidth,
            "rows": {row.rows: {"milliseconds": 1e3 * row.seconds, "ratio": row.ratio} for row in costs.rows},
            "draft_step": {
                "milliseconds": None if costs.draft_step is None else 1e3 * costs.draft_step,
                "of_plain_step": None if costs.draft_step is None else costs.draft_step / costs.rows[0].seconds,
            },
            "best_depth": {f"{a:.0%}": costs.best_depth(a) for a in (0.6, 0.7, 0.8, 0.9)},
            "steady": costs.steady,
            "parity": target.info.parity.value,
            "parity_reason": target.info.parity_reason,
            "kernels": target.info.kernels,
        }
        del target
        mx.clear_cache()
    return found


def measure_demo(sizes: Sizes) -> dict[str, Any]:
    """The embedded model on this backend, plain against speculative (A B B A), outputs compared."""
    import specdec
    from specdec.measuring.bench import compare
    from specdec.measuring.prompts import choose_prompts, own_prompts

    lm = specdec.load(backend="metal", depth=2)
    chosen = choose_prompts(own_prompts(), per_class=sizes.demo_prompts)
    report = compare(lm, chosen, model="demo", max_new_tokens=sizes.demo_tokens, temperature=0.0)
    return report.to_dict()


# --- the report ------------------------------------------------------------------------------------------------------


def device() -> dict[str, Any]:
    """MLX and its device."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    info = mx.device_info() if on_gpu else {}
    return {
        "mlx": mx.__version__,
        "gpu": on_gpu,
        "device": str(info.get("device_name", "MLX's CPU device")),
        "architecture": str(info.get("architecture", "")),
        "memory_bytes": int(info.get("memory_size", 0)) or None,
    }


def markdown(record: dict[str, Any]) -> Iterator[str]:
    """The lines of the report."""
    where = record["device"]
    yield f"## specdec on {where['device']} (MLX {where['mlx']})"
    yield ""
    if not where["gpu"]:
        yield "**No Metal device: this ran on MLX's CPU device. No figure here says anything about a GPU.**"
        yield ""
    if record["smoke"]:
        yield "**Smoke test with tiny sizes: no figure here means anything.**"
        yield ""
    host = record["machine"]
    stream = record["stream"]
    yield f"specdec {host['commit']}, python {host['python']}, torch {host['torch']}, load {host['load_1min']:.1f}"
    yield f"`{host['command']}`"
    yield ""
    yield f"Stream read: {stream['median'] / 1e9:.1f} GB/s (best {stream['best'] / 1e9:.1f})"
    if "kernels" in record:
        yield from ("", f"### Kernels (a link of the chain takes {record['link_microseconds']:.1f} us)", "")
        yield from _kernel_table(record["kernels"])
    if "models" in record:
        yield from ("", "### 0.8B shape, random weights", "")
        yield from _model_table(record["models"])
    if "demo" in record:
        yield from ("", "### Demo model", "", *_demo_lines(record["demo"]))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(headings, widths, strict=True)) + " |"
    yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    for row in rows:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"


def _kernel_table(kernels: list[dict[str, Any]]) -> Iterator[str]:
    counts = list(kernels[0]["ratio"])
    headings = ("kernel", "arm", "ms (1 row)", "of stream", *(f"r({rows})" for rows in counts[1:]), "bits", "off")
    yield from _table(
        headings,
        [
            (
                one["what"],
                one["arm"],
                f"{one['milliseconds'][counts[0]]:.4f}",
                f"{one['of_stream']:.0%}",
                *(f"{one['ratio'][rows]:.2f}" for rows in counts[1:]),
                one["bits"],
                "" if one["off"] is None else f"{one['off']:.1e}",
            )
            for one in kernels
        ],
    )


def _model_table(models: dict[str, Any]) -> Iterator[str]:
    counts = list(next(iter(models.values()))["rows"])
    headings = (
        "weights",
        "ms (1 row)",
        "of stream",
        *(f"r({rows})" for rows in counts[1:]),
        "draft step",
        "parity",
        "best depth at 60/70/80/90 %",
    )
    rows = []
    for name, one in models.items():
        step = one["draft_step"]["of_plain_step"]
        depths = ", ".join(f"{depth} ({speedup:.2f}x)" for depth, speedup in one["best_depth"].values())
        rows.append(
            (
                name,
                f"{one['rows'][counts[0]]['milliseconds']:.3f}",
                f"{one['of_stream']:.0%}",
                *(f"{one['rows'][count]['ratio']:.2f}" for count in counts[1:]),
                "none" if step is None else f"{step:.2f}",
                one["parity"],
                depths,
            )
        )
    yield from _table(headings, rows)
    for name, one in models.items():
        busy = "" if one["steady"] else "; repeats differed by more than a quarter"
        yield from ("", f"{name}: {one['kernels']}; {one['parity']}: {one['parity_reason']}{busy}")


def _demo_lines(demo: dict[str, Any]) -> Iterator[str]:
    overall = demo["overall"]
    yield (
        f"plain {overall['plain']:.1f} tokens/s, speculative {overall['speculative']:.1f} (depth 2): "
        f"{overall['speedup']:.2f}x, {overall['tokens_per_cycle']:.2f} tokens per cycle, "
        f"accepted of reached {overall['accepted']} of {overall['reached']}"
    )
    yield ""
    yield from _table(("step", "ms"), [(one["what"], f"{one['median_ms']:.3f}") for one in demo["timings"]])
    differing = {row["prompt"] for row in demo["prompts"] if row["differs_at"] is not None}
    yield ""
    yield f"outputs of {len(differing)} of {overall['prompts']} prompts differ; parity {demo['environment']['parity']}"
    for notice in demo["notices"]:
        yield f"notice: {notice}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="keep the 0.8B checkpoints here")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--only takes {', '.join(PARTS)}, got {', '.join(unknown)}")
    if options.repeats < 1:
        parser.error("--repeats takes 1 or more")
    if options.smoke and options.folder is not None:
        parser.error("--smoke writes checkpoints of its own, --folder would keep them")
    sizes = SMOKE if options.smoke else Sizes()
    repeats = min(options.repeats, 2) if options.smoke else options.repeats
    lab = Lab(sizes)
    record: dict[str, Any] = {"machine": machine(), "device": device(), "smoke": options.smoke}
    if not lab.on_gpu:
        print("No Metal device: running on MLX's CPU device.\n", flush=True)
    record["stream"] = stream_bandwidth(sizes.stream_bytes, repeats)
    bandwidth = record["stream"]["median"]
    if "kernels" in parts:
        timed, link = time_kernels(lab, repeats, bandwidth)
        record["kernels"] = [attrs.asdict(one) for one in timed]
        record["link_microseconds"] = 1e6 * link
    if "models" in parts:
        with tempfile.TemporaryDirectory() as temporary:
            record["models"] = measure_models(options.folder or Path(temporary), sizes, repeats, bandwidth)
    if "demo" in parts:
        record["demo"] = measure_demo(sizes)
    print("\n".join(markdown(record)))
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()

"""Check and time each kernel at the sizes of a shape, and compare products with cuBLAS at one row.

Every call in a rotation reads another copy of its weights or caches, so that nothing is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor

from benchmarks.cuda.shapes import Shape
from benchmarks.cuda.timing import Lab, Spread
from specdec.backends.cuda.kernels import accept, attention, delta, gemm, head, norm, rope, rows, tiles
from specdec.backends.cuda.kernels.launch import COLUMNS, MAX_ROWS
from specdec.backends.cuda.kernels.packed import Layout
from specdec.backends.cuda.kernels.tiles import Tile
from specdec.backends.cuda.weights import DenseWeight, fuse
from specdec.backends.ops import DeltaShape

ROWS = (1, 2, 4, 8, 16)
EPS = 1e-6
RING = 32
CALLS = 16  # minimum per graph: excludes the gap between graphs from kernel times
SWEPT = 5  # tiles of a product; each is compiled
_ACCEPT_KEYS = 8  # rows of a cycle in the bookkeeping case: K + 1


@attrs.frozen(kw_only=True)
class Case:
    """One kernel at one size.

    Attributes:
        run: ``run(rows, copy)`` with the rows as a slice of 0..15; a sequence kernel only gets slices from 0.
        alone: whether a slice of one row may run by itself (products); otherwise rows depend on earlier ones.
        copies: number of rotating copies of weights or caches.
        moved: bytes that a call with that many rows must move.
        reference: the float64 result for copy 0; None: not compared here.
        tolerance: bound on the norm of the difference over that of the reference.
        times: how often a decode of the whole model runs it.
    """

    name: str
    run: Callable[[slice, int], tuple[Tensor, ...]]
    moved: Callable[[int], int]
    alone: bool = True
    copies: int = 1
    reference: Callable[[], tuple[Tensor, ...]] | None = None
    tolerance: float = 0.0
    times: int = 0


def cases(shape: Shape, lab: Lab, dtype: torch.dtype) -> Iterator[Case]:
    """The kernels of a decode of ``shape`` with their inputs, created one at a time."""
    place, hidden = lab.place, shape.hidden
    generator = torch.Generator(place).manual_seed(5)
    size = dtype.itemsize

    def normal(*sizes: int, std: float = 1.0, act: bool = True) -> Tensor:
        made = torch.empty(sizes, dtype=dtype if act else torch.float32, device=place)
        return made.normal_(0.0, std, generator=generator)

    few = lab.copies(1, most=8)  # for kernels that read almost nothing
    x = normal(MAX_ROWS, hidden)
    residual = normal(MAX_ROWS, hidden)
    scale = 1.0 + normal(hidden, std=0.1, act=False)
    rms = norm.Rms(scale, EPS)
    rounding = 4e-3 if dtype is torch.bfloat16 else 1e-5
    summing = 2e-4 if dtype is torch.bfloat16 else 1e-5  # for float32 results

    def product(
        name: str,
        times: int,
        k: int,
        features: Sequence[int],
        run: Callable[[slice, list[DenseWeight]], Any],
        reference: Callable[[list[DenseWeight]], Any],
        tolerance: float = rounding,
        most: int = 64,
    ) -> Case:
        nbytes = sum(features) * k * size
        copies = lab.copies(nbytes, most=most)
        sets = []
        for _ in range(copies):
            weights = [DenseWeight(normal(n, k, std=k**-0.5)) for n in features]
            if len(weights) > 1:
                fuse(weights)
            sets.append(weights)
        return Case(
            name=name,
            run=lambda part, copy: _tuple(run(part, sets[copy])),
            alone=True,
            copies=copies,
            moved=lambda rows: nbytes,
            reference=lambda: _tuple(reference(sets[0])),
            tolerance=tolerance,
            times=times,
        )

    delta_shape = shape.family.delta
    values = delta_shape.value_heads * delta_shape.value_dim
    o = normal(MAX_ROWS, delta_shape.value_heads, delta_shape.value_dim)
    z = normal(MAX_ROWS, delta_shape.value_heads, delta_shape.value_dim)
    value_scale = 1.0 + normal(delta_shape.value_dim, std=0.1, act=False)
    wide = normal(MAX_ROWS, shape.intermediate)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mixed = normal(MAX_ROWS, queries)
    every, linear, full = shape.layers, shape.delta_layers, shape.attention_layers

    def gated(part: slice) -> norm.GatedRms:
        return norm.GatedRms(z[part], value_scale, EPS)

    yield product(
        "norm, in_proj of a linear layer",
        linear,
        hidden,
        (delta_shape.channels, values, delta_shape.value_heads, delta_shape.value_heads),
        lambda part, w: gemm.project(x[part], w, prologue=rms),
        lambda w: gemm.project_reference(x, w, prologue=rms),
    )
    yield _delta_case(delta_shape, lab, normal, dtype, linear)
    yield product(
        "gated norm, out_proj, residual",
        linear,
        values,
        (hidden,),
        lambda part, w: gemm.linear(o[part], w[0], residual=residual[part], prologue=gated(part)),
        lambda w: gemm.linear_reference(o, w[0], residual=residual, prologue=gated(slice(None))),
    )
    yield product(
        "norm, q k v of an attention layer",
        full,
        hidden,
        (2 * queries, keys, keys),
        lambda part, w: gemm.project(x[part], w, prologue=rms),
        lambda w: gemm.project_reference(x, w, prologue=rms),
    )
    yield from _attention_cases(shape, lab, normal, dtype, full)
    yield product(
        "o_proj, residual",
        full,
        queries,
        (hidden,),
        lambda part, w: gemm.linear(mixed[part], w[0], residual=residual[part]),
        lambda w: gemm.linear_reference(mixed, w[0], residual=residual),
    )
    yield product(
        "norm, gate and up, silu",
        every,
        hidden,
        (shape.intermediate, shape.intermediate),
        lambda part, w: gemm.swiglu(x[part], w[0], w[1], prologue=rms),
        lambda w: gemm.swiglu_reference(x, w[0], w[1], prologue=rms),
        2 * rounding,
    )
    yield product(
        "down_proj, residual",
        every,
        shape.intermediate,
        (hidden,),
        lambda part, w: gemm.linear(wide[part], w[0], residual=residual[part]),
        lambda w: gemm.linear_reference(wide, w[0], residual=residual),
    )

    def best(part: slice, weight: DenseWeight, ids: Tensor | None = None) -> tuple[Tensor, ...]:
        found = head.best(x[part], weight, ids=ids)
        return found.values, found.log_sum, found.ids

    def best_reference(weight: DenseWeight, ids: Tensor | None = None) -> tuple[Tensor, ...]:
        found = head.best_reference(x, weight, ids=ids)
        return found.values, found.log_sum, found.ids

    yield product(
        "head, best token",
        1,
        hidden,
        (shape.vocabulary,),
        lambda part, w: best(part, w[0]),
        lambda w: best_reference(w[0]),
        summing,
        most=4,
    )
    ids = torch.arange(shape.draft_rows, dtype=torch.int32, device=place)
    yield product(
        "pruned head, best token",
        0,
        hidden,
        (shape.draft_rows,),
        lambda part, w: best(part, w[0], ids),
        lambda w: best_reference(w[0], ids),
        summing,
    )
    yield product(
        "head, all logits",
        0,
        hidden,
        (shape.vocabulary,),
        lambda part, w: head.logits(x[part], w[0]),
        lambda w: gemm.linear_reference(x, w[0]),
        summing,
        most=4,
    )
    table = normal(shape.vocabulary, hidden)
    tokens = torch.arange(MAX_ROWS, dtype=torch.int32, device=place) * 5
    yield Case(
        name="embedding",
        run=lambda part, copy: (rows.embed(table, tokens[part]),),
        copies=few,
        moved=lambda n: 2 * n * hidden * size,
        reference=lambda: (table[tokens.long()].double(),),
        times=1,
    )
    yield Case(
        name="norm",
        run=lambda part, copy: (norm.rms_norm(x[part], scale, EPS),),
        copies=few,
        moved=lambda n: 2 * n * hidden * size,
        reference=lambda: (norm.rms_norm_reference(x, scale, EPS),),
        tolerance=rounding,
        times=1,
    )
    yield _bookkeeping_case(shape, lab)


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def address_row(place: torch.device, *entries: int) -> Tensor:
    """A row of the address table."""
    return torch.tensor([*entries, *[0] * (COLUMNS - len(entries))], dtype=torch.int64).to(place)


def _delta_case(shape: DeltaShape, lab: Lab, normal: Callable[..., Tensor], dtype: torch.dtype, times: int) -> Case:
    place, slots = lab.place, MAX_ROWS + 1
    state_bytes = 4 * shape.value_heads * shape.key_dim * shape.value_dim
    copies = lab.copies(2 * state_bytes)
    states, rings, table = [], [], []
    for _ in range(copies):
        states.append(normal(slots, shape.value_heads, shape.key_dim, shape.value_dim, std=0.1, act=False))
        rings.append(normal(RING, shape.channels))
        table.append(address_row(place, 100, states[-1].data_ptr(), rings[-1].data_ptr(), slots, 3, RING))
    qkv = normal(MAX_ROWS, shape.channels)
    a, b = normal(MAX_ROWS, shape.value_heads), normal(MAX_ROWS, shape.value_heads)
    taps = normal(shape.channels, shape.kernel, std=0.5, act=False)
    a_log, dt_bias = normal(shape.value_heads, act=False), normal(shape.value_heads, act=False)

    def run(part: slice, copy: int) -> tuple[Tensor, ...]:
        out = delta.delta_rows(qkv[part], a[part], b[part], taps, a_log, dt_bias, table[copy], shape)
        return (out.flatten(1),)

    def reference() -> tuple[Tensor, ...]:
        window = rings[0][[(100 - back) % RING for back in range(shape.kernel - 1, 0, -1)]]
        u = delta.conv_window_reference(qkv.double(), taps.double(), window.double()).to(dtype).double()
        state = states[0][3].double()
        out, _ = delta.gated_delta_reference(u, a.double(), b.double(), a_log, dt_bias, state, shape)
        return (out.flatten(1),)

    return Case(
        name="convolution, gates and delta rule",
        run=run,
        alone=False,
        copies=copies,
        moved=lambda n: (1 + n) * state_bytes,
        reference=reference,
        tolerance=2e-2 if dtype is torch.bfloat16 else 1e-4,
        times=times,
    )


def _attention_cases(
    shape: Shape, lab: Lab, normal: Callable[..., Tensor], dtype: torch.dtype, times: int
) -> Iterator[Case]:
    place, dim, context, few = lab.place, shape.head_dim, shape.context, lab.copies(1, most=8)
    kv_bytes = shape.kv_bytes(context, 1) * dtype.itemsize // 2
    copies = lab.copies(kv_bytes)
    sizes = (context + MAX_ROWS, shape.kv_heads, dim)
    caches = [(normal(*sizes), normal(*sizes)) for _ in range(copies)]
    table = [address_row(place, context, k.data_ptr(), v.data_ptr(), sizes[0]) for k, v in caches]
    both, query = normal(MAX_ROWS, shape.heads, 2, dim), normal(MAX_ROWS, shape.heads, dim)
    k, v = normal(MAX_ROWS, shape.kv_heads, dim), normal(MAX_ROWS, shape.kv_heads, dim)
    q_scale, k_scale = (1.0 + normal(dim, std=0.1, act=False) for _ in range(2))
    rope_ = shape.family.attention.rope
    frequencies = torch.tensor(rope_.inv_freq, dtype=torch.float32, device=place)
    scratch = [(torch.empty_like(keys), torch.empty_like(values)) for keys, values in caches[:1]]
    written = address_row(place, context, scratch[0][0].data_ptr(), scratch[0][1].data_ptr(), sizes[0])

    def rotate(part: slice, copy: int) -> tuple[Tensor, ...]:
        turned = rope.rotate_and_write(
            both[part][:, :, 0], k[part], v[part], q_scale, k_scale, EPS, frequencies, written
        )
        return (turned.flatten(1),)

    def attend(part: slice, copy: int) -> tuple[Tensor, ...]:
        return (
            attention.attend(
                query[part],
                table[copy],
                kv_heads=shape.kv_heads,
                scale=dim**-0.5,
                gate=both[part][:, :, 1],
                max_length=sizes[0],
            ),
        )

    def attended() -> tuple[Tensor, ...]:
        keys, values = caches[0]
        gate = both[:, :, 1].double()
        return (attention.attend_reference(query.double(), keys, values, context, scale=dim**-0.5, gate=gate),)

    yield Case(
        name="q k norm, rotary, write",
        run=rotate,
        alone=False,
        copies=few,
        moved=lambda n: 2 * n * (shape.heads + 2 * shape.kv_heads) * dim * dtype.itemsize,
        times=times,
    )
    yield Case(
        name=f"attention over {context} keys, fold",
        run=attend,
        alone=False,
        copies=copies,
        moved=lambda n: kv_bytes,
        reference=attended,
        tolerance=1e-2 if dtype is torch.bfloat16 else 1e-5,
        times=times,
    )


def _bookkeeping_case(shape: Shape, lab: Lab) -> Case:
    """Accept, and the commit of all caches: the cost of a cycle besides its passes."""
    place, depth, few = lab.place, _ACCEPT_KEYS - 1, lab.copies(1, most=8)
    drafted = torch.arange(depth, dtype=torch.int32, device=place)
    best = torch.arange(depth + 1, dtype=torch.int32, device=place)
    best[depth // 2] = 999
    stops = torch.tensor([12345], dtype=torch.int32, device=place)
    kinds = torch.tensor(
        [accept.ROWS if kind == "full_attention" else accept.STATES for kind in shape.family.layer_types],
        dtype=torch.int32,
        device=place,
    )
    table = torch.zeros(len(kinds), COLUMNS, dtype=torch.int64, device=place)
    table[:, 3] = MAX_ROWS + 1
    control = accept.new_control(remaining=2**30, pending=1, position=100, depth=depth, device=place)

    def run(part: slice, copy: int) -> tuple[Tensor, ...]:
        accept.accept(drafted, best, stops, control)
        accept.commit_rows(table, kinds, control[accept.KEPT.value : accept.KEPT.value + 1])
        return (control[accept.FIELDS.value :].clone(),)

    return Case(name="accept and commit", run=run, copies=few, moved=lambda n: 0)


# --- checks -----------------------------------------------------------------------------------------------------------


def check(
    case: Case, counts: Sequence[int] = tuple(range(1, MAX_ROWS + 1)), alone: Sequence[int] = tuple(range(MAX_ROWS))
) -> dict[str, Any]:
    """Check each row's bits for any other rows, and the distance from float64. ``failures`` names the problems."""
    failures: list[str] = []
    whole = _results(case, slice(0, MAX_ROWS))
    if not case.moved(1):  # no rows to compare
        return {"failures": failures, "rows": []}
    for count in counts:
        part = _results(case, slice(0, count))
        if any(not _same(a, b[:count]) for a, b in zip(part, whole, strict=True)):
            failures.append(f"rows of a call with {count} rows have other bits than in a call with {MAX_ROWS}")
    if case.alone:
        for at in alone:
            one = _results(case, slice(at, at + 1))
            if any(not _same(a, b[at : at + 1]) for a, b in zip(one, whole, strict=True)):
                failures.append(f"row {at} alone has other bits than in a call with {MAX_ROWS} rows")
    again = _results(case, slice(0, MAX_ROWS))
    if any(not _same(a, b) for a, b in zip(again, whole, strict=True)):
        failures.append("the same call gave other bits the second time")
    found: dict[str, Any] = {"failures": failures, "rows": list(counts)}
    if case.reference is not None:
        error = max(_error(a, b) for a, b in zip(whole, case.reference(), strict=True))
        found |= {"error": error, "tolerance": case.tolerance}
        if not error <= case.tolerance:  # NaN fails too
            failures.append(f"{error:.1e} from float64, tolerance {case.tolerance:.1e}")
    return found


def _results(case: Case, part: slice) -> list[Tensor]:
    return [tensor.clone() for tensor in case.run(part, 0)]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def _error(found: Tensor, reference: Tensor) -> float:
    """Norm of the difference over that of the reference; for ids, the share that differs."""
    if not found.is_floating_point():
        return float((found.long() != reference.long()).float().mean())
    difference = torch.linalg.vector_norm(found.double() - reference.double())
    return float(difference / torch.linalg.vector_norm(reference.double()).clamp_min(1e-30))


# --- times ------------------------------------------------------------------------------------------------------------


def time(case: Case, lab: Lab, bandwidth: float, counts: Sequence[int] = ROWS) -> dict[str, Any]:
    """Seconds by row count, interleaved; the share of the bandwidth, and the cost of more rows."""
    rounds = -(-CALLS // case.copies) if lab.real else 1
    bodies = {str(count): _rotation(case, slice(0, count), rounds) for count in counts}
    spreads = lab.compare(bodies, parts=case.copies * rounds)
    one = spreads[str(counts[0])].median
    return {
        "copies": case.copies,
        "times": case.times,
        "rows": {
            count: {
                **spreads[str(count)].to_dict(),
                "bytes": case.moved(count),
                "of_bandwidth": case.moved(count) / spreads[str(count)].median / bandwidth,
                "of_one_row": spreads[str(count)].median / one,
            }
            for count in counts
        },
    }


def _rotation(case: Case, part: slice, rounds: int) -> Callable[[], None]:
    def body() -> None:
        for _ in range(rounds):
            for copy in range(case.copies):
                case.run(part, copy)

    return body


@attrs.frozen(kw_only=True)
class Price:
    """Our product at one row next to cuBLAS', both reading the same weights."""

    name: str
    n: int
    k: int
    times: int  # in a decode
    ours: Spread
    cublas: Spread

    @property
    def ratio(self) -> float:
        return self.ours.median / self.cublas.median

    def to_dict(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "ratio": self.ratio}


def products(shape: Shape) -> list[tuple[str, int, int, int]]:
    """Name, N, K and count per decode of every product of a shape; products read together are one."""
    delta_shape = shape.family.delta
    values = delta_shape.value_heads * delta_shape.value_dim
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linear, full = shape.delta_layers, shape.attention_layers
    in_proj = delta_shape.channels + values + 2 * delta_shape.value_heads
    return [
        ("in_proj", in_proj, shape.hidden, linear),
        ("out_proj", shape.hidden, values, linear),
        ("q k v", 2 * queries + 2 * keys, shape.hidden, full),
        ("o_proj", shape.hidden, queries, full),
        ("gate and up", 2 * shape.intermediate, shape.hidden, shape.layers),
        ("down_proj", shape.hidden, shape.intermediate, shape.layers),
        ("head", shape.vocabulary, shape.hidden, 1),
    ]


def price(name: str, n: int, k: int, times: int, lab: Lab, dtype: torch.dtype) -> Price:
    """Time ``gemm.linear`` and ``torch.nn.functional.linear`` at one row, interleaved, on the same weights."""
    copies = lab.copies(n * k * dtype.itemsize)
    generator = torch.Generator(lab.place).manual_seed(n)
    weights = [
        torch.empty(n, k, dtype=dtype, device=lab.place).normal_(0.0, k**-0.5, generator=generator)
        for _ in range(copies)
    ]
    held = [DenseWeight(weight) for weight in weights]
    x = torch.empty(1, k, dtype=dtype, device=lab.place).normal_(generator=generator)

    rounds = -(-CALLS // copies) if lab.real else 1

    def ours() -> None:
        for weight in held * rounds:
            gemm.linear(x, weight)

    def cublas() -> None:
        for weight in weights * rounds:
            F.linear(x, weight)

    found = lab.compare({"ours": ours, "cublas": cublas}, parts=copies * rounds)
    return Price(name=name, n=n, k=k, times=times, ours=found["ours"], cublas=found["cublas"])


def sweep(
    name: str, n: int, k: int, lab: Lab, dtype: torch.dtype, bandwidth: float, most: int = SWEPT
) -> dict[str, dict[str, Any]]:
    """Times of a product of ``products`` at one row with the ``most`` tiles that the model of ``tiles`` thinks fastest.

    The results are named by columns, slices and stages of the tile; ``chosen`` marks the one that the backend takes.
    """
    pair, normed = name == "gate and up", name in ("in_proj", "q k v", "gate and up")
    features, bits = n // 2 if pair else n, 8 * dtype.itemsize
    most_k = Layout.of(DenseWeight(torch.empty(1, 16, dtype=dtype))).most_k
    sizes: Any = {"pair": pair, "most_k": most_k}
    chosen = tiles.choose(features, k, bits, lab.place, **sizes)
    found = dict(sorted(tiles.candidates(features, k, bits, lab.place, **sizes), key=lambda one: one[0]))
    kept = list(dict.fromkeys([chosen, *found.values()]))[: most if lab.real else 1]
    copies = lab.copies(n * k * dtype.itemsize)
    generator = torch.Generator(lab.place).manual_seed(n)
    weights = []
    for _ in range(copies):
        made = torch.empty(n, k, dtype=dtype, device=lab.place).normal_(0.0, k**-0.5, generator=generator)
        weights.append([DenseWeight(part) for part in made.split(features)])
    x = torch.empty(1, k, dtype=dtype, device=lab.place).normal_(generator=generator)
    rms = norm.Rms(torch.ones(k, device=lab.place), EPS) if normed else None
    rounds = -(-CALLS // copies) if lab.real else 1

    def body(tile: Tile) -> Callable[[], None]:
        def run() -> None:
            for parts in weights * rounds:
                if pair:
                    gemm.swiglu(x, *parts, prologue=rms, tile=tile)
                else:
                    gemm.linear(x, *parts, prologue=rms, tile=tile)

        return run

    named = {f"{tile.block_n} columns, {tile.splits} slices, {tile.stages} stages": tile for tile in kept}
    spreads = lab.compare({label: body(tile) for label, tile in named.items()}, parts=copies * rounds)
    return {
        label: {
            **spreads[label].to_dict(),
            "of_bandwidth": n * k * dtype.itemsize / spreads[label].median / bandwidth,
            "chosen": tile == chosen,
        }
        for label, tile in named.items()
    }


def total_price(prices: Sequence[Price]) -> float:
    """Seconds of all products of a decode, ours over cuBLAS'."""
    ours = sum(one.times * one.ours.median for one in prices)
    return ours / sum(one.times * one.cublas.median for one in prices)

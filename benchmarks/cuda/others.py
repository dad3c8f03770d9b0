"""Kernels outside the dense shapes: quantised weights, experts, latent attention, sampling in the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from benchmarks.cuda.kernels import EPS, Case, address_row
from benchmarks.cuda.timing import Lab
from specdec.backends.cuda.kernels import gemm, head, latent, moe, norm, route
from specdec.backends.cuda.kernels.launch import MAX_ROWS
from specdec.backends.cuda.weights import DenseWeight, ExpertStack, Fp8BlockWeight, Nvfp4Weight, Weight
from specdec.backends.ops import Routing


@attrs.frozen(kw_only=True)
class Sizes:
    """Published sizes: a product of Qwen3.5-9B, the experts of Qwen3.5-35B-A3B, DeepSeek-V3's latent attention."""

    features: int = 12288
    columns: int = 4096
    vocabulary: int = 248320
    hidden: int = 2048
    inner: int = 512
    experts: int = 256
    chosen: int = 8
    heads: int = 128
    latent: int = 576
    values: int = 512
    keys: int = 2048


TOY_SIZES = Sizes(
    features=48,
    columns=128,
    vocabulary=64,
    hidden=32,
    inner=32,
    experts=4,
    chosen=2,
    heads=1,
    latent=48,
    values=32,
    keys=5,
)


def cases(sizes: Sizes, lab: Lab, dtype: torch.dtype) -> Iterator[Case]:
    """Yield cases one by one, so that only one holds memory."""
    place = lab.place
    generator = torch.Generator(place).manual_seed(7)
    rounding = 4e-3 if dtype is torch.bfloat16 else 1e-5

    def normal(*size: int, std: float = 1.0, act: bool = True) -> Tensor:
        made = torch.empty(size, dtype=dtype if act else torch.float32, device=place)
        return made.normal_(0.0, std, generator=generator)

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, dtype=torch.uint8, device=place, generator=generator)

    n, k = sizes.features, sizes.columns
    x = normal(MAX_ROWS, k)
    rms = norm.Rms(1.0 + normal(k, std=0.1, act=False), EPS)

    def fp8() -> Weight:
        codes = integers(0, 0x7F, n, k)  # below 0x7F: finite
        codes |= integers(0, 2, n, k) * 128
        return Fp8BlockWeight(codes, normal(-(-n // 128), -(-k // 128), act=False).abs() * 1e-3, (128, 128))

    def nvfp4() -> Weight:
        scales = integers(0x20, 0x40, n, k // 16)
        return Nvfp4Weight(integers(0, 256, n, k // 2), scales, torch.tensor([0.02], device=place))

    for name, make in (("FP8 blocks", fp8), ("NVFP4", nvfp4)):
        yield _packed(f"norm, product of {name}, {n} x {k}", make, x, rms, lab, 2 * rounding)
    yield _sampled(sizes, lab, normal, k)
    yield _experts(sizes, lab, normal, 4 * rounding)
    yield _router(sizes, lab, normal)
    yield _latent(sizes, lab, normal, 1e-2 if dtype is torch.bfloat16 else 1e-5)


def _packed(name: str, make: Callable[[], Weight], x: Tensor, rms: norm.Rms, lab: Lab, tolerance: float) -> Case:
    first = make()
    weights = [first, *(make() for _ in range(lab.copies(first.nbytes) - 1))]
    return Case(
        name=name,
        run=lambda part, copy: (gemm.linear(x[part], weights[copy], prologue=rms),),
        copies=len(weights),
        moved=lambda rows: first.nbytes,
        reference=lambda: (gemm.linear_reference(x, first, prologue=rms),),
        tolerance=tolerance,
    )


def _sampled(sizes: Sizes, lab: Lab, normal: Callable[..., Tensor], k: int) -> Case:
    """Rows use the noise of their positions, so a row alone is another draw: only prefixes are compared."""
    weight = DenseWeight(normal(sizes.vocabulary, k, std=k**-0.5))
    x = normal(MAX_ROWS, k)
    noise = head.Noise.of(3, 100, 0.8, lab.place)

    def run(part: slice, copy: int) -> tuple[Tensor, ...]:
        found = head.sample(x[part], weight, noise=noise)
        return found.ids, found.values, found.log_sum

    return Case(name="head, sampled token", run=run, alone=False, moved=lambda rows: weight.nbytes)


def _experts(sizes: Sizes, lab: Lab, normal: Callable[..., Tensor], tolerance: float) -> Case:
    """One set of experts; the choices rotate, so that few experts are cached."""
    hidden, inner, count = sizes.hidden, sizes.inner, sizes.experts
    x, residual = normal(MAX_ROWS, hidden), normal(MAX_ROWS, hidden)

    def stack(rows: int, columns: int) -> ExpertStack:
        whole = normal(count, rows, columns, std=columns**-0.5)
        members: Any = [DenseWeight(part) for part in whole]
        return ExpertStack(members)

    gates, ups, downs = stack(inner, hidden), stack(inner, hidden), stack(hidden, inner)
    shared: Any = tuple(
        DenseWeight(normal(rows, columns, std=columns**-0.5))
        for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    shared_gate = normal(1, hidden, std=hidden**-0.5)
    copies = max(2, lab.copies(sizes.chosen * 3 * inner * hidden * x.dtype.itemsize))
    scores = [torch.rand(MAX_ROWS, count, device=lab.place) for _ in range(copies)]
    choices = [score.topk(sizes.chosen, dim=1) for score in scores]
    ids = [choice.indices.int() for choice in choices]
    weights = [choice.values / choice.values.sum(1, keepdim=True) for choice in choices]
    distinct = [len(set(ids[0][:rows].flatten().tolist())) for rows in range(MAX_ROWS + 1)]
    matrix = inner * hidden * x.dtype.itemsize

    def run(part: slice, copy: int) -> tuple[Tensor, ...]:
        return (
            moe.experts(
                x[part],
                ids[copy][part],
                weights[copy][part],
                gates,
                ups,
                downs,
                residual[part],
                shared=shared,
                shared_gate=shared_gate,
            ),
        )

    def reference() -> tuple[Tensor, ...]:
        return (
            moe.experts_reference(
                x, ids[0], weights[0], gates, ups, downs, residual, shared=shared, shared_gate=shared_gate
            ),
        )

    return Case(
        name=f"experts, {sizes.chosen} of {count} and a shared one",
        run=run,
        copies=copies,
        moved=lambda rows: 3 * matrix * (distinct[rows] + 1),
        reference=reference,
        tolerance=tolerance,
    )


def _router(sizes: Sizes, lab: Lab, normal: Callable[..., Tensor]) -> Case:
    x = normal(MAX_ROWS, sizes.hidden)
    weight = DenseWeight(normal(sizes.experts, sizes.hidden, std=sizes.hidden**-0.5))
    routing = Routing(top_k=sizes.chosen, scores="softmax", normalised=True)

    def run(part: slice, copy: int) -> tuple[Tensor, ...]:
        return route.choose(gemm.float32_product(x[part], weight), routing)

    def reference() -> tuple[Tensor, ...]:
        return route.choose_reference(gemm.linear_reference(x, weight).float(), routing)

    return Case(
        name="router, choice of experts", run=run, moved=lambda rows: weight.nbytes, reference=reference, tolerance=1e-3
    )


def _latent(sizes: Sizes, lab: Lab, normal: Callable[..., Tensor], tolerance: float) -> Case:
    room = sizes.keys + MAX_ROWS
    nbytes = sizes.keys * sizes.latent * normal(1).dtype.itemsize
    caches = [normal(room, sizes.latent) for _ in range(lab.copies(nbytes))]
    table = [address_row(lab.place, sizes.keys, cache.data_ptr(), 0, room) for cache in caches]
    q, rows_in = normal(MAX_ROWS, sizes.heads, sizes.latent), normal(MAX_ROWS, sizes.latent)
    settings: dict[str, Any] = {"scale": sizes.latent**-0.5, "value_dims": sizes.values}

    def run(part: slice, copy: int) -> tuple[Tensor, ...]:
        found = latent.attend_latent(q[part], rows_in[part], table[copy], max_length=room, **settings)
        return (found.flatten(1),)

    def reference() -> tuple[Tensor, ...]:
        cache = caches[0].clone()
        cache[sizes.keys :] = rows_in
        return (latent.attend_latent_reference(q.double(), cache, sizes.keys, **settings).flatten(1),)

    return Case(
        name=f"latent attention over {sizes.keys} rows",
        run=run,
        alone=False,
        copies=len(caches),
        moved=lambda rows: nbytes,
        reference=reference,
        tolerance=tolerance,
    )

"""The ops composed of kernels: the conformance kit's clauses, weights of every kind, logits, and their own kernels.

Interpreted kernels are slow, so the clauses that play long are left to runs with ``-m slow``; the model tests and the
kernels' own tests cover what they ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.backends.cpu.reference import ReferenceOps
from specdec.backends.cuda.arrays import CudaLogits
from specdec.backends.cuda.kernels import route, rows
from specdec.backends.cuda.ops import CudaOps
from specdec.backends.cuda.weights import DenseWeight, Fp8BlockWeight, Nvfp4Weight
from specdec.backends.ops import DeltaShape, Rope, Routing
from specdec.checkpoints.quantised import fp4, fp8
from specdec.checkpoints.quantised.stored import StoredMatrix
from specdec.errors import ContractError, StateError, UnsupportedError
from specdec.testing import OpsSubject, Subject, check_subjects

FEW = settings(max_examples=8)
CLAUSES = [f"O{number}" for number in range(1, 26)]
LONG = ["O12", "O13", "O17", "O20"]


pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # numpy, over NaN
]


@pytest.fixture(scope="module")
def make(new_device: Callable[[], Any]) -> Callable[..., CudaOps]:
    """``make(dtype="float32")``: ops on the device."""
    return lambda dtype="float32": CudaOps(new_device(), getattr(torch, dtype))


@pytest.mark.parametrize(
    "clause", [pytest.param(clause, marks=pytest.mark.slow) if clause in LONG else clause for clause in CLAUSES]
)
def test_the_contract_of_operations(make: Callable[..., CudaOps], clause: str) -> None:
    effort = "sample" if clause in LONG else "quick"
    check_subjects("cuda", {Subject.OPS: OpsSubject(make=make)}, only=[clause], effort=effort).raise_for_failures()


@pytest.mark.gpu
def test_the_contract_of_operations_in_bfloat16(make: Callable[..., CudaOps]) -> None:
    check_subjects("cuda", {Subject.OPS: OpsSubject(make=lambda: make("bfloat16"))}).raise_for_failures()


# --- results that wait -----------------------------------------------------------------------------------------------


def test_a_convolution_may_be_looked_at_after_its_commit(make: Callable[..., CudaOps]) -> None:
    """It is computed when the pass is committed, from the rows before the pass, if somebody still holds it."""
    ops = make()
    shape = DeltaShape(key_heads=1, value_heads=1, key_dim=8, value_dim=8, kernel=4)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(6, shape.channels, generator=draw).to(ops.device.place)
    gate = torch.randn(6, 1, generator=draw).to(ops.device.place)
    weight, one = ops.vector(torch.randn(shape.channels, 4, generator=draw)), ops.vector(torch.ones(1))
    found = []
    for late in (False, True):
        cache = ops.new_delta(shape)
        for part in (slice(0, 4), slice(4, 6)):
            u = ops.conv_window(x[part], weight, cache)
            if not late:
                u.tensor()
            ops.gated_delta(u, gate[part], gate[part], one, one, cache, shape)
            cache.commit(2)
        found.append(u.tensor())
    assert torch.equal(*found)
    with pytest.raises(StateError, match="without a pass"):
        cache.commit(1)
    with pytest.raises(StateError, match="the same cache"):
        ops.gated_delta(x[:1], gate[:1], gate[:1], one, one, cache, shape)
    long = torch.zeros(20, shape.channels, device=ops.device.place)
    many = torch.zeros(20, 1, device=ops.device.place)
    ops.gated_delta(ops.conv_window(long, weight, cache), many, many, one, one, cache, shape)
    with pytest.raises(StateError, match="20 rows must be committed whole"):
        cache.commit(3)


def test_a_query_that_was_rotated_elsewhere_is_taken_as_it_is(make: Callable[..., CudaOps]) -> None:
    """Only a query and a key on their way to the cache's own position are rotated by the launch that writes them."""
    ops, reference = make(), ReferenceOps(torch.float32)
    rope, draw = Rope.of(1e4, 8), torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, 8, generator=draw) for heads in (4, 2, 2))
    for position in (0, 5):
        found = []
        for one in (reference, ops):
            cache = one.new_kv(16, 2, 8)
            place = "cpu" if one is reference else ops.device.place
            query = one.norm_rope(q.to(place), None, 1e-6, rope, position)
            key = one.norm_rope(k.to(place), None, 1e-6, rope, position)
            found.append(one.attend(query, key, v.to(place), cache, scale=0.3).cpu())
            cache.commit(2)
            found.append(cache.save()["keys"].cpu())
        assert torch.allclose(found[0], found[2], atol=1e-5)
        assert torch.allclose(found[1], found[3], atol=1e-5)


# --- weights ---------------------------------------------------------------------------------------------------------


def stored(form: str, n: int, k: int, seed: int, block: tuple[int, int] = (16, 32)) -> StoredMatrix:
    """A quantised matrix as a checkpoint has it."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k if form == "fp8-block" else k // 2), generator=draw, dtype=torch.uint8)
    if form == "fp8-block":
        codes[(codes & 127) == 127] = 0  # NaN
        scale = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=draw) / 100
        meta = {"block_rows": block[0], "block_columns": block[1], "group": block[1], "bits": 8}
        return StoredMatrix(
            format=form,
            shape=(n, k),
            parts={"codes": codes, "scale": scale},
            meta=meta,
            dtype=torch.float32,
            values=fp8.numbers(torch.arange(256, dtype=torch.uint8)),
            numbers=fp8.numbers,
        )
    scale = (torch.rand(n, k // 16, generator=draw) + 0.1).to(torch.float8_e4m3fn)
    return StoredMatrix(
        format=form,
        shape=(n, k),
        parts={"codes": codes, "scale": scale, "global_scale": torch.tensor([0.25])},
        meta={"block_rows": 1, "block_columns": 16, "group": 16, "bits": 4},
        dtype=torch.float32,
        values=fp4.E2M1,
        numbers=fp4.numbers,
    )


@pytest.mark.parametrize("form", ["fp8-block", "nvfp4"])
def test_weights_stay_packed(make: Callable[..., CudaOps], form: str) -> None:
    """In every op that takes a weight, for passes and for prompts; beside the reference over the decoded ones."""
    ops, reference = make(), ReferenceOps(torch.float32)
    assert form in ops.capabilities.packed_formats
    kind = Fp8BlockWeight if form == "fp8-block" else Nvfp4Weight
    matrices = [stored(form, 32, 64, seed) for seed in range(4)]
    held, plain = [ops.weight(one) for one in matrices], [reference.weight(one.decode()) for one in matrices]
    assert all(isinstance(one, kind) for one in held)
    assert all(torch.equal(one.decode().cpu(), other) for one, other in zip(held, plain, strict=True))
    draw = torch.Generator().manual_seed(9)
    for count in (3, 18):
        x = torch.randn(count, 64, generator=draw)
        y = x.to(ops.device.place)
        pairs = [
            (ops.project(y, held[:3])[2], reference.project(x, plain[:3])[2]),
            (ops.linear(y, held[3]), reference.linear(x, plain[3])),
            (ops.swiglu(y, held[2], held[3]), reference.swiglu(x, plain[2], plain[3])),
            (ops.embed(held[1], [3, 31, 3]), reference.embed(plain[1], [3, 31, 3])),
        ]
        for got, wanted in pairs:
            assert torch.allclose(got.cpu(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
        got = ops.head(y, held[0])
        assert np.allclose(got.rows(), reference.head(x, plain[0]).rows(), atol=1e-4)
        assert got.argmax() == got.rows().argmax(axis=1).tolist()
    stack = ops.stack(matrices)
    assert stack.shape == (4, 32, 64)
    assert all(isinstance(one, kind) for one in stack.experts)
    wanted = reference.project_heads(x[:, None].repeat(1, 4, 1), plain)
    for count in (2, 18):
        got = ops.project_heads(y[:count, None].repeat(1, 4, 1), stack)
        assert torch.allclose(got.cpu(), wanted[:count], rtol=1e-4, atol=1e-4)
    mixed = ops.stack([matrices[0], matrices[1].decode()])  # one layout or none
    assert all(isinstance(one, DenseWeight) for one in mixed.experts)
    with pytest.raises(UnsupportedError, match="mlx-affine"):
        ops.weight(
            StoredMatrix(
                format="mlx-affine",
                shape=(2, 2),
                parts={},
                meta={},
                dtype=torch.float32,
                values=torch.zeros(0),
                numbers=fp8.numbers,
            )
        )


def test_a_packed_weight_without_a_kernel_is_decoded(make: Callable[..., CudaOps]) -> None:
    """Blocks of scales that no tile divides."""
    matrix = stored("fp8-block", 20, 33, 0, (20, 11))
    made = make().weight(matrix)
    assert isinstance(made, DenseWeight)
    assert torch.equal(made.tensor.cpu(), matrix.decode())


@pytest.mark.sample
def test_weights_that_are_projected_together_share_memory(make: Callable[..., CudaOps]) -> None:
    """So that one launch reads them; a second use, or one of them alone, changes nothing."""
    ops, draw = make(), torch.Generator().manual_seed(4)
    matrices = [torch.randn(n, 32, generator=draw) for n in (16, 8, 8)]
    held = [ops.weight(one) for one in matrices]
    biases = [ops.weight(torch.randn(n, generator=draw)) for n in (16, 8, 8)]
    x = torch.randn(2, 32, generator=draw).to(ops.device.place)
    first = ops.project(x, held, biases)
    assert all(weight.fused for weight in held)
    for again in (ops.project(x, held, biases), ops.project(x, held, biases)):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for weight, matrix, bias, got in zip(held, matrices, biases, first, strict=True):
        wanted = x.cpu() @ matrix.T + bias.tensor.cpu()
        assert torch.allclose(got.cpu(), wanted, atol=1e-4)
        assert torch.equal(weight.tensor.cpu(), matrix)
    assert held[1].tensor.untyped_storage().data_ptr() == held[0].tensor.untyped_storage().data_ptr()


def test_a_stack_is_aligned_whatever_the_sizes(make: Callable[..., CudaOps]) -> None:
    for dtype in ("float32", "bfloat16"):
        stack = make(dtype).stack([torch.randn(3, 5) for _ in range(4)])
        assert stack.aligned
        assert len({one.tensor.untyped_storage().data_ptr() for one in stack.experts}) == 1


# --- logits ----------------------------------------------------------------------------------------------------------


@FEW
@given(
    seed=st.integers(0, 2**16),
    count=st.integers(1, 3),
    vocab=st.integers(2, 60),
    levels=st.integers(1, 6),
    data=st.data(),
)
def test_logits_full_and_pruned(
    make: Callable[..., CudaOps], seed: int, count: int, vocab: int, levels: int, data: st.DataObject
) -> None:
    """Few different values, so that equals abound: each view beside that of the reference over the same bits."""
    rng = np.random.default_rng(seed)
    weight = torch.tensor(rng.integers(0, levels, (vocab, 3)), dtype=torch.float32)
    x = torch.tensor(rng.integers(-2, 3, (count, 3)), dtype=torch.float32)  # all products are exact
    reference, ops = ReferenceOps(torch.float32), make()
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=8))
    more = data.draw(st.lists(st.integers(0, vocab - 1), max_size=5))
    picked = rng.integers(0, vocab, count).tolist()
    held, y = ops.weight(weight), x.to(ops.device.place)
    base = reference.head_rows(weight, tokens), ops.head_rows(held, tokens)
    wider = reference.head_rows(weight, more, base[0]), ops.head_rows(held, more, base[1])
    again = reference.head_rows(weight, tokens[:1] + more, wider[0]), ops.head_rows(held, tokens[:1] + more, wider[1])
    assert wider[1].tokens == again[1].tokens == tuple(sorted({*tokens, *more}))
    assert wider[1].parts[0] is base[1].parts[0]
    pairs = [(reference.head(x, weight), ops.head(y, held))]
    pairs += [(reference.pruned_head(x, a), ops.pruned_head(y, b)) for a, b in (base, wider)]
    for theirs, ours in pairs:
        assert len(ours) == count
        assert ours.argmax() == theirs.argmax()
        assert np.array_equal(ours.rows(), theirs.rows())
        assert ours.rows().dtype == np.float32
        for k in (1, 2, vocab, vocab + 3):
            assert ours.topk(k) == theirs.topk(k)
        assert ours.gather(picked) == theirs.gather(picked)
        assert ours.gather(picked[:1]) == theirs.gather(picked[:1])
        assert ours.gather([]) == []
        assert np.allclose(ours.logsumexp(), theirs.logsumexp(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_best_token(make: Callable[..., CudaOps], value: float) -> None:
    ops = make()
    x = torch.ones(3, 16)
    x[1, 2] = value
    held = ops.weight(torch.eye(16))
    y, pruned = x.to(ops.device.place), ops.head_rows(held, [1], ops.head_rows(held, [2, 5]))
    for logits in (ops.head(y, held), ops.pruned_head(y, pruned)):
        with pytest.raises(ContractError, match="row 1"):
            logits.argmax()


@pytest.mark.sample
def test_arrays_of_another_backend_are_refused(make: Callable[..., CudaOps]) -> None:
    reference, ops = ReferenceOps(torch.float32), make()
    weight = torch.ones(4, 3)
    for call in (
        lambda: ops.array(reference.hidden(weight)),
        lambda: ops.hidden(weight).join([reference.hidden(weight)]),
        lambda: ops.pruned_head(weight, reference.head_rows(weight, [1])),
    ):
        with pytest.raises(ContractError, match="another backend"):
            call()
    with pytest.raises(ContractError, match="token 4 of row 1 is not in the vocabulary"):
        ops.embed(ops.weight(weight), [0, 4])
    assert isinstance(ops.head(ops.weight(weight).tensor, ops.weight(weight)), CudaLogits)


# --- kernels of this layer -------------------------------------------------------------------------------------------


@FEW
@given(count=st.integers(1, 16), hidden=st.integers(1, 70), seed=st.integers(0, 99), data=st.data())
def test_embedding_by_ids_on_the_device(
    device: torch.device, count: int, hidden: int, seed: int, data: st.DataObject
) -> None:
    """Strided tables too; an id that is none gives row 0 and reads nothing outside."""
    count = min(count, 4)
    table = torch.randn(9, hidden + 3, generator=torch.Generator().manual_seed(seed)).to(device)[:, 1 : hidden + 1]
    ids = torch.tensor(data.draw(st.lists(st.integers(-2, 10), min_size=count, max_size=count)), dtype=torch.int32)
    got = rows.embed(table, ids.to(device))
    known = torch.where((ids >= 0) & (ids < 9), ids, 0).to(device)
    assert torch.equal(got, table[known.long()])


@FEW
@given(
    count=st.integers(1, 3),
    heads_=st.integers(0, 3),
    left=st.integers(1, 40),
    right=st.integers(1, 9),
    step=st.integers(1, 2),
)
def test_activations_side_by_side(
    device: torch.device, count: int, heads_: int, left: int, right: int, step: int
) -> None:
    """With and without a head axis, and every second value only, as interleaved rotary pairs are taken apart."""
    middle = (heads_,) if heads_ else ()
    a, b = (torch.randn(count, *middle, step * size + 2, device=device) for size in (left, right))
    a, b = a[..., 1 : 1 + step * left : step], b[..., : step * right : step]
    assert torch.equal(rows.concat(a, b), torch.cat([a, b], dim=-1))


@settings(max_examples=20)
@given(
    groups=st.integers(1, 4),
    each=st.integers(2, 6),
    data=st.data(),
    seed=st.integers(0, 2**16),
    scores=st.sampled_from(["softmax", "sigmoid"]),
    normalised=st.booleans(),
    biased=st.booleans(),
    levels=st.sampled_from([0, 3]),
)
def test_the_choice_of_experts(
    device: torch.device,
    groups: int,
    each: int,
    data: st.DataObject,
    seed: int,
    scores: Literal["softmax", "sigmoid"],
    normalised: bool,
    biased: bool,
    levels: int,
) -> None:
    """Beside torch; ``levels`` of few values, so that equals abound and the lower id has to win."""
    kept = data.draw(st.integers(1, groups))
    routing = Routing(
        top_k=data.draw(st.integers(1, kept * each)),
        scores=scores,
        normalised=normalised,
        scale=1.5,
        groups=groups,
        kept_groups=kept,
    )
    rng = np.random.default_rng(seed)
    shape = (2, groups * each)
    raw = rng.integers(-levels, levels + 1, shape) if levels else rng.standard_normal(shape)
    logits = torch.tensor(raw, dtype=torch.float32, device=device)
    bias = torch.tensor(rng.integers(-2, 3, shape[1]) / 4, dtype=torch.float32, device=device) if biased else None
    ids, weights = route.choose(logits, routing, bias)
    wanted, shares = route.choose_reference(logits, routing, bias)
    assert torch.allclose(weights, shares, rtol=1e-5, atol=1e-7)
    if levels or torch.equal(ids, wanted):
        assert torch.equal(ids, wanted)
    else:  # sums of two scores within a rounding of each other
        assert groups > 1


def test_a_nan_names_experts_that_exist(device: torch.device) -> None:
    logits = torch.full((2, 7), float("nan"), device=device)
    for routing in (
        Routing(top_k=3, scores="softmax", normalised=True),
        Routing(top_k=3, scores="sigmoid", normalised=True, groups=7, kept_groups=3),
    ):
        ids, _ = route.choose(logits, routing)
        assert bool(((ids >= 0) & (ids < 7)).all())

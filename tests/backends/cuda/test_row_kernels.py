"""Kernels over rows beyond the contract of operations (``test_ops.py``): rows that move, products of every format,
experts.

Values are within a derived bound of float64, over memory that holds NaN behind the rows; the bits of a row do not
depend on the other rows.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from specdec.backends.cuda import products, prompts
from specdec.backends.cuda.kernels import commit, moe, norm, route, rows
from specdec.backends.cuda.kernels.launch import LENGTH, SLOT, SLOTS
from specdec.backends.cuda.weights import DenseWeight, ExpertStack, fuse, runs
from specdec.backends.ops import Routing
from specdec.errors import ShapeError
from tests.backends.cuda.kernel_runs import (
    DTYPES,
    FORMS,
    ROUNDING,
    UNIT,
    close,
    first_rows,
    poisoned,
    product_bound,
    rows_of,
    same_for_any_rows,
    weight_of,
)

pytestmark = pytest.mark.interpreter


# --- moving rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_wide_rows(dtype, device):
    """Rows of several blocks. The sum of K squares has a relative error of at most (K + 1) 2^-24, of which the root
    keeps half."""
    x, weight = rows_of(2, 5000, dtype, device), torch.linspace(0.5, 1.5, 5000, device=device)
    with poisoned():
        y = norm.rms_norm(first_rows(x, 2), weight, 1e-6)
    expected = functional.rms_norm(x.double(), (5000,), weight.double(), 1e-6)
    error = 2524 * UNIT * expected.abs()
    close(y, expected, error + ROUNDING[dtype] * (expected.abs() + error) + 1e-30)


@settings(max_examples=8)
@given(count=st.integers(1, 4), hidden=st.integers(1, 70), ids=st.lists(st.integers(-2, 10), min_size=4, max_size=4))
def test_embedding_by_ids_on_the_device(device, count, hidden, ids):
    """Strided tables too; an id that is none gives row 0 and reads nothing outside."""
    table = torch.randn(9, hidden + 3, device=device)[:, 1 : hidden + 1]
    picked = torch.tensor(ids[:count], dtype=torch.int32, device=device)
    known = torch.where((picked >= 0) & (picked < 9), picked, 0)
    assert torch.equal(rows.embed(table, picked), table[known.long()])


# --- the commit of rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "whole"), [(0, False), (1, False), (5, False), (0, True), (40, True)])
def test_commit_rows(kept, whole, device):
    """130 caches of both kinds, more than one program's, at different lengths and slots."""
    some = torch.Generator().manual_seed(kept)
    table = torch.randint(0, 100, (130, 8), generator=some)
    table[:, SLOTS.value] = torch.randint(3, 18, (130,), generator=some)
    table[:, SLOT.value] = table[:, SLOT.value] % table[:, SLOTS.value]
    kinds = torch.randint(0, 2, (130,), generator=some, dtype=torch.int32)
    found = table.clone().to(device)
    commit.commit_rows(found, kinds.to(device), kept, whole=whole)
    steps = torch.where(kinds == commit.STATES, min(1, kept) if whole else kept, 0)
    table[:, LENGTH.value] += kept
    table[:, SLOT.value] = torch.where(
        kinds == commit.STATES, (table[:, SLOT.value] + steps) % table[:, SLOTS.value], table[:, SLOT.value]
    )
    assert torch.equal(found.cpu(), table)


# --- products --------------------------------------------------------------------------------------------------------


def product(x, weight):
    return x.double() @ weight.decode().double().T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_within_its_bound(form, dtype, device):
    """Up to 16 rows, and more; rounded to act, and not."""
    weight = weight_of(form, 37, 272, dtype, device)
    for count in (5, 16, 18):
        x = rows_of(count, 272, dtype, device)
        with poisoned():
            part = first_rows(x, count)
            found = products.linear(part, weight), products.float32_product(part, weight)
        expected = product(x, weight)
        for y, act in zip(found, (dtype, torch.float32), strict=True):
            assert y.dtype == act
            # prompts multiply by weights that were rounded to act
            decoded = ROUNDING[dtype] * (x.double().abs() @ weight.decode().double().abs().T) if count > 16 else 0.0
            close(y, expected, product_bound(x, weight, expected, act) + decoded)


@pytest.mark.parametrize("form", FORMS[1:])
def test_packed_products_have_the_same_bits_for_any_rows(form, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight, x = weight_of(form, 37, 112, dtype, device), rows_of(16, 112, dtype, device)
    # float32 results: a rounding to act would hide most differences
    same_for_any_rows(functools.partial(products.float32_product, weight=weight), x, (1, 2, 7))


@pytest.mark.parametrize("form", ["dense", "fp8 32x32", "nvfp4"])
def test_swiglu(form, device):
    dtype, n, k = torch.float32, 32, 96
    gate, up = weight_of(form, n, k, dtype, device), weight_of(form, n, k, dtype, device, seed=5)
    x = rows_of(16, k, dtype, device) / (100 * k)
    y = same_for_any_rows(functools.partial(products.swiglu, gate=gate, up=up), x)
    left, right = product(x, gate), product(x, up)
    errors = product_bound(x, gate, left, dtype), product_bound(x, up, right, dtype)
    expected = functional.silu(left) * right
    # |silu'| <= 1.1; exp, division and two products in float32 add less than 16 roundings
    bound = (
        1.1 * errors[0] * (right.abs() + errors[1])
        + functional.silu(left).abs() * errors[1]
        + 16 * UNIT * expected.abs()
    )
    close(y, expected, bound + 1e-30)
    assert fuse([gate, up])
    assert torch.equal(products.swiglu(x, gate, up), y)


@pytest.mark.parametrize("form", FORMS)
def test_fused_weights_give_what_each_of_them_gives(form, device):
    """One product for a run in memory, with some biases, for passes and for prompts."""
    sizes = (128, 256, 32) if "128x128" in form else (32, 64, 32)
    weights, twins = ([weight_of(form, n, 128, torch.float32, device, seed=n) for n in sizes] for _ in range(2))
    biases = [DenseWeight(rows_of(1, n, torch.float32, device, seed=2)[0]) for n in sizes[:2]]
    assert fuse(twins)
    assert len(runs(twins)) == 1
    assert not fuse(twins)
    for count in (3, 20):
        x = rows_of(count, 128, torch.float32, device)
        apart = products.project(x, weights, [*biases, None])
        for y, alone in zip(products.project(x, twins, [*biases, None]), apart, strict=True):
            assert torch.allclose(y, alone, rtol=1e-5, atol=1e-5 * float(alone.abs().max()))
    plain = products.project(x, weights)
    assert torch.allclose(plain[0] + biases[0].tensor, apart[0])


# --- experts ---------------------------------------------------------------------------------------------------------

H, INNER, E, CHOSEN = 48, 32, 5, 3


class Experts:
    """A mixture over random rows."""

    def __init__(self, form, count, device, *, shared=False):
        def stack(n, k, seed):
            return ExpertStack(tuple(weight_of(form, n, k, torch.float32, device, seed + e) for e in range(E)))

        def draw(rows, seed):
            return rows_of(rows, H, torch.float32, device, seed)

        some = torch.Generator().manual_seed(count)
        self.stacks = stack(INNER, H, 0), stack(INNER, H, 100), stack(H, INNER, 200)
        self.x = draw(count, 0) * (1.0 if form == "dense" else 1e-3)  # codes reach 448
        self.residual, self.shared, self.gate = draw(count, 1), draw(count, 8), draw(1, 9) / 10
        self.with_shared = shared
        ids = torch.stack([torch.randperm(E, generator=some)[:CHOSEN] for _ in range(count)])
        self.ids, self.weights = ids.int().to(device), torch.rand(count, CHOSEN, generator=some).to(device)

    def run(self, rows):
        x, residual = self.x[rows], self.residual[rows]
        options = {"shared": self.shared[rows], "shared_gate": self.gate} if self.with_shared else {}
        with poisoned():
            part = first_rows(x, len(x)), self.ids[rows], self.weights[rows]
            return moe.experts(*part, *self.stacks, first_rows(residual, len(x)), **options)

    def expected(self):
        """Values in float64, and the magnitudes that meet: the same experts on absolute values (silu and its slope are
        at most 1.1 |z| + 0.3 and 1.1)."""
        x, total = self.x.double(), self.residual.double()
        magnitude = total.abs()
        if self.with_shared:
            share = torch.sigmoid(x @ self.gate.double().T)
            total = total + share * self.shared.double()
            magnitude = magnitude + self.shared.double().abs() * (1 + x.abs() @ self.gate.double().abs().T)
        for t, places in enumerate(self.ids.tolist()):
            for slot, e in enumerate(places):
                gate, up, down = (stack[e].decode().double() for stack in self.stacks)
                weight = self.weights[t, slot].double()
                total[t] += weight * (down @ (functional.silu(gate @ x[t]) * (up @ x[t])))
                raised = up.abs() @ x[t].abs()
                magnitude[t] += weight * (down.abs() @ (2.2 * (gate.abs() @ x[t].abs()) * raised + raised))
        return total, magnitude


@pytest.mark.parametrize(
    ("form", "shared"),
    [("dense", True), ("dense", False), ("fp8 128x128", False), ("fp8 32x32", True), ("nvfp4", True)],
)
def test_experts(form, shared, device):
    """Two chained sums of H and INNER terms in float32."""
    mixture = Experts(form, 3, device, shared=shared)
    expected, magnitude = mixture.expected()
    close(mixture.run(slice(3)), expected, (H + INNER + 100) * UNIT * magnitude)


@pytest.mark.parametrize(("form", "unused"), [("dense", ()), ("fp8 128x128", (0,)), ("nvfp4", (2, E - 1))])
def test_experts_of_a_prompt(form, unused, device):
    """Rows that share an expert, slots of one row with the same expert, and experts that no row chose."""
    mixture = Experts(form, 19, device)
    left = torch.tensor([e for e in range(E) if e not in unused])
    picked = torch.randint(len(left), (19, CHOSEN), generator=torch.Generator().manual_seed(3))
    mixture.ids = left[picked].int().to(device)
    y = prompts.moe(mixture.x, mixture.ids, mixture.weights, mixture.stacks, mixture.residual, None)
    expected, _ = mixture.expected()
    close(y, expected, 1e-5 * expected.abs().max())


def test_a_nan_names_experts_that_exist(device):
    logits = torch.full((2, 7), torch.nan, device=device)
    for routing in (
        Routing(top_k=3, scores="softmax", normalised=True),
        Routing(top_k=3, scores="sigmoid", normalised=True, groups=7, kept_groups=3),
    ):
        ids, _ = route.choose(logits, routing)
        assert bool(((ids >= 0) & (ids < 7)).all())


# --- what is refused -------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(device):
    mixture = Experts("dense", 2, device)
    dense, nvfp4 = (weight_of(form, 8, 64, torch.float32, device) for form in ("dense", "nvfp4"))
    x, ids, weights, residual = mixture.x, mixture.ids, mixture.weights, mixture.x
    short = torch.zeros(2, 40, device=device)
    refused = [
        (None, lambda: norm.gated_rms_norm(torch.zeros(2, 3, 16), torch.zeros(2, 3, 8), torch.ones(16), 1e-6)),
        ("rows of 40 values do not fit a weight of 64 columns", lambda: products.linear(short, dense)),
        ("rows of 40 values do not fit a weight of 64 columns", lambda: products.linear(short, nvfp4)),
        ("do not fit rows of 40", lambda: moe.experts(x[:, :40], ids, weights, *mixture.stacks, residual)),
    ]
    for message, call in refused:
        with pytest.raises(ShapeError, match=message):
            call()

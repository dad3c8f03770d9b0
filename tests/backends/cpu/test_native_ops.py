"""The C++ kernels: the contract of operations at many sizes, and the same bits for any number of rows and threads.

Tolerances are bounds, not fits. ``U`` is float32's unit roundoff 2^-24. A sum of n products in m accumulators is off by
at most (n/m + log2 m + 1) U sum|a b| (Higham 2002, section 4.2); the narrowest vectors have m = 4 lanes. To that comes
the rounding to the activation dtype, 2^-8 relative for bfloat16, once per op.

The libraries of several instruction sets are loaded side by side, which once made the second one call the first one's
template instances: equal names, unified by the loader, and rows that changed their bits with the tile they stood in.
Hence -fvisibility=hidden.

Every output that the kernels are handed is filled with NaN first: an element that nobody writes is seen.
"""

import sys

import pytest
import torch

from specdec.backends.cpu import native
from specdec.backends.ops import DeltaShape, Rope
from specdec.errors import ContractError, ShapeError, StateError
from tests.backends import oracle
from tests.backends.contract import SIZES, check_operations
from tests.instruction_sets import RUNNABLE, kernels_of
from tests.selection import cases
from tests.tiny import assert_equal_bits

U = 2.0**-24
ROUNDING = {torch.float32: U, torch.bfloat16: 2.0**-8}
TINY = 1e-36  # bfloat16 dot products flush subnormal operands


@pytest.fixture(scope="module", autouse=True)
def _nan_filled_outputs():
    """Catches: an output element that no thread writes (a tail, a row block, a head)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_empty", lambda *shape, dtype: torch.full(shape, float("nan"), dtype=dtype))
        yield


def draw(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_within(actual, expected, bound):
    """``bound`` is the absolute error before the rounding to actual's dtype."""
    rounding = ROUNDING[actual.dtype]
    allowed = bound + rounding * (expected.abs() + bound) + TINY
    error = (actual.double() - expected).abs()
    assert not actual.isnan().any(), f"{actual.isnan().sum()} of {actual.numel()} are NaN"
    assert (error <= allowed).all(), f"error is {(error / allowed).max():.3g} times what is allowed"


def unaligned(w):
    """The same matrix one element behind a 64-byte boundary, as in a memory-mapped checkpoint."""
    room = torch.empty(w.numel() + 64, dtype=w.dtype)
    start = 1 + (-room.data_ptr() % 64) // w.element_size()
    moved = room[start : start + w.numel()].view(w.shape)
    moved.copy_(w)
    assert moved.data_ptr() % 64 == w.element_size()
    return moved


@pytest.mark.parametrize("size", cases(SIZES, sample=("short", "odd"), mark="slow"))
def test_the_contract_of_operations(ops, size):
    check_operations(lambda: ops, size)


# --- matrix products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(100, 72), (700, 333), (96, 2048)])
def test_product_bits_do_not_depend_on_rows_or_threads(ops, same_bits, n, k):
    """Catches: another K order for one row than for many, split K, a tile that reads its neighbour. The second and
    third shape are large enough to run on several threads."""
    x, w, up = (draw(*s, seed=i, dtype=ops.dtype) for i, s in enumerate([(130, k), (n, k), (n, k)]))
    w = unaligned(w)

    def run(x):
        residual = x[:, :1].expand(-1, n).contiguous()
        logits = torch.tensor(ops.head(x, w).rows())
        return [ops.linear(x, w, residual), ops.swiglu(x, w, up), ops.geglu(x, w, up), logits, *ops.project(x, [up, w])]

    same_bits(run, x)
    for rows in (1, 4, 23, 67):  # other neighbours, another place in the tile
        assert_equal_bits(ops.project(x[5 : 5 + rows], [up, w])[1], ops.linear(x[5 : 5 + rows], w))


def test_a_poisoned_row_stays_alone(ops):
    """Catches: rows that leak into each other through padding (0 * NaN) or a shared scale. One library's bfloat16
    product did that for K not a multiple of 32."""
    x, w = draw(16, 70, seed=0, dtype=ops.dtype), draw(30, 70, seed=1, dtype=ops.dtype)
    clean = ops.linear(x, w)
    x = x.clone()
    x[3] = float("nan")
    x[7] = float("inf")
    assert_equal_bits(torch.cat([ops.linear(x, w)[i : i + 1] for i in (0, 2, 4, 6, 8, 15)]), clean[[0, 2, 4, 6, 8, 15]])
    assert ops.linear(x, w)[3].isnan().all()


def test_strided_rows_are_read_in_place(ops):
    """Catches: a stride taken for the row length. Views of rows come from Hidden slices and fused projections."""
    wide, w = draw(6, 200, seed=0, dtype=ops.dtype), draw(90, 300, seed=1, dtype=ops.dtype)
    x, part = wide[1:, 40:140], w[10:70, 100:200]
    assert_equal_bits(ops.linear(x, part), ops.linear(x.contiguous(), part.contiguous()))


# --- rows ----------------------------------------------------------------------------------------------------------


def test_angles_are_products_in_float32(ops):
    """Catches: an angle in another type, which is off by up to 0.01 at this position."""
    x, rope, position = draw(5, 2, 40, seed=0, dtype=ops.dtype), Rope.of(10_000.0, 24), 200_000
    expected = torch.from_numpy(oracle.norm_rope(x.double().numpy(), None, 0.0, rope.inv_freq, position))
    assert_within(ops.norm_rope(x, None, 1e-6, rope, position), expected, 20 * U * 2 * x.double().abs().max())


# --- attention -----------------------------------------------------------------------------------------------------


class Attention:
    """Random queries, keys, values and gates of a sequence, with views as strided as a model's."""

    def __init__(self, ops, length, heads, kv_heads, dim, seed, window=0):
        self.ops, self.length, self.shape, self.window = ops, length, (kv_heads, dim), window
        both = draw(length, heads, 2 * dim, seed=seed, dtype=ops.dtype)
        self.q, self.gate = both[:, :, :dim], both[:, :, dim:]
        self.k, self.v = (draw(length, kv_heads, dim, seed=seed + i, dtype=ops.dtype) for i in (1, 2))
        self.scale = dim**-0.5

    def run(self, passes, gated=True):
        """Attend in passes of these many rows over a cache whose unwritten slots are NaN."""
        cache = self.ops.new_kv(self.length, *self.shape)
        if self.window:
            cache = self.ops.new_window(self.length, self.window, *self.shape)
        cache.keys.fill_(float("nan"))
        cache.values.fill_(float("nan"))
        out = []
        for rows in passes:
            at = slice(cache.length, cache.length + rows)
            gate = self.gate[at] if gated else None
            q, k, v = self.q[at], self.k[at], self.v[at]
            out.append(self.ops.attend(q, k, v, cache, scale=self.scale, gate=gate))
            cache.commit(rows)
        return torch.cat(out)

    def check(self, actual, gated=True):
        """Against softmax attention in float64."""
        q, gate = self.q.double(), self.gate.double()
        k, v = (x.double().repeat_interleave(q.shape[1] // self.shape[0], 1) for x in (self.k, self.v))
        run = [oracle.attend(q.numpy(), k.numpy(), values.numpy(), self.scale, self.window) for values in (v, v.abs())]
        expected, mass = map(torch.from_numpy, run)
        # A weight e^s moves by s's own error, by the subtraction of the maximum and by 2 ulp of the exponential; the
        # sum over keys, the rescaling per tile and the normalisation by one U per step each.
        size = torch.einsum("tnd,snd->nts", q.abs(), k.abs()).max() * self.scale
        bound = (2 * (q.shape[2] / 4 + 12) * size + self.length + 40) * U * mass
        if gated:
            expected, bound = expected * torch.sigmoid(gate), bound * torch.sigmoid(gate) + 4 * U * expected.abs()
        assert_within(actual, expected.flatten(1), bound.flatten(1))


@pytest.mark.parametrize(
    ("length", "group", "dim", "window"),
    [(130, 1, 40, 0), (139, 4, 64, 0), (1100, 2, 24, 0), (139, 4, 64, 9), (150, 3, 40, 70), (1100, 2, 24, 1030)],
)
def test_attention_bits_do_not_depend_on_passes_or_threads(ops, threads, length, group, dim, window):
    """Catches: tiles counted from the start of the pass, a masked tile that is not an exact no-op, splits that follow
    the number of threads. 1100 keys cross the boundary of a split."""
    attention = Attention(ops, length, 2 * group, 2, dim, seed=3, window=window)
    threads(1)
    whole = attention.run([length])
    attention.check(whole)
    tail = length - 96
    for team in (1, 2, 5):
        threads(team)
        assert_equal_bits(attention.run([length]), whole)
        assert_equal_bits(attention.run([*range(1, 9), tail, *[1] * 10, 3, 16, 15, 16]), whole)
    if length < 200:
        assert_equal_bits(attention.run([1] * length), whole)


# --- gated delta rule ----------------------------------------------------------------------------------------------


class Delta:
    """Random inputs of one layer; value heads per key head, sizes and taps vary."""

    def __init__(self, ops, rows, shape, seed):
        self.ops, self.shape, dtype = ops, shape, ops.dtype
        self.x = draw(rows, shape.channels, seed=seed, dtype=dtype)
        self.a, self.b = (2 * draw(rows, shape.value_heads, seed=seed + i, dtype=dtype) for i in (1, 2))
        self.taps = draw(shape.channels, shape.kernel, seed=seed + 3)
        self.a_log, self.dt_bias = draw(shape.value_heads, seed=seed + 4), draw(shape.value_heads, seed=seed + 5)
        self.a[0, 0] = 60.0  # the linear branch of softplus

    def step(self, cache, start, end):
        u = self.ops.conv_window(self.x[start:end], self.taps, cache)
        return self.ops.gated_delta(
            u, self.a[start:end], self.b[start:end], self.a_log, self.dt_bias, cache, self.shape
        )

    def run(self, passes):
        cache = self.ops.new_delta(self.shape)
        cache.after.fill_(float("nan"))
        out = []
        for rows in passes:
            out.append(self.step(cache, cache.length, cache.length + rows))
            cache.commit(rows)
        return torch.cat(out), cache


DELTA_SHAPES = [
    DeltaShape(key_heads=2, value_heads=2, key_dim=16, value_dim=16, kernel=4),
    DeltaShape(key_heads=2, value_heads=6, key_dim=37, value_dim=71, kernel=4),  # odd in every size
    DeltaShape(key_heads=8, value_heads=16, key_dim=64, value_dim=128, kernel=4),  # large enough for several threads
]


@pytest.mark.parametrize("shape", DELTA_SHAPES, ids=lambda s: f"Hv{s.value_heads}")
def test_delta_bits_do_not_depend_on_passes_or_threads(ops, threads, shape):
    """Catches: a chunked form for many rows, a state rounded between passes, a conv window one row off. 300 rows
    cross the block of tokens whose keys are prepared at once."""
    rows = 300 if shape.value_heads == 6 else 67
    delta = Delta(ops, rows, shape, seed=11)
    threads(1)
    whole, after = delta.run([rows])
    for team in (1, 2, 3):
        threads(team)
        for passes in ([rows], [1, 2, 16, 5, rows - 24], [rows - 1, 1], *([[1] * rows] if team == 2 else [])):
            out, cache = delta.run(passes)
            assert_equal_bits(out, whole)
            assert_equal_bits(cache.state, after.state)
            assert_equal_bits(cache.window, after.window)


# --- what is refused -----------------------------------------------------------------------------------------------


def test_layouts_that_an_address_cannot_describe_are_refused(ops):
    """Catches: silently wrong numbers from a transposed view or another dtype."""
    x, w = draw(4, 32, seed=0, dtype=ops.dtype), draw(8, 32, seed=1, dtype=ops.dtype)
    heads = x.view(4, 2, 16)
    refused = [
        (ShapeError, "linear cannot read weight", lambda: ops.linear(x, draw(32, 8, seed=1, dtype=ops.dtype).T)),
        (ShapeError, "linear cannot read weight", lambda: ops.linear(x, w.double())),
        (ShapeError, "linear cannot read x", lambda: ops.linear(x.double(), w)),
        (ShapeError, "residual", lambda: ops.linear(x, w, draw(4, 9, seed=2, dtype=ops.dtype))),
        (ShapeError, "up", lambda: ops.swiglu(x, w, w[:4])),
        (ShapeError, "rms_norm cannot read weight", lambda: ops.rms_norm(x, torch.ones(31), 1e-6)),
        (ShapeError, "add cannot read b", lambda: ops.add(x, x[:, :0])),
        (ShapeError, "multiply cannot read b", lambda: ops.multiply(x, x[:3])),
        (ShapeError, "do not fit", lambda: ops.attend(x[:, None], heads, heads, ops.new_kv(8, 2, 16), scale=1.0)),
        (ShapeError, "do not fit", lambda: ops.attend_cached(x[:, None], ops.new_kv(8, 2, 16), scale=1.0)),
        (StateError, "4 are needed", lambda: ops.attend_cached(heads, ops.new_kv(3, 2, 16), scale=1.0)),
        (ContractError, "position 8 has no embedding", lambda: ops.add_positions(x, ops.weight(w), 5)),
        (ContractError, "token -1 of row 1", lambda: ops.embed(w, [0, -1])),
        (ContractError, "token 8 of row 1", lambda: ops.embed(w, [0, 8])),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_openmp_runtime_is_loaded():
    """Catches: a second thread pool beside torch's, which would fight it for the cores."""
    kernels_of(RUNNABLE[0])
    torch.randn(300, 300) @ torch.randn(300, 300)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "libiomp" in line}
    assert len(runtimes) == 1, runtimes

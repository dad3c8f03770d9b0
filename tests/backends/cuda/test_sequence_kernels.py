"""What kernels with a cache promise beyond the contract of operations (``test_ops.py``): prompts of the delta rule by
chunks against float64, splits of attention, and memory that a pass leaves alone. What nobody may read holds NaN.
"""

import math

import pytest
import torch

from specdec.backends.cuda.kernels import attention, commit, delta, delta_chunked, rope
from specdec.backends.cuda.kernels.launch import LENGTH
from specdec.backends.ops import DeltaShape
from specdec.errors import ShapeError, UnsupportedError
from tests.backends import oracle
from tests.backends.cuda.kernel_runs import KV, ROUNDING, UNIT, Delta, draw
from tests.backends.oracle import to_host

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore:invalid value")]  # NaN is what it is about


def rope_bound(x, out, dtype):
    """Of one rotated head: two products and a sum of normed values, each with the errors of its factors.

    The norm's factor carries half the error of its sum (a tree over D squares), that of rsqrt (4 units on a device)
    and of three products; cosine and sine are off by up to 4 units of 1. One rounding to act at the end.
    """
    return float(2 * abs(x).max() * (0.5 * x.shape[-1].bit_length() + 12) * UNIT + abs(out).max() * ROUNDING[dtype])


def frequencies(half, device):
    return torch.tensor([1e4 ** (-j / half) for j in range(half)], dtype=torch.float32).to(device)


SMALL = DeltaShape(key_heads=1, value_heads=2, key_dim=8, value_dim=6, kernel=4)
SHAPES = [
    DeltaShape(key_heads=1, value_heads=2, key_dim=16, value_dim=20, kernel=4),  # two blocks of columns, one not full
    DeltaShape(key_heads=2, value_heads=2, key_dim=12, value_dim=16, kernel=2),  # sizes that are padded, fewer taps
    DeltaShape(key_heads=2, value_heads=6, key_dim=8, value_dim=5, kernel=3),
]


class Recurrence:
    """The convolution and the gated delta rule. ``pace`` sets the decays: all of 1 but for rounding, of all sizes, 0.

    The ring of 32 rows and the slots both come round within a pass of 16 rows.
    """

    cache: Delta

    def __init__(self, device, start, rows, shape=SMALL, *, dtype=torch.float32, slot=13, slots=17, pace=0.0):
        self.start, self.dtype = start, dtype
        self.shape, self.slot, heads = shape, slot, shape.value_heads
        fused = draw(1, rows, shape.channels + 2 * heads + 3, device=device, dtype=dtype)  # as one product leaves it
        self.qkv, self.a, self.b = fused[:, 3 : 3 + shape.channels], fused[:, -heads:], fused[:, -2 * heads : -heads]
        self.weight = draw(2, shape.channels, shape.kernel, device=device, std=0.5)
        self.a_log, self.dt_bias = draw(3, heads, device=device), draw(4, heads, device=device) + pace
        sizes = heads, shape.key_dim, shape.value_dim, shape.channels
        self.cache = Delta(*sizes, device, dtype=dtype, slot=slot, slots=slots, kernel=shape.kernel)
        self.before = draw(5, shape.kernel - 1, shape.channels, device=device, dtype=dtype) * bool(start)
        self.first = draw(6, *sizes[:3], device=device) * bool(start)
        self.restart()

    def restart(self):
        """The cache as some text of ``start`` tokens left it."""
        cache = self.cache
        cache.row[0], cache.row[4] = self.start, self.slot
        cache.state.copy_(self.first)
        for at, raw in enumerate(self.before, self.start - len(self.before)):
            cache.ring[at % 32] = raw
        cache.poison()

    def run(self, at, rows):
        self.cache.poison()
        x, a, b = (one[at : at + rows] for one in (self.qkv, self.a, self.b))
        return delta.delta_rows(x, a, b, self.weight, self.a_log, self.dt_bias, self.cache.row, self.shape)

    def convolved(self, rows):
        """The first rows after the convolution, checked."""
        u = delta.conv_window(self.qkv[:rows], self.weight, self.cache.row)
        exact = oracle.conv_window(to_host(torch.cat([self.before, self.qkv[:rows]])), to_host(self.weight))
        largest = float(self.qkv.abs().max() * self.weight.abs().sum(1).max())
        rounding = ROUNDING[self.dtype] if self.dtype != torch.float32 else 0.0
        assert abs(to_host(u) - exact).max() <= 16 * UNIT * largest + rounding * abs(exact).max()
        return u

    def expected(self, u):
        inputs = (u, self.a[: len(u)], self.b[: len(u)], self.a_log, self.dt_bias)
        return oracle.gated_delta(*map(to_host, inputs), self.shape, to_host(self.first))


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 999_999])
def test_angles_far_from_zero(position, device):
    """Where float32 reduction by a rounded pi would be off by whole turns. Also for a position on the device."""
    x, half = draw(1, 16, 1, 64, device=device), frequencies(32, device)
    expected = oracle.norm_rope(to_host(x), None, 0.0, to_host(half), position)
    got = rope.norm_rope(x, None, 0.0, half, position)
    assert abs(to_host(got) - expected).max() <= rope_bound(to_host(x), expected, x.dtype)
    row = KV(1, 1, 64, device).row
    row[0] = position
    assert torch.equal(rope.norm_rope(x, None, 0.0, half, row), got)


# --- bits ------------------------------------------------------------------------------------------------------------


def test_a_delta_pass_writes_no_more_than_its_rows(device):
    layer = Recurrence(device, 40, 2, slot=16)
    layer.cache.poison()
    slots, ring = layer.cache.states.clone(), layer.cache.ring.clone()
    layer.run(0, 2)
    for before, after, changed in ((slots, layer.cache.states, [0, 1]), (ring, layer.cache.ring, [8, 9])):
        pairs = zip(before.nan_to_num(7), after.nan_to_num(7), strict=True)
        assert [at for at, (one, two) in enumerate(pairs) if not torch.equal(one, two)] == changed


def test_the_convolution_of_a_prompt_has_the_bits_of_single_rows(device):
    """Of 40 rows (two blocks of rows) or one at a time."""
    layer = Recurrence(device, 30, 40)
    whole = layer.convolved(40)
    for t in range(40):
        assert torch.equal(delta.conv_window(layer.qkv[t : t + 1], layer.weight, layer.cache.row)[0], whole[t])
        layer.cache.ring[layer.cache.length % 32] = layer.qkv[t]
        layer.cache.commit(1, steps=0)


# --- splits of attention ---------------------------------------------------------------------------------------------


def test_capacity_and_programs_show_in_no_bit(device, monkeypatch):
    q = draw(2, 3, 2, 16, device=device)

    def attended(capacity):
        cache = KV(capacity, 1, 16, device).fill(1, 403)
        cache.row[LENGTH.value] = 400
        return attention.attend(q, cache.row, kv_heads=1, scale=0.25, max_length=capacity)

    expected = attended(416)
    assert torch.equal(attended(2000), expected)
    monkeypatch.setattr(attention, "PROGRAMS", 3)  # one program for all splits of a KV head
    assert torch.equal(attended(416), expected)


def test_a_pass_longer_than_promised_is_seen(device):
    cache = KV(512, 1, 64, device).fill(1, 300)
    out = attention.attend(draw(2, 1, 2, 64, device=device), cache.row, kv_heads=1, scale=0.1, max_length=256)
    assert out.isnan().all()


# --- prompts by chunks of the delta rule -----------------------------------------------------------------------------


def chunked_bound(rows, shape, states, u):
    """Of one contraction per chunk, each a substitution over 64 rows and products over Dk.

    The error of a substitution step is a unit of every term before it; on a device products are three of tf32, which
    costs 8 units of a term.
    """
    largest = math.sqrt(shape.key_dim) * abs(states).max() + 2 * float(u.abs().max())
    return float(UNIT * (rows / delta_chunked.CHUNK + 1) * (delta_chunked.CHUNK + shape.key_dim + 8) * largest)


def check_chunked(layer, rows):
    cache, shape = layer.cache, layer.shape
    u = layer.convolved(rows)
    a, b = layer.a[:rows], layer.b[:rows]
    out = delta_chunked.delta_chunked(u, a, b, layer.a_log, layer.dt_bias, cache.row, shape)
    expected, states = layer.expected(u)
    limit = chunked_bound(rows, shape, states, u)
    assert abs(to_host(out) - expected).max() <= limit
    cache.commit(rows, steps=1)
    assert abs(to_host(cache.state) - states[-1]).max() <= limit


@pytest.mark.parametrize(("rows", "pace"), [(1, 0.0), (63, -12.0), (64, 12.0), (65, 0.0), (130, -12.0), (130, 12.0)])
def test_delta_chunked(rows, pace, device):
    """Against the recurrence in float64, from a state that is not empty; the slot is the last of two."""
    check_chunked(Recurrence(device, 3, rows, SHAPES[0], slot=1, slots=2, pace=pace), rows)


def test_gentle_decays_behind_a_strong_one(device):
    """A row that forgets everything (g about -3e5), then rows that forget little: their decays must still be right."""
    layer = Recurrence(device, 3, 60, SHAPES[0], slot=0, slots=2, pace=-6.0)
    layer.a[9], layer.a_log[:] = 1e5, 1.0
    check_chunked(layer, 60)


def test_prompts_in_pieces(device, monkeypatch):
    """A piece takes up the state that the one before left, and SLOT is where it was."""
    monkeypatch.setattr(delta_chunked, "PIECE", 64)
    check_chunked(Recurrence(device, 3, 150, SHAPES[1], slot=1, slots=3), 150)


def test_decoding_takes_up_what_a_prompt_left(device):
    """A prompt of 20 rows in the chunked form, committed whole; then two rows of the recurrence."""
    layer = Recurrence(device, 0, 22, SHAPES[0], slot=0, slots=4)
    cache, u = layer.cache, layer.convolved(22)
    inputs = (u[:20], layer.a[:20], layer.b[:20], layer.a_log, layer.dt_bias)
    delta_chunked.delta_chunked(*inputs, cache.row, layer.shape)
    cache.ring[:20] = layer.qkv[:20]
    kinds = torch.full((1,), commit.STATES, dtype=torch.int32, device=device)
    commit.commit_rows(cache.row[None], kinds, 20, whole=True)
    expected, states = layer.expected(u)
    out = layer.run(20, 2)
    assert abs(to_host(out) - expected[20:]).max() <= chunked_bound(22, layer.shape, states, u)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_nothing_is_written_behind_a_full_cache(device):
    """A pass that does not fit is the host's error; memory behind the cache stays whole all the same."""
    cache = KV(8, 1, 16, device).fill(1, 6)
    cache.row[3] = 7  # one row of room
    k = draw(2, 3, 1, 16, device=device)
    rope.rotate_and_write(k, k, k, None, None, 1e-6, frequencies(8, device), cache.row)
    assert torch.equal(cache.values[6], k[0])
    assert cache.values[7].isnan().all()


@pytest.mark.sample
def test_shapes_are_checked(device):
    cache, q = KV(16, 2, 16, device), draw(1, 2, 4, 16, device=device)
    layer = Recurrence(device, 0, 17)
    vectors = layer.weight, layer.a_log, layer.dt_bias, layer.cache.row
    wide = DeltaShape(key_heads=1, value_heads=1, key_dim=256, value_dim=1, kernel=4)
    zero = torch.zeros(1, 1)
    prompt = delta_chunked.delta_chunked
    refused = [
        (ShapeError, "3 KV heads", lambda: attention.attend(q, cache.row, kv_heads=3, scale=1.0, max_length=16)),
        (UnsupportedError, "128 values, got 256", lambda: prompt(torch.zeros(1, 513), zero, zero, *vectors[1:], wide)),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()

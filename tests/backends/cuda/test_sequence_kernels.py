"""Kernels with a cache: attention, latent attention and the gated delta rule, against float64.

Every kind of layer keeps three promises: values are within a derived bound; the bits of a row do not depend on the
other rows of its pass; rows that are not committed leave no trace. What nobody may read holds NaN.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.backends.cuda.kernels import attention, commit, delta, delta_chunked, latent, rope
from specdec.backends.ops import DeltaShape
from specdec.errors import ShapeError, UnsupportedError
from tests.backends import oracle
from tests.backends.cuda.kernel_runs import DTYPES, KV, ROUNDING, UNIT, Delta, draw
from tests.backends.oracle import to_host

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore:invalid value")]  # NaN is what it is about

CYCLES = [(0, 3), (1, 4), (5, 0), (2, 1), (1, 0), (3, 2)]
"""Right rows of a pass, and rows that are rejected."""


class Layer(abc.ABC):
    """Fixed rows of a sequence behind ``start`` committed ones, in passes of any size."""

    cache: Any

    def __init__(self, device: torch.device, start: int, rows: int, dtype: torch.dtype) -> None:
        self.device, self.start, self.rows, self.dtype = device, start, rows, dtype

    def draw(self, seed: int, *shape: int) -> Tensor:
        return draw(seed, *shape, device=self.device, dtype=self.dtype)

    def restart(self) -> None:
        self.cache.row[0] = self.start

    @abc.abstractmethod
    def run(self, at: int, rows: int, right: int | None = None) -> Tensor:
        """Rows at.. of the sequence as one pass; those from ``right`` on are another text's."""

    @abc.abstractmethod
    def contents(self) -> Tensor:
        """What is committed."""

    @abc.abstractmethod
    def check(self, rows: int) -> None:
        """A pass of ``rows`` rows against float64."""

    def alone(self, rows: int) -> tuple[Tensor, list[Tensor]]:
        """Outputs of one row at a time, and what is committed after each."""
        out, contents = [], []
        for at in range(rows):
            out.append(self.run(at, 1))
            self.cache.commit(1)
            contents.append(self.contents())
        self.restart()
        return torch.cat(out), contents


def attend_bound(q: Any, keys: Any, values: Any, scale: float, dtype: torch.dtype) -> float:
    """Of attention over exactly these inputs.

    A score is a sum of D products that a device adds 16 at a time: off by (D / 8 + 16) units of sum |q k|. An error e
    of a score is one of e of its weight, and the mixture of values moves by at most twice the largest such error times
    the largest value. Sums over n keys add 64 units (blocks of up to 128, then splits), act its rounding of weights and
    result.
    """
    grouped = abs(q).reshape(len(q), keys.shape[1], -1, q.shape[-1])
    largest = np.einsum("tkgd,skd->tkgs", grouped, abs(keys)).max() * scale
    rounding = 2 * ROUNDING[dtype] if dtype != torch.float32 else 0.0
    return float(abs(values).max() * (UNIT * (2 * largest * (q.shape[-1] / 8 + 16) + 64) + rounding))


def rope_bound(x: Any, out: Any, dtype: torch.dtype) -> float:
    """Of one rotated head: two products and a sum of normed values, each with the errors of its factors.

    The norm's factor carries half the error of its sum (a tree over D squares), that of rsqrt (4 units on a device)
    and of three products; cosine and sine are off by up to 4 units of 1. One rounding to act at the end.
    """
    return float(2 * abs(x).max() * (0.5 * x.shape[-1].bit_length() + 12) * UNIT + abs(out).max() * ROUNDING[dtype])


def frequencies(half: int, device: torch.device) -> Tensor:
    return torch.tensor([1e4 ** (-j / half) for j in range(half)], dtype=torch.float32).to(device)


class Attention(Layer):
    """Queries and keys are rotated, keys and values written, and all attended, as the ops do it.

    Queries are the halves of pairs, as a gated projection leaves them; heads turn in part only.
    """

    def __init__(
        self,
        device: torch.device,
        start: int,
        rows: int,
        heads: tuple[int, int, int] = (2, 1, 16),
        *,
        gated: bool = True,
        dtype: torch.dtype = torch.float32,
        capacity: int = 0,
    ) -> None:
        super().__init__(device, start, rows, dtype)
        self.nq, self.nkv, self.dim = heads
        pair = self.draw(1, rows, self.nq, 2, self.dim)
        self.q, self.gate = pair[:, :, 0], pair[:, :, 1] if gated else None
        self.k, self.v = (self.draw(seed, rows, self.nkv, self.dim) for seed in (2, 3))
        self.weights = [draw(seed, self.dim, device=device) for seed in (4, 5)]
        self.half = frequencies(self.dim // 4, device)
        self.cache = KV(capacity or start + rows + 16, self.nkv, self.dim, device, dtype).fill(7, start)

    def turned(self, at: int, rows: int, right: int | None = None) -> Tensor:
        """Rotated queries; keys and values are in the cache."""
        self.cache.poison()
        part = slice(at, at + rows)
        k, v = self.k[part].clone(), self.v[part].clone()
        k[rows if right is None else right :] *= -2
        return rope.rotate_and_write(self.q[part], k, v, *self.weights, 1e-6, self.half, self.cache.row)

    def run(self, at: int, rows: int, right: int | None = None) -> Tensor:
        gate = None if self.gate is None else self.gate[at : at + rows]
        query, most = self.turned(at, rows, right), len(self.cache.keys)
        return attention.attend(
            query, self.cache.row, kv_heads=self.nkv, scale=self.dim**-0.5, gate=gate, max_length=most
        )

    def contents(self) -> Tensor:
        return torch.stack([held[: self.cache.length] for held in (self.cache.keys, self.cache.values)])

    def check(self, rows: int) -> None:
        out, turned, end = to_host(self.run(0, rows)), self.turned(0, rows), self.start + rows
        written = self.cache.keys[self.start : end]
        for x, got, weight in ((self.q, turned, self.weights[0]), (self.k, written, self.weights[1])):
            expected = oracle.norm_rope(to_host(x), to_host(weight), 1e-6, to_host(self.half), self.start)
            assert abs(to_host(got) - expected).max() <= rope_bound(expected, expected, self.dtype)
        assert torch.equal(self.cache.values[self.start : end], self.v)
        assert self.cache.keys[end:].isnan().all()
        q, keys, values = to_host(turned), to_host(self.cache.keys[:end]), to_host(self.cache.values[:end])
        expected = oracle.attend(q, keys, values, self.dim**-0.5)
        if self.gate is not None:
            expected *= oracle.sigmoid(to_host(self.gate))
        bound = attend_bound(q, keys, values, self.dim**-0.5, self.dtype)
        assert abs(out - expected.reshape(rows, -1)).max() <= bound


class Latent(Layer):
    """All heads read one row, whose first entries are the values."""

    def __init__(
        self,
        device: torch.device,
        start: int,
        rows: int,
        heads: tuple[int, int, int] = (3, 24, 20),
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(device, start, rows, dtype)
        count, dims, self.values = heads
        self.q, self.row = self.draw(1, rows, count, dims), self.draw(2, rows, dims + 3)[:, 3:]
        self.cache = KV(start + rows + 5, 1, dims, device, dtype).fill(3, start)

    def run(self, at: int, rows: int, right: int | None = None) -> Tensor:
        self.cache.poison()
        row = self.row[at : at + rows].clone()
        row[rows if right is None else right :] *= -2
        q, most = self.q[at : at + rows], len(self.cache.keys)
        return latent.attend_latent(q, row, self.cache.row, scale=0.2, value_dims=self.values, max_length=most)

    def contents(self) -> Tensor:
        return self.cache.keys[: self.cache.length].clone()

    def check(self, rows: int) -> None:
        out, end = self.run(0, rows), self.start + rows
        assert torch.equal(self.cache.keys[self.start : end, 0], self.row)
        assert self.cache.keys[end:].isnan().all()
        q, keys = to_host(self.q), to_host(self.cache.keys[:end])
        expected = oracle.attend(q, keys, keys[..., : self.values], 0.2)
        assert out.shape == expected.shape
        assert abs(to_host(out) - expected).max() <= attend_bound(q, keys, keys, 0.2, self.dtype)


SMALL = DeltaShape(key_heads=1, value_heads=2, key_dim=8, value_dim=6, kernel=4)
SHAPES = [
    DeltaShape(key_heads=1, value_heads=2, key_dim=16, value_dim=20, kernel=4),  # two blocks of columns, one not full
    DeltaShape(key_heads=2, value_heads=2, key_dim=12, value_dim=16, kernel=2),  # sizes that are padded, fewer taps
    DeltaShape(key_heads=2, value_heads=6, key_dim=8, value_dim=5, kernel=3),
]


class Recurrence(Layer):
    """The convolution and the gated delta rule. ``pace`` sets the decays: all of 1 but for rounding, of all sizes, 0.

    The ring of 32 rows and the slots both come round within a pass of 16 rows.
    """

    cache: Delta

    def __init__(
        self,
        device: torch.device,
        start: int,
        rows: int,
        shape: DeltaShape = SMALL,
        *,
        dtype: torch.dtype = torch.float32,
        slot: int = 13,
        slots: int = 17,
        pace: float = 0.0,
    ) -> None:
        super().__init__(device, start, rows, dtype)
        self.shape, self.slot, heads = shape, slot, shape.value_heads
        fused = self.draw(1, rows, shape.channels + 2 * heads + 3)  # as one product leaves it
        self.qkv, self.a, self.b = fused[:, 3 : 3 + shape.channels], fused[:, -heads:], fused[:, -2 * heads : -heads]
        self.weight = draw(2, shape.channels, shape.kernel, device=device, std=0.5)
        self.a_log, self.dt_bias = draw(3, heads, device=device), draw(4, heads, device=device) + pace
        sizes = heads, shape.key_dim, shape.value_dim, shape.channels
        self.cache = Delta(*sizes, device, dtype=dtype, slot=slot, slots=slots, kernel=shape.kernel)
        self.before = self.draw(5, shape.kernel - 1, shape.channels) * bool(start)
        self.first = draw(6, *sizes[:3], device=device) * bool(start)
        self.restart()

    def restart(self) -> None:
        """The cache as some text of ``start`` tokens left it."""
        cache = self.cache
        cache.row[0], cache.row[4] = self.start, self.slot
        cache.state.copy_(self.first)
        for at, raw in enumerate(self.before, self.start - len(self.before)):
            cache.ring[at % 32] = raw
        cache.poison()

    def run(self, at: int, rows: int, right: int | None = None) -> Tensor:
        self.cache.poison()
        part = slice(at, at + rows)
        x, a, b = self.qkv[part].clone(), self.a[part].clone(), self.b[part]
        x[rows if right is None else right :] *= -3
        a[rows if right is None else right :] += 1
        return delta.delta_rows(x, a, b, self.weight, self.a_log, self.dt_bias, self.cache.row, self.shape)

    def contents(self) -> Tensor:
        return torch.cat([self.cache.state.flatten(), self.cache.window().flatten().float()])

    def convolved(self, rows: int) -> Tensor:
        """The first rows after the convolution, checked."""
        u = delta.conv_window(self.qkv[:rows], self.weight, self.cache.row)
        exact = oracle.conv_window(to_host(torch.cat([self.before, self.qkv[:rows]])), to_host(self.weight))
        largest = float(self.qkv.abs().max() * self.weight.abs().sum(1).max())
        rounding = ROUNDING[self.dtype] if self.dtype != torch.float32 else 0.0
        assert abs(to_host(u) - exact).max() <= 16 * UNIT * largest + rounding * abs(exact).max()
        return u

    def expected(self, u: Tensor) -> tuple[Any, Any]:
        inputs = (u, self.a[: len(u)], self.b[: len(u)], self.a_log, self.dt_bias)
        return oracle.gated_delta(*map(to_host, inputs), self.shape, to_host(self.first))

    def check(self, rows: int) -> None:
        """All states too. A step is a contraction (keys have length 1, beta and the decay are below 1), so its errors
        add up at most. It reads the state with a unit vector, at most sqrt(Dk) times its largest value, and adds v:
        each sum is a tree of Dk terms, and the factors (norms, gates, exponentials) bring some 24 units more."""
        u = self.convolved(rows)
        out = self.run(0, rows)
        expected, states = self.expected(u)
        largest = math.sqrt(self.shape.key_dim) * abs(states).max() + float(u.abs().max())
        limit = UNIT * (rows + 1) * (self.shape.key_dim.bit_length() + 24) * largest
        rounding = ROUNDING[self.dtype] if self.dtype != torch.float32 else 0.0
        assert abs(to_host(out) - expected).max() <= limit + rounding * abs(expected).max()
        for state in states:
            self.cache.commit(1)
            assert abs(to_host(self.cache.state) - state).max() <= limit
        assert torch.equal(self.cache.window(), torch.cat([self.before, self.qkv[:rows]])[-self.shape.kernel + 1 :])


# --- values ----------------------------------------------------------------------------------------------------------

VALUES: dict[str, tuple[Callable[..., Layer], int, int, Any, dict[str, Any]]] = {
    # kind, committed rows, rows of the pass, sizes, options; around the end of the first split (128 positions) and of
    # tiles of 16 pairs, groups that are odd, sizes that are padded
    "attention from an empty cache": (Attention, 0, 1, (4, 2, 64), {}),
    "attention of a full pass": (Attention, 0, 16, (5, 5, 80), {}),
    "attention over the end of a split": (Attention, 127, 2, (8, 2, 256), {"gated": False}),
    "attention over three splits": (Attention, 301, 5, (3, 1, 96), {}),
    "attention in bfloat16": (Attention, 126, 3, (6, 2, 128), {"dtype": torch.bfloat16}),
    "latent attention from an empty cache": (Latent, 0, 1, (3, 24, 20), {}),
    "latent attention over the end of a split": (Latent, 126, 3, (16, 48, 32), {}),
    "latent attention without a rotary part": (Latent, 301, 2, (5, 40, 40), {"dtype": torch.bfloat16}),
    "latent attention with DeepSeek's rows": (Latent, 130, 2, (2, 576, 512), {}),
    "latent attention of one value": (Latent, 3, 16, (1, 9, 1), {"dtype": torch.bfloat16}),
    "delta rule that keeps all": (Recurrence, 0, 3, SHAPES[0], {"pace": -12.0}),
    "delta rule behind a text": (Recurrence, 29, 7, SHAPES[1], {}),
    "delta rule that forgets all": (Recurrence, 40, 4, SHAPES[2], {"pace": 12.0}),
    "delta rule in bfloat16": (Recurrence, 29, 8, SHAPES[0], {"dtype": torch.bfloat16}),
    "delta rule in bfloat16, padded": (Recurrence, 0, 4, SHAPES[1], {"dtype": torch.bfloat16, "pace": -12.0}),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_within_a_derived_bound(name: str, device: torch.device) -> None:
    kind, start, rows, sizes, options = VALUES[name]
    kind(device, start, rows, sizes, **options).check(rows)


@pytest.mark.parametrize("position", [0, 999_999])
def test_angles_far_from_zero(position: int, device: torch.device) -> None:
    """Where float32 reduction by a rounded pi would be off by whole turns. Also for a position on the device."""
    x, half = draw(1, 16, 1, 64, device=device), frequencies(32, device)
    expected = oracle.norm_rope(to_host(x), None, 0.0, to_host(half), position)
    got = rope.norm_rope(x, None, 0.0, half, position)
    assert abs(to_host(got) - expected).max() <= rope_bound(to_host(x), expected, x.dtype)
    row = KV(1, 1, 64, device).row
    row[0] = position
    assert torch.equal(rope.norm_rope(x, None, 0.0, half, row), got)


# --- bits ------------------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Callable[..., Layer], int]] = {
    "attention": (Attention, 121),  # across the end of the first split
    "latent": (Latent, 121),
    "delta": (Recurrence, 29),
}


def rows_are_their_own(layer: Layer, sizes: Iterable[int]) -> None:
    expected, contents = layer.alone(layer.rows)
    for rows in sizes:
        assert torch.equal(layer.run(0, rows), expected[:rows]), f"{rows} rows"
        for row in range(rows):
            layer.cache.commit(1)
            assert torch.equal(layer.contents(), contents[row]), f"the cache behind row {row} of {rows}"
        layer.restart()


def rejected_rows_leave_no_trace(layer: Layer) -> None:
    expected, contents = layer.alone(layer.rows)
    at = 0
    for right, wrong in CYCLES:
        out = layer.run(at, right + wrong, right=right)
        assert torch.equal(out[:right], expected[at : at + right])
        layer.cache.commit(right)
        layer.cache.poison()
        at += right
        assert at == 0 or torch.equal(layer.contents(), contents[at - 1])
    assert at == layer.rows


@pytest.mark.parametrize("kind", ["attention", pytest.param("latent", marks=pytest.mark.sample), "delta"])
def test_rows_are_their_own(kind: str, device: torch.device) -> None:
    """Passes of several sizes against one row at a time: outputs, and what is committed after every row."""
    make, start = KINDS[kind]
    rows_are_their_own(make(device, start, 16), (2, 5, 10, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_rows_leave_no_trace(kind: str, device: torch.device) -> None:
    make, start = KINDS[kind]
    rejected_rows_leave_no_trace(make(device, start, 12))


REAL: list[tuple[Callable[..., Layer], int, Any]] = [
    *((Attention, start, (2, 1, 256)) for start in (0, 121, 1000, 8185)),
    *((Latent, start, (128, 576, 512)) for start in (0, 500)),
    *(
        (Recurrence, 29, DeltaShape(key_heads=16, value_heads=heads, key_dim=128, value_dim=128, kernel=4))
        for heads in (16, 32, 48)
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(len(REAL)))
def test_rows_are_their_own_at_real_size(case: int, dtype: torch.dtype, device: torch.device) -> None:
    """What an interpreter cannot show: the bits of tensor cores."""
    make, start, sizes = REAL[case]
    rows_are_their_own(make(device, start, 16, sizes, dtype=dtype), range(1, 17))


def test_a_delta_pass_writes_no_more_than_its_rows(device: torch.device) -> None:
    layer = Recurrence(device, 40, 2, slot=16)
    layer.cache.poison()
    slots, ring = layer.cache.states.clone(), layer.cache.ring.clone()
    layer.run(0, 2)
    for before, after, changed in ((slots, layer.cache.states, [0, 1]), (ring, layer.cache.ring, [8, 9])):
        pairs = zip(before.nan_to_num(7), after.nan_to_num(7), strict=True)
        assert [at for at, (one, two) in enumerate(pairs) if not torch.equal(one, two)] == changed


def test_the_convolution_of_a_prompt_has_the_bits_of_single_rows(device: torch.device) -> None:
    """Of 40 rows (two blocks of rows) or one at a time."""
    layer = Recurrence(device, 30, 40)
    whole = layer.convolved(40)
    for t in range(40):
        assert torch.equal(delta.conv_window(layer.qkv[t : t + 1], layer.weight, layer.cache.row)[0], whole[t])
        layer.cache.ring[layer.cache.length % 32] = layer.qkv[t]
        layer.cache.commit(1, steps=0)


# --- splits of attention ---------------------------------------------------------------------------------------------


def test_capacity_and_programs_show_in_no_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, roomy = Attention(device, 400, 3), Attention(device, 400, 3, capacity=2000)
    expected = layer.run(0, 3)
    assert torch.equal(roomy.run(0, 3), expected)
    monkeypatch.setattr(attention, "PROGRAMS", 3)  # one program for all splits of a KV head
    assert torch.equal(layer.run(0, 3), expected)


def test_a_pass_longer_than_promised_is_seen(device: torch.device) -> None:
    cache = KV(512, 1, 64, device).fill(1, 300)
    out = attention.attend(draw(2, 1, 2, 64, device=device), cache.row, kv_heads=1, scale=0.1, max_length=256)
    assert out.isnan().all()


# --- prompts by chunks of the delta rule -----------------------------------------------------------------------------


def chunked_bound(rows: int, shape: DeltaShape, states: Any, u: Tensor) -> float:
    """Of one contraction per chunk, each a substitution over 64 rows and products over Dk.

    The error of a substitution step is a unit of every term before it; on a device products are three of tf32, which
    costs 8 units of a term.
    """
    largest = math.sqrt(shape.key_dim) * abs(states).max() + 2 * float(u.abs().max())
    return float(UNIT * (rows / delta_chunked.CHUNK + 1) * (delta_chunked.CHUNK + shape.key_dim + 8) * largest)


def check_chunked(layer: Recurrence, rows: int) -> None:
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
def test_delta_chunked(rows: int, pace: float, device: torch.device) -> None:
    """Against the recurrence in float64, from a state that is not empty; the slot is the last of two."""
    check_chunked(Recurrence(device, 3, rows, SHAPES[0], slot=1, slots=2, pace=pace), rows)


def test_gentle_decays_behind_a_strong_one(device: torch.device) -> None:
    """A row that forgets everything (g about -3e5), then rows that forget little: their decays must still be right."""
    layer = Recurrence(device, 3, 60, SHAPES[0], slot=0, slots=2, pace=-6.0)
    layer.a[9], layer.a_log[:] = 1e5, 1.0
    check_chunked(layer, 60)


def test_prompts_in_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece takes up the state that the one before left, and SLOT is where it was."""
    monkeypatch.setattr(delta_chunked, "PIECE", 64)
    check_chunked(Recurrence(device, 3, 150, SHAPES[1], slot=1, slots=3), 150)


def test_decoding_takes_up_what_a_prompt_left(device: torch.device) -> None:
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


def test_nothing_is_written_behind_a_full_cache(device: torch.device) -> None:
    """A pass that does not fit is the host's error; memory behind the cache stays whole all the same."""
    cache = KV(8, 1, 16, device).fill(1, 6)
    cache.row[3] = 7  # one row of room
    k = draw(2, 3, 1, 16, device=device)
    rope.rotate_and_write(k, k, k, None, None, 1e-6, frequencies(8, device), cache.row)
    assert torch.equal(cache.values[6], k[0])
    assert cache.values[7].isnan().all()


@pytest.mark.sample
def test_shapes_are_checked(device: torch.device) -> None:
    cache, q = KV(16, 2, 16, device), draw(1, 2, 4, 16, device=device)
    rows, layer = Latent(device, 4, 2), Recurrence(device, 0, 17)
    vectors = layer.weight, layer.a_log, layer.dt_bias, layer.cache.row
    wide = DeltaShape(key_heads=1, value_heads=1, key_dim=256, value_dim=1, kernel=4)
    zero = torch.zeros(1, 1)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ShapeError, "3 KV heads", lambda: attention.attend(q, cache.row, kv_heads=3, scale=1.0, max_length=16)),
        (
            ShapeError,
            "over 18 dimensions",
            lambda: rope.rotate_and_write(q, q[:, :2], q[:, :2], None, None, 1e-6, frequencies(9, device), cache.row),
        ),
        (
            ShapeError,
            "25 value dimensions",
            lambda: latent.attend_latent(rows.q, rows.row, rows.cache.row, scale=1.0, value_dims=25, max_length=9),
        ),
        (ShapeError, "up to 16 rows, got 17", lambda: layer.run(0, 17)),
        (
            ShapeError,
            "gates of 2 rows",
            lambda: delta.delta_rows(layer.qkv[:2], layer.a[:1], layer.b[:2], *vectors, SMALL),
        ),
        (
            UnsupportedError,
            "4 taps, got 5",
            lambda: delta.conv_window(layer.qkv, torch.zeros(SMALL.channels, 5, device=device), layer.cache.row),
        ),
        (
            UnsupportedError,
            "128 values, got 256",
            lambda: delta_chunked.delta_chunked(torch.zeros(1, 513), zero, zero, *vectors[1:], wide),
        ),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()

"""The gated delta rule: right by the recurrence in float64, each row's bits its own, any number of rows committed."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.backends.cuda.kernels import commit, delta, delta_chunked
from specdec.backends.cuda.kernels.launch import launch
from specdec.backends.ops import DeltaShape
from specdec.errors import ShapeError, UnsupportedError
from tests.backends.cuda.tables import EPS, NAN, Delta, address_row, draw, mutated

pytestmark = pytest.mark.interpreter

UNIT = EPS[torch.float32]
SMALL = DeltaShape(key_heads=1, value_heads=2, key_dim=8, value_dim=6, kernel=4)
SHAPES = [
    DeltaShape(key_heads=1, value_heads=2, key_dim=16, value_dim=20, kernel=4),  # two blocks of columns, one not full
    DeltaShape(key_heads=2, value_heads=2, key_dim=12, value_dim=16, kernel=2),  # sizes that are padded, fewer taps
    DeltaShape(key_heads=2, value_heads=6, key_dim=8, value_dim=5, kernel=3),
]


class Layer:
    """The inputs of many rows of one layer, and a cache for passes over them."""

    def __init__(
        self,
        shape: DeltaShape,
        rows: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        start: int = 0,
        slot: int = 0,
        slots: int = 17,
        pace: float = 0.0,
        module: Any = delta,
    ) -> None:
        self.shape, self.module, self.start, self.slot = shape, module, start, slot
        heads = shape.value_heads
        fused = draw(1, rows, shape.channels + 2 * heads + 3, device=device, dtype=dtype)  # as one product leaves it
        self.qkv, self.a, self.b = fused[:, 3 : 3 + shape.channels], fused[:, -heads:], fused[:, -2 * heads : -heads]
        self.weight = draw(2, shape.channels, shape.kernel, device=device, std=0.5)
        self.a_log, self.dt_bias = draw(3, heads, device=device), draw(4, heads, device=device) + pace
        self.cache = Delta(
            heads,
            shape.key_dim,
            shape.value_dim,
            shape.channels,
            device,
            dtype=dtype,
            slot=slot,
            slots=slots,
            kernel=shape.kernel,
        )
        self.before = draw(5, shape.kernel - 1, shape.channels, device=device, dtype=dtype)
        self.first = draw(6, heads, shape.key_dim, shape.value_dim, device=device)
        if start:
            self.restart()

    def restart(self) -> None:
        """The cache as some text of ``start`` tokens left it."""
        cache = self.cache
        cache.row[0], cache.row[4] = self.start, self.slot
        cache.state.copy_(self.first)
        for at, raw in enumerate(self.before, self.start - len(self.before)):
            cache.ring[at % len(cache.ring)] = raw
        cache.poison()

    def inputs(self, at: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = slice(at, at + T)
        return self.qkv[rows], self.a[rows], self.b[rows]

    def run(self, at: int, T: int, *, right: int | None = None) -> Tensor:
        """Rows at.. as one pass; those from ``right`` on are another text's."""
        x, a, b = self.inputs(at, T)
        if right is not None:
            x, a = x.clone(), a.clone()
            x[right:] *= -3
            a[right:] += 1
        return self.module.delta_rows(x, a, b, self.weight, self.a_log, self.dt_bias, self.cache.row, self.shape)

    def alone(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, states after each row, and raw windows, of one row at a time."""
        out, states, windows = [], [], []
        for at in range(rows):
            out.append(self.run(at, 1))
            self.cache.commit(1)
            self.cache.poison()
            states.append(self.cache.state.clone())
            windows.append(self.cache.window(self.shape.kernel - 1))
        self.restart()
        return torch.cat(out), torch.stack(states), torch.stack(windows)


def bound(rows: int, shape: DeltaShape, states: Tensor, v: Tensor) -> float:
    """How far the recurrence can be off after ``rows`` rows.

    A step is a contraction (keys have length 1, beta and the decay are below 1), so its errors add up at most. It reads
    the state with a unit vector, at most sqrt(Dk) times its largest value, and adds v: each sum is a tree of Dk terms,
    and the factors (norms, gates, exponentials) bring some 24 units more.
    """
    largest = math.sqrt(shape.key_dim) * float(states.abs().max()) + float(v.abs().max())
    return UNIT * (rows + 1) * (shape.key_dim.bit_length() + 24) * largest


def reference(layer: Layer, u: Tensor, at: int, state: Tensor) -> tuple[Tensor, Tensor]:
    _, a, b = layer.inputs(at, len(u))
    return delta.gated_delta_reference(u.double(), a, b, layer.a_log, layer.dt_bias, state, layer.shape)


# --- one launch for everything ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pace", [-12.0, 0.0, 12.0])  # decays of 1 but for the rounding, of all sizes, of 0
@pytest.mark.parametrize("shape", SHAPES)
def test_delta_rows(shape: DeltaShape, pace: float, dtype: torch.dtype, device: torch.device) -> None:
    """Passes of several sizes from an empty cache, all but one of their rows kept: outputs, states, ring."""
    layer = Layer(shape, 8, device, dtype=dtype, pace=pace)
    cache, state, raw = layer.cache, torch.zeros_like(layer.cache.state).double(), layer.qkv[:0]
    at = 0
    for T, kept in ((3, 2), (1, 1), (4, 3)):
        window = torch.cat([torch.zeros(3, shape.channels, device=device, dtype=dtype), raw])[-shape.kernel + 1 :]
        u = delta.conv_window(layer.qkv[at : at + T], layer.weight, cache.row)
        exact = delta.conv_window_reference(layer.qkv[at : at + T].double(), layer.weight.double(), window.double())
        rounding = EPS[dtype] if dtype != torch.float32 else 0.0
        largest = float(layer.qkv.abs().max() * layer.weight.abs().sum(1).max())
        assert (u - exact).abs().max() <= 16 * UNIT * largest + rounding * exact.abs().max()

        out = layer.run(at, T)
        expected, states = reference(layer, u, at, state)
        limit = bound(at + T, shape, states, u)
        assert (out - expected).abs().max() <= limit + rounding * expected.abs().max()
        cache.commit(kept)
        assert (cache.state - states[kept - 1]).abs().max() <= limit
        raw, state, at = layer.qkv[: at + kept], states[kept - 1], at + kept
        taps = min(at, shape.kernel - 1)
        assert torch.equal(cache.window(taps), raw[-taps:])
        cache.poison()


@pytest.mark.sample
def test_an_unused_row_is_not_written(device: torch.device) -> None:
    """A pass of 2 rows touches two slots and two rows of the ring."""
    layer = Layer(SMALL, 2, device, start=40, slot=16)
    slots, ring = layer.cache.states.clone(), layer.cache.ring.clone()
    layer.run(0, 2)
    changed = [s for s in range(17) if not torch.equal(slots[s].nan_to_num(7), layer.cache.states[s].nan_to_num(7))]
    assert changed == [0, 1]
    changed = [r for r in range(32) if not torch.equal(ring[r].nan_to_num(7), layer.cache.ring[r].nan_to_num(7))]
    assert changed == [8, 9]


@pytest.mark.sample
def test_what_is_refused(device: torch.device) -> None:
    layer = Layer(SMALL, 17, device)
    with pytest.raises(ShapeError, match="up to 16 rows, got 17"):
        layer.run(0, 17)
    with pytest.raises(ShapeError, match="gates of 2 rows"):
        delta.delta_rows(
            layer.qkv[:2], layer.a[:1], layer.b[:2], layer.weight, layer.a_log, layer.dt_bias, layer.cache.row, SMALL
        )
    with pytest.raises(UnsupportedError, match="4 taps, got 5"):
        delta.conv_window(layer.qkv, torch.zeros(SMALL.channels, 5, device=device), layer.cache.row)
    wide = DeltaShape(key_heads=1, value_heads=1, key_dim=256, value_dim=1, kernel=4)
    with pytest.raises(UnsupportedError, match="128 values, got 256"):
        delta_chunked.delta_chunked(
            torch.zeros(1, 513), torch.zeros(1, 1), torch.zeros(1, 1), layer.a_log, layer.dt_bias, layer.cache.row, wide
        )


# --- bits -------------------------------------------------------------------------------------------------------------


def check_rows_are_their_own(module: Any, device: torch.device, sizes: Sequence[int], **kind: Any) -> None:
    """Passes of each size against one row at a time: outputs, the state after every row, every window.

    The ring of 32 rows and the 17 slots both come round within the pass.
    """
    layer = Layer(kind.pop("shape", SMALL), max(sizes), device, start=29, slot=13, module=module, **kind)
    expected, states, windows = layer.alone(max(sizes))
    for T in sizes:
        assert torch.equal(layer.run(0, T), expected[:T]), f"{T} rows"
        for row in range(T):
            layer.cache.commit(1)
            assert torch.equal(layer.cache.state, states[row]), f"the state behind row {row} of {T}"
            assert torch.equal(layer.cache.window(layer.shape.kernel - 1), windows[row]), f"the window behind {row}"
        layer.restart()


def test_rows_are_their_own(device: torch.device) -> None:
    check_rows_are_their_own(delta, device, range(1, 17))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [16, 32, 48])
def test_rows_are_their_own_at_real_size(heads: int, dtype: torch.dtype, device: torch.device) -> None:
    shape = DeltaShape(key_heads=16, value_heads=heads, key_dim=128, value_dim=128, kernel=4)
    check_rows_are_their_own(delta, device, range(1, 17), shape=shape, dtype=dtype)


def check_any_number_of_rows_is_kept(module: Any, device: torch.device) -> None:
    """Passes of right rows and rows to be rejected, in few slots; what is not committed is poisoned in between."""
    layer = Layer(SMALL, 12, device, start=30, slot=4, slots=6, module=module)
    expected, states, _ = layer.alone(12)
    at = 0
    for right, wrong in [(0, 3), (1, 4), (5, 0), (2, 1), (1, 0), (3, 2)]:
        out = layer.run(at, right + wrong, right=right)
        assert torch.equal(out[:right], expected[at : at + right])
        layer.cache.commit(right)
        layer.cache.poison()
        at += right
        assert at == 0 or torch.equal(layer.cache.state, states[at - 1])
    assert at == 12


def test_any_number_of_rows_is_kept(device: torch.device) -> None:
    check_any_number_of_rows_is_kept(delta, device)


def test_the_convolution_alone_has_the_same_bits(device: torch.device) -> None:
    """Of 40 rows (two blocks of rows) or one at a time."""
    layer = Layer(SMALL, 40, device, start=30)
    whole = delta.conv_window(layer.qkv, layer.weight, layer.cache.row)
    for t in range(40):
        assert torch.equal(delta.conv_window(layer.qkv[t : t + 1], layer.weight, layer.cache.row)[0], whole[t])
        layer.cache.ring[layer.cache.length % 32] = layer.qkv[t]
        layer.cache.commit(1, steps=0)


def test_offsets_beyond_2_to_the_31(device: torch.device) -> None:
    """Slot 16 of 17 with 2^27 values each: 2^19 heads of 16 by 16, of which one is launched."""
    shape = DeltaShape(key_heads=1, value_heads=2**19, key_dim=16, value_dim=16, kernel=4)
    states = torch.empty(17, shape.value_heads, 16, 16, device=device)  # hardly touched
    x, ring = (torch.empty(rows, shape.channels, device=device) for rows in (1, 32))
    weight = torch.empty(shape.channels, 4, device=device)
    used = 48
    states[15, 0], ring[:, :used], weight[:used] = draw(1, 16, 16, device=device), NAN, draw(2, used, 4, device=device)
    x[0, :used], ring[2:5, :used] = draw(3, used, device=device), draw(4, 3, used, device=device)
    row, gate = address_row(device, 5, states.data_ptr(), ring.data_ptr(), 17, 15, 32), draw(5, 1, 2**19, device=device)
    out = torch.empty(1, shape.value_heads, 16, device=device)
    launch(
        delta._delta_rows,
        (1, 1),
        x,
        gate,
        gate,
        weight,
        gate,
        gate,
        row,
        out,
        1,
        0,
        0,
        0,
        0.25,
        HK=1,
        HV=2**19,
        DK=16,
        DV=16,
        TAPS=4,
        EPS=delta.UNIT_EPS,
        BLOCK_K=16,
        BLOCK_V=16,
        num_warps=1,
    )
    one = DeltaShape(key_heads=1, value_heads=1, key_dim=16, value_dim=16, kernel=4)
    u = delta.conv_window_reference(x[:, :used].double(), weight[:used].double(), ring[2:5, :used].double())
    first = gate[:, :1]
    expected, after = delta.gated_delta_reference(u, first, first, first[0], first[0], states[15, :1].double(), one)
    limit = bound(1, one, after, u)
    assert (out[0, :1] - expected[0]).abs().max() <= limit
    assert (states[16, :1] - after[0]).abs().max() <= limit


# --- prompts ----------------------------------------------------------------------------------------------------------


def chunked_bound(rows: int, shape: DeltaShape, states: Tensor, v: Tensor) -> float:
    """Of the chunked form: one contraction per chunk, each a substitution over 64 rows and products over Dk.

    The error of a substitution step is a unit of every term before it; on a device products are three of tf32, which
    costs 8 units of a term.
    """
    largest = math.sqrt(shape.key_dim) * float(states.abs().max()) + 2 * float(v.abs().max())
    return UNIT * (rows / delta_chunked.CHUNK + 1) * (delta_chunked.CHUNK + shape.key_dim + 8) * largest


def check_chunked(module: Any, layer: Layer, rows: int) -> None:
    cache, shape = layer.cache, layer.shape
    _, a, b = layer.inputs(0, rows)
    u = delta.conv_window(layer.qkv[:rows], layer.weight, cache.row)
    before = cache.state.double()
    out = module.delta_chunked(u, a, b, layer.a_log, layer.dt_bias, cache.row, shape)
    expected, states = reference(layer, u, 0, before)
    limit = chunked_bound(rows, shape, states, u)
    assert (out - expected).abs().max() <= limit
    cache.commit(rows, steps=1)
    assert (cache.state - states[-1]).abs().max() <= limit


@pytest.mark.parametrize("pace", [-12.0, 0.0, 12.0])
@pytest.mark.parametrize("rows", [1, 17, 63, 64, 65, 130, 300])
def test_delta_chunked(rows: int, pace: float, device: torch.device) -> None:
    """Against the recurrence in float64, from a state that is not empty; the slot is the last of two."""
    check_chunked(delta_chunked, Layer(SHAPES[0], rows, device, start=3, slot=1, slots=2, pace=pace), rows)


def check_gentle_behind_strong(module: Any, device: torch.device) -> None:
    """A row that forgets everything (g about -3e5), then rows that forget little: their decays must still be right."""
    layer = Layer(SHAPES[0], 60, device, start=3, slots=2, pace=-6.0)
    layer.a[9], layer.a_log[:] = 1e5, 1.0
    check_chunked(module, layer, 60)


def test_gentle_decays_behind_a_strong_one(device: torch.device) -> None:
    check_gentle_behind_strong(delta_chunked, device)


def test_prompts_in_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece takes up the state that the one before left, and SLOT is where it was."""
    monkeypatch.setattr(delta_chunked, "PIECE", 128)
    check_chunked(delta_chunked, Layer(SHAPES[1], 300, device, start=3, slot=1, slots=3), 300)


def test_the_chunked_reference_is_the_recurrence(device: torch.device) -> None:
    layer = Layer(SHAPES[0], 150, device)
    _, a, b = layer.inputs(0, 150)
    u, state = layer.qkv.double(), draw(7, 2, 16, 20, device=device).double()
    out, after = delta_chunked.delta_chunked_reference(u, a, b, layer.a_log, layer.dt_bias, state, layer.shape)
    expected, states = reference(layer, u, 0, state)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(after, states[-1], rtol=0, atol=1e-12)


def test_decoding_takes_up_what_a_prompt_left(device: torch.device) -> None:
    """A prompt of 20 rows in the chunked form, committed whole; then two rows of the recurrence."""
    layer = Layer(SHAPES[0], 22, device, slots=4)
    cache = layer.cache
    u = delta.conv_window(layer.qkv[:20], layer.weight, cache.row)
    delta_chunked.delta_chunked(u, layer.a[:20], layer.b[:20], layer.a_log, layer.dt_bias, cache.row, layer.shape)
    cache.ring[:20] = layer.qkv[:20]
    kinds = torch.full((1,), commit.STATES, dtype=torch.int32, device=device)
    commit.commit_rows(cache.row[None], kinds, 20, whole=True)
    cache.poison()
    out = layer.run(20, 2)
    window = torch.zeros(3, layer.shape.channels, device=device).double()
    u = delta.conv_window_reference(layer.qkv.double(), layer.weight.double(), window)
    expected, states = reference(layer, u, 0, torch.zeros_like(cache.state).double())
    assert (out - expected[20:]).abs().max() <= chunked_bound(22, layer.shape, states, u)


# --- mutants ----------------------------------------------------------------------------------------------------------


def _wy_in_verification(x: Tensor, a: Tensor, b: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """The matrix form wherever there is more than one row: right, and with other bits."""
    if len(x) == 1:
        return delta.delta_rows(x, a, b, weight, *rest)
    a_log, dt_bias, row, shape = rest
    return delta_chunked.delta_chunked(delta.conv_window(x, weight, row), a, b, a_log, dt_bias, row, shape)


def _rows(module: Any, device: torch.device) -> None:
    check_rows_are_their_own(module, device, (1, 6))


NEXT_SLOT = "        slot = tl.where(slot + 1 < slots, slot + 1, 0)\n"
STORE = "        tl.store(states + slot * size + in_state, state, mask=real)\n"
MUTANTS = {
    "the snapshot is a slot early": (delta, check_any_number_of_rows_is_kept, [(NEXT_SLOT + STORE, STORE + NEXT_SLOT)]),
    "slots do not come round": (
        delta,
        check_any_number_of_rows_is_kept,
        [("tl.where(slot + 1 < slots, slot + 1, 0)", "tl.minimum(slot + 1, slots - 1)")],
    ),
    "the ring is a row off": (delta, _rows, [("(length + t) % ring_rows", "(length + t + 1) % ring_rows")]),
    "the window is a row off": (delta, _rows, [("position = length - BACK\n", "position = length - BACK - 1\n")]),
    "no keys in the ring": (delta, _rows, [("(tl.program_id(0) == 0) & (head %", "(head > 0) & (head %")]),
    "float32 sums of g": (delta_chunked, check_gentle_behind_strong, [("chunked(g.double())", "chunked(g)")]),
    "a row does not see itself": (delta_chunked, check_gentle_behind_strong, [(".exp().tril()", ".exp().tril(-1)")]),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name: str, device: torch.device, tmp_path: pathlib.Path) -> None:
    module, killer, changes = MUTANTS[name]
    copy = mutated(module, tmp_path, *changes)
    with pytest.raises(AssertionError):
        killer(copy, device)


def test_the_chunked_form_in_verification_is_killed(device: torch.device) -> None:
    with pytest.raises(AssertionError, match="6 rows"):
        _rows(SimpleNamespace(delta_rows=_wy_in_verification), device)

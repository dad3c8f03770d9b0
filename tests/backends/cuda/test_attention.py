"""Rotary embedding, KV writes and split attention: right by a float64 reference, and each row's bits its own."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specdec.backends.cuda.kernels import attention, rope
from specdec.backends.cuda.kernels.launch import launch
from specdec.errors import ShapeError
from tests.backends.cuda.tables import EPS, KV, NAN, address_row, draw, mutated

pytestmark = pytest.mark.interpreter

HEADS = [(4, 2, 64), (8, 2, 256), (3, 1, 96), (5, 5, 80), (6, 2, 128)]  # nq, nkv, D; odd groups, padded sizes


def frequencies(half: int, device: torch.device) -> Tensor:
    return torch.tensor([1e4 ** (-j / half) for j in range(half)], dtype=torch.float32).to(device)


# --- rotary embedding -------------------------------------------------------------------------------------------------


def rope_bound(x: Tensor, out: Tensor, dtype: torch.dtype) -> float:
    """Of one rotated head: two products and a sum of normed values, each with the errors of its factors.

    The norm's factor carries half the error of its sum (a tree over D squares), that of rsqrt (4 units on a device)
    and of three products; cosine and sine are off by up to 4 units of 1. One rounding to act at the end.
    """
    unit = EPS[torch.float32]
    return float(2 * x.abs().max() * (0.5 * x.shape[-1].bit_length() + 12) * unit + out.abs().max() * EPS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nq", "nkv", "dim"), HEADS)
def test_rotate_and_write(nq: int, nkv: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Queries are the halves of pairs, as a gated projection leaves them; heads turn in part only."""
    T, start = 3, 77
    pair, k, v = (draw(i, T, n, dim, device=device, dtype=dtype) for i, n in ((1, 2 * nq), (2, nkv), (3, nkv)))
    q = pair.view(T, nq, 2, dim)[:, :, 0]
    q_norm, k_norm = draw(4, dim, device=device), draw(5, dim, device=device)
    half, cache = frequencies(dim // 4, device), KV(90, nkv, dim, device, dtype).fill(6, start)
    turned = rope.rotate_and_write(q, k, v, q_norm, k_norm, 1e-6, half, cache.row)
    expected = rope.norm_rope_reference(q.double(), q_norm.double(), 1e-6, half, start)
    assert (turned - expected).abs().max() <= rope_bound(expected, expected, dtype)
    expected = rope.norm_rope_reference(k.double(), k_norm.double(), 1e-6, half, start)
    assert (cache.keys[start : start + T] - expected).abs().max() <= rope_bound(expected, expected, dtype)
    assert torch.equal(cache.values[start : start + T], v)
    assert cache.keys[start + T :].isnan().all()

    alone = rope.norm_rope(q, q_norm, 1e-6, half, cache.row)
    assert torch.equal(alone, turned)
    assert torch.equal(rope.norm_rope(q, q_norm, 1e-6, half, start), turned)


@pytest.mark.parametrize("position", [0, 9, 100_000, 999_999])
def test_angles_far_from_zero(position: int, device: torch.device) -> None:
    """Where float32 reduction by a rounded pi would be off by whole turns."""
    x, half = draw(1, 16, 1, 64, device=device), frequencies(32, device)
    expected = rope.norm_rope_reference(x.double(), None, 0.0, half, position)
    assert (rope.norm_rope(x, None, 0.0, half, position) - expected).abs().max() <= rope_bound(x, expected, x.dtype)


def test_nothing_is_written_behind_a_full_cache(device: torch.device) -> None:
    """A pass that does not fit is the host's error; memory behind the cache stays whole all the same."""
    cache = KV(8, 1, 16, device).fill(1, 6)
    cache.row[3] = 7  # one row of room
    k = draw(2, 3, 1, 16, device=device)
    rope.rotate_and_write(k, k, k, None, None, 1e-6, frequencies(8, device), cache.row)
    assert torch.equal(cache.values[6], k[0])
    assert cache.values[7].isnan().all()


# --- attention against the reference ----------------------------------------------------------------------------------


def attend_bound(q: Tensor, keys: Tensor, values: Tensor, scale: float, dtype: torch.dtype) -> float:
    """Of attention over exactly these inputs.

    A score is a sum of D products that a device adds 16 at a time: off by (D / 8 + 16) units of sum |q k|. An error e
    of a score is one of e of its weight, and the mixture of values moves by at most twice the largest such error times
    the largest value. Sums over n keys add 64 units (blocks of up to 128, then splits), act its rounding of weights and
    result.
    """
    unit = EPS[torch.float32]
    largest = float(torch.einsum("tkd,skd->tks", q.abs().amax(2), keys.abs()).max()) * scale
    wide = float(values.abs().max())
    return wide * (
        unit * (2 * largest * (q.shape[-1] / 8 + 16) + 64) + (2 * EPS[dtype] if dtype != torch.float32 else 0)
    )


@pytest.mark.parametrize(
    ("length", "T", "dtype"),
    [
        (0, 1, torch.float32),
        (0, 16, torch.float32),
        (127, 2, torch.float32),
        (301, 5, torch.float32),
        (127, 2, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("nq", "nkv", "dim"), HEADS[:4])
def test_attend(nq: int, nkv: int, dim: int, length: int, T: int, dtype: torch.dtype, device: torch.device) -> None:
    """Around the first split's end, from an empty cache on, gated and not; slots behind the pass are poisoned."""
    cache = KV(320, nkv, dim, device, dtype).fill(1, length + T)
    cache.row[0] = length
    q = draw(3, T, nq, dim, device=device, dtype=dtype)
    gate = draw(4, T, nq, 2, dim, device=device, dtype=dtype)[:, :, 1] if T != 2 else None
    out = attention.attend(q, cache.row, kv_heads=nkv, scale=dim**-0.5, gate=gate, max_length=320)
    keys, values = cache.keys.double()[: length + T], cache.values.double()[: length + T]
    expected = attention.attend_reference(
        q.double(), keys, values, length, scale=dim**-0.5, gate=None if gate is None else gate.double()
    )
    grouped = q.double().view(T, nkv, nq // nkv, dim)
    assert (out - expected).abs().max() <= attend_bound(grouped, keys, values, dim**-0.5, dtype)


@pytest.mark.filterwarnings("ignore:invalid value")  # NaN is what it is about
def test_a_pass_longer_than_promised_is_seen(device: torch.device) -> None:
    cache = KV(512, 1, 64, device).fill(1, 300)
    out = attention.attend(draw(2, 1, 2, 64, device=device), cache.row, kv_heads=1, scale=0.1, max_length=256)
    assert out.isnan().all()


@pytest.mark.sample
def test_shapes_are_checked(device: torch.device) -> None:
    cache, q = KV(16, 2, 16, device), draw(1, 2, 4, 16, device=device)
    with pytest.raises(ShapeError, match="3 KV heads"):
        attention.attend(q, cache.row, kv_heads=3, scale=1.0, max_length=16)
    with pytest.raises(ShapeError, match="over 18 dimensions"):
        rope.rotate_and_write(q, q[:, :2], q[:, :2], None, None, 1e-6, frequencies(9, device), cache.row)


# --- bits -------------------------------------------------------------------------------------------------------------


class Layer:
    """Attention over fixed rows behind ``start`` committed ones, in passes of any size."""

    def __init__(
        self,
        device: torch.device,
        start: int,
        rows: int,
        *,
        dim: int = 16,
        capacity: int = 0,
        module: ModuleType = attention,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.q, self.k, self.v = (
            draw(i, rows, n, dim, device=device, dtype=dtype) for i, n in ((1, 2), (2, 1), (3, 1))
        )
        self.gate = draw(4, rows, 2, dim, device=device, dtype=dtype)
        self.start, self.module, self.dim = start, module, dim
        self.cache = KV(capacity or start + rows + 16, 1, dim, device, dtype).fill(7, start)

    def restart(self) -> None:
        self.cache.row[0] = self.start

    def run(self, at: int, T: int, *, right: int | None = None) -> Tensor:
        """Rows at.. of the sequence as one pass, all behind them stale; rows from ``right`` on are another text's."""
        rows, keep = slice(at, at + T), T if right is None else right
        self.cache.poison()
        for held, written in ((self.cache.keys, self.k), (self.cache.values, self.v)):
            held[self.cache.length : self.cache.length + T] = written[rows]
            held[self.cache.length + keep : self.cache.length + T] *= -2
        return self.module.attend(
            self.q[rows], self.cache.row, kv_heads=1, scale=0.3, gate=self.gate[rows], max_length=len(self.cache.keys)
        )

    def alone(self, rows: int) -> Tensor:
        """Outputs of one row at a time."""
        out = []
        for at in range(rows):
            out.append(self.run(at, 1))
            self.cache.commit(1)
        self.restart()
        return torch.cat(out)


def check_rows_are_their_own(module: ModuleType, device: torch.device, start: int, sizes: Sequence[int]) -> None:
    layer = Layer(device, start, max(sizes), module=module)
    expected = layer.alone(max(sizes))
    for T in sizes:
        assert torch.equal(layer.run(0, T), expected[:T]), f"{T} rows from {start}"


@pytest.mark.sample
def test_rows_are_their_own(device: torch.device) -> None:
    """1 to 16 rows against one at a time, across the end of the first split and of a tile of 16 pairs."""
    check_rows_are_their_own(attention, device, 121, range(1, 17))


def test_the_first_rows_are_their_own(device: torch.device) -> None:
    check_rows_are_their_own(attention, device, 0, (2, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 121, 1000, 8185])
@pytest.mark.gpu
def test_rows_are_their_own_at_real_size(start: int, dtype: torch.dtype, device: torch.device) -> None:
    """What an interpreter cannot show: the bits of tensor cores."""
    layer = Layer(device, start, 16, dim=256, dtype=dtype)
    expected = layer.alone(16)
    for T in range(1, 17):
        assert torch.equal(layer.run(0, T), expected[:T])


def test_rotation_is_per_row(device: torch.device) -> None:
    """Queries, keys and values of 7 rows, and of the same rows one by one."""
    q, k, v = (draw(i, 7, n, 20, device=device) for i, n in ((1, 3), (2, 1), (3, 1)))
    whole, single, half = KV(9, 1, 20, device).fill(4, 2), KV(9, 1, 20, device).fill(4, 2), frequencies(4, device)
    weight = draw(5, 20, device=device)
    together = rope.rotate_and_write(q, k, v, weight, weight, 1e-6, half, whole.row)
    for t in range(7):
        one = rope.rotate_and_write(q[t : t + 1], k[t : t + 1], v[t : t + 1], weight, weight, 1e-6, half, single.row)
        single.commit(1)
        assert torch.equal(one[0], together[t])
    assert torch.equal(whole.keys, single.keys)
    assert torch.equal(whole.values, single.values)


def test_coarse_splits_begin_where_they_begin(device: torch.device) -> None:
    """Rows on both sides of the position from which splits are longer."""
    layer = Layer(device, attention.REACH.value - 1, 2)
    expected = layer.alone(2)
    assert torch.equal(layer.run(0, 2), expected)
    keys, values = (held[: layer.start + 2].double() for held in (layer.cache.keys, layer.cache.values))
    wide = attention.attend_reference(layer.q.double(), keys, values, layer.start, scale=0.3, gate=layer.gate.double())
    bound = attend_bound(layer.q.double()[:, None], keys, values, 0.3, torch.float32)
    assert (expected - wide).abs().max() <= bound


def test_splits_tile_the_positions(device: torch.device) -> None:
    """The count on the host is where the next split starts, for every length around every boundary."""
    reach, fine, coarse = (c.value for c in (attention.REACH, attention.FINE, attention.COARSE))
    starts = [*range(0, reach, fine), *range(reach, reach + 4 * coarse, coarse)]
    for split, start in enumerate(starts):
        assert attention.count_splits(start) == split
        assert attention.count_splits(start + 1) == split + 1


def test_capacity_and_programs_show_in_no_bit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, roomy = Layer(device, 400, 3), Layer(device, 400, 3, capacity=2000)
    expected = layer.run(0, 3)
    assert torch.equal(roomy.run(0, 3), expected)
    monkeypatch.setattr(attention, "PROGRAMS", 3)  # one program for all splits of a KV head
    assert torch.equal(layer.run(0, 3), expected)


def test_rejected_rows_leave_no_trace(device: torch.device) -> None:
    """Passes of some right rows and some to be rejected: the right ones have the bits of one row at a time."""
    cycles = [(0, 3), (1, 2), (3, 2), (2, 0), (5, 1)]
    layer = Layer(device, 120, 16)
    expected = layer.alone(sum(right for right, _ in cycles))
    at = 0
    for right, wrong in cycles:
        out = layer.run(at, right + wrong, right=right)
        assert torch.equal(out[:right], expected[at : at + right])
        layer.cache.commit(right)
        at += right


def check_an_unseen_split_is_empty(module: ModuleType, device: torch.device) -> None:
    """Three rows of which the last alone sees the second split: the others' sums of it are exactly nothing."""
    layer = Layer(device, 126, 3)
    layer.run(0, 3)
    sums, stats = torch.full((2, 6, 16), NAN, device=device), torch.full((2, 6, 2), NAN, device=device)
    tiles = module.tiling(sums.dtype, 16)
    launch(
        module._attend_splits,
        (1, 1, 1),
        layer.q,
        layer.cache.row,
        sums,
        stats,
        0.3,
        3,
        2,
        NKV=1,
        GROUP=2,
        D=16,
        **tiles,
    )
    assert (stats[1, :4, 0] == -torch.inf).all()
    assert (stats[1, :4, 1] == 0).all()
    assert (sums[1, :4] == 0).all()
    assert stats[1, 4:, 1].tolist() == [1.0, 1.0]


def test_an_unseen_split_is_empty(device: torch.device) -> None:
    check_an_unseen_split_is_empty(attention, device)


def test_offsets_beyond_2_to_the_31(device: torch.device) -> None:
    """Row 128 of a cache with 2^24 values per row: one KV head of it, launched by itself."""
    nkv, dim, length = 2**18, 64, 128
    q, k, v = (draw(i, 1, 1, dim, device=device, dtype=torch.bfloat16) for i in (3, 4, 5))
    keys, values = (torch.empty(130, nkv, dim, dtype=q.dtype, device=device) for _ in range(2))  # hardly touched
    keys[:length, 0] = draw(1, length, dim, device=device, dtype=torch.bfloat16)
    values[:length, 0] = draw(2, length, dim, device=device, dtype=torch.bfloat16)
    row = address_row(device, length, keys.data_ptr(), values.data_ptr(), 130)
    launch(
        rope._rotate_and_write,
        (1, 2),
        q,
        k,
        v,
        None,
        None,
        1e-6,
        frequencies(8, device),
        row,
        torch.empty_like(q),
        0,
        0,
        0,
        0,
        0,
        0,
        NQ=1,
        NKV=nkv,
        D=dim,
        HALF=8,
        Q_NORMED=False,
        K_NORMED=False,
        BLOCK_D=dim,
        num_warps=1,
    )
    assert torch.equal(values[length, :1], v[0])
    sums, stats = torch.empty(2, nkv, dim, device=device), torch.empty(2, nkv, 2, device=device)
    sums[:, 0], stats[:, 0] = NAN, NAN
    tiles = attention.tiling(q.dtype, dim)
    launch(attention._attend_splits, (2, 1, 1), q, row, sums, stats, 0.2, 1, 2, NKV=nkv, GROUP=1, D=dim, **tiles)
    scores = (keys[: length + 1, 0].double() @ q[0, 0].double()) * 0.2 * 0.6931471805599453
    expected = scores.softmax(0) @ values[: length + 1, 0].double()
    weight = torch.exp2(stats[:, 0, 0] - stats[:, 0, 0].max())
    got = (weight[:, None] * sums[:, 0]).sum(0) / (weight * stats[:, 0, 1]).sum()
    assert (got - expected).abs().max() <= 2 * EPS[torch.bfloat16] * float(values[: length + 1, 0].abs().max())


# --- mutants ----------------------------------------------------------------------------------------------------------


KILLERS = {
    "rows": lambda module, device: check_rows_are_their_own(module, device, 121, (1, 5, 10)),
    "unseen": check_an_unseen_split_is_empty,
}
MUTANTS = {
    "splits from T": (
        "rows",
        [
            (
                "last = tl.minimum(split_start(split + 1), end)",
                "last = tl.minimum(split_start(split + 1) - tl.where(T > 4, 16, 0), end)",
            ),
            (
                "range(split_start(split), last, BLOCK_N)",
                "range(split_start(split) - tl.where((T > 4) & (split > 0), 16, 0), last, BLOCK_N)",
            ),
        ],
    ),
    "a stale key is read": ("rows", [("written = (key_at < last)[:, None]", "written = (key_at < last + 1)[:, None]")]),
    "rows see later rows": (
        "rows",
        [("key_at[None, :] <= position[:, None]", "key_at[None, :] < end + 0 * position[:, None]")],
    ),
    "infinity minus infinity": ("unseen", [('tl.where(highest == float("-inf"), 0.0, highest)', "highest")]),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.filterwarnings("ignore:invalid value")  # the mutant's NaN
def test_mutants_are_killed(name: str, device: torch.device, tmp_path: pathlib.Path) -> None:
    killer, changes = MUTANTS[name]
    copy = mutated(attention, tmp_path, *changes)
    with pytest.raises(AssertionError):
        KILLERS[killer](copy, device)

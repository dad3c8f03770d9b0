"""Packed weights: the right products, the same bits for any rows and threads, and a file's pages given back.

Bounds as in ``test_native_ops``; a packed product has one accumulator, so a sum of n products is off by at most
n U sum|a b| (Higham 2002, section 4.2).
"""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from specdec.errors import ShapeError
from tests.backends.cpu.test_native_ops import U, assert_within, draw
from tests.tiny import assert_equal_bits

WORDS = st.integers(1, 150) | st.integers(500, 1100)  # 128 or 512 are summed before the next rows
SETTINGS = settings(max_examples=25, deadline=None)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which pages are a file's")


def packed(ops, *shape, seed):
    w = draw(*shape, seed=seed, dtype=ops.dtype)
    ops.pack(w)
    return w


@given(rows=st.integers(1, 30), features=st.integers(1, 100), words=WORDS, seed=st.integers(0, 2**31))
@SETTINGS
def test_products_are_right(ops, rows, features, words, seed):
    k = words * 4 // ops.dtype.itemsize
    x, w = draw(rows, k, seed=seed, dtype=ops.dtype), packed(ops, features, k, seed=seed + 1)
    residual = draw(rows, features, seed=seed + 2, dtype=ops.dtype)
    exact = x.double() @ w.double().T
    bound = (k + 2) * U * (x.double().abs() @ w.double().abs().T + residual.double().abs())
    assert_within(ops.linear(x, w, residual), exact + residual.double(), bound)
    assert_within(torch.from_numpy(ops.head(x, w).rows()), exact, bound)


@pytest.mark.parametrize(("k", "n"), [(320, 203), (2180, 40)])
def test_rows_and_threads_do_not_change_bits(ops, same_bits, k, n):
    """Catches: an order of additions that depends on the tile; a row that lands in another one's place."""
    x = draw(101, k, seed=0, dtype=ops.dtype)
    a, b, c = (packed(ops, size, k, seed=size) for size in (n, 48, 16))
    up = packed(ops, n, k, seed=7)

    def run(x):
        logits = torch.from_numpy(ops.head(x, a).rows())
        return [*ops.project(x, [a, b, c]), ops.linear(x, a), ops.swiglu(x, a, up), logits]

    same_bits(run, x)


def test_what_cannot_be_packed_is_refused(ops):
    odd = 7 if ops.dtype is torch.bfloat16 else None
    with pytest.raises(ShapeError, match="pack cannot read weight"):
        ops.pack(draw(8, odd or 8, seed=0, dtype=ops.dtype if odd else torch.float64))
    with pytest.raises(ShapeError, match="pack cannot read weight"):
        ops.pack(draw(8, 8, seed=0, dtype=ops.dtype).T[:, :4])


# --- memory-mapped weights --------------------------------------------------------------------------------------------


def mapped(folder, w):
    save_file({"w": w}, folder / "model.safetensors")
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensor = file.get_tensor("w")
    return tensor


def resident_of_file(name):
    """Resident bytes of the mappings of a file."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and not line.split(" ", 1)[0].endswith(":"):
            inside = line.endswith(name)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@LINUX
def test_mapped_weights_are_packed_and_their_pages_given_back(ops, tmp_path):
    original = draw(1000, 2048, seed=0, dtype=ops.dtype)
    w = mapped(tmp_path, original)
    name = str(tmp_path / "model.safetensors")
    assert torch.equal(w, original)
    assert resident_of_file(name) >= original.nbytes
    assert ops.weight(w) is w
    assert resident_of_file(name) < original.nbytes // 10
    again = packed(ops, 1000, 2048, seed=0)
    x = draw(2, 2048, seed=1, dtype=ops.dtype)
    assert_equal_bits(ops.linear(x, w), ops.linear(x, again))
    assert_equal_bits(ops.embed(w, [999, 3]), original[[999, 3]])
    assert torch.equal(w, original), "the plain tensor must stay valid"


def test_a_table_stays_in_its_file(ops, tmp_path):
    original = draw(1000, 2048, seed=0, dtype=ops.dtype)
    w = mapped(tmp_path, original)
    assert ops.table(w) is w
    assert ops.bytes_of(w) == w.nbytes
    assert ops._panels(w) is None
    assert_equal_bits(ops.embed(w, [999, 3]), original[[999, 3]])


@LINUX
def test_written_and_private_memory_is_left_alone(ops, tmp_path):
    """Catches: giving back pages that hold what no file holds, which would lose it."""
    own = draw(100, 64, seed=0, dtype=ops.dtype)
    written = mapped(tmp_path, own)
    written[50, 3] = 8.0  # a private mapping: the page is now memory of this process
    expected = written.clone()
    for w in (own, written):
        assert ops.weight(w) is w
    assert torch.equal(written, expected)
    x = draw(2, 64, seed=1, dtype=ops.dtype)
    ops.pack(expected)
    assert_equal_bits(ops.linear(x, written), ops.linear(x, expected))

"""Matrices that stay packed: what their parts mean, and what they decode to."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.checkpoints import StoredWeights
from specdec.checkpoints.quantised import StoredMatrix, formats_of
from tests.checkpoints.quantised import mlx_layout
from tests.checkpoints.quantised import quantisers as q
from tests.checkpoints.quantised.quantisers import NAME
from tests.checkpoints.quantised.test_quantised_decoders import assert_same_bits, drawn

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CONFIG = {
    "quantization": {"group_size": 32, "bits": 4},  # MLX's
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
KEPT = {  # quantiser -> format, and the tensors of a matrix [..., N, K] with what they mean
    "fp8-block": ("fp8-block", lambda w: q.fp8_block(w, dtype=torch.bfloat16)),
    "fp8-block e8m0": ("fp8-block", lambda w: q.fp8_block(w, name="scale", e8m0=True)),
    "nvfp4": ("nvfp4", q.nvfp4),
    "nvfp4 packed": ("nvfp4", lambda w: q.nvfp4(w, packed=True)),
    "mlx-affine": ("mlx-affine", lambda w: mlx_layout.affine(w, 4, 32, torch.bfloat16)),
}
ALL = frozenset({"fp8-block", "nvfp4", "mlx-affine"})


def weights(checkpoint, dtype=torch.float32, keeps=ALL):
    return StoredWeights(checkpoint, dtype=dtype, keeps=keeps)


@pytest.mark.parametrize("name", KEPT)
def test_parts_decode_to_the_bits_of_weights_and_mean_the_same(tmp_path, name):
    kept_as, quantise = KEPT[name]

    @given(rows=st.integers(1, 300), groups=st.integers(1, 9), seed=st.integers(0, 999))
    def check(rows, groups, seed):
        parts, _ = quantise(drawn(seed, rows, 32 * groups))
        checkpoint = q.opened(tmp_path / f"{rows}-{groups}-{seed}", parts, **CONFIG)
        for dtype in DTYPES:
            held = weights(checkpoint, dtype)
            matrix = held.matrix(NAME)
            assert isinstance(matrix, StoredMatrix)
            assert (matrix.format, matrix.shape) == (kept_as, held.shape(NAME))
            assert_same_bits(matrix.decode(), held[NAME])
        assert matrix.nbytes == sum(part.nbytes for part in matrix.parts.values())
        wanted, _ = (part.numpy() for part in q.meaning(matrix))
        np.testing.assert_allclose(held[NAME].numpy(), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())

    check()


@pytest.mark.parametrize("name", KEPT)
def test_codes_are_views_of_the_file(tmp_path, name):
    kept_as, quantise = KEPT[name]
    parts, _ = quantise(drawn(1, 140, 64))
    checkpoint = q.opened(tmp_path, parts, **CONFIG)
    matrix = weights(checkpoint).matrix(NAME)
    assert isinstance(matrix, StoredMatrix)
    codes, scale = formats_of(checkpoint)[NAME].tensors[:2]
    assert matrix.parts["codes"].data_ptr() == checkpoint.load(codes).data_ptr()
    assert kept_as == "fp8-block" or matrix.parts["scale"].data_ptr() == checkpoint.load(scale).data_ptr()


@pytest.mark.parametrize("name", KEPT)
def test_rows_of_a_matrix_are_rows_of_its_values(tmp_path, name):
    """Slices as views where they are whole blocks, rows by index where rows share no scale; decoded otherwise."""
    kept_as, quantise = KEPT[name]
    parts, _ = quantise(drawn(2, 300, 64))
    matrix = weights(q.opened(tmp_path, parts, **CONFIG)).matrix(NAME)
    assert isinstance(matrix, StoredMatrix)
    whole, blocks = matrix.decode(), matrix.meta["block_rows"]

    @given(start=st.integers(0, 299), count=st.integers(1, 300), seed=st.integers(0, 99))
    def check(start, count, seed):
        stop = min(start + count, 300)
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))[:count]
        for rows in (slice(start, stop), slice(128, stop), slice(start, None), slice(0, 256), order):
            if isinstance(rows, slice) and rows.stop is not None and rows.start >= rows.stop:
                continue
            part, wanted = matrix[rows], whole[rows]
            aligned = blocks == 1
            if blocks > 1 and isinstance(rows, slice):
                aligned = rows.start % blocks == 0 and rows.stop in (None, 128, 256, 300)
            assert isinstance(part, StoredMatrix) == aligned
            assert_same_bits(part.decode() if isinstance(part, StoredMatrix) else part, wanted)
            if isinstance(part, StoredMatrix):
                assert part.shape == tuple(wanted.shape)
                assert part.nbytes < matrix.nbytes or len(wanted) == 300

    check()
    assert kept_as != "fp8-block" or blocks == 128

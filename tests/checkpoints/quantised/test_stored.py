"""Matrices that stay packed: what their parts mean, what they decode to, and that families hand them to an Ops."""

import json

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from specdec.backends.cpu.reference import ReferenceOps
from specdec.checkpoints import Checkpoint, StoredWeights, write_checkpoint
from specdec.checkpoints.quantised import StoredMatrix, formats_of
from tests import tiny
from tests.checkpoints.quantised import mlx_layout
from tests.checkpoints.quantised import quantisers as q
from tests.checkpoints.quantised.quantisers import NAME
from tests.checkpoints.quantised.test_mlx_affine import FAMILIES, PROMPT
from tests.checkpoints.quantised.test_quantised_decoders import assert_same_bits, drawn
from tests.selection import cases

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


# --- families --------------------------------------------------------------------------------------------------------


class Recording(ReferenceOps):
    """The torch reference, which keeps formats by decoding them itself, and remembers what it was given."""

    def __init__(self, keeps):
        super().__init__(torch.float32)
        self.capabilities = attrs.evolve(self.capabilities, packed_formats=keeps)
        self.packed = []

    def weight(self, tensor):
        assert isinstance(tensor, StoredMatrix | torch.Tensor)
        if isinstance(tensor, StoredMatrix):
            self.packed.append(tensor)
            tensor = tensor.decode()
        return super().weight(tensor)

    def stack(self, tensors):
        kinds = {isinstance(tensor, StoredMatrix) for tensor in tensors}
        assert len(kinds) == 1
        return super().stack([self.weight(tensor) for tensor in tensors])


def quantised(folder, family, name):
    """A tiny checkpoint with every matrix in one format, the MTP head too where the layout has one."""
    source = tiny.WRITERS[family](folder / "source", **FAMILIES[family])
    if name == "mlx-affine":
        return mlx_layout.convert(folder, source, family)[0]
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = CONFIG["quantization_config"]
    stored = {}
    for original, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or not original.endswith(".weight") or "norm" in original:
            stored[original] = tensor
            continue
        parts, _ = KEPT[name][1](tensor.numpy())
        stored |= {original.removesuffix("weight") + suffix: part for suffix, part in parts.items()}
    tiny.write_tokenizer(write_checkpoint(folder / "stored", config, stored))
    return folder / "stored"


@pytest.mark.parametrize("name", ["fp8-block", "nvfp4", "nvfp4 packed", "mlx-affine"])
@pytest.mark.parametrize("family", cases(FAMILIES, sample=["qwen3_5", "deepseek_v3"], mark="slow"))
def test_families_hand_over_what_is_kept(tmp_path, family, name):
    """Every quantised matrix reaches ``weight`` or ``stack`` as it is stored, tables and experts too; the rest decoded.

    What is not handed over as it is: ``kv_b_proj``, which is split and turned, and a fused projection whose rows are
    put into another order, in a format in which only some rows share scales.
    """
    folder = quantised(tmp_path, family, name)
    kept_as = KEPT[name][0]
    formats = formats_of(Checkpoint.open(folder))
    reordered = ("in_proj_qkvz.weight",) if kept_as == "fp8-block" else ()
    tied = json.loads((folder / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"]
    wanted = {
        key: found
        for key, found in formats.items()
        if found.coding is not None
        and found.coding.kept_as == kept_as
        and not key.endswith(("kv_b_proj.weight", *reordered))
        and not (tied and key == "lm_head.weight")
    }
    assert {"embed_tokens.weight"} < set(wanted)
    keeping, plain = Recording(frozenset({kept_as})), Recording(frozenset())
    targets = [tiny.make_target(folder, ops=ops) for ops in (keeping, plain)]
    assert not plain.packed
    assert {matrix.format for matrix in keeping.packed} == {kept_as}
    values = sum(matrix.shape[0] * matrix.shape[1] for matrix in keeping.packed)
    assert values == sum(int(np.prod(found.shape)) for found in wanted.values())
    rows = [target.decode(target.new_state(32), PROMPT).need_logits().rows().copy() for target in targets]
    assert rows[0].std() > 0.5
    assert np.array_equal(*rows)

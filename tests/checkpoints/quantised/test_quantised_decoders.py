"""Decoders, bit for bit: against values worked out in numpy, for every code, odd shapes and cut blocks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.checkpoints import StoredWeights, TensorSpec, check_weights
from specdec.checkpoints.quantised import formats_of
from tests.checkpoints.quantised import quantisers as q
from tests.comparisons import record
from tests.tiny import assert_equal_bits


def decoded(checkpoint, dtype=torch.bfloat16, name=""):
    weights = StoredWeights(checkpoint, dtype=dtype)
    (only,) = [name] if name else list(formats_of(checkpoint))
    found = weights[only]
    assert found.dtype == dtype
    sound = check_weights(checkpoint, {only: TensorSpec(tuple(found.shape))})
    sound.raise_for_errors()
    assert (sound.missing, sound.unused, sound.non_finite) == ([], [], [])
    return found


def assert_same_bits(got, wanted):
    """Equal values, the sign of zero included; ``wanted`` is float32 and rounded once here."""
    assert_equal_bits(got, torch.as_tensor(wanted).to(got.dtype))


def drawn(seed, *shape):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, (*shape[:-1], 1))).astype(np.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", q.QUANTISERS)
def test_a_decoded_matrix_is_what_its_tensors_mean(tmp_path, name, dtype, record_property):
    @given(rows=st.integers(1, 300), groups=st.integers(1, 9), seed=st.integers(0, 999))
    def check(rows, groups, seed):
        parts, values = q.QUANTISERS[name](drawn(seed, rows, 32 * groups))
        checkpoint = q.opened(tmp_path / f"{rows}-{groups}-{seed}", parts)
        assert_same_bits(decoded(checkpoint, dtype), values)
        ((weight, found),) = formats_of(checkpoint).items()
        own = [tensor for part, tensor in parts.items() if not part.startswith("input")]
        assert (weight, found.shape) == (q.NAME, values.shape)
        assert found.stored_bytes == sum(tensor.nbytes for tensor in own)
        assert found.tensors[0] in (f"{q.X}weight", f"{q.X}weight_packed")
        assert (len(found.tensors), found.error, found.quantised) == (len(own), None, True)
        assert rows < 200 or groups < 5 or found.format == label  # a block may be larger than a small matrix

    label, variant = q.label(name)
    check()
    kind = str(dtype).removeprefix("torch.")
    record(record_property, label, "decoded weights", "a numpy table", f"{variant} to {kind}".lstrip(), 0.0)


@pytest.mark.parametrize("name", q.QUANTISERS)
def test_a_stack_of_matrices_is_decoded_as_each_of_them(tmp_path, name):
    """NVFP4 and FP8 per tensor have one scale for the whole stack here; one for each is tested below."""
    parts, values = q.QUANTISERS[name](drawn(1, 3, 70, 96))
    prefix = "model.layers.0.mlp.experts.gate_up_proj"
    renamed = {suffix.removeprefix("weight"): part for suffix, part in parts.items() if "input" not in suffix}
    renamed = {f"_{s}" if s and not s.startswith("_") else s: part for s, part in renamed.items()}
    checkpoint = q.opened(tmp_path, renamed, prefix)
    assert list(formats_of(checkpoint)) == ["layers.0.mlp.experts.gate_up_proj"]
    assert_same_bits(decoded(checkpoint), values)


def test_every_code_of_e4m3_and_negative_zero(tmp_path):
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8).view(2, 127)
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": torch.tensor([0.75])}
    got = decoded(q.opened(tmp_path, parts), torch.float32)
    assert_same_bits(got, q.e4m3_value(codes.view(torch.float8_e4m3fn)) * np.float32(0.75))
    assert_same_bits(got, codes.view(torch.float8_e4m3fn).float() * 0.75)  # torch's own cast agrees with our bits
    assert bool(torch.signbit(got[1, 0]))
    assert got[1, 0] == 0


def test_every_byte_of_e2m1_pairs_under_every_exponent_that_does_not_overflow(tmp_path):
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(16, 1)  # [256, 32 values]
    exponents = torch.arange(256, dtype=torch.uint8).clamp(max=252).view(256, 1)  # 6 * 2^(252-127) is finite
    got = decoded(q.opened(tmp_path, {"weight_packed": packed, "weight_scale": exponents}), torch.float32)
    codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], axis=-1).reshape(256, 32)
    assert_same_bits(got, q.E2M1[codes] * q.e8m0_value(exponents.numpy()))
    assert got[0, 4] == 2.0**-127  # code 2 is 1: float32's subnormals are kept


@given(rows=st.integers(1, 40), columns=st.integers(1, 90), block=st.tuples(st.integers(1, 50), st.integers(1, 50)))
def test_blocks_of_any_size_from_the_config_are_cut_at_both_edges(tmp_path_factory, rows, columns, block):
    parts, values = q.fp8_block(drawn(rows, rows, columns), block)
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    checkpoint = q.opened(tmp_path_factory.mktemp("block"), parts, quantization_config=config)
    assert_same_bits(decoded(checkpoint), values)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    group=st.integers(1, 40),
    bits=st.sampled_from([4, 8]),
    zero_points=st.booleans(),
)
def test_packed_integers_of_any_width(tmp_path_factory, rows, columns, group, bits, zero_points):
    """Rows that end inside a word, zero points whose rows do, groups that are cut; bits and group from the config."""
    parts, values = q.integers(drawn(rows, rows, columns), bits, group, zero_points=zero_points)
    scheme = {"num_bits": bits, "type": "int", "group_size": group}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": scheme}}}
    checkpoint = q.opened(tmp_path_factory.mktemp("ints"), parts, quantization_config=config)
    assert_same_bits(decoded(checkpoint), values)


def test_groups_that_are_not_consecutive(tmp_path):
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 16))
    parts, values = q.integers(drawn(3, 9, 64), 4, 16, order=order, zero_points=True)
    assert_same_bits(decoded(q.opened(tmp_path / "mixed", parts)), values)
    parts, values = q.integers(drawn(3, 9, 64), 4, 16)
    parts["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)  # how compressed-tensors says "in order"
    assert_same_bits(decoded(q.opened(tmp_path / "none", parts)), values)


def test_gpt_oss_blocks_and_scales(tmp_path):
    parts, values = q.mxfp4(drawn(5, 2, 6, 64))
    stored = {
        "_blocks": parts["weight"].view(torch.uint8).view(2, 6, 2, 16),
        "_scales": parts["scale"].view(torch.uint8),
    }
    checkpoint = q.opened(tmp_path, stored, "model.layers.0.mlp.experts.gate_up_proj")
    assert list(formats_of(checkpoint)) == ["layers.0.mlp.experts.gate_up_proj"]
    assert_same_bits(decoded(checkpoint), values)


def test_a_matrix_of_more_than_one_slab_is_decoded_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("specdec.checkpoints.quantised.stored._SLAB", 200)
    for i, (name, quantise) in enumerate(q.QUANTISERS.items()):
        parts, values = quantise(drawn(7, 150, 64))
        assert_same_bits(decoded(q.opened(tmp_path / str(i), parts)), values), name


def test_scales_of_activations_belong_to_no_weight(tmp_path):
    scales = [
        "self_attn.k_proj.k_scale",
        "self_attn.v_proj.v_scale",
        "self_attn.q_scale",
        "mlp.up_proj.input_scale",
        "mlp.experts.gate_up_proj_input_scale",
        "mlp.up_proj.input_global_scale",
    ]
    checkpoint = q.opened(tmp_path, {name: torch.ones(1) for name in scales}, "model.layers.0.")
    formats = formats_of(checkpoint)
    assert dict(formats) == {}
    assert set(formats.activation_scales) == {f"layers.0.{name}" for name in scales}
    assert check_weights(checkpoint, {}).unused == []
    wanted = check_weights(checkpoint, {"layers.0.self_attn.q_scale": TensorSpec((1,))})
    assert "q_scale" not in wanted.notices[-1]

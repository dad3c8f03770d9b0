"""Weights in MLX's affine format on MLX's own products, and models in float16.

Products are compared in float32: in a narrower dtype MLX's CPU device rounds every partial sum.
"""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.arrays import from_host  # noqa: E402
from specdec.backends.metal.ops import MetalOps  # noqa: E402
from specdec.backends.metal.quantised import PACKED_FORMATS, PackedMatrix  # noqa: E402
from specdec.backends.ops import Routing  # noqa: E402
from specdec.checkpoints import Checkpoint, StoredWeights, write_checkpoint  # noqa: E402
from specdec.checkpoints.quantised import StoredMatrix  # noqa: E402
from specdec.config import RunConfig, TargetConfig  # noqa: E402
from specdec.models.loading import load_target  # noqa: E402
from specdec.models.parity import probe_rows  # noqa: E402
from tests import tiny  # noqa: E402
from tests.backends import families  # noqa: E402
from tests.backends.metal.test_metal_families import exact  # noqa: E402
from tests.backends.oracle import silu, to_host  # noqa: E402
from tests.checkpoints.quantised import mlx_layout  # noqa: E402
from tests.checkpoints.quantised.test_mlx_affine import FAMILIES, PROMPT  # noqa: E402
from tests.selection import cases  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16")


class Stack:
    """Random matrices ``[E, N, K]`` as a checkpoint has them, and their values in float64."""

    def __init__(self, folder, shape, bits, group, dtype, seed):
        weight = np.random.default_rng(seed).standard_normal(shape) * shape[-1] ** -0.5
        parts, values = mlx_layout.affine(weight.astype(np.float32), bits, group, getattr(torch, dtype))
        self.values = values.astype(np.float64)
        config = {"quantization": {"bits": bits, "group_size": group}}
        checkpoint = Checkpoint.open(write_checkpoint(folder, config, {f"x.{name}": p for name, p in parts.items()}))
        held = StoredWeights(checkpoint, dtype=torch.float32, keeps=PACKED_FORMATS)
        self.matrices = held.matrices("x.weight")
        assert all(isinstance(matrix, StoredMatrix) for matrix in self.matrices)


def close(got, wanted, dtype="float32", terms=0.0):
    """Within rounding of the largest value, or of the terms that it is a sum of."""
    got = to_host(got)
    assert got.shape == wanted.shape
    size = max(np.abs(wanted).max(initial=1e-6), np.max(terms))
    assert np.abs(got - wanted).max() <= {"float32": 1e-5, "float16": 0.006, "bfloat16": 0.04}[dtype] * size


@pytest.mark.parametrize("bits", cases([2, 3, 4, 5, 6, 8], sample=("3", "4"), mark="slow"))
def test_every_product_has_the_values_of_the_decoded_weight(tmp_path_factory, bits):
    @given(
        rows=st.integers(1, 19),
        features=st.integers(4, 40),
        groups=st.integers(1, 4),
        seed=st.integers(0, 2**20),
        group=st.sampled_from([32, 64, 128]),
        dtype=st.sampled_from(DTYPES),
        stored=st.sampled_from(DTYPES),
    )
    def check(rows, features, groups, seed, group, dtype, stored):
        ops = MetalOps(getattr(mx, dtype))
        length, experts, rng = groups * group, 3, np.random.default_rng(seed)
        stack = Stack(tmp_path_factory.mktemp("x"), (experts, features, length), bits, group, stored, seed)
        w, up, _ = stack.values
        given_x = from_host(torch.from_numpy(rng.standard_normal((rows, length)).astype(np.float32)), ops.dtype)
        x = to_host(given_x).astype(np.float64)
        matrix, other = (ops.weight(one) for one in stack.matrices[:2])
        assert isinstance(matrix, PackedMatrix)
        assert matrix.shape == (features, length)
        size = np.abs(x) @ np.abs(w).T
        close(ops.linear(given_x, matrix), x @ w.T, dtype, size)
        close(ops.project(given_x, (matrix, other))[1], x @ up.T, dtype, size)
        close(ops.swiglu(given_x, matrix, other), silu(x @ w.T) * (x @ up.T), dtype, size * size)
        close(ops.head(given_x, matrix).rows(), x @ w.T, dtype, size)
        tokens = rng.integers(0, features, rows).tolist()
        got = ops.embed(matrix, tokens)
        wanted = torch.from_numpy(w[tokens]).float().to(getattr(torch, dtype)).double().numpy()
        assert np.array_equal(to_host(got), wanted)  # a row is decoded as the loader decodes
        ids, weights = ops.route(given_x, matrix, Routing(top_k=2, scores="softmax", normalised=False))
        scores = np.exp(x @ w.T - (x @ w.T).max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
        close(weights, np.take_along_axis(scores, to_host(ids).astype(int), 1))  # not rounded to act
        each = from_host(torch.from_numpy(rng.standard_normal((rows, experts * length)).astype(np.float32)), ops.dtype)
        each = each.reshape(rows, experts, length)
        by_head = np.stack([to_host(each)[:, h] @ stack.values[h].T for h in range(experts)], axis=1)
        close(ops.project_heads(each, ops.stack(stack.matrices)), by_head, dtype, size)
        some = rng.choice(features, 2, replace=False).tolist()
        gathered = ops.head_rows(matrix, some[:1])
        gathered = ops.head_rows(matrix, some, gathered)
        assert isinstance(gathered.parts[0], PackedMatrix)
        pruned = to_host(ops.pruned_head(given_x, gathered).rows())
        close(pruned[:, some], (x @ w.T)[:, some], dtype, size)
        assert np.isneginf(np.delete(pruned, some, axis=1)).all()

    check()


def test_a_size_without_a_product_is_decoded(tmp_path):
    stack = Stack(tmp_path, (2, 12, 48), 4, 16, "float32", 0)  # groups of 16, which MLX does not have
    ops = MetalOps(mx.float32)
    assert np.array_equal(np.array(ops.weight(stack.matrices[0])), stack.values[0].astype(np.float32))
    assert np.array_equal(np.array(ops.stack(stack.matrices)), stack.values.astype(np.float32))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """``converted(family, dtype)``: a checkpoint as mlx-lm writes it, and its twin."""

    @functools.cache
    def get(family, dtype="float32"):
        folder = tmp_path_factory.mktemp(family)
        source = tiny.WRITERS[family](folder / "source", **FAMILIES[family])
        return mlx_layout.convert(folder, source, family, dtype=getattr(torch, dtype))

    return get


@pytest.mark.parametrize("family", cases(FAMILIES, sample=("qwen3_5", "deepseek_v3"), mark="slow"))
def test_a_packed_model_has_the_logits_of_its_twin(converted, family):
    """The twin decoded, on the torch reference; a prompt, and passes of several rows and of one behind it."""
    folder, twin = converted(family)
    target = tiny.make_target(folder, ops=MetalOps(mx.float32))
    model = target.model
    assert isinstance(model.lm_head, PackedMatrix)
    assert isinstance(model.embed_tokens, PackedMatrix)
    held = sum(part.nbytes for part in model.embed_tokens.parts())
    assert held < 4 * model.embed_tokens.shape[0] * model.embed_tokens.shape[1] / 2.5  # and not decoded beside
    families.check_logits(target, tiny.make_target(twin), 2e-4)


@exact
@pytest.mark.parametrize("dtype", cases(DTYPES, sample=("bfloat16",), mark="slow"))
@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v3"])
def test_rows_have_the_same_bits_in_any_company(converted, family, dtype):
    mlx, _ = converted(family, dtype)
    assert probe_rows(tiny.make_target(mlx, dtype=dtype, ops=MetalOps(getattr(mx, dtype)))) is None


# --- float16 ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_in_float16_runs_in_float16(tmp_path):
    folder = tiny.write_qwen3_5(tmp_path / "f16", dtype="float16")
    loaded = load_target(RunConfig(target=TargetConfig(model=str(folder), backend="metal")))
    assert (loaded.target.info.dtype, loaded.target.info.dtype_reason) == (
        "float16",
        "auto: the checkpoint is stored in float16",
    )
    state = loaded.target.new_state(64)
    loaded.target.prefill(state, PROMPT)
    taken = loaded.target.snapshot(state)
    wanted = loaded.target.decode(state, [7, 8]).need_logits().rows().copy()
    again = loaded.target.restore(taken)
    assert np.array_equal(loaded.target.decode(again, [7, 8]).need_logits().rows(), wanted)
    loaded.target.commit(state, 1)
    assert len(tiny.plain_run(loaded.target, PROMPT, 4)) == 4

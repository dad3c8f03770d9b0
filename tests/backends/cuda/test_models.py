"""Models on the backend: the reference's logits, and speculation with the tokens and the bits of plain decoding.

Without a CUDA device the kernels are interpreted and models are tiny; the tests of the marker ``gpu`` run the same over
larger ones, in bfloat16.
"""

import functools
import importlib
import pathlib

import numpy as np
import pytest
import torch

from specdec.backends.cpu.reference import ReferenceOps
from specdec.backends.cuda import memory
from specdec.backends.cuda.ops import CudaOps
from specdec.models.loading import build_target
from specdec.testing.random_weights import RandomWeights
from tests import tiny, tiny_families
from tests.backends import families
from tests.backends.families import VOCAB
from tests.decoding.test_lossless import mtp

pytestmark = pytest.mark.interpreter

ATTENTION = tiny.shape("hidden=32 heads=2 kv_heads=1 head_dim=16")
DENSE = ATTENTION | tiny.shape("intermediate=40 layers=1")
TINY = {
    "qwen3_5": ATTENTION
    | tiny.shape(
        "intermediate=32 key_heads=1 value_heads=2 key_dim=16 value_dim=16",
        layer_types=["linear_attention", "full_attention"],
    ),
    "llama": DENSE,
    "granite": {**DENSE, "keys": {"residual_multiplier": 0.22}},
    "ministral3": {**DENSE, "keys": tiny_families.yarn_parameters(3, 8.0, llama_4_scaling_beta=0.5)},
    "olmo2": DENSE,
    "smollm3": {**DENSE, "layers": 2, "keys": {"no_rope_layers": [1, 0]}},
    "qwen3_5_moe": ATTENTION | tiny.shape("inner=16 shared=16 experts=4", mtp=False, layer_types=["full_attention"]),
    "deepseek_v3": tiny.shape(
        "hidden=32 heads=2 layers=1 dense_layers=0 inner=16 experts=4 top_k=2 groups=2 kept_groups=1"
    ),
}
PROMPT = (3, 1)
CAPACITY = 64
GENERATED = 6


@pytest.fixture(autouse=True)
def _short_caches(monkeypatch):
    """A graph's grid is for as many keys as a cache holds at first; the interpreter pays for every program of it."""
    monkeypatch.setattr(memory, "FIRST_ROWS", 64)


@pytest.fixture(scope="module")
def build(checkpoint, new_device):
    """``build(family, eager=False, dtype="float32")``: a target on the device, shared by all tests."""

    @functools.cache
    def get(family, *, eager=False, dtype="float32", **settings):
        folder = checkpoint(family, **{**TINY.get(family, {}), **settings})
        ops = CudaOps(new_device(), getattr(torch, dtype), eager_reason="asked for" if eager else "")
        return tiny.make_target(folder, dtype=dtype, ops=ops)

    return get


def test_a_family_with_learned_positions_and_no_rotation(new_device, monkeypatch):
    """Captured passes at any length have the bits of eager ones, and the reference's numbers."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[3] / "plugins" / "specdec-gpt2"))
    [spec] = importlib.import_module("specdec_gpt2").specdec_models()
    config = spec.parse({"vocab_size": 40, "n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": CAPACITY})

    def rows_of(ops):
        target = build_target(spec, config, RandomWeights(ops, None), dtype="float32")
        state = target.new_state(CAPACITY)
        target.prefill(state, list(range(18)))  # longer than a captured pass
        found = []
        for tokens, kept in (([5, 9, 2], 2), ([7, 7, 1], 3), ([4], 1)):
            found.append(target.decode(state, tokens).need_logits().rows().copy())
            target.commit(state, kept)
        return found

    captured, eager = (rows_of(CudaOps(new_device(), torch.float32, eager_reason=why)) for why in ("", "asked for"))
    for ours, plain, wanted in zip(captured, eager, rows_of(ReferenceOps(torch.float32)), strict=True):
        assert np.abs(ours - wanted).max() <= 1e-4 * np.abs(wanted).max()
        assert (ours == plain).all()


@pytest.mark.parametrize("family", TINY)
def test_logits_and_hidden_states_are_those_of_the_torch_reference(build, checkpoint, family):
    families.check_logits(build(family), tiny.make_target(checkpoint(family, **TINY[family])), 2e-4)


CASES = [("qwen3_5", True, 1), *((family, False, 3) for family in TINY)]
SLOW = [("qwen3_5", False, 0), ("deepseek_v3", True, 3), ("qwen3_5", False, 7)]


@pytest.mark.parametrize(
    ("family", "eager", "depth"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_any_draft_leaves_the_tokens_and_the_state_of_plain_decoding(build, checkpoint, family, eager, depth):
    """By graph and op by op."""
    target, folder = build(family, eager=eager), checkpoint(family, **TINY[family])
    families.check_drafter(folder, target, PROMPT, mtp, [depth], (1, 0, 2), GENERATED)


def test_sampling_with_a_seed_gives_the_tokens_of_plain_sampling(build, checkpoint):
    target, folder = build("qwen3_5"), checkpoint("qwen3_5", **TINY["qwen3_5"])
    first, other = (
        families.check_drafter(folder, target, PROMPT, mtp, [3], count=GENERATED, temperature=0.8, seed=seed)
        for seed in (2**40 + 7, 1)
    )
    assert first != other


def test_sessions_fork_save_and_load(build, checkpoint, tmp_path):
    folder = checkpoint("qwen3_5", **TINY["qwen3_5"])
    families.check_sessions(build("qwen3_5"), folder, PROMPT, (3, 3), tmp_path / "session.safetensors")


# --- on a device -----------------------------------------------------------------------------------------------------

LARGER = {
    "qwen3_5": tiny.shape(
        "hidden=256 heads=4 kv_heads=2 head_dim=64 key_heads=2 value_heads=4 key_dim=128 value_dim=128 "
        "intermediate=512 vocab=4099"
    ),
    "llama": tiny.shape("hidden=256 heads=8 kv_heads=2 head_dim=64 intermediate=768 layers=3"),
    "qwen3_5_moe": tiny.shape("hidden=256 heads=4 kv_heads=1 head_dim=64 inner=128 shared=128 experts=16 top_k=4"),
    "deepseek_v3": {"hidden": 256},
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", LARGER)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_on_a_device_any_draft_leaves_the_tokens_and_the_state_of_plain_decoding(
    build, checkpoint, family, dtype, sampled
):
    """64 tokens, drafts of 0, 1, 3 and 7, by graph and op by op, which all agree."""
    folder = checkpoint(family, **{**TINY.get(family, {}), **LARGER[family]})
    settings = {"temperature": 0.7, "seed": 11} if sampled else {}
    prompt = [(11 * i + 5) % VOCAB for i in range(40)]
    found = {
        tuple(families.check_drafter(folder, target, prompt, mtp, [depth], count=64, **settings))
        for target in (build(family, eager=eager, dtype=dtype, **LARGER[family]) for eager in (False, True))
        for depth in (0, 1, 3, 7)
    }
    assert len(found) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("family", LARGER)
def test_on_a_device_logits_are_those_of_the_torch_reference(build, checkpoint, family):
    folder = checkpoint(family, **{**TINY.get(family, {}), **LARGER[family]})
    families.check_logits(build(family, **LARGER[family]), tiny.make_target(folder), 2e-3)

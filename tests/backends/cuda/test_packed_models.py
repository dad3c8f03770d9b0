"""Quantised checkpoints stay packed on the way through a family's builder: values, bits, tokens and memory."""

import functools

import numpy as np
import pytest
import torch

from specdec.backends.cuda import memory
from specdec.backends.cuda.ops import CudaOps
from specdec.backends.cuda.weights import Fp8BlockWeight, Nvfp4Weight
from tests import tiny
from tests.backends.cuda.test_models import CAPACITY, GENERATED, PROMPT, TINY
from tests.backends.families import VOCAB, check_drafter
from tests.checkpoints.quantised import quantisers
from tests.checkpoints.quantised.test_quantised_models import matrix, split
from tests.decoding.test_lossless import mtp

pytestmark = pytest.mark.interpreter

# family -> format of every matrix but the embedding, the holder, and the most bytes of its float32 matrices that it has
STORED = {
    "qwen3_5": ("fp8-block 16x16", Fp8BlockWeight, 0.26),
    "qwen3_5_moe": ("nvfp4", Nvfp4Weight, 0.18),
    "deepseek_v3": ("nvfp4 packed", Nvfp4Weight, 0.18),
}
BLOCK = (16, 16)  # of the FP8 weights: several in a matrix
ALIKE = {"qwen3_5_moe": {"layouts": ("apart",)}}


class Counted(CudaOps):
    """Ops that remember the weights that they made."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.made = []

    def weight(self, tensor):
        self.made.append(super().weight(tensor))
        return self.made[-1]


@pytest.fixture(autouse=True)
def _short_caches(monkeypatch):
    monkeypatch.setattr(memory, "FIRST_ROWS", 64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """``folders(family)``: a quantised checkpoint, and the same with its weights decoded."""

    @functools.cache
    def get(family):
        folder, form = tmp_path_factory.mktemp(family), STORED[family][0]
        source = tiny.WRITERS[family](folder / "source", **TINY[family], **ALIKE.get(family, {}), dtype="float32")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(quantisers.QUANTISERS, "fp8-block 16x16", lambda w: quantisers.fp8_block(w, BLOCK))
            return split(
                folder,
                source,
                lambda name: form if matrix(name) and not _looked_up(name) else None,
                torch.float32,
                **({"quant_method": "fp8", "weight_block_size": BLOCK} if "fp8" in form else {}),
            )

    return get


def _looked_up(name):
    """Rows are taken from it, or its values are wanted in float32: decoded in any case."""
    return "embed_tokens" in name or name.endswith((".gate.weight", "shared_expert_gate.weight", "_bias"))


@pytest.fixture(scope="module")
def built(folders, new_device):
    """``built(family)``: a target over the packed weights."""
    return functools.cache(
        lambda family: tiny.make_target(folders(family)[0], ops=Counted(new_device(), torch.float32))
    )


@pytest.mark.parametrize("family", STORED)
def test_a_packed_model_is_its_decoded_twin_in_less_memory(built, folders, family):
    """A prompt in bulk, which decodes matrix by matrix, and passes of three rows and one by the kernels."""
    tokens = [(7 * i + 3) % VOCAB for i in range(22)]
    found = []
    for target in (built(family), tiny.make_target(folders(family)[1])):
        state = target.new_state(CAPACITY)
        target.prefill(state, tokens[:18])
        rows = [target.decode(state, tokens[18:21]).need_logits().rows().copy()]
        target.commit(state, 3)
        rows.append(target.decode(state, tokens[21:]).need_logits().rows().copy())
        found.append(np.concatenate(rows))
    assert np.ptp(found[1]) > 5
    assert np.abs(found[0] - found[1]).max() <= 5e-4
    _, holder, most = STORED[family]
    packed = [weight for weight in built(family).ops.made if isinstance(weight, holder)]
    assert len(packed) >= 7
    decoded = sum(4 * weight.shape[0] * weight.shape[1] for weight in packed)
    assert sum(weight.nbytes for weight in packed) <= most * decoded


@pytest.mark.parametrize("family", list(STORED)[:2])  # a format each
def test_speculation_over_packed_weights_is_that_of_plain_decoding(built, folders, family):
    check_drafter(folders(family)[0], built(family), PROMPT, mtp, [3], (1, 0, 2), GENERATED)

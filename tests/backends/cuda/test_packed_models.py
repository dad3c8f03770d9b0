"""Quantised checkpoints stay packed on the way through a family's builder: values, bits and tokens."""

import functools

import pytest
import torch

from specdec.backends.cuda.ops import CudaOps
from specdec.backends.cuda.weights import Fp8BlockWeight, Nvfp4Weight
from tests import tiny
from tests.backends import families
from tests.backends.cuda.test_models import GENERATED, PROMPT, TINY, _short_caches
from tests.checkpoints.quantised import quantisers
from tests.checkpoints.quantised.test_quantised_models import matrix, split
from tests.decoding.test_lossless import mtp

__all__ = ["_short_caches"]  # a fixture
pytestmark = pytest.mark.interpreter

# family -> format of every matrix but the embedding, and the holder
STORED = {
    "qwen3_5": ("fp8-block 16x16", Fp8BlockWeight),
    "qwen3_5_moe": ("nvfp4", Nvfp4Weight),
    "deepseek_v3": ("nvfp4 packed", Nvfp4Weight),
}
BLOCK = (16, 16)  # of the FP8 weights: several in a matrix
ALIKE = {"qwen3_5_moe": {"layouts": ("apart",)}}


class Counted(CudaOps):
    """Ops that remember the kinds of the weights that they made."""

    def weight(self, tensor):
        made = super().weight(tensor)
        self.__dict__.setdefault("kinds", []).append(type(made))
        return made


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
def test_a_packed_model_is_its_decoded_twin(built, folders, family):
    """A prompt in bulk, which decodes matrix by matrix, and passes of three rows and one by the kernels."""
    assert built(family).ops.kinds.count(STORED[family][1]) >= 7
    families.check_logits(built(family), tiny.make_target(folders(family)[1]), 5e-4)


@pytest.mark.parametrize("family", list(STORED)[:2])  # a format each
def test_speculation_over_packed_weights_is_that_of_plain_decoding(built, folders, family):
    families.check_drafter(folders(family)[0], built(family), PROMPT, mtp, [3], (1, 0, 2), GENERATED)

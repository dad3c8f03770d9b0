"""A dry run of ``build`` and a real one take the same tensors, and a family's config is complete."""

import pytest

from specdec.backends.cpu.reference import ReferenceOps
from specdec.checkpoints import Checkpoint, StoredWeights, text_config
from specdec.models.loading import family_of
from specdec.models.weights import Weights, dry_run
from tests import tiny
from tests.tiny_families import SHAPES

ALL = {**SHAPES, "qwen3_5": tiny.QWEN3_5_SHAPES, "qwen3": tiny.QWEN3_SHAPES}


class Watched(StoredWeights):
    """Weights that note what is read."""

    def __init__(self, checkpoint):
        super().__init__(checkpoint)
        self.read = set()

    def _found(self, name):
        self.read.add(name)
        return super()._found(name)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, shapes in ALL.items() for name in shapes])
def test_a_real_build_reads_what_the_dry_run_took(family, name, checkpoint):
    folder = checkpoint(family, **ALL[family][name])
    opened = Checkpoint.open(folder)
    spec, config = family_of(text_config(opened.config), folder)
    dry = dry_run(spec, config, StoredWeights(opened))
    real = Watched(opened)
    ops = ReferenceOps(tiny.torch.float32)
    spec.build(config, Weights(ops, real))
    assert real.read == set(dry.tensors)
    assert {name: real.shape(name) for name in dry.tensors} == {name: spec.shape for name, spec in dry.tensors.items()}

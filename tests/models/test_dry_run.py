"""A dry run of ``build`` and a real one take the same tensors, and a family's config is complete."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from specdec.backends.cpu.reference import ReferenceOps
from specdec.checkpoints import Checkpoint, StoredWeights, text_config
from specdec.contract import ModelSpec
from specdec.errors import ContractError
from specdec.models import DecoderLayer, DecoderModel
from specdec.models.loading import build_target, family_of
from specdec.models.weights import Weights, dry_run
from specdec.registry import registry
from tests import tiny
from tests.tiny_families import SHAPES

ALL = {**SHAPES, "qwen3_5": tiny.QWEN3_5_SHAPES, "qwen3": tiny.QWEN3_SHAPES}


class Watched(StoredWeights):
    """Weights that note what is read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.read: set[str] = set()

    def _found(self, name: str) -> Any:
        self.read.add(name)
        return super()._found(name)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, shapes in ALL.items() for name in shapes])
def test_a_real_build_reads_what_the_dry_run_took(
    family: str, name: str, checkpoint: Callable[..., pathlib.Path]
) -> None:
    folder = checkpoint(family, **ALL[family][name])
    opened = Checkpoint.open(folder)
    spec, config = family_of(text_config(opened.config), folder)
    dry = dry_run(spec, config, StoredWeights(opened))
    real = Watched(opened)
    ops: Any = ReferenceOps(tiny.torch.float32)
    spec.build(config, Weights(ops, real))
    assert real.read == set(dry.tensors)
    assert {name: real.shape(name) for name in dry.tensors} == {name: spec.shape for name, spec in dry.tensors.items()}


def test_a_config_of_a_family_that_lacks_fields_is_refused_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    @attrs.frozen
    class Half:
        vocab_size: int = 300
        hidden_size: int = 8
        layers: int = 1
        max_positions: int = 64

    spec = ModelSpec(
        name="half", model_types=("half",), parse=lambda config: Half(), build=lambda config, weights: None
    )
    monkeypatch.setattr(type(registry()), "model", lambda self, model_type, asked_by=None: spec)
    with pytest.raises(ContractError, match="as Half, which lacks mtp_layers, tied, expert_share, state_bytes"):
        family_of({"model_type": "half"}, pathlib.Path())


def test_a_family_that_builds_half_a_model_is_refused_with_everything_it_lacks() -> None:
    class NoCache:
        def __call__(self, x: Any, residual: Any, cache: Any) -> Any:
            return x

    def load(build: Any) -> None:
        spec = ModelSpec(name="half", model_types=("half",), parse=lambda config: config, build=build)
        config: Any = SimpleNamespace(vocab_size=4, hidden_size=4, max_positions=9, mtp_layers=0)
        build_target(spec, config, Weights(ReferenceOps(tiny.torch.float32), None))

    def model(config: Any, weights: Weights, *, layers: int = 1) -> DecoderModel:
        mixer: Any = NoCache()
        broken: Any = None
        layer = DecoderLayer(input_norm=abs, mixer=mixer, post_norm=abs, mlp=broken)  # type: ignore[arg-type]
        return DecoderModel(ops=weights.ops, embed_tokens=0, layers=(layer,) * layers, norm=broken, lm_head=0)

    with pytest.raises(
        ContractError, match=r"lacks norm.__call__, layers\[0\].mlp.__call__, layers\[0\].mixer.new_cache"
    ):
        load(model)
    with pytest.raises(ContractError, match="'half' builds int"):
        load(lambda config, weights: 5)

"""Wrong model families: each changes a part of ``llama``."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from specdec.backends.batching import BatchingOps
from specdec.models.causal_lm import DecoderModel
from specdec.registry import Registry

RIGHT = Registry().model("llama")


class Family:
    """A family of class methods; the broken ones override one."""

    @classmethod
    def parse(cls, raw):
        return RIGHT.parse(raw)

    @classmethod
    def build(cls, config, weights):
        return RIGHT.build(config, weights)

    @classmethod
    def spec(cls):
        return attrs.evolve(RIGHT, name=cls.__name__, parse=cls.parse, build=cls.build)


class FillsInDefaults(Family):
    @classmethod
    def parse(cls, raw):
        if isinstance(raw, dict):
            raw.setdefault("attention_bias", False)
        return super().parse(raw)


class NumpySizes(Family):
    @classmethod
    def parse(cls, raw):
        config = super().parse(raw)
        return attrs.evolve(config, vocab_size=np.int64(config.vocab_size))


class HalfTheState(Family):
    @classmethod
    def parse(cls, raw):
        config = super().parse(raw)
        halved = type("Halved", (type(config),), {"state_bytes": cls.state_bytes})
        return halved(**attrs.asdict(config, recurse=False))

    @staticmethod
    def state_bytes(config, width, *, mtp=True):
        return config.layers * config.attention.row * width // 2, 0


class TakesAnyActivation(Family):
    @classmethod
    def parse(cls, raw):
        return super().parse({**raw, "hidden_act": "silu"})


class BuildsOnce(Family):
    built: DecoderModel | None = None

    @classmethod
    def build(cls, config, weights):
        if not isinstance(weights.ops, BatchingOps):  # a dry run
            return super().build(config, weights)
        cls.built = cls.built or super().build(config, weights)
        return cls.built


class PositionsOfThePass(Family):
    class Model(DecoderModel):
        def embed(self, tokens, position):
            return super().embed(tokens, 0)

    @classmethod
    def build(cls, config, weights):
        model = super().build(config, weights)
        made = cls.Model(**attrs.asdict(model, recurse=False))
        return attrs.evolve(made, positions=torch.linspace(-1, 1, 64 * config.hidden_size).view(64, -1))


class NamesOfTheFile(Family):
    """Asks for tensors by their names in the file; ``model.`` is stripped from them."""

    @classmethod
    def build(cls, config, weights):
        return super().build(config, weights.under("model."))


BROKEN = {
    FillsInDefaults: "M1",
    NumpySizes: "M2",
    HalfTheState: "M3",
    TakesAnyActivation: "M4",
    BuildsOnce: "M5",
    PositionsOfThePass: "M6",
    NamesOfTheFile: "M7",
}

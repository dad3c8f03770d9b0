"""Model families over Ops: ``decoder.py`` has the building blocks, ``qwen3_5.py`` and others assemble them.

The names below are what a family is written with; ``build`` of a ``ModelSpec`` returns a ``DecoderModel``.
"""

from __future__ import annotations

from specdec.models.causal_lm import DecoderModel
from specdec.models.decoder import DecoderLayer, GatedMlp, Layer, LayerNorm, Mixer, Mlp, Norm, RmsNorm
from specdec.models.fields import Fields
from specdec.models.weights import Weights, dry_run

__all__ = [
    "DecoderLayer",
    "DecoderModel",
    "Fields",
    "GatedMlp",
    "Layer",
    "LayerNorm",
    "Mixer",
    "Mlp",
    "Norm",
    "RmsNorm",
    "Weights",
    "dry_run",
]

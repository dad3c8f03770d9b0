"""Quantised checkpoints: detect each weight's format from the files and decode the weight on load."""

from specdec.checkpoints.quantised.cache import DecodedCache
from specdec.checkpoints.quantised.coding import decode
from specdec.checkpoints.quantised.formats import Formats, TensorFormat, formats_of
from specdec.checkpoints.quantised.hints import declared_packed, quantisation
from specdec.checkpoints.quantised.parts import FLOATS
from specdec.checkpoints.quantised.rounding import BITS as ROUNDED_BITS
from specdec.checkpoints.quantised.rounding import GROUP as ROUNDED_GROUP
from specdec.checkpoints.quantised.rounding import rounded, rounds
from specdec.checkpoints.quantised.stored import StoredMatrix, alike

__all__ = [
    "FLOATS",
    "ROUNDED_BITS",
    "ROUNDED_GROUP",
    "DecodedCache",
    "Formats",
    "StoredMatrix",
    "TensorFormat",
    "alike",
    "declared_packed",
    "decode",
    "formats_of",
    "quantisation",
    "rounded",
    "rounds",
]

"""Quantised checkpoints: detect each weight's format from the files and decode the weight on load."""

from specdec.checkpoints.quantised.cache import DecodedCache
from specdec.checkpoints.quantised.coding import Coding, Format, check, decode
from specdec.checkpoints.quantised.formats import FORMATS, Formats, TensorFormat, formats_of
from specdec.checkpoints.quantised.hints import Hints, quantisation
from specdec.checkpoints.quantised.parts import FLOATS
from specdec.checkpoints.quantised.stored import StoredMatrix, alike

__all__ = [
    "FLOATS",
    "FORMATS",
    "Coding",
    "DecodedCache",
    "Format",
    "Formats",
    "Hints",
    "StoredMatrix",
    "TensorFormat",
    "alike",
    "check",
    "decode",
    "formats_of",
    "quantisation",
]

"""Checkpoints: finding a folder, reading its tensors without copying them, naming them alike, and auditing them.

The order of use is ``locate`` -> ``Checkpoint.open`` -> ``audit`` -> ``Weights``. Nothing is unpickled and no code of a
checkpoint runs.
"""

from specdec.checkpoints.audit import Audit, TensorSpec, Weights, audit
from specdec.checkpoints.fingerprint import fingerprint
from specdec.checkpoints.locate import locate
from specdec.checkpoints.names import Names, canonical_name, canonical_names, is_ignored, text_config
from specdec.checkpoints.reader import Checkpoint, holds_weights, read_json
from specdec.checkpoints.writer import write_checkpoint

__all__ = [
    "Audit",
    "Checkpoint",
    "Names",
    "TensorSpec",
    "Weights",
    "audit",
    "canonical_name",
    "canonical_names",
    "fingerprint",
    "holds_weights",
    "is_ignored",
    "locate",
    "read_json",
    "text_config",
    "write_checkpoint",
]

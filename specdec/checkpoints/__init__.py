"""Checkpoints: find a folder, memory-map its tensors, give them canonical names and check the weights.

Nothing is unpickled, and no code from a checkpoint runs.
"""

from specdec.checkpoints.heads import join_head, unlisted_head
from specdec.checkpoints.locate import locate
from specdec.checkpoints.names import canonical_name, canonical_names, text_config
from specdec.checkpoints.opening import naming_keys, open_checkpoint
from specdec.checkpoints.reader import Checkpoint, fingerprint, holds_weights, read_json
from specdec.checkpoints.weight_check import TensorSpec, WeightCheck, check_weights
from specdec.checkpoints.weights import StoredWeights
from specdec.checkpoints.writer import write_checkpoint

__all__ = [
    "Checkpoint",
    "StoredWeights",
    "TensorSpec",
    "WeightCheck",
    "canonical_name",
    "canonical_names",
    "check_weights",
    "fingerprint",
    "holds_weights",
    "join_head",
    "locate",
    "naming_keys",
    "open_checkpoint",
    "read_json",
    "text_config",
    "unlisted_head",
    "write_checkpoint",
]

"""Hash a checkpoint without reading all of it."""

from __future__ import annotations

import hashlib
import json

import torch

from specdec.checkpoints.reader import Checkpoint

SAMPLED = 256  # values from each end of a tensor


def fingerprint(checkpoint: Checkpoint) -> str:
    """Hash config.json, every tensor's name, shape and dtype, and the values at both ends of each tensor.

    Fine-tuning changes every tensor, so the ends are enough; a full hash would read gigabytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(checkpoint.config, sort_keys=True).encode())
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.load(name).flatten()
        digest.update(f"{name} {checkpoint.tensors[name].shape} {checkpoint.dtype(name)}".encode())
        for part in (tensor[:SAMPLED], tensor[-SAMPLED:]):
            digest.update(bytes(part.contiguous().view(torch.uint8).numpy()))
    return digest.hexdigest()

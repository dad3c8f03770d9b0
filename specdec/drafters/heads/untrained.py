"""An untrained head for a target: what drafting costs can be measured before a head is trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from specdec.backends.ops import Rope
from specdec.checkpoints import Checkpoint, write_checkpoint
from specdec.contract import ModelInfo
from specdec.drafters.heads.describe import builder
from specdec.drafters.heads.files import DFLASH, DSPARK, EAGLE, HeadFiles
from specdec.drafters.heads.layout import Geometry, Layout, States
from specdec.models.decoder import AttentionShape
from specdec.models.weights import NoOps, Recorder

HEAD_DIM, BLOCK, RANK = 64, 8, 16


def untrained(
    folder: Path, kind: str, info: ModelInfo, layer_ids: str, fed_back: str, *, seed: int = 0
) -> tuple[HeadFiles, Layout]:
    """Write a head of this kind with random weights: one layer, the target's vocabulary; overrides as for a layout."""
    hidden = info.hidden_size
    dim = min(HEAD_DIM, 2 * max(1, hidden // 2))
    heads = max(1, hidden // dim)
    ids = tuple(sorted({min(k, info.layers) for k in (2, info.layers // 2, max(info.layers - 3, 0))}))
    attention = AttentionShape(heads=heads, kv_heads=heads, head_dim=dim, rope=Rope.of(1e4, dim), scale=dim**-0.5)
    refined = kind == DSPARK
    layout = Layout(
        kind=kind,
        source="specdec",
        geometry=Geometry(hidden=hidden, intermediate=2 * hidden, attention=attention, eps=1e-6, windows=(None,)),
        states=States(ids=ids, count=len(ids), shift=int(layer_ids == "layer")),
        target_hidden=hidden,
        target_vocab=info.vocab_size,
        draft_vocab=info.vocab_size,
        own_embedding=False,
        own_head=False,
        norm_output=fed_back == "normed",
        mask_token=None if kind == EAGLE else 0,
        block_size=BLOCK if kind in (DFLASH, DSPARK) else 0,
        from_anchor=refined,
        bidirectional=(True,),
        markov="vanilla" if refined else "",
        markov_rank=RANK,
        confidence=refined,
        confidence_joined=refined,
    )
    ops: Any = NoOps()
    recorder = Recorder(ops, None)
    builder(layout)(recorder, layout)
    draw = torch.Generator().manual_seed(seed)
    shapes = {name: spec.shape for name, spec in recorder.tensors.items()}
    tensors = {
        name: torch.randn(shape, generator=draw) / math.sqrt(shape[-1]) if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    return HeadFiles(Checkpoint.open(write_checkpoint(folder, {}, tensors))), layout

"""Describe a head: what ``specdec info HEAD`` shows of its layout, its switches and the rules that were taken."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs

from specdec.checkpoints import check_weights
from specdec.drafters.heads.files import HeadFiles
from specdec.drafters.heads.layout import read_layout
from specdec.drafters.heads.network import expected_tensors
from specdec.drafters.heads.networks import builder


@attrs.frozen(kw_only=True)
class HeadReport:
    """Facts read from a head's files. Computes nothing with the weights.

    ``rules`` are sentences by switch; where tools disagree about one, they say which rule was taken.
    """

    path: str
    kind: str
    layout: str  # the tool whose layout it is
    target: str  # what it was trained for, if the config says so
    target_hidden: int
    target_vocab: int | None
    draft_vocab: int
    layers: int
    depth: int | None
    own_embedding: bool
    own_head: bool
    parameters: int
    size_bytes: int
    rules: dict[str, str] = attrs.field(factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The object that ``info --json`` prints."""
        return attrs.asdict(self)


def describe_head(folder: Path) -> HeadReport:
    """Describe the head in a folder. Raises: CheckpointError as loading it would, whatever the target."""
    files = HeadFiles.open(str(folder))
    layout = read_layout(files)
    checkpoint = files.checkpoint
    check_weights(checkpoint, expected_tensors(files, layout, builder(layout))).raise_for_errors()
    return HeadReport(
        path=str(checkpoint.path),
        kind=layout.kind,
        layout=layout.source,
        target=layout.target,
        target_hidden=layout.target_hidden,
        target_vocab=layout.target_vocab,
        draft_vocab=layout.draft_vocab,
        layers=layout.geometry.layers,
        depth=layout.depth,
        own_embedding=layout.own_embedding,
        own_head=layout.own_head,
        parameters=sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names),
        size_bytes=checkpoint.size_bytes,
        rules=dict(layout.rules),
    )

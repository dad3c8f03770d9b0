"""Describe a head: what computes it, and what ``specdec info HEAD`` shows of its layout, switches and rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from specdec.drafters.heads.dflash import BlockNetwork
from specdec.drafters.heads.eagle import EagleNetwork
from specdec.drafters.heads.files import DSPARK, EAGLE, P_EAGLE, HeadFiles
from specdec.drafters.heads.layout import Layout, read_layout
from specdec.drafters.heads.network import check
from specdec.drafters.heads.refiner import MarkovRefiner, Refiner
from specdec.models.weights import Weights


def builder(layout: Layout, chosen: type[Refiner] | None = None) -> Callable[[Weights, Layout], Any]:
    """What builds a head's network from its weights, and a block head's refiner: ``chosen``, or DSpark's, or none."""
    kind = chosen or (MarkovRefiner if layout.kind == DSPARK else None)
    network = EagleNetwork if layout.kind in (EAGLE, P_EAGLE) else BlockNetwork
    return lambda weights, layout: (network.of(weights, layout), kind and kind.of(weights, layout))


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
    check(files, layout, builder(layout))
    same = ("kind", "target", "target_hidden", "target_vocab", "draft_vocab", "depth", "own_embedding", "own_head")
    return HeadReport(
        **{name: getattr(layout, name) for name in same},
        path=str(checkpoint.path),
        layout=layout.source,
        layers=layout.geometry.layers,
        parameters=sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        size_bytes=checkpoint.size_bytes,
        rules=dict(layout.rules),
    )

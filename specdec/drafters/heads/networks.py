"""The network of each kind of head, and what else its checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.drafters.heads.dflash import BlockNetwork
from specdec.drafters.heads.eagle import EagleNetwork
from specdec.drafters.heads.files import DSPARK, EAGLE, P_EAGLE
from specdec.drafters.heads.layout import Layout
from specdec.drafters.heads.refiner import Marginals, MarkovRefiner, Refiner
from specdec.models.weights import Weights


def refiner_of(layout: Layout, chosen: type[Refiner] | None = None) -> type[Refiner] | None:
    """The refiner of a block head, ``chosen`` or the one of its kind; None for other heads."""
    if layout.kind in (EAGLE, P_EAGLE):
        return None
    return chosen or (MarkovRefiner if layout.kind == DSPARK else Marginals)


def builder(layout: Layout, chosen: type[Refiner] | None = None) -> Callable[[Weights, Layout], Any]:
    """What builds a head's network and refiner from its weights."""
    refiner = refiner_of(layout, chosen)

    def build(weights: Weights, layout: Layout) -> tuple[Any, Refiner | None]:
        network = (EagleNetwork if refiner is None else BlockNetwork).of(weights, layout)
        return network, None if refiner is None else refiner.of(weights, layout)

    return build

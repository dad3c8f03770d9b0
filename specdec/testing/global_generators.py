"""Read and seed the global random generators that a plugin must leave alone."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


def generator_states() -> list[Any]:
    """The state of every global generator that a plugin could draw from; PyTorch's only if it is loaded."""
    torch = sys.modules.get("torch")
    states: list[Any] = [random.getstate(), repr(np.random.get_state())]
    return states if torch is None else [*states, torch.get_rng_state().tolist()]


@contextlib.contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed every global generator in the block, and restore its state afterwards."""
    torch = sys.modules.get("torch")
    before, numpy_before = random.getstate(), np.random.get_state()
    torch_before = None if torch is None else torch.get_rng_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        if torch is not None:
            torch.manual_seed(seed)
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
        if torch is not None:
            torch.set_rng_state(torch_before)

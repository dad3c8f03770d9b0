"""The instruction sets that this machine can run, for tests that run on each of them."""

from typing import Any

import pytest

from specdec.backends.cpu.instruction_sets import available
from specdec.backends.cpu.library import Kernels, KernelsUnavailable, load_kernels
from tests.selection import cases

RUNNABLE = tuple(one.name for one in available())


def each_set(*before: str) -> list[Any]:
    """Parameters: ``before``, then the names of all that this machine can run. Narrower sets are slow."""
    return cases((*before, *RUNNABLE), sample=(*before, *RUNNABLE[:1]), mark="slow")


def kernels_of(instruction_set: str = "auto") -> Kernels:
    """Its kernels; skips the test where they cannot be compiled."""
    kernels = load_kernels(instruction_set)
    if isinstance(kernels, KernelsUnavailable):
        pytest.skip(kernels.reason)
    return kernels

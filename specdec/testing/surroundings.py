"""What a plugin must leave alone or not go by: the global random generators, the hashes of text, and the clock."""

from __future__ import annotations

import builtins
import contextlib
import functools
import random
import sys
import threading
import time
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


@contextlib.contextmanager
def other_hashes(seed: int) -> Iterator[None]:
    """Let ``hash`` answer for texts as in another process; dictionaries, sets and ``__hash__`` methods stay."""
    before = builtins.hash

    def other(value: object, /) -> int:
        named = sys._getframe(1).f_code.co_name
        return before(value if named == "__hash__" or not _has_text(value) else (seed, value))

    builtins.hash = other
    try:
        yield
    finally:
        builtins.hash = before


def _has_text(value: object) -> bool:
    return isinstance(value, str | bytes) or (isinstance(value, tuple | frozenset) and any(map(_has_text, value)))


_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")


@contextlib.contextmanager
def strange_clock(step: float) -> Iterator[list[float]]:
    """Let every clock of the module ``time`` advance by ``step`` seconds a call, and ``time.sleep`` return at once.

    Only in this thread. Gives the seconds that were to be slept.
    """
    slept: list[float] = []
    now = time.time()
    here = threading.get_ident()
    before = {name: getattr(time, name) for name in ("sleep", *_CLOCKS, *(f"{name}_ns" for name in _CLOCKS))}

    def strange(name: str, *arguments: float) -> Any:
        nonlocal now
        if threading.get_ident() != here:
            return before[name](*arguments)
        if name == "sleep":
            slept.extend(arguments)
            return None
        now += step
        return int(now * 1e9) if name.endswith("_ns") else now

    try:
        for name in before:
            setattr(time, name, functools.partial(strange, name))
        yield slept
    finally:
        for name, function in before.items():
            setattr(time, name, function)

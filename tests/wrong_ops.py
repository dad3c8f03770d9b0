"""Ops of the torch reference with one known mistake: some bits of a row depend on the company that it is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from specdec.backends import Backend
from specdec.backends.cpu.arrays import CpuLogits
from specdec.backends.cpu.caches import CpuDeltaCache
from specdec.backends.cpu.reference import ReferenceOps
from specdec.contract import BackendSpec, NoConfig
from specdec.hookspecs import hookimpl

FROM = 3  # rows of a pass, from which the mistake shows
ROWS = 6  # that a pass takes: fewer than the reference's, so that probes are quick


def nudged(result: Any) -> Any:
    """The last value of the last row (of the last array) moved to the next float."""
    if isinstance(result, tuple):
        return (*result[:-1], nudged(result[-1]))
    if isinstance(result, CpuLogits):
        return CpuLogits(nudged(result.array))
    moved = result.contiguous().clone()
    last = moved[-1].reshape(-1)
    last[-1] = torch.nextafter(last[-1].float(), torch.tensor(float("inf"))).to(moved.dtype)
    moved[-1] = last.reshape(moved[-1].shape)
    return moved


def wrong_ops(
    name: str = "", dtype: torch.dtype = torch.float32, when: Callable[[int, Any], bool] = lambda rows, cache: True
) -> ReferenceOps:
    """Ops whose ``name`` gives other bits in passes of ``FROM`` to ``ROWS`` rows; right ones without a name.

    ``when(rows, cache)`` may restrict it further; ``cache`` is None for operations without one.
    """

    class Wrong(ReferenceOps):
        def __getattribute__(self, attribute: str) -> Any:
            value = super().__getattribute__(attribute)
            if attribute != name:
                return value

            def spoilt(first: Any, *others: Any, **named: Any) -> Any:
                result = value(first, *others, **named)
                cache = next((one for one in (*others, *named.values()) if hasattr(one, "truncate")), None)
                rows = len(others[0] if name == "embed" else first)
                return nudged(result) if FROM <= rows <= ROWS and when(rows, cache) else result

            return spoilt

    return short(Wrong(dtype))


class LeakyDeltaCache(CpuDeltaCache):
    """Cut short, it keeps a little of the rows that were rejected."""

    def commit(self, rows: int) -> None:
        cut = self.raw is not None and 0 < rows < self.raw.shape[0] - (self.shape.kernel - 1)
        super().commit(rows)
        if cut:
            self.state[0, 0, 0] += 1e-6


def short(ops: ReferenceOps) -> ReferenceOps:
    """The same ops for passes of ``ROWS`` rows."""
    ops.capabilities = attrs.evolve(ops.capabilities, max_rows=ROWS)
    return ops


class Leaky(ReferenceOps):
    """Ops with that cache."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        short(self)

    def new_delta(self, shape: Any) -> LeakyDeltaCache:
        return LeakyDeltaCache(shape, self.dtype)


class ProbedBackend(Backend):
    """A plugin: the backend "probed", whose ops claim bitwise parity, by default only where a probe has shown it."""

    def __init__(self, make: Callable[[], Any] = wrong_ops, *, needs_probe: bool = True) -> None:
        self._make, self._needs_probe = make, needs_probe

    name = "probed"
    device = "a device of its own"
    dtypes = ("float32",)

    def ops(self, dtype: str) -> Any:
        made = self._make()
        if self._needs_probe:
            made.capabilities = attrs.evolve(made.capabilities, parity_needs_probe=True)
        return made

    @hookimpl
    def specdec_backends(self) -> list[BackendSpec]:
        return [BackendSpec(name="probed", factory=lambda config: self, config=NoConfig, help="for tests")]

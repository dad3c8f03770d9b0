"""Ops of the torch reference with one known mistake: some bits of a row depend on the company that it is in."""

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


def nudged(result: Any, row: int) -> Any:
    """The values of one row (of the last array) moved to the next float, as another order of a sum may move them."""
    if isinstance(result, tuple):
        return (*result[:-1], nudged(result[-1], row))
    if isinstance(result, CpuLogits):
        return CpuLogits(nudged(result.array, row))
    moved = result.contiguous().clone()
    moved[row] = torch.nextafter(moved[row].float(), torch.tensor(float("inf"))).to(moved.dtype)
    return moved


def last_row(rows: Any, cache: Any) -> list[int]:
    return [len(rows) - 1]


def wrong_ops(
    name: str = "", dtype: torch.dtype = torch.float32, which: Callable[[Any, Any], list[int]] = last_row
) -> ReferenceOps:
    """Ops whose ``name`` gives other bits in passes of ``FROM`` to ``ROWS`` rows; right ones without a name.

    ``which(rows, cache)`` gives the rows that are wrong: ``rows`` are the inputs, ``cache`` is None for operations
    without one.
    """

    class Wrong(ReferenceOps):
        def __getattribute__(self, attribute: str) -> Any:
            value = super().__getattribute__(attribute)
            if attribute != name:
                return value

            def spoilt(first: Any, *others: Any, **named: Any) -> Any:
                result = value(first, *others, **named)
                cache = next((one for one in (*others, *named.values()) if hasattr(one, "truncate")), None)
                rows = others[0] if name == "embed" else first
                for row in which(rows, cache) if FROM <= len(rows) <= ROWS else []:
                    result = nudged(result, row)
                return result

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
    """A plugin: the backend "probed", whose ops claim bitwise parity."""

    def __init__(self, make: Callable[[], Any] = wrong_ops) -> None:
        self._make = make

    name = "probed"
    device = "a device of its own"
    dtypes = ("float32",)

    def ops(self, dtype: str) -> Any:
        return self._make()

    @hookimpl
    def specdec_backends(self) -> list[BackendSpec]:
        return [BackendSpec(name="probed", factory=lambda config: self, config=NoConfig, help="for tests")]

"""Broken backends and model families: each has one fault of those that their authors make, and otherwise works.

Backends change a part of the numpy backend in ``examples/first_backend.py``, families of the one that reads the
embedded model. Every docstring quotes the sentence of the contract that the class breaks; "missing:" starts one that
it ought to have.
"""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from specdec import BackendSpec, ModelSpec
from specdec.backends import Backend
from specdec.backends.arrays import HostLogits
from specdec.registry import Registry

BROKEN: dict[type[Any], str] = {}


def example(name: str) -> Any:
    """A file of ``examples/`` as a module."""
    path = pathlib.Path(__file__).resolve().parents[3] / "examples" / f"{name}.py"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


FIRST = example("first_backend")


def broken(fault: str) -> Callable[[type[Any]], type[Any]]:
    """Enter the class into the table under its class of fault."""

    def enter(kind: type[Any]) -> type[Any]:
        BROKEN[kind] = fault
        return kind

    return enter


def spec(kind: type[Any]) -> BackendSpec | ModelSpec:
    """How the backend or the family is registered."""
    name = f"stranger-{kind.__name__}"
    if issubclass(kind, RightFamily):
        return ModelSpec(name=name, model_types=(name,), parse=kind.parse, build=kind.build)

    class Numpy(Backend):
        device = "cpu"
        dtypes = ("float32",)

        def ops(self, dtype: str) -> Any:
            return kind()

    Numpy.name = name
    return BackendSpec(name=name, factory=lambda config: Numpy())


# --- right ones, of which the broken ones change a part ---------------------------------------------------------------


class RightOps(FIRST.NumpyOps):  # type: ignore[misc]
    """The operations of the example, with caches that can be exchanged."""

    Rows: ClassVar[type[Any]] = FIRST.RowCache
    Delta: ClassVar[type[Any]] = FIRST.DeltaCache

    def new_kv(self, capacity: int, kv_heads: int, head_dim: int) -> Any:
        return self.Rows(capacity, kv_heads, head_dim)

    def new_delta(self, shape: Any) -> Any:
        return self.Delta(shape)


class RightFamily:
    """The family of the embedded model under another name."""

    @classmethod
    def inner(cls) -> ModelSpec:
        return Registry().model("qwen3_5_text")

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Any:
        return cls.inner().parse({**raw, "model_type": "qwen3_5_text"})

    @classmethod
    def build(cls, config: Any, weights: Any) -> Any:
        return cls.inner().build(config, weights)


# --- backends ---------------------------------------------------------------------------------------------------------


@broken("late")
class BytePositions(RightOps):
    """Computes the angles of positions in 8 bits.

    "rotates pairs (j, j + R/2) by the row's own position" (O5).
    """

    def norm_rope(self, x: Any, weight: Any, eps: float, rope: Any, position: int) -> Any:
        rows = [
            super(BytePositions, self).norm_rope(x[t : t + 1], weight, eps, rope, (position + t) & 0xFF)
            for t in range(len(x))
        ]
        return np.concatenate(rows)


@broken("late")
class ManyRows(RightOps):
    """Multiplies passes of more than eight rows with another order of summation.

    "BITWISE: a row's bits are the same in a pass of one row and in a pass of any number up to ``max_rows``" (O12).
    """

    def linear(self, x: Any, weight: Any, residual: Any = None) -> Any:
        if len(x) <= 8 or len(x) > self.capabilities.max_rows:
            return super().linear(x, weight, residual)
        y = np.stack([weight[:, ::-1] @ row[::-1] for row in x])
        return y if residual is None else y + residual


@broken("late")
class Window(RightOps):
    """Attends to the last 300 keys only.

    "``attend`` is causal softmax attention over cached and own rows" (O6).
    """

    def attend(self, q: Any, k: Any, v: Any, cache: Any, *, scale: float, gate: Any = None) -> Any:
        out = super().attend(q, k, v, cache, scale=scale, gate=gate)
        if cache.length + len(q) <= 300:
            return out
        keys, values = cache.keys, cache.values
        first = cache.length + len(q) - 300
        try:
            cache.keys, cache.values = keys[first:].copy(), values[first:].copy()
            cache.length -= first
            return super().attend(q, k, v, cache, scale=scale, gate=gate)
        finally:
            cache.keys, cache.values, cache.length = keys, values, cache.length + first


@broken("edge")
class StaleKeys(RightOps):
    """Computes weights of all rows of the cache, 0 for those not filled, and 0 times NaN is NaN.

    "a key beyond the last row that is read with weight 0 still spoils the sum" (O6).
    """

    def attend(self, q: Any, k: Any, v: Any, cache: Any, *, scale: float, gate: Any = None) -> Any:
        out = super().attend(q, k, v, cache, scale=scale, gate=gate)
        unused = cache.values[cache.length + len(q) :]
        return out + (unused * 0).sum() if len(unused) else out


@broken("edge")
class HalfSquares(RightOps):
    """Squares in half precision, which overflows at 256.

    "Sums of squares overflow or vanish in 16 bits; the check includes scales of 1e-4 and 300" (O4).
    """

    def rms_norm(self, x: Any, weight: Any, eps: float) -> Any:
        with np.errstate(over="ignore"):
            squares = (x.astype(np.float16) ** 2).astype(np.float32)
        return x / np.sqrt(squares.mean(-1, keepdims=True) + np.float32(eps)) * weight


@broken("edge")
class HighestTie(RightOps):
    """The head's ``argmax`` takes the highest id among equal logits.

    "float32 logits of every row over a vocabulary of any size, and their argmax" (O10); "ties go to the lowest id"
    (F8).
    """

    class Best(HostLogits):
        def argmax(self) -> list[int]:
            return [int(len(row) - 1 - row[::-1].argmax()) for row in self.rows()]

    def head(self, x: Any, weight: Any) -> Any:
        return self.Best(self.linear(x, weight))


@broken("edge")
class WithoutLastRow(RightOps):
    """Takes the last row of the embedding table for padding.

    "``embed`` gives the table's rows in order, repeats included" (O1).
    """

    def embed(self, table: Any, tokens: Sequence[int]) -> Any:
        rows = super().embed(table, tokens).copy()
        rows[[token == len(table) - 1 for token in tokens]] = 0
        return rows


@broken("settings")
class BriefOffsets(RightOps):
    """Adds the offset of a norm in bfloat16.

    "``vector`` keeps float32 and adds ``plus`` in it" (O1): "bfloat16 loses the small offsets".
    """

    def vector(self, tensor: Any, *, plus: float = 0.0) -> Any:
        return self.from_host((tensor.bfloat16() + plus).float()) if plus else super().vector(tensor)


@broken("handover")
class AddsInPlace(RightOps):
    """Adds the product to the residual where it is.

    "Ops return new arrays and never write to their inputs" (O15).
    """

    def linear(self, x: Any, weight: Any, residual: Any = None) -> Any:
        y = super().linear(x, weight)
        if residual is None or not residual.flags.writeable:
            return y if residual is None else y + residual
        residual += y
        return residual


@broken("late")
class PartialWindow(RightOps):
    """A commit that drops more than eight rows keeps a window that begins one row late.

    "``commit(a)`` after T rows leaves the bits of a pass of a rows; dropped rows leave no trace" (O13).
    """

    class Delta(FIRST.DeltaCache):  # type: ignore[misc]
        def commit(self, rows: int) -> None:
            raw, taken = self.raw, len(self.after)
            super().commit(rows)
            if 0 < rows < taken - 8:
                self.window = raw[rows + 1 : rows + 1 + len(self.window)].copy()


@broken("snapshot")
class ViewsSaved(RightOps):
    """``save`` gives views of the keys.

    "``save`` and ``load`` copy" (O14).
    """

    class Rows(FIRST.RowCache):  # type: ignore[misc]
        def save(self) -> dict[str, Any]:
            return {"keys": self.keys[: self.length], "values": self.values[: self.length]}


@broken("other")
class TruncateLies(RightOps):
    """The recurrent cache goes to the nearest mark before a length and says that it reached it.

    "``truncate`` reaches a point in the cache, or changes nothing and returns False" (O14).
    """

    class Delta(FIRST.DeltaCache):  # type: ignore[misc]
        def truncate(self, length: int) -> bool:
            near = max(at for at in self.marks() if at <= length)
            return bool(super().truncate(near))


@broken("resources")
class NoBytes(RightOps):
    """Its caches say that they take no memory.

    "Bytes allocated" (``Cache.nbytes``).
    """

    class Rows(FIRST.RowCache):  # type: ignore[misc]
        def nbytes(self) -> int:
            return 0


# --- model families ---------------------------------------------------------------------------------------------------


@broken("handover")
class EditsConfig(RightFamily):
    """Takes the keys that it has read off the mapping.

    missing: "``parse`` leaves the mapping unchanged".
    """

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Any:
        parsed = super().parse(raw)
        if isinstance(raw, dict):
            raw.pop("initializer_range", None)
        return parsed


@broken("resources")
class NoStateBytes(RightFamily):
    """Its config says that a state takes no memory.

    "Bytes of state per token, the MTP head's included with ``mtp``, and per sequence" (``FamilyConfig.state_bytes``).
    """

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Any:
        config = super().parse(raw)
        light = type("Light", (type(config),), {"state_bytes": lambda self, width, *, mtp=True: (0, 0)})
        return light(**attrs.asdict(config, recurse=False))


@broken("settings")
class IgnoresActivation(RightFamily):
    """Reads a checkpoint of any activation and computes silu.

    missing: "``parse`` refuses, with a CheckpointError that names the key, what the family does not compute".
    """

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Any:
        return super().parse({**raw, "hidden_act": "silu"})


@broken("settings")
class FourBytes(RightFamily):
    """Its config counts four bytes for every number of a state, whatever the width.

    "``state_bytes`` are the bytes of a state" (M3).
    """

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Any:
        kind = type(config := super().parse(raw))
        wide = type(
            "Wide", (kind,), {"state_bytes": lambda self, width, *, mtp=True: kind.state_bytes(self, 4, mtp=mtp)}
        )
        return wide(**attrs.asdict(config, recurse=False))

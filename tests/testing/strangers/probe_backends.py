"""For each broken backend or family, a few calls that show its fault, and nothing where a right one is asked."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import specdec
from specdec.backends.ops import DeltaShape, Rope
from specdec.errors import SpecdecError

from .backends import FIRST

SHAPE = DeltaShape(key_heads=1, value_heads=2, key_dim=4, value_dim=4, kernel=4)
ROPE = Rope.of(10_000.0, 8)


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def unlike(kind: Any, call: Callable[[Any], Any]) -> bool:
    """Whether the result has other bits than that of the example."""
    return not np.array_equal(call(kind()), call(FIRST.NumpyOps()))


def rows_differ(kind: Any) -> bool:
    ops, x, weight = kind(), numbers(12, 64), numbers(48, 64, seed=1)
    return not np.array_equal(ops.linear(x, weight), np.concatenate([ops.linear(row[None], weight) for row in x]))


def attended(length: int, *, stale: float = 0.0) -> Callable[[Any], Any]:
    def call(ops: Any) -> Any:
        cache = ops.new_kv(length + 40, 2, 8)
        cache.keys[:], cache.values[:] = stale, stale
        cache.append(numbers(length, 2, 8), numbers(length, 2, 8, seed=1))
        cache.commit(length)
        q, k, v = numbers(2, 4, 8, seed=2), numbers(2, 2, 8, seed=3), numbers(2, 2, 8, seed=4)
        return ops.attend(q, k, v, cache, scale=0.3)

    return call


def changes_residual(kind: Any) -> bool:
    residual = numbers(3, 5)
    kind().linear(numbers(3, 4), numbers(5, 4), residual)
    return not np.array_equal(residual, numbers(3, 5))


def delta_pass(ops: Any, cache: Any, rows: int, seed: int = 5) -> None:
    u = ops.conv_window(numbers(rows, SHAPE.channels, seed=seed), numbers(SHAPE.channels, 4, seed=6), cache)
    a, b = numbers(rows, 2, seed=seed + 1), numbers(rows, 2, seed=seed + 2)
    ops.gated_delta(u, a, b, numbers(2), numbers(2, seed=1), cache, SHAPE)


def after_commit(kind: Any) -> bool:
    ops = kind()
    cache, plain = ops.new_delta(SHAPE), ops.new_delta(SHAPE)
    delta_pass(ops, cache, 12)
    cache.commit(2)
    x = numbers(12, SHAPE.channels, seed=5)
    plain.raw = np.concatenate([plain.window, x[:2]])
    return not np.array_equal(cache.window, plain.raw[2:])


def saved_changes(kind: Any) -> bool:
    ops = kind()
    cache = ops.new_kv(20, 2, 8)
    cache.append(numbers(6, 2, 8), numbers(6, 2, 8))
    cache.commit(6)
    saved = cache.save()["keys"]
    before = np.array(saved)
    cache.truncate(2)
    cache.append(numbers(4, 2, 8, seed=9), numbers(4, 2, 8, seed=9))
    return not np.array_equal(before, saved)


def truncates_elsewhere(kind: Any) -> bool:
    ops = kind()
    cache = ops.new_delta(SHAPE)
    delta_pass(ops, cache, 5)
    cache.commit(5)
    return bool(cache.truncate(3)) or cache.length != 5


def raw_config() -> dict[str, Any]:
    folder = pathlib.Path(specdec.__file__).parent / "demo"
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


def edits_mapping(kind: Any) -> bool:
    raw = raw_config()
    kind.parse(raw)
    return raw != raw_config()


def takes_gelu(kind: Any) -> bool:
    try:
        kind.parse(raw_config() | {"hidden_act": "gelu"})
    except SpecdecError:
        return False
    return True


PROBES: dict[str, Callable[[Any], bool]] = {
    "BytePositions": lambda kind: unlike(kind, lambda ops: ops.norm_rope(numbers(3, 2, 8), None, 0.0, ROPE, 254)),
    "ManyRows": rows_differ,
    "Window": lambda kind: unlike(kind, attended(320)),
    "StaleKeys": lambda kind: unlike(kind, attended(6, stale=float("nan"))),
    "HalfSquares": lambda kind: (
        not np.allclose(
            kind().rms_norm(numbers(2, 8) * 300, np.ones(8, "f4"), 1e-6),
            FIRST.NumpyOps().rms_norm(numbers(2, 8) * 300, np.ones(8, "f4"), 1e-6),
        )
    ),
    "HighestTie": lambda kind: kind().head(np.ones((1, 4), "f4"), np.ones((9, 4), "f4")).argmax() != [0],
    "WithoutLastRow": lambda kind: unlike(kind, lambda ops: ops.embed(numbers(9, 4), [8, 1])),
    "BriefOffsets": lambda kind: unlike(kind, lambda ops: ops.vector(torch.full((3,), 0.001), plus=1.0)),
    "AddsInPlace": changes_residual,
    "PartialWindow": after_commit,
    "ViewsSaved": saved_changes,
    "TruncateLies": truncates_elsewhere,
    "NoBytes": lambda kind: kind().new_kv(16, 2, 8).nbytes() == 0,
    "EditsConfig": edits_mapping,
    "NoStateBytes": lambda kind: kind.parse(raw_config()).state_bytes(2) == (0, 0),
    "IgnoresActivation": takes_gelu,
    "FourBytes": lambda kind: kind.parse(raw_config()).state_bytes(2) == kind.parse(raw_config()).state_bytes(4),
}

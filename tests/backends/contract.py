"""The conformance kit's clauses of operations, run at several sizes. Nothing here is a test."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from specdec.backends.ops import DeltaShape
from specdec.testing import Subject, as_subject, check_plugin, iter_checks
from specdec.testing.clauses import ops as kit
from specdec.testing.clauses.ops import layers, operations


def _delta(key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int) -> DeltaShape:
    return DeltaShape(key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, kernel=kernel)


# beside those of the kit: rows of one vector and a bit, rows of many blocks, heads and groups of all kinds
SIZES: dict[str, dict[str, Any]] = {
    "kit": {},
    "short": {"LENGTH": 19, "HEAD_DIM": 8, "HEADS": 3, "KV_HEADS": 3, "LATENT": 9, "LATENT_VALUES": 1}
    | {"SHAPE": _delta(2, 2, 1, 1, 2)},
    "odd": {"LENGTH": 333, "HEAD_DIM": 132, "HEADS": 5, "KV_HEADS": 1, "LATENT": 75, "LATENT_VALUES": 75}
    | {"SHAPE": _delta(2, 6, 37, 71, 3)},
    "even": {"LENGTH": 2048, "HEAD_DIM": 64, "HEADS": 8, "KV_HEADS": 2, "LATENT": 96, "LATENT_VALUES": 64}
    | {"SHAPE": _delta(1, 2, 64, 64, 4)},
    "real": {"LENGTH": 1024, "HEAD_DIM": 256, "HEADS": 8, "KV_HEADS": 2, "LATENT": 576, "LATENT_VALUES": 512}
    | {"SHAPE": _delta(16, 32, 128, 128, 4)},
}
CLAUSES = tuple(check.id for check in iter_checks(Subject.OPS))


def check_operations(make: Callable[[], Any], size: str = "kit", clauses: Iterable[str] = CLAUSES) -> None:
    """These clauses over what ``make`` makes; routing at the kit's sizes only, where its scores lie apart."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIZES[size].items():
            for module in (operations, layers, kit):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        only = [clause for clause in clauses if size == "kit" or clause != "O17"]
        check_plugin(as_subject(Subject.OPS, make), only=only).raise_for_failures()

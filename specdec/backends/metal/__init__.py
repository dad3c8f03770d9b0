"""The Metal backend: the ops on MLX. MLX is imported only when a backend is built."""

from __future__ import annotations

import importlib.util
import platform
from typing import Any, Literal

import attrs

from specdec.contract import BackendSpec
from specdec.hookspecs import hookimpl


@attrs.frozen(kw_only=True)
class MetalConfig:
    """Options of ``[target.backend_options]``.

    Attributes:
        mode: ``exact`` runs specdec's row-invariant kernels, ``fast`` MLX's own.
    """

    mode: Literal["exact", "fast"] = "exact"


def _build(config: MetalConfig) -> Any:
    from specdec.backends.metal.backend import MetalBackend

    return MetalBackend(config.mode)


def _available() -> str | None:
    """Look for MLX without importing it."""
    try:
        found = importlib.util.find_spec("mlx.core")
    except ModuleNotFoundError:
        found = None
    return None if found is not None else "mlx is not installed (pip install 'specdec-framework[metal]')"


def _preference() -> int | None:
    """A preference on Apple silicon."""
    return 10 if (platform.system(), platform.machine()) == ("Darwin", "arm64") else None


@hookimpl
def specdec_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="metal",
            factory=_build,
            config=MetalConfig,
            available=_available,
            preference=_preference,
            help="MLX: Apple silicon, or its CPU device",
        )
    ]

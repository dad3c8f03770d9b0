"""The Metal backend: the ops on MLX. Its spec imports MLX only when a backend is built."""

from __future__ import annotations

import importlib.util
from typing import Any

from specdec.contract import BackendSpec, NoConfig
from specdec.hookspecs import hookimpl


def _build(config: NoConfig) -> Any:
    from specdec.backends.metal.backend import MetalBackend

    return MetalBackend()


def _available() -> str | None:
    """Looks for MLX and does not import it."""
    try:
        found = importlib.util.find_spec("mlx.core")
    except ModuleNotFoundError:
        found = None
    return None if found is not None else "mlx is not installed (pip install 'specdec-framework[metal]')"


@hookimpl
def specdec_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="metal",
            factory=_build,
            available=_available,
            help="MLX's stock kernels: Apple silicon, or its CPU device",
        )
    ]

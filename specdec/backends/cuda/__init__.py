"""The CUDA backend: Triton kernels and CUDA graphs. Triton and the ops are imported only when a backend is built."""

from __future__ import annotations

import importlib.util
from typing import Any

from specdec.contract import BackendSpec, NoConfig
from specdec.hookspecs import hookimpl


def _build(config: NoConfig) -> Any:
    from specdec.backends.cuda.backend import CudaBackend

    return CudaBackend()


def _available() -> str | None:
    """Look for triton without importing it, then ask torch about the device."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'specdec-framework[cuda]')"
    from specdec.backends.cuda.device import unusable

    return unusable()


def _preference() -> int | None:
    """A preference if the machine has an NVIDIA device."""
    from specdec.backends.cuda.device import nvidia_here

    return 20 if nvidia_here() else None


@hookimpl
def specdec_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="cuda",
            factory=_build,
            available=_available,
            preference=_preference,
            help="Triton kernels and CUDA graphs: NVIDIA GPUs from Ampere on",
        )
    ]

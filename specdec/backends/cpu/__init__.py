"""The CPU backend: the reference and the default. Its spec imports torch only when a backend is built."""

from __future__ import annotations

from typing import Any

from specdec.contract import BackendSpec, NoConfig
from specdec.hookspecs import hookimpl


def _build(config: NoConfig) -> Any:
    from specdec.backends.cpu.backend import CpuBackend

    return CpuBackend()


@hookimpl
def specdec_backends() -> list[BackendSpec]:
    help_ = "torch with native kernels; the reference and the default"
    return [BackendSpec(name="cpu", factory=_build, preference=lambda: 0, help=help_)]

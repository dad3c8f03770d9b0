"""The CPU backend: the reference and the default. Its spec imports torch only when a backend is built."""

from __future__ import annotations

from typing import Any

import attrs

from specdec.checking import between, one_of
from specdec.contract import BackendSpec
from specdec.hookspecs import hookimpl


@attrs.frozen(kw_only=True)
class CpuConfig:
    """Options of ``[target.backend_options]``; each is also a key of ``[target]``.

    Attributes:
        threads: threads of a pass; None takes torch's number, at most the processors that this process may use.
        instruction_set: what the kernels may use; "auto" takes the widest that this processor has.
        activations: how products with packed integers take activations.
    """

    threads: int | None = attrs.field(default=None, validator=attrs.validators.optional(between(1, 256)))
    instruction_set: str = "auto"
    activations: str = attrs.field(default="auto", validator=one_of("auto", "float", "int8"))


def _build(config: CpuConfig) -> Any:
    from specdec.backends.cpu.backend import CpuBackend

    return CpuBackend(config.threads, config.instruction_set, config.activations)


@hookimpl
def specdec_backends() -> list[BackendSpec]:
    help_ = "torch with native kernels; the reference and the default"
    return [BackendSpec(name="cpu", factory=_build, config=CpuConfig, preference=lambda: 0, help=help_)]

"""The CPU backend: choose a dtype for this processor and load its kernels."""

from __future__ import annotations

import platform

import structlog
import torch

from specdec.backends import Backend, eager_reason
from specdec.backends.cpu.compiler import TARGET, KernelsUnavailable, load_kernels, target_processor
from specdec.backends.cpu.reference import ReferenceOps

log = structlog.get_logger(__name__)


class CpuBackend(Backend):
    """Native kernels if a C++ compiler is present, else the torch reference with the reason recorded."""

    name = "cpu"
    dtypes = ("bfloat16", "float32")

    def __init__(self) -> None:
        self.device = f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"

    def auto_dtype(self, stored: str) -> tuple[str, str]:
        if stored == "float32":
            return super().auto_dtype(stored)
        if (processor := target_processor()) != "native":
            return "float32", f"auto: {TARGET} builds the kernels for {processor}"
        unit = _bfloat16_unit()
        if unit:
            return "bfloat16", f"auto: this processor multiplies bfloat16 in hardware ({unit})"
        return "float32", "auto: this processor has no bfloat16 arithmetic (AMX, AVX512-BF16 or ARM BF16)"

    def ops(self, dtype: str) -> ReferenceOps:
        kernels = load_kernels()
        if isinstance(kernels, KernelsUnavailable):
            log.warning("native_kernels_unavailable", reason=kernels.reason)
            return ReferenceOps(getattr(torch, dtype), kernels=f"torch reference ({kernels.reason})")
        from specdec.backends.cpu.native import NativeOps

        return NativeOps(getattr(torch, dtype), kernels, eager_reason=eager_reason())


def _bfloat16_unit() -> str | None:
    """The name of the processor's bfloat16 unit, or None."""
    capabilities = torch.cpu.get_capabilities()
    for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16"), ("bf16", "ARM BF16")):
        if capabilities.get(flag):
            return name
    return None

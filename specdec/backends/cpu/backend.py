"""The CPU backend: which dtype this processor is fast at, and which kernels it can run."""

from __future__ import annotations

import os
import platform

import structlog
import torch

from specdec.backends.cpu.compiler import TARGET, KernelsUnavailable, load_kernels, target_processor
from specdec.backends.cpu.reference import ReferenceOps
from specdec.errors import ConfigError

log = structlog.get_logger(__name__)

EAGER = "SPECDEC_EAGER"  # set: passes run op by op, for debugging
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class CpuBackend:
    """Native kernels where a C++ compiler is present, the torch reference with a recorded reason elsewhere."""

    name = "cpu"

    def __init__(self) -> None:
        self.device = f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"

    def choose_dtype(self, requested: str, stored: str) -> tuple[str, str]:
        if requested in DTYPES:
            return requested, "asked for"
        if requested != "auto":
            raise ConfigError(f"target.dtype takes auto, {' or '.join(DTYPES)} on the cpu backend, got {requested!r}")
        if stored == "float32":
            return "float32", "auto: the checkpoint is stored in float32"
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
            return ReferenceOps(DTYPES[dtype], kernels=f"torch reference ({kernels.reason})")
        from specdec.backends.cpu.native import NativeOps

        eager = os.environ.get(EAGER, "").strip().lower() not in ("", "0", "false", "no", "off")
        return NativeOps(DTYPES[dtype], kernels, eager_reason=f"{EAGER} is set" if eager else "")


def _bfloat16_unit() -> str | None:
    """The name of the processor's bfloat16 unit, or None."""
    capabilities = torch.cpu.get_capabilities()
    for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16"), ("bf16", "ARM BF16")):
        if capabilities.get(flag):
            return name
    return None

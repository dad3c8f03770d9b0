"""The CPU backend: choose a dtype for this processor and load its kernels."""

from __future__ import annotations

import platform

import torch

from specdec.backends import Backend, eager_reason
from specdec.backends.cpu.library import KernelsUnavailable, load_kernels
from specdec.backends.cpu.packed import INT8
from specdec.backends.cpu.reference import ReferenceOps
from specdec.backends.cpu.threads import Threads
from specdec.logs import get_logger

log = get_logger(__name__)


class CpuBackend(Backend):
    """Native kernels if the wheel has them or a C++ compiler is present, else the torch reference, and why."""

    name = "cpu"
    dtypes = ("bfloat16", "float32")

    def __init__(self, threads: int | None = None, instruction_set: str = "auto", activations: str = "auto") -> None:
        self.threads = Threads(threads)
        self.int8 = INT8[activations]
        self.kernels = load_kernels(instruction_set)
        facts = [platform.machine()]
        if not isinstance(self.kernels, KernelsUnavailable):
            facts.append(self.kernels.instruction_set)
        count, given = self.threads.count(), self.threads.given
        if count > given:
            processors = f"{given} processor{'s' * (given > 1)}"
            self.notices = (
                f"target.threads is {count}, and this process may use {processors}: more threads make no pass faster",
            )
        facts.append(f"{count} thread{'s' * (count > 1)}")
        self.device = f"cpu ({', '.join(facts)})"

    def auto_dtype(self, stored: str) -> tuple[str, str]:
        if stored == "float32":
            return super().auto_dtype(stored)
        if not isinstance(self.kernels, KernelsUnavailable):  # on every processor: they widen it in registers
            return "bfloat16", "auto: passes wait for memory, and bfloat16 is half the size of float32"
        unit = _bfloat16_unit()
        if unit:
            return "bfloat16", f"auto: this processor multiplies bfloat16 in hardware ({unit})"
        return "float32", "auto: torch is slow in bfloat16 on a processor without AMX, AVX512-BF16 or ARM BF16"

    def ops(self, dtype: str) -> ReferenceOps:
        kernels = self.kernels
        if isinstance(kernels, KernelsUnavailable):
            log.warning("native_kernels_unavailable", reason=kernels.reason)
            torch.set_num_threads(self.threads.count())  # of the whole process: torch knows no other number
            described = f"torch reference ({kernels.reason})"
            return ReferenceOps(getattr(torch, dtype), described, int8=self.int8)
        from specdec.backends.cpu.native import NativeOps

        if kernels.notice:
            self.notices = (*self.notices, kernels.notice)
        return NativeOps(getattr(torch, dtype), kernels, self.threads, eager_reason=eager_reason(), int8=self.int8)


def _bfloat16_unit() -> str | None:
    """The name of the processor's bfloat16 unit, or None."""
    capabilities = torch.cpu.get_capabilities()
    for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16"), ("bf16", "ARM BF16")):
        if capabilities.get(flag):
            return name
    return None

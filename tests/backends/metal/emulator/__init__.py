"""Runs the Metal source of MLX custom kernels on Linux: the text that MLX would compile, under g++, thread by thread.

It finds what is wrong whatever the hardware: accesses outside a buffer, lanes that do not meet, values that nobody
wrote. It shows what a result depends on: the order of threads, and contraction. It says nothing about speed, registers,
races in device memory, or the accuracy of the GPU's functions. Threadgroup memory, barriers and reductions, which
specdec's kernels do without, are not there.
"""

from tests.backends.metal.emulator.driver import Emulated, emulate, unavailable
from tests.backends.metal.emulator.errors import (
    ArithmeticFault,
    CompileError,
    Divergence,
    EmulatorUnavailable,
    Endless,
    Fault,
    ForbiddenError,
    KernelError,
    LaunchError,
    OutOfBounds,
    ResourceError,
    Uninitialised,
)
from tests.backends.metal.emulator.knobs import ORDERS, Knobs

__all__ = [
    "ORDERS",
    "ArithmeticFault",
    "CompileError",
    "Divergence",
    "Emulated",
    "EmulatorUnavailable",
    "Endless",
    "Fault",
    "ForbiddenError",
    "KernelError",
    "Knobs",
    "LaunchError",
    "OutOfBounds",
    "ResourceError",
    "Uninitialised",
    "emulate",
    "unavailable",
]

"""Runs the Metal source of MLX custom kernels on Linux: the text that MLX would compile, under g++, thread by thread.

It finds what is wrong whatever the hardware: accesses outside a buffer, lanes that do not meet, values that nobody
wrote. It shows what a result depends on: the order of threads, and contraction. It says nothing about speed, registers,
races in device memory, or the accuracy of the GPU's functions. Threadgroup memory, barriers and reductions, which
specdec's kernels do without, are not there.
"""

from tests.backends.metal.emulator.driver import ORDERS, Emulated, KernelError, Knobs, emulate, unavailable

__all__ = ["ORDERS", "Emulated", "KernelError", "Knobs", "emulate", "unavailable"]

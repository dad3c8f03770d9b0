"""What the emulator finds, as exceptions that name the kernel, the threadgroup and the thread."""

from __future__ import annotations


class EmulatorUnavailable(Exception):
    """This machine cannot emulate: no g++, no Linux, or no fused multiply-add."""


class KernelError(Exception):
    """Something that is wrong with a kernel or its launch.

    Attributes:
        kernel: its name.
        what: what happened, in one sentence, with lines of the text.
        threadgroup: position of the threadgroup in the grid, or None when no single one is to blame.
        thread: position of the thread in its threadgroup, or None.
    """

    def __init__(
        self, kernel: str, what: str, threadgroup: tuple[int, ...] | None = None, thread: tuple[int, ...] | None = None
    ) -> None:
        self.kernel = kernel
        self.what = what
        self.threadgroup = threadgroup
        self.thread = thread
        who = "" if thread is None else f" thread {thread} of threadgroup {threadgroup}"
        super().__init__(f"kernel {kernel}:{who} {what}")


class CompileError(KernelError):
    """g++ refuses the text."""


class ForbiddenError(KernelError):
    """The text uses what Metal forbids or what this emulator does not have."""


class LaunchError(KernelError):
    """The launch does not fit the kernel or the device."""


class OutOfBounds(KernelError):
    """A read or write outside a buffer or an array, or a write to an input."""


class Divergence(KernelError):
    """Lanes that should meet do not."""


class Uninitialised(KernelError):
    """A value that nobody wrote was read, or an output element holds one."""


class ArithmeticFault(KernelError):
    """Integer arithmetic or a conversion that has no defined result."""


class ResourceError(KernelError):
    """More stack than there is."""


class Fault(KernelError):
    """An access to an address that belongs to nobody."""


class Endless(KernelError):
    """A thread that does not come to an end."""

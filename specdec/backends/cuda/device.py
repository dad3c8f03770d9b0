"""The CUDA device and its graphs.

This module does not import triton, and its checks create a CUDA context only if there is a device.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.backends.cuda.memory import out_of_memory
from specdec.errors import UnsupportedError

CAPABILITY = (8, 0)  # Ampere: bfloat16 tensor cores and asynchronous copies


class CudaDevice:
    """The current CUDA device. Graphs share one memory pool, since only one of them runs at a time.

    Attributes:
        place: the torch device.
        name: a readable name.
    """

    _capturing = threading.RLock()  # torch captures one graph at a time in a process

    def __init__(self) -> None:
        index = torch.cuda.current_device()
        self.place = torch.device("cuda", index)
        major, minor = torch.cuda.get_device_capability(index)
        self.name = f"{torch.cuda.get_device_name(index)} (sm_{major}{minor}, CUDA {torch.version.cuda})"
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._anchor: tuple[Tensor, torch.cuda.CUDAGraph] | None = None

    def capture(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture the launches of ``body`` as a graph, whose replays launch them again after all earlier launches.

        ``body`` first runs once for real, so that every kernel is compiled and every workspace exists. During capture
        it must do nothing that a replay cannot repeat: no reads by the host, no other buffers.
        """
        with self._capturing, torch.cuda.device(self.place):
            if self._anchor is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._pool = torch.cuda.graph_pool_handle()
                # a permanent graph: torch refuses to capture into a pool without graphs while some of its memory is in
                # use (the result of a graph, the workspace of a library)
                held = torch.zeros(1, device=self.place)
                self._anchor = held, self._captured(held.zero_)
            # on the common stream: kernels share the workspace, and other threads may be launching them
            body()
            return self._captured(body)

    def _captured(self, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate while this one captures
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            body()
        return graph

    def upload(self, values: Sequence[int], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Copy integers to the device, into ``out`` if given, without waiting for the device."""
        # the allocator of pinned memory keeps a block until the copy from it is done
        host = torch.tensor(values, dtype=dtype).pin_memory()
        if out is None:
            return host.to(self.place, non_blocking=True)
        return out.copy_(host, non_blocking=True)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        free, total = torch.cuda.mem_get_info(self.place)
        held = torch.cuda.memory_reserved(self.place) - torch.cuda.memory_allocated(self.place)
        return free + held, total

    @contextlib.contextmanager
    def guarded(self, what: str, nbytes: int | None, setting: str) -> Iterator[None]:
        """A context for allocations of ``nbytes`` in total.

        Raises: OutOfMemory if they fail, naming ``what`` and suggesting ``setting``.
        """
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            free, total = self.memory()
            raise out_of_memory(what, nbytes, free, total, setting) from error


# --- detection --------------------------------------------------------------------------------------------------------


def nvidia_here() -> bool:
    """Whether this process can see an NVIDIA device, usable or not."""
    if _hidden() is not None:
        return False  # on purpose
    if platform.system() == "Darwin":
        return False
    return _device_files() or (torch.version.cuda is not None and torch.cuda.device_count() > 0)


def _hidden() -> str | None:
    """The value of CUDA_VISIBLE_DEVICES if it hides every device."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None or value.split(",")[0].strip() not in ("", "-1") else value


def _device_files() -> bool:
    """Whether the driver's device files exist: /dev/nvidia0 and so on, or those of WSL."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/usr/lib/wsl/lib/libcuda.so.1").exists()


def unusable() -> str | None:
    """Return None if a CUDA device can run the kernels, else the reason and a remedy."""
    if torch.version.hip is not None:
        return "this torch was built for ROCm, and the kernels are written for CUDA (try a CUDA build of torch)"
    if torch.version.cuda is None:
        return "this torch was built without CUDA (install one of torch's CUDA builds)"
    if not torch.cuda.is_available():
        return _why_not_available()
    try:
        found = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
    except RuntimeError as error:  # the device does not respond: a broken driver, another mode
        return _first_line(error)
    if found < CAPABILITY:
        return (
            f"{name} has compute capability {found[0]}.{found[1]}; the kernels take {CAPABILITY[0]}.{CAPABILITY[1]} "
            "or newer (Ampere: A100, RTX 30 and later)"
        )
    return None


def _why_not_available() -> str:
    hidden = _hidden()
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every CUDA device (unset it)"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # torch explains here: no driver, or one that is too old
        text = _first_line(error)
        if "too old" in text:
            return (
                f"the NVIDIA driver is too old for this torch, which was built for CUDA {torch.version.cuda} "
                f"(install a newer driver, or a torch built for an older CUDA): {text}"
            )
        return f"no CUDA device was found: {text}"
    return "no CUDA device was found"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def open_device() -> CudaDevice:
    """Return the current CUDA device. Raises: UnsupportedError with the reason if it cannot run the kernels."""
    reason = unusable()
    if reason is not None:
        raise UnsupportedError(f"the cuda backend cannot run here: {reason}", try_='target.backend = "cpu"')
    return CudaDevice()

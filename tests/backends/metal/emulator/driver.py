"""Compile a kernel's text with g++ and run it: one fiber per thread of a threadgroup, one threadgroup at a time."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import numpy as np

from specdec.backends.metal.kernels.kernel import Launch, MslKernel
from tests.backends.metal.emulator import errors
from tests.backends.metal.emulator.export import Exported, export
from tests.backends.metal.emulator.knobs import ORDERS, Knobs
from tests.backends.metal.emulator.translate import translate
from tests.processes import HUNG

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HERE = Path(__file__).parent
_COMMON = ("-std=c++17", "-O2", "-g1", "-gdwarf-4", "-fPIC", "-shared", "-fno-math-errno", "-Wall")
_KERNEL = (
    "-fsingle-precision-constant",  # Metal has no double: 1.0 is a float
    "-ftrivial-auto-var-init=pattern",  # a local variable that nobody set is not what it was a call ago
    "-fno-strict-aliasing",
    "-fsanitize=bounds,shift,integer-divide-by-zero,signed-integer-overflow,alignment,float-cast-overflow",
    "-fno-sanitize-recover=all",
    "-Werror=uninitialized",
    "-Werror=return-type",
    "-Werror=vla",
    "-Wno-unused-variable",
    "-Wno-unused-but-set-variable",
    "-Wno-unused-function",
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-pragmas",
    "-Wno-literal-suffix",
    "-Wno-sign-compare",
)
# what Metal leaves out of C++ (specification, section 1.5.4) and g++ takes
_FORBIDDEN = re.compile(
    r"\b(double|virtual|new|delete|goto|try|catch|throw|dynamic_cast|typeid|thread_local|asm|std)\b"
)
_GCC = 12  # the first with -ftrivial-auto-var-init
_MAX_THREADS = 1024
_INT_POISON = 0xA5  # floats are poisoned with 0xFF, a NaN that no arithmetic of the host makes
_RUNNING = threading.Lock()  # the runtime has one set of fibers

_ERRORS = (
    errors.KernelError,
    errors.OutOfBounds,
    errors.Divergence,
    errors.Uninitialised,
    errors.ArithmeticFault,
    errors.ResourceError,
    errors.Fault,
    errors.Endless,
)


class _Size(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint32) for axis in "xyz"]

    def tuple(self) -> tuple[int, int, int]:
        return self.x, self.y, self.z


class _Knobs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("order", "front", "seconds", "seed")]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("host", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("item", "written", "poison", "align")),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("buffer", ctypes.c_int32),
        ("element", ctypes.c_int64),
        *((name, _Size) for name in ("threadgroup", "thread", "other_thread")),
        *((name, ctypes.c_uint64) for name in ("pc", "other_pc")),
        *((name, ctypes.c_int32) for name in ("has_thread", "has_other", "line", "other_line")),
        ("what", ctypes.c_char * 512),
    ]


def unavailable() -> str | None:
    """Why this machine cannot emulate, or None."""
    return _unavailable(os.environ.get("PATH", ""))


@functools.cache
def _unavailable(path: str) -> str | None:
    if not sys.platform.startswith("linux"):
        return "the emulator runs on Linux only"
    if shutil.which("g++", path=path) is None:
        return "g++ is not on PATH"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, timeout=HUNG).stdout.strip()
    if not version.partition(".")[0].isdigit() or int(version.partition(".")[0]) < _GCC:
        return f"the emulator needs g++ {_GCC} or newer, found {version!r}"
    if not _fuses():
        return "this processor has no fused multiply-add, without which contraction cannot be shown"
    return None


def emulate(
    kernel: MslKernel,
    inputs: Sequence[mx.array],
    launch: Launch,
    knobs: Knobs | None = None,
    *,
    partial: Collection[str] = (),
) -> list[NDArray[Any]]:
    """Run the text that MLX generates for this call. bfloat16 outputs come as their bits, uint16.

    Args:
        kernel: what to run.
        inputs: any arrays; they are made row contiguous, as MLX does.
        launch: template, grid, threadgroup and outputs.
        knobs: what Metal leaves open; the default is ``Knobs()``.
        partial: outputs of which elements may stay unwritten; those hold NaN, or bytes 0xA5 for integers.

    Raises:
        EmulatorUnavailable: no g++ here.
        KernelError: the text is refused, or a thread did what it must not; the subclass says what.
    """
    if (reason := unavailable()) is not None:
        raise errors.EmulatorUnavailable(reason)
    knobs = knobs or Knobs()
    if len(inputs) != len(kernel.inputs):
        raise errors.LaunchError(kernel.name, f"takes {len(kernel.inputs)} inputs, got {len(inputs)}")
    _check_launch(kernel.name, launch)
    exported = export(kernel, inputs, launch)
    library = _kernel_library(kernel.name, exported, knobs.contract)
    by_name = {name: _bytes(array) for name, array in zip(kernel.inputs, inputs, strict=True)}
    outputs = {
        name: np.empty(shape, _numpy_dtype(dtype))
        for name, shape, dtype in zip(kernel.outputs, launch.output_shapes, launch.output_dtypes, strict=True)
    }
    floats = {
        name
        for name, dtype in zip(kernel.outputs, launch.output_dtypes, strict=True)
        if mx.issubdtype(dtype, mx.floating)
    }
    shapes = {name: tuple(array.shape) for name, array in zip(kernel.inputs, inputs, strict=True)}
    arguments = [_buffer_of(p.name, by_name, outputs, shapes) for p in exported.parameters if p.space is not None]
    _run(kernel.name, exported, library, arguments, outputs, floats, launch, knobs)
    for name, output in outputs.items():
        if name not in partial:
            _check_written(kernel.name, name, output, name in floats)
    return list(outputs.values())


@attrs.frozen
class Emulated:
    """An executor that emulates. Results are there when ``run`` returns, and inputs are evaluated.

    Attributes:
        knobs: what Metal leaves open.
        partial: names of outputs, of any kernel, of which elements may stay unwritten.
    """

    knobs: Knobs = Knobs()
    partial: tuple[str, ...] = ()

    def run(self, kernel: MslKernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        results = emulate(kernel, inputs, launch, self.knobs, partial=self.partial)
        return [_mx_array(host, dtype) for host, dtype in zip(results, launch.output_dtypes, strict=True)]


# ------------------------------------------------------------------------------------------------------------ arrays


def _numpy_dtype(dtype: mx.Dtype) -> Any:
    if dtype == mx.bfloat16:
        return np.uint16
    return np.dtype(str(dtype).removeprefix("mlx.core.").replace("bool_", "bool"))


def _bytes(array: mx.array) -> NDArray[Any]:
    """A row contiguous copy; bfloat16 as uint16."""
    flat = mx.contiguous(array)
    return np.ascontiguousarray(np.array(flat.view(mx.uint16) if array.dtype == mx.bfloat16 else flat))


def _mx_array(host: NDArray[Any], dtype: mx.Dtype) -> mx.array:
    made = mx.array(host)
    return made.view(mx.bfloat16) if dtype == mx.bfloat16 else made


def _buffer_of(
    name: str, inputs: dict[str, NDArray[Any]], outputs: dict[str, NDArray[Any]], shapes: dict[str, tuple[int, ...]]
) -> NDArray[Any]:
    if name in inputs:
        return inputs[name]
    if name in outputs:
        return outputs[name]
    base, _, what = name.rpartition("_")
    shape = shapes[base]
    if what == "shape":
        return np.array(shape, np.int32)
    if what == "strides":
        steps = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
        return np.array(steps, np.int64)
    return np.array(len(shape), np.int32)


def _check_launch(kernel: str, launch: Launch) -> None:
    if min(*launch.grid, *launch.threadgroup) < 1:
        raise errors.LaunchError(
            kernel, f"takes a grid and a threadgroup of at least 1, got {launch.grid}, {launch.threadgroup}"
        )
    if (threads := int(np.prod(launch.threadgroup))) > _MAX_THREADS:
        raise errors.LaunchError(kernel, f"asks for {threads} threads in a threadgroup; Metal has {_MAX_THREADS}")


def _check_written(kernel: str, name: str, output: NDArray[Any], is_float: bool) -> None:
    """No element may hold the poison. Of integers only the wide ones are looked at: a byte 0xA5 can be a result."""
    if output.itemsize == 1 or (not is_float and output.itemsize < 4):
        return
    bits = output.view(f"u{output.itemsize}") if output.ndim else output.reshape(1).view(f"u{output.itemsize}")
    poison = int.from_bytes(bytes([0xFF if is_float else _INT_POISON]) * output.itemsize, "little")
    where = np.argwhere(bits == poison)
    if len(where):
        index = ", ".join(str(int(i)) for i in where[0][: max(output.ndim, 1)])
        raise errors.Uninitialised(
            kernel,
            f"leaves {name}[{index}] ({len(where)} of {output.size} elements) unwritten, or made of memory that "
            "nobody wrote",
        )


# ----------------------------------------------------------------------------------------------------------- running


def _run(
    kernel: str,
    exported: Exported,
    library: _Library,
    arguments: list[NDArray[Any]],
    outputs: dict[str, NDArray[Any]],
    floats: set[str],
    launch: Launch,
    knobs: Knobs,
) -> None:
    names = [p.name for p in exported.parameters if p.space is not None]
    buffers = (_Buffer * len(arguments))(
        *(
            _Buffer(a.ctypes.data, a.nbytes, a.itemsize, name in outputs, poison, a.itemsize)
            for name, a in zip(names, arguments, strict=True)
            for poison in (0xFF if name in floats else _INT_POISON,)
        )
    )
    grid = launch.grid
    block = tuple(min(size, limit) for size, limit in zip(launch.threadgroup, grid, strict=True))  # as MLX does
    report = _Report()
    with _RUNNING:
        _runtime().emu_run(
            ctypes.cast(library.handle.emu_kernel, ctypes.c_void_p),
            buffers,
            len(arguments),
            ctypes.byref(_Size(*grid)),
            ctypes.byref(_Size(*block)),
            ctypes.byref(_Knobs(ORDERS.index(knobs.order), knobs.guard == "front", knobs.seconds, knobs.seed)),
            ctypes.byref(report),
        )
    if report.kind:
        raise _error(kernel, exported, library, report, names, arguments)


def _error(
    kernel: str, exported: Exported, library: _Library, report: _Report, names: list[str], arguments: list[NDArray[Any]]
) -> errors.KernelError:
    lines = exported.text.splitlines()

    def place(line: int, pc: int) -> str:
        line = line or (library.line(pc) if pc else 0)
        return f" at line {line} ({lines[line - 1].strip()})" if 0 < line <= len(lines) else ""

    what = report.what.decode(errors="replace")
    if report.buffer >= 0:
        array = arguments[report.buffer]
        what = what.replace("{buffer}", f"{names[report.buffer]}[{report.element}] of {array.size} elements")
    what = what.replace("{at}", place(report.line, report.pc))
    what = what.replace("{other_at}", place(report.other_line, report.other_pc))
    what = what.replace("{other}", str(report.other_thread.tuple()))
    threadgroup = report.threadgroup.tuple() if report.has_thread else None
    thread = report.thread.tuple() if report.has_thread else None
    return _ERRORS[report.kind](kernel, what, threadgroup, thread)


# ---------------------------------------------------------------------------------------------------------- building


class _Library:
    """A compiled kernel."""

    def __init__(self, path: Path, name: str) -> None:
        self.handle = ctypes.CDLL(str(path))
        self._path = path
        self._name = name

    def line(self, pc: int) -> int:
        """The line of the kernel's text at a return address, 0 when it is not known."""
        base = _base_address(self._path)
        tool = shutil.which("addr2line")
        if base is None or tool is None:
            return 0
        done = subprocess.run(
            [tool, "-i", "-e", str(self._path), hex(pc - base - 1)], capture_output=True, text=True, timeout=HUNG
        )
        for where in done.stdout.splitlines():  # the innermost inlined function first
            if found := re.search(re.escape(f"{self._name}.metal:") + r"(\d+)", where):
                return int(found.group(1))
        return 0


def _base_address(path: Path) -> int | None:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        starts = [int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith(str(path))]
    return min(starts, default=None)


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The runtime, whose names the kernels' libraries are bound to."""
    text = (_HERE / "runtime.cpp").read_text()
    path = _build("runtime", text, ())
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.emu_run.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_int, *[ctypes.c_void_p] * 4]
    library.emu_run.restype = ctypes.c_int
    return library


@functools.lru_cache(maxsize=1024)
def _kernel_library(name: str, exported: Exported, contract: bool) -> _Library:
    for number, line in enumerate(exported.text.splitlines(), start=1):
        if word := _FORBIDDEN.search(line.partition("//")[0]):
            raise errors.ForbiddenError(
                name, f"uses {word.group()}, which Metal does not have (line {number}: {line.strip()})"
            )
    _runtime()  # before anything that needs its symbols
    flags = (*_KERNEL, f"-ffp-contract={'fast' if contract else 'off'}")
    return _Library(_build(name, translate(name, exported), flags), name)


def _build(name: str, text: str, flags: tuple[str, ...]) -> Path:
    """The library of this text, from the cache or freshly built.

    Raises: CompileError with the first of the compiler's errors.
    """
    command = ["g++", *_COMMON, _machine(), *flags]
    digest = hashlib.sha256("\0".join([*command, _compiler(), _headers(), _processor(), text]).encode())
    target = _cache() / f"{name}-{digest.hexdigest()[:24]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
        source, library = Path(folder, f"{name}.cpp"), Path(folder, "library.so")
        source.write_text(text)
        done = subprocess.run(
            [*command, f"-I{_HERE}", str(source), "-o", str(library)], capture_output=True, text=True, timeout=HUNG
        )
        if done.returncode:
            raise errors.CompileError(name, f"does not compile:\n{_first_error(done.stderr)}")
        os.replace(library, target)  # atomic: another process sees no library or a whole one
    return target


def _first_error(output: str) -> str:
    lines = output.splitlines()
    for i, line in enumerate(lines):
        if "error:" in line:
            return "\n".join(lines[i : i + 8])
    return output[-2000:]


def _cache() -> Path:
    folder = Path(tempfile.gettempdir(), f"specdec-metal-emulator-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise errors.EmulatorUnavailable(f"{folder} belongs to another user")
    return folder


def _machine() -> str:
    return "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def _fuses() -> bool:
    return platform.machine() in ("arm64", "aarch64") or bool(re.search(r"\bfma\b", _processor()))


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, timeout=HUNG).stdout.partition("\n")[0]


@functools.cache
def _headers() -> str:
    return (_HERE / "shim.h").read_text() + (_HERE / "runtime.h").read_text()


@functools.cache
def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in text.splitlines() if line.startswith(wanted)}))

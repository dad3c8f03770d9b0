"""Compile a kernel's text with g++ and run it: one fiber per lane of a simdgroup, one simdgroup at a time."""

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
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import mlx.core as mx
import numpy as np

from specdec.backends.metal.kernels.kernel import MslKernel, OnMetal
from tests.processes import HUNG

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HERE = Path(__file__).parent
_COMMON = ("-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-fno-math-errno", "-Wall", "-U_FORTIFY_SOURCE")
_KERNEL = (
    "-fsingle-precision-constant",  # Metal has no double: 1.0 is a float
    "-ftrivial-auto-var-init=pattern",  # a local variable that nobody set is not what it was a call ago
    "-fno-strict-aliasing",
    "-fsanitize=bounds,shift,integer-divide-by-zero,signed-integer-overflow,alignment,float-cast-overflow",
    "-fsanitize-undefined-trap-on-error",
    "-Werror=uninitialized",
    "-Werror=return-type",
    "-Werror=vla",
    "-Wno-attributes",  # those of Metal
    "-Wno-unused",
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-pragmas",
    "-Wno-sign-compare",
)
_GCC = 12  # the first with -ftrivial-auto-var-init
_MAX_THREADS = 256  # in a threadgroup: what a kernel of many registers is still given
_LANES = 32
_FLOAT_POISON, _INT_POISON = 0xFF, 0xA5  # the former is a NaN that no arithmetic of the host makes
_RUNNING = threading.Lock()  # the runtime has one set of fibers

# an attribute of the running thread: its value in C++
_THREAD = {"thread_position_in_grid": "uint3{x, y, z}", "thread_index_in_simdgroup": "x % 32"}

Order = Literal["ascending", "descending", "random"]
ORDERS: tuple[Order, ...] = ("ascending", "descending", "random")


@attrs.frozen(kw_only=True)
class Knobs:
    """What Metal leaves open.

    Attributes:
        order: in which order lanes, and simdgroups, get their turns. A lane runs until it waits for others.
        contract: whether the compiler may fuse ``a * b + c`` across statements.
        seed: of the random order.
    """

    order: Order = attrs.field(default="ascending", validator=attrs.validators.in_(ORDERS))
    contract: bool = False
    seed: int = 0


class KernelError(Exception):
    """Something that is wrong with a kernel or its launch, in one sentence with its name and thread."""

    def __init__(self, kernel: str, what: str) -> None:
        super().__init__(f"kernel {kernel}: {what}")


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("host", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("item", ctypes.c_uint32),
        ("poison", ctypes.c_int32),
    ]


def unavailable() -> str | None:
    """Why this machine cannot emulate, or None."""
    if not sys.platform.startswith("linux"):
        return "the emulator runs on Linux only"
    if shutil.which("g++") is None:
        return "g++ is not on PATH"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, timeout=HUNG).stdout.strip()
    if int(version.partition(".")[0]) < _GCC:
        return f"the emulator needs g++ {_GCC} or newer, found {version!r}"
    if platform.machine() not in ("arm64", "aarch64") and not re.search(r"\bfma\b", _processor()):
        return "this processor has no fused multiply-add, without which contraction cannot be shown"
    return None


def emulate(
    kernel: MslKernel,
    inputs: Sequence[mx.array],
    launch: Mapping[str, Any],
    knobs: Knobs | None = None,
    *,
    partial: Collection[str] = (),
) -> list[NDArray[Any]]:
    """Run the text that MLX generates for this call. bfloat16 outputs come as their bits, uint16.

    Args:
        kernel: what to run.
        inputs: any arrays; they are made row contiguous, as MLX does.
        launch: the keywords of ``Executor.run``.
        knobs: what Metal leaves open; the default is ``Knobs()``.
        partial: outputs of which elements may stay unwritten; those hold NaN, or bytes 0xA5 for integers.

    Raises:
        KernelError: the text or the launch is refused, or a thread did what it must not.
    """
    knobs = knobs or Knobs()
    _check_launch(kernel, launch)
    function, text = _generated(kernel, inputs, launch)
    library, names = _compiled(kernel.name, function, text, knobs.contract)
    outputs = {
        name: np.empty(shape, np.uint16 if dtype == mx.bfloat16 else np.dtype(str(dtype).removeprefix("mlx.core.")))
        for name, shape, dtype in zip(kernel.outputs, launch["output_shapes"], launch["output_dtypes"], strict=True)
    }
    poison = {
        name: _FLOAT_POISON if mx.issubdtype(dtype, mx.floating) else _INT_POISON
        for name, dtype in zip(kernel.outputs, launch["output_dtypes"], strict=True)
    }
    arrays = outputs | {name: _host(array) for name, array in zip(kernel.inputs, inputs, strict=True)}
    arrays |= {f"{name}_shape": np.array(array.shape, np.int32) for name, array in arrays.items()}
    buffers = (_Buffer * len(names))(
        *(
            _Buffer(name.encode(), array.ctypes.data, array.nbytes, array.itemsize, poison.get(name, -1))
            for name in names
            for array in (arrays[name],)
        )
    )
    with _RUNNING:
        grid, order = (ctypes.c_uint32 * 3)(*launch["grid"]), ORDERS.index(knobs.order)
        entry = ctypes.cast(library.emu_kernel, ctypes.c_void_p)
        wrong = _runtime().emu_run(entry, buffers, len(names), grid, order, knobs.seed)
    if wrong is not None:
        raise KernelError(kernel.name, wrong.decode())
    for name, output in outputs.items():
        if name not in partial:
            _check_written(kernel.name, name, output, poison[name])
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

    def run(self, kernel: MslKernel, inputs: Sequence[mx.array], **launch: Any) -> list[mx.array]:
        hosts = emulate(kernel, inputs, launch, self.knobs, partial=self.partial)
        return [
            made.view(dtype) if dtype == mx.bfloat16 else made
            for made, dtype in zip(map(mx.array, hosts), launch["output_dtypes"], strict=True)
        ]


def _host(array: mx.array) -> NDArray[Any]:
    """A row contiguous copy; bfloat16 as uint16."""
    flat = mx.contiguous(array)
    return np.ascontiguousarray(np.array(flat.view(mx.uint16) if array.dtype == mx.bfloat16 else flat))


def _check_launch(kernel: MslKernel, launch: Mapping[str, Any]) -> None:
    """A simdgroup is a line of the threadgroup, threadgroups are whole, and every GPU has room for one."""
    whole = all(size % group == 0 for size, group in zip(launch["grid"], launch["threadgroup"], strict=True))
    if launch["threadgroup"][0] != _LANES or np.prod(launch["threadgroup"]) > _MAX_THREADS or not whole:
        raise KernelError(kernel.name, f"has threadgroups of {launch['threadgroup']} in a grid of {launch['grid']}")


def _check_written(kernel: str, name: str, output: NDArray[Any], poison: int) -> None:
    """No element may hold the poison. Of integers only the wide ones are looked at: a byte 0xA5 can be a result."""
    if output.itemsize >= (2 if poison == _FLOAT_POISON else 4):
        elements = output.reshape(-1, 1).view(np.uint8)
        places = np.flatnonzero((elements == poison).all(1))
        if len(places):
            left = f"leaves {name}[{places[0]}] ({len(places)} of {output.size} elements) unwritten"
            raise KernelError(kernel, f"{left}, or made of memory that nobody wrote")


# ------------------------------------------------------------------------------------------------------------- texts


def _generated(kernel: MslKernel, inputs: Sequence[mx.array], launch: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the function and the text that MLX would hand to Apple's compiler. No array is computed."""
    found: list[list[Any]] = []

    def record(event: dict[str, Any]) -> None:
        if event.get("type") == "primitive" and event.get("name") == "CustomKernel":
            found.append(event["arguments"])

    try:
        mx.export_function(
            record,
            lambda *arrays: OnMetal().run(kernel, arrays, **launch),
            *(mx.zeros(array.shape, array.dtype) for array in inputs),
        )
    except (ValueError, RuntimeError, TypeError) as error:
        raise KernelError(kernel.name, f"is refused by MLX: {error}") from error
    ((function, text, *_),) = found
    return function, text


def _translated(kernel: str, function: str, text: str) -> tuple[str, list[str]]:
    """A C++ translation unit with the function ``emu_kernel``, and the names of its buffers."""
    body, _, instantiation = text.partition("template [[host_name(")  # which names an attribute where C++ has none
    arguments = re.search(rf"decltype\({function}(<.*>)\)", instantiation)
    start = body.index(f"void {function}(")
    values, names = [], []
    for parameter in re.split(r",\s*(?=[^<>]*\[\[)", body[start : body.index(") {", start)]):
        name, attribute = re.findall(r"(\w+) \[\[(\w+)", parameter)[0]
        if attribute == "buffer":
            space, type_, mark = re.findall(r"(device|constant) (\w+)([*&])", parameter)[0]
            type_ = f"Constant<{type_}>" if (space, mark) == ("constant", "*") else type_
            values.append(f"{'*' * (mark == '&')}static_cast<{type_}*>(buffers[{len(names)}])")
            names.append(name)
        elif attribute in _THREAD:
            values.append(_THREAD[attribute])
        else:
            raise KernelError(kernel, f"uses the attribute {attribute}, which the emulator does not have")
    body = re.sub(r"\bconstant (\w+)\*", r"Constant<\1>*", body)
    call = f"{function}{arguments[1] if arguments else ''}({', '.join(values)})"
    return (
        f'#include "shim.h"\nnamespace metal {{ namespace text {{\n#line 1 "{kernel}.metal"\n{body}\n'
        f'extern "C" void emu_kernel(void* const* buffers, uint x, uint y, uint z) {{ {call}; }}\n}}}}\n'
    ), names


# ---------------------------------------------------------------------------------------------------------- building


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The runtime, whose names the kernels' libraries are bound to."""
    library = ctypes.CDLL(str(_build("runtime", (_HERE / "runtime.cpp").read_text(), ())), mode=ctypes.RTLD_GLOBAL)
    library.emu_run.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint32] * 2]
    library.emu_run.restype = ctypes.c_char_p
    return library


@functools.lru_cache(maxsize=1024)
def _compiled(kernel: str, function: str, text: str, contract: bool) -> tuple[ctypes.CDLL, list[str]]:
    """The library of a kernel, and the names of its buffers."""
    _runtime()  # before anything that needs its symbols
    unit, names = _translated(kernel, function, text)
    flags = (*_KERNEL, f"-ffp-contract={'fast' if contract else 'off'}")
    return ctypes.CDLL(str(_build(kernel, unit, flags))), names


def _build(name: str, text: str, flags: tuple[str, ...]) -> Path:
    """The library of this text, from the cache or freshly built.

    Raises: KernelError with the first of the compiler's errors.
    """
    machine = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    command = ["g++", *_COMMON, machine, *flags]
    key = "\0".join([*command, _compiler(), (_HERE / "shim.h").read_text(), _processor(), text])
    target = _cache() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as folder:
        source, library = Path(folder, f"{name}.cpp"), Path(folder, "library.so")
        source.write_text(text)
        done = subprocess.run(
            [*command, f"-I{_HERE}", str(source), "-o", str(library)], capture_output=True, text=True, timeout=HUNG
        )
        if done.returncode:
            first = done.stderr[done.stderr.find("error:") :][:2000]
            raise KernelError(name, f"does not compile:\n{first}")
        os.replace(library, target)  # atomic: another process sees no library or a whole one
    return target


def _cache() -> Path:
    folder = Path(tempfile.gettempdir(), f"specdec-metal-emulator-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, timeout=HUNG).stdout.partition("\n")[0]


@functools.cache
def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))

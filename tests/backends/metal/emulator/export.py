"""The text that MLX generates for a kernel and would hand to Apple's compiler, without a GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx

from specdec.backends.metal.kernels.kernel import Launch, MslKernel
from tests.backends.metal.emulator.errors import LaunchError


@attrs.frozen
class Parameter:
    """A parameter of the generated function: ``const device float* x [[buffer(0)]]``."""

    type: str  # without address space, const and * or &: "float", "uint3"
    name: str
    space: str | None  # "device", "constant", or None for an attribute of the thread
    pointer: bool


@attrs.frozen
class Exported:
    """A kernel as MLX generates it.

    Attributes:
        text: of the whole, from the header to the instantiation.
        function: name of the kernel function.
        arguments: its template arguments, "" without any.
        parameters: in the order of their buffers; attributes of the thread follow.
    """

    text: str
    function: str
    arguments: str
    parameters: tuple[Parameter, ...]


def export(kernel: MslKernel, inputs: Sequence[mx.array], launch: Launch) -> Exported:
    """What MLX generates for these shapes and dtypes. No array is computed.

    Raises: LaunchError when MLX refuses the call.
    """
    specs = tuple((tuple(array.shape), array.dtype) for array in inputs)
    return _export(kernel, specs, _Key(launch))


@attrs.frozen(eq=False)
class _Key:
    """A launch as a key of a cache: dtypes compare by name."""

    launch: Launch

    def __hash__(self) -> int:
        return hash(repr(self.launch))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and repr(self.launch) == repr(other.launch)


@functools.lru_cache(maxsize=4096)
def _export(kernel: MslKernel, specs: tuple[tuple[tuple[int, ...], mx.Dtype], ...], key: _Key) -> Exported:
    launch = key.launch
    compiled = mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=kernel.header,
        ensure_row_contiguous=True,
        atomic_outputs=False,
    )

    def call(*arrays: mx.array) -> Any:
        return compiled(
            inputs=list(arrays),
            template=list(launch.template) or None,
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            output_shapes=list(launch.output_shapes),
            output_dtypes=list(launch.output_dtypes),
        )

    found: list[list[Any]] = []

    def record(event: dict[str, Any]) -> None:
        if event.get("type") == "primitive" and event.get("name") == "CustomKernel":
            found.append(event["arguments"])

    try:
        mx.export_function(record, call, *(mx.zeros(shape, dtype) for shape, dtype in specs))
    except (ValueError, RuntimeError, TypeError) as error:
        raise LaunchError(kernel.name, f"is refused by MLX: {error}") from error
    if len(found) != 1:
        raise LaunchError(kernel.name, f"was exported by MLX {mx.__version__} as {len(found)} kernels instead of 1")
    function, text, *numbers = found[0]
    if tuple(numbers[:6]) != (*launch.grid, *launch.threadgroup):
        raise LaunchError(kernel.name, f"was exported by MLX {mx.__version__} in a format that is not known here")
    return Exported(text, function, _arguments(text, function), _parameters(kernel.name, text, function))


def _arguments(text: str, function: str) -> str:
    found = re.search(r"decltype\(" + re.escape(function) + r"<(.*)>\)", text)
    return "" if found is None else found.group(1)


_PARAMETER = re.compile(
    r"\s*(?:const\s+)?(?:(device|constant)\s+)?(?:const\s+)?([A-Za-z_]\w*)\s*([*&]?)\s*(\w+)\s*\[\[.*?\]\]\s*"
)


def _parameters(kernel: str, text: str, function: str) -> tuple[Parameter, ...]:
    start = text.index(f"void {function}(") + len(f"void {function}(")
    written = text[start : text.index(") {", start)]
    parameters = []
    for part in re.split(r",(?=\s*(?:const|device|constant|\w+\s+\w+\s*\[\[))", written):
        found = _PARAMETER.fullmatch(part)
        if found is None:
            raise LaunchError(kernel, f"has a parameter that is not understood here: {part.strip()!r}")
        space, type_, mark, name = found.groups()
        parameters.append(Parameter(type_, name, space, mark == "*"))
    return tuple(parameters)

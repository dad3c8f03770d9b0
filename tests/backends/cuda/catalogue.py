"""Compile example launches of every kernel ahead of time, without a device: shared memory, spills and copies.

An example calls a wrapper with the sizes of a real model. Its launches are intercepted and compiled with the
specialisation that triton would choose for their arguments.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.backends.cuda.kernels import (
    attention,
    commit,
    delta,
    delta_chunked,
    latent,
    moe,
    noise,
    norm,
    packed,
    rope,
    route,
    rows,
)
from specdec.backends.cuda.kernels.launch import interpreting, recording
from specdec.backends.cuda.weights import DenseWeight, ExpertStack, Fp8BlockWeight, Nvfp4Weight
from specdec.backends.ops import DeltaShape, Routing
from specdec.errors import UnsupportedError

ARCHITECTURES = {80: 163 * 1024, 90: 227 * 1024}  # compute capability -> bytes of shared memory of one block


@attrs.frozen(kw_only=True)
class Launch:
    """One intercepted launch."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@attrs.frozen(kw_only=True)
class Compiled:
    """Resources of one kernel on one architecture."""

    name: str
    kernel: str
    architecture: int
    shared: int  # bytes per block
    spilled: int  # bytes of local memory per thread, stack included
    copies: tuple[int, ...]  # widths of cp.async in bytes, ascending
    ttir: str = attrs.field(repr=False)
    ptx: str = attrs.field(repr=False)


class _Catcher:
    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.launches.append(Launch(kernel=kernel, grid=grid, args=args, options=options))


def launches(name: str) -> list[Launch]:
    """Return the launches of one example without running them."""
    catcher = _Catcher()
    with recording(catcher):
        EXAMPLES[name]()
    return catcher.launches


_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def compile_launch(name: str, launch: Launch, architecture: int) -> Compiled:
    """Compile one launch. Raises: UnsupportedError in the interpreter, which compiles nothing."""
    if interpreting():
        raise UnsupportedError(
            "kernels cannot be compiled while TRITON_INTERPRET is set", try_="unset it, in a fresh process"
        )
    signature, constants, attributes = _specialisation(launch).parts()
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {name: launch.options[name] for name in _OPTIONS}
    binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    usage = _usage(binary.asm["cubin"])
    ptx = binary.asm["ptx"]
    return Compiled(
        name=name,
        kernel=launch.kernel.__name__,
        architecture=architecture,
        shared=binary.metadata.shared,
        spilled=usage["STACK"] + usage["LOCAL"],
        copies=_copies(ptx),
        ttir=binary.asm["ttir"],
        ptx=ptx,
    )


def compiled(architectures: tuple[int, ...] = tuple(ARCHITECTURES)) -> Iterator[Compiled]:
    """Compile the launches of every example for every architecture; repeated specialisations are skipped."""
    seen: set[object] = set()
    for name in EXAMPLES:
        for launch in launches(name):
            key = _specialisation(launch)
            if key not in seen:
                seen.add(key)
                for architecture in architectures:
                    yield compile_launch(name, launch, architecture)


@attrs.frozen
class _Specialisation:
    """The key of a binary: parameters with their types, constants, and which arguments are multiples of 16."""

    kernel: str
    kinds: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[Any, ...]

    def parts(self) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], list[list[Any]]]]:
        """The arguments of ``ASTSource``."""
        return (
            dict(self.kinds),
            {(index,): value for index, value in self.constants},
            {(index,): [["tt.divisibility", 16]] for index in self.divisible},
        )


def _specialisation(launch: Launch) -> _Specialisation:
    kinds: list[tuple[str, str]] = []
    constants: list[tuple[int, Any]] = []
    divisible: list[int] = []
    values = dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.options
    for index, parameter in enumerate(launch.kernel.params):
        value, free = values[parameter.name], parameter.do_not_specialize
        kind, even = _kind(value)
        if parameter.is_constexpr or value is None or (kind.startswith("i") and value == 1 and not free):
            kinds.append((parameter.name, "constexpr"))
            constants.append((index, value))
            continue
        kinds.append((parameter.name, kind))
        if even and not free and not parameter.do_not_specialize_on_alignment:
            divisible.append(index)
    options = tuple(launch.options[name] for name in _OPTIONS)
    return _Specialisation(launch.kernel.__name__, tuple(kinds), tuple(constants), tuple(divisible), options)


def _kind(value: Any) -> tuple[str, bool]:
    """Triton's type of an argument, and whether it is a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype], value.data_ptr() % 16 == 0
    if isinstance(value, bool):
        return "u1", False
    if isinstance(value, int):
        return ("i32" if -(2**31) <= value < 2**31 else "i64"), value % 16 == 0
    return ("fp32" if isinstance(value, float) else "constexpr"), False


_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


def _usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL, SHARED of the one kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", run.stdout)}


def _copies(ptx: str) -> tuple[int, ...]:
    """Widths of asynchronous copies to shared memory."""
    return tuple(
        sorted({int(width, 0) for width in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (\w+)", ptx)})
    )


# --- examples: sizes of Qwen3.5 0.8B, 4B and 9B and of DeepSeek-V3, three rows ----------------------------------------


def _act(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def _float(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float32)


def _row() -> torch.Tensor:
    return torch.zeros(8, dtype=torch.int64)


def _weight(form: str, n: int, k: int) -> Any:
    if form == "bf16":
        return DenseWeight(_act(n, k))
    codes = torch.empty(n, k if form == "fp8" else k // 2, dtype=torch.uint8)
    if form == "fp8":
        return Fp8BlockWeight(codes, _float(-(-n // 128), -(-k // 128)), (128, 128))
    return Nvfp4Weight(codes, torch.empty(n, k // 16, dtype=torch.uint8), _float(1))


def _experts(form: str) -> object:
    def stack(n: int, k: int) -> ExpertStack:
        return ExpertStack(tuple(_weight(form, n, k) for _ in range(8)))

    ids = torch.empty(3, 8, dtype=torch.int32)
    x, stacks = _act(3, 2048), (stack(512, 2048), stack(512, 2048), stack(2048, 512))
    return moe.experts(x, ids, _float(3, 8), *stacks, x, shared=x, shared_gate=_act(1, 2048))


def _product(form: str) -> object:
    weight = _weight(form, 12352, 4096)
    return [packed.product(_act(3, 4096), weight, 12352, dtype) for dtype in (torch.bfloat16, torch.float32)]


def _sequence(dtype: torch.dtype, heads: int, kv_heads: int, value_heads: int) -> None:
    """Attention and the delta rule."""

    def act(*shape: int) -> torch.Tensor:
        return _act(*shape, dtype=dtype)

    pair, keys, weight, row = act(3, heads, 2, 256), act(3, kv_heads, 256), _float(256), _row()
    rope.rotate_and_write(pair[:, :, 0], keys, keys, weight, weight, 1e-6, _float(32), row)
    gate, query = pair[:, :, 1], act(3, heads, 256)
    attention.attend(query, row, kv_heads=kv_heads, scale=1 / 16, gate=gate, max_length=32768)
    shape = DeltaShape(key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, kernel=4)
    gates, vector, taps = act(3, value_heads), _float(value_heads), _float(shape.channels, 4)
    delta.delta_rows(act(3, shape.channels), gates, gates, taps, vector, vector, row, shape)


def _prompt() -> None:
    shape = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
    x, row = torch.zeros(65, shape.channels, dtype=torch.bfloat16), _row()
    zeros, vector = torch.zeros(65, 32, dtype=torch.bfloat16), torch.zeros(32)
    u = delta.conv_window(x, _float(shape.channels, 4), row)
    delta_chunked.delta_chunked(u, zeros, zeros, vector, vector, row, shape)


def _rows() -> None:
    x, table, both, pairs = _act(3, 768), _act(1024, 768), _act(3, 2, 3072), _act(3, 128, 64)
    rows.silu_product(both[:, 0], both[:, 1], torch.bfloat16)
    rows.gelu(_act(3, 3072))
    rows.scale(_act(3, 3072), 0.22)
    for first in (0, _row()):
        rows.grow(_act(3, 4096), 0.1, 16384, first)
    for added in ((x,), (table, 5), (table, _row())):
        rows.add(x, *added)
    rows.embed(_act(248320, 4096), torch.zeros(4, dtype=torch.int32))
    halves = rows.concat(pairs[..., 0::2], pairs[..., 1::2])
    rows.concat(_act(3, 4096), _act(3, 4096))
    rows.concat(_act(3, 128, 512), halves)


def _norms() -> None:
    norm.rms_norm(_act(3, 4096), _float(4096), 1e-6)
    norm.gated_rms_norm(_act(3, 32, 128), _act(3, 32, 128), _float(128), 1e-6)
    norm.layer_norm(_act(3, 768), _float(768), _float(768), 1e-5)
    rope.norm_rope(_act(3, 128, 64), None, 1e-6, _float(32), _row())


def _noise() -> None:
    key, ids = torch.empty(2, dtype=torch.int64), torch.empty(16384, dtype=torch.int32)
    noise.perturb(_float(3, 248320), key)
    noise.perturb(_float(3, 16384), key, ids)


def _route() -> None:
    grouped = Routing(top_k=8, scores="sigmoid", normalised=True, scale=2.5, groups=8, kept_groups=4)
    route.choose(_float(3, 256), grouped, _float(256))
    route.choose(_float(3, 256), Routing(top_k=8, scores="softmax", normalised=True))


# name -> a function that calls wrappers; memory that is allocated but not touched costs nothing
EXAMPLES: dict[str, Callable[[], object]] = {
    **{f"{form} experts 8 of 2048->512->2048": functools.partial(_experts, form) for form in ("bf16", "fp8", "nvfp4")},
    **{f"{form} product 4096->12352": functools.partial(_product, form) for form in ("fp8", "nvfp4")},
    "0.8B": lambda: _sequence(torch.bfloat16, 8, 2, 16),
    "4B 9B": lambda: _sequence(torch.bfloat16, 16, 4, 32),
    "float32": lambda: _sequence(torch.float32, 16, 4, 32),
    "attend 32/8x128": lambda: attention.attend(_act(3, 32, 128), _row(), kv_heads=8, scale=0.1, max_length=8192),
    "attend 12/4x64": lambda: attention.attend(_act(3, 12, 64), _row(), kv_heads=4, scale=0.1, max_length=8192),
    "attend latent 128x576": lambda: latent.attend_latent(
        _act(3, 128, 576), _act(3, 576), _row(), scale=0.1, value_dims=512, max_length=4096
    ),
    "delta chunked 16/32x128x128": _prompt,
    "commit 32": lambda: commit.commit_rows(torch.zeros(32, 8, dtype=torch.int64), torch.zeros(32).int(), 3),
    "rows": _rows,
    "norms": _norms,
    "noise on 248320 logits": _noise,
    "route 8 of 256, grouped and plain": _route,
}

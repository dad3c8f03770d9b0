"""Compile example launches of every kernel ahead of time, without a device: shared memory, spills and copies.

An example calls a wrapper with the sizes of a real model. Its launches are intercepted and compiled as triton would
before it runs them.
"""

# mypy: allow-untyped-calls
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from specdec.backends.cuda.kernels import (
    attention,
    commit,
    delta,
    delta_chunked,
    latent,
    launch,
    moe,
    noise,
    norm,
    packed,
    rope,
    route,
    rows,
)
from specdec.backends.cuda.kernels.launch import interpreting
from specdec.backends.cuda.weights import DenseWeight, ExpertStack, Fp8BlockWeight, Nvfp4Weight
from specdec.backends.ops import DeltaShape, Routing
from specdec.errors import UnsupportedError

ARCHITECTURES = {80: 163 * 1024, 90: 227 * 1024}  # compute capability -> bytes of shared memory of one block


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


@attrs.frozen
class _Architecture:
    """What triton asks a driver before it compiles. Binaries are kept by the device's number."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@attrs.define
class _Compiler:
    """Compiles launches instead of running them."""

    binaries: dict[Any, str] = attrs.field(factory=dict)  # with the names of their kernels

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.binaries[kernel.warmup(*args, grid=grid, **options)] = kernel.__name__


def compiled(architectures: tuple[int, ...] = tuple(ARCHITECTURES)) -> Iterator[Compiled]:
    """Compile the launches of every example for every architecture; repeated specialisations are skipped.

    Raises: UnsupportedError in the interpreter, which compiles nothing.
    """
    if interpreting():
        raise UnsupportedError(
            "kernels cannot be compiled while TRITON_INTERPRET is set", try_="unset it, in a fresh process"
        )
    seen: set[Any] = set()
    for architecture in architectures:
        driver.set_active(_Architecture(architecture))
        for name, example in EXAMPLES.items():
            compiler = _Compiler()
            with mock.patch.object(launch, "execute", compiler.launch):
                example()
            for binary, kernel in compiler.binaries.items():
                if binary not in seen:
                    seen.add(binary)
                    yield _compiled(name, kernel, architecture, binary)


def _compiled(name: str, kernel: str, architecture: int, binary: Any) -> Compiled:
    usage, ptx = _usage(binary.asm["cubin"]), binary.asm["ptx"]
    return Compiled(
        name=name,
        kernel=kernel,
        architecture=architecture,
        shared=binary.metadata.shared,
        spilled=usage["STACK"] + usage["LOCAL"],
        copies=tuple(sorted({int(width, 0) for width in _COPY.findall(ptx)})),
        ttir=binary.asm["ttir"],
        ptx=ptx,
    )


_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (\w+)")  # to shared memory, with its width


def _usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL, SHARED of the one kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", run.stdout)}


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

"""Compile example launches of every kernel ahead of time and report registers, shared memory, spills and load widths.

No device is needed. ``python -m specdec.backends.cuda.kernels.catalogue`` prints the table for sm_80 and sm_90.
An example calls a wrapper with the sizes of a real model. Its launches are intercepted and compiled with the
specialisation that triton would choose for their arguments.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.backends.cuda.kernels.launch import interpreting, recording
from specdec.errors import UnsupportedError

ARCHITECTURES = {80: 163 * 1024, 90: 227 * 1024}  # compute capability -> shared memory that one block may have, bytes
_SHARED = (
    1024  # bytes of shared memory that every block takes beside its own; a multiprocessor has so much above a block
)
_REGISTERS = 65536  # of 32 bits, per multiprocessor; given to warps by 8 for each of 32 threads
_WARPS = 64  # of one multiprocessor
_BLOCKS = 32

# name -> a function that calls wrappers; memory that is allocated but not touched costs nothing
EXAMPLES: dict[str, Callable[[], object]] = {}


def example(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register a function whose launches are compiled."""

    def register(function: Callable[[], object]) -> Callable[[], object]:
        EXAMPLES[name] = function
        return function

    return register


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
    grid: tuple[int, ...]
    warps: int
    registers: int
    shared: int  # bytes per block
    spilled: int  # bytes of local memory per thread, stack included
    copies: tuple[int, ...]  # widths of cp.async in bytes, ascending
    loads: tuple[int, ...]  # widths of ld.global in bytes, ascending
    parameters: tuple[str, ...]  # names of the kernel's parameters that are not constants, in order
    ttir: str = attrs.field(repr=False)
    ptx: str = attrs.field(repr=False)

    @property
    def resident(self) -> int:
        """Programs that one multiprocessor runs at a time, by registers, shared memory and warps.

        Source: NVIDIA, "CUDA C++ programming guide", technical specifications per compute capability.
        """
        registers = 32 * 8 * -(-self.registers // 8)
        by_registers = _REGISTERS // registers // self.warps
        by_shared = (ARCHITECTURES[self.architecture] + _SHARED) // (self.shared + _SHARED)
        return min(by_registers, by_shared, _WARPS // self.warps, _BLOCKS)

    def before_access(self, parameter: str) -> int | None:
        """PTX instructions, in the order of the text, before the first access through a pointer; None without one."""
        if parameter not in self.parameters:
            return None
        source = f"_param_{self.parameters.index(parameter)}]"
        derived: set[str] = set()
        count = 0
        for line in self.ptx.splitlines():
            text = line.strip()
            if not text.endswith(";") or text.startswith((".", "//")):
                continue
            names = re.findall(r"%\w+", text)
            access = re.search(r"\b(?:cp\.async\.c[ag]|ld\.global|prefetch\.global)", text)
            if access and not derived.isdisjoint(names):
                return count
            target = re.match(r"(?:@!?%\w+\s+)?[\w.:]+\s+(%\w+),", text)
            if target and (source in text or not derived.isdisjoint(names[names.index(target[1]) + 1 :])):
                derived.add(target[1])
            count += 1
        return None


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
    specialisation = _specialisation(launch)
    signature, constants, attributes = specialisation.parts()
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {name: launch.options[name] for name in _OPTIONS}
    binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    usage = _usage(binary.asm["cubin"])
    ptx = binary.asm["ptx"]
    return Compiled(
        name=name,
        kernel=launch.kernel.__name__,
        architecture=architecture,
        grid=launch.grid,
        warps=launch.options["num_warps"],
        registers=usage["REG"],
        shared=binary.metadata.shared,
        spilled=usage["STACK"] + usage["LOCAL"],
        copies=_copies(ptx),
        loads=_loads(ptx),
        parameters=tuple(name for name, kind in specialisation.kinds if kind != "constexpr"),
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


def _loads(ptx: str) -> tuple[int, ...]:
    """Widths of loads from global memory."""
    found = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bufs](\d+)", ptx)
    return tuple(sorted({int(count or 1) * int(bits) // 8 for count, bits in found}))


def table(rows: list[Compiled]) -> str:
    """Format the results as a table."""
    head = f"{'example':<39}{'kernel':<20}{'sm':>3} {'grid':>14} {'warps':>5} {'regs':>5} {'shared':>7} {'spilled':>7}"
    lines = [head + " per SM  cp.async  ld.global"]
    for row in rows:
        grid = "x".join(map(str, row.grid))
        lines.append(
            f"{row.name:<39}{row.kernel:<20}{row.architecture:>3} {grid:>14} {row.warps:>5} {row.registers:>5} "
            f"{row.shared:>7} {row.spilled:>7} {row.resident:>6}  {'/'.join(map(str, row.copies)):<8}  "
            f"{'/'.join(map(str, row.loads))}"
        )
    return "\n".join(lines)


# --- examples: Qwen3.5-like sizes, three rows -------------------------------------------------------------------------


def _act(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def _float(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float32)


def _weight(form: str, n: int, k: int) -> Any:
    from specdec.backends.cuda.weights import DenseWeight, Fp8BlockWeight, Nvfp4Weight

    if form == "bf16":
        return DenseWeight(_act(n, k))
    codes = torch.empty(n, k if form == "fp8" else k // 2, dtype=torch.uint8)
    if form == "fp8":
        return Fp8BlockWeight(codes, _float(-(-n // 128), -(-k // 128)), (128, 128))
    return Nvfp4Weight(codes, torch.empty(n, k // 16, dtype=torch.uint8), _float(1))


def _products(form: str) -> None:
    from specdec.backends.cuda.kernels import gemm, norm

    @example(f"{form} project norm 4096->12352")
    def _project() -> object:
        return gemm.project(_act(3, 4096), [_weight(form, 12352, 4096)], prologue=norm.Rms(_float(4096), 1e-6))

    @example(f"{form} linear residual 12288->4096")
    def _linear() -> object:
        return gemm.linear(_act(3, 12288), _weight(form, 4096, 12288), residual=_act(3, 4096))

    @example(f"{form} swiglu norm 4096->12288")
    def _swiglu() -> object:
        gate, up = _weight(form, 12288, 4096), _weight(form, 12288, 4096)
        return gemm.swiglu(_act(3, 4096), gate, up, prologue=norm.Rms(_float(4096), 1e-6))

    @example(f"{form} experts 8 of 2048->512->2048")
    def _experts() -> object:
        from specdec.backends.cuda.kernels import moe
        from specdec.backends.cuda.weights import ExpertStack

        def stack(n: int, k: int) -> ExpertStack:
            return ExpertStack(tuple(_weight(form, n, k) for _ in range(8)))

        ids = torch.empty(3, 8, dtype=torch.int32)
        shared = (_weight(form, 512, 2048), _weight(form, 512, 2048), _weight(form, 2048, 512))
        both: dict[str, Any] = {"shared": shared, "shared_gate": _act(1, 2048)} if form == "bf16" else {}
        return moe.experts(
            _act(3, 2048),
            ids,
            _float(3, 8),
            stack(512, 2048),
            stack(512, 2048),
            stack(2048, 512),
            _act(3, 2048),
            **both,
        )

    if form == "nvfp4":
        return  # in existing checkpoints, heads are bfloat16 or FP8

    @example(f"{form} head 4096->248320")
    def _head() -> object:
        from specdec.backends.cuda.kernels import head

        return head.best(_act(3, 4096), _weight(form, 248320, 4096), prologue=norm.Rms(_float(4096), 1e-6))


for _form in ("bf16", "fp8", "nvfp4"):
    _products(_form)


@example("bf16 linear gated 32x128->4096")
def _gated() -> object:
    from specdec.backends.cuda.kernels import gemm, norm

    prologue = norm.GatedRms(_act(3, 32, 128), _float(128), 1e-6)
    return gemm.linear(_act(3, 32, 128), _weight("bf16", 4096, 4096), residual=_act(3, 4096), prologue=prologue)


@example("bf16 sampling head 4096->248320")
def _sampling_head() -> object:
    from specdec.backends.cuda.kernels import head

    noise = head.Noise.of(1, 100, 0.8, torch.device("cpu"))
    ids = torch.empty(16384, dtype=torch.int32)
    return head.sample(_act(3, 4096), _weight("bf16", 16384, 4096), noise=noise, ids=ids)


@example("noise on 248320 logits")
def _noise() -> object:
    from specdec.backends.cuda.kernels import head

    noise = head.Noise.of(1, 100, 1.0, torch.device("cpu"))
    ids = torch.empty(16384, dtype=torch.int32)
    return head.perturbed(_float(3, 248320), noise), head.perturbed(_float(3, 16384), noise, ids=ids)


@example("float32 linear 1000->100")
def _float32() -> object:
    from specdec.backends.cuda.kernels import gemm
    from specdec.backends.cuda.weights import DenseWeight

    return gemm.linear(_float(3, 1000), DenseWeight(_float(100, 1000)))


@example("norm 4096")
def _norm() -> object:
    from specdec.backends.cuda.kernels import norm

    return norm.rms_norm(_act(3, 4096), _float(4096), 1e-6)


@example("gated norm 32x128")
def _gated_norm() -> object:
    from specdec.backends.cuda.kernels import norm

    return norm.gated_rms_norm(_act(3, 32, 128), _act(3, 32, 128), _float(128), 1e-6)


# --- sequences: attention, the delta rule and acceptance at the sizes of Qwen3.5 0.8B, 4B and 9B, and DeepSeek-V3 -----


def _sequences(size: str, dtype: torch.dtype, heads: int, kv_heads: int, value_heads: int) -> None:
    def act(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    @example(f"{size} rotate and write {heads}+{kv_heads}x256")
    def _rotate() -> object:
        from specdec.backends.cuda.kernels import rope

        pair, keys = act(3, heads, 2, 256), act(3, kv_heads, 256)
        weight, row = _float(256), torch.zeros(8, dtype=torch.int64)
        return rope.rotate_and_write(pair[:, :, 0], keys, keys, weight, weight, 1e-6, _float(32), row)

    @example(f"{size} attend {heads}/{kv_heads}x256")
    def _attend() -> object:
        from specdec.backends.cuda.kernels import attention

        row, gate = torch.zeros(8, dtype=torch.int64), act(3, heads, 2, 256)[:, :, 1]
        query = act(3, heads, 256)
        return attention.attend(query, row, kv_heads=kv_heads, scale=1 / 16, gate=gate, max_length=32768)

    @example(f"{size} delta rows 16/{value_heads}x128x128")
    def _delta() -> object:
        from specdec.backends.cuda.kernels import delta
        from specdec.backends.ops import DeltaShape

        shape = DeltaShape(key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, kernel=4)
        gates, vector, row = act(3, value_heads), _float(value_heads), torch.zeros(8, dtype=torch.int64)
        taps = _float(shape.channels, 4)
        return delta.delta_rows(act(3, shape.channels), gates, gates, taps, vector, vector, row, shape)


for _size, _heads, _kv_heads, _value_heads in (("0.8B", 8, 2, 16), ("4B 9B", 16, 4, 32)):
    _sequences(_size, torch.bfloat16, _heads, _kv_heads, _value_heads)
_sequences("float32", torch.float32, 16, 4, 32)


@example("attend 32/8x128")
def _attend_128() -> object:
    from specdec.backends.cuda.kernels import attention

    row = torch.zeros(8, dtype=torch.int64)
    return attention.attend(_act(3, 32, 128), row, kv_heads=8, scale=0.1, max_length=8192)


@example("attend 12/4x64")
def _attend_64() -> object:
    from specdec.backends.cuda.kernels import attention

    row = torch.zeros(8, dtype=torch.int64)
    return attention.attend(_act(3, 12, 64), row, kv_heads=4, scale=0.1, max_length=8192)


@example("attend latent 128x576")
def _attend_latent() -> object:
    from specdec.backends.cuda.kernels import latent

    row = torch.zeros(8, dtype=torch.int64)
    return latent.attend_latent(_act(3, 128, 576), _act(3, 576), row, scale=0.1, value_dims=512, max_length=4096)


@example("norm rope 128x64")
def _norm_rope() -> object:
    from specdec.backends.cuda.kernels import rope

    return rope.norm_rope(_act(3, 128, 64), None, 1e-6, _float(32), torch.zeros(8, dtype=torch.int64))


@example("delta chunked 16/32x128x128")
def _delta_chunked() -> object:
    from specdec.backends.cuda.kernels import delta, delta_chunked
    from specdec.backends.ops import DeltaShape

    shape = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
    row = torch.zeros(8, dtype=torch.int64)
    u = delta.conv_window(torch.zeros(65, shape.channels, dtype=torch.bfloat16), _float(shape.channels, 4), row)
    zeros, vector = torch.zeros(65, 32, dtype=torch.bfloat16), torch.zeros(32)
    return delta_chunked.delta_chunked(u, zeros, zeros, vector, vector, row, shape)


@example("accept 3, commit 32")
def _accept() -> None:
    from specdec.backends.cuda.kernels import accept

    control = accept.new_control(remaining=9, pending=0, position=0, depth=3, device=torch.device("cpu"))
    tokens = torch.zeros(4, dtype=torch.int32)
    accept.accept(tokens[:3], tokens, tokens[:2], control)
    table = torch.zeros(32, 8, dtype=torch.int64)
    accept.commit_rows(table, torch.zeros(32, dtype=torch.int32), control[4:5])


# --- other ops: moving rows, one matrix per head, the choice of experts -----------------------------------------------


@example("layer_norm 3x768")
def _layer_norm() -> object:
    from specdec.backends.cuda.kernels import norm

    return norm.layer_norm(_act(3, 768), _float(768), _float(768), 1e-5)


@example("gelu 3x3072, add 3x768, positions of 1024x768")
def _learned_positions() -> object:
    from specdec.backends.cuda.kernels import rows

    at = torch.zeros(8, dtype=torch.int64)
    x, table = _act(3, 768), _act(1024, 768)
    return rows.gelu(_act(3, 3072)), rows.add(x, x), rows.add(x, table, 5), rows.add(x, table, at)


@example("embed 4 of 248320x4096")
def _embed() -> object:
    from specdec.backends.cuda.kernels import rows

    return rows.embed(_act(248320, 4096), torch.zeros(4, dtype=torch.int32))


@example("concat 4096+4096, 128x512+64")
def _concat() -> object:
    from specdec.backends.cuda.kernels import rows

    pairs = _act(3, 128, 64)
    halves = rows.concat(pairs[..., 0::2], pairs[..., 1::2])
    return rows.concat(_act(3, 4096), _act(3, 4096)), rows.concat(_act(3, 128, 512), halves)


@example("project heads 128x128->512")
def _project_heads() -> object:
    from specdec.backends.cuda.kernels.project_heads import project_heads

    up = project_heads(_act(3, 128, 192)[..., :128], _act(128, 512, 128))
    return project_heads(up, _act(128, 128, 512)), project_heads(_float(3, 4, 64), _float(4, 64, 64))


@example("route 8 of 256, grouped and plain")
def _route() -> object:
    from specdec.backends.cuda.kernels import route
    from specdec.backends.ops import Routing

    grouped = Routing(top_k=8, scores="sigmoid", normalised=True, scale=2.5, groups=8, kept_groups=4)
    plain = Routing(top_k=8, scores="softmax", normalised=True)
    return route.choose(_float(3, 256), grouped, _float(256)), route.choose(_float(3, 256), plain)


@example("settle, last row and winner of a cycle")
def _cycle() -> object:
    from specdec.backends.cuda.kernels import cycle

    ids, one = torch.zeros(40, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    counters = torch.zeros(2, dtype=torch.int32)
    cycle.settle(ids, _act(16, 4096), _act(16, 4096), ids[:16], counters, ids[:17])
    cycle.winner(one, _float(1), one, _float(1), one)
    return cycle.last_row(_act(16, 4096), counters)


@example("choose under filters, 248320 logits")
def _filters() -> object:
    from specdec.backends.cuda.kernels import filters

    key, settings = torch.zeros(2, dtype=torch.int64), torch.ones(4, dtype=torch.float64)
    out = torch.empty(3, dtype=torch.int32)
    filters.choose(_float(3, 248320), key, settings, out)
    return out


@example("draft under filters, keys of a cycle")
def _filters_of_a_draft() -> object:
    from specdec.backends.cuda.kernels import filters

    key, settings = torch.zeros(16, 2, dtype=torch.int64), torch.ones(4, dtype=torch.float64)
    filters.keys(torch.empty(24, dtype=torch.int32), key[0, :1], key)
    ids, out = torch.empty(32768, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    filters.choose(_float(1, 32768), key[0], settings, out, ids=ids, guess=True)
    return out


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compile the kernels ahead of time, without a GPU, and print a table.")
    parser.add_argument(
        "architectures", nargs="*", type=int, metavar="ARCHITECTURE", help="such as 90 for sm_90; default: all"
    )
    chosen = tuple(parser.parse_args().architectures) or tuple(ARCHITECTURES)
    if unknown := [one for one in chosen if one not in ARCHITECTURES]:
        parser.error(f"no architecture {unknown[0]}: take {', '.join(map(str, ARCHITECTURES))}")
    sys.stdout.write(table(list(compiled(chosen))) + "\n")


if __name__ == "__main__":
    # use the imported module: this one, run as a script, has a separate registry
    from specdec.backends.cuda.kernels import catalogue

    catalogue.main()

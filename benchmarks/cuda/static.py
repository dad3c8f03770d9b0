"""What a decode launches, read from compiled kernels without a device, and the time that a cost model predicts from it.

    python -m benchmarks.cuda.static [--shapes 0.8b,4b,9b] [--context 2048]

The launches of a pass of one row (embedding, layers, head, best token) are recorded from the model itself and compiled
for sm_90. Per kernel the table shows how often a pass launches it, the bytes it must move, its registers and shared
memory, how many programs a multiprocessor runs at a time by them, the waves of its grid, the slices of K, and how many
instructions stand before its first access to a weight.

    seconds = bytes / bandwidth + tails + launches + norms + meetings

``tails``: the time in which only the busiest multiprocessors still read. ``launches``: LAUNCH per kernel. ``norms``:
ROUND for each round of the loop over x that a product with a norm begins with, once per wave, less the time that memory
needs for the weights asked for before it. ``meetings``: MEETING for each product whose K is split. The three constants
are estimates from a review of the compiled kernels. Nothing here is a measurement.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from benchmarks.cuda.shapes import BANDWIDTH, SHAPES, Shape
from benchmarks.cuda.weights import MadeWeights, build_target
from specdec.backends.cuda.kernels import catalogue, head
from specdec.backends.cuda.kernels.catalogue import Compiled, Launch
from specdec.backends.cuda.kernels.launch import recording
from specdec.backends.cuda.kernels.packed import LINE
from specdec.backends.cuda.kernels.tiles import HOPPER_SMS

LAUNCH = 1.0e-6  # between two kernels of a graph, without dependent launches
ROUND = 2.2e-6 / 8  # the norm of 4096 columns has eight rounds, whose loads wait for each other
MEETING = 1.75e-6  # the fence, the atomic and the fold of a product whose K is split
ASIDE = 2  # launches of a cycle beside the pass: the table in, and the commit
PERIOD = 4  # layers after which the kinds of layers repeat
ARCHITECTURE = 90


class _Untouched(MadeWeights):
    """Weights of a shape whose memory is never written, so that it costs nothing."""

    def __getitem__(self, name: str) -> Tensor:
        size = self._shape.tensors[name]
        return torch.empty(size, dtype=self._dtype if len(size) == 2 else torch.float32)


class _Launches:
    def __init__(self) -> None:
        self.all: list[Launch] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.all.append(Launch(kernel=kernel, grid=grid, args=args, options=options))


@attrs.frozen(kw_only=True)
class Kernel:
    """One kernel of a pass at one size.

    Attributes:
        compiled: its resources.
        times: launches in one pass.
        nbytes: weights, keys, values and states that one launch must move.
        rounds: of the norm's loop over x.
        asked: bytes of weights that one program asks for before that loop.
        splits: slices of K.
    """

    compiled: Compiled
    times: int
    nbytes: int
    rounds: int
    asked: int
    splits: int

    @property
    def programs(self) -> int:
        x, y, z = (*self.compiled.grid, 1, 1)[:3]
        return x * y * z

    @property
    def waves(self) -> int:
        return -(-self.programs // (HOPPER_SMS * self.compiled.resident))

    @property
    def tail(self) -> float:
        """The time of the busiest multiprocessor over the mean, minus one; 0 for what reads next to nothing."""
        return -(-self.programs // HOPPER_SMS) * HOPPER_SMS / self.programs - 1 if self.nbytes else 0.0

    def norm(self, bandwidth: float) -> float:
        """Seconds of a wave in which memory waits for the norm."""
        at_once = min(self.compiled.resident, -(-self.programs // HOPPER_SMS))
        return max(0.0, self.rounds * ROUND - at_once * self.asked * HOPPER_SMS / bandwidth)

    def seconds(self, bandwidth: float) -> dict[str, float]:
        """What all launches of a pass take, by cause."""
        reading = self.times * self.nbytes / bandwidth
        return {
            "bytes": reading,
            "tails": self.tail * reading,
            "launches": self.times * LAUNCH,
            "norms": self.times * self.waves * self.norm(bandwidth),
            "meetings": self.times * (MEETING if self.splits > 1 else 0.0),
        }


def total(found: Sequence[Kernel], bandwidth: float) -> dict[str, float]:
    """Seconds of a decode by cause."""
    causes = collections.Counter({"launches": ASIDE * LAUNCH})
    for kernel in found:
        causes.update(kernel.seconds(bandwidth))
    return dict(causes)


def launches(shape: Shape, context: int) -> collections.Counter[_Key]:
    """The launches of one pass of one row, with the head and its best token, after ``context`` tokens."""
    from specdec.backends.cuda.arrays import materialised
    from specdec.backends.cuda.caches import CapturedCache
    from specdec.backends.cuda.ops import CudaOps
    from specdec.backends.cuda.passes import DeviceTokens
    from tests.backends.cuda.fake import FakeDevice

    device: Any = FakeDevice()
    weights = _Untouched(shape, device.place)
    recorder = _Launches()
    with recording(recorder):
        ops: Any = CudaOps(device, torch.bfloat16)
        target = build_target(shape, ops, weights, backend="cuda", dtype="bfloat16")
        state: Any = target.new_state(context)
        for cache in state.caches:
            cache.reserve(context)
        caches = [CapturedCache(cache, cache.row, context) for cache in state.caches]
        recorder.all.clear()
        x = materialised(state.target_pass.passes.body(caches, DeviceTokens(torch.zeros(1, dtype=torch.int32)), None))
        head.best(x, target.model.lm_head)
    return collections.Counter(_Key(launch) for launch in recorder.all)


class _Key:
    """A launch, equal to another that runs the same binary on the same grid and sizes."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        named = named_arguments(launch)
        sizes = tuple((name, value) for name, value in named.items() if isinstance(value, int | float | bool))
        self._key = launch.kernel.__name__, launch.grid, sizes

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._key == other._key


def named_arguments(launch: Launch) -> dict[str, Any]:
    """The arguments of a launch by the names of the kernel's parameters."""
    return dict(zip(launch.kernel.arg_names, launch.args, strict=False)) | launch.options


def kernels(shape: Shape, context: int) -> list[Kernel]:
    """The kernels of a decode. A model of one period of layers is recorded, and one of two for what repeats."""
    one, two = (launches(attrs.evolve(shape, layers=count * PERIOD), context) for count in (1, 2))
    periods = shape.layers // PERIOD
    found = []
    for key, count in two.items():
        times = one[key] + (count - one[key]) * (periods - 1)
        launch = key.launch
        compiled = catalogue.compile_launch(launch.kernel.__name__, launch, ARCHITECTURE)
        named = named_arguments(launch)
        found.append(
            Kernel(
                compiled=compiled,
                times=times,
                nbytes=_bytes(launch, shape, context),
                rounds=_rounds(named),
                asked=_asked(named),
                splits=named.get("SPLITS", 1),
            )
        )
    return found


def _bytes(launch: Launch, shape: Shape, context: int) -> int:
    named, name = named_arguments(launch), launch.kernel.__name__
    if name in ("product_kernel", "head_kernel"):
        size: int = named["w_ptr"].element_size()
        return named["N"] * named["K"] * size * (2 if named.get("PAIR") else 1)
    if name == "_delta_rows":
        return 2 * shape.value_heads * shape.linear_dim**2 * 4
    if name == "_attend_splits":
        return shape.kv_bytes(context, 1)
    return 0


def _rounds(named: Mapping[str, Any]) -> int:
    """Rounds of the norm's loop, whose loads wait for each other."""
    if named.get("PROLOGUE") != 1:
        return 0
    return -(-int(named["K"]) // int(named["NORM_BLOCK"]))


def _asked(named: Mapping[str, Any]) -> int:
    """Bytes of weights that a program asks for before its norm."""
    if not _rounds(named):
        return 0
    rows: int = named["BLOCK_N"] * (2 if named["PAIR"] else 1)
    return rows * int(named["LINES"]) * int(LINE.value)


def table(found: Sequence[Kernel]) -> str:
    """The kernels of a pass as Markdown."""
    head_ = "kernel | launches | MB | programs | registers | shared, kB | per SM | waves | splits | before weights"
    lines = [f"| {head_} |", "|" + "---|" * len(head_.split("|"))]
    for kernel in sorted(found, key=lambda one: -one.times * one.nbytes):
        made = kernel.compiled
        before = made.before_access("w_ptr")
        cells = (
            f"`{made.kernel}`",
            kernel.times,
            f"{kernel.nbytes / 1e6:.1f}",
            kernel.programs,
            made.registers,
            f"{made.shared / 1024:.0f}",
            made.resident,
            kernel.waves,
            kernel.splits,
            "" if before is None else before,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def line(shape: Shape, found: Sequence[Kernel]) -> str:
    """The prediction for a shape as a row of Markdown: milliseconds by cause."""
    causes = total(found, BANDWIDTH)
    decode = sum(causes.values())
    launched = sum(kernel.times for kernel in found) + ASIDE
    parts = " | ".join(f"{1e3 * seconds:.3f}" for seconds in _ordered(causes))
    of_bound = shape.pass_bytes(1) / BANDWIDTH / decode
    return f"| {shape.name.upper()} | {launched} | {parts} | {1e3 * decode:.3f} | {of_bound:.2f} |"


def _ordered(causes: Mapping[str, float]) -> list[float]:
    return [causes[name] for name in ("bytes", "tails", "launches", "norms", "meetings")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda.static", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), metavar=",".join(SHAPES))
    parser.add_argument("--context", type=int, default=2048, metavar="TOKENS")
    options = parser.parse_args(arguments)
    lines = ["| shape | kernels | bytes | tails | launches | norms | meetings | decode, ms | decode / bound |"]
    lines.append("|" + "---|" * 9)
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        found = kernels(shape, options.context)
        print(f"{name.upper()}\n\n{table(found)}\n")
        lines.append(line(shape, found))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

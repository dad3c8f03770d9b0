"""Device time: graph replays between two events, interleaved arms, and the card's state meanwhile.

Without a device (``--smoke``) the same code runs on the host's clock with interpreted launches; its figures mean
nothing.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import contextlib
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Protocol, cast

import attrs
import torch
import triton
import triton.language as tl

from specdec.backends.cuda.kernels.launch import launch

STREAM_BYTES = 4 << 30  # per read, many times the cache size
STREAM_RUNS = 20  # the best one counts
STEADY = 0.01  # warm-up ends when three windows agree to within this share
WINDOWS = 12  # maximum for the warm-up
CLOCK_CHANGE = 0.02  # change of the SM clock above which the times in between are marked

Body = Callable[[], object]


class Replayable(Protocol):
    """What ``CudaDevice.capture`` gives."""

    def replay(self) -> None:
        """Launch it again."""


@attrs.frozen(kw_only=True)
class Spread:
    """Seconds of one measurement, over the repeats."""

    median: float
    low: float  # quartiles
    high: float
    repeats: int
    replays: int  # per repeat
    steady: bool  # whether the warm-up converged

    def to_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)


def spread(seconds: list[float], replays: int, *, steady: bool = True) -> Spread:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Spread(median=middle, low=low, high=high, repeats=len(seconds), replays=replays, steady=steady)


@attrs.define(kw_only=True)
class Lab:
    """A timing environment.

    Attributes:
        device: of ``specdec.backends.cuda.device``, or the tests' stand-in.
        real: whether there is a GPU; otherwise no figure means anything.
        replays: replays between two events; repeats: minimum number of such times in a median.
    """

    device: Any
    real: bool
    replays: int = 100
    repeats: int = 5
    stream_bytes: int = STREAM_BYTES

    @property
    def place(self) -> torch.device:
        place: torch.device = self.device.place
        return place

    def capture(self, body: Body) -> Replayable:
        """``body`` as a graph; without a GPU the body itself, launched anew each time."""
        if not self.real:
            return cast(Replayable, SimpleNamespace(replay=body))

        def run() -> None:
            body()

        graph: Replayable = self.device.capture(run)
        return graph

    def seconds(self, graph: Replayable, replays: int) -> float:
        """Mean seconds of a replay, from one event to the next."""
        if self.real:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(replays):
                graph.replay()
            last.record()
            last.synchronize()
            return first.elapsed_time(last) / 1000 / replays
        began = perf_counter()
        for _ in range(replays):
            graph.replay()
        return (perf_counter() - began) / replays

    def warm(self, graph: Replayable, replays: int) -> bool:
        """Replay until three windows in a row agree; False if they never do."""
        windows: list[float] = []
        if not self.real:
            return True
        while len(windows) < WINDOWS:
            windows.append(self.seconds(graph, replays))
            last = windows[-3:]
            if len(last) == 3 and max(last) <= (1 + STEADY) * min(last):
                return True
        return False

    def time(self, body: Body, *, parts: int = 1) -> Spread:
        """Seconds of one of the ``parts`` that a body consists of (rotating copies)."""
        return self.compare({"it": body}, parts=parts)["it"]

    def compare(self, bodies: Mapping[str, Body], *, parts: int = 1) -> dict[str, Spread]:
        """The same for several bodies, interleaved (A B B A).

        ``replays`` counts parts: at least that many are timed between two events.
        """
        graphs = {name: self.capture(body) for name, body in bodies.items()}
        replays = max(1, -(-self.replays // parts))
        steady = {name: self.warm(graph, replays) for name, graph in graphs.items()}
        found: dict[str, list[float]] = {name: [] for name in graphs}
        while len(next(iter(found.values()))) < self.repeats:
            for name in (*graphs, *reversed(graphs)) if self.real and len(graphs) > 1 else graphs:
                found[name].append(self.seconds(graphs[name], replays) / parts)
        return {name: spread(values, replays, steady=steady[name]) for name, values in found.items()}

    def synchronise(self) -> None:
        if self.real:
            torch.cuda.synchronize(self.place)


# --- bandwidth --------------------------------------------------------------------------------------------------------


@triton.jit
def _read(source, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803  constexprs are capitals
    """Sum of int32 ``source [count]`` by strided programs; one number each, so that no read is optimised away."""
    total = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(first, count, step):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(source + at, mask=at < count, other=0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def stream_kernel(words: torch.Tensor, programs: int = 132 * 8, block: int = 4096) -> torch.Tensor:
    """Read ``words`` (int32) once: sums per program ``[programs]``."""
    out = torch.empty(programs, dtype=torch.int32, device=words.device)
    launch(_read, (programs,), words, out, len(words), BLOCK=block, num_warps=8, num_stages=4)
    return out


def stream_bandwidth(lab: Lab) -> dict[str, Any]:
    """Bytes per second of reading memory once: the best of twenty runs and three methods."""
    words = torch.randint(0, 1000, (lab.stream_bytes // 4,), dtype=torch.int32, device=lab.place)
    programs = 132 * 8 if lab.real else 4
    floats = words.view(torch.float32)
    ways: dict[str, Body] = {
        "kernel": lambda: stream_kernel(words, programs),
        "torch sum, float32": floats.sum,
        "torch max, int32": words.max,
    }
    expected = int(words.sum(dtype=torch.int64).item())
    got = int(stream_kernel(words, programs).to(torch.int64).sum().item())
    if (expected - got) % 2**32:
        raise AssertionError(f"the stream kernel read something else: a sum of {got}, not {expected}")
    best: dict[str, float] = {}
    for name, body in ways.items():
        graph = lab.capture(body)
        # several reads between two events, to exclude the time from the first event to a graph's first kernel
        times = [lab.seconds(graph, 8 if lab.real else 1) for _ in range(STREAM_RUNS if lab.real else 2)]
        best[name] = words.nbytes / min(times)
    return {"bytes": words.nbytes, "bytes_per_second": max(best.values()), "ways": best}


# --- the card ---------------------------------------------------------------------------------------------------------

_QUERIES = (
    "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active",
    "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active",  # the name in older drivers
)
_FIELDS = ("sm_mhz", "memory_mhz", "watts", "celsius", "throttle_reasons")


def card() -> dict[str, Any]:
    """Clocks, power, temperature and throttle reasons from nvidia-smi, or why they are not available."""
    failure = ""
    for query in _QUERIES:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        except FileNotFoundError:
            return {"unknown": "nvidia-smi is not there"}
        except subprocess.SubprocessError as error:
            failure = str(getattr(error, "stdout", "") or error).strip()
            continue
        values = [value.strip() for value in done.stdout.strip().splitlines()[0].split(",")]
        return dict(zip(_FIELDS, [_number(value) for value in values], strict=False))
    return {"unknown": failure}


def _number(text: str) -> float | str:
    with contextlib.suppress(ValueError):
        return float(text)
    return text


@contextlib.contextmanager
def watched(into: dict[str, Any], *, real: bool) -> Iterator[None]:
    """Write the card's state before and after a section into ``into["card"]``, marked if the clock changed."""
    before = card() if real else {"unknown": "no device"}
    yield
    after = card() if real else {"unknown": "no device"}
    into["card"] = {"before": before, "after": after}
    clocks = [clock for clock in (before.get("sm_mhz"), after.get("sm_mhz")) if isinstance(clock, float) and clock > 0]
    if len(clocks) == 2:
        into["card"]["clock_changed"] = abs(clocks[0] / clocks[1] - 1) > CLOCK_CHANGE

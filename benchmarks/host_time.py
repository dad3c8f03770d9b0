"""Measure the host time of a cycle: the embedded model's wall-clock time minus the time inside kernels.

    python -m benchmarks.host_time [--tokens 128] [--repeats 20] [--depth 0 2] [--json FILE]

Kernels of recorded passes, and the head of a draft that runs in one call, are timed in C++. The target's output head
and the choice of a token are timed around their calls, so about a microsecond of call overhead counts as theirs. All
other time is host time: drafter, verifier, policy, session, detokenizer and the start of passes. A second table splits
it by function, from a profile of separate runs; it includes the profiler's own cost, so read only the shares.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import specdec
from benchmarks.common import PROMPTS, arguments, median, save
from specdec.backends.passes import EagerPasses

TARGET_MILLISECONDS = 0.5
SHOWN = 14


class Timed:
    """A separately called kernel, with its time."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.name = kernel.name
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        started = perf_counter()
        result = self._kernel(*arguments)
        self.seconds += perf_counter() - started
        return result


def kernel_seconds(target: Any, timed: list[Timed]) -> dict[str, float]:
    """Seconds by kernel since the last reading."""
    spent: dict[str, float] = {}
    for passes in (*target._target_passes.values(), target._mtp_passes):
        programs = [p for r in passes.recordings.values() if r is not None for p in (r.run, r.replay, r.windows)]
        for program in [*programs, *passes.best.values()]:
            for step, name in enumerate(program.names):
                spent[name] = spent.get(name, 0.0) + program.spent[step] * 1e-9
                program.spent[step] = 0
    for kernel in timed:
        spent[kernel.name] = spent.get(kernel.name, 0.0) + kernel.seconds
        kernel.seconds = 0.0
    return spent


def measure(lm: Any, begin: Callable[[], Callable[[], Any]], repeats: int) -> dict[str, Any]:
    """Milliseconds per cycle: wall-clock, kernels, and host; medians of ``repeats`` generations.

    ``begin()`` runs the prompt and returns the function that generates.
    """
    target = lm.target
    if isinstance(target._target_passes[()], EagerPasses):
        raise SystemExit(f"passes are not recorded: {lm.info.kernels}")
    ops = target.ops
    timed = [Timed(ops._head), Timed(ops._argmax_rows)]
    ops._head, ops._argmax_rows = timed
    ops.timing = True
    begin()()
    walls, kernels = [], []
    by_kernel: dict[str, list[float]] = {}
    phases: dict[str, list[float]] = {}
    try:
        for _ in range(repeats):
            cycles = begin()
            kernel_seconds(target, timed)
            stats = cycles().stats
            spent = kernel_seconds(target, timed)
            scale = 1e3 / stats.cycles
            walls.append(stats.decode_seconds * scale)
            kernels.append(sum(spent.values()) * scale)
            for name, seconds in spent.items():
                by_kernel.setdefault(name, []).append(seconds * scale)
            for name in ("draft", "verify", "commit"):
                phases.setdefault(name, []).append(stats.seconds[name] * scale)
    finally:
        ops.timing = False
        ops._head, ops._argmax_rows = (kernel._kernel for kernel in timed)
    host = [wall - kernel for wall, kernel in zip(walls, kernels, strict=True)]
    return {
        "cycles": stats.cycles,
        "tokens_per_cycle": stats.tokens / stats.cycles,
        "wall_ms": median(walls),
        "kernels_ms": median(kernels),
        "host_ms": median(host),
        "phases_ms": {name: median(values) for name, values in phases.items()},
        "by_kernel_ms": dict(sorted(((n, median(v)) for n, v in by_kernel.items()), key=lambda pair: -pair[1])),
        "host_profile_ms": profile(begin, repeats),
    }


def profile(begin: Callable[[], Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds per cycle inside our functions, exclusive of callees and without kernel callers; largest first."""
    profiler = cProfile.Profile()
    cycles = 0
    for _ in range(repeats):
        run = begin()
        profiler.enable()
        result = run()
        profiler.disable()
        cycles += result.stats.cycles
    own: dict[str, float] = {}
    for (file, _, name), (_, _, seconds, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if name in ("_play", "chain", "__call__") and file.endswith("tape.py"):
            continue
        place = f"{Path(file).stem}.{name}" if file != "~" else name
        own[place] = own.get(place, 0.0) + seconds * 1e3 / cycles
    return dict(sorted(own.items(), key=lambda pair: -pair[1])[:SHOWN])


def table(record: dict[str, Any]) -> str:
    """The record of one depth as text."""
    lines = [
        f"depth {record['depth']}: {record['cycles']} cycles of {record['tokens_per_cycle']:.2f} tokens",
        f"  wall     {record['wall_ms']:7.3f} ms per cycle",
        f"  kernels  {record['kernels_ms']:7.3f}",
        f"  host     {record['host_ms']:7.3f}  (target {TARGET_MILLISECONDS})",
    ]
    for title, key in (("phases", "phases_ms"), ("kernels", "by_kernel_ms"), ("host, profiled", "host_profile_ms")):
        lines.append(f"  {title}:")
        lines += [f"    {milliseconds:7.4f}  {name}" for name, milliseconds in record[key].items()]
    return "\n".join(lines)


def main() -> None:
    options = arguments(__doc__, tokens=128, repeats=20, depth=[0, 2])
    records = []
    for depth in options.depth:
        lm = specdec.load(depth=depth) if depth else specdec.load(drafter="none")
        prompt = lm.tokenizer.encode(PROMPTS["code"], add_special=False)

        def begin(lm: Any = lm, prompt: list[int] = prompt) -> Callable[[], Any]:
            session = lm.session()
            session.generate(prompt, max_new_tokens=1, ignore_eos=True)
            return lambda: session.generate(max_new_tokens=options.tokens, ignore_eos=True)

        records.append({"depth": depth, **measure(lm, begin, options.repeats)})
        print(table(records[-1]))
    save({"depths": records}, options)


if __name__ == "__main__":
    main()

"""Measure the embedded model beside busy processes: tokens per second against one idle core.

    python -m benchmarks.busy [--busy 6] [--tokens 256] [--repeats 5] [--depth 0 3] [--json FILE]

Each depth runs on one core with nothing beside it, on all cores, and on all cores beside ``--busy`` processes that
never sleep. Under a fair scheduler, one thread beside b of them on c cores gets c / (b + 1) of a core at most, and c
threads get c * c / (b + c).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch

import specdec
from benchmarks.common import PROMPTS, arguments, median, save

LOOP = "while True: pass"


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """``count`` processes that never sleep."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", LOOP])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


@contextmanager
def cores(chosen: set[int]) -> Iterator[None]:
    """Restrict this process, with all its threads, to these cores."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(len(chosen))
    tasks = [int(name) for name in os.listdir("/proc/self/task")]
    for task in tasks:
        os.sched_setaffinity(task, chosen)
    try:
        yield
    finally:
        for task in tasks:
            os.sched_setaffinity(task, before)
        torch.set_num_threads(threads)


def rate(lm: Any, tokens: int, repeats: int) -> float:
    """Tokens per second, the median of ``repeats`` generations."""
    found = []
    for _ in range(repeats + 1):  # the first one warms up
        session = lm.session()
        session.generate(PROMPTS["code"], max_new_tokens=1, ignore_eos=True)
        started = perf_counter()
        result = session.generate(max_new_tokens=tokens, ignore_eos=True)
        found.append(len(result.tokens) / (perf_counter() - started))
    return median(found[1:])


def main() -> None:
    options = arguments(__doc__, busy=6, tokens=256, repeats=5, depth=[0, 3])
    first = min(os.sched_getaffinity(0))
    records = []
    for depth in options.depth:
        lm = specdec.load(depth=depth) if depth else specdec.load(drafter="none")
        how = {"lm": lm, "tokens": options.tokens, "repeats": options.repeats}
        with cores({first}):
            alone = rate(**how)
        idle = rate(**how)
        with neighbours(options.busy):
            busy = rate(**how)
        records.append({"depth": depth, "one_core": alone, "idle": idle, "busy": busy, "ratio": busy / alone})
        print(
            f"depth {depth}: {alone:.0f} tokens/s on one idle core, {idle:.0f} on all, {busy:.0f} beside "
            f"{options.busy} busy processes: {busy / alone:.3f} of one idle core"
        )
    save({"busy": options.busy, "depths": records}, options)


if __name__ == "__main__":
    main()

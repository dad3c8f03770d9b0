"""The embedded model beside busy processes: tokens per second against one idle core.

    python -m benchmarks.busy [--busy 6] [--tokens 256] [--repeats 5] [--depth 0 3] [--json FILE]

Each depth runs on one core with nothing beside it, and on all cores beside ``--busy`` processes that never sleep. Under
a fair scheduler, one thread beside b of them on c cores gets c / (b + 1) of a core at most; ``core`` is the processor
time per second that the process got. Fewer tokens per processor second than alone: other work displaced the weights
from the caches between two turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

from benchmarks.common import arguments, save

RUN = """
import sys, time, specdec
from benchmarks.common import PROMPTS, median
depth, tokens, repeats = map(int, sys.argv[1:])
lm = specdec.load(depth=depth) if depth else specdec.load(drafter="none")
def rate():
    started, processor = time.perf_counter(), time.process_time()
    stats = lm.generate(PROMPTS["code"], max_new_tokens=tokens, ignore_eos=True).stats
    core = (time.process_time() - processor) / (time.perf_counter() - started)
    return stats.tokens / stats.decode_seconds, core
rate()
print(*map(median, zip(*[rate() for _ in range(repeats)])))
"""


def rate(cores: set[int], *settings: int) -> list[float]:
    """Tokens per second, and processor seconds per second, of a process that is restricted to these cores."""
    command = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {cores})\n{RUN}", *map(str, settings)]
    return [float(figure) for figure in subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split()]


def main() -> None:
    options = arguments(__doc__, busy=6, tokens=256, repeats=5, depth=[0, 3])
    every, records = os.sched_getaffinity(0), []
    for depth in options.depth:
        alone, _ = rate({min(every)}, depth, options.tokens, options.repeats)
        with ExitStack() as neighbours:
            for _ in range(options.busy):
                neighbours.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
            busy, core = rate(every, depth, options.tokens, options.repeats)
        records.append({"depth": depth, "one_core": alone, "busy": busy, "ratio": busy / alone, "core": core})
    save({"busy": options.busy, "depths": records}, options)


if __name__ == "__main__":
    main()

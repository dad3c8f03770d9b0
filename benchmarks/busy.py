"""The embedded model beside busy processes: tokens per second against one idle core.

    python -m benchmarks.busy [--busy 6] [--tokens 256] [--repeats 5] [--depth 0 3] [--json FILE]

Each depth runs on one core with nothing beside it, and on all cores beside ``--busy`` processes that never sleep. Under
a fair scheduler, one thread beside b of them on c cores gets c / (b + 1) of a core at most.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

from benchmarks.common import arguments, save

RUN = """
import sys, specdec
from benchmarks.common import PROMPTS, median
depth, tokens, repeats = map(int, sys.argv[1:])
lm = specdec.load(depth=depth) if depth else specdec.load(drafter="none")
def rate():
    stats = lm.generate(PROMPTS["code"], max_new_tokens=tokens, ignore_eos=True).stats
    return stats.tokens / stats.decode_seconds
rate()
print(median([rate() for _ in range(repeats)]))
"""


def rate(cores: set[int], *settings: int) -> float:
    """Tokens per second of a process that is restricted to these cores."""
    command = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {cores})\n{RUN}", *map(str, settings)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    options = arguments(__doc__, busy=6, tokens=256, repeats=5, depth=[0, 3])
    every, records = os.sched_getaffinity(0), []
    for depth in options.depth:
        alone = rate({min(every)}, depth, options.tokens, options.repeats)
        with ExitStack() as neighbours:
            for _ in range(options.busy):
                neighbours.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
            busy = rate(every, depth, options.tokens, options.repeats)
        records.append({"depth": depth, "one_core": alone, "busy": busy, "ratio": busy / alone})
    save({"busy": options.busy, "depths": records}, options)


if __name__ == "__main__":
    main()

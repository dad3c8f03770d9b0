"""Compare the cost of sampled and greedy cycles, interleaved in one process.

    python -m benchmarks.sampling [--tokens 128] [--repeats 9] [--depth 2] [--model demo] [--json FILE]

Prints milliseconds per cycle (the number of accepted tokens differs between settings) and their ratio to greedy.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import specdec
from benchmarks.common import PROMPTS, arguments, in_turns, median, save

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 0.8, top-k 40, repetition penalty 1.1": {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.1},
    "temperature 0.8, min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}


def measure(model: str, tokens: int, repeats: int, depth: int) -> dict[str, Any]:
    """Milliseconds per cycle by setting, and their ratio to greedy."""
    lm = specdec.load(model, depth=depth)
    seeds = itertools.count()

    def cycle(settings: dict[str, Any]) -> float:
        stats = lm.generate(
            PROMPTS["code"], max_new_tokens=tokens, ignore_eos=True, seed=next(seeds) // len(SETTINGS), **settings
        ).stats
        return float(stats.decode_seconds / stats.cycles * 1e3)

    calls = {name: functools.partial(cycle, settings) for name, settings in SETTINGS.items()}
    times = in_turns(calls, repeats, warm_up=1, measure=operator.call)
    return {
        name: {
            "milliseconds_per_cycle": median(values),
            "fastest": min(values),
            "ratio_to_greedy": median(values) / median(times["greedy"]),
            "ratio_of_fastest": min(values) / min(times["greedy"]),
        }
        for name, values in times.items()
    }


def main() -> None:
    options = arguments(__doc__, model="demo", tokens=128, repeats=9, depth=2)
    save(measure(options.model, options.tokens, options.repeats, options.depth), options)


if __name__ == "__main__":
    main()

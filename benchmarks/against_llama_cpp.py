"""Compare the 0.8B shape with llama.cpp: plain decoding and prompts, BF16 and packed weights, in turns.

    python -m benchmarks.against_llama_cpp [--peer PYTHON] [--pairs auto:BF16 int8:Q8_0 int4:Q4_K_M]
        [--prompts 512 4096] [--tokens 16] [--repeats 6] [--folder DIR] [--json FILE]

``--peer`` is the Python of an environment with llama-cpp-python, gguf and numpy; for a fair pair, build llama.cpp for
the same instruction set. Both sides use all cores that this process may use, and default settings. Prints medians of
the ratios of neighbouring turns (above 1: ours is faster), and tokens per second. Weights are random: the values do not
matter for the time, and each side writes its own.
"""

from __future__ import annotations

import json
import operator
import os
import sys
from pathlib import Path
from typing import Any

import specdec
from benchmarks.common import (
    BYTE_TOKENS,
    Worker,
    arguments,
    in_turns,
    median,
    qwen3_5_config,
    save,
    seconds,
    shape_0_8b,
)

CONTEXT = 256  # tokens before the first decoded one


class Ours:
    """The shape with one ``target.weights``, default settings otherwise."""

    def __init__(self, folder: Path, weights: str, capacity: int) -> None:
        lm = specdec.load(str(folder), weights=weights)
        self.facts = {"weights": lm.info.weights, "dtype": str(lm.info.dtype), "kernels": lm.info.kernels}
        self._target, self._capacity = lm.target, capacity
        self._state: Any = None

    def prompt(self, count: int) -> float:
        """Seconds of a prompt in an empty state, with the logits of its last token."""
        tokens = _tokens(count)
        self._state = self._target.new_state(self._capacity)

        def run() -> None:
            self._target.prefill(self._state, tokens[:-1])
            self._step(tokens[-1])

        return seconds(run)

    def decode(self, count: int) -> float:
        """Seconds of ``count`` tokens, one at a time, after the last call's."""

        def run() -> None:
            for token in _tokens(count):
                self._step(token)

        return seconds(run)

    def _step(self, token: int) -> None:
        self._target.decode(self._state, [token]).need_logits().argmax()
        self._target.commit(self._state, 1)


def llama_cpp(peer: Path, capacity: int, *shape: str | Path) -> Worker:
    """llama.cpp in a process of its own, which answers the requests of ``llama_cpp_peer``."""
    return Worker([peer, Path(__file__).with_name("llama_cpp_peer.py"), capacity, len(os.sched_getaffinity(0)), *shape])


def _tokens(count: int) -> list[int]:
    return [(37 * i) % BYTE_TOKENS for i in range(count)]


def compare(ours: Ours, theirs: Worker, form: str, what: str, count: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of both, in turns, and the ratio of our speed to theirs."""
    if what == "decode":
        ours.prompt(CONTEXT)
        theirs.ask("prompt", form, CONTEXT)
    turn = {"specdec": lambda: getattr(ours, what)(count), "llama.cpp": lambda: theirs.ask(what, form, count)}
    times = in_turns(turn, repeats, warm_up=1, measure=operator.call)
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    return {
        "ratio": median(ratios),
        "ratios": ratios,
        "ratio_of_the_fastest": min(times["llama.cpp"]) / min(times["specdec"]),
        "tokens_per_second": {name: count / median(values) for name, values in times.items()},
    }


def measure(options: Any, folder: Path) -> dict[str, Any]:
    """By pair of formats: decoding, and prompts by length."""
    capacity = max(*options.prompts, CONTEXT + options.tokens * (options.repeats + 1)) + 64
    theirs = llama_cpp(options.peer or Path(sys.executable), capacity, folder, json.dumps(qwen3_5_config()))
    result: dict[str, Any] = {}
    try:
        for pair in options.pairs:
            weights, form = pair.split(":")
            ours = Ours(folder, weights, capacity)
            result[pair] = {"specdec": ours.facts} | {
                f"{what} {count}": compare(ours, theirs, form, what, count, repeats)
                for what, count, repeats in [
                    ("decode", options.tokens, options.repeats),
                    *(("prompt", count, max(1, options.repeats * 512 // count)) for count in options.prompts),
                ]
            }
    finally:
        theirs.close()
    return result


def main() -> None:
    options = arguments(
        __doc__,
        peer=None,
        pairs=["auto:BF16", "int8:Q8_0", "int4:Q4_K_M"],
        prompts=[512, 4096],
        tokens=16,
        repeats=6,
        folder=None,
    )
    with shape_0_8b(options.folder) as folder:
        save(measure(options, folder), options)


if __name__ == "__main__":
    main()

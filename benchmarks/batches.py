"""Several generations at once against one: tokens per second in sum.

    python -m benchmarks.batches [--model demo] [--drafter auto] [--sizes 1 2 4 8] [--tokens 128] [--repeats 3]
                                 [--json FILE]

Runs the same prompts plainly and with the drafter at its own depth, in batches of one and of each size, in turns within
one process; prints the best of the repeats and its ratio to plain decoding of one sequence. Every text must be the one
of a plain generation alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import specdec
from benchmarks.common import arguments, save
from specdec.contract import CycleRecord
from specdec.decoding.batch import Batch
from specdec.decoding.stream import Stream
from specdec.measuring.prompts import own_prompts
from specdec.measuring.runs import plain


def rate(streams: Sequence[Stream]) -> float:
    """Tokens per second in sum, from when all prompts have run until the first generation ends; runs all to the end."""
    batch, counts = Batch(), dict.fromkeys(streams, 0)
    for stream in streams:

        def count(record: CycleRecord, stream: Stream = stream) -> None:
            counts[stream] += len(record.emitted)

        stream.on_cycle = count
        batch.add(stream)
    while not all(counts.values()):
        batch.tick()
    if len(batch.running) < len(streams):
        raise SystemExit("a generation ended before all had begun, and nothing can be timed: give more --tokens")
    before, began = sum(counts.values()), perf_counter()
    while len(batch.running) == len(streams):
        batch.tick()
    found = (sum(counts.values()) - before) / (perf_counter() - began)
    while batch.running:
        batch.tick()
    return found


def main() -> None:
    options = arguments(__doc__, model="demo", drafter="auto", sizes=[1, 2, 4, 8], tokens=128, repeats=3)
    lm = specdec.load(options.model, drafter=options.drafter)
    prompts = [prompt.encode(lm.tokenizer) for group in own_prompts().values() for prompt in group]
    prompts = prompts[:: max(1, len(prompts) // max(options.sizes))][: max(options.sizes)]
    settings = {"max_new_tokens": options.tokens, "ignore_eos": True}
    arms = {"plain": plain(lm), "speculative": lm}
    alone = [arms["plain"].generate(prompt, **settings).tokens for prompt in prompts]
    best: dict[tuple[str, int], float] = {}
    for _ in range(options.repeats):
        for size in sorted({1, *options.sizes}):
            for name, arm in arms.items():
                streams = [arm.stream(prompt, **settings) for prompt in prompts[:size]]
                best[name, size] = max(best.get((name, size), 0.0), rate(streams))
                if [stream.result.tokens for stream in streams] != alone[:size]:
                    raise SystemExit(f"a text of a batch of {size} differs from the one alone")
    one = best["plain", 1]
    figures = {
        f"{name}, {size}": {"tokens_per_second": rate, "of_one_plain": rate / one}
        for (name, size), rate in sorted(best.items())
    }
    save({"model": options.model, "drafter": lm.drafter.spec.name, **figures}, options)


if __name__ == "__main__":
    main()

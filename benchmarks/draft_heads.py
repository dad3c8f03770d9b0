"""Drafters of the embedded model side by side: acceptance by position, cost of a draft, and net speed.

    $ python -m benchmarks.draft_heads --prompts 4

Every prompt runs with every drafter in turn, greedily at one fixed depth, so that what else the machine does meets all
of them. The prompts were held out when the model and its heads were trained.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import attrs

import specdec

PROMPTS = Path(__file__).parent / "held_out_prompts.json"
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "ngram": {"name": "ngram"},
    "mtp": {"name": "mtp"},
    "eagle3": {"name": "eagle3"},
    "eagle3, untrained": {"name": "eagle3", "model": "random"},
    "dflash, untrained": {"name": "dflash", "model": "random"},
}


@attrs.define
class Tally:
    """Counts of one drafter."""

    tokens: int = 0
    cycles: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    drafts: int = 0
    offered: list[int] = attrs.field(factory=lambda: [0] * 8)
    accepted: list[int] = attrs.field(factory=lambda: [0] * 8)

    def add(self, result: Any, seconds: float) -> None:
        """Count one generation."""
        stats = result.stats
        self.tokens += len(result.tokens)
        self.cycles += stats.cycles
        self.seconds += seconds
        self.draft_seconds += stats.seconds["draft"]
        self.drafts += stats.offered[0] if stats.offered else 0
        for counts, new in ((self.offered, stats.offered), (self.accepted, stats.accepted)):
            for position, count in enumerate(new):
                counts[position] += count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, help="of each of four classes")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    prompts = [p for some in json.loads(PROMPTS.read_text()).values() for p in some[: arguments.prompts]]
    models = {
        name: specdec.load("demo", drafter=drafter, depth=arguments.depth, threads=arguments.threads)
        for name, drafter in DRAFTERS.items()
    }
    tallies = {name: Tally() for name in DRAFTERS}
    wanted: dict[str, Any] = {}
    for warm in (True, False):
        for prompt in prompts[:1] if warm else prompts:
            for name, lm in models.items():
                started = time.perf_counter()
                result = lm.generate(prompt, max_new_tokens=arguments.tokens)
                seconds = time.perf_counter() - started
                assert wanted.setdefault(prompt, result.tokens) == result.tokens, name
                if not warm:
                    tallies[name].add(result, seconds)
    plain = tallies["none"].tokens / tallies["none"].seconds
    heads = " | ".join(f"position {i}" for i in range(arguments.depth))
    print(f"| drafter | {heads} | tokens per cycle | a draft, ms | tokens/s | against plain |")
    print("|---" * (arguments.depth + 5) + "|")
    for name, tally in tallies.items():
        shares = [
            f"{tally.accepted[i] / tally.offered[i]:.3f}" if tally.offered[i] else "-" for i in range(arguments.depth)
        ]
        draft = f"{1000 * tally.draft_seconds / tally.drafts:.2f}" if tally.drafts else "-"
        speed = tally.tokens / tally.seconds
        rest = f"{tally.tokens / tally.cycles:.2f} | {draft} | {speed:.0f} | {speed / plain:.2f}"
        print(f"| {name} | {' | '.join(shares)} | {rest} |")


if __name__ == "__main__":
    main()

"""The demo model: acceptance by prompt class and lookahead position on held-out prompts, as the engine counts it.

    python -m benchmarks.acceptance [--tokens 64] [--depth 4] [--json FILE]

The prompts are those that training set aside (``tools/train_demo/held_out_prompts.json``), decoded greedily.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import specdec
from benchmarks.common import machine, save

PROMPTS = Path(__file__).parents[1] / "tools" / "train_demo" / "held_out_prompts.json"


def measure(tokens: int, depth: int) -> dict[str, Any]:
    """Counters and rates by class; rates of a class pool its prompts."""
    lm = specdec.load(depth=depth)
    classes: dict[str, Any] = {}
    for name, prompts in json.loads(PROMPTS.read_text(encoding="utf-8")).items():
        total = specdec.Stats()
        for prompt in prompts:
            session = lm.session()
            session.generate(lm.tokenizer.encode(prompt, add_special=False), max_new_tokens=tokens)
            ours = session.stats
            total.cycles, total.tokens = total.cycles + ours.cycles, total.tokens + ours.tokens
            for mine, theirs in ((total.offered, ours.offered), (total.reached, ours.reached)):
                _add(mine, theirs)
            _add(total.accepted, ours.accepted)
        classes[name] = {
            "prompts": len(prompts),
            "tokens_per_cycle": total.tokens / total.cycles,
            "offered": total.offered,
            "reached": total.reached,
            "accepted": total.accepted,
            "cumulative": [a / o for a, o in zip(total.accepted, total.offered, strict=True)],
            "conditional": [a / r for a, r in zip(total.accepted, total.reached, strict=True)],
        }
    first = [entry["cumulative"][0] for entry in classes.values()]
    return {"classes": classes, "mean_at_position_0": sum(first) / len(first)}


def _add(total: list[int], counts: list[int]) -> None:
    total += [0] * (len(counts) - len(total))
    for position, count in enumerate(counts):
        total[position] += count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    save({"machine": machine(), **measure(options.tokens, options.depth)}, options.json)


if __name__ == "__main__":
    main()

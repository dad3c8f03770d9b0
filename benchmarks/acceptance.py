"""The demo model: acceptance by prompt class and lookahead position on held-out prompts, as the engine counts it.

    python -m benchmarks.acceptance [--tokens 64] [--depth 4] [--json FILE]

The prompts are those that training set aside (``tools/train_demo/held_out_prompts.json``), decoded greedily.
``specdec accept`` measures the same with its own prompts, or a user's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import specdec
from benchmarks.common import machine, save
from specdec.measuring import Prompt, measure_acceptance

PROMPTS = Path(__file__).parents[1] / "tools" / "train_demo" / "held_out_prompts.json"


def measure(tokens: int, depth: int) -> dict[str, Any]:
    """Counters, rates and intervals by class; rates of a class pool its prompts."""
    held_out = json.loads(PROMPTS.read_text(encoding="utf-8"))  # with the turns of a conversation spelt out
    prompts = {name: [Prompt(kind=name, text=text) for text in texts] for name, texts in held_out.items()}
    report = measure_acceptance(specdec.load(depth=depth), prompts, depth=depth, max_new_tokens=tokens)
    classes = {
        group.name: {
            "prompts": group.prompts,
            "tokens_per_cycle": group.tokens_per_cycle,
            **{
                name: [getattr(place, name) for place in group.positions]
                for name in ("offered", "reached", "accepted", "cumulative", "cumulative_interval", "conditional")
            },
        }
        for group in report.classes
    }
    first = [entry["cumulative"][0] for entry in classes.values()]
    return {"classes": classes, "mean_at_position_0": sum(first) / len(first)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    save({"machine": machine(), **measure(options.tokens, options.depth)}, options.json)


if __name__ == "__main__":
    main()

"""Measure the embedded model's acceptance on held-out prompts, by prompt class and lookahead position.

    python -m benchmarks.acceptance [--tokens 64] [--depth 4] [--json FILE]

Prints counters, rates and intervals by class. The prompts were held out from training
(``benchmarks/held_out_prompts.json``) and are decoded greedily. ``specdec accept`` does the same for other
prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import specdec
from benchmarks.common import arguments, save
from specdec.measuring import Prompt, measure_acceptance

PROMPTS = Path(__file__).parent / "held_out_prompts.json"
SHOWN = ("offered", "reached", "accepted", "cumulative", "cumulative_interval", "conditional")


def measure(tokens: int, depth: int) -> dict[str, Any]:
    """Counters, rates and intervals by class; class rates pool their prompts."""
    held_out = json.loads(PROMPTS.read_text(encoding="utf-8"))  # conversation turns are spelt out
    prompts = {name: [Prompt(kind=name, text=text) for text in texts] for name, texts in held_out.items()}
    report = measure_acceptance(specdec.load(depth=depth), prompts, depth=depth, max_new_tokens=tokens)
    classes = {
        group.name: {
            "prompts": group.prompts,
            "tokens_per_cycle": group.tokens_per_cycle,
            **{name: [getattr(place, name) for place in group.positions] for name in SHOWN},
        }
        for group in report.classes
    }
    first = [entry["cumulative"][0] for entry in classes.values()]
    return {"classes": classes, "mean_at_position_0": sum(first) / len(first)}


def main() -> None:
    options = arguments(__doc__, tokens=64, depth=4)
    save(measure(options.tokens, options.depth), options)


if __name__ == "__main__":
    main()

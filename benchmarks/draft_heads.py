"""Drafters of the embedded model side by side: acceptance by position, cost of a draft, and net speed.

    $ python -m benchmarks.draft_heads --prompts 4

Every prompt runs with every drafter in turn, greedily at one fixed depth, so that what else the machine does meets all
of them. The prompts were held out when the model and its heads were trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import arguments, compare_drafters
from specdec.measuring import choose_prompts, load_prompts

PROMPTS = Path(__file__).parent / "held_out_prompts.jsonl"
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "ngram": {"name": "ngram"},
    "mtp": {"name": "mtp"},
    "eagle3": {"name": "eagle3"},
    "eagle3, untrained": {"name": "eagle3", "model": "random"},
    "dflash, untrained": {"name": "dflash", "model": "random"},
}


def main() -> None:
    options = arguments(__doc__, prompts=4, tokens=48, depth=3, threads=1)
    chosen = choose_prompts(load_prompts(PROMPTS), per_class=options.prompts)
    runs = [(prompt.text, {"max_new_tokens": options.tokens}) for group in chosen.values() for prompt in group]
    compare_drafters(DRAFTERS, runs, depth=options.depth, threads=options.threads)


if __name__ == "__main__":
    main()

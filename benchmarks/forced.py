"""Drafts that a grammar forces: tokens per pass and speed with and without, on the embedded model.

$ python -m benchmarks.forced
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import specdec

SCHEMA = {
    "type": "object",
    "properties": {
        "measurement": {"type": "integer", "minimum": 0, "maximum": 99},
        "certainty": {"enum": ["high", "low"]},
        "instrument": {"enum": ["thermometer", "barometer"]},
        "repeated": {"type": "boolean"},
    },
    "required": ["measurement", "certainty", "instrument", "repeated"],
    "additionalProperties": False,
}
CHAINS: dict[str, Any] = {
    "none": {"name": "none"},
    "forced": {"name": "forced"},
    "mtp": {"name": "mtp"},
    "forced, then mtp": {"name": "first_of", "drafters": [{"name": "forced"}, {"name": "mtp"}]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--depth", type=int, default=6)
    arguments = parser.parse_args()
    grammar = {"name": "grammar", "json_schema": json.dumps(SCHEMA), "whitespace": False}
    models = {
        name: specdec.load("demo", drafter=drafter, depth=arguments.depth, threads=1)
        for name, drafter in CHAINS.items()
    }
    totals = {name: [0, 0, 0.0] for name in CHAINS}
    for run in range(-1, arguments.runs):
        wanted: Any = None
        for name, lm in models.items():
            started = time.perf_counter()
            settings: dict[str, Any] = {"temperature": 0.8, "seed": run} if run % 2 else {}
            settings["seed"] = max(run, 0)
            result = lm.generate(f"Report {run}: ", max_new_tokens=64, processors=[grammar], **settings)
            seconds = time.perf_counter() - started
            wanted = result.tokens if wanted is None else wanted
            assert result.tokens == wanted, name
            if run >= 0:
                for place, value in enumerate((len(result.tokens), result.stats.cycles, seconds)):
                    totals[name][place] += value
    print("| drafter | tokens per pass | tokens/s | against plain |")
    print("|---|---|---|---|")
    plain = totals["none"][0] / totals["none"][2]
    for name, (tokens, passes, seconds) in totals.items():
        print(f"| {name} | {tokens / passes:.2f} | {tokens / seconds:.0f} | {tokens / seconds / plain:.2f} |")


if __name__ == "__main__":
    main()

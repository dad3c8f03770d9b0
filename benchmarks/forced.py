"""Drafts that a grammar forces: tokens per pass and speed with and without, on the embedded model.

$ python -m benchmarks.forced
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common import arguments, compare_drafters

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
    options = arguments(__doc__, runs=6, depth=6)
    grammar = {"name": "grammar", "json_schema": json.dumps(SCHEMA), "whitespace": False}
    runs = []
    for run in range(options.runs):  # half of them sampled
        settings: dict[str, Any] = {"temperature": 0.8 if run % 2 else 0.0, "seed": run}
        runs.append((f"Report {run}: ", {"max_new_tokens": 64, "processors": [grammar], **settings}))
    compare_drafters(CHAINS, runs, depth=options.depth, threads=1)


if __name__ == "__main__":
    main()

"""An observer that writes the offered and accepted tokens of every cycle to a JSONL file."""

import json
import os
import sys
from typing import TextIO

import specdec.registry
from specdec import CycleRecord, hookimpl

VARIABLE = "SPECDEC_CYCLE_LOG"  # the file to append to; unset: nothing is written


class CycleLog:
    """One line per cycle, flushed immediately, so that an interrupted run leaves whole lines."""

    def __init__(self) -> None:
        self._file: TextIO | None = None

    @hookimpl
    def specdec_cycle(self, record: CycleRecord) -> None:
        if self._file is None:
            if VARIABLE not in os.environ:
                return
            self._file = open(os.environ[VARIABLE], "a", encoding="utf-8", buffering=1)
        line = {
            "position": record.position,
            "offered": record.offered,
            "accepted": record.accepted,
            "emitted": len(record.emitted),
            "seconds": round(record.draft_seconds + record.verify_seconds + record.commit_seconds, 6),
        }
        self._file.write(json.dumps(line) + "\n")


if __name__ == "__main__":  # without packaging: register an object with hooks, then generate
    os.environ.setdefault(VARIABLE, "cycles.jsonl")
    specdec.registry.registry().register(CycleLog())
    print(specdec.load("demo").generate("def add(a, b):", max_new_tokens=40).text, file=sys.stderr)

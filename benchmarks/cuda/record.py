"""The file of figures, rewritten after each one, so that a time limit loses nothing."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import triton

from specdec.measuring.environment import commit

FILE = "cuda.json"


ROOT = Path(__file__).resolve().parent.parent.parent


def _software() -> dict[str, Any]:
    return {
        "command": " ".join(["python -m benchmarks.cuda", *sys.argv[1:]]),
        "commit": commit(ROOT) or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


class Record:
    """``results[stage][part]`` is a dict of figures and the run that measured it.

    Args:
        folder: where ``cuda.json`` is kept; existing parts are kept until replaced.
        earlier: another such file to start from, if ``folder`` has none yet.
        facts: description of this run, besides the machine's.
    """

    def __init__(self, folder: Path, *, earlier: Path | None = None, facts: dict[str, Any] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        source = self.path if self.path.exists() else earlier
        self.data: dict[str, Any] = {"runs": [], "results": {}, "skipped": []}
        if source is not None:
            self.data = json.loads(source.read_text())
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.data["runs"].append({"started": started, **_software(), **(facts or {})})
        self.run = len(self.data["runs"]) - 1
        self._began = perf_counter()
        self.write()

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = self.data["results"]
        return results

    def part(self, stage: str, name: str) -> dict[str, Any]:
        """An empty dict at ``results[stage][name]``, to be filled."""
        fresh: dict[str, Any] = {"run": self.run}
        self.results.setdefault(stage, {})[name] = fresh
        return fresh

    def has(self, stage: str, name: str) -> bool:
        """Whether that part was completed, now or in an earlier run."""
        return bool(self.results.get(stage, {}).get(name, {}).get("complete"))

    @contextlib.contextmanager
    def measuring(self, stage: str, name: str) -> Iterator[dict[str, Any]]:
        """A part that is written when it is done, or partially if it fails."""
        part = self.part(stage, name)
        began = perf_counter()
        try:
            yield part
            part["complete"] = True
        finally:
            part["seconds"] = perf_counter() - began
            self.write()

    def skip(self, stage: str, name: str, reason: str) -> None:
        """Record that something was not measured, and why."""
        self.data["skipped"].append({"run": self.run, "stage": stage, "part": name, "reason": reason})
        self.write()

    def skipped(self) -> list[dict[str, Any]]:
        """What this run skipped."""
        return [entry for entry in self.data["skipped"] if entry["run"] == self.run]

    def write(self) -> None:
        """Replace the file atomically."""
        self.data["runs"][self.run]["seconds"] = perf_counter() - self._began
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(beside, self.path)

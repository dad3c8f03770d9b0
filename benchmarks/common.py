"""What the benchmarks share: prompts, the machine's description, medians, memory."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

PROMPTS = {
    "factual": "The first railway in the region was opened in 1868 and",
    "verbose thinking": "A baker sells 12 loaves a day for 3 dollars each. How much money does she make in a week?",
    "code": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "instruction": "Write a Python function `area(width, height)` that: returns the area of a rectangle.",
}
CHAT = ("verbose thinking", "instruction")


def encoded_prompts(tokenizer: Any) -> dict[str, list[int]]:
    """Token ids of ``PROMPTS`` by class, messages in the chat template."""
    prompts = {}
    for name, text in PROMPTS.items():
        if name in CHAT:
            text = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        prompts[name] = tokenizer.encode(text, add_special=False)
    return prompts


def machine() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load_1min": os.getloadavg()[0],
    }


def stream_bandwidth(gigabytes: float = 2.0, repeats: int = 8) -> float:
    """Bytes per second of a read-only reduction over an array larger than any cache: the best of ``repeats``."""
    words = torch.ones(int(gigabytes * 2**30) // 8, dtype=torch.int64)
    best = min(seconds(words.sum) for _ in range(repeats))
    return words.nbytes / best


def seconds(call: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    started = perf_counter()
    call()
    return perf_counter() - started


def median(values: Sequence[float]) -> float:
    """The median; robust against a neighbour's load, unlike the mean."""
    return statistics.median(values)


def resident_bytes() -> int:
    """Resident set of this process (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS line")


def save(result: dict[str, Any], path: Path | None) -> None:
    """Print the record as JSON, and write it where asked."""
    text = json.dumps(result, indent=2)
    print(text)
    if path is not None:
        path.write_text(text + "\n")

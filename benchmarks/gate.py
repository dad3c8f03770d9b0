"""Compare decoding and prefill with another commit, in turns; the exit status is 1 if this tree is slower.

    python -m benchmarks.gate [--commit main] [--rounds 12] [--tokens 256] [--prompt 1024] [--threshold 0.03]
                              [--model demo] [--json FILE]

Both trees run in processes of their own, each of which loads the model once. The turns alternate (A B B A), so that
slow changes of the machine's speed favour neither. A part fails if the median ratio of neighbouring turns is above
1 + ``--threshold``. Depths are fixed, so both trees do the same work if they give the same tokens.

Run it by hand before a release, on an idle machine. Against the same commit it shows how far the machine can be
trusted: the ratios should be within a per cent of 1.
"""

from __future__ import annotations

import functools
import operator
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Worker, arguments, in_turns, median, save

ROOT = Path(__file__).resolve().parents[1]
DEPTH = 2
WARM_UP = 2  # rounds
# Uses nothing but the public API, so that older commits can run it. A line names a part; its answer is JSON.
WORKER = """
import json, sys
import specdec
model, tokens, prompt = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
arms = {
    "plain decoding": specdec.load(model, drafter="none", depth=0),
    "speculative decoding": specdec.load(model, depth=DEPTH),
}
short = "class Stack:\\n    def __init__(self):\\n"
long = [7 + i % 89 for i in range(prompt)]
def run(part):
    if part == "prefill":
        result = arms["speculative decoding"].generate(long, max_new_tokens=1, ignore_eos=True)
        return result.stats.seconds["prefill"], result.tokens
    result = arms[part].generate(short, max_new_tokens=tokens, ignore_eos=True)
    return result.stats.decode_seconds, result.tokens
for line in sys.stdin:
    print(json.dumps(run(*json.loads(line))), flush=True)
"""
PARTS = ("plain decoding", "speculative decoding", "prefill")


class Tree(Worker):
    """A process that runs one tree."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.tokens: dict[str, list[int]] = {}
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        super().__init__(
            [sys.executable, "-c", WORKER.replace("DEPTH", str(DEPTH)), *arguments], cwd=folder, env=environment
        )

    def run(self, part: str) -> float:
        """Seconds of a part."""
        seconds, self.tokens[part] = self.ask(part)
        return float(seconds)


def judged(times: Mapping[str, Sequence[float]], threshold: float) -> dict[str, Any]:
    """The medians of both trees in milliseconds, the median ratio of neighbouring turns, and the verdict."""
    ratio = median([this / other for this, other in zip(times["this"], times["other"], strict=True)])
    return {
        "other_ms": 1e3 * median(times["other"]),
        "this_ms": 1e3 * median(times["this"]),
        "ratio": ratio,
        "slower": ratio > 1 + threshold,
    }


def compare(folders: Mapping[str, Path], options: Any) -> dict[str, Any]:
    """Run both trees in turns and judge every part."""
    trees: dict[str, Tree] = {}
    try:
        for name, folder in folders.items():
            trees[name] = Tree(folder, options.model, options.tokens, options.prompt)
        parts = {}
        for part in PARTS:
            turn = {name: functools.partial(tree.run, part) for name, tree in trees.items()}
            times = in_turns(turn, options.rounds, warm_up=WARM_UP, measure=operator.call)
            parts[part] = judged(times, options.threshold)
            parts[part]["same_tokens"] = trees["other"].tokens[part] == trees["this"].tokens[part]
        return parts
    finally:
        for tree in trees.values():
            tree.close()


def main() -> None:
    options = arguments(__doc__, commit="main", rounds=12, tokens=256, prompt=1024, threshold=0.03, model="demo")
    with tempfile.TemporaryDirectory() as temporary:
        other = Path(temporary) / "other"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(other), options.commit], check=True)
        try:
            parts = compare({"other": other, "this": ROOT}, options)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    save({"other": options.commit, "threshold": options.threshold, "parts": parts}, options)
    slower = [f"{part} takes {found['ratio']:.3f} times as long" for part, found in parts.items() if found["slower"]]
    if slower:
        raise SystemExit(f"slower than {options.commit}: {', '.join(slower)}")


if __name__ == "__main__":
    main()

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
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, in_turns, median, save

ROOT = Path(__file__).resolve().parents[1]
DEPTH = 2
WARM_UP = 2  # rounds
# Uses nothing but the public API, so that older commits can run it. Reads a part's name a line, answers with JSON.
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
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    print(json.dumps(run(line.strip())), flush=True)
"""
PARTS = ("plain decoding", "speculative decoding", "prefill")


class Tree:
    """A process that runs one tree."""

    def __init__(self, folder: Path, arguments: Sequence[object]) -> None:
        worker = WORKER.replace("DEPTH", str(DEPTH))
        self._process = subprocess.Popen(
            [sys.executable, "-c", worker, *map(str, arguments)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.tokens: dict[str, list[int]] = {}
        self._answer()

    def run(self, part: str) -> float:
        """Seconds of a part."""
        assert self._process.stdin is not None
        self._process.stdin.write(part + "\n")
        self._process.stdin.flush()
        seconds, self.tokens[part] = self._answer()
        return float(seconds)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a tree ended with status {self._process.wait()}; its message is above")
        return json.loads(line)


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
    worker = (options.model, options.tokens, options.prompt)
    trees: dict[str, Tree] = {}
    try:
        for name, folder in folders.items():
            trees[name] = Tree(folder, worker)
        parts = {}
        for part in PARTS:
            answers: dict[str, list[float]] = {name: [] for name in trees}

            def turn(name: str, part: str = part, answers: dict[str, list[float]] = answers) -> None:
                answers[name].append(trees[name].run(part))

            in_turns({name: functools.partial(turn, name) for name in trees}, WARM_UP + options.rounds)
            parts[part] = judged({name: found[WARM_UP:] for name, found in answers.items()}, options.threshold)
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

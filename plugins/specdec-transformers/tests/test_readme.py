"""The examples in README.md run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(checkpoint, capsys):
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "specdec.load" in block)
    exec(code.replace("FOLDER", str(checkpoint("gpt2"))), {})
    assert "gpt2 numeric transformers chooses kernels" in capsys.readouterr().out


def test_the_command_runs(checkpoint):
    (line,) = re.findall(r"^\$ (specdec generate .*)$", README, re.MULTILINE)
    words = shlex.split(line.replace("FOLDER", str(checkpoint("llama"))))[1:]
    ran = subprocess.run(
        [sys.executable, "-m", "specdec", *words, "-n", "3"], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    assert "numeric parity" in ran.stderr

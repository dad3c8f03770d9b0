"""The benchmarks take the flags that a page or a workflow gives them, and run at their smallest settings."""

import importlib
import re

import pytest

import specdec
from benchmarks.batches import rate
from benchmarks.common import qwen3_5_config, random_checkpoint
from tests.processes import ROOT, run_python

NAMED = re.compile(r"python -m (benchmarks\.\w+)([^`#\n]*)")
RUNS = {
    "adaptive": "--tokens 24 --warm 8 --settling 1 --repeats 1 --deepest 1",
    "batches": "--sizes 2 --tokens 8 --repeats 1",
    "busy": "--busy 1 --tokens 8 --repeats 1 --depth 0",
    "cpu_kernels": "--rounds 1 --only rms_norm",
    "demo": "--tokens 8 --repeats 1",
    "draft_heads": "--prompts 1 --tokens 8",
    "draft_step": "--folder FOLDER --context 8 --repeats 1 --rows 64 128 --extra 8",
    "forced": "--runs 2",
    "int8_quality": f"--model demo --text {ROOT / 'LICENSE'} --tokens 16 --window 8",
    "prefill": "--folder FOLDER --tokens 16 --repeats 1",
    "quantised_load": "--layers 4",
    "released": "demo --draft demo demo --drafters ngram --depths 2 --per-class 1 --tokens 8 --page FOLDER/page.md",
    "sampling": "--tokens 8 --repeats 1",
    "serve_load": "overhead --tokens 8 --repeats 2",
    "shape_0_8b": "--folder FOLDER --context 8 --repeats 1 --rows 1 2",
}  # the others have tests of their own, or need a device or another program
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 2}
SMALL |= {"linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}


def commands():
    """The benchmarks with the flags that each is given somewhere."""
    given = {}
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md", "specdec/**/*.md", ".github/workflows/*.yml"):
        for page in ROOT.glob(pattern):
            for name, rest in NAMED.findall(page.read_text(encoding="utf-8").replace("\\\n", " ")):
                given.setdefault(name, set()).update(re.findall(r"--[a-z-]+", rest))
    return given


@pytest.mark.parametrize(("name", "flags"), sorted(commands().items()))
def test_it_takes_the_flags_that_it_is_given(name, flags, monkeypatch, capsys):
    if name == "benchmarks.metal":
        pytest.importorskip("mlx.core", exc_type=ImportError)
    module = importlib.import_module("benchmarks.cuda.__main__" if name == "benchmarks.cuda" else name)
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        module.main()
    options = capsys.readouterr().out.split("\noptions:")[1]
    assert flags <= set(re.findall(r"--[a-z-]+", options))


def test_batches_say_when_nothing_can_be_timed():
    streams = [specdec.load("demo", drafter="none").stream(prompt, max_new_tokens=1) for prompt in "ab"]
    with pytest.raises(SystemExit, match="give more --tokens"):
        rate(streams)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name, tmp_path):
    if "FOLDER" in RUNS[name]:
        random_checkpoint(tmp_path, qwen3_5_config(**SMALL))
    run_python("-m", f"benchmarks.{name}", *RUNS[name].replace("FOLDER", str(tmp_path)).split(), cwd=ROOT)

"""``specdec doctor``: what it says about a machine, about a model on it, and what it refuses."""

import json
import re

import pytest
import torch

from specdec import __version__
from specdec.contract import BackendSpec
from specdec.registry import BUILT_INS, Registry
from tests.cli.test_cli_commands import BROKEN
from tests.plugin_objects import plugin_of
from tests.wrong_ops import ProbedBackend, wrong_ops


@pytest.fixture(autouse=True)
def torch_kernels(monkeypatch):
    monkeypatch.setenv("SPECDEC_CPU_KERNELS", "torch")


@pytest.fixture
def tiny_model(checkpoint):
    return checkpoint("qwen3_5", layers=2, max_positions=64)


def fails():
    raise RuntimeError("the driver is on fire")


CANNOT_RUN = [
    BackendSpec(name="absent", factory=lambda config: None, available=lambda: "no such device"),
    BackendSpec(name="burning", factory=lambda config: None, available=fails),
]


def with_plugins(*plugins):
    return Registry((*BUILT_INS, *plugins), entry_points=())


def flat(text):
    return " ".join(text.split())


# --- without a model --------------------------------------------------------------------------------------------------


def test_a_machine_says_what_runs_and_why_the_rest_does_not(invoke):
    done = invoke("doctor", registry=with_plugins(BROKEN, plugin_of(specdec_backends=lambda self: CANNOT_RUN)))
    assert done.exit_code == 0, done.output
    said = flat(done.stdout)
    for text in (
        f"specdec {__version__}",
        f"torch {torch.__version__}",
        "SPECDEC_CPU_KERNELS=torch",
        "absent no no such device",
        "burning no the backend 'burning' failed in available: RuntimeError: the driver",
        "plugin failed: tests.plugin_objects",
        "OSError: no drafters today",
        "1 failure",
    ):
        assert text in said, text


def test_a_cache_that_cannot_be_written_is_told(invoke, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert "is no folder" in invoke("doctor", "--json").stdout


# --- with a model -----------------------------------------------------------------------------------------------------


def doctor(invoke, model, *arguments, plugin=None):
    plugins = () if plugin is None else (plugin,)
    done = invoke("doctor", model, "--json", *arguments, registry=with_plugins(*plugins))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout)


PROBED = ("-s", "target.backend=probed")


def test_a_model_that_is_exact(invoke, tiny_model):
    status, told = doctor(invoke, tiny_model, *PROBED, "--context", "41", plugin=ProbedBackend())
    assert status == 0
    model = told["model"]
    assert told["machine"]["auto"]
    assert model["promise"]["exact"]
    assert model["parity_at_load"] == "bitwise"
    assert all(finding["equal"] for finding in model["findings"])
    subjects = [finding["subject"] for finding in model["findings"]]
    assert any(subject.startswith("layer 0") and subject.endswith("41 rows before") for subject in subjects)
    assert "logits of whole passes after 41 tokens" in subjects


def test_a_mistake_is_named_and_a_backend_that_promises_equal_bits_fails(invoke, tiny_model):
    wrong = ProbedBackend(lambda: wrong_ops("swiglu"))
    status, told = doctor(invoke, tiny_model, *PROBED, plugin=wrong)
    assert status == 1
    assert told["model"]["parity_at_load"] == "numeric"
    assert not told["model"]["promise"]["exact"]
    reason = told["model"]["promise"]["reason"]
    assert re.match(r"layer 0 \(\w+ with GatedMlp\): different bits in blocks of 3 to 6 rows, first in row 2", reason)
    done = invoke("doctor", tiny_model, *PROBED, registry=with_plugins(wrong))
    assert done.exit_code == 1
    assert re.search(r"differ 3 to 6 \S+ layer 0 .*, first in row 2", flat(done.stdout))
    assert "numeric: layer 0" in flat(done.stdout)

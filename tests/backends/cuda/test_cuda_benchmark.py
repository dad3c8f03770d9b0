"""``python -m benchmarks.cuda``: its arithmetic, its gates, its record, and all of its code on the host."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels run on the device here; the benchmark itself is what to run", allow_module_level=True)


from benchmarks.cuda import __main__ as script
from benchmarks.cuda import models, smoke, timing
from benchmarks.cuda.shapes import SHAPES, TOY, Costs
from benchmarks.cuda.weights import AGREEMENT, MadeWeights, build_target, language_model

pytestmark = pytest.mark.interpreter

HOST = torch.device("cpu")


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[timing.Lab]:
    """The stand-in for a GPU. What it changes for the process is changed back."""
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", InterpreterBuilder.create_dot)
    threads = torch.get_num_threads()
    yield smoke.lab()
    torch.set_num_threads(threads)


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "per_token", "state", "head"),
    [
        ("0.8b", 0.752e9, 12 * 1024, 18.9e6, 254e6),
        ("4b", 4.205e9, 32 * 1024, 50.3e6, 636e6),
        ("9b", 7.936e9, 32 * 1024, 50.3e6, 1017e6),
    ],
)
def test_bytes_are_those_of_the_published_shapes(
    name: str, parameters: float, per_token: int, state: float, head: float
) -> None:
    """Parameters, bytes of keys and values per token, and states, as published for these models."""
    shape = SHAPES[name]
    rest = shape.kv_bytes(shape.context, shape.attention_layers) + 2 * shape.state_bytes
    assert (shape.pass_bytes(1) - rest) / 2 == pytest.approx(parameters, rel=2e-3)
    assert shape.kv_bytes(1, shape.attention_layers) == per_token
    assert shape.state_bytes == pytest.approx(state, rel=2e-3)
    assert shape.head_bytes / 2 == pytest.approx(head, rel=2e-3)
    assert shape.pass_bytes(4) - shape.pass_bytes(1) == 3 * shape.state_bytes


@pytest.mark.sample
def test_speed_up_is_tokens_over_seconds() -> None:
    """By hand: 1 + .763 + .623 tokens in 1.1 + 2 * 0.1 + 0.1 plain steps."""
    costs = Costs(decode=2.0, verify={1: 2.0, 2: 2.1, 3: 2.2}, draft=0.2, bookkeeping=0.2)
    assert costs.speedup(2) == pytest.approx((1 + 0.763 + 0.623) / 1.4)
    assert costs.best() == (2, costs.speedup(2))
    assert costs.best((0.1, 0.01))[0] == 1


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_made_heads_agree_as_often_as_asked(tied: bool, tmp_path: pathlib.Path) -> None:
    """Measured where it counts: drafts of single tokens over the whole model, at many tokens."""
    from specdec.backends.cpu.reference import ReferenceOps

    shape = attrs.evolve(TOY, hidden=128, intermediate=96, vocabulary=2048, draft_rows=1024, tied=tied)
    weights = MadeWeights(shape, HOST, dtype=torch.float32, agreement=AGREEMENT)
    target = build_target(shape, ReferenceOps(torch.float32), weights, backend="cpu", dtype="float32")
    lm = language_model(target, shape, tmp_path, depth=1, pruned=True, capacity=64)
    plain = language_model(target, shape, tmp_path, drafter="none", capacity=64)
    right = offered = 0
    for start in range(60):
        prompt = [17 * start, 17 * start + 1]
        result = lm.generate(prompt, max_new_tokens=5)
        assert result.tokens == plain.generate(prompt, max_new_tokens=5).tokens
        right, offered = right + sum(result.stats.accepted), offered + sum(result.stats.offered)
        assert max(result.tokens) < shape.draft_rows
    assert offered > 100
    assert right / offered == pytest.approx(AGREEMENT, abs=0.12)


def test_made_weights_are_all_there_and_the_same_each_time() -> None:
    one, two = (MadeWeights(TOY, HOST, agreement=agreement) for agreement in (None, None))
    assert set(one) == set(TOY.tensors)
    for name, size in TOY.tensors.items():
        assert tuple(one[name].shape) == size
        assert torch.equal(one[name], two[name])
        assert one[name].abs().max() > 0
        assert one[name].dtype == (torch.bfloat16 if len(size) == 2 else torch.float32)


# --- gates ------------------------------------------------------------------------------------------------------------


def test_forced_acceptance_finds_a_commit_that_keeps_a_row_too_many(make_target: Callable[..., Any]) -> None:
    """The gate over verification: silent for the CPU backend, loud for a target whose rollback is wrong."""
    target = make_target("qwen3_5")
    prompt, failures = list(range(5, 17)), list[str]()
    ids, logits = models._plain(target, prompt, 12, 64, failures)
    assert failures == []
    for depth in (1, 3):
        assert models._forced(target, prompt, ids, logits, depth, 64) == []

    class Forgetful(type(target)):  # type: ignore[misc]
        def commit(self, state: Any, rows: int) -> None:
            super().commit(state, min(rows + 1, len(state.decoded)))

    broken = Forgetful(target.info, target.model)
    assert models._forced(broken, prompt, ids, logits, 3, 64)
    other = [row.copy() for row in logits]
    other[4][7] += 1e-6
    models._compare("here", ids, logits, ids, other, failures)
    assert failures == ["here: the logits of token 4 have other bits"]


def test_a_failed_gate_or_part_is_a_failed_run(
    tmp_path: pathlib.Path, lab: timing.Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status says it, the end of the output says it, and the record keeps it; other parts still run."""
    monkeypatch.setattr(models, "gates", lambda *_, **__: {"failures": ["row 3 has other bits"]})
    monkeypatch.setattr(models, "made", lambda *_: None)
    assert script.main(["--smoke", "--out", str(tmp_path), "--stage", "check,models"]) == 1
    assert "FAILED: toy, whole model: row 3 has other bits" in capsys.readouterr().out
    kept = json.loads((tmp_path / "cuda.json").read_text())
    assert len(kept["failures"]) == 2
    assert kept["results"]["check"]["toy"]["complete"]
    assert "complete" not in kept["results"]["models"]["toy"]


def test_all_of_it_runs_on_the_host(
    tmp_path: pathlib.Path, lab: timing.Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in device, a toy, a few tokens: checks pass, figures are there and say that they are none."""
    assert script.main(["--smoke", "--out", str(tmp_path), "--stage", "check,models,demo"]) == 0
    assert "not a measurement" in capsys.readouterr().out
    kept = json.loads((tmp_path / "cuda.json").read_text())
    results = kept["results"]
    assert kept["measurement"] is False
    checked = results["check"]["toy"]["gates"]
    assert checked["depths"] == [0, 1]
    assert checked["host_reference"]["error"] < 1e-5
    model = results["models"]["toy"]
    assert set(model["verify"]) == {"1", "2", "4"}
    assert model["decode"]["of_bound"] > 0
    assert set(model["generation"]["1"]) == {"plain", "made", "coin"}
    assert results["demo"]["embedded"]["depths"]["1"]["mean_ratio"] > 0


@pytest.mark.slow
def test_transformers_generates_with_the_same_weights(tmp_path: pathlib.Path, lab: timing.Lab) -> None:
    """Not only the same shapes: its greedy tokens are ours."""
    pytest.importorskip("transformers")
    assert script.main(["--smoke", "--out", str(tmp_path), "--stage", "transformers"]) == 0
    found = json.loads((tmp_path / "cuda.json").read_text())["results"]["transformers"]["toy"]
    assert set(found["settings"]) == {"dynamic cache", "static cache"}
    assert all(entry["same_tokens"] == 1.0 for entry in found["settings"].values())


def test_the_stream_kernel_reads_every_word_once() -> None:
    words = torch.randint(-1000, 1000, (10_007,), dtype=torch.int32)
    assert timing.stream_kernel(words, programs=3, block=1024).sum() == words.sum()

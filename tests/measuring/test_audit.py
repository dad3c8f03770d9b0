"""The audit finds nothing where nothing is, every tolerated token, and a backend that breaks its word."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import Choice
from specdec.contract import Logits, Parity
from specdec.decoding.parts import make_verifier
from specdec.errors import ConfigError, PromptError, UnsupportedError
from specdec.hosting import read_trace
from specdec.measuring.audit import AuditReport, audit, read_run
from specdec.measuring.divergences import Divergence
from specdec.measuring.plots import plot_audit, save_figure
from tests.decoding.test_sessions import CODE, load, variant

__all__ = ["load"]  # a fixture


@pytest.fixture
def lm(load: Callable[..., Any]) -> Any:
    return variant(load("qwen3_5", "bfloat16"), "mtp")


@given(
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    seed=st.integers(0, 2**40),
    depth=st.integers(0, 6),
    extra=st.sampled_from(
        [{}, {"top_k": 9}, {"repetition_penalty": 1.3, "presence_penalty": 0.5}, {"logit_bias": {44: 5.0}}]
    ),
)
def test_a_strict_run_has_no_divergence_at_any_setting(
    load: Callable[..., Any], temperature: float, seed: int, depth: int, extra: dict[str, Any]
) -> None:
    lm = variant(load("qwen3_5"), "mtp", depth)
    run = lm.generate([40, 50, 60], max_new_tokens=25, ignore_eos=True, temperature=temperature, seed=seed, **extra)
    report = audit(lm, run.prompt, run.tokens, generation=run.generation)
    assert report.divergences == ()
    assert (report.temperature, report.guarantee, report.parity) == (temperature, "exact", "bitwise")


@pytest.mark.parametrize(("verifier", "option"), [("margin", "margin"), ("typical", "epsilon")])
@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_a_lossy_runs_own_count_is_the_audits(
    verifier: str, option: str, value: float, load: Callable[..., Any]
) -> None:
    """Two countings of the same thing: by the verifier during the run, by the replay after it."""
    chosen = make_verifier(Choice(verifier, {option: value}))
    lm = attrs.evolve(variant(load("demo", "bfloat16"), "mtp", 3), verifier=chosen)
    run = lm.generate(CODE, max_new_tokens=150, ignore_eos=True)
    report = audit(lm, run.prompt, run.tokens, generation=run.generation)
    assert len(report.divergences) == run.deviation.count
    assert report.largest_gap == run.deviation.largest_gap
    assert not report.broken_promise
    if verifier == "margin":
        assert report.divergences or value < 1.0
        assert not report.divergences or value > 0.0
        assert report.largest_gap <= value
        assert all(found.top_two <= found.gap for found in report.divergences)


@given(where=st.integers(0, 29), other=st.integers(0, 276))
def test_one_changed_token_is_found_where_it_stands(load: Callable[..., Any], where: int, other: int) -> None:
    """Teacher-forced: the audit goes on with the changed token, and reports it first."""
    lm = variant(load("qwen3_5", "bfloat16"))
    run = lm.generate([40, 50, 60], max_new_tokens=30, ignore_eos=True)
    tokens = [*run.tokens[:where], other, *run.tokens[where + 1 :]]
    report = audit(lm, run.prompt, tokens, rows=1)
    if tokens == run.tokens:
        assert report.divergences == ()
        return
    first = report.divergences[0]
    assert (first.position, first.token, first.chosen) == (where, other, run.tokens[where])
    assert report.first == where
    assert first.gap >= first.top_two > 0
    forced = lm.session()
    assert all(
        found.chosen == forced.fork().generate([*run.prompt, *tokens[: found.position]], max_new_tokens=1).tokens[0]
        for found in report.divergences[:3]
    )


class Skewed(Logits):
    """Logits of a pass that shift with the number of its rows, as a backend's that picks kernels by it."""

    def __init__(self, inner: Logits) -> None:
        self.inner, self.shift = inner, 1e-4 * (len(inner) - 1)

    def __len__(self) -> int:
        return len(self.inner)

    def rows(self) -> Any:
        rows = self.inner.rows().copy()
        rows[-1:, 0] += self.shift
        return rows

    def argmax(self) -> list[int]:
        return [int(token) for token in self.rows().argmax(-1)]

    def topk(self, k: int) -> Any:
        raise NotImplementedError

    def gather(self, tokens: Any) -> Any:
        raise NotImplementedError


class SkewedTarget:
    def __init__(self, target: Any) -> None:
        self.target, self.info = target, attrs.evolve(target.info, parity=Parity.NUMERIC)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def decode(self, state: Any, tokens: Any) -> Any:
        output = self.target.decode(state, tokens)
        return attrs.evolve(output, logits=Skewed(output.logits))


def test_the_control_shows_what_the_backend_does_without_speculation(lm: Any) -> None:
    run = lm.generate([40, 50, 60], max_new_tokens=21, ignore_eos=True)
    skewed = attrs.evolve(lm, target=SkewedTarget(lm.target))
    control = audit(skewed, run.prompt, run.tokens, rows=4).control
    assert control is not None
    assert (control.compared, control.equal_rows) == (21, 16)  # the last row of five passes of 4; the last has one row
    assert control.equal_share == 16 / 21
    assert control.largest_difference == pytest.approx(3e-4, rel=0.1)
    assert audit(skewed, run.prompt, run.tokens, rows=1).control is None
    assert not audit(skewed, run.prompt, run.tokens).broken_promise


def test_what_cannot_be_audited_is_refused(lm: Any) -> None:
    for prompt, tokens, reason in (
        ([], [1], "prompt is empty"),
        ([1], [], "no tokens to audit"),
        ([1], [10**6], "outside the vocabulary"),
        ([1], [1] * 600, "more than the 512 that fit"),
    ):
        with pytest.raises(PromptError, match=reason):
            audit(lm, prompt, tokens)
    with pytest.raises(PromptError, match="argument rows of audit.. takes 1 to"):
        audit(lm, [1], [1], rows=0)
    with pytest.raises(PromptError, match="temperature"):
        audit(lm, [1], [1], tempreature=1.0)


# --- the report ------------------------------------------------------------------------------------------------------


def report(gaps: list[float], divergences: tuple[Divergence, ...] = (), **changes: Any) -> AuditReport:
    fields: dict[str, Any] = {
        "prompt_tokens": 3,
        "tokens": len(gaps),
        "temperature": 0.0,
        "guarantee": "exact",
        "parity": "bitwise",
        "divergences": divergences,
        "gaps": tuple(gaps),
        "control": None,
    }
    return AuditReport(**{**fields, **changes})


def test_the_plot_is_a_png_with_a_panel_for_what_there_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without divergences no panel is empty; a token that the settings forbid has no height, and is marked."""
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []

    def save(figure: Any, path: Any) -> None:
        drawn.append(figure)
        save_figure(figure, path)

    monkeypatch.setattr("specdec.measuring.plots.save_figure", save)
    near, banned = Divergence(2, 7, 8, 0.2, 0.2), Divergence(3, 7, 8, math.inf, 0.4)
    for found, panels, marked in (((), 1, []), ((near,), 2, [2]), ((banned,), 2, [3]), ((near, banned), 2, [2, 3])):
        plot_audit(report(list(np.geomspace(1e-4, 20, 50)), found), tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert len(drawn[-1].axes) == panels
        assert [x for line in drawn[-1].axes[-1].lines for x in line.get_xdata()] == marked
        assert all(one.get_ylim()[1] > 0 for one in drawn[-1].axes)
    with pytest.raises(UnsupportedError, match="cannot be written"):
        plot_audit(report([1.0]), tmp_path / "no" / "a.png")


# --- runs from files -------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_run_is_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.json"
    for text, reason in (
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[]", "no list of token ids under 'prompt'"),
        ('{"tokens": [1]}', "under 'prompt'"),
        ('{"prompt": [1], "tokens": [1.5]}', "under 'tokens'"),
        ('{"error": {"type": "X"}}', "holds an error"),
    ):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(PromptError, match=reason):
            read_run(file)
    os.mkfifo(tmp_path / "pipe")
    for path, reason in ((tmp_path, "it is a folder"), (tmp_path / "pipe", "it is a named pipe")):
        with pytest.raises(PromptError, match=f"cannot be read: {reason}"):
            read_run(path)
        with pytest.raises(PromptError, match=f"cannot be read: {reason}"):
            read_trace(path)
    file.write_text('{"prompt": [1], "tokens": [2], "generation": {"temperature": "hot"}}')
    with pytest.raises(ConfigError, match=r"generation\.temperature takes a number"):
        read_run(file)
    file.write_text('{"prompt": [1], "tokens": [2]}')
    assert read_run(file).generation is None

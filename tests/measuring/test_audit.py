"""The audit finds nothing where nothing is, every tolerated token, and a backend that breaks its word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import Choice
from specdec.decoding.parts import make_verifier
from specdec.errors import PromptError
from specdec.measuring.audit import AuditReport, audit
from specdec.measuring.divergences import Divergence
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
    report = audit(lm, run.prompt, tokens)
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


def test_what_cannot_be_audited_is_refused(lm: Any) -> None:
    for prompt, tokens, reason in (
        ([], [1], "prompt is empty"),
        ([1], [], "no tokens to audit"),
        ([1], [10**6], "outside the vocabulary"),
        ([1], [1] * 600, "more than the 512 that fit"),
    ):
        with pytest.raises(PromptError, match=reason):
            audit(lm, prompt, tokens)
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
    }
    return AuditReport(**{**fields, **changes})

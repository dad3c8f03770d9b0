"""The right but unusual plugins give the output of plain decoding, in the engine and without the conformance kit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import specdec
from specdec.config import Choice
from specdec.registry import Registry
from specdec.registry.lookup import use_registry
from tests.selection import cases
from tests.testing.strangers.correct import CORRECT, spec

pytestmark = pytest.mark.mutants

PROMPT = "def add(a, b):\n    return a + b\n\ndef sub("


def of(joint: str) -> list[Any]:
    return [kind for kind, its in CORRECT.items() if its == joint]


def named(joint: str, sample: int = 1) -> Any:
    return pytest.mark.parametrize("kind", cases(of(joint), sample=sample, name=lambda kind: kind.__name__))


class Strangers:
    @specdec.hookimpl
    def specdec_drafters(self) -> list[specdec.DrafterSpec]:
        return [spec(kind) for kind in of("drafter")]

    @specdec.hookimpl
    def specdec_verifiers(self) -> list[specdec.VerifierSpec]:
        return [spec(kind) for kind in of("verifier")]

    @specdec.hookimpl
    def specdec_depth_policies(self) -> list[specdec.DepthPolicySpec]:
        return [spec(kind) for kind in of("policy")]

    @specdec.hookimpl
    def specdec_logits_processors(self) -> list[specdec.ProcessorSpec]:
        return [spec(kind) for kind in of("processor")]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    registry = Registry()
    registry.register(Strangers())
    former = use_registry(registry)
    yield
    use_registry(former)


def run(prompt: Any = PROMPT, *, target: Any = None, tokens: int = 16, **parts: Any) -> Any:
    lm = specdec.load("demo", **({"depth": 3} | parts))
    lm = lm if target is None else attrs.evolve(lm, target=target)
    return lm.generate(prompt, max_new_tokens=tokens, ignore_eos=True)


@named("drafter")
def test_a_drafter(kind: Any) -> None:
    result = run(drafter=spec(kind).name)
    assert result.tokens == run(drafter="none").tokens
    assert not result.stats.faults
    assert "failed" not in result.stats.speculation()["reason"]


@named("verifier")
def test_a_verifier(kind: Any) -> None:
    result = run(verifier=spec(kind).name)
    assert len(result.tokens) == 16
    if result.guarantee != "bounded":
        assert result.tokens == run(drafter="none").tokens


@named("policy")
def test_a_policy(kind: Any) -> None:
    assert run(depth=spec(kind).name).tokens == run(drafter="none").tokens


@named("processor")
def test_a_processor(kind: Any) -> None:
    chosen = {"max_new_tokens": 12, "ignore_eos": True, "processors": [Choice(spec(kind).name)]}
    texts = [specdec.load("demo", depth=depth).generate(PROMPT, **chosen).tokens for depth in (0, 3)]
    assert texts[0] == texts[1]


@named("target")
def test_a_target(kind: Any) -> None:
    room = spec(kind).info.max_positions
    prompt, tokens = [0] if room < 20 else [0] * 5, min(16, room - 1)
    drafted = run(prompt, target=spec(kind), tokens=tokens, drafter="ngram")
    assert drafted.tokens == run(prompt, target=spec(kind), tokens=tokens, drafter="none").tokens
    assert len(drafted.tokens) == tokens

"""Every broken plugin works in an ordinary short setting, and shows its fault where it is provoked.

The probes ask the plugin directly, without the conformance kit, and find nothing in the right plugin beside it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attrs
import pytest

import specdec
from specdec.config import Choice
from specdec.registry import Registry
from specdec.registry.lookup import use_registry
from tests.selection import cases
from tests.testing.strangers import (
    backends,
    drafters,
    observers,
    policies,
    probe_backends,
    probe_drafters,
    probe_observers,
    probe_policies,
    probe_processors,
    probe_targets,
    probe_verifiers,
    processors,
    targets,
    verifiers,
)

pytestmark = pytest.mark.mutants

JOINTS: dict[ModuleType, ModuleType] = {
    drafters: probe_drafters,
    verifiers: probe_verifiers,
    targets: probe_targets,
    policies: probe_policies,
    processors: probe_processors,
    observers: probe_observers,
    backends: probe_backends,
}
ALL = [(module, kind) for module in JOINTS for kind in module.BROKEN]
PROMPT = "def add(a, b):\n    return a + b\n\ndef sub("
SETTINGS: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}


def name(case: tuple[ModuleType, Any]) -> str:
    return f"{case[0].__name__.rsplit('.', 1)[-1]}-{case[1].__name__}"


def right_one(module: ModuleType, kind: Any) -> Any:
    """What a broken class changes a part of."""
    return next(base for base in kind.__mro__[1:] if base not in module.BROKEN)


def test_every_broken_plugin_has_a_probe_and_quotes_what_it_breaks() -> None:
    for module, probes in JOINTS.items():
        assert {kind.__name__ for kind in module.BROKEN} == set(probes.PROBES)
        for kind in module.BROKEN:
            assert '"' in kind.__doc__, f"{kind.__name__} quotes no sentence"


@pytest.mark.parametrize("case", cases(ALL, sample=[name(case) for case in ALL[7::24]], name=name))
def test_a_provoked_fault_shows(case: tuple[ModuleType, Any]) -> None:
    module, kind = case
    probe = JOINTS[module].PROBES[kind.__name__]
    assert probe(kind)
    assert not probe(right_one(module, kind))


FAMILIES = [kind for kind in backends.BROKEN if issubclass(kind, backends.RightFamily)]
OPS = [kind for kind in backends.BROKEN if kind not in FAMILIES]


class Strangers:
    """All of them as one plugin."""

    @specdec.hookimpl
    def specdec_drafters(self) -> list[specdec.DrafterSpec]:
        return [drafters.spec(kind) for kind in drafters.BROKEN]

    @specdec.hookimpl
    def specdec_verifiers(self) -> list[specdec.VerifierSpec]:
        return [verifiers.spec(kind) for kind in verifiers.BROKEN]

    @specdec.hookimpl
    def specdec_depth_policies(self) -> list[specdec.DepthPolicySpec]:
        return [policies.spec(kind) for kind in policies.BROKEN]

    @specdec.hookimpl
    def specdec_logits_processors(self) -> list[specdec.ProcessorSpec]:
        return [processors.spec(kind) for kind in processors.BROKEN]

    @specdec.hookimpl
    def specdec_backends(self) -> list[specdec.BackendSpec]:
        return [backends.spec(kind) for kind in OPS]

    @specdec.hookimpl
    def specdec_models(self) -> list[specdec.ModelSpec]:
        return [backends.spec(kind) for kind in FAMILIES]


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """A registry of their own, so that other tests do not meet them."""
    registry = Registry()
    registry.register(Strangers())
    former = use_registry(registry)
    yield
    use_registry(former)


@pytest.fixture(scope="module")
def plain(registered: None) -> list[int]:
    return specdec.load("demo", drafter="none").generate(PROMPT, **SETTINGS).tokens


@pytest.mark.parametrize("kind", cases(drafters.BROKEN, sample=2, name=lambda kind: kind.__name__))
def test_a_broken_drafter_works_in_a_short_run(kind: Any, plain: list[int]) -> None:
    result = specdec.load("demo", drafter=drafters.spec(kind).name, depth=3).generate(PROMPT, **SETTINGS)
    assert result.tokens == plain
    assert not result.stats.faults
    assert "failed" not in result.stats.speculation()["reason"]


@pytest.mark.parametrize("kind", cases(verifiers.BROKEN, sample=2, name=lambda kind: kind.__name__))
def test_a_broken_verifier_works_in_a_short_run(kind: Any, plain: list[int]) -> None:
    result = specdec.load("demo", verifier=verifiers.spec(kind).name, depth=3).generate(PROMPT, **SETTINGS)
    lossless = kind.guarantee in (specdec.Guarantee.EXACT, specdec.Guarantee.DISTRIBUTION)
    assert result.tokens == plain or not lossless
    assert len(result.tokens) == len(plain)


@pytest.mark.parametrize("kind", cases(targets.BROKEN, sample=2, name=lambda kind: kind.__name__))
def test_a_broken_target_works_in_a_short_run(kind: Any) -> None:
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    drafting = attrs.evolve(specdec.load("demo", drafter="ngram", depth=3), target=targets.spec(kind))
    plain = attrs.evolve(specdec.load("demo", drafter="none"), target=targets.spec(kind))
    tokens = drafting.generate(prompt, **SETTINGS).tokens
    assert tokens == plain.generate(prompt, **SETTINGS).tokens
    assert len(tokens) == SETTINGS["max_new_tokens"]


@pytest.mark.parametrize("kind", cases(policies.BROKEN, sample=2, name=lambda kind: kind.__name__))
def test_a_broken_policy_works_in_a_short_run(kind: Any, plain: list[int]) -> None:
    result = specdec.load("demo", depth=policies.spec(kind).name).generate(PROMPT, **SETTINGS)
    assert result.tokens == plain
    assert result.stats.accepted


@pytest.mark.parametrize("kind", cases(processors.BROKEN, sample=2, name=lambda kind: kind.__name__))
def test_a_broken_processor_works_in_a_short_run(kind: Any) -> None:
    settings = SETTINGS | {"processors": [Choice(processors.spec(kind).name)]}
    result = specdec.load("demo", depth=2).generate(PROMPT, **settings)
    assert len(result.tokens) == SETTINGS["max_new_tokens"]


@pytest.mark.parametrize("kind", cases(observers.BROKEN, sample=2, name=lambda kind: kind.__name__))
def test_a_broken_observer_works_in_a_short_run(kind: Any, plain: list[int]) -> None:
    registry, observer = Registry(), observers.spec(kind)
    registry.register(observer)
    former = use_registry(registry)
    try:
        assert specdec.load("demo", depth=2).generate(PROMPT, **SETTINGS).tokens == plain
    finally:
        use_registry(former)
    assert observer.tokens == len(plain)
    assert not registry.failures


@pytest.mark.parametrize("kind", cases(OPS, sample=1, name=lambda kind: kind.__name__))
def test_a_broken_backend_works_in_a_short_run(kind: Any) -> None:
    settings = SETTINGS | {"max_new_tokens": 6}
    tokens = [
        specdec.load("demo", backend=backends.spec(kind).name, depth=depth).generate("def add", **settings).tokens
        for depth in (0, 2)
    ]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 6


@pytest.mark.parametrize("kind", cases(FAMILIES, sample=1, name=lambda kind: kind.__name__))
def test_a_broken_family_works_in_a_short_run(kind: Any, plain: list[int], tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path(specdec.__file__).parent / "demo"
    for file in folder.glob("*.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text()) | {"model_type": backends.spec(kind).name}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert specdec.load(str(tmp_path), depth=2).generate(PROMPT, **SETTINGS).tokens == plain

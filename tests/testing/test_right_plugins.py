"""Right but unusual plugins: the kit flags none, and the engine runs them."""

import attrs
import pytest

import specdec
from specdec.config import Choice
from specdec.registry import Registry
from specdec.registry.lookup import use_registry
from specdec.testing import check_plugin
from tests.selection import cases
from tests.testing.right.unusual import CORRECT, spec

PROMPT = "def add(a, b):\n    return a + b\n\ndef sub("


@pytest.mark.slow
@pytest.mark.parametrize("kind", cases(CORRECT, sample=0, name=lambda kind: kind.__name__))
def test_the_kit_flags_no_right_plugin(kind):
    check_plugin(spec(kind), seed=3).raise_for_failures()


def of(joint):
    return [kind for kind, its in CORRECT.items() if its == joint]


class Unusual:
    @specdec.hookimpl
    def specdec_drafters(self):
        return [spec(kind) for kind in of("drafter")]

    @specdec.hookimpl
    def specdec_verifiers(self):
        return [spec(kind) for kind in of("verifier")]

    @specdec.hookimpl
    def specdec_depth_policies(self):
        return [spec(kind) for kind in of("policy")]

    @specdec.hookimpl
    def specdec_logits_processors(self):
        return [spec(kind) for kind in of("processor")]


@pytest.fixture(scope="module", autouse=True)
def registered():
    registry = Registry()
    registry.register(Unusual())
    former = use_registry(registry)
    yield
    use_registry(former)


def run(prompt=PROMPT, *, target=None, tokens=16, **parts):
    lm = specdec.load("demo", **({"depth": 3} | parts))
    lm = lm if target is None else attrs.evolve(lm, target=target)
    return lm.generate(prompt, max_new_tokens=tokens, ignore_eos=True)


ENGINE = [kind for kind, joint in CORRECT.items() if joint in ("drafter", "verifier", "policy", "target")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", cases(ENGINE, sample=1, name=lambda kind: kind.__name__))
def test_in_the_engine_a_right_plugin_gives_the_tokens_of_plain_decoding(kind):
    joint, options = CORRECT[kind], {}
    if joint == "target":
        room = spec(kind).info.max_positions
        options = {"target": spec(kind), "prompt": [0] if room < 20 else [0] * 5, "tokens": min(16, room - 1)}
        parts = {"drafter": "ngram"}
    else:
        parts = {"depth" if joint == "policy" else joint: spec(kind).name}
    drafted = run(**options, **parts)
    assert not drafted.stats.faults
    assert "failed" not in drafted.stats.speculation()["reason"]
    if drafted.guarantee != "bounded":
        assert drafted.tokens == run(**options, drafter="none").tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", cases(of("processor"), sample=1, name=lambda kind: kind.__name__))
def test_drafts_change_nothing_under_a_right_processor(kind):
    chosen = {"max_new_tokens": 12, "ignore_eos": True, "processors": [Choice(spec(kind).name)]}
    texts = [specdec.load("demo", depth=depth).generate(PROMPT, **chosen).tokens for depth in (0, 3)]
    assert texts[0] == texts[1]

"""The built-in plugins, and some right ones that are unusual, take the checks of anybody's plugin: no false alarms."""

from functools import partial

import attrs
import numpy as np
import pytest

from specdec.backends.arrays import HostLogits
from specdec.config import Choice
from specdec.contract import Needs, Parity, PrepareEnv, Sampling, Verdict
from specdec.drafters.draft_model import DraftModel, DraftModelConfig
from specdec.drafters.draft_model import specdec_drafters as draft_model_specs
from specdec.drafters.first_of import FirstOfConfig
from specdec.drafters.first_of import specdec_drafters as first_of_specs
from specdec.drafters.mtp import specdec_drafters as mtp_specs
from specdec.models import causal_lm
from specdec.processors.grammar import GrammarConfig
from specdec.registry import Kind, registry
from specdec.testing import Memory, PluginSubject, Subject, TableModel, as_subject, check_plugin
from specdec.testing.engine_run import plain_decoding, run_engine
from specdec.testing.table_model import second_model
from specdec.verifiers.margin import MarginConfig, MarginVerifier
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier
from specdec.verifiers.typical import TypicalConfig, TypicalVerifier
from tests import tiny
from tests.drafters.two_tokenizers import letters


def draft_model(tokenizers="ids", **options):
    """``draft_model`` with a toy as the second model; with "text" the vocabularies overlap in part."""
    spec = draft_model_specs()[0]
    config = DraftModelConfig(model="toy", tokenizers=tokenizers, **options)

    def prepare(target):
        if tokenizers == "ids":
            return DraftModel(model=second_model(target.info.vocab_size), name="toy")
        both = letters("a", "b", "ab"), letters("b", "a", "ba", "aa")
        return DraftModel(model=second_model(both[1].vocab_size), name="toy", tokenizers=both)

    return PluginSubject(
        kind=Subject.DRAFTER, make=lambda env: spec.factory(config, env), needs=spec.needs, prepare=prepare
    )


def first_of(*choices):
    """``first_of`` over registered drafters; a ``draft_model`` among them gets a toy."""
    spec = first_of_specs()[0]
    config = FirstOfConfig(drafters=choices)
    needs = Needs(mtp=any(choice.name == "mtp" for choice in choices))

    def prepare(target):
        def load(asked):
            return second_model(target.info.vocab_size), letters("a", "b", "c")

        assert spec.prepare is not None
        return spec.prepare(config, PrepareEnv(target=target, tokenizer=letters("a", "b", "c"), load=load))

    return PluginSubject(kind=Subject.DRAFTER, make=lambda env: spec.factory(config, env), needs=needs, prepare=prepare)


def draft_models():
    sure = Choice("draft_model", {"model": "toy", "min_confidence": 0.6})
    return {
        "drafter draft_model": draft_model(),
        "drafter draft_model, gated": draft_model(min_confidence=0.3),
        "drafter draft_model, by text": draft_model("text"),
        "drafter first_of, ngram and mtp": first_of(Choice("ngram", {"min_order": 2}), Choice("mtp")),
        "drafter first_of, draft_model and ngram": first_of(sure, Choice("ngram")),
    }


def grammar(**options):
    return as_subject(
        Subject.LOGITS_PROCESSOR, partial(registry().processor("grammar").factory, GrammarConfig(**options))
    )


class AcceptsNothing(StrictVerifier):
    """Chooses the next token itself, always."""

    def verify(self, draft, logits, context):
        verdict = super().verify(draft, logits, context)
        return Verdict(0, draft.tokens[0]) if verdict.accepted else verdict


class Numeric(TableModel):
    """Passes of several rows have other last bits, and it says so."""

    def __init__(self, *table, **options):
        super().__init__(*table, **options)
        self.info = attrs.evolve(self.info, parity=Parity.NUMERIC, parity_reason="passes add in another order")

    def decode(self, state, tokens):
        output = super().decode(state, tokens)
        rows = output.need_logits().rows() * np.float32(1 + 2**-22 * (len(tokens) > 1))
        return attrs.evolve(output, logits=HostLogits(rows))


class Eighths(TableModel):
    """Goes back to multiples of eight tokens only."""

    def rewind(self, state, length):
        return super().rewind(state, length // 8 * 8 if 0 <= length <= state.length else length)


UNUSUAL = {
    "one token": TableModel.random(1),
    "eight positions": TableModel.random(40, max_positions=8),
    "passes of two rows": TableModel.random(40, max_rows=2),
    "equal logits": TableModel(np.full((40, 40), 1 / 40)),
    "ids that are padding": TableModel(np.tile([0.1] * 10 + [0.0] * 30, (40, 1))),
    "numeric parity": Numeric.random(40, tilt=0.5),
    "rewinds to eighths": Eighths.random(40, tilt=0.5),
}
HEADS = ("eagle3", "p_eagle", "dflash", "dspark", "head")  # tests/drafters/heads/test_head_conformance.py


def registered():
    """By name, what is registered and needs no options."""
    found = {}
    kinds = {Kind.DRAFTER: Subject.DRAFTER, Kind.DEPTH_POLICY: Subject.DEPTH_POLICY, Kind.MODEL: Subject.MODEL_FAMILY}
    for kind, subject in kinds.items():
        for entry in registry().entries(kind):
            if entry.spec.name not in ("draft_model", "first_of", *HEADS):
                found[f"{subject.words} {entry.spec.name}"] = subject, entry.spec
    return found


BUILT_INS = {
    **registered(),
    **{name: (Subject.DRAFTER, given) for name, given in draft_models().items()},
    "logits processor grammar, regex": (Subject.LOGITS_PROCESSOR, grammar(regex=r"([a-z]+ [0-9]+[,.] )*")),
    "logits processor grammar, JSON": (Subject.LOGITS_PROCESSOR, grammar(json_schema={"type": "array"})),
    "verifier strict": (Subject.VERIFIER, StrictVerifier),
    "verifier rejection": (Subject.VERIFIER, lambda: RejectionVerifier(RejectionConfig())),
    "verifier rejection, block": (Subject.VERIFIER, lambda: RejectionVerifier(RejectionConfig(block=True))),
    "verifier margin": (Subject.VERIFIER, lambda: MarginVerifier(MarginConfig(margin=0.4))),
    "verifier typical": (Subject.VERIFIER, lambda: TypicalVerifier(TypicalConfig())),
    "verifier that accepts nothing": (Subject.VERIFIER, AcceptsNothing),
    **{
        f"backend cpu, {kernels}, {dtype}": (Subject.OPS, partial(tiny.make_ops, kernels, dtype))
        for kernels in tiny.kernels_available()
        for dtype in ("float32", "bfloat16")
    },
    **{
        f"target TableModel, {memory.name}{', MTP head' * mtp}": (
            Subject.FORWARD_PASS,
            TableModel.random(6, memory=memory, mtp=mtp, tilt=0.5),
        )
        for memory in Memory
        for mtp in (False, True)
    },
    **{f"target, {name}": (Subject.FORWARD_PASS, model) for name, model in UNUSUAL.items()},
}
SAMPLE = [name for name in BUILT_INS if name.split()[-1] in ("ngram", "JSON", "margin") and "first_of" not in name]


def check(subject, given, effort="quick"):
    check_plugin(as_subject(subject, given), effort=effort).raise_for_failures()


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_INS)
def test_a_built_in_plugin_passes(name):
    check(*BUILT_INS[name])


@pytest.mark.parametrize("name", SAMPLE)
def test_a_built_in_plugin_passes_a_sample(name):
    check(*BUILT_INS[name], effort="sample")


@pytest.mark.parametrize(
    ("kernels", "effort"),
    [(tiny.kernels_available()[-1], "sample")]
    + [pytest.param(kernels, "quick", marks=pytest.mark.slow) for kernels in tiny.kernels_available()],
)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_causal_lm_over_random_weights(make_target, family, kernels, effort, monkeypatch):
    """Attention, convolution, recurrence and the MTP head of a real family, over a random checkpoint.

    Long prompts are split inside one call: hidden states and caches do not depend on it.
    """
    monkeypatch.setattr(causal_lm, "PREFILL_ROWS", 13)
    monkeypatch.setattr(causal_lm, "SHARED_MTP", 0)
    target = make_target(family, kernels=kernels)
    check(Subject.FORWARD_PASS, target, effort=effort)


def test_a_model_of_eight_positions_drafts_as_far_as_they_reach(make_target):
    target = make_target("qwen3_5", kernels=tiny.kernels_available()[-1], max_positions=8)
    assert target.info.max_positions == 8
    check_plugin(target, only=["F13", "F22"]).raise_for_failures()


def test_the_mtp_drafter_over_a_real_head(make_target):
    """Beyond ``TableModel``: hidden states, pairs and rewinds over the tiny family's own head."""
    target = make_target("qwen3_5", kernels=tiny.kernels_available()[-1])
    subject = as_subject(Subject.DRAFTER, mtp_specs()[0])
    verifier, prompt, depths = StrictVerifier(), [5, 9, 2, 7, 5, 9, 2], [3, 0, 1, 0, 0, 5]
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=4)):
        got, stats = run_engine(target, verifier, subject.make, prompt, 24, depths, sampling, needs=subject.needs)
        assert got == plain_decoding(target, verifier, prompt, 24, sampling)
        assert not stats.inactive_reason
        assert sum(stats.offered) > 0

"""The built-in plugins take the same checks as anybody's, through the same hooks: no false alarms."""

from __future__ import annotations

import pytest

from specdec.config import Choice
from specdec.contract import ForwardPass, Needs, PrepareEnv, Sampling
from specdec.drafters.draft_model import DraftModel, DraftModelConfig
from specdec.drafters.draft_model import specdec_drafters as draft_model_specs
from specdec.drafters.first_of import Child, FirstOfConfig
from specdec.drafters.first_of import specdec_drafters as first_of_specs
from specdec.drafters.mtp import specdec_drafters as mtp_specs
from specdec.drafters.ngram import specdec_drafters as ngram_specs
from specdec.drafters.none import specdec_drafters as none_specs
from specdec.policies.fixed import specdec_depth_policies
from specdec.registry import Kind, registry
from specdec.testing import (
    DepthPolicySubject,
    DrafterSubject,
    Memory,
    OpsSubject,
    StrictForwardPass,
    Subject,
    TableModel,
    as_subject,
    check_subjects,
    parametrize_checks,
)
from specdec.testing.engine_run import plain_decoding, run_engine
from specdec.verifiers.margin import MarginConfig, MarginVerifier
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier
from specdec.verifiers.typical import TypicalConfig, TypicalVerifier
from tests import tiny
from tests.drafters.two_tokenizers import letters

LESS = 0.3  # how long to look where the full effort is spent elsewhere (tests/verifiers)


@parametrize_checks(drafter=none_specs()[0], depth_policy=specdec_depth_policies()[0])
def test_none_and_fixed(check):
    check()


@parametrize_checks(drafter=ngram_specs()[0], effort=0.7)
def test_ngram(check):
    check()


@pytest.mark.slow
@parametrize_checks(drafter=mtp_specs()[0])
def test_mtp(check):
    check()


def second(target: ForwardPass, vocab: int = 0) -> StrictForwardPass:
    """A draft model that is often right about a ``TableModel``, whose state goes back to few points."""
    size = vocab or target.info.vocab_size
    return StrictForwardPass(TableModel.random(size, seed=3, tilt=0.5, memory=Memory.RECURRENT, peak=0.4))


def draft_model(tokenizers: str = "ids", **options: float) -> DrafterSubject:
    """``draft_model`` with a toy as the second model; with "text" the vocabularies overlap in part."""
    spec = draft_model_specs()[0]
    config = DraftModelConfig(model="toy", tokenizers=tokenizers, **options)

    def prepare(target: ForwardPass) -> DraftModel:
        if tokenizers == "ids":
            return DraftModel(model=second(target), name="toy")
        both = letters("a", "b", "ab"), letters("b", "a", "ba", "aa")
        return DraftModel(model=second(target, both[1].vocab_size), name="toy", tokenizers=both)

    return DrafterSubject(make=lambda env: spec.factory(config, env), needs=spec.needs, prepare=prepare)


@pytest.mark.slow
@parametrize_checks(drafter=draft_model(), effort=0.6)
def test_draft_model(check):
    check()


@pytest.mark.slow
@parametrize_checks(drafter=draft_model(min_confidence=0.3), effort=0.2)
def test_draft_model_with_a_gate(check):
    check()


@pytest.mark.slow
@parametrize_checks(drafter=draft_model("text"), effort=0.4)
def test_draft_model_across_tokenizers(check):
    check()


def first_of(*choices: Choice) -> DrafterSubject:
    """``first_of`` over registered drafters; a ``draft_model`` among them gets a toy."""
    spec = first_of_specs()[0]
    config = FirstOfConfig(drafters=choices)
    needs = Needs(mtp=any(choice.name == "mtp" for choice in choices))

    def prepare(target: ForwardPass) -> tuple[Child, ...]:
        def load(asked):
            return second(target), letters("a", "b", "c")

        assert spec.prepare is not None
        return spec.prepare(config, PrepareEnv(target=target, tokenizer=letters("a", "b", "c"), load=load))

    return DrafterSubject(make=lambda env: spec.factory(config, env), needs=needs, prepare=prepare)


@pytest.mark.slow
@parametrize_checks(drafter=first_of(Choice("ngram", {"min_order": 2}), Choice("mtp")), effort=0.4)
def test_first_of_a_look_up_and_a_head(check):
    check()


@pytest.mark.slow
@parametrize_checks(
    drafter=first_of(Choice("draft_model", {"model": "toy", "min_confidence": 0.6}), Choice("ngram")), effort=0.3
)
def test_first_of_a_sure_model_and_a_look_up(check):
    check()


@pytest.mark.slow
@parametrize_checks(verifier=StrictVerifier, effort=LESS)
def test_strict(check):
    check()


@pytest.mark.slow
@parametrize_checks(verifier=lambda: RejectionVerifier(RejectionConfig()), effort=LESS)
def test_rejection(check):
    check()


@pytest.mark.slow
@parametrize_checks(verifier=lambda: RejectionVerifier(RejectionConfig(block=True)), effort=LESS)
def test_block(check):
    check()


@pytest.mark.slow
@parametrize_checks(verifier=lambda: MarginVerifier(MarginConfig(margin=0.4)), effort=LESS)
def test_margin(check):
    check()


@pytest.mark.slow
@parametrize_checks(verifier=lambda: TypicalVerifier(TypicalConfig()), effort=LESS)
def test_typical(check):
    check()


@pytest.mark.parametrize("name", [entry.spec.name for entry in registry().entries(Kind.DEPTH_POLICY)])
def test_every_registered_policy(name):
    subject = as_subject(Subject.DEPTH_POLICY, registry().depth_policy(name))
    assert isinstance(subject, DepthPolicySubject)
    check_subjects(name, {Subject.DEPTH_POLICY: subject}, effort=0.5).raise_for_failures()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", tiny.kernels_available())
def test_cpu_operations(kernels, dtype):
    subject = OpsSubject(make=lambda: tiny.make_ops(kernels, dtype))
    check_subjects(f"{kernels} {dtype}", {Subject.OPS: subject}).raise_for_failures()


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("mtp", [False, True])
def test_table_model(memory, mtp):
    model = TableModel.random(6, memory=memory, mtp=mtp, tilt=0.5)
    check_subjects("table", {Subject.FORWARD_PASS: as_subject(Subject.FORWARD_PASS, model)}).raise_for_failures()


KNOWN = {  # the torch reference multiplies prompts of more than max_rows rows in bulk, which rounds differently
    "torch": {"F6": "prompts longer than max_rows are multiplied in bulk"},
    "native": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
@pytest.mark.parametrize("kernels", tiny.kernels_available())
def test_causal_lm_over_random_weights(make_target, family, kernels):
    """Attention, convolution, recurrence and the MTP head of a real family, over a random checkpoint."""
    target = make_target(family, kernels=kernels)
    subject = as_subject(Subject.FORWARD_PASS, target)
    effort = 1.0 if kernels == "native" else 0.1
    report = check_subjects(family, {Subject.FORWARD_PASS: subject}, effort=effort, known_failures=KNOWN[kernels])
    report.raise_for_failures()


def test_the_mtp_drafter_over_a_real_head(make_target):
    """Beyond ``TableModel``: hidden states, pairs and rewinds over the tiny family's own head, strictly."""
    target = make_target("qwen3_5", kernels=tiny.kernels_available()[-1])
    subject = as_subject(Subject.DRAFTER, mtp_specs()[0])
    verifier, prompt, depths = StrictVerifier(), [5, 9, 2, 7, 5, 9, 2], [3, 0, 1, 0, 0, 5]
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=4)):
        strict = StrictForwardPass(target)
        got, stats = run_engine(strict, verifier, subject.make, prompt, 24, depths, sampling, needs=subject.needs)
        assert got == plain_decoding(target, verifier, prompt, 24, sampling)
        assert not stats.inactive_reason
        assert sum(stats.offered) > 0

"""The built-in plugins take the same checks as anybody's, through the same hooks: no false alarms."""

from __future__ import annotations

import pytest
import torch

from specdec.contract import DrafterEnv
from specdec.drafters.mtp import specdec_drafters as mtp_specs
from specdec.drafters.ngram import specdec_drafters as ngram_specs
from specdec.drafters.none import specdec_drafters as none_specs
from specdec.plugins import Kind, registry
from specdec.policies.fixed import specdec_depth_policies
from specdec.testing import DepthPolicySubject, Memory, OpsSubject, TableModel, parametrize_checks
from specdec.testing.registry import Subject, as_subject, check_subjects
from specdec.verifiers.margin import MarginConfig, MarginVerifier
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier
from specdec.verifiers.typical import TypicalConfig, TypicalVerifier
from tests import tiny

LESS = 0.3  # how long to look where the full effort is spent elsewhere (tests/verifiers)


@parametrize_checks(drafter=none_specs()[0], depth_policy=specdec_depth_policies()[0])
def test_none_and_fixed(check):
    check()


@parametrize_checks(drafter=ngram_specs()[0], effort=0.7)
def test_ngram(check):
    check()


@parametrize_checks(drafter=mtp_specs()[0])
def test_mtp(check):
    check()


@parametrize_checks(verifier=StrictVerifier, effort=LESS)
def test_strict(check):
    check()


@parametrize_checks(verifier=lambda: RejectionVerifier(RejectionConfig()), effort=LESS)
def test_rejection(check):
    check()


@parametrize_checks(verifier=lambda: RejectionVerifier(RejectionConfig(block=True)), effort=LESS)
def test_block(check):
    check()


@parametrize_checks(verifier=lambda: MarginVerifier(MarginConfig(margin=0.4)), effort=LESS)
def test_margin(check):
    check()


@parametrize_checks(verifier=lambda: TypicalVerifier(TypicalConfig()), effort=LESS)
def test_typical(check):
    check()


@pytest.mark.parametrize("name", [entry.spec.name for entry in registry().entries(Kind.DEPTH_POLICY)])
def test_every_registered_policy(name):
    subject = as_subject(Subject.DEPTH_POLICY, registry().depth_policy(name))
    assert isinstance(subject, DepthPolicySubject)
    check_subjects(name, {Subject.DEPTH_POLICY: subject}, effort=0.5).raise_for_failures()


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny arrays: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    from specdec.testing import StrictForwardPass
    from specdec.testing.end_to_end import run_engine

    target = make_target("qwen3_5", kernels=tiny.kernels_available()[-1])
    from specdec.contract import NoConfig, Sampling
    from specdec.drafters.mtp import MtpDrafter

    prompt = [5, 9, 2, 7, 5, 9, 2]
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=4)):
        expected, _ = run_engine(target, StrictVerifier(), None, prompt, 24, [0], sampling)

        def make(env: DrafterEnv) -> MtpDrafter:
            return MtpDrafter(NoConfig(), env)

        got, stats = run_engine(
            StrictForwardPass(target), StrictVerifier(), make, prompt, 24, [3, 0, 1, 0, 0, 5], sampling
        )
        assert got == expected
        assert not stats.inactive_reason

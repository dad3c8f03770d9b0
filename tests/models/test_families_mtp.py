"""MTP heads of the families of ``tiny_families`` against an oracle that keeps no state (see ``mtp_oracle``).

The oracle's trunk is checked with ours by way of the hidden states that the head starts from; the trunk's own logits
are compared with transformers elsewhere.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comparisons import record
from tests.drafters.test_mtp_drafts import Run, check, prompt_of, steps, token_ids, told
from tests.models.mtp_oracle import MtpOracle
from tests.tiny_families import FAMILIES, SHAPES

ORACLES = ("qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3")
CASES = [
    pytest.param(family, name, marks=[pytest.mark.slow] * (number > 1))
    for family in FAMILIES
    if family in ORACLES
    for number, (name, shape) in enumerate(SHAPES[family].items())
    if shape.get("mtp", True)
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_drafts_equal_the_oracle(family, name, kernels, make_target, checkpoint, record_property):
    """After prompts of several lengths, and after a cycle that kept part of a draft."""
    worst = 0.0
    oracle = MtpOracle(checkpoint(family, dtype="float32", **SHAPES[family][name]))
    target = make_target(family, kernels=kernels, **SHAPES[family][name])
    for length in (1, 2, 19, 40):
        run = Run(target, capacity=64)
        run.prefill(prompt_of(length), sizes=[7])
        worst = max(worst, check(run, oracle, 4))
        run.verify([5, 6, 7], length % 3, 11)
        worst = max(worst, check(run, oracle, 2))
    record(record_property, family, "MTP drafts", "transformers' layers", name, worst)


@pytest.mark.parametrize(("family", "name"), [("glm4_moe", "no-bias-groups"), ("deepseek_v3", "all-sparse-mixed")])
@given(prompt=st.lists(token_ids, min_size=1, max_size=20), chunk=st.integers(1, 20), plan=st.lists(steps, max_size=7))
def test_chained_modules_draft_as_the_oracle_whatever_happened_before(
    family, name, kernels, make_target, checkpoint, prompt, chunk, plan
):
    oracle = MtpOracle(checkpoint(family, dtype="float32", **SHAPES[family][name]))
    run = told(make_target(family, kernels=kernels, **SHAPES[family][name]), prompt, chunk, plan)
    assert run.target.info.mtp_layers == len(oracle.modules) > 1
    check(run, oracle, 5)

"""Each switch is the mistake that it says it is: its drafts equal those of an oracle that makes the same one.

The oracle is made of transformers' layers (``models/mtp_oracle.py``).
"""

import pytest

from specdec.errors import UnsupportedError
from specdec.measuring.ablations import SWITCHES, AblatedLM
from specdec.testing import TableModel
from tests import tiny
from tests.drafters.test_mtp_drafts import Run, check, prompt_of
from tests.models.mtp_oracle import MtpOracle
from tests.tiny_families import SHAPES

PROMPT = 9


CASES = [
    *(("qwen3_5", name, tiny.QWEN3_5_SHAPES[name]) for name in ("r3-gqa3-untied", "attention-only")),
    *(
        pytest.param(family, name, shape, marks=pytest.mark.slow)
        for family in ("qwen3_5_moe", "qwen3_next")
        for name, shape in list(SHAPES[family].items())[:1]
    ),
]


@pytest.mark.parametrize("switch", [*SWITCHES, "none"])
@pytest.mark.parametrize(("family", "shape", "settings"), CASES)
def test_the_drafts_are_those_of_an_oracle_with_the_mistake(
    switch, family, shape, settings, kernels, checkpoint, make_target
):
    """After the prompt, and after cycles in which all, some and none of the draft were accepted."""
    target = make_target(family, kernels=kernels, **settings)
    # without the prompt, the first pair that makes a draft is its last one
    first = PROMPT - 2 if switch == "no-prefill" else 0
    wrong = MtpOracle(checkpoint(family, dtype="float32", **settings), switch, first=first)
    run = Run(AblatedLM(target, () if switch == "none" else (switch,)))
    run.prefill(prompt_of(PROMPT), [4])  # in two chunks
    for cycle, accepted in enumerate((3, 0, 1)):
        check(run, wrong, 3)
        run.verify(prompt_of(3, seed=cycle + 1), accepted, following=31 * cycle + 7)
    check(run, wrong, 4)


def test_what_has_no_such_head_is_refused(make_target):
    others = [make_target(family, **next(iter(SHAPES[family].values()))) for family in ("deepseek_v3", "glm4_moe")]
    for target in (make_target("qwen3_5", mtp=False), TableModel.random(mtp=True), *others):
        with pytest.raises(UnsupportedError, match=f"this {target.info.family} model has none of them"):
            AblatedLM(target, ("no-rotary",))

"""Every family on the CPU: speculation leaves the tokens and the bits of plain decoding."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.contract import Parity
from specdec.models.parity import probe_rows
from tests import tiny
from tests.backends import families
from tests.backends.families import TRIED, VOCAB
from tests.selection import cases

# short enough for one pass of up to 16 rows: how a session cuts long prompts shows in the torch reference's bits
prompts = st.one_of(
    st.sampled_from([(7,), (9, 8, 9, 8, 9, 8, 9)]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14).map(tuple),
)
FEW = max(1, settings().max_examples // 6)  # the mechanism is the same in every family; the layers are what differs


@pytest.fixture(
    scope="module",
    params=cases(TRIED, sample=["qwen3_5", "qwen3", "qwen3_5_moe", "deepseek_v3", "gemma3", "gpt_oss"], mark="slow"),
)
def family(request):
    return str(request.param)


@pytest.fixture(scope="module")
def dtype(kernels):
    """Each kind of kernels in one dtype: the other pairs differ in nothing that a family sees."""
    return {"torch": "float32", "native": "bfloat16"}[kernels]


@pytest.fixture(scope="module")
def target(family, kernels, dtype, make_target):
    return make_target(family, kernels=kernels, dtype=dtype, stored=dtype, **TRIED[family])


@settings(max_examples=FEW)
@given(prompt=prompts, **families.DRAFTS)
def test_any_drafter_gives_the_tokens_and_the_state_of_plain_decoding(
    family, dtype, target, checkpoint, prompt, drafter, depths, numbers
):
    assert target.info.parity is Parity.BITWISE
    families.check_drafter(checkpoint(family, dtype=dtype, **TRIED[family]), target, prompt, drafter, depths, numbers)


@pytest.mark.parametrize("family", cases(TRIED, sample=["qwen3_5", "deepseek_v3"], mark="slow"))
def test_every_family_keeps_the_contract_of_targets(family, make_target):
    """Chunks, hidden states and pairs of the head too."""
    target = make_target(family, kernels=tiny.kernels_available()[-1], dtype="bfloat16", **TRIED[family])
    families.check_target(family, target, "F5", "F6", "F21", "F22")


def test_the_probe_finds_no_difference(target):
    assert probe_rows(target) is None

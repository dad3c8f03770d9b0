"""Whatever the adaptive policy decides from clocks and tables, the tokens are those of plain decoding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters.mtp import MtpConfig, MtpDrafter
from specdec.drafters.ngram import NgramConfig, NgramDrafter
from specdec.policies.adaptive import AdaptiveConfig, AdaptivePolicy, Learnt
from specdec.records.cost_table import CostTable
from tests import tiny

SHAPE = {"printable": True}
GENERATED = 48

seconds = st.floats(1e-6, 10.0)
tables = st.one_of(
    st.none(),
    st.builds(
        lambda verify, draft, commit: CostTable(
            verify=dict(enumerate(verify, start=1)), draft={0: 0.0, **dict(enumerate(draft, start=1))}, commit=commit
        ),
        st.lists(seconds, min_size=1, max_size=9),
        st.lists(seconds, max_size=8),
        seconds,
    ),
)
configs = st.builds(
    AdaptiveConfig,
    max_depth=st.integers(1, 15),
    window=st.integers(4, 64),
    first_probe=st.integers(1, 8),
    last_probe=st.integers(1, 64),
    min_gain=st.floats(0.0, 1.0),
)
drafters = {
    "mtp": lambda env: MtpDrafter(MtpConfig(), env),
    "ngram": lambda env: NgramDrafter(NgramConfig(min_order=1)),
}


@pytest.fixture(scope="module")
def plain(make_target, checkpoint):
    folder = checkpoint("qwen3_5", dtype="float32", **SHAPE)
    target = make_target("qwen3_5", kernels=tiny.kernels_available()[-1], stored="float32", **SHAPE)
    return folder, target, tiny.plain_run(target, (5, 9, 8, 9, 8, 9), GENERATED)


@given(table=tables, config=configs, drafter=st.sampled_from(sorted(drafters)), count=st.integers(1, GENERATED))
def test_the_output_is_that_of_plain_decoding_under_any_table(plain, table, config, drafter, count):
    folder, target, expected = plain
    learnt = Learnt(table)
    lm = tiny.make_lm(folder, target, drafters[drafter], lambda: AdaptivePolicy(config, learnt))
    for _ in range(2):  # the second generation starts from what the first one learnt
        result = lm.generate([5, 9, 8, 9, 8, 9], max_new_tokens=count, ignore_eos=True)
        assert result.tokens == expected[:count]
        assert len(result.tokens) == count
        assert not result.stats.faults
        assert max(result.stats.draft_lengths) <= min(config.max_depth, target.info.max_rows - 1, max(count - 1, 0))

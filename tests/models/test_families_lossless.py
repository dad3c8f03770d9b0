"""Every family on the CPU: speculation leaves the tokens and the bits of plain decoding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.contract import Parity
from specdec.models.parity import probe_rows
from tests import tiny
from tests.backends import families
from tests.backends.families import TRIED, VOCAB
from tests.decoding.test_lossless import adversarial, mtp, ngram, oracle, partly_right, random
from tests.selection import cases
from tests.tiny_families import SHAPES

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


def poison(state):
    """NaN into everything that is not committed: stale and provisional rows, and the buffer that a pass fills."""
    for cache in [*state.caches, *([state.mtp] if state.mtp is not None else [])]:
        if hasattr(cache, "keys"):
            end = state.pairs.fed if cache is state.mtp else cache.length
            cache.keys[end:] = torch.nan
            cache.values[end:] = torch.nan
        else:
            cache.after[:] = torch.nan


@settings(max_examples=FEW)
@given(
    prompt=prompts,
    drafter=st.sampled_from([mtp, ngram, random, oracle, partly_right, adversarial]),
    depths=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    numbers=st.lists(st.integers(0, 2**16), min_size=1, max_size=6),
)
def test_any_drafter_gives_the_tokens_and_the_state_of_plain_decoding(
    family, dtype, target, checkpoint, prompt, drafter, depths, numbers
):
    assert target.info.parity is Parity.BITWISE
    families.check_drafter(checkpoint(family, dtype=dtype, **TRIED[family]), target, prompt, drafter, depths, numbers)


def test_every_accept_count_leaves_the_state_of_a_plain_run(target):
    families.check_accept_counts(target, (3, 1, 4, 1, 5), 8, poison)


def test_a_batch_leaves_the_states_of_plain_runs(target):
    """States of other lengths, with other numbers of rows, of which each commits its own share."""
    prompt = (3, 1, 4, 1, 5)
    truth = [*prompt, *tiny.plain_run(target, prompt, 20)]
    batch, alone = [], []
    for length, rows in ((2, 1), (5, 4), (9, 2), (12, 7)):
        batch.append((tiny.held(target, truth[:length]), truth[length - 1 : length - 1 + rows]))
        alone.append(tiny.held(target, truth[:length]))
    outputs = target.decode_batch(batch)
    for number, ((state, tokens), output, other) in enumerate(zip(batch, outputs, alone, strict=True)):
        wanted = target.decode(other, tokens)
        ours, theirs = (one.need_logits().rows() for one in (output, wanted))
        assert (ours.view(np.int32) == theirs.view(np.int32)).all()
        for one in (state, other):
            target.commit(one, max(1, len(tokens) - number))
        tiny.assert_same_bits(tiny.state_arrays(target, state), tiny.state_arrays(target, other))


def test_rewind_and_snapshot_give_the_bits_of_a_new_run(target):
    families.check_rewind(target, tuple(range(40, 52)), 9, poison)


def test_the_probe_finds_no_difference(target):
    assert probe_rows(target) is None


def test_the_latent_cache_holds_one_compressed_row_per_token(make_target):
    shape = SHAPES["deepseek_v3"]["all-sparse-mixed"]
    target = make_target("deepseek_v3", **shape)
    state = target.new_state(64)
    row = shape["kv_lora"] + shape["rope"]
    assert [cache.nbytes() for cache in state.caches] == [4 * 64 * row] * shape["layers"]
    target.prefill(state, [1, 2, 3])
    saved = target.snapshot(state).arrays
    assert saved["layers.0.rows"].shape == (3, 1, row)

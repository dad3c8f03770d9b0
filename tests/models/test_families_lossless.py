"""Every family on the CPU: speculation leaves the tokens and the bits of plain decoding."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.contract import Drafter, Parity
from specdec.models.parity import probe_rows
from tests import tiny
from tests.backends import families
from tests.backends.families import VOCAB
from tests.decoding.test_lossless import Case, adversarial, mtp, ngram, oracle, partly_right, random
from tests.selection import cases
from tests.tiny_families import SHAPES

SHAPE: dict[str, dict[str, Any]] = {
    "qwen3_5": tiny.HYBRID,
    "qwen3": {"hidden": 36, "heads": 4, "kv_heads": 2, "head_dim": 10, "intermediate": 44},
    **{
        family: SHAPES[family][name]
        for family, name in {
            "qwen3_5_moe": "mixed-layouts",
            "qwen3_next": "r3-fused",
            "llama": "llama3-rope",
            "qwen2": "yarn",
            "gemma3": "patterned",
            "granite": "factors",
            "mistral": "window",
            "olmo2": "gqa2",
            "phi3": "window",
            "qwen3_moe": "as-they-are",
            "smollm3": "listed",
            "glm4_moe": "no-bias-groups",
            "deepseek_v3": "all-sparse-mixed",
        }.items()
    },
}
# short enough for one pass of up to 16 rows: how a session cuts long prompts shows in the torch reference's bits
prompts = st.one_of(
    st.sampled_from([(7,), (9, 8, 9, 8, 9, 8, 9)]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14).map(tuple),
)
FEW = max(1, settings().max_examples // 6)  # the mechanism is the same in every family; the layers are what differs


@pytest.fixture(
    scope="module",
    params=cases(SHAPE, sample=["qwen3_5", "qwen3", "qwen3_5_moe", "deepseek_v3", "gemma3"], mark="slow"),
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def dtype(kernels: str) -> str:
    """Each kind of kernels in one dtype: the other pairs differ in nothing that a family sees."""
    return {"torch": "float32", "native": "bfloat16"}[kernels]


@pytest.fixture(scope="module")
def target(family: str, kernels: str, dtype: str, make_target: Callable[..., Any]) -> Any:
    return make_target(family, kernels=kernels, dtype=dtype, stored=dtype, **SHAPE[family])


def poison(state: Any) -> None:
    """NaN into everything that is not committed."""
    for cache in state.caches:
        if hasattr(cache, "keys"):
            cache.keys[cache.length :] = torch.nan
            cache.values[cache.length :] = torch.nan
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
    family: str,
    dtype: str,
    target: Any,
    checkpoint: Callable[..., pathlib.Path],
    prompt: tuple[int, ...],
    drafter: Callable[[Case], Drafter],
    depths: list[int],
    numbers: list[int],
) -> None:
    assert target.info.parity is Parity.BITWISE
    families.check_drafter(checkpoint(family, dtype=dtype, **SHAPE[family]), target, prompt, drafter, depths, numbers)


def test_every_accept_count_leaves_the_state_of_a_plain_run(target: Any) -> None:
    families.check_accept_counts(target, (3, 1, 4, 1, 5), 8, poison)


def test_a_batch_leaves_the_states_of_plain_runs(target: Any) -> None:
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


def test_rewind_and_snapshot_give_the_bits_of_a_new_run(target: Any) -> None:
    families.check_rewind(target, tuple(range(40, 52)), 9, poison)


def test_the_probe_finds_no_difference(target: Any) -> None:
    assert probe_rows(target) is None

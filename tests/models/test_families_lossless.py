"""The promise of ``test_lossless`` and the bits of ``test_state`` for the families of ``tiny_families``."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.contract import Drafter, Parity
from specdec.models.parity import probe_rows
from tests import tiny
from tests.decoding.test_lossless import (
    Case,
    ScriptedDepth,
    adversarial,
    check_counters,
    mtp,
    ngram,
    oracle,
    partly_right,
    random,
)
from tests.selection import cases
from tests.tiny_families import FAMILIES, SHAPES

VOCAB = 277
SHAPE = {
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
}
GENERATED = 10
# short enough for one pass of up to 16 rows: how a session cuts long prompts shows in the torch reference's bits
prompts = st.one_of(
    st.sampled_from([(7,), (9, 8, 9, 8, 9, 8, 9)]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14).map(tuple),
)
FEW = max(1, settings().max_examples // 6)  # the mechanism is the same in every family; the layers are what differs


@pytest.fixture(scope="module", params=cases(FAMILIES, sample=["qwen3_5_moe", "deepseek_v3", "gemma3"], mark="slow"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def dtype(kernels: str) -> str:
    """Each kind of kernels in one dtype: the other pairs differ in nothing that a family sees."""
    return {"torch": "float32", "native": "bfloat16"}[kernels]


@pytest.fixture(scope="module")
def plain(make_target: Callable[..., Any]) -> Callable[..., tuple[Any, list[int]]]:
    """``plain(family, kernels, dtype, prompt)``: the target, and the prompt with 20 tokens of plain decoding."""
    known: dict[Any, list[int]] = {}

    def get(family: str, kernels: str, dtype: str, prompt: Sequence[int]) -> tuple[Any, list[int]]:
        target = make_target(family, kernels=kernels, dtype=dtype, stored=dtype, **SHAPES[family][SHAPE[family]])
        key = (family, kernels, dtype, *prompt)
        if key not in known:
            known[key] = [*prompt, *tiny.plain_run(target, prompt, 20)]
        return target, known[key]

    return get


@settings(max_examples=FEW)
@given(
    prompt=prompts,
    drafter=st.sampled_from([mtp, ngram, random, oracle, partly_right, adversarial]),
    depths=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    numbers=st.lists(st.integers(0, 2**16), min_size=1, max_size=6),
)
def test_any_drafter_gives_the_tokens_and_the_state_of_plain_decoding(
    family: str,
    kernels: str,
    dtype: str,
    checkpoint: Callable[..., pathlib.Path],
    plain: Callable[..., tuple[Any, list[int]]],
    prompt: tuple[int, ...],
    drafter: Callable[[Case], Drafter],
    depths: list[int],
    numbers: list[int],
) -> None:
    target, truth = plain(family, kernels, dtype, prompt)
    assert target.info.parity is Parity.BITWISE
    folder = checkpoint(family, dtype=dtype, **SHAPES[family][SHAPE[family]])
    lm = tiny.make_lm(folder, target, lambda env: drafter(Case(truth, env, numbers)), lambda: ScriptedDepth(depths))
    session = lm.session()
    result = session.generate(list(prompt), max_new_tokens=GENERATED, ignore_eos=True)
    assert result.tokens == truth[len(prompt) :][:GENERATED]
    assert (result.guarantee, result.deviation.count) == ("exact", 0)
    assert not result.stats.faults
    check_counters(result.stats, GENERATED)
    if drafter is oracle:
        assert result.stats.accepted == result.stats.offered
    state = session._sequence.state
    wanted = tiny.held(target, prompt, truth[len(prompt) :][:GENERATED])
    tiny.assert_same_bits(tiny.state_arrays(target, state), tiny.state_arrays(target, wanted))


def test_every_accept_count_leaves_the_state_of_a_plain_run(
    family: str, kernels: str, dtype: str, plain: Callable[..., tuple[Any, list[int]]]
) -> None:
    """None, some and all of 6, the bits right after the commit and the logits of the pass after it."""
    prompt, depth = (3, 1, 4, 1, 5), 6
    target, truth = plain(family, kernels, dtype, prompt)
    at = len(prompt)
    for accepted in (0, 1, 4, depth):
        state = tiny.held(target, prompt)
        drafted = truth[at : at + accepted] + [(token + 1) % VOCAB for token in truth[at + accepted : at + depth]]
        target.decode(state, [truth[at - 1], *drafted])
        target.commit(state, accepted + 1)
        wanted = tiny.held(target, prompt, truth[at : at + accepted + 1])
        tiny.assert_same_bits(tiny.state_arrays(target, state), tiny.state_arrays(target, wanted))
        following = truth[at + accepted : at + accepted + 4]
        ours, theirs = (target.decode(s, following).need_logits().rows() for s in (state, wanted))
        assert (ours.view(np.int32) == theirs.view(np.int32)).all()


def test_a_batch_leaves_the_states_of_plain_runs(
    family: str, kernels: str, dtype: str, plain: Callable[..., tuple[Any, list[int]]]
) -> None:
    """States of other lengths, with other numbers of rows, of which each commits its own share."""
    target, truth = plain(family, kernels, dtype, (3, 1, 4, 1, 5))
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


def test_rewind_and_snapshot_give_the_bits_of_a_new_run(
    family: str, kernels: str, dtype: str, plain: Callable[..., tuple[Any, list[int]]]
) -> None:
    """Stale rows are NaN, so that reading one of them shows."""
    prompt = tuple(range(40, 52))
    target, truth = plain(family, kernels, dtype, prompt)
    state = tiny.held(target, prompt, truth[len(prompt) :][:9])
    for cache in state.caches:
        if hasattr(cache, "keys"):
            cache.keys[cache.length :] = torch.nan
            cache.values[cache.length :] = torch.nan
    reached = target.rewind(state, len(prompt) + 2)
    assert reached <= len(prompt) + 2
    again = target.restore(target.snapshot(state), tiny.needs_of(target))
    for one in (state, again):
        for token in truth[reached : len(prompt) + 5]:
            target.decode(one, [token])
            target.commit(one, 1)
    wanted = tiny.held(target, prompt, truth[len(prompt) :][:6])
    for one in (state, again):
        tiny.assert_same_bits(tiny.state_arrays(target, one), tiny.state_arrays(target, wanted))


def test_the_probe_finds_no_difference(family: str, kernels: str, dtype: str, plain: Callable[..., Any]) -> None:
    target, _ = plain(family, kernels, dtype, (7,))
    assert probe_rows(target) is None

"""What every family promises on a device: the reference's numbers, and the bits of plain decoding. Nothing here is a
test."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import strategies as st

from specdec.contract import Drafter, Needs
from specdec.models import causal_lm
from specdec.testing import check_plugin
from tests import tiny
from tests.decoding import test_lossless as lossless
from tests.decoding.test_lossless import Case, adversarial, mtp, ngram, oracle, partly_right, random
from tests.tiny_families import SHAPES

VOCAB = 277
# the shape with most branches of each family
TRIED: dict[str, dict[str, Any]] = {
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
            "gemma4": "small",
            "gpt_oss": "released",
            "granite": "factors",
            "ministral3": "released",
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
# what a property of speculation draws: the drafter, its depths, and numbers that it takes its tokens from
DRAFTS = {
    "drafter": st.sampled_from([mtp, ngram, random, oracle, partly_right, adversarial]),
    "depths": st.lists(st.integers(0, 8), min_size=1, max_size=4),
    "numbers": st.lists(st.integers(0, 2**16), min_size=1, max_size=6),
}


def best(logits: Any, drafted: Sequence[int]) -> int:
    """The choice that makes ``draft_mtp`` go step by step."""
    return int(logits.argmax()[0])


def check_logits(target: Any, reference: Any, error: float) -> None:
    """A prompt of more than 16 rows, a pass of three rows that is cut, one of one row, and the head's own logits; and
    the hidden states of the passes at every layer boundary."""
    tokens, needs = [(7 * i + 3) % VOCAB for i in range(24)], tiny.needs_of(target)
    needs = attrs.evolve(needs, boundaries=range(target.info.layers + 1))
    found, states = [], []
    for model in (reference, target):
        state = model.new_state(64, needs)
        model.prefill(state, tokens[:18])
        outputs = [model.decode(state, tokens[18:21])]
        model.commit(state, 2)
        outputs.append(model.decode(state, tokens[20:21]))
        model.commit(state, 1)
        logits = [output.need_logits().rows().copy() for output in outputs]
        if model.info.mtp_layers:
            steps: list[Any] = []
            model.draft_mtp(state, tokens[21], 2, choose=lambda step, _, steps=steps: steps.append(step.rows()) or 5)
            logits += [step.copy() for step in steps]
        found.append(np.concatenate(logits))
        parts = [part for output in outputs for part in (output.hidden, *output.boundaries.values())]
        states.append([model.ops.to_host(model.ops.array(part)).numpy() for part in parts])
    assert np.ptp(found[0]) > 5
    assert np.abs(found[0] - found[1]).max() <= error
    for wanted, got in zip(*states, strict=True):
        assert np.abs(got - wanted).max() <= error * np.abs(wanted).max()


def check_drafter(
    folder: pathlib.Path, target: Any, prompt: Sequence[int], drafter: Callable[[Case], Drafter], *how: Any, **more: Any
) -> list[int]:
    """As ``test_lossless.check_drafter``, with a drafter for families without an MTP head too; returns the tokens."""
    if drafter is mtp and not target.info.mtp_layers:
        drafter = partly_right
    result, _ = lossless.check_drafter(folder, target, prompt, drafter, *how, **more)
    assert not result.stats.faults
    return list(result.tokens)


def check_target(name: str, target: Any, *more: str) -> None:
    """Commits, rewinds, copies, drafts and batches, by the kit's clauses of targets; and by ``more`` of them."""
    only = ["F2", "F3", "F4", "F13", "F30", "F31", *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm, "SHARED_MTP", 0)
        check_plugin(target, effort="sample", only=only).raise_for_failures()


def check_sessions(
    target: Any, folder: pathlib.Path, prompt: Sequence[int], lengths: tuple[int, int], file: pathlib.Path
) -> None:
    """A session that is saved and loaded, or forked, goes on as if nothing had happened."""
    first, then = lengths
    truth = tiny.plain_run(target, prompt, first + then)
    lm = tiny.make_lm(folder, target, lambda env: mtp(Case([], env, [])))
    session = lm.session()
    assert session.generate(list(prompt), max_new_tokens=first, ignore_eos=True).tokens == truth[:first]
    session.save(file)
    loaded, fork = lm.session(), session.fork()
    loaded.load(file)
    kept = [tiny.on_host(target, target.snapshot(one._sequence.state).arrays) for one in (session, loaded, fork)]
    assert any(name.startswith("mtp.") for name in kept[0])
    for other in kept[1:]:  # the head's cache and the last hidden state too: wrong ones would only spoil the drafts
        tiny.assert_same_bits(other, kept[0])
    fork.generate([1, 2], max_new_tokens=2, ignore_eos=True)  # goes its own way
    for one in (session, loaded):
        assert one.generate(max_new_tokens=then, ignore_eos=True).tokens == truth[first:]


def check_drafts(target: Any, plan: Sequence[tuple[int, int, Any]]) -> list[tuple[int, ...]]:
    """Drafts of one call have the tokens and leave the state of their steps; the plan has, for each draft, its depth,
    the head (None: the whole one) and the rows that are committed after it. Returns the drafts."""
    states = [target.new_state(64, Needs(mtp=True)) for _ in range(2)]
    for state in states:
        target.prefill(state, list(range(20, 32)))
    at, found = 32, []
    for depth, head, kept in plan:
        drafts = []
        for state, choose in zip(states, (None, best), strict=True):
            drafts.append(target.draft_mtp(state, at, depth, choose=choose, head=head))
        assert drafts[0] == drafts[1]
        assert len(drafts[0]) == depth
        assert head is None or set(drafts[0]) <= set(head.tokens)
        assert len({(state.pairs.fed, state.pairs.waiting, state.mtp.length) for state in states}) == 1
        tiny.assert_same_bits(*(tiny.on_host(target, state.mtp.save()) for state in states))
        for state in states:
            target.decode(state, range(at, at + kept))
            target.commit(state, kept)
        at, found = at + kept, [*found, drafts[0]]
    tiny.assert_same_bits(*(tiny.on_host(target, target.snapshot(state).arrays) for state in states))
    return found

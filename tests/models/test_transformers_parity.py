"""Logits of every family against Hugging Face transformers, which shares no code with us and ignores MTP tensors.

The measure is ``max |difference| / max |reference|`` over all positions and the whole vocabulary. Float32 differs by
the order of sums only; a wrong convention (a missing ``1 +``, a swapped half, a head mapping) by tens of percent.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdec.contract import Needs
from tests import tiny
from tests.comparisons import record
from tests.tiny_families import SHAPES, TRANSFORMERS

CLASSES = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3": "Qwen3ForCausalLM", **TRANSFORMERS}
FAMILIES = {"qwen3_5": tiny.QWEN3_5_SHAPES, "qwen3": tiny.QWEN3_SHAPES, **SHAPES}
TOKENS = 83  # longer than one chunk of transformers' delta rule (64), and no multiple of anything
FLOAT32_BOUND = 1e-4

CASES = [
    pytest.param(family, name, marks=[pytest.mark.slow] * (number > 0))
    for family, shapes in FAMILIES.items()
    for number, name in enumerate(shapes)
]
FEEDS: dict[str, Sequence[tuple[str, int]]] = {
    "whole": [("prefill", TOKENS)],
    "chunks": [("prefill", 1), ("prefill", 37), ("prefill", 2), ("decode", 16), ("decode", 3), ("prefill", 24)],
    "blocks": [("decode", rows) for rows in (5, 16, 1, 2, 16, 11, 16, 16)],
    "token by token": [("decode", 1)] * TOKENS,
}


def tokens_for(vocab: int, count: int = TOKENS) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def all_logits(target: Any, tokens: Sequence[int], feed: Sequence[tuple[str, int]]) -> np.ndarray:
    """``[n, V]`` logits of every position; prefill gives hidden states only, so the head runs on them here."""
    state, parts, at = target.new_state(len(tokens), Needs(final_hidden=True)), [], 0
    for how, rows in feed:
        chunk = tokens[at : at + rows]
        at += len(chunk)
        if how == "prefill":
            hidden = target.prefill(state, chunk).need_hidden()
            parts.append(target.model.logits(target.ops.array(hidden)).rows())
        elif chunk:
            parts.append(target.decode(state, chunk).need_logits().rows())
            target.commit(state, len(chunk))
    assert at == len(tokens) == state.length
    return np.concatenate(parts)


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[..., pathlib.Path]) -> Callable[..., np.ndarray]:
    """``reference(family, name)``: transformers' float32 logits ``[n, V]`` with eager attention, computed once."""
    transformers = pytest.importorskip("transformers")
    done: dict[tuple[str, str], np.ndarray] = {}

    def logits(family: str, name: str) -> np.ndarray:
        if (family, name) not in done:
            # transformers' text class reads the text layout; names do not change a weight
            shape = {key: value for key, value in FAMILIES[family][name].items() if key not in ("vl", "shards")}
            model_class = getattr(transformers, CLASSES[family])
            model, info = model_class.from_pretrained(
                checkpoint(family, **shape, dtype="float32"),
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
            )
            assert not info["missing_keys"], "transformers would compare with random weights"
            with torch.no_grad():
                ids = torch.tensor([tokens_for(model.config.vocab_size)])
                done[family, name] = model.eval()(ids).logits[0].numpy()
        return done[family, name]

    return logits


@pytest.mark.parametrize(("family", "name"), CASES)
def test_logits_equal_transformers(
    family: str,
    name: str,
    kernels: str,
    make_target: Callable[..., Any],
    reference: Callable[..., np.ndarray],
    record_property: Callable[[str, object], None],
) -> None:
    wanted = reference(family, name)
    target = make_target(family, kernels=kernels, **FAMILIES[family][name])
    tokens = tokens_for(wanted.shape[1])
    # the comparison can fail: logits are spread and the argmax moves from position to position
    assert len(set(wanted.argmax(-1).tolist())) > TOKENS // 4
    worst = 0.0
    for how in ("whole", "chunks", "token by token"):
        got = all_logits(target, tokens, FEEDS[how])
        difference = float(np.abs(got - wanted).max() / np.abs(wanted).max())
        assert difference < FLOAT32_BOUND, f"{how}: {difference:.2e}"
        assert (got.argmax(-1) == wanted.argmax(-1)).all(), how
        worst = max(worst, difference)
    record(record_property, family, "logits", f"transformers' {CLASSES[family]}", name, worst)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_every_way_of_feeding_gives_the_same_bits(
    family: str, name: str, kernels: str, make_target: Callable[..., Any]
) -> None:
    """Blocks and single rows always; with native kernels also prefill. Catches sums that depend on the other rows of
    a pass, such as experts whose rows are added in another order."""
    shape = FAMILIES[family][name]
    tokens = tokens_for(shape.get("vocab", 277))
    feeds = ["blocks", "token by token"] + (["whole", "chunks"] if kernels == "native" else [])
    for dtype in {"torch": ["float32"], "native": ["float32", "bfloat16"]}[kernels]:
        target = make_target(family, kernels=kernels, dtype=dtype, stored=dtype, **shape)
        logits = {how: all_logits(target, tokens, FEEDS[how]) for how in feeds}
        for left, right in itertools.pairwise(feeds):
            same = (logits[left].view(np.int32) == logits[right].view(np.int32)).all(-1)
            assert same.all(), f"{dtype}: {left} and {right} differ from position {int(same.argmin())} on"

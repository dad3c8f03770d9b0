"""Logits of the families of ``tiny_families`` against Hugging Face transformers, which shares no code with us.

Measure and feeds are those of ``test_transformers_parity``. transformers ignores the MTP tensors of the checkpoints.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.comparisons import record
from tests.models.test_transformers_parity import FEEDS, FLOAT32_BOUND, TOKENS, all_logits, tokens_for
from tests.tiny_families import FAMILIES, SHAPES, TRANSFORMERS

CASES = [(family, name) for family in FAMILIES for name in SHAPES[family]]


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[..., pathlib.Path]) -> Callable[..., np.ndarray]:
    """``reference(family, name)``: transformers' float32 logits ``[n, V]`` with eager attention, computed once."""
    transformers = pytest.importorskip("transformers")
    done: dict[tuple[str, str], np.ndarray] = {}

    def logits(family: str, name: str) -> np.ndarray:
        if (family, name) not in done:
            model_class = getattr(transformers, TRANSFORMERS[family])
            model, info = model_class.from_pretrained(
                checkpoint(family, dtype="float32", **SHAPES[family][name]),
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
    target = make_target(family, kernels=kernels, **SHAPES[family][name])
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
    record(record_property, family, "logits", f"transformers' {TRANSFORMERS[family]}", name, worst)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_every_way_of_feeding_gives_the_same_bits(
    family: str, name: str, kernels: str, make_target: Callable[..., Any]
) -> None:
    """Blocks and single rows always; with native kernels also prefill. Catches sums that depend on a row's company,
    such as experts whose rows are added in another order."""
    dtype = {"torch": "float32", "native": "bfloat16"}[kernels]
    shape = SHAPES[family][name]
    target = make_target(family, kernels=kernels, dtype=dtype, stored=dtype, **shape)
    tokens = tokens_for(shape.get("vocab", 277))
    feeds = ["blocks", "token by token"] + (["whole", "chunks"] if kernels == "native" else [])
    logits = {how: all_logits(target, tokens, FEEDS[how]) for how in feeds}
    for left, right in itertools.pairwise(feeds):
        same = (logits[left].view(np.int32) == logits[right].view(np.int32)).all(-1)
        assert same.all(), f"{left} and {right} differ from position {int(same.argmin())} on"

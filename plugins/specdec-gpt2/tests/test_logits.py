"""The logits are those of transformers' ``GPT2LMHeadModel``, for every variant that is not refused."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import random_gpt2
import specdec
import torch
from hypothesis import given, settings
from specdec import Parity

TOLERANCE = (
    1e-4  # of the largest logit: float32 rounding over a few layers; a missing bias or scale gives 1e-2 and more
)

CONFIGS = st.integers(1, 4).flatmap(
    lambda heads: st.fixed_dictionaries(
        {
            "n_head": st.just(heads),
            "n_embd": st.sampled_from([2, 5, 12]).map(lambda dim: max(heads * dim, 6)),  # a norm of 2 is a step
            "n_layer": st.integers(1, 3),
            "n_inner": st.sampled_from([None, 7, 30]),
            "n_positions": st.sampled_from([40, 64]),
            "activation_function": st.sampled_from(["gelu_new", "gelu_pytorch_tanh", "gelu_fast"]),
            "scale_attn_weights": st.booleans(),
            "scale_attn_by_inverse_layer_idx": st.booleans(),
            "reorder_and_upcast_attn": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "layer_norm_epsilon": st.sampled_from([1e-5, 1e-2]),
            "prefix": st.booleans(),
            "seed": st.integers(0, 9),
        }
    )
)


def ours(target, tokens: list[int], rows: int) -> np.ndarray:
    """Logits after ``tokens[3:]``, in passes of ``rows`` rows, each after one whose rows are all rejected."""
    state = target.new_state(len(tokens))
    target.prefill(state, tokens[:3])
    found = []
    for at in range(3, len(tokens), rows):
        block = tokens[at : at + rows]
        target.decode(state, block[::-1])  # drafts that are rejected
        found.append(target.decode(state, block).need_logits().rows())
        target.commit(state, len(block))
    return np.concatenate(found)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(CONFIGS, st.integers(1, 7), st.data())
def test_logits_are_those_of_transformers(tmp_path_factory, config, rows, data):
    folder = random_gpt2.write(tmp_path_factory.mktemp("gpt2"), **config)
    config.pop("prefix")
    vocab, size = len(random_gpt2.TOKENS), data.draw(st.integers(4, config["n_positions"]))
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=size, max_size=size))
    with torch.no_grad():
        wanted = random_gpt2.model(**config)(torch.tensor([tokens])).logits[0, 3:].numpy()
    target = specdec.load(str(folder), drafter="none", depth=0).target
    assert np.abs(ours(target, tokens, rows) - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_invariant_and_passes_recorded(checkpoint, dtype):
    info = specdec.load(str(checkpoint(dtype=dtype)), drafter="none", depth=0).info
    assert (info.family, info.dtype, info.parity) == ("gpt2", dtype, Parity.BITWISE)
    assert "eagerly" not in info.kernels

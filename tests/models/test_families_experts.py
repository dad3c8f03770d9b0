"""Mixtures of experts and latent attention: what a load takes, what it refuses, what a cache holds.

Routing and experts are checked by the kit's clauses O16 to O18, latent attention by the oracle of ``test_families_mtp``
and by transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.tiny_families import SHAPES


def test_fused_experts_are_views_of_the_file(make_target: Callable[..., Any]) -> None:
    """A copy of all experts would double the memory of a model that barely fits."""
    target = make_target("qwen3_5_moe", **SHAPES["qwen3_5_moe"]["fused-head-apart"])
    gates, ups, downs = target.model.layers[0].mlp.experts
    inner, hidden = gates[0].shape
    assert ups[0].data_ptr() - gates[0].data_ptr() == 4 * inner * hidden
    assert gates[1].data_ptr() - gates[0].data_ptr() == 8 * inner * hidden
    assert downs[1].data_ptr() - downs[0].data_ptr() == 4 * inner * hidden


def test_the_latent_cache_holds_one_compressed_row_per_token(make_target: Callable[..., Any]) -> None:
    shape = SHAPES["deepseek_v3"]["all-sparse-mixed"]
    target = make_target("deepseek_v3", **shape)
    state = target.new_state(64)
    row = shape["kv_lora"] + shape["rope"]
    assert [cache.nbytes() for cache in state.caches] == [4 * 64 * row] * shape["layers"]
    target.prefill(state, [1, 2, 3])
    saved = target.snapshot(state).arrays
    assert saved["layers.0.rows"].shape == (3, 1, row)

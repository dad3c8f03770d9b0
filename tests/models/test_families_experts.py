"""Mixtures of experts and latent attention: what a load takes, what it refuses, what a cache holds.

Routing and experts are checked by the kit's clauses O16 to O18, latent attention by the oracle of ``test_families_mtp``
and by transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.tiny_families import SHAPES


def test_the_latent_cache_holds_one_compressed_row_per_token(make_target: Callable[..., Any]) -> None:
    shape = SHAPES["deepseek_v3"]["all-sparse-mixed"]
    target = make_target("deepseek_v3", **shape)
    state = target.new_state(64)
    row = shape["kv_lora"] + shape["rope"]
    assert [cache.nbytes() for cache in state.caches] == [4 * 64 * row] * shape["layers"]
    target.prefill(state, [1, 2, 3])
    saved = target.snapshot(state).arrays
    assert saved["layers.0.rows"].shape == (3, 1, row)

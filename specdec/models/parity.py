"""Probe row invariance at load time, with the loaded weights."""

from __future__ import annotations

from typing import Any

from specdec.models.causal_lm import CausalLM
from specdec.models.decoder import DecoderLayer, Layer

PROBED_ROWS = (2, 3, 4, 8, 16)
PROBE_CAPACITY = 64


def probe_rows(lm: CausalLM) -> str | None:
    """Compare passes of several row counts with single-row passes, bit for bit.

    Runs one layer of each kind (mixer, shapes), the MTP head and the output head with the loaded weights; whole models
    would take as long as loading them. Returns None if all bits agree, else a sentence saying where they differ.
    """
    model, ops = lm.model, lm.ops
    rows = min(max(PROBED_ROWS), ops.capabilities.max_rows)
    tokens = [(7 * i + 1) % lm.info.vocab_size for i in range(rows)]
    embedded = model.embed(tokens, 0)
    layers: dict[str, Layer] = {}
    for layer in model.layers:
        layers.setdefault(_kind(layer), layer)
    if model.mtp is not None:
        layers["the MTP layer"] = model.mtp.layer
    context = min(ops.capabilities.probed_context, lm.info.max_positions - rows)
    before = None
    if context > 0:
        before = model.embed([(5 * i + 2) % lm.info.vocab_size for i in range(context)], 0)
        embedded = model.embed(tokens, context)
    for name, layer in layers.items():
        committed = _committed(layer, before)
        singly = _by_rows(layer, embedded, 1, committed)
        for count in PROBED_ROWS:
            if count <= rows and not _same(_by_rows(layer, embedded, count, committed), singly):
                return f"{name}: a pass of {count} rows has other bits than {count} passes of one row"
    singly = [ops.head(embedded[t : t + 1], model.lm_head).rows() for t in range(rows)]
    for count in PROBED_ROWS:
        together = ops.head(embedded[:count], model.lm_head).rows()
        if any((together[t] != singly[t][0]).any() for t in range(min(count, rows))):
            return f"the output head: a pass of {count} rows has other bits than passes of one row"
    return None


def _kind(layer: Layer) -> str:
    if isinstance(layer, DecoderLayer):
        return f"{type(layer.mixer).__name__} with {type(layer.mlp).__name__}"
    return type(layer).__name__


def _committed(layer: Layer, before: Any | None) -> tuple[Any, int]:
    """The contents of the layer's cache after a prompt of these rows, and their number."""
    if before is None:
        return None, 0
    cache, rows = layer.new_cache(before.shape[0]), before.shape[0]
    layer(before, cache)
    cache.commit(rows)
    return cache.save(), rows


def _by_rows(layer: Layer, x: Any, count: int, committed: tuple[Any, int]) -> list[Any]:
    """The layer's output rows for x after what is committed, in passes of ``count`` rows."""
    arrays, held = committed
    cache = layer.new_cache(PROBE_CAPACITY + held)
    if held:
        cache.load(arrays, held)
    out = []
    for at in range(0, x.shape[0], count):
        part = layer(x[at : at + count], cache)
        cache.commit(part.shape[0])
        out += [part[t] for t in range(part.shape[0])]
    return out


def _same(a: list[Any], b: list[Any]) -> bool:
    return all(bool((x == y).all()) for x, y in zip(a, b, strict=True))

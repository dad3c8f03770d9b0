"""Compare blocks of rows with the same rows computed one by one, bit for bit, on the loaded weights.

Speculation gives the output of plain decoding only if a row's bits do not depend on the rows beside it. Every load
runs ``probe_rows``; ``specdec doctor`` runs ``probe_parts`` with more rows, inputs and contexts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from specdec.backends.ops import Array, Cache
from specdec.models.causal_lm import CausalLM
from specdec.models.decoder import DecoderLayer
from specdec.records.bits import Comparison, Finding, on_host

DRAWS = ((2, 3, 6), (4, 8), (16,))
"""Block lengths at load, by random draw of rows: one pattern can pass where a kernel differs on others."""
HEAD_ROWS = 6  # distinct rows of the output head, which takes longer than a layer; blocks repeat them in any order
CHUNK = 256  # rows of a pass that fills the context


def probe_rows(lm: CausalLM) -> str | None:
    """Compare rows at load. Returns None if all bits agree, else a sentence saying where they differ."""
    findings = probe_parts(lm, DRAWS, (lm.ops.capabilities.probed_context,))
    return next((str(finding) for finding in findings if not finding.equal), None)


def probe_parts(lm: CausalLM, draws: Sequence[Sequence[int]], contexts: Sequence[int]) -> Iterator[Finding]:
    """Compare one layer of each kind (types, shapes), the MTP layer and the output head.

    Args:
        draws: block lengths, by draw of random rows; longer ones than a pass can have are cut.
        contexts: committed rows before the blocks, which continue over all rows of a draw.
    """
    most = min(lm.ops.capabilities.max_rows, lm.info.max_positions)
    draws = [sorted({min(count, most) for count in counts}) for counts in draws]
    for name, numbers in _kinds(lm).items():
        for context in sorted({max(0, min(context, lm.info.max_positions - most)) for context in contexts}):
            comparison = Comparison(f"{name}, {context} rows before" if context else name)
            for seed, counts in enumerate(draws):
                _compare_layer(lm, numbers, context, counts, random.Random(seed), comparison)
            yield comparison.finding()
    comparison = Comparison("the output head")
    _compare_head(lm, sorted({count for counts in draws for count in counts}), random.Random(0), comparison)
    yield comparison.finding()


def _kinds(lm: CausalLM) -> dict[str, tuple[int, ...]]:
    """The number of the first layer of each kind, by name, and of the MTP layer; before it, of the one that fills its
    cache."""
    layers: dict[Any, tuple[str, tuple[int, ...]]] = {}
    own = len(lm.model.layers) - len(lm.model.shared)
    for number, layer in enumerate(lm.model.layers):
        parts = (layer.mixer, layer.mlp) if isinstance(layer, DecoderLayer) else (layer,)
        name = " with ".join(type(part).__name__ for part in parts)
        numbers = (lm.model.shared[number - own], number) if number >= own else (number,)
        layers.setdefault(_kind(layer), (f"layer {number} ({name})", numbers))
    if lm.model.mtp:
        layers["mtp"] = ("the MTP layer", (len(lm.model.layers),))
    return dict(layers.values())


def _kind(part: Any) -> Any:
    """Equal for parts of a model that look the same to kernels: types, shapes, dtypes and settings but for factors."""
    if isinstance(part, float):  # of a layer's own, with Gemma 4
        return float
    if isinstance(part, int | str | None):
        return part
    if isinstance(part, tuple):
        return tuple(map(_kind, part))
    shape, dtype = getattr(part, "shape", None), str(getattr(part, "dtype", ""))
    fields = attrs.fields(type(part)) if attrs.has(type(part)) else ()
    kind = type(part).__name__, tuple(shape) if isinstance(shape, tuple) else None, dtype
    return *kind, *(_kind(getattr(part, field.name)) for field in fields if field.name != "ops")


def _draw(lm: CausalLM, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(lm.info.vocab_size) for _ in range(count)]


def _compare_layer(
    lm: CausalLM, numbers: Sequence[int], context: int, counts: Sequence[int], rng: random.Random, found: Comparison
) -> None:
    layers: list[Any] = [*lm.model.layers, *(head.layer for head in lm.model.mtp)]
    rows = max(counts) + 1  # a row follows the longest block, and reads the state that it left

    def passed(tokens: Sequence[int], cache: Cache) -> Array:
        x = lm.model.embed(tokens, cache.length)
        inputs = [*lm.model.inputs(x, tokens), ()]
        *_, out = (layers[number](x, cache, *inputs[number]) for number in numbers)
        cache.commit(len(tokens))
        return out

    before = layers[numbers[0]].new_cache(context + rows)
    for start in range(0, context, CHUNK):
        passed(_draw(lm, rng, min(CHUNK, context - start)), before)
    committed = before.save() if context else {}
    tokens = _draw(lm, rng, rows)

    def run(count: int) -> Any:
        cache = layers[numbers[0]].new_cache(context + rows)
        if context:
            cache.load(committed, context)
        return np.concatenate([on_host(lm, passed(tokens[at : at + count], cache)) for at in range(0, rows, count)])

    singly = run(1)
    for count in counts:
        found.rows(count, run(count), singly)


def _compare_head(lm: CausalLM, counts: Sequence[int], rng: random.Random, comparison: Comparison) -> None:
    def logits(tokens: list[int]) -> Any:
        x = lm.ops.embed(lm.model.embed_tokens, tokens)
        return on_host(lm, lm.model.logits(lm.model.norm(x)))

    tokens = _draw(lm, rng, HEAD_ROWS)
    singly = {token: logits([token]) for token in tokens}
    for count in counts:
        block = rng.choices(tokens, k=count)
        comparison.rows(count, logits(block), np.concatenate([singly[token] for token in block]))

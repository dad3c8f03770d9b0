"""Tests at load time that this plugin's cache handling is right for a model; takes some passes of a few rows."""

from __future__ import annotations

from typing import Any

import torch
from specdec.errors import SpecdecError, UnsupportedError
from torch import Tensor

from specdec_transformers import caches
from specdec_transformers.model import Model, Rollback, Text, one_line

_SLACK = {torch.float32: 0.02, torch.float64: 0.02}
_COARSE_SLACK = 0.2
"""Largest root mean square difference of two rows, as a share of the logits' standard deviation. Rounding of bfloat16
over many layers reaches a few percent; a lost or doubled token, or the state of another text, is of the order of 1."""


def prove(model: Model) -> tuple[Any, str]:
    """Set ``model.rollback`` to the cheapest method that reproduces the logits of a pass without a cache.

    Returns a used cache (the template of ``caches.loaded``; None with RECOMPUTE) and why a cheaper one was not used.
    Raises: UnsupportedError when the model is not causal, or its code fails on a short text.
    """
    tokens = _tokens(model, 10)
    try:
        wanted = model.whole(tokens).logits
    except SpecdecError:
        raise
    except Exception as error:  # any model's own code, and that of quantisation libraries
        raise UnsupportedError(
            f"transformers cannot run this {model.network.config.model_type} model on a text of {len(tokens)} tokens",
            error=one_line(error),
        ) from error
    assert wanted is not None
    model.vocab_size = min(wanted.shape[1], _embedded(model, wanted.shape[1]))
    shorter = model.whole(tokens[:6]).logits
    assert shorter is not None
    if not _close(shorter, wanted[:6]):
        raise UnsupportedError(
            f"the rows of this {model.network.config.model_type} model see the rows after them: it is not causal",
            try_="a decoder-only model (for BERT-like ones, a checkpoint whose config says is_decoder)",
        )
    reason = ""
    for way in Rollback:
        if way is Rollback.RECOMPUTE or not model.has_cache:
            model.rollback = Rollback.RECOMPUTE
            return None, reason
        model.rollback = way
        try:
            template, wrong = _try(model, tokens, wanted)
        except SpecdecError as error:
            template, wrong = None, error.message
        except Exception as error:  # noqa: BLE001 - any model's own code; the next method may work
            template, wrong = None, one_line(error)
        if not wrong:
            return template, reason
        reason = wrong
    raise AssertionError("the last way takes every model")


def _tokens(model: Model, count: int) -> list[int]:
    size = _embedded(model, model.network.config.get_text_config(decoder=True).vocab_size)
    return [(37 * i + 11) % size for i in range(count)]


def _embedded(model: Model, otherwise: int) -> int:
    table = model.network.get_input_embeddings()
    return int(getattr(table, "num_embeddings", otherwise))


def _try(model: Model, tokens: list[int], wanted: Tensor) -> tuple[Any, str]:
    """Try a prefill, a dropped pass, a partly kept pass, and a copy from saved arrays, with another text in between.

    Returns a used cache, and what went wrong.
    """
    text, other = Text(model), Text(model)
    junk = [tokens[-1], tokens[0], tokens[2]]
    text.run(tokens[:4], logits=False, keep=True)
    other.run(junk, logits=False, keep=True)
    if model.rollback is Rollback.CUT and not caches.can_cut(text.cache):
        return None, "its cache cannot be cut"
    text.run(junk, logits=True, keep=False)
    text.commit(0)
    if not _right(text, [*tokens[4:6], *junk[:1]], wanted[4:6]):
        return None, "rows after a prefill differ from a pass without a cache"
    other.run(junk[:1], logits=False, keep=True)
    text.commit(2)
    restored = Text(model)
    restored.cache, restored.length = caches.loaded(text.cache, *caches.saved(text.cache)), text.length
    for one, what in ((text, "a pass kept in part leaves another state"), (restored, "a saved state is another one")):
        if not _right(one, tokens[6:8], wanted[6:8]):
            return None, what
        one.commit(2)
        if not _right(one, tokens[8:9], wanted[8:9]):
            return None, what
    return text.cache, ""


def _right(text: Text, tokens: list[int], wanted: Tensor) -> bool:
    logits = text.run(tokens, logits=True, keep=False).logits
    return logits is not None and _close(logits[: len(wanted)], wanted)


def _close(got: Tensor, wanted: Tensor) -> bool:
    got, exact = got.float(), wanted.float()
    finite = torch.isfinite(exact)
    if bool((torch.isfinite(got) != finite).any()) or not bool(finite.any()):
        return False
    off = (got[finite] - exact[finite]).pow(2).mean().sqrt()
    return float(off) <= _SLACK.get(wanted.dtype, _COARSE_SLACK) * float(exact[finite].std()) + 1e-6

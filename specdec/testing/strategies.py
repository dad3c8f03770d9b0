"""Hypothesis strategies for tokens, settings and lengths.

Needs hypothesis: ``pip install specdec-framework[testing]``.
"""

from __future__ import annotations

from typing import Any

import attrs
import hypothesis.strategies as st

from specdec.contract import Sampling

seeds = st.integers(0, 2**32 - 1)


def log_uniform(low: int, high: int) -> st.SearchStrategy[int]:
    """Integers of ``low`` to ``high``, each order of magnitude as likely as the others; ``low`` is 1 or more."""
    octaves = range(low.bit_length(), high.bit_length() + 1)
    return st.one_of([st.integers(max(low, 2 ** (n - 1)), min(high, 2**n - 1)) for n in octaves])


def lengths(high: int) -> st.SearchStrategy[int]:
    """1 to ``high`` on a log scale; every third one is near ``high``, because late faults need long texts."""
    near = st.integers(high * 4 // 5, high)
    return st.integers(0, 2).flatmap(lambda third: near if third == 2 else log_uniform(1, high))


def tokens(vocab: int, *, min_size: int = 0, max_size: int = 12) -> st.SearchStrategy[list[int]]:
    """Token ids."""
    return st.lists(st.integers(0, vocab - 1), min_size=min_size, max_size=max_size)


@st.composite
def samplings(draw: st.DrawFn, vocab: int) -> Sampling:
    """Settings of every kind; at least one token stays allowed."""
    plain = Sampling(temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])), seed=draw(st.integers(0, 2**63 - 1)))
    if draw(st.booleans()):
        return plain
    banned = draw(st.lists(st.integers(0, vocab - 1), max_size=max(vocab - 2, 0), unique=True))
    allowed = [token for token in range(vocab) if token not in banned]
    ends = draw(st.lists(st.sampled_from(allowed), max_size=max(len(allowed) - 1, 0), unique=True))
    return attrs.evolve(
        plain,
        top_k=draw(st.sampled_from([0, 1, 2, 3])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 0.4])),
        min_p=draw(st.sampled_from([0.0, 0.1, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.dictionaries(st.integers(0, vocab - 1), st.sampled_from([-2.0, 0.5, 3.0]), max_size=2)),
        banned=tuple(banned),
        end_tokens=tuple(ends),
        min_new_tokens=draw(st.sampled_from([0, 2, 5])),
    )


def generations(vocab: int) -> dict[str, st.SearchStrategy[Any]]:
    """``prompt``, ``depths`` (used cyclically) and ``sampling`` of a generation by the engine."""
    prompts = st.one_of(tokens(vocab, min_size=1), st.just([1, 2, 3, 1, 2, 3, 1, 2]))
    depths = st.lists(st.one_of(st.integers(0, 4), st.integers(0, 15)), min_size=1, max_size=5)
    return {"prompt": prompts, "depths": depths, "sampling": samplings(vocab)}

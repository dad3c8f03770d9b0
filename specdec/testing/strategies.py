"""Hypothesis strategies for distributions, drafts and sequences of calls, with many zeros, one-hots and ties.

Needs hypothesis: ``pip install specdec-framework[testing]``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import Draft, Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]


def log_uniform(low: int, high: int) -> st.SearchStrategy[int]:
    """Integers of ``low`` to ``high``, each order of magnitude as likely as the others; ``low`` is 1 or more."""
    octaves = range(low.bit_length(), high.bit_length() + 1)
    return st.one_of([st.integers(max(low, 2 ** (n - 1)), min(high, 2**n - 1)) for n in octaves])


def block(number: int, count: int) -> tuple[int, ...]:
    """``count`` tokens of cycle ``number``: few tokens come, and hardly a block of them twice."""
    return tuple((number * 2_654_435_761 + at * 40_503 >> 7) % 50 for at in range(count))


def weights(size: int, largest: int = 8) -> st.SearchStrategy[list[int]]:
    """Integer weights, not all zero; small ones, so that ties, zeros and one-hots are common."""
    return st.lists(st.integers(0, largest), min_size=size, max_size=size).filter(any)


def distributions(size: int) -> st.SearchStrategy[Float64]:
    """Distributions ``[size]`` float64."""
    return weights(size).map(lambda drawn: np.array(drawn, np.float64) / sum(drawn))


def logits(rows: int, vocab: int) -> st.SearchStrategy[NDArray[np.float32]]:
    """Logits ``[rows, vocab]`` float32 on a coarse grid (ties are common), including ``-inf`` and large values.

    Every row has a finite entry.
    """
    value = st.one_of(st.integers(-6, 6).map(lambda n: n / 2), st.sampled_from([-np.inf, -80.0, 80.0, 0.0]))
    row = st.lists(value, min_size=vocab, max_size=vocab).filter(lambda values: max(values) > -np.inf)
    return st.lists(row, min_size=rows, max_size=rows).map(lambda values: np.array(values, np.float32))


def tokens(vocab: int, *, min_size: int = 0, max_size: int = 12) -> st.SearchStrategy[list[int]]:
    """Token ids."""
    return st.lists(st.integers(0, vocab - 1), min_size=min_size, max_size=max_size)


@st.composite
def drafts(draw: st.DrawFn, vocab: int, depth: int, *, with_probs: bool = False) -> Draft:
    """Valid drafts of exactly ``depth`` tokens; ``probs``, if requested, give each a positive probability."""
    if not with_probs:
        return Draft(tuple(draw(st.lists(st.integers(0, vocab - 1), min_size=depth, max_size=depth))))
    rows = [draw(distributions(vocab)) for _ in range(depth)]
    chosen = tuple(draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in rows)
    return Draft(chosen, np.array(rows, np.float32).reshape(depth, vocab))


@st.composite
def samplings(draw: st.DrawFn, vocab: int, *, greedy: bool | None = None) -> Sampling:
    """Settings of every kind; at least one token stays allowed. ``greedy`` fixes temperature 0 or above 0."""
    temperatures = {True: [0.0], False: [0.3, 1.0, 1.7], None: [0.0, 0.3, 1.0, 1.7]}[greedy]
    temperature = draw(st.sampled_from(temperatures))
    made = Sampling(temperature=temperature, seed=draw(st.integers(0, 2**63 - 1)))
    if draw(st.booleans()):
        return made
    banned = draw(st.lists(st.integers(0, vocab - 1), max_size=max(vocab - 2, 0), unique=True))
    allowed = [token for token in range(vocab) if token not in banned]
    ends = draw(st.lists(st.sampled_from(allowed), max_size=max(len(allowed) - 1, 0), unique=True))
    return attrs.evolve(
        made,
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
    depths = st.lists(st.integers(0, 5), min_size=1, max_size=4)
    return {"prompt": prompts, "depths": depths, "sampling": samplings(vocab)}


# --- sequences of calls ----------------------------------------------------------------------------------------------


@attrs.frozen
class Call:
    """One step of a sequence of calls; the check defines what ``name`` does with the numbers."""

    name: str
    numbers: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.numbers))})"


def calls(max_size: int = 10, **kinds: tuple[Any, ...]) -> st.SearchStrategy[list[Call]]:
    """Sequences of calls: ``calls(commit=(st.integers(0, 4),), rewind=())`` draws names with their numbers."""
    each = [st.tuples(*numbers).map(partial(Call, name)) for name, numbers in kinds.items()]
    return st.lists(st.one_of(each), min_size=1, max_size=max_size)

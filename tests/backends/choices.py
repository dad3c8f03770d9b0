"""Rows of logits, settings and histories for whatever chooses tokens in place of ``specdec.sampling.Rows``."""

from typing import Any

import attrs
import numpy as np
from hypothesis import strategies as st

from specdec.contract import Context, Sampling
from specdec.sampling import Purpose, gumbel, processed

KINDS = ("normal", "flat", "peaked", "few values", "equal", "mostly -inf", "far apart", "nearly equal", "quarters")
SETTINGS: dict[str, dict[str, list[Any]]] = {
    "temperature": {},
    "top-k": {"top_k": [1, 2, 5, 40, 1000]},
    "top-p": {"top_p": [1e-6, 0.1, 0.25, 0.5, 0.9, 0.95, 0.99999]},
    "min-p": {"min_p": [1e-9, 0.05, 0.5, 1.0]},
    "top-k and top-p": {"top_k": [1, 5, 40], "top_p": [0.3, 0.5, 0.95]},
    "penalties": {"repetition_penalty": [0.8, 1.3, 100.0], "presence_penalty": [-1.0, 0.0, 0.7]},
    "all": {
        "top_k": [0, 3, 40],
        "top_p": [0.5, 0.9, 1.0],
        "min_p": [0.0, 0.02, 0.5],
        "repetition_penalty": [1.0, 1.1],
        "frequency_penalty": [0.0, -0.5, 0.4],
        "logit_bias": [{}, {0: 5.0}, {0: -1e6, 2: 0.1}],
        "banned": [(), (0,), (0, 3)],
        "end_tokens": [(), (1,)],
        "min_new_tokens": [0, 3],
    },
}


def logits_of(kind: str, rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Rows ``[rows, vocab]`` float32."""
    values = rng.normal(0, {"flat": 0.01, "far apart": 1e6, "nearly equal": 1e-12}.get(kind, 3), (rows, vocab))
    if kind == "peaked":
        values[np.arange(rows), rng.integers(0, vocab, rows)] += 15
    elif kind == "few values":
        values = rng.integers(-3, 4, (rows, vocab)).astype(float)
    elif kind == "equal":
        values = np.full((rows, vocab), rng.normal())
    elif kind == "mostly -inf":
        values[rng.random((rows, vocab)) < 0.9] = -np.inf
        values[:, rng.integers(vocab)] = 1.0
    elif kind == "quarters":
        values = np.round(values * 4) / 4
    return values.astype(np.float32)


def random_case(
    rng: np.random.Generator, settings: dict[str, list[Any]], vocab: int, rows: int = 0
) -> tuple[np.ndarray, tuple[int, ...], Context]:
    """Logits of so many rows, or of 1 to 3, drafted tokens, and a context with a ``Sampling``."""
    rows = rows or int(rng.integers(1, 4))
    values: dict[str, Any] = {name: options[rng.integers(len(options))] for name, options in settings.items()}
    if vocab < 5:
        values = {name: value for name, value in values.items() if name not in ("logit_bias", "banned", "end_tokens")}
    elif settings and rng.random() < 0.02:  # all banned but one
        kept = int(rng.integers(vocab))
        values["banned"] = tuple(token for token in range(vocab) if token != kept)
    temperature = float(rng.choice([0.0, 1e-6, 0.05, 0.3, 0.8, 1.0, 1.7, 100.0], p=[0.1, *[0.1] * 2, *[0.14] * 5]))
    sampling = Sampling(temperature=temperature, seed=int(rng.integers(0, 2**62)), **values)
    history = rng.integers(0, vocab, int(rng.integers(1, 60))).tolist()
    logits = logits_of(str(rng.choice(KINDS)), rng, rows, vocab)
    if 0.01 < temperature < 10 and vocab > 1 and rng.random() < 0.5 and np.isfinite(logits).all():
        if "top_p" in values and not sampling.top_k and rng.random() < 0.5:
            sampling = attrs.evolve(sampling, top_p=close_mass(logits[0], sampling, rng))
        else:
            close_score(logits[0], sampling, len(history), rng)
    context = Context(history, sampling, generated_from=int(rng.integers(0, len(history) + 1)))
    return logits, tuple(rng.integers(0, vocab, rows - 1).tolist()), context


def close_mass(row: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> float:
    """A ``top_p`` that ends the nucleus within rounding of a token's boundary."""
    probs = np.sort(np.exp((row - row.max()).astype(np.float64) / sampling.temperature))[::-1]
    mass = np.cumsum(probs / probs.sum())[rng.integers(min(len(probs), 6))]
    return float(np.clip(mass * (1 + rng.choice([-1e-7, 0.0, 1e-16, 1e-9])), 1e-6, 1.0))


def close_score(row: np.ndarray, sampling: Sampling, position: int, rng: np.random.Generator) -> None:
    """Change the logit of a token so that its score is that of the best one, within float32."""
    noise = gumbel(sampling.seed, position, np.arange(len(row)), Purpose.TOKEN)
    scores = row / sampling.temperature + noise
    token = int(rng.integers(len(row)))
    row[token] = (np.delete(scores, token).max() - noise[token]) * sampling.temperature


def misfit(row: np.ndarray, history: list[int], context: Context, token: int) -> str:
    """Why a float32 sampler must not choose this token of a row ``[V]``, by the float64 reference; "" if it may.

    What differs from the reference by no more than rounding is right: a score of almost the best one, and a token next
    to the boundary of a filter.
    """
    sampling, logits = context.sampling, processed(row, history, context)
    if not logits[token] > -np.inf:
        return "a forbidden token"
    top, ids = logits.max(), np.arange(len(logits))
    heat = sampling.temperature or 1.0
    slack = (1e-4 + 1e-6 * abs(top) / heat) * heat  # of a logit
    if sampling.temperature == 0:
        return "not the best token" if logits[token] < top - slack else ""
    gap = (logits - top) / heat
    probs = np.exp(gap)

    def kept(slack: float, mass: float) -> np.ndarray:
        """The tokens that filters keep with boundaries moved by so much."""
        better = len(logits) - np.searchsorted(np.sort(logits), logits + slack, side="right")
        keep = np.ones(len(logits), bool)
        if sampling.top_k:
            keep &= better < sampling.top_k
            if slack < 0:  # ties at the boundary: the lowest ids, which this does not tell apart
                keep &= better + 1 <= sampling.top_k
        if sampling.top_p < 1:
            inside = probs * (ranks(logits, ids) < (sampling.top_k or len(logits)))
            order = np.argsort(-logits, kind="stable")
            before = np.concatenate([[0.0], np.cumsum(inside[order])])[np.clip(better, 0, len(logits))]
            keep &= (before < (sampling.top_p + mass) * inside.sum()) | (better == 0)
        if sampling.min_p:
            keep &= gap >= np.log(sampling.min_p) - slack / heat
        return keep

    near = np.abs(gap - gap[token]) * heat <= slack
    tied = not (near & (logits != logits[token])).any()  # else float32 may order tokens in another way
    if not kept(slack, 1e-4)[token] or (sampling.top_k and tied and ranks(logits, ids)[token] >= sampling.top_k):
        return "a filtered token"
    scores = gap + gumbel(sampling.seed, len(history), ids, Purpose.TOKEN)
    rivals = scores[kept(-slack, -1e-4)]
    return "a worse score" if len(rivals) and scores[token] < rivals.max() - 1e-3 - 2 * slack / heat else ""


def ranks(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The place of every token, best first, ties by ascending id."""
    places = np.empty(len(logits), int)
    places[np.lexsort((ids, -logits))] = ids
    return places


@st.composite
def tied(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...], Context]:
    """Rows of a few values that differ by much, by one unit in the last place, or not at all."""
    vocab = draw(st.integers(1, 40))
    base = draw(st.sampled_from([0.0, 1.0, -7.25, 1e-30, 3e5]))
    near = float(np.nextafter(np.float32(base), np.float32(np.inf)))
    values = st.sampled_from([base, base, near, base - 1, base + 0.5, -np.inf])
    rows = draw(st.lists(st.lists(values, min_size=vocab, max_size=vocab), min_size=1, max_size=3))
    ids = st.integers(0, vocab - 1)
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.7, 1.0, 100.0])),
        seed=draw(st.integers(0, 2**63 - 1)),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.25, 0.5, 0.75, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([0.5, -1.0, 1e-9]), max_size=3)),
        banned=draw(st.lists(ids, max_size=3).map(tuple)),
    )
    history = draw(st.lists(ids, min_size=1, max_size=6))
    drafted = draw(st.lists(ids, min_size=len(rows) - 1, max_size=len(rows) - 1).map(tuple))
    return np.array(rows, np.float32), drafted, Context(history, sampling, generated_from=draw(st.integers(0, 1)))

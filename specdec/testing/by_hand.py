"""The law of a row, written out token by token: what ``specdec.sampling`` is compared with. Slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.contract import Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]


def processed_by_hand(
    logits: Sequence[float], history: Sequence[int], sampling: Sampling, generated_from: int
) -> list[float]:
    """Logits after bias, penalties over ``history``, bans and processors; before temperature."""
    s, values = sampling, [float(logit) for logit in logits]
    generated = list(history[generated_from:])
    for token in range(len(values)):
        values[token] += s.logit_bias.get(token, 0.0)
        if s.repetition_penalty != 1.0 and token in history:
            value = values[token]
            values[token] = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
        if token in generated:
            values[token] -= s.presence_penalty + s.frequency_penalty * generated.count(token)
        if token in s.banned or (token in s.end_tokens and len(history) - generated_from < s.min_new_tokens):
            values[token] = -math.inf
    for processor in s.processors:
        values = [float(value) for value in processor.process(np.array(values, np.float32), history)]
    return values


def law_by_hand(
    logits: Sequence[float], history: Sequence[int], sampling: Sampling, generated_from: int = 0
) -> Float64:
    """The law ``[V]`` of the token after ``history``; one-hot at temperature 0. Equals go by ascending id."""
    values = processed_by_hand(logits, history, sampling, generated_from)
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))
    law = np.zeros(len(values))
    if sampling.temperature == 0:
        law[ranked[0]] = 1.0
        return law
    best = values[ranked[0]]
    weights = {token: math.exp((values[token] - best) / sampling.temperature) for token in ranked}
    kept = [token for token in ranked if values[token] > -math.inf]
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1.0:
        total, mass, chosen = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            if mass / total >= sampling.top_p:
                break
            chosen.append(token)
            mass += weights[token]
        kept = chosen
    if sampling.min_p > 0.0:
        kept = [token for token in kept if weights[token] >= sampling.min_p * weights[kept[0]]]
    total = sum(weights[token] for token in kept)
    for token in kept:
        law[token] = weights[token] / total
    return law

"""A reference for ``specdec.sampling``: the distribution of the next token, computed one token at a time, and a test of
whether tokens follow distributions that differ from one to the next."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specdec.contract import Sampling
from specdec.testing.checks import expect

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]


def reference_logits(
    logits: Sequence[float], history: Sequence[int], sampling: Sampling, generated_from: int
) -> list[float]:
    """Logits after bias, penalties over ``history``, bans and processors; before temperature."""
    s, values = sampling, [float(logit) for logit in logits]
    seen, generated = set(history), Counter(history[generated_from:])
    for token in range(len(values)):
        values[token] += s.logit_bias.get(token, 0.0)
        if s.repetition_penalty != 1.0 and token in seen:
            value = values[token]
            values[token] = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
        if token in generated:
            values[token] -= s.presence_penalty + s.frequency_penalty * generated[token]
        if token in s.banned:
            values[token] = -math.inf
    for processor in s.processors:
        values = [float(value) for value in processor.process(np.array(values, np.float32), history)]
    if len(history) - generated_from < s.min_new_tokens:
        longer = [-math.inf if token in s.end_tokens else value for token, value in enumerate(values)]
        if max(longer) > -math.inf or not s.processors:
            values = longer
    return values


def reference_distribution(
    logits: Sequence[float], history: Sequence[int], sampling: Sampling, generated_from: int = 0
) -> Float64:
    """The distribution ``[V]`` of the token after ``history``; one-hot at temperature 0. Ties go to the lowest id."""
    values = reference_logits(logits, history, sampling, generated_from)
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))
    distribution = np.zeros(len(values))
    if sampling.temperature == 0:
        distribution[ranked[0]] = 1.0
        return distribution
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
        distribution[token] = weights[token] / total
    return distribution


def joint_distribution(next_token: Callable[[list[int]], Float64], length: int, vocab: int) -> Float64:
    """The distribution of the next ``length`` tokens, ``[vocab ** length]``, first token most significant.

    Args:
        next_token: the distribution ``[vocab]`` after the given new tokens.
    """
    joint = np.zeros((vocab,) * length)
    for outcome in itertools.product(range(vocab), repeat=length):
        joint[outcome] = math.prod(next_token(list(outcome[:i]))[token] for i, token in enumerate(outcome))
    return joint.ravel()


FAR = 5.5  # standard deviations: 4e-8, for each of some hundred sums
ENOUGH = 12.0  # the variance from which a sum of bounded terms is taken for normal


class Surplus:
    """Sums of differences between what was drawn and what was to be expected, by group.

    Each term is ``f(token) - E f`` under the distribution that the token should follow, so it has mean 0 given all that
    came before, whatever the contexts are, and the sums are normal (a martingale central limit theorem: Hall and Heyde
    1980).
    """

    def __init__(self, functions: Sequence[str]) -> None:
        self.functions = functions
        self._sums: dict[str, Float64] = {}  # by group: [F, 3] differences, variances, largest terms

    def add(self, groups: Sequence[str], token: int, probs: Float64, values: Float64) -> None:
        """Add a token to groups, with its distribution ``[V]`` and the functions' values ``[F, V]``."""
        away = values - (values @ probs)[:, None]
        differences, variances, largest = away[:, token], away**2 @ probs, np.abs(away).max(axis=1)
        for group in groups:
            sums = self._sums.setdefault(group, np.zeros((len(values), 3)))
            sums[:, 0] += differences
            sums[:, 1] += variances
            np.maximum(sums[:, 2], largest, out=sums[:, 2])

    def judge(self, what: str, **case: object) -> None:
        """Raises: Broken if a sum is too far from 0."""
        for group, sums in self._sums.items():
            for name, (total, variance, largest) in zip(self.functions, sums.tolist(), strict=True):
                away = total / math.sqrt(max(variance, 1e-12))
                fits = variance <= ENOUGH * largest**2 or abs(away) <= FAR
                expect(
                    fits, f"{what}, as to {name}", got=f"{away:.1f} standard deviations", expected=FAR, at=group, **case
                )

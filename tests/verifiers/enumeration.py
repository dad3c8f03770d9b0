"""Exact laws of verification rules: every branch of the production functions, weighed with fractions.

A uniform number is replaced by an object that answers comparisons both ways and keeps the measure of each answer, so
nothing is assumed about where a rule's thresholds are. Shared randomness is the same object, and stays correlated.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np

Law = tuple[Fraction, ...]
Laws = Callable[[tuple[int, ...]], Law]
"""The law of the token after a prefix."""


class _Paths:
    """Which way the comparisons went so far, and what is still to be tried."""

    def __init__(self) -> None:
        self.taken: list[bool] = []
        self.at = 0

    def choose(self) -> bool:
        if self.at == len(self.taken):
            self.taken.append(True)
        self.at += 1
        return self.taken[self.at - 1]

    def advance(self) -> bool:
        while self.taken and not self.taken[-1]:
            self.taken.pop()
        if not self.taken:
            return False
        self.taken[-1] = False
        return True


class Uniform:
    """A uniform number in (0, 1) whose value is not decided yet; ``factor`` makes ``u * x`` comparable."""

    def __init__(self, paths: _Paths, interval: list[Fraction] | None = None, factor: Fraction = Fraction(1)) -> None:
        self._paths = paths
        self.interval = [Fraction(0), Fraction(1)] if interval is None else interval
        self._factor = factor

    def __mul__(self, other: Fraction) -> Uniform:
        return Uniform(self._paths, self.interval, self._factor * Fraction(other))

    def _below(self, bound: object) -> bool:
        bound = Fraction(bound)  # type: ignore[arg-type]
        if self._factor == 0:
            return bound > 0
        low, high = self.interval
        threshold = bound / self._factor
        if threshold <= low:
            return False
        if threshold >= high:
            return True
        below = self._paths.choose()
        self.interval[:] = [low, threshold] if below else [threshold, high]
        return below

    def __lt__(self, other: object) -> bool:
        return self._below(other)

    __le__ = __lt__  # single points have measure 0


def branches(run: Callable[[Callable[[], Uniform]], object]) -> Iterator[tuple[Fraction, object]]:
    """Every outcome of ``run(new_uniform)`` with its probability."""
    paths = _Paths()
    while True:
        paths.at = 0
        made: list[Uniform] = []

        def new(made: list[Uniform] = made) -> Uniform:
            made.append(Uniform(paths))
            return made[-1]

        outcome = run(new)
        weight = Fraction(1)
        for uniform in made:
            weight *= uniform.interval[1] - uniform.interval[0]
        yield weight, outcome
        if not paths.advance():
            return


def array(law: Law) -> np.ndarray:
    """A law as the production functions take it: an array of fractions."""
    made = np.empty(len(law), dtype=object)
    made[:] = law
    return made


def random_laws(vocab: int, seed: int, *, zeros: float = 0.35, support: Sequence[int] | None = None) -> Laws:
    """A rational law per prefix, drawn when asked for; zeros and one-hots are common. ``support`` prunes it."""
    kept = tuple(range(vocab)) if support is None else tuple(support)

    def law(prefix: tuple[int, ...]) -> Law:
        rng = random.Random(f"{seed} {prefix}")
        while True:
            weights = [rng.randint(1, 6) if v in kept and rng.random() >= zeros else 0 for v in range(vocab)]
            if any(weights):
                return tuple(Fraction(weight, sum(weights)) for weight in weights)

    return law


def joint_of(target: Laws, vocab: int, length: int) -> dict[tuple[int, ...], Fraction]:
    """The target's own joint law of ``length`` tokens."""
    joint: dict[tuple[int, ...], Fraction] = {}
    for outcome in itertools.product(range(vocab), repeat=length):
        weight = Fraction(1)
        for i, token in enumerate(outcome):
            weight *= target(outcome[:i])[token]
        joint[outcome] = weight
    return joint


Rule = Callable[
    [Callable[[int], np.ndarray], "list[np.ndarray] | None", tuple[int, ...], list[Uniform]], "tuple[int, np.ndarray]"
]


def emitted(
    rule: Rule,
    target: Laws,
    drafts: Iterator[tuple[Fraction, tuple[int, ...], list[np.ndarray] | None]],
    vocab: int,
    length: int,
) -> tuple[dict[tuple[int, ...], Fraction], Fraction]:
    """The joint law of the first ``length`` emitted tokens (completed from the target), and E[accepted].

    ``drafts`` are all drafts with their probabilities and the laws handed over.
    """
    joint = dict.fromkeys(itertools.product(range(vocab), repeat=length), Fraction(0))
    expected = Fraction(0)
    for probability, drafted, laws in drafts:

        def decide(
            new: Callable[[], Uniform], drafted: tuple[int, ...] = drafted, laws: list[np.ndarray] | None = laws
        ):  # type: ignore[no-untyped-def]
            accepts = [new() for _ in drafted]
            return rule(lambda row: array(target(drafted[:row])), laws, drafted, accepts)

        for weight, outcome in branches(decide):
            accepted, final = outcome  # type: ignore[misc]
            expected += probability * weight * accepted
            for token, chance in enumerate(final):
                if chance:
                    _complete(
                        joint, target, (*drafted[:accepted], token), probability * weight * Fraction(chance), length
                    )
    return joint, expected


def _complete(
    joint: dict[tuple[int, ...], Fraction], target: Laws, prefix: tuple[int, ...], weight: Fraction, length: int
) -> None:
    if len(prefix) >= length:
        joint[prefix[:length]] += weight
        return
    for token, chance in enumerate(target(prefix)):
        if chance:
            _complete(joint, target, (*prefix, token), weight * chance, length)


def sampled_drafts(
    draft: Laws, depth: int, vocab: int
) -> Iterator[tuple[Fraction, tuple[int, ...], list[np.ndarray] | None]]:
    """All drafts drawn from ``draft``."""
    for drafted in itertools.product(range(vocab), repeat=depth):
        weight = Fraction(1)
        for i, token in enumerate(drafted):
            weight *= draft(drafted[:i])[token]
        if weight:
            yield weight, drafted, [array(draft(drafted[:i])) for i in range(depth)]


def point_drafts(
    choose: Callable[[tuple[int, ...]], int], depth: int
) -> Iterator[tuple[Fraction, tuple[int, ...], list[np.ndarray] | None]]:
    """The one draft of a deterministic drafter, handed over as point masses."""
    drafted: tuple[int, ...] = ()
    for _ in range(depth):
        drafted = (*drafted, choose(drafted))
    yield Fraction(1), drafted, None

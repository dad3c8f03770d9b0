"""What Metal leaves open, as settings of a run: the order of threads, the order of sums, contraction."""

from __future__ import annotations

import random
from typing import Literal

import attrs

Order = Literal["ascending", "descending", "random"]
Tree = Literal["butterfly", "halving", "sequential", "reversed", "random"]
ORDERS: tuple[Order, ...] = ("ascending", "descending", "random")
TREES: tuple[Tree, ...] = ("butterfly", "halving", "sequential", "reversed", "random")
LANES = 32


@attrs.frozen(kw_only=True)
class Knobs:
    """One way to run a kernel.

    Attributes:
        order: in which order threads, and threadgroups, get their turns. A thread runs until it waits for others.
        tree: how ``simd_sum`` and the other reductions combine the lanes: neighbours first (butterfly), lane i with
            lane i + 16 first (halving), lane 0 to 31, 31 to 0, or random pairs. One run has one tree.
        contract: whether the compiler may fuse ``a * b + c`` across statements.
        guard: on which side of a buffer an access outside it faults at once. On the other side up to a page holds NaN,
            and writes there are found after the run.
        seed: of the random order and the random tree.
        seconds: of processor time after which a run counts as endless.
    """

    order: Order = attrs.field(default="ascending", validator=attrs.validators.in_(ORDERS))
    tree: Tree = attrs.field(default="butterfly", validator=attrs.validators.in_(TREES))
    contract: bool = False
    guard: Literal["front", "back"] = attrs.field(default="back", validator=attrs.validators.in_(("front", "back")))
    seed: int = 0
    seconds: int = 60

    def merges(self) -> list[tuple[int, int]]:
        """The reduction as 31 steps ``value[into] += value[from]``; the last ``into`` holds the result."""
        if self.tree == "butterfly":
            return [(i, i + s) for s in (1, 2, 4, 8, 16) for i in range(0, LANES, 2 * s)]
        if self.tree == "halving":
            return [(i, i + s) for s in (16, 8, 4, 2, 1) for i in range(s)]
        if self.tree == "sequential":
            return [(0, i) for i in range(1, LANES)]
        if self.tree == "reversed":
            return [(LANES - 1, i) for i in reversed(range(LANES - 1))]
        draw = random.Random(self.seed)
        left = list(range(LANES))
        steps = []
        while len(left) > 1:
            into, source = draw.sample(left, 2)
            left.remove(source)
            steps.append((into, source))
        return steps


def some_knobs() -> tuple[Knobs, ...]:
    """Every order, tree and contraction at least once, in few runs."""
    return (
        Knobs(),
        Knobs(order="descending", tree="halving", contract=True, guard="front"),
        Knobs(order="random", tree="sequential", contract=True, seed=1),
        Knobs(order="random", tree="reversed", contract=False, seed=2),
        Knobs(order="random", tree="random", contract=True, seed=3),
    )

"""Wrong depth policies."""

from __future__ import annotations

from specdec.contract import DepthPolicy


class Truth(DepthPolicy):
    def next_depth(self, stats):
        return True


class DividesByCycles(DepthPolicy):
    def next_depth(self, stats):
        return min(stats.tokens // stats.cycles, 4)


class DividesByOffered(DepthPolicy):
    def __init__(self):
        self.rate = 1.0

    def next_depth(self, stats):
        return int(4 * self.rate)

    def record(self, cycle):
        self.rate = cycle.accepted / cycle.offered


class GrowsForEver(DepthPolicy):
    def __init__(self):
        self.depth = 1

    def next_depth(self, stats):
        return self.depth

    def record(self, cycle):
        self.depth = self.depth * 2 if cycle.accepted == cycle.offered else 1


class SharesCounters(DepthPolicy):
    cycles = 0

    def next_depth(self, stats):
        return type(self).cycles % 5

    def record(self, cycle):
        type(self).cycles += 1


class CountsQuestions(DepthPolicy):
    asked = 0

    def next_depth(self, stats):
        self.asked += 1
        return self.asked % 3


class Explains(DepthPolicy):
    reason = "the best depth"

    def next_depth(self, stats):
        return 2


BROKEN = {
    Truth: "P1",
    DividesByCycles: "P2",
    DividesByOffered: "P3",
    GrowsForEver: "P4",
    SharesCounters: "P6",
    CountsQuestions: "P7",
    Explains: "P8",
}

"""Wrong depth policies."""

from __future__ import annotations

from specdec.contract import DepthPolicy


class Truth(DepthPolicy):
    def next_depth(self, stats):
        return True


class Negative(DepthPolicy):
    def __init__(self):
        self.depth = 1

    def next_depth(self, stats):
        return self.depth

    def record(self, cycle):
        if cycle.offered > cycle.accepted:
            self.depth -= 1


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


class ForgetsInTheStats(DepthPolicy):
    def next_depth(self, stats):
        stats.offered[:] = [count // 2 for count in stats.offered]
        return 2


class SharesCounters(DepthPolicy):
    cycles = 0

    def next_depth(self, stats):
        return type(self).cycles % 5

    def record(self, cycle):
        type(self).cycles += 1


BROKEN = {
    Truth: ("P1",),
    Negative: ("P1",),
    DividesByCycles: ("P2", "P1", "P4", "P6"),
    DividesByOffered: ("P3", "P1", "P5", "P6"),
    GrowsForEver: ("P4",),
    ForgetsInTheStats: ("P5",),
    SharesCounters: ("P6",),
}

"""A depth policy: go deeper while drafts hold, and stop drafting for a while where they do not."""

import sys

import attrs

import specdec.registry
from specdec import CycleRecord, DepthPolicy, DepthPolicySpec, Stats, between, hookimpl

PATIENCE = 4  # rejected drafts in a row before a pause
PAUSE = 16  # cycles of plain decoding before the next attempt


@attrs.frozen(kw_only=True)
class StreakConfig:
    """The range of depths; a wrong value fails when the configuration is read."""

    deepest: int = attrs.field(default=6, validator=between(1, 15))  # tokens


class StreakPolicy(DepthPolicy):
    """One deeper after a draft that was accepted in full, half as deep after one that was rejected in full."""

    def __init__(self, config: StreakConfig) -> None:
        self._deepest = config.deepest
        self._depth = 1
        self._rejected = 0  # drafts in a row
        self._pause = 0  # cycles left

    @property
    def reason(self) -> str:
        return f"the last {PATIENCE} drafts were rejected" if self._pause else ""

    def next_depth(self, stats: Stats) -> int:
        return 0 if self._pause else self._depth

    def record(self, cycle: CycleRecord) -> None:
        if self._pause:
            self._pause -= 1
        elif cycle.offered and cycle.accepted == cycle.offered:
            self._depth, self._rejected = min(self._depth + 1, self._deepest), 0
        elif cycle.offered and cycle.accepted == 0:
            self._depth, self._rejected = max(self._depth // 2, 1), self._rejected + 1
            if self._rejected == PATIENCE:
                self._rejected, self._pause = 0, PAUSE


@hookimpl
def specdec_depth_policies() -> list[DepthPolicySpec]:
    help = "deeper while drafts hold, with pauses"
    return [DepthPolicySpec(name="streak", factory=StreakPolicy, config=StreakConfig, help=help)]


if __name__ == "__main__":  # without packaging: register this module, then ask for the policy by its name
    specdec.registry.registry().register(sys.modules[__name__])
    prompt = "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
    for depth in (2, 6, {"name": "streak", "deepest": 6}):
        result = specdec.load("demo", depth=depth).generate(prompt, max_new_tokens=96)
        print(depth, f"{result.stats.tokens / result.stats.cycles:.2f} tokens per cycle, {result.stats.rows} rows")

"""A custom depth policy, registered as a plugin object: go deeper while drafts are accepted, back off otherwise.

Run it with ``python examples/custom_policy.py``.
"""

import attrs

import specdec
from specdec.registry import registry


@attrs.frozen(kw_only=True)
class StreakConfig:
    """The range of depths. The table is ``[depth]``: ``name = "streak"``, ``deepest = 6``."""

    deepest: int = attrs.field(default=6, validator=specdec.between(1, 15))


class StreakPolicy(specdec.DepthPolicy):
    """One deeper after a fully accepted draft, half as deep after a fully rejected one."""

    def __init__(self, config: StreakConfig) -> None:
        self._deepest = config.deepest
        self._depth = 1

    def next_depth(self, stats: specdec.Stats) -> int:
        return self._depth

    def record(self, cycle: specdec.CycleRecord) -> None:
        if cycle.offered and cycle.accepted == cycle.offered:
            self._depth = min(self._depth + 1, self._deepest)
        elif cycle.offered and cycle.accepted == 0:
            self._depth = max(self._depth // 2, 1)


class StreakPlugin:
    """In a package this would be a module, listed as an entry point in the group ``specdec``."""

    @specdec.hookimpl
    def specdec_depth_policies(self) -> list[specdec.DepthPolicySpec]:
        return [
            specdec.DepthPolicySpec(
                name="streak", factory=StreakPolicy, config=StreakConfig, help="deeper while drafts hold"
            )
        ]


registry().register(StreakPlugin())

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
results = {
    name: specdec.load(depth=depth).generate(PROMPT, max_new_tokens=96)
    for name, depth in (("fixed 2", 2), ("fixed 6", 6), ("streak", {"name": "streak", "deepest": 6}))
}
for name, result in results.items():
    stats = result.stats
    per_cycle, lengths = stats.tokens / stats.cycles, dict(stats.draft_lengths)
    print(f"{name:8} {per_cycle:.2f} tokens per cycle, {stats.rows} rows, drafts by length {lengths}")

first, *others = results.values()
if any(other.tokens != first.tokens for other in others):
    raise SystemExit("the depth policy changed the output, which must not happen")
print("the same output each time")

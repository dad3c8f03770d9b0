"""The depth of the next cycle: the policy's answer, or 0 once the policy has failed."""

from __future__ import annotations

from typing import Any

from specdec.contract import CycleRecord, Stats
from specdec.decoding.parts import DepthPart
from specdec.errors import PluginError
from specdec.registry import Switch, answers, registry


class DepthChooser:
    """The depth policy of one generation behind its switch. Its first failure means depth 0 for the rest.

    The policy sees counters of its own, so that nothing it does to them reaches a result.
    """

    def __init__(self, part: DepthPart) -> None:
        self._switch = Switch(registry().guard(part.spec))
        self._stats = Stats()
        policy: Any = None
        try:
            policy = part.make()
        except PluginError as error:
            self._switch.fail(error.message)
        bind = self._switch.bind
        self._next_depth = bind("next_depth", lambda: answers.depth(policy.next_depth(self._stats)), 0)
        self._reason = bind("reason", lambda: answers.text(policy.reason), "")

        def record(cycle: CycleRecord) -> None:
            stats = self._stats
            stats.cycles += 1
            stats.tokens += len(cycle.emitted)
            stats.count(cycle.offered, cycle.accepted)
            policy.record(cycle)

        self._record = bind("record", record)

    def next_depth(self) -> int:
        """0 or more, not limited to what fits."""
        depth: int = self._next_depth()
        return depth

    def record(self, cycle: CycleRecord) -> None:
        """Show the policy a finished cycle."""
        self._record(cycle)

    @property
    def failure(self) -> str:
        """Why the policy was switched off; empty while it works."""
        return self._switch.failure

    @property
    def reason(self) -> str:
        """Why the depth is 0 at present: the policy's own reason, or its failure; empty otherwise."""
        said: str = self._reason()
        return self._switch.failure or said

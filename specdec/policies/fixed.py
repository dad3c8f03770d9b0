"""The fixed depth policy: the same depth in every cycle."""

from __future__ import annotations

import attrs

from specdec.config import between
from specdec.contract import DepthPolicy, DepthPolicySpec, Stats
from specdec.hookspecs import hookimpl

MAX_DEPTH = 15  # 16 rows with the pending token


@attrs.frozen(kw_only=True)
class FixedConfig:
    """How far to draft ahead; 0 is plain decoding."""

    depth: int = attrs.field(default=2, validator=between(0, MAX_DEPTH))


class FixedPolicy(DepthPolicy):
    """Always ``config.depth``."""

    def __init__(self, config: FixedConfig) -> None:
        self._depth = config.depth

    @property
    def reason(self) -> str:
        return "" if self._depth else "the depth policy 'fixed' chose depth 0 in every cycle"

    def next_depth(self, stats: Stats) -> int:
        return self._depth


@hookimpl
def specdec_depth_policies() -> list[DepthPolicySpec]:
    return [DepthPolicySpec(name="fixed", factory=FixedPolicy, config=FixedConfig, help="the same depth every cycle")]

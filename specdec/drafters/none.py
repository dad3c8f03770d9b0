"""The drafter that never drafts: plain decoding in the same cycle."""

from __future__ import annotations

from specdec.contract import EMPTY_DRAFT, Context, Draft, Drafter, DrafterEnv, DrafterSpec, NoConfig
from specdec.hookspecs import hookimpl


class NoDrafter(Drafter):
    """Always the empty draft."""

    def __init__(self, config: NoConfig, env: DrafterEnv) -> None:
        pass

    def propose(self, context: Context, depth: int) -> Draft:
        return EMPTY_DRAFT


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [DrafterSpec(name="none", factory=NoDrafter, help="plain decoding, no drafts")]

"""A refiner for DFlash heads, registered as a drafter: it makes a token less likely right after itself."""

from collections.abc import Generator

import numpy as np

from specdec import DrafterSpec, hookimpl
from specdec.backends.arrays import HostLogits
from specdec.contract import Logits
from specdec.drafters.heads.plugin import block_drafter
from specdec.drafters.heads.refiner import Block, Refiner

PENALTY = 2.0  # nats


class NoRepeats(Refiner):
    """Rows of a block do not see each other's tokens, so a head often drafts "the the": tell each row the last one."""

    def refine(self, block: Block) -> Generator[Logits, int, None]:
        last = block.pending
        for row in block.logits.rows():
            place = last if block.ids is None else np.searchsorted(block.ids, last)
            logits = row.copy()
            if place < len(logits) and (block.ids is None or block.ids[place] == last):
                logits[place] -= PENALTY
            last = yield HostLogits(logits[None])


@hookimpl
def specdec_drafters() -> list[DrafterSpec]:
    return [block_drafter("dflash_no_repeats", NoRepeats, "a DFlash head that avoids repetitions")]

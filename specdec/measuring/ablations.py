"""What each known mistake in an MTP head costs: the same prompts, the same weights, one switch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from specdec.errors import UnsupportedError
from specdec.measuring.intervals import interval, left_out, ratio

if TYPE_CHECKING:
    from specdec.measuring.runs import Run
    from specdec.pipeline import LanguageModel


@attrs.frozen(kw_only=True)
class AblationReport:
    """One switch against the right head, over the prompts that both ran."""

    switch: str
    mistake: str  # what it does, in words
    prompts: int
    equal: int  # of them, those whose output has the same tokens as with the right head
    cumulative: tuple[float | None, ...]  # accepted / offered by position, with the switch
    cumulative_right: tuple[float | None, ...]  # without
    tokens_per_cycle: float
    tokens_per_cycle_right: float
    change: float  # of the tokens per cycle, as a share: -0.3 is 30 % less
    change_interval: tuple[float, float] | None  # over prompts, each drawn with both its runs
    note: str  # why the switch cannot show here, or ""


def check_ablations(lm: LanguageModel, switches: Sequence[str]) -> None:
    """Raises: UnsupportedError unless the drafter is an MTP head and every switch applies to it."""
    if not switches:
        return
    from specdec.models.ablation import inapplicable

    if not lm.drafter.needs.mtp:
        raise UnsupportedError(
            f"ablations are of an MTP head, and the drafter {lm.drafter.spec.name!r} uses none",
            try_="drafter.name = mtp, or no --ablate",
        )
    for switch in switches:
        reason = inapplicable(lm.target, switch)
        if reason is not None:
            raise UnsupportedError(f"the ablation {switch!r} cannot be measured", reason=reason)


def ablated(lm: LanguageModel, switches: Sequence[str]) -> LanguageModel:
    """The same pipeline over a head with these mistakes; weights are shared, ``lm`` is as before."""
    from specdec.models.ablation import AblatedLM
    from specdec.models.causal_lm import CausalLM

    assert isinstance(lm.target, CausalLM)  # check_ablations has said so
    return attrs.evolve(lm, target=AblatedLM(lm.target, switches))


def ablation_report(switch: str, right: Sequence[Run], wrong: Sequence[Run], depth: int) -> AblationReport:
    """Compare runs of the same prompts, in the same order."""
    from specdec.models.ablation import SWITCHES

    prompts = len(wrong)
    counts = [np.sum([run.counts(depth) for run in runs], axis=0) for runs in (right, wrong)]
    cumulative = [_known(ratio(accepted, offered)) for _, offered, _, accepted in counts]
    sizes = np.array(
        [[len(a.tokens), len(a.cycles), len(b.tokens), len(b.cycles)] for a, b in zip(right, wrong, strict=True)],
        dtype=np.float64,
    )

    def change(sums: np.ndarray) -> np.ndarray:
        return ratio(ratio(sums[..., 2], sums[..., 3]), ratio(sums[..., 0], sums[..., 1])) - 1.0

    total = sizes.sum(axis=0)
    return AblationReport(
        switch=switch,
        mistake=SWITCHES[switch],
        prompts=prompts,
        equal=sum(a.tokens == b.tokens for a, b in zip(right, wrong, strict=True)),
        cumulative=cumulative[1],
        cumulative_right=cumulative[0],
        tokens_per_cycle=float(total[2] / total[3]),
        tokens_per_cycle_right=float(total[0] / total[1]),
        change=float(change(total)),
        change_interval=interval(float(change(total)), change(left_out(sizes)), low=-1.0),
        note="at depth 1 nothing is chained" if switch == "chain-pre-norm" and depth == 1 else "",
    )


def _known(rates: np.ndarray) -> tuple[float | None, ...]:
    return tuple(None if np.isnan(rate) else float(rate) for rate in rates)

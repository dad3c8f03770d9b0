"""Ablations: measure what known mistakes in an MTP head cost, on the same prompts and weights, one mistake at a time.

Every engine that adopted Qwen3.5's head made some of them. Only acceptance shows them, since verification repairs
wrong drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.backends.delegating import DelegatingOps
from specdec.backends.ops import Array
from specdec.contract import NO_NEEDS, ForwardOutput, ForwardPass, Hidden, MtpPairs, Needs, State
from specdec.errors import ConfigError, UnsupportedError, did_you_mean
from specdec.measuring.intervals import interval, left_out, ratio
from specdec.models.causal_lm import CausalLM, SequenceState
from specdec.models.decoder import Attention, MtpHead, Norm, RmsNorm

if TYPE_CHECKING:
    from specdec.measuring.runs import Run
    from specdec.pipeline import LanguageModel

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")

SWITCHES: Mapping[str, str] = {
    "hidden-pre-norm": "the head gets the target's hidden state from before the final norm",
    "chain-pre-norm": "chained steps feed the head's own vector from before mtp.norm",
    "gate-silu": "silu in place of sigmoid as the output gate of the head's attention",
    "no-rotary": "no rotary embedding in the head's attention",
    "no-prefill": "the prompt does not pass through the head, which starts with an empty cache",
}


@attrs.frozen(kw_only=True)
class AblationReport:
    """One switch compared with the correct head, over the prompts that both ran."""

    switch: str
    mistake: str  # description
    prompts: int
    equal: int  # prompts with the same output tokens as with the correct head
    cumulative: tuple[float | None, ...]  # accepted / offered by position, with the mistake
    cumulative_right: tuple[float | None, ...]  # with the correct head
    tokens_per_cycle: float
    tokens_per_cycle_right: float
    change: float  # relative change of tokens per cycle: -0.3 is 30 % less
    change_interval: tuple[float, float] | None  # over prompts, each with both its runs
    note: str  # why the mistake cannot show here, or ""


def parse_switches(text: str) -> tuple[str, ...]:
    """Parse ``"gate-silu,no-rotary"`` or ``"all"`` into names of ``SWITCHES``. Raises: ConfigError for other names."""
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        return tuple(SWITCHES)
    for name in names:
        if name not in SWITCHES:
            raise ConfigError(
                f"there is no ablation {name!r}.{did_you_mean(name, SWITCHES)}", available=", ".join([*SWITCHES, "all"])
            )
    return tuple(dict.fromkeys(names))


def ablated(lm: LanguageModel, switch: str) -> LanguageModel:
    """The same pipeline over a head with this mistake; shares weights and leaves ``lm`` unchanged.

    Raises: UnsupportedError unless the drafter is an MTP head of one of ``FAMILIES``.
    """
    if not lm.drafter.needs.mtp:
        raise UnsupportedError(
            f"ablations are of an MTP head, and the drafter {lm.drafter.spec.name!r} uses none",
            try_="drafter.name = mtp, or no --ablate",
        )
    return attrs.evolve(lm, target=AblatedLM(lm.target, (switch,)))


class AblatedLM(CausalLM):
    """A target whose MTP head makes mistakes; decoding is unchanged.

    Two mistakes are in the head's layer, three in its inputs. It drafts step by step, on the host, and a state is for
    one generation: without its prompt the head cannot go back.

    Args:
        target: a model with an MTP head of one of ``FAMILIES``; weights are shared, and the target is unchanged.
        switches: names of ``SWITCHES``; none gives the correct head.

    Raises: UnsupportedError for another target.
    """

    def __init__(self, target: ForwardPass, switches: Iterable[str]) -> None:
        self.switches = frozenset(switches)
        if not isinstance(target, CausalLM) or not target.info.mtp_layers or target.info.family not in FAMILIES:
            known, family = ", ".join(FAMILIES), target.info.family
            raise UnsupportedError(f"ablations are of the MTP heads of {known}: this {family} model has none of them")
        (head,) = target.model.mtp
        super().__init__(target.info, attrs.evolve(target.model, mtp=(_ablated_head(head, self.switches),)))
        self.info = target.info
        self._undo = {False: _inverse(self.model.norm), True: _inverse(head.norm)}

    def _input(self, hidden: Hidden, *, chained: bool) -> Hidden:
        """The head's input: a state from before its norm, up to a factor that the head's norm removes."""
        if ("chain-pre-norm" if chained else "hidden-pre-norm") not in self.switches:
            return hidden
        return self.ops.hidden(self._undo[chained](self.ops.array(hidden)))

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:
        super().prefill_mtp(state, tokens, self._input(hidden, chained=False))

    def decode_mtp(
        self, state: State, tokens: Sequence[int], hidden: Hidden, *, provisional: bool = False, **options: Any
    ) -> ForwardOutput:
        hidden = self._input(hidden, chained=provisional)
        return super().decode_mtp(state, tokens, hidden, provisional=provisional, **options)

    def draft_mtp(self, state: State, pending: int, depth: int, **options: Any) -> tuple[int, ...]:
        return ForwardPass.draft_mtp(self, state, pending, depth, **options)

    # --- no-prefill: the head's cache is emptied after each prompt -------------------------------------------------

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> SequenceState:
        state = super().new_state(capacity, needs)
        if state.pairs is not None and "no-prefill" in self.switches:
            state.pairs = LatePairs()
        return state

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        output = super().prefill(state, tokens)
        if isinstance(state, SequenceState) and isinstance(state.pairs, LatePairs) and state.mtp is not None:
            state.mtp.truncate(0)
            state.pairs.fed = 0
            state.pairs.skipped = state.length - state.pairs.waiting
        return output


class LatePairs(MtpPairs):
    """A ledger whose first pairs are in no cache; it does not go back."""

    skipped = 0

    @property
    def length(self) -> int:
        return self.skipped + super().length


def _inverse(norm: Norm) -> RmsNorm:
    """An RMSNorm that undoes another, up to a factor per row."""
    assert isinstance(norm, RmsNorm)  # in FAMILIES
    return attrs.evolve(norm, weight=1.0 / (norm.weight + (norm.weight == 0)))


class _SiluGate(DelegatingOps):
    """Ops whose attention multiplies by ``silu(gate)``, which is ``sigmoid(gate) * gate``."""

    def attend(self, q: Array, k: Array, v: Array, cache: Any, *, scale: float, gate: Array | None = None) -> Array:
        gated = self.inner.attend(q, k, v, cache, scale=scale, gate=gate)
        return gated if gate is None else gated * gate.reshape(gated.shape)


def _ablated_head(head: MtpHead, switches: frozenset[str]) -> MtpHead:
    mixer = head.layer.mixer
    assert isinstance(mixer, Attention)  # in FAMILIES, with an output gate
    if "no-rotary" in switches:
        mixer = attrs.evolve(mixer, shape=attrs.evolve(mixer.shape, rope=None))
    if "gate-silu" in switches:
        ops = _SiluGate(mixer.ops)  # type: ignore[abstract]  # methods are created in a loop
        mixer = attrs.evolve(mixer, ops=ops)
    return attrs.evolve(head, layer=attrs.evolve(head.layer, mixer=mixer))


def ablation_report(switch: str, right: Sequence[Run], wrong: Sequence[Run], depth: int) -> AblationReport:
    """Compare runs of the same prompts, in the same order."""
    pairs = list(zip(right, wrong, strict=True))
    counts = [np.sum([run.counts(depth) for run in runs], axis=0) for runs in (right, wrong)]
    cumulative_right, cumulative = (_known(ratio(accepted, offered)) for _, offered, _, accepted in counts)
    sizes = np.array([[len(part) for run in pair for part in (run.tokens, run.cycles)] for pair in pairs], float)

    def change(sums: np.ndarray) -> np.ndarray:
        return ratio(ratio(sums[..., 2], sums[..., 3]), ratio(sums[..., 0], sums[..., 1])) - 1.0

    total = sizes.sum(axis=0)
    return AblationReport(
        switch=switch,
        mistake=SWITCHES[switch],
        prompts=len(pairs),
        equal=sum(a.tokens == b.tokens for a, b in pairs),
        cumulative=cumulative,
        cumulative_right=cumulative_right,
        tokens_per_cycle=float(total[2] / total[3]),
        tokens_per_cycle_right=float(total[0] / total[1]),
        change=float(change(total)),
        change_interval=interval(float(change(total)), change(left_out(sizes)), low=-1.0),
        note="at depth 1 nothing is chained" if switch == "chain-pre-norm" and depth == 1 else "",
    )


def _known(rates: np.ndarray) -> tuple[float | None, ...]:
    return tuple(None if np.isnan(rate) else float(rate) for rate in rates)

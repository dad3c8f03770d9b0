"""Run an MTP head with one of the known mistakes switched on, to measure what each of them costs.

Every engine that took up the head of Qwen3.5 made some of them, and nothing but the acceptance shows it: verification
repairs wrong drafts, and the text stays right. Its speed means nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from specdec.backends.delegating import DelegatingOps
from specdec.backends.ops import Array, HeadRows
from specdec.contract import (
    NO_NEEDS,
    Context,
    DeviceDraft,
    ForwardOutput,
    ForwardPass,
    Hidden,
    Logits,
    Needs,
    Snapshot,
    State,
)
from specdec.errors import ConfigError, StateError, UnsupportedError
from specdec.errors import did_you_mean as hint
from specdec.models.causal_lm import CausalLM, SequenceState
from specdec.models.decoder import Attention, MtpHead

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")

SWITCHES: Mapping[str, str] = {
    "hidden-pre-norm": "the head gets the target's hidden state from before the final norm",
    "chain-pre-norm": "chained steps feed the head's own vector from before mtp.norm",
    "gate-silu": "silu in place of sigmoid as the output gate of the head's attention",
    "no-rotary": "no rotary embedding in the head's attention",
    "no-prefill": "the prompt does not pass through the head, which starts with an empty cache",
}


def parse_switches(text: str) -> tuple[str, ...]:
    """``"gate-silu,no-rotary"`` or ``"all"`` as names of ``SWITCHES``. Raises: ConfigError for any other name."""
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        return tuple(SWITCHES)
    for name in names:
        if name not in SWITCHES:
            raise ConfigError(
                f"there is no ablation {name!r}.{hint(name, SWITCHES)}", available=", ".join([*SWITCHES, "all"])
            )
    return tuple(dict.fromkeys(names))


def inapplicable(target: ForwardPass, switch: str) -> str | None:
    """Why a switch means nothing for this target's head; None where it can be measured."""
    if not target.info.mtp_layers:
        return f"this {target.info.family} model has no MTP head"
    if not isinstance(target, CausalLM) or target.info.family not in FAMILIES:
        return f"the switches are mistakes in the rules of the {', '.join(FAMILIES)} heads, not of {target.info.family}"
    head = target.model.mtp
    assert head is not None
    mixer = head.layer.mixer
    if switch in ("gate-silu", "no-rotary") and not isinstance(mixer, Attention):
        return "the head's layer is no plain attention"
    if switch == "gate-silu" and isinstance(mixer, Attention) and not mixer.shape.gated:
        return "the head's attention has no output gate"
    return None


class _SiluGate(DelegatingOps):
    """Ops whose attention multiplies by ``silu(gate)``, which is ``sigmoid(gate) * gate``."""

    def attend(self, q: Array, k: Array, v: Array, cache: Any, *, scale: float, gate: Array | None = None) -> Array:
        gated = self.inner.attend(q, k, v, cache, scale=scale, gate=gate)
        return gated if gate is None else gated * gate.reshape(gated.shape)


class AblatedState(SequenceState):
    """The state of a sequence, and how many pairs of the prompt the head never saw."""

    skipped = 0
    in_prompt = False


class AblatedLM(CausalLM):
    """The target with a head that makes mistakes; what it decodes is the target's own.

    Args:
        target: a model with an MTP head of one of ``FAMILIES``; weights are shared, and it stays as it is.
        switches: names of ``SWITCHES``; none at all gives the right head.

    Raises: UnsupportedError for a switch that does not apply to the head.
    """

    state_type = AblatedState

    def __init__(self, target: CausalLM, switches: Iterable[str]) -> None:
        self.switches = frozenset(switches)
        for switch in sorted(self.switches) or [next(iter(SWITCHES))]:
            reason = inapplicable(target, switch)
            if reason is not None:
                raise UnsupportedError(f"the ablation {switch!r} cannot be measured", reason=reason)
        assert target.model.mtp is not None
        super().__init__(target.info, attrs.evolve(target.model, mtp=_ablated_head(target.model.mtp, self.switches)))
        self.info = target.info

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> SequenceState:
        if needs.mtp and "hidden-pre-norm" in self.switches:
            needs = needs | Needs(boundaries=(self.info.layers,))
        return super().new_state(capacity, needs)

    def _pair_hidden(self, state: SequenceState, x: Array) -> Array:
        if "hidden-pre-norm" not in self.switches:
            return super()._pair_hidden(state, x)
        column = 1 + state.needs.boundaries.index(self.info.layers)
        return x[:, column * self.info.hidden_size : (column + 1) * self.info.hidden_size]

    def _run_mtp(self, caches: Sequence[Any], tokens: Sequence[int], hidden: Array | None) -> Array:
        if "chain-pre-norm" not in self.switches:
            return super()._run_mtp(caches, tokens, hidden)
        assert self.model.mtp is not None
        return self.model.mtp.before_norm(self._mtp_embedded(tokens), hidden, caches[0])

    def _mtp_logits(self, last: Array, rows: HeadRows | None) -> Logits:
        if "chain-pre-norm" in self.switches:
            assert self.model.mtp is not None
            last = self.ops.rms_norm(last, self.model.mtp.norm, self.model.mtp.eps)
        return super()._mtp_logits(last, rows)

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = _own(state)
        state.in_prompt = "no-prefill" in self.switches
        try:
            return super().prefill(state, tokens)
        finally:
            state.in_prompt = False

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:
        state = _own(state)
        if state.in_prompt and state.pairs is not None:
            state.skipped += len(tokens)
            state.pairs.fed += len(tokens)
        else:
            super().prefill_mtp(state, tokens, hidden)

    def _forward_mtp(self, state: SequenceState, tokens: Sequence[int], hidden: Hidden, *, provisional: bool) -> Array:
        with _shifted(_own(state)):
            return super()._forward_mtp(state, tokens, hidden, provisional=provisional)

    def draft_mtp(self, state: State, pending: int, depth: int, **options: Any) -> tuple[int, ...]:
        return ForwardPass.draft_mtp(self, state, pending, depth, **options)  # step by step

    def device_executor(self, state: State, context: Context, draft: DeviceDraft, **options: Any) -> None:
        return None

    def rewind(self, state: State, length: int) -> int:
        """Anything but the present length means from the beginning."""
        state = _own(state)
        reached = super().rewind(state, 0 if 0 < length < state.length else length)
        if reached == 0:
            state.skipped = 0
        return reached

    def snapshot(self, state: State) -> Snapshot:
        state = _own(state)
        self.feed_mtp(state)
        with _shifted(state):
            taken = super().snapshot(state)
        return attrs.evolve(taken, meta={**taken.meta, "skipped": state.skipped})

    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> SequenceState:
        state = _own(super().restore(snapshot, needs))
        state.skipped = snapshot.meta["skipped"]
        if state.pairs is not None:
            state.pairs.fed += state.skipped
        return state


@contextlib.contextmanager
def _shifted(state: AblatedState) -> Iterator[None]:
    """The ledger counts what the head's cache holds, without the pairs that were skipped."""
    if state.pairs is not None:
        state.pairs.fed -= state.skipped
    try:
        yield
    finally:
        if state.pairs is not None:
            state.pairs.fed += state.skipped


def _own(state: State) -> AblatedState:
    if not isinstance(state, AblatedState):
        raise StateError(f"a state of another model: {type(state).__name__}")
    return state


def _ablated_head(head: MtpHead, switches: frozenset[str]) -> MtpHead:
    mixer = head.layer.mixer
    if isinstance(mixer, Attention):
        if "no-rotary" in switches:
            shape = mixer.shape
            still = attrs.evolve(shape.rope, inv_freq=(0.0,) * len(shape.rope.inv_freq))  # angle 0 at every position
            mixer = attrs.evolve(mixer, shape=attrs.evolve(shape, rope=still))
        if "gate-silu" in switches:
            ops = _SiluGate(mixer.ops)  # type: ignore[abstract]  # its methods are made in a loop
            mixer = attrs.evolve(mixer, ops=ops)
    return attrs.evolve(head, layer=attrs.evolve(head.layer, mixer=mixer))

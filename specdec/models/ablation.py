"""Run an MTP head with one of the known mistakes switched on, to measure what each of them costs.

Every engine that took up the head of Qwen3.5 made some of them, and nothing but the acceptance shows it: verification
repairs wrong drafts, and the text stays right. An ``AblatedPass`` shares the weights of the pass that it is made from
and leaves that one alone. It runs its passes op by op, never recorded, so its speed means nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from specdec.backends.delegating import DelegatingOps
from specdec.backends.ops import Array, Cache
from specdec.contract import DraftHead, ForwardOutput, ForwardPass, Hidden, Snapshot, State
from specdec.errors import ConfigError, ContractError, PromptError, ShapeError, StateError, UnsupportedError
from specdec.errors import did_you_mean as hint
from specdec.models.causal_lm import PREFILL_ROWS, CausalLM, PrunedHead
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


class AblatedState(State):
    """The caches of one sequence, and how much of the prompt the head never saw."""

    def __init__(self, capacity: int, caches: list[Cache], mtp: Cache) -> None:
        self.caches = caches
        self.mtp = mtp
        self.mtp_true = 0  # true pairs in the head's cache
        self.skipped = 0  # pairs of the prompt that were left out
        self.prompt = 0  # tokens that came through prefill so far
        self.decoded: Hidden | None = None
        self.last: Hidden | None = None
        self._capacity = capacity

    @property
    def length(self) -> int:
        return self.caches[0].length

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def mtp_length(self) -> int:
        return self.skipped + self.mtp_true

    @property
    def last_hidden(self) -> Hidden | None:
        return self.last

    def nbytes(self) -> int:
        return sum(cache.nbytes() for cache in (*self.caches, self.mtp))


class AblatedPass(ForwardPass):
    """The target with a head that makes mistakes; what it decodes is the target's own.

    Args:
        target: a pass with an MTP head of one of ``FAMILIES``.
        switches: names of ``SWITCHES``; none at all gives the right head.

    Raises: UnsupportedError for a switch that does not apply to the head.
    """

    def __init__(self, target: CausalLM, switches: Iterable[str]) -> None:
        self.switches = frozenset(switches)
        for switch in sorted(self.switches) or [next(iter(SWITCHES))]:
            reason = inapplicable(target, switch)
            if reason is not None:
                raise UnsupportedError(f"the ablation {switch!r} cannot be measured", reason=reason)
        self.info = target.info
        self._target = target
        self._model = model = target.model
        self._ops = model.ops
        assert model.mtp is not None
        self._head = _ablated_head(model.mtp, self.switches)

    # --- target passes ---------------------------------------------------------------------------------------------

    def new_state(self, capacity: int) -> AblatedState:
        if not 1 <= capacity <= self.info.max_positions:
            raise PromptError(f"a state holds 1 to {self.info.max_positions} tokens, asked for {capacity}")
        caches = [layer.mixer.new_cache(capacity) for layer in self._model.layers]
        return AblatedState(capacity, caches, self._head.layer.mixer.new_cache(capacity + self.info.max_rows))

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if len(tokens) == 0:
            raise ShapeError("a pass takes at least one token, got none")
        for token in tokens:
            if not 0 <= token < self.info.vocab_size:
                raise PromptError(f"token id {token} is outside the vocabulary (0 to {self.info.vocab_size - 1})")

    def _check(self, state: AblatedState, tokens: Sequence[int]) -> None:
        self._check_tokens(tokens)
        if state.length + len(tokens) > state.capacity:
            raise StateError(f"the state holds {state.length} of {state.capacity} tokens; {len(tokens)} do not fit")

    def _layers(self, state: AblatedState, tokens: Sequence[int]) -> tuple[Array, Hidden]:
        """The rows after the final norm ``[T, H]``, and the hidden states that the head is given."""
        x = self._ops.embed(self._model.embed_tokens, tokens)
        for layer, cache in zip(self._model.layers, state.caches, strict=True):
            x = layer(x, cache)
        normed = self._ops.rms_norm(x, self._model.norm, self._model.eps)
        return normed, self._ops.hidden(x if "hidden-pre-norm" in self.switches else normed)

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = _own(state)
        self._check(state, tokens)
        state.decoded = None
        parts: list[Hidden] = []
        for at in range(0, len(tokens), PREFILL_ROWS):
            chunk = tokens[at : at + PREFILL_ROWS]
            parts.append(self._layers(state, chunk)[1])
            for cache in state.caches:
                cache.commit(len(chunk))
        state.last = parts[-1][-1:]
        state.prompt = state.length
        return ForwardOutput(None, parts[0].join(parts[1:]) if len(parts) > 1 else parts[0])

    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        state = _own(state)
        if len(tokens) > self.info.max_rows:
            raise ShapeError(f"decode takes 1 to {self.info.max_rows} rows, got {len(tokens)}")
        self._check(state, tokens)
        normed, state.decoded = self._layers(state, tokens)
        return ForwardOutput(self._ops.head(normed, self._model.lm_head), state.decoded)

    def commit(self, state: State, rows: int) -> None:
        state = _own(state)
        if state.decoded is None:
            raise StateError("commit without a decode before it")
        if not 0 <= rows <= len(state.decoded):
            raise StateError(f"commit takes 0 to {len(state.decoded)} rows of the last decode, got {rows}")
        for cache in state.caches:
            cache.commit(rows)
        if rows:
            state.last = state.decoded[rows - 1 : rows]
        state.decoded = None

    # --- MTP passes ------------------------------------------------------------------------------------------------

    def _mtp(
        self, state: AblatedState, tokens: Sequence[int], hidden: Hidden, *, provisional: bool
    ) -> tuple[Array, Hidden]:
        """The head's rows after ``mtp.norm`` ``[T, H]``, and what a chained step is given."""
        self._check_tokens(tokens)
        if len(tokens) != len(hidden):
            raise ShapeError(f"an MTP pass pairs each token with a hidden state: {len(tokens)} and {len(hidden)}")
        ops, head = self._ops, self._head
        if not provisional:
            state.mtp.truncate(state.mtp_true)
        table = self._model.embed_tokens if self._model.mtp_embed_tokens is None else self._model.mtp_embed_tokens
        embedded = ops.rms_norm(ops.embed(table, tokens), head.embed_norm, head.eps)
        given = ops.rms_norm(ops.array(hidden), head.hidden_norm, head.eps)
        x = head.layer(ops.linear(ops.concat(embedded, given), head.fc), state.mtp)
        state.mtp.commit(len(tokens))
        if not provisional:
            state.mtp_true = state.mtp.length
        normed = ops.rms_norm(x, head.norm, head.eps)
        return normed, ops.hidden(x if "chain-pre-norm" in self.switches else normed)

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:
        state = _own(state)
        left_out = 0
        if "no-prefill" in self.switches:  # pair j is (h_j, x_(j+1)); the one at the prompt's end makes the first draft
            left_out = min(max(state.prompt - 1 - state.mtp_length, 0), len(tokens))
            state.skipped += left_out
        for at in range(left_out, len(tokens), PREFILL_ROWS):
            rows = slice(at, at + PREFILL_ROWS)
            self._mtp(state, tokens[rows], hidden[rows], provisional=False)

    def decode_mtp(
        self,
        state: State,
        tokens: Sequence[int],
        hidden: Hidden,
        *,
        provisional: bool = False,
        head: DraftHead | None = None,
    ) -> ForwardOutput:
        normed, chained = self._mtp(_own(state), tokens, hidden, provisional=provisional)
        if head is None:
            own = self._model.mtp_lm_head
            return ForwardOutput(self._ops.head(normed[-1:], self._model.lm_head if own is None else own), chained)
        if not isinstance(head, PrunedHead):
            raise ContractError("a draft head that another object made", takes="what this target's draft_head returned")
        return ForwardOutput(self._ops.pruned_head(normed[-1:], head.rows), chained)

    def draft_head(self, tokens: Sequence[int]) -> DraftHead:
        return self._target.draft_head(tokens)

    # --- going back ------------------------------------------------------------------------------------------------

    def rewind(self, state: State, length: int) -> int:
        """Anything but the present length means from the beginning."""
        state = _own(state)
        if not 0 <= length <= state.length:
            raise StateError(f"rewind takes 0 to {state.length} tokens, got {length}")
        state.decoded = None
        if length == state.length:
            return length
        for cache in (*state.caches, state.mtp):
            if not cache.truncate(0):
                raise AssertionError("a cache that cannot be emptied")
        state.mtp_true = state.skipped = state.prompt = 0
        state.last = None
        return 0

    def snapshot(self, state: State) -> Snapshot:
        state = _own(state)
        state.mtp.truncate(state.mtp_true)
        named = {f"layers.{i}": cache for i, cache in enumerate(state.caches)} | {"mtp": state.mtp}
        arrays = {f"{under}.{name}": array for under, cache in named.items() for name, array in cache.save().items()}
        if state.last is not None:
            arrays["last_hidden"] = self._ops.array(state.last)
        meta = {"mtp_length": state.mtp_true, "skipped": state.skipped, "prompt": state.prompt}
        return Snapshot(state.length, state.capacity, arrays, meta)

    def restore(self, snapshot: Snapshot) -> AblatedState:
        state = self.new_state(snapshot.capacity)
        state.mtp_true, state.skipped, state.prompt = (
            snapshot.meta[name] for name in ("mtp_length", "skipped", "prompt")
        )
        named = [(f"layers.{i}.", cache, snapshot.length) for i, cache in enumerate(state.caches)]
        for under, cache, length in [*named, ("mtp.", state.mtp, state.mtp_true)]:
            found = {name.removeprefix(under): a for name, a in snapshot.arrays.items() if name.startswith(under)}
            cache.load(found, length)
        if "last_hidden" in snapshot.arrays:
            state.last = self._ops.hidden(snapshot.arrays["last_hidden"])
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


def _own(state: State) -> AblatedState:
    if not isinstance(state, AblatedState):
        raise StateError(f"a state of another model: {type(state).__name__}")
    return state

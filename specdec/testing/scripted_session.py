"""``ScriptedSession``: call a drafter as the engine does, with outcomes chosen by a check."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from specdec.contract import (
    NO_NEEDS,
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    DraftHead,
    DraftNoise,
    ForwardOutput,
    ForwardPass,
    Hidden,
    Logits,
    Needs,
    Sampling,
    SharedWeights,
    Snapshot,
    State,
    Verdict,
)
from specdec.errors import ContractError
from specdec.testing.checks import expect_equal
from specdec.testing.strict_pass import StrictForwardPass
from specdec.testing.subjects import DrafterSubject
from specdec.testing.table_model import Memory, TableModel

CAPACITY = 4096


class DrafterView(ForwardPass):
    """The target as a drafter may use it: declared MTP passes, and nothing else on the sequence's own state."""

    def __init__(self, inner: ForwardPass, needs: Needs, *, lenient: bool) -> None:
        self.inner, self.info, self._needs, self._lenient = inner, inner.info, needs, lenient
        self.state: State | None = None  # the sequence's own

    def _foreign(self, state: State, what: str) -> State:
        if state is self.state and not self._lenient:
            raise ContractError(f"a drafter called {what} on the state of its sequence, which is the engine's")
        return state

    def _declared(self) -> None:
        if not self._needs.mtp:
            raise ContractError("the MTP head is used, and needs does not declare mtp")

    def new_state(self, capacity: int, needs: Needs = NO_NEEDS) -> State:
        return self.inner.new_state(capacity, needs)

    def prefill(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        return self.inner.prefill(self._foreign(state, "prefill"), tokens)

    def decode(self, state: State, tokens: Sequence[int]) -> ForwardOutput:
        return self.inner.decode(self._foreign(state, "decode"), tokens)

    def commit(self, state: State, rows: int) -> None:
        self.inner.commit(self._foreign(state, "commit"), rows)

    def prefill_mtp(self, state: State, tokens: Sequence[int], hidden: Hidden) -> None:
        self._declared()
        self.inner.prefill_mtp(state, tokens, hidden)

    def decode_mtp(
        self,
        state: State,
        tokens: Sequence[int],
        hidden: Hidden,
        *,
        provisional: bool = False,
        head: DraftHead | None = None,
    ) -> ForwardOutput:
        self._declared()
        if head is None:  # not every pass knows the argument
            return self.inner.decode_mtp(state, tokens, hidden, provisional=provisional)
        return self.inner.decode_mtp(state, tokens, hidden, provisional=provisional, head=head)

    def draft_mtp(
        self,
        state: State,
        pending: int,
        depth: int,
        *,
        head: DraftHead | None = None,
        choose: Callable[[Logits, Sequence[int]], int | None] | None = None,
    ) -> tuple[int, ...]:
        self._declared()
        return self.inner.draft_mtp(state, pending, depth, head=head, choose=choose)

    def draft_head(self, tokens: Sequence[int]) -> DraftHead:
        self._declared()
        return self.inner.draft_head(tokens)

    def shared_weights(self) -> SharedWeights:
        return self.inner.shared_weights()

    def rewind(self, state: State, length: int) -> int:
        return self.inner.rewind(self._foreign(state, "rewind"), length)

    def snapshot(self, state: State) -> Snapshot:
        return self.inner.snapshot(self._foreign(state, "snapshot"))

    def restore(self, snapshot: Snapshot, needs: Needs = NO_NEEDS) -> State:
        return self.inner.restore(snapshot, needs)


SETTINGS = ("sampling", "generated_from", "cycle", "draft_noise")


@attrs.frozen
class Kept:
    """A snapshot of a session: its tokens, the target's state, the drafter's own."""

    tokens: list[int]
    cycles: int
    generated_from: int
    state: Snapshot
    drafter: DrafterSnapshot | None


@attrs.define
class ScriptedSession:
    """One sequence: its tokens, its state, its drafter.

    ``sealed``: hidden states and the MTP head only as declared, and no access to the state. Unsealed, a drafter that
    breaks those clauses still works, so that each check finds only its own clause.
    """

    subject: DrafterSubject
    model: ForwardPass  # strict
    state: State
    drafter: Drafter
    sampling: Sampling
    noise: DraftNoise
    shared: Any
    sealed: bool
    tokens: list[int] = attrs.field(factory=list)
    cycles: int = 0
    generated_from: int = 0
    contexts: list[tuple[Context, list[int], dict[str, Any]]] | None = None
    """If a list: every context handed out, with its tokens and settings at the time."""
    outputs: list[weakref.ref[ForwardOutput]] | None = None
    """If a list: every output handed out."""

    @classmethod
    def start(
        cls,
        subject: DrafterSubject,
        *,
        model: ForwardPass | None = None,
        memory: Memory = Memory.ATTENTION,
        sampling: Sampling | None = None,
        noise: DraftNoise = DraftNoise.COUPLED,
        sealed: bool = False,
        shared: Any = None,
        snapshot: Snapshot | None = None,
        saved: DrafterSnapshot | None = None,
    ) -> ScriptedSession:
        """Start an empty sequence, or one over a restored snapshot."""
        if model is None:
            model = target_for(subject, memory)
        needs = subject.needs if sealed else subject.needs | Needs(mtp=bool(model.info.mtp_layers), final_hidden=True)
        state = model.new_state(CAPACITY, needs) if snapshot is None else model.restore(snapshot, needs)
        view = DrafterView(model, needs, lenient=not sealed)
        view.state = state
        shared = subject.prepare(view) if shared is None else shared
        drafter = subject.make(DrafterEnv(target=view, state=state, shared=shared, saved=saved))
        return cls(subject, model, state, drafter, sampling or Sampling(), noise, shared, sealed)

    def context(self, upto: int | None = None) -> Context:
        """A context over a copy of the tokens, so that a drafter's writes change nothing here."""
        tokens, noise = self.tokens[:upto], self.noise
        context = Context(
            tokens, self.sampling, generated_from=self.generated_from, cycle=self.cycles, draft_noise=noise
        )
        if self.contexts is not None:
            self.contexts.append(
                (context, list(context), {name: copy.deepcopy(getattr(context, name)) for name in SETTINGS})
            )
        return context

    def feed(self, tokens: Sequence[int], chunk: int = CAPACITY) -> None:
        """Append tokens; all but the last run through target and drafter, in chunks."""
        self.tokens += tokens
        while self.state.length < len(self.tokens) - 1:
            at = self.state.length
            part = self.tokens[at : min(at + chunk, len(self.tokens) - 1)]
            output = self._seen(self.model.prefill(self.state, part))
            self.drafter.prefill(self.context(at + len(part)), output)

    def _seen(self, output: ForwardOutput) -> ForwardOutput:
        if self.outputs is not None:
            self.outputs.append(weakref.ref(output))
        return output

    def propose(self, depth: int) -> Draft:
        """Begin a cycle and return the drafter's answer, unchanged."""
        self.cycles += 1
        return self.drafter.propose(self.context(), depth)

    def finish(self, draft: Draft, accepted: int, next_token: int) -> None:
        """End the cycle with this outcome: decode, commit, observe."""
        drafted = usable(draft, len(draft.tokens), self.model.info.vocab_size).tokens
        accepted = min(accepted, len(drafted))
        if accepted < len(drafted) and next_token == drafted[accepted]:
            next_token = (next_token + 1) % self.model.info.vocab_size  # not the rejected token
        output = self._seen(self.model.decode(self.state, [self.tokens[-1], *drafted]))
        self.model.commit(self.state, accepted + 1)
        self.tokens += [*drafted[:accepted], next_token]
        rows = output.need_logits().rows()
        before = rows.copy()
        self.drafter.observe(Verdict(accepted, next_token), output, self.context())
        expect_equal(output.need_logits().rows(), before, "the logits of the target were changed")

    def cycle(self, depth: int, accepted: int, next_token: int, cut: int | None = None) -> Draft:
        """Run a whole cycle; at depth 0 the drafter is not asked. ``cut``: the engine shortens the draft."""
        if depth == 0:
            self.cycles += 1
            draft = Draft()
        else:
            draft = usable(self.propose(depth), depth if cut is None else min(depth, cut), self.model.info.vocab_size)
        self.finish(draft, accepted, next_token)
        return draft

    def rewind(self, length: int) -> None:
        """Go back to the first ``length`` tokens, as a session does."""
        del self.tokens[length:]
        self.generated_from = min(self.generated_from, length)
        if self.state.length > max(length - 1, 0):
            self.drafter.rewind(self.model.rewind(self.state, max(length - 1, 0)))

    def keep(self) -> Kept:
        """Copy everything that a session copies, in the same order."""
        state = self.model.snapshot(self.state)
        saved = self.drafter.snapshot(self.context())
        return Kept(list(self.tokens), self.cycles, self.generated_from, state, saved)

    def restored(self, kept: Kept, saved: DrafterSnapshot | None = None) -> ScriptedSession:
        """Replace the drafter over the kept state, with or without the old one's snapshot."""
        other = self._like(kept.state, saved)
        other.tokens, other.cycles, other.generated_from = list(kept.tokens), kept.cycles, kept.generated_from
        return other

    def fresh(self) -> ScriptedSession:
        """Replace drafter and state by new ones that saw the same tokens in one chunk."""
        other = self._like(None, None)
        other.cycles, other.generated_from = self.cycles, self.generated_from
        other.feed(self.tokens)
        return other

    def _like(self, snapshot: Snapshot | None, saved: DrafterSnapshot | None) -> ScriptedSession:
        return ScriptedSession.start(
            self.subject,
            model=self.model,
            sampling=self.sampling,
            noise=self.noise,
            sealed=self.sealed,
            snapshot=snapshot,
            shared=self.shared,
            saved=saved,
        )


def target_for(subject: DrafterSubject, memory: Memory = Memory.ATTENTION, *, vocab: int = 5) -> StrictForwardPass:
    """A strict model that supports the drafter's needs."""
    mtp, layers, room = subject.needs.mtp, subject.layers, 4 * CAPACITY
    model = TableModel.random(vocab, memory=memory, tilt=0.7, mtp=mtp, layers=layers, max_positions=room)
    return StrictForwardPass(model)


def usable(draft: Draft, depth: int, vocab: int) -> Draft:
    """The draft as the engine verifies it: at most ``depth`` tokens, cut before an id outside the vocabulary."""
    kept = 0
    for token in draft.tokens[:depth]:
        id_: object = token  # drafters may return anything
        if isinstance(id_, bool) or not isinstance(id_, int | np.integer) or not 0 <= id_ < vocab:
            break
        kept += 1
    return Draft(tuple(int(t) for t in draft.tokens[:kept]), None if draft.probs is None else draft.probs[:kept])


def drafts_equal(one: Draft, other: Draft) -> bool:
    """The same tokens, the same distributions to the bit."""
    if tuple(one.tokens) != tuple(other.tokens) or (one.probs is None) != (other.probs is None):
        return False
    return one.probs is None or other.probs is None or bool(np.array_equal(one.probs, other.probs))

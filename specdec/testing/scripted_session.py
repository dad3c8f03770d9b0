"""``ScriptedSession``: call a drafter as the engine does, with outcomes chosen by a check.

Every call is looked at: what a drafter answers, and whether it left alone what it was given. A fault is noted under its
clause and the session goes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs
import numpy as np

from specdec.contract import (
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    DraftNoise,
    ForwardPass,
    Sampling,
    Snapshot,
    State,
    Verdict,
)
from specdec.errors import ContractError
from specdec.registry import checked_draft
from specdec.testing.checks import Faults
from specdec.testing.subjects import PluginSubject
from specdec.testing.table_model import Memory, TableModel

CAPACITY = 4096


def layers_for(subject: PluginSubject) -> int:
    """Decoder layers that a target must have for the boundaries in a drafter's needs."""
    return max((1, *subject.needs.boundaries))


@cache
def target_for(subject: PluginSubject, memory: Memory = Memory.ATTENTION, *, vocab: int = 5) -> TableModel:
    """A model that supports the drafter's needs; it is the same at every call."""
    options: dict[str, Any] = {"mtp": subject.needs.mtp, "layers": layers_for(subject), "max_positions": 4 * CAPACITY}
    return TableModel.random(vocab, memory=memory, tilt=0.7, **options)


def drafts_equal(first: Draft, second: Draft) -> bool:
    """The same tokens, the same distributions to the bit."""
    probs: Any = first.probs, second.probs
    return tuple(first.tokens) == tuple(second.tokens) and bool(np.array_equal(*probs))  # also of None


@attrs.define(kw_only=True)
class ScriptedSession:
    """One sequence: its tokens, its state, its drafter. Hidden states and the MTP head are there only as declared.

    Attributes:
        tokens: those that the sequence begins with, which ``copied`` holds.
        copied: the target's copied state; None: an empty one.
        saved: the drafter's part of the copy, if it is handed on.
        faults: the first fault by clause.
        drafts: every draft that was handed over, and a copy of it.
        reports: every report that was asked for, and its JSON at that time.
    """

    subject: PluginSubject
    model: ForwardPass = attrs.Factory(lambda self: target_for(self.subject), takes_self=True)
    sampling: Sampling = attrs.field(factory=Sampling)
    noise: DraftNoise = DraftNoise.COUPLED
    generated_from: int = 0
    shared: Any = attrs.Factory(lambda self: self.subject.prepare(self.model), takes_self=True)
    faults: Faults = attrs.field(factory=Faults)
    tokens: list[int] = attrs.field(factory=list)
    copied: Snapshot | None = None
    saved: DrafterSnapshot | None = None
    state: State = attrs.field(init=False)
    drafter: Drafter = attrs.field(init=False)
    cycles: int = attrs.field(init=False, default=0)
    drafts: list[tuple[Draft, Draft]] = attrs.field(init=False, factory=list)
    reports: list[tuple[Any, str]] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        model, needs = self.model, self.subject.needs
        self.state = model.new_state(CAPACITY, needs) if self.copied is None else model.restore(self.copied, needs)
        self.drafter = self.subject.make(
            DrafterEnv(target=model, state=self.state, shared=self.shared, saved=self.saved)
        )

    def another(
        self, tokens: Sequence[int] = (), copied: Snapshot | None = None, saved: DrafterSnapshot | None = None
    ) -> ScriptedSession:
        """Another sequence of the same pipeline: empty, or over a copied state, with or without the drafter's own."""
        return attrs.evolve(self, tokens=list(tokens), copied=copied, saved=saved)

    # --- what is noted --------------------------------------------------------------------------------------------

    def _ask(self, method: str, context: Context, *arguments: Any) -> Any:
        """Call the drafter; its context, its settings and the committed state must stay as they are (D2, D12)."""

        def now() -> tuple[tuple[object, ...], tuple[object, ...]]:
            settings = dict(context.sampling.logit_bias), context.cycle, context.generated_from
            return (context[:], *settings), (self.state.length, getattr(self.state, "provisional", None))

        (view, held), answer = now(), getattr(self.drafter, method)(*arguments)
        (view_after, held_after), note = now(), self.faults.note
        note("D2", view_after == view, f"{method} changed the context", got=view_after, expected=view)
        what = f"{method} ran a pass over the state of its sequence, or changed it"
        note("D12", held_after == held, what, got=f"{held_after[0]} tokens", expected=f"{held[0]} tokens")
        return answer

    def _looked_at(self, draft: Any, depth: int) -> Draft:
        """The draft as the engine verifies it; the form of the draft (D1) and of its distributions (D9) is noted."""
        vocab, note, usable = self.model.info.vocab_size, self.faults.note, Draft()
        note("D1", isinstance(draft, Draft), "propose does not return a Draft", got=draft)
        note("D1", isinstance(draft.tokens, tuple), "the draft tokens are not a tuple", got=draft.tokens)
        for token in draft.tokens:
            note("D1", type(token) is int, "a token is no plain int", got=f"{token!r} of type {type(token).__name__}")
        try:
            usable, fault = checked_draft(draft, depth, vocab, self.context())
            note("D1", not fault, fault, got=draft.tokens, expected=f"{depth} tokens below {vocab}")
        except ContractError as error:
            note("D9", False, error.message, got=draft.probs)
        if draft.probs is not None:
            probs, form = np.asarray(draft.probs), (len(draft.tokens), vocab)
            proper, got = probs.shape == form and probs.dtype == np.float32, f"{probs.dtype} {probs.shape}"
            note("D9", proper, "probs has another shape or dtype", got=got, expected=form)
        return usable

    # --- the calls of the engine ----------------------------------------------------------------------------------

    def context(self, upto: int | None = None) -> Context:
        """A context over a copy of the tokens, so that a drafter's writes change nothing here."""
        return Context(
            self.tokens[:upto],
            self.sampling,
            generated_from=self.generated_from,
            cycle=self.cycles,
            draft_noise=self.noise,
        )

    def feed(self, tokens: Sequence[int], chunk: int = CAPACITY) -> None:
        """Append tokens; all but the last run through target and drafter, in chunks."""
        self.tokens += tokens
        while self.state.length < len(self.tokens) - 1:
            at = self.state.length
            part = self.tokens[at : min(at + chunk, len(self.tokens) - 1)]
            output = self.model.prefill(self.state, part)
            context = self.context(at + len(part))
            self._ask("prefill", context, context, output)

    def propose(self, depth: int) -> Draft:
        """Begin a cycle and return the draft as the engine verifies it."""
        self.cycles += 1
        context = self.context()
        draft: Draft = self._ask("propose", context, context, depth)
        usable = self._looked_at(draft, depth)
        self.drafts.append((draft, Draft(draft.tokens, None if draft.probs is None else np.array(draft.probs))))
        return usable

    def finish(self, draft: Draft, accepted: int, next_token: int) -> None:
        """End the cycle with this outcome: decode, commit, observe."""
        drafted = draft.tokens
        accepted = min(accepted, len(drafted))
        if accepted < len(drafted) and next_token == drafted[accepted]:
            next_token = (next_token + 1) % self.model.info.vocab_size  # not the rejected token
        output = self.model.decode(self.state, [self.tokens[-1], *drafted])
        self.model.commit(self.state, accepted + 1)
        self.tokens += [*drafted[:accepted], next_token]
        rows, context = output.need_logits().rows(), self.context()
        before = rows.copy()
        self._ask("observe", context, Verdict(accepted, next_token), output, context)
        self.faults.note("D19", np.array_equal(rows, before), "the logits of a pass were changed", expected=before)

    def cycle(self, depth: int, accepted: int, next_token: int, cut: int | None = None) -> Draft:
        """Run a whole cycle; at depth 0 the drafter is not asked. ``cut``: the engine shortens the draft."""
        draft = Draft()
        if depth == 0:
            self.cycles += 1
        else:
            draft = self.propose(depth)
            draft = Draft(draft.tokens[:cut], None if draft.probs is None else draft.probs[:cut])
        self.finish(draft, accepted, next_token)
        return draft

    def report(self) -> None:
        """Ask for the drafter's report (D18)."""
        report = self.drafter.report()
        try:
            self.reports.append((report, json.dumps(dict(report), allow_nan=False)))
        except (TypeError, ValueError, RecursionError) as error:
            self.faults.note("D18", False, f"the report is not plain JSON data: {error}", got=report)

    def rewind(self, length: int) -> None:
        """Go back to the first ``length`` tokens, as a session does."""
        del self.tokens[length:]
        if self.state.length > max(length - 1, 0):
            reached = self.model.rewind(self.state, max(length - 1, 0))
            self._ask("rewind", self.context(), reached)

    def keep(self) -> tuple[Snapshot, DrafterSnapshot | None]:
        """Copy the states that a session copies, in the same order."""
        copied, context = self.model.snapshot(self.state), self.context()
        saved = self._ask("snapshot", context, context)
        if saved is not None:
            kind, what = isinstance(saved, DrafterSnapshot), "snapshot returns neither a DrafterSnapshot nor None"
            self.faults.note("D17", kind, what, got=saved)
            for name, value in saved.meta.items():
                plain = type(name) is str and type(value) in (int, str)
                self.faults.note("D17", plain, "metadata is no plain int or str", got=f"{name} = {value!r}")
        return copied, saved

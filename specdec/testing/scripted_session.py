"""``ScriptedSession``: a sequence of the engine, with outcomes chosen by a check.

What its drafter answers is looked at: a fault is noted under its clause, and the session goes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np

from specdec.contract import Context, Draft, DrafterEnv, DrafterSnapshot, ForwardPass, Snapshot, Verdict, run_passes
from specdec.decoding.cycle import cycle
from specdec.decoding.result import RunStats
from specdec.decoding.sequence import LiveSequence, prefill
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


class ScriptedSession(LiveSequence):
    """One sequence over a table, or over a copied state. Hidden states and the MTP head are there only as declared.

    Args:
        context: the tokens that it begins with, and its settings.
        shared: what the drafters of the pipeline have in common, if it is there already.
        copied: the target's copied state, which holds those tokens; None: an empty one.
        saved: the drafter's part of the copy, if it is handed on.

    Attributes:
        faults: the first fault by clause.
        drafts: every draft that was handed over, and a copy of it.
        reports: every report that was asked for, and its JSON at that time.
    """

    def __init__(
        self,
        subject: PluginSubject,
        model: ForwardPass | None = None,
        context: Context = Context([]),  # noqa: B008  (never changed)
        *,
        shared: Any = None,
        faults: Faults | None = None,
        copied: Snapshot | None = None,
        saved: DrafterSnapshot | None = None,
    ) -> None:
        self.subject, self.faults = subject, Faults() if faults is None else faults
        self.drafts: list[tuple[Draft, Draft]] = []
        self.reports: list[tuple[Any, str]] = []
        model, needs, tokens = model or target_for(subject), subject.needs, list(context)
        state = model.new_state(CAPACITY, needs) if copied is None else model.restore(copied, needs)
        self.shared = subject.prepare(model) if shared is None else shared
        verifier: Any = SimpleNamespace(verify=lambda *_: self._verdict)
        super().__init__(
            target=model,
            state=state,
            drafter=subject.make(DrafterEnv(target=model, state=state, shared=self.shared, saved=saved)),
            verifier=verifier,
            tokens=tokens,
            context=attrs.evolve(context, tokens=tokens),
        )

    def another(self, tokens: Sequence[int] = (), **copy: Any) -> ScriptedSession:
        """Another sequence of the same pipeline: empty, or over a copied state, with or without the drafter's own."""
        context, model = attrs.evolve(self.context, tokens=list(tokens)), self.target
        return ScriptedSession(self.subject, model, context, shared=self.shared, faults=self.faults, **copy)

    # --- what is noted --------------------------------------------------------------------------------------------

    def ask(self, method: str, *arguments: Any, otherwise: Any = None) -> Any:
        """Call the drafter, whose errors are not caught; the form of a snapshot (D17) is noted."""
        answer, note = getattr(self.drafter, method)(*arguments), self.faults.note
        if method == "snapshot" and answer is not None:
            kind, what = isinstance(answer, DrafterSnapshot), "snapshot returns neither a DrafterSnapshot nor None"
            note("D17", kind, what, got=answer)
            for name, value in answer.meta.items():
                plain = type(name) is str and type(value) in (int, str)
                note("D17", plain, "metadata is no plain int or str", got=f"{name} = {value!r}")
        return answer

    def _looked_at(self, draft: Any, depth: int) -> Draft:
        """The draft as the engine verifies it; the form of the draft (D1) and of its distributions (D9) is noted."""
        vocab, note, usable = self.target.info.vocab_size, self.faults.note, Draft()
        note("D1", isinstance(draft, Draft), "propose does not return a Draft", got=draft)
        note("D1", isinstance(draft.tokens, tuple), "the draft tokens are not a tuple", got=draft.tokens)
        for token in draft.tokens:
            note("D1", type(token) is int, "a token is no plain int", got=f"{token!r} of type {type(token).__name__}")
        try:
            usable, fault = checked_draft(draft, depth, vocab, self.context)
            note("D1", not fault, fault, got=draft.tokens, expected=f"{depth} tokens below {vocab}")
        except ContractError as error:
            note("D9", False, error.message, got=draft.probs)
        if draft.probs is not None:
            probs, form = np.asarray(draft.probs), (len(draft.tokens), vocab)
            proper, got = probs.shape == form and probs.dtype == np.float32, f"{probs.dtype} {probs.shape}"
            note("D9", proper, "probs has another shape or dtype", got=got, expected=form)
        return usable

    def report(self) -> None:
        """Ask for the drafter's report (D18)."""
        report = self.drafter.report()
        try:
            self.reports.append((report, json.dumps(dict(report), allow_nan=False)))
        except (TypeError, ValueError, RecursionError) as error:
            self.faults.note("D18", False, f"the report is not plain JSON data: {error}", got=report)

    # --- the calls of the engine ----------------------------------------------------------------------------------

    def feed(self, tokens: Sequence[int], chunk: int = CAPACITY) -> None:
        """Append tokens, so many at a time; all but the last run through target and drafter."""
        for at in range(0, len(tokens) or 1, chunk):
            self.tokens += tokens[at : at + chunk]
            prefill(self, RunStats())

    def propose(self, depth: int) -> Draft:
        """Begin a cycle and return the draft as the engine verifies it."""
        self.context.cycle = self.stats.cycles + 1
        draft: Draft = self.ask("propose", self.context, depth)
        usable = self._looked_at(draft, depth)
        self.drafts.append((draft, Draft(draft.tokens, None if draft.probs is None else np.array(draft.probs))))
        return usable

    def finish(self, drafted: tuple[int, ...], accepted: int, next_token: int) -> None:
        """End the cycle with this outcome."""
        accepted = min(accepted, len(drafted))
        if accepted < len(drafted) and next_token == drafted[accepted]:
            next_token = (next_token + 1) % self.target.info.vocab_size  # not the rejected token
        self._verdict = Verdict(accepted, next_token)
        run_passes(cycle(self, 0, len, RunStats(), drafted))

    def cycle(self, depth: int, accepted: int, next_token: int, cut: int | None = None) -> tuple[int, ...]:
        """Run a whole cycle; returns its draft, which the engine shortens to ``cut``. At depth 0 none is asked for."""
        drafted = self.propose(depth).tokens[:cut] if depth else ()
        self.finish(drafted, accepted, next_token)
        return drafted

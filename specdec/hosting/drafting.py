"""Drafts for a host: safe to verify, counted, and never an exception.

Whatever a drafter does, the host gets a list of at most ``depth`` token ids of its vocabulary for every row. A drafter
that raises is switched off for its session; one that fails in most sessions, for good. Time is watched too: while
drafting takes longer than the passes it can save, it pauses. Each reason is logged once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import attrs
import numpy as np

from specdec.config import Choice, RunConfig, TargetConfig
from specdec.contract import (
    EMPTY_DRAFT,
    Context,
    Draft,
    Drafter,
    ForwardOutput,
    ForwardPass,
    ModelInfo,
    Needs,
    PrepareEnv,
    Stats,
    Verdict,
)
from specdec.decoding.parts import DrafterPart
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hosting.engines import HostState, HostTarget
from specdec.hosting.sessions import HostSession, HostSessions
from specdec.hosting.traces import TraceWriter
from specdec.logs import get_logger
from specdec.models.loading import load_target
from specdec.registry import Switch, answers, registry

log = get_logger(__name__)

FAILED_SESSIONS = 3  # sessions, at least, in which a drafter must fail before it is off in all
LOOK_EVERY = 64  # calls between two looks at the time that drafting took
PAUSE = 1024  # calls without drafts after it did not pay
SESSIONS = 256


@attrs.define
class Costs:
    """Seconds that drafting took and that it can have saved at most, since the last look.

    An accepted token saves its row's share of a pass: the host's time between two calls, divided by the rows.
    """

    clock: Callable[[], float] = perf_counter
    drafting: float = 0.0
    saved: float = 0.0
    calls: int = 0
    paused: int = 0  # calls that are left without drafts
    _ended: float | None = None

    def begin(self, accepted: int, rows: int) -> float:
        """A call begins, in which the host reports ``accepted`` tokens of earlier drafts; returns the time."""
        now = self.clock()
        if self._ended is not None and rows:
            self.saved += accepted * (now - self._ended) / rows
        return now

    def end(self, began: float) -> str:
        """The call ends; returns why drafting should pause, or an empty string."""
        self._ended = self.clock()
        self.drafting += self._ended - began
        self.calls += 1
        if self.calls < LOOK_EVERY:
            return ""
        drafting, saved = self.drafting, self.saved
        self.calls, self.drafting, self.saved = 0, 0.0, 0.0
        if drafting <= saved:
            return ""
        self.paused = PAUSE
        return (
            f"drafting took {drafting:.3g} s in {LOOK_EVERY} calls and saved {saved:.3g} s at most: "
            f"no drafts in the next {PAUSE} calls"
        )


@attrs.define(eq=False)
class Hosted:
    """What belongs to one session: its drafter, and the draft that the host verifies."""

    context: Context
    drafter: Drafter | None
    switch: Switch
    at: int = 0  # committed tokens before the draft
    draft: tuple[int, ...] = ()
    request: int | None = None  # its number in the trace


class HostedDrafter:
    """One drafter for all requests of a host.

    Args:
        choice: the drafter and its options.
        info: what the host gives (``host_info``).
        tokenizer: the target's ``specdec.text.Tokenizer``, for drafters with a model of their own.
        sessions: requests that are remembered at the same time; at least those that the host decodes together.
        trace: records every request.
        pausing: whether drafting pauses while it takes longer than it saves.
        clock: for the costs.

    Attributes:
        stats: acceptance counters over all requests, derived from the histories.
        faults: what had to be cut from drafts, and how often.
        off: why nothing is drafted any more; empty while it is.

    Raises: UnsupportedError, with the reason, for a drafter that needs what the host does not give; and the errors of
        an unknown name, wrong options or a model that cannot be loaded.
    """

    def __init__(
        self,
        choice: Choice,
        info: ModelInfo,
        *,
        tokenizer: Any = None,
        target: ForwardPass | None = None,
        sessions: int = SESSIONS,
        trace: TraceWriter | None = None,
        pausing: bool = True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.info = info
        self._target = HostTarget(info) if target is None else target
        self._part = hosted_part(choice, self._target, tokenizer)
        self._part.make(self._target, HostState([], info.max_positions))  # one that cannot start is refused at once
        self._trace = trace
        self._pausing = pausing
        self._sessions = HostSessions(sessions, self._new, self._ended)
        self.costs = Costs(clock)
        self.stats = Stats()
        self.faults: dict[str, int] = {}
        self.pauses = 0
        self.asked = 0  # calls of ``draft``
        self.off = ""
        self._failed: dict[str, int] = {}  # sessions that a drafter failed in, by reason

    @property
    def needs(self) -> Needs:
        """What the drafter needs of the host."""
        return self._part.needs

    @property
    def name(self) -> str:
        """The drafter's name."""
        return self._part.spec.name

    def draft(self, histories: Sequence[Any], depth: int | Sequence[int]) -> list[list[int]]:
        """Drafts for the rows of a batch: at most ``depth`` ids each, all of the vocabulary; ``[]`` is no opinion.

        Args:
            histories: all committed tokens of each row, as a sequence or an array of integers; None or an empty one for
                a row that wants no draft. They are copied.
            depth: for all rows, or for each.
        """
        self.asked += 1
        depths = [depth] * len(histories) if isinstance(depth, int) else list(depth)
        if self.off:
            return [[] for _ in histories]
        if self.costs.paused:
            self.costs.paused -= 1
            return [[] for _ in histories]
        began: float | None = None
        drafts: list[list[int]] = [[] for _ in histories]
        try:
            rows = [None if history is None or not len(history) else _array(history) for history in histories]
            found = self._sessions.find(rows)
            accepted = 0
            for session, row in zip(found, rows, strict=True):
                if session is not None and row is not None:
                    accepted += self._follow(session, row)
            began = self.costs.begin(accepted, sum(one is not None for one in found))
            for number, (session, asked) in enumerate(zip(found, depths, strict=True)):
                if session is not None:
                    drafts[number] = self._drafted(session, asked)
        except Exception as error:  # noqa: BLE001 - a host must not end, whatever happens here
            self._switch_off(f"drafting failed: {type(error).__name__}: {error}")
            return [[] for _ in histories]
        reason = self.costs.end(began)
        if reason and self._pausing:
            self.pauses += 1
            log.warning("speculation_paused", host=self.info.family, drafter=self.name, reason=reason)
        elif reason:
            self.costs.paused = 0
        return drafts

    def one(self, history: Any, depth: int) -> list[int]:
        """``draft`` for a host that decodes one request at a time."""
        return self.draft([history], depth)[0]

    def passed(
        self, history: Sequence[int], output: ForwardOutput, accepted: int, prompt: ForwardOutput | None = None
    ) -> None:
        """A pass of a host that gives hidden states and decodes one request at a time; called before ``one``.

        Args:
            history: all committed tokens, those of this pass included.
            output: its rows: the token that was pending, and the draft.
            accepted: how many draft tokens the host kept.
            prompt: the rows before them, of the first pass, which takes in the prompt.
        """
        if self.off:
            return
        try:
            row = _array(history)
            (session,) = self._sessions.find([row])
            assert session is not None
            self._follow(session, row)
            own = session.own
            if own.drafter is None:
                return
            if prompt is not None:
                own.switch.call(own.drafter, "prefill", Context(session.tokens[: prompt.rows]), prompt)
            verdict = Verdict(accepted, session.tokens[-1])
            own.switch.call(own.drafter, "observe", verdict, output, own.context)
            if own.switch.failure:
                self._count_failure(own.switch.failure)
        except Exception as error:  # noqa: BLE001 - as in draft
            self._switch_off(f"drafting failed: {type(error).__name__}: {error}")

    def forget(self) -> None:
        """End all sessions: the host begins a text anew, with new passes over its beginning."""
        self._sessions.close()

    def report(self) -> dict[str, Any]:
        """What was counted, as plain JSON data."""
        return {
            "host": self.info.family,
            "drafter": self.name,
            "sessions": self._sessions.begun,
            "drafts": self.stats.cycles,
            "tokens": self.stats.tokens,
            "offered": list(self.stats.offered),
            "reached": list(self.stats.reached),
            "accepted": list(self.stats.accepted),
            "faults": dict(self.faults),
            "failed": dict(self._failed),
            "pauses": self.pauses,
            "off": self.off,
        }

    def close(self) -> None:
        """End all sessions and the trace."""
        self._sessions.close()
        if self._trace is not None:
            self._trace.close()

    # --- one session ------------------------------------------------------------------------------------------------

    def _new(self, session: HostSession[Hosted]) -> Hosted:
        context = Context(session.tokens)
        state = HostState(session.tokens, self.info.max_positions)
        switch = Switch(registry().guard(self._part.spec))
        drafter: Drafter | None = None
        try:
            drafter = self._part.make(self._target, state)
        except SpecdecError as error:
            switch.fail(error.message)
            self._count_failure(switch.failure)
        return Hosted(context, drafter, switch)

    def _ended(self, session: HostSession[Hosted]) -> None:
        if self._trace is not None and session.own.request is not None:
            self._trace.end(session.own.request)

    def _follow(self, session: HostSession[Hosted], history: Any) -> int:
        """Bring the session to ``history``; returns how many tokens of its last draft were accepted."""
        own, before = session.own, len(session)
        kept = session.follow(history)
        if kept < before:
            if self._trace is not None and own.request is not None:
                self._trace.rewind(own.request, kept)
            if own.drafter is not None:
                own.switch.call(own.drafter, "rewind", max(kept - 1, 0))
        new = session.tokens[kept:]
        if self._trace is not None:
            if own.request is None:
                own.request = self._trace.begin(new)
            elif new:
                self._trace.commit(own.request, new)
        if own.draft and kept >= own.at and len(session) > own.at:
            following = session.tokens[own.at : own.at + len(own.draft)]
            accepted = next(
                (i for i, (ours, theirs) in enumerate(zip(own.draft, following, strict=False)) if ours != theirs),
                len(following),
            )
            self.stats.count(len(own.draft), accepted)
            own.draft = ()
            return accepted
        return 0

    def _drafted(self, session: HostSession[Hosted], depth: int) -> list[int]:
        own = session.own
        vocab = self.info.vocab_size
        room = self.info.max_positions - len(session) - 1
        depth = max(min(depth, room), 0)
        drafted: tuple[int, ...] = ()
        if own.drafter is not None and not own.switch.failure and depth:
            check = functools.partial(answers.draft, asked=depth, vocab_size=vocab, honest=False)
            count = len(session)
            draft: Draft = own.switch.call(
                own.drafter, "propose", own.context, depth, check=check, otherwise=EMPTY_DRAFT
            )
            if len(session.tokens) != count:
                del session.tokens[count:]
                own.switch.fail(f"{own.switch.guard} changed the tokens of its sequence, in propose")
            elif not own.switch.failure:
                drafted = self._usable(draft.tokens, depth)
            if own.switch.failure:
                self._count_failure(own.switch.failure)
        own.at, own.draft = len(session), drafted
        self.stats.cycles += 1
        self.stats.tokens += len(drafted)
        if self._trace is not None and own.request is not None:
            self._trace.draft(own.request, len(session), depth, drafted)
        return list(drafted)

    def _usable(self, tokens: Sequence[int], depth: int) -> tuple[int, ...]:
        """The part of a draft that a host can verify."""
        if len(tokens) > depth:
            self._fault("draft longer than asked for")
        kept = tuple(itertools.takewhile(lambda token: 0 <= token < self.info.vocab_size, tokens[:depth]))
        if len(kept) < min(len(tokens), depth):
            self._fault("draft token outside the vocabulary")
        return kept

    def _fault(self, what: str) -> None:
        if what not in self.faults:
            log.warning("draft_cut", host=self.info.family, drafter=self.name, reason=what)
        self.faults[what] = self.faults.get(what, 0) + 1

    def _count_failure(self, reason: str) -> None:
        self._failed[reason] = self._failed.get(reason, 0) + 1
        failed = sum(self._failed.values())
        if failed >= FAILED_SESSIONS and 2 * failed > self._sessions.begun:
            self._switch_off(f"it failed in {failed} of {self._sessions.begun} requests; the last time: {reason}")

    def _switch_off(self, reason: str) -> None:
        self.off = reason
        log.warning("speculation_switched_off", host=self.info.family, drafter=self.name, reason=reason)


def _array(history: Any) -> Any:
    return np.array(history, dtype=np.int64)  # a copy: hosts hand out views of their buffers


def named_part(choice: Choice, info: ModelInfo) -> DrafterPart:
    """The drafter that ``choice`` names, not prepared: name, options and what it always needs are checked.

    Raises: as ``HostedDrafter``.
    """
    part = DrafterPart.of(choice)
    static = part.spec.needs
    if not callable(static):
        _check(part, static, info)
    return part


def hosted_part(choice: Choice, target: ForwardPass, tokenizer: Any = None) -> DrafterPart:
    """The prepared drafter that ``choice`` names. Raises: as ``HostedDrafter``."""

    def load(asked: TargetConfig) -> tuple[ForwardPass, Any]:
        loaded = load_target(RunConfig(target=asked))
        return loaded.target, loaded.tokenizer

    part = named_part(choice, target.info).prepared(PrepareEnv(target=target, tokenizer=tokenizer, load=load))
    _check(part, part.needs, target.info)
    return part


def _check(part: DrafterPart, needs: Needs, info: ModelInfo) -> None:
    unmet = "an MTP head, which no host gives to a drafter" if needs.mtp and not info.mtp_layers else needs.unmet(info)
    if unmet is not None:
        raise UnsupportedError(
            f"the drafter {part.spec.name!r} cannot run in {info.family}: it needs {unmet}",
            try_="a drafter that needs tokens only: suffix, ngram, draft_model, or first_of with them",
        )

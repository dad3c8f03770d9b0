"""Drafts for a host: safe to verify and counted; an exception of a drafter never reaches it.

A host gets at most ``depth`` token ids of its vocabulary for every row. A drafter that raises is switched off for its
session; one that fails in most sessions, for good. While drafting takes longer than the passes it can save, it pauses.
Each reason is logged once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import attrs
import numpy as np

from specdec.config import Choice, RunConfig, TargetConfig
from specdec.contract import Context, Drafter, ForwardOutput, ModelInfo, Needs, PrepareEnv, Stats, Verdict
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hosting.choosing import chosen_pausing
from specdec.hosting.engines import HostState, HostTarget, host_info
from specdec.hosting.sessions import HostSession, HostSessions
from specdec.hosting.traces import Round, TracedRequest, TraceWriter
from specdec.logs import get_logger
from specdec.models.loading import load_target
from specdec.registry import checked_draft
from specdec.registry.parts import DrafterPart
from specdec.text.tokenizer import common_prefix

log = get_logger(__name__)
T = TypeVar("T")

FAILED_SESSIONS = 3  # sessions, at least, in which a drafter must fail before it is off in all
LOOK_EVERY = 64  # calls between two looks at the time that drafting took
PAUSE = 1024  # calls without drafts after it did not pay
SESSIONS = 256


@attrs.define
class _Pauses:
    """Compares the seconds that drafting took with what it can have saved at most.

    An accepted token saves its row's share of a pass: the host's time between two calls, divided by the rows.
    """

    clock: Callable[[], float]
    pausing: bool
    drafting: float = 0.0
    saved: float = 0.0
    calls: int = 0
    left: int = 0  # calls without drafts
    _ended: float | None = None

    def begin(self, accepted: int, rows: int) -> float:
        """A call begins, in which the host reports ``accepted`` tokens of earlier drafts; returns the time."""
        now = self.clock()
        if self._ended is not None and rows:
            self.saved += accepted * (now - self._ended) / rows
        return now

    def end(self, began: float) -> str:
        """The call ends; returns why a pause begins, or an empty string."""
        self._ended = self.clock()
        self.drafting += self._ended - began
        self.calls += 1
        if self.calls < LOOK_EVERY or not self.pausing:
            return ""
        drafting, saved = self.drafting, self.saved
        self.calls, self.drafting, self.saved = 0, 0.0, 0.0
        if drafting <= saved:
            return ""
        self.left, self._ended = PAUSE, None  # the pause saves nothing
        return (
            f"drafting took {drafting:.3g} s in {LOOK_EVERY} calls and saved {saved:.3g} s at most: "
            f"no drafts in the next {PAUSE} calls"
        )


class _Request(HostSession):
    """A session with its drafter, and the draft that the host verifies."""

    def __init__(self, part: DrafterPart, target: HostTarget) -> None:
        super().__init__()
        self.context = Context(self.tokens)
        self.failure = ""  # why its drafter is off
        self.drafter: Drafter | None = None
        try:
            self.drafter = part.make(target, HostState(self.tokens, target.info.max_positions))
        except SpecdecError as error:
            self.failure = error.message
        self.drafted_at = 0  # committed tokens before the draft
        self.draft: tuple[int, ...] = ()
        self.number: int | None = None  # in the trace


class HostedDrafter:
    """One drafter for all requests of a host.

    Args:
        choice: the drafter and its options.
        info: what the host gives (``host_info``).
        tokenizer: the target's ``specdec.text.Tokenizer``, for drafters with a model of their own.
        sessions: requests that are remembered at the same time; at least those that the host decodes together.
        trace: a file to record every request in.
        model: what the trace calls the target.
        pausing: whether drafting pauses while it takes longer than it saves; the environment decides if None.
        clock: for the pauses.

    Attributes:
        stats: acceptance counters over all requests, derived from the histories.
        faults: what had to be cut from drafts, and how often.
        failed: sessions in which the drafter failed, by reason.
        off: why nothing is drafted any more; empty while it is.
        asked: calls of ``draft``.
        pauses: how often drafting paused.

    Raises: UnsupportedError, with the reason, for a drafter that needs what the host does not give; and the errors of
        an unknown name, wrong options, a model that cannot be loaded or a trace that cannot be written.
    """

    def __init__(
        self,
        choice: Choice,
        info: ModelInfo,
        *,
        tokenizer: Any = None,
        sessions: int = SESSIONS,
        trace: str | Path | None = None,
        model: str = "",
        pausing: bool | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.info = info
        self._target = HostTarget(info)
        env = PrepareEnv(target=self._target, tokenizer=tokenizer, load=_second_model)
        self._part = named_part(choice, info).prepared(env)
        _check(self._part, self._part.needs, info)
        self._part.make(self._target, HostState([], info.max_positions))  # one that cannot start is refused at once
        self._sessions = HostSessions(sessions, self._new)
        self._pauses = _Pauses(clock, chosen_pausing() if pausing is None else pausing)
        self.stats = Stats()
        self.faults: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.off = ""
        self.asked = 0
        self.pauses = 0
        self._trace: TraceWriter | None = None
        if trace is not None:
            self._trace = TraceWriter(trace, host=info.family, drafter=choice, vocab_size=info.vocab_size, model=model)

    @property
    def needs(self) -> Needs:
        """What the drafter needs of the host."""
        return self._part.needs

    @property
    def paused(self) -> bool:
        """Whether drafting pauses now, because it took longer than it saved."""
        return self._pauses.left > 0

    @property
    def name(self) -> str:
        """The drafter's name."""
        return self._part.spec.name

    def draft(self, histories: Sequence[Any], depth: int) -> list[list[int]]:
        """Drafts for the rows of a batch: at most ``depth`` ids each, all of the vocabulary; ``[]`` is no opinion.

        Args:
            histories: all committed tokens of each row, as a sequence or an array of integers; None or an empty one for
                a row that wants no draft. They are copied.
            depth: for every row.
        """
        self.asked += 1
        drafts: list[list[int]] = [[] for _ in histories]
        if self.off:
            return drafts
        if self.paused:
            self._pauses.left -= 1
            return drafts
        rows = [None if history is None or not len(history) else _array(history) for history in histories]
        sessions = self._sessions.find(rows)
        accepted = sum(
            self._follow(session, row)
            for session, row in zip(sessions, rows, strict=True)
            if session is not None and row is not None
        )
        began = self._pauses.begin(accepted, sum(session is not None for session in sessions))
        for number, session in enumerate(sessions):
            if session is not None:
                drafts[number] = self._propose(session, depth)
        if reason := self._pauses.end(began):
            self.pauses += 1
            log.warning("speculation_paused", host=self.info.family, drafter=self.name, reason=reason)
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
        row = _array(history)
        (session,) = self._sessions.find([row])
        assert session is not None
        self._follow(session, row)
        if prompt is not None:
            context = Context(session.tokens[: prompt.rows])
            self._call(session, "prefill", lambda drafter: drafter.prefill(context, prompt))
        verdict = Verdict(accepted, session.tokens[-1])
        self._call(session, "observe", lambda drafter: drafter.observe(verdict, output, session.context))

    def forget(self) -> None:
        """End all sessions: the host begins a text anew, with new passes over its beginning."""
        self._sessions.close()

    def report(self) -> dict[str, Any]:
        """What was counted, as plain JSON data."""
        counters = attrs.asdict(self.stats)
        return {
            "host": self.info.family,
            "drafter": self.name,
            "sessions": self._sessions.begun,
            "drafts": counters.pop("cycles"),
            **counters,
            "faults": dict(self.faults),
            "failed": dict(self.failed),
            "pauses": self.pauses,
            "paused": self.paused,
            "off": self.off,
        }

    def close(self) -> None:
        """End all sessions and the trace."""
        self._sessions.close()
        if self._trace is not None:
            self._trace.close()

    # --- one session ------------------------------------------------------------------------------------------------

    def _new(self) -> _Request:
        session = _Request(self._part, self._target)
        if session.failure:
            self._count_failure(session.failure)
        return session

    def _follow(self, session: _Request, history: Any) -> int:
        """Bring the session to ``history``; returns how many tokens of its last draft were accepted."""
        before = len(session)
        kept = session.follow(history)
        if kept < before:
            if self._trace is not None and session.number is not None:
                self._trace.rewind(session.number, kept)
            self._call(session, "rewind", lambda drafter: drafter.rewind(max(kept - 1, 0)))
        if self._trace is not None:
            new = session.tokens[kept:]
            if session.number is None:
                session.number = self._trace.begin(new)
            elif new:
                self._trace.commit(session.number, new)
        if not session.draft or kept < session.drafted_at or len(session) == session.drafted_at:
            return 0
        accepted = common_prefix(session.draft, session.tokens[session.drafted_at :])
        self.stats.count(len(session.draft), accepted)
        session.draft = ()
        return accepted

    def _propose(self, session: _Request, depth: int) -> list[int]:
        depth = max(min(depth, self.info.max_positions - len(session) - 1), 0)
        draft = self._call(session, "propose", lambda drafter: self._usable(session, drafter, depth)) if depth else ()
        session.drafted_at, session.draft = len(session), draft or ()
        self.stats.cycles += 1
        self.stats.tokens += len(session.draft)
        if self._trace is not None and session.number is not None:
            self._trace.draft(session.number, len(session), depth, session.draft)
        return list(session.draft)

    def _call(self, session: _Request, method: str, call: Callable[[Drafter], T]) -> T | None:
        """Call the session's drafter; None if it is off or fails now."""
        if session.drafter is not None and not session.failure:
            try:
                return call(session.drafter)
            except Exception as error:  # noqa: BLE001 - the host goes on without drafts
                session.failure = f"the drafter {self.name!r} failed in {method}: {type(error).__name__}: {error}"
                self._count_failure(session.failure)
        return None

    def _usable(self, session: _Request, drafter: Drafter, depth: int) -> tuple[int, ...]:
        """The part of the next draft that a host can verify."""
        draft = drafter.propose(session.context, depth)
        checked, fault = checked_draft(draft, depth, self.info.vocab_size, session.context)
        if fault and fault not in self.faults:
            log.warning("draft_cut", host=self.info.family, drafter=self.name, reason=fault)
        if fault:
            self.faults[fault] = self.faults.get(fault, 0) + 1
        return checked.tokens

    def _count_failure(self, reason: str) -> None:
        self.failed[reason] = self.failed.get(reason, 0) + 1
        failed = sum(self.failed.values())
        if failed >= FAILED_SESSIONS and 2 * failed > self._sessions.begun:
            self.off = f"it failed in {failed} of {self._sessions.begun} requests; the last time: {reason}"
            log.warning("speculation_switched_off", host=self.info.family, drafter=self.name, reason=self.off)


def _array(history: Any) -> Any:
    return np.array(history, dtype=np.int64)  # a copy: hosts hand out views of their buffers


def named_part(choice: Choice, info: ModelInfo) -> DrafterPart:
    """The drafter that ``choice`` names, not prepared: name, options and what it always needs are checked.

    Raises: as ``HostedDrafter``.
    """
    part = DrafterPart.of(choice)
    if not callable(part.spec.needs):
        _check(part, part.spec.needs, info)
    return part


def _second_model(asked: TargetConfig) -> tuple[Any, Any]:
    loaded = load_target(RunConfig(target=asked))
    return loaded.target, loaded.tokenizer


def _check(part: DrafterPart, needs: Needs, info: ModelInfo) -> None:
    unmet = "an MTP head, which no host gives to a drafter" if needs.mtp and not info.mtp_layers else needs.unmet(info)
    if unmet is not None:
        raise UnsupportedError(
            f"the drafter {part.spec.name!r} cannot run in {info.family}: it needs {unmet}",
            try_="a drafter that needs tokens only: suffix, ngram, draft_model, or first_of with them",
        )


# --- recorded traffic -------------------------------------------------------------------------------------------------


def recorded_drafter(choice: Choice | None, vocab_size: int, tokenizer: object = None) -> HostedDrafter:
    """A drafter for recorded traffic.

    Raises: UnsupportedError if it needs more than tokens, or ``choice`` is None because the trace names none; and as
        ``HostedDrafter``.
    """
    if choice is None:
        raise UnsupportedError("the trace names no drafter")
    info = host_info("recorded traffic", vocab_size, 2**31 - 1)
    return HostedDrafter(choice, info, tokenizer=tokenizer, sessions=1, pausing=False)


def replay(request: TracedRequest, drafter: HostedDrafter | None = None) -> list[tuple[Round, tuple[int, ...]]]:
    """Where the drafter drafts something else than was recorded, and what; empty if all drafts are the same.

    Args:
        drafter: the one that the trace names if None. It is asked as in the recording: at the same positions, for the
            same depths.
    """
    drafter = recorded_drafter(request.drafter, request.vocab_size) if drafter is None else drafter
    drafter.forget()
    tokens = (*request.prompt, *request.tokens)
    differing = []
    for drafting in request.rounds:
        if drafting.depth and drafting.position:
            drafted = tuple(drafter.one(tokens[: drafting.position], drafting.depth))
            if drafted != drafting.drafted:
                differing.append((drafting, drafted))
    return differing

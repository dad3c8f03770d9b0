"""Judge a drafter on recorded traffic: how many passes it would have saved.

Speculation with an exact verifier does not change what is generated. So specdec's engine can run over the recorded
tokens instead of a model: the drafts that agree with them are those that would have been accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from specdec.checking import checked
from specdec.config import Choice
from specdec.contract import Stats
from specdec.decoding.parts import DrafterPart
from specdec.errors import PromptError
from specdec.hosting import RecordedRun, RecordedTarget, hosted_part, read_trace


@attrs.frozen(kw_only=True)
class TrafficReport:
    """What a drafter would have done for recorded requests. Lists are indexed by lookahead position."""

    drafter: str
    depth: int
    hosts: tuple[str, ...]  # that recorded them
    done: int  # requests replayed
    planned: int  # those that generated at least one token
    tokens: int  # generated
    passes: int  # of the target with this drafter; without one there is a pass per token
    offered: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    draft_seconds: float  # that drafting took here
    failed: int  # requests in which the drafter was switched off
    reason: str  # of the first one
    cut_line: int  # the recording's last line, incomplete and left out; 0 if it is whole

    @property
    def saved(self) -> int:
        """Passes that are not needed."""
        return self.tokens - self.passes

    @property
    def tokens_per_pass(self) -> float | None:
        """Generated tokens per pass; None if nothing was replayed."""
        return self.tokens / self.passes if self.passes else None

    @property
    def partial(self) -> bool:
        """Whether the replay was interrupted."""
        return self.done < self.planned

    def to_dict(self) -> dict[str, Any]:
        """The object that ``accept --trace --json`` prints."""
        return {**attrs.asdict(self), "saved": self.saved, "tokens_per_pass": self.tokens_per_pass}


class TrafficReplay:
    """Replays the requests of a trace with one drafter; after ``stop`` the report covers the finished ones.

    Args:
        path: a trace.
        choice: the drafter; it may need tokens only, since a trace has nothing else.
        depth: tokens drafted per cycle, at most.
        tokenizer: for drafters with a model of their own.
        progress: called with finished and planned requests.

    Raises: PromptError for a file that is no trace or has no generated tokens; UnsupportedError for the drafter.
    """

    @checked()
    def __init__(
        self,
        path: str | Path,
        choice: Choice,
        *,
        depth: int = 4,
        tokenizer: Any = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        trace = read_trace(path)
        self._requests, self._cut = (
            [request for request in trace.requests if request.tokens and request.prompt],
            trace.cut,
        )
        if not self._requests:
            raise PromptError("the trace has no request that generated a token", file=path)
        self._choice, self._depth, self._tokenizer = choice, depth, tokenizer
        self._progress = progress or (lambda done, planned: None)
        self._parts: dict[int, DrafterPart] = {}
        for request in self._requests:  # fail before anything is replayed
            self._part(request.vocab_size)
        self.stopping = False

    def stop(self) -> None:
        """End early. Safe to call from a signal handler."""
        self.stopping = True

    def _part(self, vocab_size: int) -> DrafterPart:
        if vocab_size not in self._parts:
            self._parts[vocab_size] = hosted_part(self._choice, RecordedTarget([], vocab_size), self._tokenizer)
        return self._parts[vocab_size]

    def run(self) -> TrafficReport:
        """Replay."""
        stats, done, failures, seconds = Stats(), 0, [], 0.0
        for request in self._requests:
            if self.stopping:
                break
            run = RecordedRun(self._part(request.vocab_size), request.prompt, request.tokens, request.vocab_size)
            while run.left:
                cycle = run.cycle(min(self._depth, run.left - 1))
                stats.cycles += 1
                stats.count(cycle.offered, cycle.accepted)
                seconds += cycle.draft_seconds
            stats.tokens += len(request.tokens)
            failures += [run.failure] * bool(run.failure)
            done += 1
            self._progress(done, len(self._requests))
        return TrafficReport(
            drafter=self._choice.name,
            depth=self._depth,
            hosts=tuple(sorted({request.host for request in self._requests})),
            done=done,
            planned=len(self._requests),
            tokens=stats.tokens,
            passes=stats.cycles,
            **{name: tuple(getattr(stats, name)) for name in ("offered", "reached", "accepted")},
            draft_seconds=seconds,
            failed=len(failures),
            reason=failures[0] if failures else "",
            cut_line=self._cut,
        )

"""Judge a drafter on recorded traffic: how many passes it would have saved.

Speculation with an exact verifier does not change what is generated. So drafts can be compared with the recorded tokens
instead of a model's: those that agree would have been accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from specdec.checking import checked
from specdec.config import Choice
from specdec.contract import Stats
from specdec.errors import PromptError
from specdec.hosting import HostedDrafter, read_trace, recorded_drafter
from specdec.measuring.runs import Generations
from specdec.text.tokenizer import common_prefix


class TrafficReplay(Generations):
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
        self._requests = [request for request in trace.requests if request.tokens and request.prompt]
        self._cut = trace.cut
        if not self._requests:
            raise PromptError(
                "the trace has no request that generated a token",
                file=path,
                try_="a recording of specdec generate --trace, or of an engine with SPECDEC_TRACE",
            )
        self._choice, self._depth = choice, depth
        self._progress = progress or (lambda done, planned: None)
        self._drafters: dict[int, HostedDrafter] = {}
        for request in self._requests:  # fail before anything is replayed
            if (size := request.vocab_size) not in self._drafters:
                self._drafters[size] = recorded_drafter(choice, size, tokenizer)

    def run(self) -> dict[str, Any]:
        """Replay; returns what the drafter would have done, as plain JSON data.

        ``passes`` are those of the target with this drafter; without one there is a pass per token. ``draft_seconds``
        is what the replay took here, nearly all of it drafting. ``failed``: requests in which the drafter was switched
        off, with the ``reason`` of the first one. ``cut_line``: the recording's last line, if it is incomplete.
        """
        stats, done, failed, reason, tokens = Stats(), 0, 0, "", 0
        started = perf_counter()
        for request in self._requests:
            if self.stopping:
                break
            drafter = self._drafters[request.vocab_size]
            before = sum(drafter.failed.values())
            drafter.forget()
            history, left = list(request.prompt), list(request.tokens)
            while left:
                draft = drafter.one(history, min(self._depth, len(left) - 1))
                accepted = common_prefix(draft, left)
                history += left[: accepted + 1]
                del left[: accepted + 1]
                stats.cycles += 1
                stats.count(len(draft), accepted)
            tokens += len(request.tokens)
            failed += bool(drafter.off) or sum(drafter.failed.values()) > before
            reason = reason or next(iter(drafter.failed), "")
            done += 1
            self._progress(done, len(self._requests))
        return {
            "drafter": self._choice.name,
            "depth": self._depth,
            "hosts": sorted({request.host for request in self._requests}),
            "done": done,
            "planned": len(self._requests),
            "tokens": tokens,
            "passes": stats.cycles,
            "saved": tokens - stats.cycles,
            "tokens_per_pass": tokens / stats.cycles if stats.cycles else None,
            "offered": stats.offered,
            "reached": stats.reached,
            "accepted": stats.accepted,
            "draft_seconds": perf_counter() - started,
            "failed": failed,
            "reason": reason,
            "cut_line": self._cut,
        }

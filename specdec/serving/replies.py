"""Responses as OpenAI's API words them, from what a generation produces."""

from __future__ import annotations

import collections
import itertools
import secrets
import time
from collections.abc import Mapping
from typing import Any

from specdec.decoding.parts import Parts
from specdec.decoding.result import Result, TokenLogprobs
from specdec.serving.engine import Piece
from specdec.serving.page import PageCycles
from specdec.serving.requests import ChatRequest, Prepared, Request
from specdec.serving.tools import Splitter
from specdec.text import token_bytes

_REASONS = {"stop": "stop", "stop_string": "stop", "length": "length", "context": "length"}


class Reply:
    """The response to one request: text and log-probabilities are added as they come.

    Args:
        lm: the model.
        request: what the client wants.
        ready: the same, as the model takes it.
        model: the name of the model.
    """

    def __init__(self, lm: Parts, request: Request, ready: Prepared, model: str) -> None:
        self._lm = lm
        self._chat = isinstance(request, ChatRequest)
        self._top = request.top
        self._predicted = "prediction" in ready.settings
        self._splitter = Splitter(names=request.tool_names, thinking=ready.thinking)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": lm.info.fingerprint[:16],
        }
        self._shown = 0  # bytes of text so far
        self._spelled = 0  # bytes of the tokens in ``_pending`` and before it
        self._offset = 0  # characters of text before the next entry
        self._cycles = PageCycles(lm) if request.origins else None
        self._pending: collections.deque[tuple[int, TokenLogprobs, bytes]] = collections.deque()

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return [self._chunk({"role": "assistant", "content": ""}, None, None)] if self._chat else []

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a stream; nothing if there is nothing to show."""
        logprobs = self._logprobs(piece)
        content: Any = self._splitter.push(piece.text) if self._chat else piece.text
        if not content and not logprobs and not piece.cycles:
            return []
        chunk = self._chunk(content, logprobs, None)
        if self._cycles is not None:
            entries = iter(piece.logprobs)
            chunk["specdec"] = {
                "origins": [
                    self._cycles.add(cycle, list(itertools.islice(entries, len(cycle.emitted))))
                    for cycle in piece.cycles
                ]
            }
        return [chunk]

    def closing(self, result: Result, *, usage: bool) -> list[dict[str, Any]]:
        """What a stream ends with."""
        rest: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        if self._chat:
            rest, calls = self._splitter.finish()
        if calls:
            rest["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        last = self._chunk({} if self._chat else "", None, self._reason(result, calls))
        last["specdec"] = _speculation(result)
        chunks = [self._chunk(rest, None, None), last] if rest else [last]
        if usage:
            chunks.append({**self._head, "object": last["object"], "choices": [], "usage": self._usage(result)})
        return chunks

    def whole(self, piece: Piece, result: Result) -> dict[str, Any]:
        """The response in one piece."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        if self._top is not None:
            choice["logprobs"] = self._logprobs(piece) or self._entries([])
        calls: list[dict[str, Any]] = []
        if self._chat:
            shown = self._splitter.push(result.text)
            rest, calls = self._splitter.finish()
            content = shown.get("content", "") + rest.pop("content", "")
            choice["message"] = {"role": "assistant", "content": content, "refusal": None, **shown, **rest}
            choice["message"]["content"] = content or (None if calls else "")
            if calls:
                choice["message"]["tool_calls"] = calls
        else:
            choice["text"] = result.text
        choice["finish_reason"] = self._reason(result, calls)
        return {
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [choice],
            "usage": self._usage(result),
            "specdec": _speculation(result),
        }

    @staticmethod
    def _reason(result: Result, calls: list[dict[str, Any]]) -> str:
        return "tool_calls" if calls else _REASONS.get(result.finish_reason, "stop")

    def _usage(self, result: Result) -> dict[str, Any]:
        """Tokens of prompt and answer, and of the request's own prediction; drafts are in ``specdec`` instead."""
        stats, completion = result.stats, len(result.tokens)
        offered, accepted = stats.prediction_offered, stats.prediction_accepted
        if not self._predicted:  # they are those of a finished answer
            offered = accepted = 0
        return {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": result.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": max(result.prompt_tokens - 1 - stats.prefilled, 0)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": offered - accepted,
            },
        }

    def _chunk(self, content: Any, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta" if self._chat else "text": content, "logprobs": logprobs, "finish_reason": reason}
        return {
            **self._head,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": [choice],
        }

    # --- log-probabilities -------------------------------------------------------------------------------------------

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """The entries of the tokens whose text is shown by now: not those of a stop string, nor the end token's."""
        if self._top is None:
            return None
        self._shown += len(piece.text.encode())
        special = self._lm.tokenizer.special_ids
        for entry in piece.logprobs:
            spelled = b"" if entry.token in special else token_bytes(self._lm.tokenizer, entry.token)
            self._pending.append((self._spelled, entry, spelled))
            self._spelled += len(spelled)
        ready = []
        while self._pending and self._pending[0][0] < self._shown:
            ready.append(self._pending.popleft())
        return self._entries(ready) if ready else None

    def _entries(self, ready: list[tuple[int, TokenLogprobs, bytes]]) -> dict[str, Any]:
        if not self._chat:
            return self._completion_entries(ready)
        content = [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
            }
            for _, entry, _ in ready
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = token_bytes(self._lm.tokenizer, token)
        return {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled)}

    def _completion_entries(self, ready: list[tuple[int, TokenLogprobs, bytes]]) -> dict[str, Any]:
        tokens, offsets = [], []
        for _, _, spelled in ready:
            offsets.append(self._offset)
            tokens.append(spelled.decode(errors="replace"))
            self._offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for _, entry, _ in ready],
            "top_logprobs": [
                {self._token(token, 0.0)["token"]: logprob for token, logprob in entry.top} for _, entry, _ in ready
            ],
            "text_offset": offsets,
        }


def _speculation(result: Result) -> Mapping[str, Any]:
    """What specdec adds: how the answer was made, and what it promises."""
    stats = result.stats.to_dict()
    counted = ("cycles", "offered", "reached", "accepted", "tokens_per_second", "seconds", "speculation")
    return {
        **{name: getattr(result, name) for name in ("finish_reason", "guarantee", "parity", "notices")},
        "seed": result.generation.seed,
        "drafted_tokens": sum(result.stats.offered),
        "accepted_tokens": sum(result.stats.accepted),
        **{name: stats[name] for name in counted},
    }

"""Read the body of OpenAI's completions, as servers in use write it: with log-probabilities, or not at all.

The lists ``tokens``, ``token_logprobs`` and ``top_logprobs`` are OpenAI's; llama.cpp writes ``content``, the entries of
OpenAI's chat completions, here too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from specdec.errors import UnsupportedError, typed
from specdec.measuring.engines.engine import Answer, Step


def read_completion(body: Any, max_new_tokens: int) -> Answer:
    """The answer in a completion's body. Raises: UnsupportedError saying what is missing or wrong in it."""
    choices = _taken(body, "choices", list, "body")
    if len(choices) != 1:
        raise UnsupportedError(f"the answer takes one choice, got {len(choices)}")
    choice = choices[0]
    text = _taken(choice, "text", str, "choice")
    logprobs = choice.get("logprobs")
    if logprobs is None:
        raise UnsupportedError("the answer has no log-probabilities")
    if isinstance(logprobs, Mapping) and "content" in logprobs:
        entries = _taken(logprobs, "content", list, "logprobs")
        steps = tuple(_entry(entry) for entry in entries)
    else:
        steps = _lists(logprobs)
    if text and not steps:
        raise UnsupportedError("the answer has text and no log-probabilities")
    if not any(step.top for step in steps) and steps:
        raise UnsupportedError("the answer has no log-probabilities of other tokens than the chosen ones")
    if len(steps) > max_new_tokens:
        raise UnsupportedError(f"the answer has {len(steps)} tokens, and {max_new_tokens} were asked for at most")
    return Answer(steps, text, choice.get("finish_reason") != "length")


def _taken(holder: Any, key: str, kind: type, name: str) -> Any:
    value = holder.get(key) if isinstance(holder, Mapping) else None
    if not isinstance(value, kind):
        kinds: dict[Any, str] = {list: "a list", str: "text", Mapping: "an object"}
        got = typed(value, 60) if isinstance(holder, Mapping) else f"{typed(holder, 60)} for the {name}"
        raise UnsupportedError(f"the answer's {key!r} takes {kinds[kind]}, got {got}")
    return value


def _number(value: Any) -> float:
    """A log-probability; minus infinity is -9999 in some servers, and null in others."""
    if value is None:
        return -math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value > 1e-3:
        raise UnsupportedError(f"the answer's log-probabilities are numbers up to 0, got {typed(value, 60)}")
    return float(value)


def _lists(logprobs: Any) -> tuple[Step, ...]:
    tokens = _taken(logprobs, "tokens", list, "logprobs")
    chosen = _taken(logprobs, "token_logprobs", list, "logprobs")
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    if not isinstance(tops, list) or not len(tokens) == len(chosen) == len(tops):
        raise UnsupportedError("the answer's lists of log-probabilities have different lengths")
    made = []
    for token, logprob, top in zip(tokens, chosen, tops, strict=True):
        if not isinstance(token, str) or not isinstance(top, Mapping | None):
            raise UnsupportedError(f"the answer's log-probabilities take tokens as text, got {typed(token, 60)}")
        row = {_named(name): _number(value) for name, value in (top or {}).items()}
        made.append(Step(_named(token), _number(logprob), row))
    return tuple(made)


def _named(token: str) -> int | str:
    """A token's text, or its id: vLLM writes ``token_id:17`` if asked to."""
    number = token.removeprefix("token_id:")
    return int(number) if number != token and number.isdecimal() and len(number) < 12 else token


def _entry(entry: Any) -> Step:
    top = entry.get("top_logprobs") if isinstance(entry, Mapping) else None
    if not isinstance(top, list | None):
        raise UnsupportedError(f"the answer's 'top_logprobs' takes a list, got {typed(top, 60)}")
    (token, logprob), *others = itertools.starmap(_pair, [(entry,), *((one,) for one in top or ())])
    return Step(token, logprob, dict(others))


def _pair(entry: Any) -> tuple[int | str, float]:
    """Token and log-probability; of a token's names the most exact."""
    token = entry.get("id") if isinstance(entry, Mapping) else None
    if type(token) is int:
        return token, _number(entry.get("logprob"))
    return _taken(entry, "token", str, "log-probability"), _number(entry.get("logprob"))

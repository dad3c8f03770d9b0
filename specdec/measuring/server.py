"""A server with OpenAI's completions, as an audit sees it: texts become tokens with their likely alternatives.

The standard library's client is enough for one request at a time, so that auditing needs no extra.
"""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import attrs

from specdec.errors import ConfigError, SpecdecError, UnsupportedError, did_you_mean, shown, typed
from specdec.files.reading import parse_json

TOP = 5  # alternatives requested at every position; the most that OpenAI's completions give
LARGEST = 2**25  # bytes of an answer
EXAMPLE = "http://127.0.0.1:8000/v1"


@attrs.frozen(kw_only=True)
class Request:
    """How an answer is generated. A seed matters above temperature 0 only.

    ``ids`` asks for tokens by id where the server has them; otherwise tokens are texts.
    """

    max_new_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    ids: bool = True


@attrs.frozen
class Step:
    """A token of an answer, and the row of log-probabilities that it was chosen from.

    Attributes:
        token: its id, or its text where the server gives no ids.
        logprob: its log-probability.
        top: the most likely tokens of the row with their log-probabilities; empty if the server lists none.
    """

    token: int | str
    logprob: float
    top: Mapping[int | str, float]

    @property
    def known(self) -> Mapping[int | str, float]:
        """All tokens of the row whose log-probability is known."""
        return {self.token: self.logprob, **self.top}


@attrs.frozen
class Answer:
    """What a server generated: its tokens, their text, and whether it ended before the limit."""

    steps: tuple[Step, ...]
    text: str
    ended: bool

    @property
    def spelled(self) -> bool:
        """Whether the tokens are texts that make up the answer's."""
        return "".join(str(step.token) for step in self.steps) == self.text


# --- the client ------------------------------------------------------------------------------------------------------


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirection would turn the POST into a GET, and carry the key to another host."""

    def redirect_request(self, *args: Any) -> None:
        return None


class ServerEngine:
    """A model on a server.

    Args:
        url: of the server, with or without ``/v1``.
        model: its name in requests; the server's only one if None.
        api_key: sent with requests; None for none.
        timeout: seconds that the server may send nothing.

    Attributes:
        name: what it is, for reports.

    Raises: ConfigError for an invalid URL, or a model that is not served; UnsupportedError if the server cannot be
        reached, or does not speak the protocol.
    """

    def __init__(
        self, url: str, model: str | None = None, *, api_key: str | None = None, timeout: float = 300.0
    ) -> None:
        self._url = _base(url)
        self._headers = {"Content-Type": "application/json", "User-Agent": "specdec"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError("an API key takes printable ASCII characters")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._model, owner = self._choose(model)
        self._vllm = owner == "vllm"  # which gives ids on request; several tokens share a text
        self.name = f"{self._model} at {self._url}"

    def answer(self, prompt: str, request: Request) -> Answer:
        """Continue ``prompt``, with the ``TOP`` best log-probabilities of every token.

        They are the model's at temperature 1, before filters.
        Raises: UnsupportedError for whatever is not an answer with log-probabilities.
        """
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "logprobs": TOP,
            **({"seed": request.seed} if request.temperature > 0 else {}),
            **({"ignore_eos": True} if request.ignore_eos else {}),
            **({"return_tokens_as_token_ids": True} if self._vllm and request.ids else {}),
        }
        data = self._request("/completions", body)
        try:
            return read_completion(data, request.max_new_tokens, ids=request.ids)
        except SpecdecError as error:
            hint = "the option of the server that switches log-probabilities on" if "no log" in error.message else None
            raise UnsupportedError(error.message, server=self._url, try_=hint) from None

    def _choose(self, model: str | None) -> tuple[str, str]:
        """The model's name and the owner that the server gives it."""
        data = self._request("/models", None)
        cards = data.get("data") if isinstance(data, Mapping) else None
        known = {
            card["id"]: str(card.get("owned_by", ""))
            for card in (cards if isinstance(cards, list) else ())
            if isinstance(card, Mapping) and isinstance(card.get("id"), str)
        }
        if not known:
            raise UnsupportedError("the server lists no model", server=self._url, try_=EXAMPLE)
        if model is None and len(known) == 1:
            return next(iter(known.items()))
        if model is not None and model in known:
            return model, known[model]
        first = shown(next(iter(known)), 60)
        raise ConfigError(
            f"the server has {len(known)} models: name one"
            if model is None
            else f"the server has no model {shown(model, 60)}.{did_you_mean(model, known)}",
            server=self._url,
            available=", ".join(known),
            try_=f"--model {first}" if model is None else None,
        )

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """The JSON of a response. Raises: UnsupportedError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                if response.headers.get_content_type() == "text/event-stream":
                    raise self._error("the server streams, although no stream was requested")
                content = response.read(LARGEST + 1)
                if len(content) > LARGEST:
                    raise self._error(f"the server's answer has more than {LARGEST:,} bytes")
                return parse_json(content)
        except urllib.error.HTTPError as error:
            key = "--api-key, or SPECDEC_API_KEY" if error.code == http.HTTPStatus.UNAUTHORIZED else None
            raise self._error(f"the server answers {error.code} to {path}: {_reason(error)}", try_=key) from None
        except (OSError, http.client.HTTPException) as error:  # URLError and TimeoutError are OSErrors
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(cause, TimeoutError):
                message = f"the server has not answered within {self._timeout:g} seconds"
                raise self._error(message, try_="--timeout") from None
            text = getattr(cause, "strerror", None) or cause or type(cause).__name__
            raise self._error(
                f"the server cannot be reached: {text}", try_=f"start it, or its address: {EXAMPLE}"
            ) from None
        except ValueError as error:  # of parse_json
            raise self._error(f"the server's answer to {path} is not JSON: {error}") from None

    def _error(self, message: str, **facts: Any) -> UnsupportedError:
        return UnsupportedError(message, server=self._url, **facts)


def _base(url: str) -> str:
    """The URL up to and with ``/v1``. Raises: ConfigError."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and url.isascii() and url.isprintable()
        valid = valid and " " not in url and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{shown(url, 100)} is not the URL of a server", try_=EXAMPLE)
    path = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/chat").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix('/v1')}/v1"


def _reason(error: urllib.error.HTTPError) -> str:
    """The first words of an HTTP error."""
    try:
        text = error.read(2**16).decode(errors="replace")
        data = json.loads(text)
        for key in ("error", "message", "detail"):
            data = data.get(key, data) if isinstance(data, dict) else data
        text = data if isinstance(data, str) else text
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        text = str(error.reason)
    return shown(" ".join(text.split()), 300) if text.strip() else str(error.reason)


# --- answers ---------------------------------------------------------------------------------------------------------


def read_completion(body: Any, max_new_tokens: int, *, ids: bool = True) -> Answer:
    """The answer in a completion's body, with tokens by id where it has ids and ``ids`` is set.

    Raises: UnsupportedError saying what is missing or wrong in it.

    The lists ``tokens``, ``token_logprobs`` and ``top_logprobs`` are OpenAI's; llama.cpp writes ``content``, the
    entries of OpenAI's chat completions, here too.
    """
    choices = _field(body, "choices", list, "body")
    if len(choices) != 1:
        raise UnsupportedError(f"the answer takes one choice, got {len(choices)}")
    choice = choices[0]
    text = _field(choice, "text", str, "choice")
    logprobs = choice.get("logprobs")
    if logprobs is None:
        raise UnsupportedError("the answer has no log-probabilities")
    steps = tuple(_step(entry, ids) for entry in _entries(logprobs))
    if text and not steps:
        raise UnsupportedError("the answer has text and no log-probabilities")
    if steps and not any(step.top for step in steps):
        raise UnsupportedError("the answer has no log-probabilities of other tokens than the chosen ones")
    if len(steps) > max_new_tokens:
        raise UnsupportedError(f"the answer has {len(steps)} tokens, and at most {max_new_tokens} were requested")
    return Answer(steps, text, choice.get("finish_reason") != "length")


def _field(holder: Any, key: str, kind: type, name: str) -> Any:
    value = holder.get(key) if isinstance(holder, Mapping) else None
    if not isinstance(value, kind):
        got = typed(value, 60) if isinstance(holder, Mapping) else f"{typed(holder, 60)} for the {name}"
        raise UnsupportedError(f"the answer's {key!r} takes {'text' if kind is str else 'a list'}, got {got}")
    return value


def _logprob(value: Any) -> float:
    """A log-probability; minus infinity is -9999 in some servers, and null in others."""
    if value is None:
        return -math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value > 1e-3:
        raise UnsupportedError(f"the answer's log-probabilities are numbers up to 0, got {typed(value, 60)}")
    return float(value)


def _entries(logprobs: Any) -> list[Any]:
    """The entries of chat completions, also from the lists of completions."""
    entries: list[Any]
    if isinstance(logprobs, Mapping) and "content" in logprobs:
        entries = _field(logprobs, "content", list, "logprobs")
        return entries
    tokens, chosen = (_field(logprobs, key, list, "logprobs") for key in ("tokens", "token_logprobs"))
    tops = logprobs.get("top_logprobs") or [{}] * len(tokens)
    if not isinstance(tops, list) or not len(tokens) == len(chosen) == len(tops):
        raise UnsupportedError("the answer's lists of log-probabilities have different lengths")
    entries = []
    for token, logprob, top in zip(tokens, chosen, tops, strict=True):
        if isinstance(top, Mapping):
            top = [{"token": other, "logprob": value} for other, value in top.items()]
        entries.append({"token": token, "logprob": logprob, "top_logprobs": top})
    return entries


def _step(entry: Any, ids: bool) -> Step:
    top = entry.get("top_logprobs") if isinstance(entry, Mapping) else None
    if not isinstance(top, list | None):
        raise UnsupportedError(f"the answer's 'top_logprobs' takes a list, got {typed(top, 60)}")
    (token, logprob), *others = [_pair(one, ids) for one in (entry, *(top or ()))]
    return Step(token, logprob, dict(others))


def _pair(entry: Any, ids: bool) -> tuple[int | str, float]:
    """Token and log-probability; vLLM writes the text ``token_id:17`` for an id on request."""
    token = entry.get("id") if ids and isinstance(entry, Mapping) else None
    if type(token) is not int:
        token = _field(entry, "token", str, "log-probability")
        number = token.removeprefix("token_id:")
        if number != token and number.isdecimal() and len(number) < 12:
            token = int(number)
    return token, _logprob(entry.get("logprob"))

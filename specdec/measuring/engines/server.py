"""A server that speaks OpenAI's protocol, as an engine: ``POST /v1/completions`` with log-probabilities.

The standard library's client is enough for one request at a time, so that auditing needs no extra.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from specdec.errors import ConfigError, SpecdecError, UnsupportedError, did_you_mean, shown
from specdec.files.reading import parse_json
from specdec.measuring.engines.completions import read_completion
from specdec.measuring.engines.engine import TOP, Answer, Asked

LARGEST = 2**25  # bytes of an answer
EXAMPLE = "http://127.0.0.1:8000/v1"


class _Stays(urllib.request.HTTPRedirectHandler):
    """A redirection would turn the POST into a GET, and carry the key to another host."""

    def redirect_request(self, *args: Any) -> None:
        return None


class ServerEngine:
    """A model on a server.

    Args:
        url: of the server, with or without ``/v1``.
        model: its name in requests; the server's only one if None.
        api_key: that requests carry; None for none.
        dtype: of the server's activations, if known.
        timeout: seconds for a whole answer.

    Raises: ConfigError for what is no URL, or a model that is not served; UnsupportedError if the server cannot be
        reached, or is none of the kind.
    """

    def __init__(
        self, url: str, model: str | None = None, *, api_key: str | None = None, dtype: str = "", timeout: float = 300.0
    ) -> None:
        self._url = _base(url)
        self._headers = {"Content-Type": "application/json", "User-Agent": "specdec"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError("an API key takes printable ASCII characters")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._opener = urllib.request.build_opener(_Stays)
        self._model, owner = self._choose(model)
        self._fields: dict[str, Any] = {}
        if owner == "vllm":  # ids: a text can belong to several tokens
            self._fields["return_tokens_as_token_ids"] = True
        self.name = f"{self._model} at {self._url}"
        self.dtype = dtype

    def answer(self, prompt: str, asked: Asked) -> Answer:
        """See ``Engine``. Raises: UnsupportedError for whatever is not an answer with log-probabilities."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "logprobs": TOP,
            **({"seed": asked.seed} if asked.temperature > 0 else {}),
            **({"ignore_eos": True} if asked.ignore_eos else {}),
            **self._fields,
        }
        data = self._request("/completions", body)
        try:
            return read_completion(data, asked.max_new_tokens)
        except SpecdecError as error:
            hint = "the option of the server that switches log-probabilities on" if "no log" in error.message else None
            raise UnsupportedError(error.message, server=self._url, try_=hint) from None

    def _choose(self, wanted: str | None) -> tuple[str, str]:
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
        if wanted is None:
            if len(known) > 1:
                raise ConfigError(
                    f"the server has {len(known)} models: name one",
                    server=self._url,
                    available=", ".join(known),
                    try_=f"--model {shown(next(iter(known)), 60)}",
                )
            return next(iter(known.items()))
        if wanted not in known:
            raise ConfigError(
                f"the server has no model {shown(wanted, 60)}.{did_you_mean(wanted, known)}",
                server=self._url,
                available=", ".join(known),
            )
        return wanted, known[wanted]

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """The JSON of a response. Raises: UnsupportedError."""
        request = urllib.request.Request(
            self._url + path, None if body is None else json.dumps(body).encode(), self._headers
        )
        until = time.monotonic() + self._timeout
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                if response.headers.get_content_type() == "text/event-stream":
                    raise self._unfit("the server streams, which it was not asked to")
                return parse_json(self._read(response, until))
        except urllib.error.HTTPError as error:
            raise self._unfit(f"the server answers {error.code} to {path}: {_reason(error)}") from None
        except TimeoutError:
            raise self._late() from None
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(cause, TimeoutError):
                raise self._late() from None
            raise self._unfit(
                f"the server cannot be reached: {getattr(cause, 'strerror', None) or cause or type(cause).__name__}"
            ) from None
        except ValueError as error:  # of parse_json
            raise self._unfit(f"the server's answer to {path} is not JSON: {error}") from None

    def _read(self, response: http.client.HTTPResponse, until: float) -> bytes:
        data = bytearray()
        while chunk := response.read1(2**16):
            data += chunk
            if len(data) > LARGEST:
                raise self._unfit(f"the server's answer has more than {LARGEST:,} bytes")
            if time.monotonic() > until:
                raise self._late()
        return bytes(data)

    def _unfit(self, what: str) -> UnsupportedError:
        return UnsupportedError(what, server=self._url)

    def _late(self) -> UnsupportedError:
        return UnsupportedError(
            f"the server has not answered within {self._timeout:g} seconds", server=self._url, try_="--timeout"
        )


def _base(url: str) -> str:
    """The URL up to and with ``/v1``. Raises: ConfigError."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and url.isascii() and url.isprintable()
        fits = fits and " " not in url and (parts.port is None or parts.port > 0)
    except ValueError:
        fits = False
    if not fits or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"{shown(url, 100)} is not the URL of a server", try_=EXAMPLE)
    path = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/chat").rstrip("/")
    if not path.endswith("/v1"):
        path += "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def _reason(error: urllib.error.HTTPError) -> str:
    """The first words of a refusal."""
    try:
        text = error.read(2**16).decode(errors="replace")
        data = json.loads(text)
        for key in ("error", "message", "detail"):
            data = data.get(key, data) if isinstance(data, dict) else data
        text = data if isinstance(data, str) else text
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        text = str(error.reason)
    return shown(" ".join(text.split()), 300) if text.strip() else str(error.reason)

"""The HTTP application: routes, who may ask, and what is read from and written to a connection."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import attrs
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.decoding.parts import Parts
from specdec.decoding.result import Result
from specdec.errors import SpecdecError
from specdec.logs import get_logger
from specdec.serving import is_loopback
from specdec.serving.engine import Engine, Piece, Turn
from specdec.serving.metrics import Metrics
from specdec.serving.page import described, page, policy
from specdec.serving.refusal import Refusal
from specdec.serving.replies import Reply
from specdec.serving.requests import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    DetokenizeRequest,
    Request,
    TokenizeRequest,
    json_object,
    parsed,
    prepared,
)

log = get_logger(__name__)

BODY_SECONDS = 30.0  # for a whole body
BODY_BYTES = 2**20
HEAD_BYTES = 2**15  # names and values


@attrs.frozen(kw_only=True)
class Service:
    """A model and how it is served.

    Attributes:
        names: of the model in requests, at least one; the first is that of answers.
        most_prompt, most_tokens: of a request, as for ``prepared``.
        api_key: that requests must carry; empty for none.
        local: whether only this machine can connect; names of other hosts are then refused.
        plain_ms: what a token of plain decoding takes with the log-probabilities that the page asks for; 0 if unknown.
        prompt: that the page begins with.
    """

    lm: Parts
    names: Sequence[str]
    engine: Engine
    metrics: Metrics
    most_prompt: int | None = None
    most_tokens: int = 4096
    api_key: str = ""
    local: bool = True
    plain_ms: float = 0.0
    prompt: str = ""
    created: int = attrs.field(factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raises: Refusal for the name of another model."""
        if name is not None and name not in self.names:
            served = ", ".join(map(repr, self.names))
            raise Refusal(404, f"no such model is served here, only {served}", param="model", code="model_not_found")


def application(service: Service) -> ASGIApp:
    """The ASGI application of a service."""
    lm, metrics = service.lm, service.metrics

    def card(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": service.created, "owned_by": "specdec"}

    async def models(_: HttpRequest) -> Response:
        return _json({"object": "list", "data": [card(name) for name in service.names]})

    async def model(request: HttpRequest) -> Response:
        service.check_model(request.path_params["name"])
        return _json(card(request.path_params["name"]))

    async def tokenize(request: HttpRequest) -> Response:
        data = await _body(request)
        kind: type[TokenizeRequest | Conversation] = Conversation if "messages" in data else TokenizeRequest
        body = parsed(kind, data)
        service.check_model(body.model)
        tokens = (await run_in_threadpool(body.prompt_of, lm))[0]
        return _json({"count": len(tokens), "max_model_len": lm.capacity, "tokens": tokens})

    async def detokenize(request: HttpRequest) -> Response:
        body = parsed(DetokenizeRequest, await _body(request))
        service.check_model(body.model)
        if any(token >= lm.info.vocab_size for token in body.tokens):
            raise Refusal(400, f"tokens takes ids of 0 to {lm.info.vocab_size - 1}", param="tokens")
        text = await run_in_threadpool(lm.tokenizer.decode, body.tokens, skip_special=False)
        return _json({"prompt": text})

    facts = {"plain_ms": service.plain_ms, "needs_key": bool(service.api_key), "prompt": service.prompt}
    html = page({**described(lm, service.names[0]), **facts})
    headers = {"content-security-policy": policy(), "cache-control": "no-store", "x-content-type-options": "nosniff"}

    async def index(_: HttpRequest) -> Response:
        return Response(html, headers=headers, media_type="text/html")

    async def health(_: HttpRequest) -> Response:
        return _json({"status": "ok"})

    async def scrape(_: HttpRequest) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    routes = [
        Route("/", index),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", Generating(service, ChatRequest), methods=["POST"]),
        Route("/v1/completions", Generating(service, CompletionRequest), methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", health),
        Route("/metrics", scrape),
    ]
    return Guard(service, routes)


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(data), status, headers, media_type="application/json")


def _refusal(error: Exception, method: str) -> Refusal:
    """What is answered to a request that ended with an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, SpecdecError):
        return Refusal.of(error)
    if isinstance(error, HTTPException):
        what = {404: "there is no such page here", 405: f"this page does not take {method}"}
        return Refusal(
            error.status_code, what.get(error.status_code, "the request cannot be served"), headers=error.headers
        )
    log.error("request_failed", exc_info=error)  # a bug: the log has it, the answer does not
    return Refusal(500, "the server failed")


class Guard:
    """Checks who asks before anything is read, answers with what went wrong, and counts the responses."""

    def __init__(self, service: Service, routes: Sequence[Route]) -> None:
        self._service = service
        self._app = Router(routes, redirect_slashes=False)
        self._known = {route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 500  # of a connection that was lost first
        begun = False
        headers = HttpRequest(scope).headers
        unread = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"  # a body

        async def received() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", message["type"] != "http.request")
            return message

        async def counted(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                if unread:  # nothing waits for the rest of it
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            self._check(scope, headers)
            await self._app({**scope, "app": self}, received, counted)  # with "app", routing raises HTTPException
        except ClientDisconnect:  # or a body that is no HTTP, to which uvicorn has answered
            log.info("client_left")
        except Exception as error:
            refusal = _refusal(error, scope["method"])
            if begun:
                raise
            await _json(refusal.body(), refusal.status, refusal.headers)(scope, receive, counted)
        finally:
            route = scope["path"] if scope["path"] in self._known else "other"
            self._service.metrics.responses.labels(route, str(status)).inc()

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises: Refusal for a doubtful head, another host's name, a page of another origin, or a missing key."""
        service = self._service
        if sum(map(len, chain(*scope["headers"]))) > HEAD_BYTES:
            raise Refusal(431, f"the head of a request has at most {HEAD_BYTES // 1024} KiB here")
        if "content-length" in headers and "transfer-encoding" in headers:
            raise Refusal(400, "a request has Content-Length or Transfer-Encoding, not both")
        host = headers.get("host", "")
        if service.local and not is_loopback(_hostname(host)):
            raise Refusal(403, "this server answers to the names of this machine only, such as localhost")
        origin = headers.get("origin")
        if origin is not None and origin.partition("//")[2] != host:
            raise Refusal(403, "this server does not answer pages of another origin")
        if service.api_key and scope["path"] not in ("/", "/health"):  # a URL would be made from the header Host
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), service.api_key.encode()):
                raise Refusal(
                    401,
                    "this server needs its API key: Authorization: Bearer ...",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )


def _hostname(host: str) -> str:
    """The name in a header Host; empty if it is none."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.hostname or "" if parts.port != 0 else ""  # reading the port raises for what is none
    except ValueError:
        return ""


@attrs.frozen
class Generating:
    """An endpoint that generates."""

    _service: Service
    _kind: type[Request]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        data = await _body(HttpRequest(scope, receive))
        request = parsed(self._kind, data)
        service.check_model(request.model)
        with contextlib.closing(service.engine.turn(streamed=request.stream, cycles=request.origins)) as turn:
            watch = asyncio.create_task(_gone(receive))
            watch.add_done_callback(lambda _: turn.close())
            try:
                ready = await run_in_threadpool(prepared, request, service.lm, service.most_prompt, service.most_tokens)
                service.engine.start(turn, ready)
                reply = Reply(service.lm, request, ready, request.model or service.names[0])
                if request.stream:
                    await _stream(turn, reply, request, send)
                else:
                    piece = await turn.next()
                    result = await turn.next()
                    assert isinstance(piece, Piece)
                    assert isinstance(result, Result)
                    await _json(reply.whole(piece, result))(scope, receive, send)
            except asyncio.CancelledError:
                if not turn.gone:
                    raise
            finally:
                watch.cancel()


async def _gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stream(turn: Turn, reply: Reply, request: Request, send: Send) -> None:
    """Server-sent events. The status is sent with the first one, so that a failure before it has its own."""
    event: Piece | Result = await turn.next()
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(*events: Any) -> None:
        if not events:
            return
        data = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
        await send({"type": "http.response.body", "body": data.encode(), "more_body": True})

    await write(*reply.opening())
    try:
        while isinstance(event, Piece):
            await write(*reply.chunks(event))
            event = await turn.next()
        options = request.stream_options
        await write(*reply.closing(event, usage=options is not None and options.include_usage), "[DONE]")
    except Refusal as error:  # too late for a status
        await write(error.body())
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _body(request: HttpRequest) -> dict[str, Any]:
    """The JSON object in the body. Raises: Refusal for any other body, and one that is too long or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, "the body takes JSON, with the header Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "the body takes no Content-Encoding")
    too_long = Refusal(413, f"the body has at most {BODY_BYTES:,} bytes here")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and len(length) < 20 and int(length) > BODY_BYTES:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES:
                    raise too_long
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None
    return json_object(bytes(body))

"""The process that serves: its socket, its connections and its end."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import logging
import os
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from anyio import to_thread
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from specdec.errors import ConfigError
from specdec.files.reading import why
from specdec.serving.app import Service, application
from specdec.serving.engine import Engine

HEAD_SECONDS = 30.0  # for the head of a request, from the connection's opening or the last answer
WRITE_SECONDS = 60.0  # without a byte taken by a client that has much to read
CONNECTIONS = 256  # beyond them, those that wait for a request make room
PREPARING = 2  # requests that are tokenized at once: a long one takes 100 MB meanwhile
STOP_SECONDS = 10.0  # for what runs to end once it is asked to


def share_memory() -> None:
    """Let all threads allocate from one arena, before they start, where the C library is GNU's.

    It has an arena for each thread otherwise, which keeps what that thread's longest request took: under abuse a
    server of 330 MB grew to 840 MB, and with one arena it stays below 580 MB.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening address that nobody else has. Clients that come before the model is loaded wait.

    Raises: ConfigError.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        message, usable = f"--host {host!r} is no address of this machine", "--host 127.0.0.1, or 0.0.0.0 for all"
        raise ConfigError(message, reason=why(error), try_=usable) from error
    try:
        both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()  # "::" takes version 4 too
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        other = "--port 0, which takes a free one" if port else "--host 127.0.0.1"
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen at {host} port {port}: {reason}", try_=other) from error


def serve(
    service: Service, listening: socket.socket, *, grace: float, ready: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        ready: called when the server answers, and a signal ends it in order.
        say: called with what the end waits for.
        grace: seconds that the running generation may go on after that; a second signal ends it at once.
    """
    for name in ("uvicorn.error", "uvicorn.access"):  # its own log; ours says what was served
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    config = uvicorn.Config(
        application(service),
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=2 * CONNECTIONS,
        h11_max_incomplete_event_size=2**15,
        timeout_graceful_shutdown=int(grace + STOP_SECONDS),
    )
    server = _Server(config)
    server.engine, server.grace, server.ready, server.say = service.engine, grace, ready, say
    server.run(sockets=[listening])


class _Server(uvicorn.Server):
    """Ends in order: nothing new, refusals for what waits, time for what runs."""

    engine: Engine
    grace: float
    ready: Callable[[], None]
    say: Callable[[str], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take requests; from here on signals end the server in order."""
        await super().startup(sockets)
        to_thread.current_default_thread_limiter().total_tokens = PREPARING
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal. Unlike uvicorn's, it is not raised again afterwards: this is the ordinary way to end."""
        if self.should_exit:
            self.engine.stop()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.close()
        if self.engine.busy and self.grace:
            self.say(f"waiting up to {self.grace:g} s for running answers; Ctrl-C again ends them")
        asyncio.get_running_loop().call_later(self.grace, self.engine.stop)
        await super().shutdown(sockets)
        self.engine.stop()


class _Connection(H11Protocol):
    """A connection that waits neither for a head for ever, nor for a client that does not read.

    When there are too many, the oldest one that waits for a request makes room, of the address that has most of them.
    """

    _opened = 0.0
    _head: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._opened = self.loop.time()
        self._await_head()
        if len(self.connections) > CONNECTIONS:
            waiting = [each for each in self.connections if isinstance(each, _Connection) and each.waits]
            crowd = collections.Counter(each.address for each in waiting).most_common(1)[0][0]
            min((each for each in waiting if each.address == crowd), key=lambda each: each._opened).transport.abort()

    @property
    def address(self) -> str:
        """Of the client."""
        return self.client[0] if self.client else ""

    @property
    def waits(self) -> bool:
        """Whether it has no whole request to answer."""
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn declares that there always is one
        return cycle is None or cycle.response_complete or cycle.more_body

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stuck):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None and self.conn.their_state is not h11.IDLE:
            self._head.cancel()
            self._head = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()

    def _await_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

"""Servers that tests start, as a user does, and raw requests to them."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Container, Iterator
from typing import Any
from urllib.parse import urlsplit

import attrs

from tests.processes import HUNG, ROOT

ASK = {"messages": [{"role": "user", "content": "Write a Python function that adds two numbers."}], "max_tokens": 24}


@attrs.frozen
class Server:
    """A process that serves.

    Attributes:
        url: with ``/v1``.
        host: name and port.
        process: its process.
        key: its API key.
    """

    url: str
    host: str
    process: subprocess.Popen[str]
    key: str = ""

    @contextlib.contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        made = http.client.HTTPConnection(self.host, timeout=HUNG)
        try:
            yield made
        finally:
            made.close()

    def request(
        self, method: str, path: str, body: bytes | str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (in lower case) and body."""
        with self.connection() as connection:
            authorised = {"Authorization": f"Bearer {self.key}"} if self.key else {}
            with contextlib.suppress(ConnectionError):  # a body that is refused before it is read
                connection.request(method, path, body, {**authorised, **(headers or {})})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()

    def post(self, path: str, data: Any) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of an answer."""
        body = data if isinstance(data, bytes | str) else json.dumps(data)
        status, headers, answer = self.request("POST", path, body, {"Content-Type": "application/json"})
        return status, headers, json.loads(answer)

    def connect(self) -> socket.socket:
        """A connection without a client's manners."""
        host, port = self.host.split(":")
        return socket.create_connection((host, int(port)), timeout=HUNG)

    def exchange(self, *pieces: bytes, seconds: float | None = None) -> bytes:
        """What comes back for bytes that are sent as they are; if it need not end, what comes within ``seconds``."""
        answer = b""
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError, *([] if seconds is None else [TimeoutError])):
                for piece in pieces:
                    connection.sendall(piece)
                if seconds is not None:
                    connection.settimeout(seconds)
                while seconds != 0 and (piece := connection.recv(65536)):
                    answer += piece
        return answer

    def metric(self, name: str) -> float:
        """The value of a line of /metrics, 0 if there is none."""
        text = self.request("GET", "/metrics")[2].decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@contextlib.contextmanager
def serving(*options: object, key: str = "", before: str = "", status: int = 0) -> Iterator[Server]:
    """``specdec serve --port 0`` with ``options``, until the block ends; its exit status is then checked.

    ``before`` is Python that the process runs first.
    """
    command = [sys.executable, "-m", "specdec"]
    if before:
        command = [sys.executable, "-c", f"{before}\nfrom specdec.__main__ import run\nrun()"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [*command, "serve", "--port", "0", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": path, **({"SPECDEC_API_KEY": key} if key else {})},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        url = process.stdout.readline().strip()
        assert url, process.stderr.read()
        port = urlsplit(url).port
        yield Server(url=f"http://127.0.0.1:{port}/v1", host=f"127.0.0.1:{port}", process=process, key=key)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=HUNG)
        assert "Traceback" not in errors, errors
        assert process.returncode == status, errors
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def check_error(status: int, body: bytes | str, statuses: Container[int]) -> dict[str, Any]:
    """One sentence in OpenAI's form, without a path, a trace or a type of Python."""
    assert status in statuses, (status, body)
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 500
    assert error["message"].isprintable()
    for leak in ("Traceback", "/specdec/", "site-packages", "object at 0x", ".py", "pydantic"):
        assert leak not in error["message"]
    return error


def events(body: bytes) -> list[Any]:
    """The data of server-sent events; the last one is ``[DONE]``, which is left out."""
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines
    return [json.loads(line) for line in lines[:-1]]


def streamed_text(chunks: list[Any]) -> str:
    """The text of a stream's chunks."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)

"""A server of OpenAI's completions in a thread, over a tiny model of random rows, with bugs on request."""

import contextlib
import functools
import http.server
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import torch

VOCAB = 40
WORDS = [f" w{number}" for number in range(VOCAB)]


@functools.cache
def logits(context: tuple[int, ...], prompt: str) -> np.ndarray:
    """A row ``[VOCAB]`` float64 around 20, the best ones close together."""
    seed = zlib.crc32(repr((prompt, context[-3:], len(context))).encode())
    return 20 - np.random.default_rng(seed).exponential(2.0, VOCAB)


def bfloat16(row: np.ndarray) -> np.ndarray:
    return torch.from_numpy(row).to(torch.bfloat16).double().numpy()


@attrs.frozen
class Toy:
    """Continues a prompt greedily, in cycles of ``depth`` drafts.

    Attributes:
        rounded: the format of verification's rows.
        keeps: the cycle whose first rejected draft stays; None for none.
    """

    depth: int = 0
    rounded: Callable[[np.ndarray], np.ndarray] = np.asarray
    keeps: int | None = None

    def steps(self, prompt: str, limit: int) -> list[tuple[int, np.ndarray]]:
        """Tokens with their rows of log-probabilities."""
        made: list[tuple[int, np.ndarray]] = []
        cycle = 0
        while len(made) < limit:
            context = tuple(token for token, _ in made)
            drafts = self._drafts(context, prompt)
            for draft in [*drafts, None]:
                row = logits(tuple(token for token, _ in made), prompt)
                row = self.rounded(row) if drafts else row
                row = row - np.log(np.exp(row - row.max()).sum()) - row.max()
                chosen = int(row.argmax())
                if draft is not None and draft != chosen and cycle == self.keeps:
                    made.append((draft, row))
                    break
                made.append((chosen, row))
                if draft != chosen:
                    break
            cycle += 1
        return made[:limit]

    def _drafts(self, context: tuple[int, ...], prompt: str) -> list[int]:
        """Right ones, and the last is always wrong."""
        found: list[int] = []
        for _ in range(self.depth):
            found.append(int(logits((*context, *found), prompt).argmax()))
        return [*found[:-1], int(logits((*context, *found[:-1]), prompt).argmin())] if found else []


def completion(toy: Toy, asked: dict[str, Any]) -> dict[str, Any]:
    """The body of an answer."""
    steps = toy.steps(asked["prompt"], asked["max_tokens"])
    best = [np.argsort(-row)[: asked["logprobs"]] for _, row in steps]
    return {
        "choices": [
            {
                "index": 0,
                "text": "".join(WORDS[token] for token, _ in steps),
                "finish_reason": "length",
                "logprobs": {
                    "tokens": [WORDS[token] for token, _ in steps],
                    "token_logprobs": [float(row[token]) for token, row in steps],
                    "top_logprobs": [
                        {WORDS[token]: float(row[token]) for token in top}
                        for (_, row), top in zip(steps, best, strict=True)
                    ],
                },
            }
        ]
    }


Reply = Callable[[dict[str, Any]], tuple[int, str, bytes]]
"""Status, content type and body of the answer to a request."""


def json_reply(body: Any, status: int = 200) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(body).encode()


def toy_reply(toy: Toy) -> Reply:
    return lambda asked: json_reply(completion(toy, asked))


@contextlib.contextmanager
def stub(reply: Reply | Toy, models: tuple[str, ...] = ("toy",), owner: str = "stub") -> Iterator[str]:
    """The URL of a server that answers with ``reply`` until the block ends."""
    answer = toy_reply(reply) if isinstance(reply, Toy) else reply

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            cards = [{"id": name, "owned_by": owner} for name in models]
            known = self.path == "/v1/models"
            self._send(*json_reply({"data": cards} if known else {"detail": "Not Found"}, 200 if known else 404))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*answer(asked))

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):  # a client that does not wait
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

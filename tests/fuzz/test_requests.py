"""Hostile requests to a running server: heads, bodies, schemas, tools and connections.

Each is answered in one sentence or cut off, never with status 500. After each block the server is there for everyone,
and its text is the same as before. ``campaign.py`` says how many seeds are tried; a failure names its seed.
"""

import json
import random

import pytest

from tests.fuzz.campaign import blocks
from tests.fuzz.mutations import mutate_bytes, mutate_json
from tests.processes import HUNG
from tests.serving.serving import ASK, check_error, serving

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHORT = {**ASK, "max_tokens": 2}
FUNCTION = {
    "name": "f",
    "description": "x",
    "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
GOOD = (
    (CHAT, SHORT),
    (CHAT, {**SHORT, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {**SHORT, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["a", "b"], "logit_bias": {"5": -1.0}}),
    (CHAT, {**SHORT, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}),
    (
        CHAT,
        {
            **SHORT,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "1"},
            ],
        },
    ),
    (TEXT, {"prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 1, "origins": True, "speculation": {"depth": 1}}),
    (TEXT, {"prompt": "a", "max_tokens": 1, "prediction": {"type": "content", "content": "b"}, "user": "me"}),
    (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "content": "x", "reasoning_content": "y", "name": "z"},
                *ASK["messages"],
            ],
            **{"max_completion_tokens": 2, "min_tokens": 1, "reasoning_effort": "low", "metadata": {"a": "b"}, "n": 1},
            **{"min_p": 0.1, "top_k": 5, "repetition_penalty": 1.1, "presence_penalty": 0.5, "ignore_eos": True},
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    ("/tokenize", {"messages": ASK["messages"], "chat_template_kwargs": {"enable_thinking": True}}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
)


def _schema(rng):
    """A schema that is deep, long, or cannot be met."""
    n = rng.choice((1, 10, 300, 3000))
    chain = {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(n)}
    texts = [{"const": f"value {i}"} for i in range(n)]
    return rng.choice(
        (
            {"$ref": "#/$defs/0", "$defs": {**chain, f"{n}": {}}},
            {"anyOf": texts},
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}},
            {"const": "x" * 100 * n},
            {"$ref": rng.choice(("#", "#/x", "http://localhost/x"))},
            {"type": "integer", "minimum": 10 ** min(n, 300)},
            {"type": "string", "pattern": "(" * n + "a{1,1000}" + "){1,1000}" * n},
            {"type": "array", "minItems": 10 ** min(n, 20), "items": {"enum": [{}, None, n]}},
            {"allOf": texts},
            {"not": {}, "x-guidance": {"coerce_one_of": n}},
        )
    )


def _body(rng):
    path, good = rng.choice(GOOD)
    match rng.randrange(8):
        case 0:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": _schema(rng)}}
            return CHAT, json.dumps({**SHORT, "response_format": form}).encode()
        case 1:
            tools = [{"type": "function", "function": {**FUNCTION, "parameters": _schema(rng)}}]
            return CHAT, json.dumps({**SHORT, "tools": tools, "tool_choice": "required"}).encode()
        case 2:
            return path, mutate_bytes(rng, json.dumps(good).encode()).data
        case _:
            return path, mutate_json(rng, good).data


def hostile(rng):
    """What a connection sends, in pieces, and whether it is certainly a whole request."""
    path, body = _body(rng)
    head = [f"POST {path} HTTP/1.1".encode(), b"Host: localhost", b"Connection: close"]
    head += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    kind = rng.randrange(10)
    match kind:
        case 0:  # a doubtful head
            lines = (
                b"Host: x",
                b"Content-Length: 5",
                b"Transfer-Encoding: chunked",
                b"Expect: 100-continue",
                b"\x00: 1",
            )
            lines += (b"Origin: null", b"Upgrade: websocket", b"Content-Encoding: gzip", b"X: " + b"x" * 40_000, b": 1")
            place = rng.randrange(1, len(head) + 1)
            head[place:place] = rng.sample(lines, rng.randrange(1, 4))
        case 1:
            target = rng.choice((b"*", b"//", b"/%ff%00", b"/v1/models/x", b"http://[::1/", b"/health?" + b"a" * 9000))
            head[0] = b"%s %s HTTP/%s" % (
                rng.choice((b"GET", b"PUT", b"HEAD", b"\xff")),
                target,
                rng.choice((b"1.1", b"9")),
            )
        case 2:
            head = [mutate_bytes(rng, line).data for line in head]
        case 3:  # a body that no page takes, or that does not come
            head[0] = rng.choice((b"GET /health HTTP/1.1", b"GET / HTTP/1.1", b"GET /metrics HTTP/1.1"))
            body = body[: rng.randrange(len(body) + 1)]
        case 4:
            chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body[:50])
            head[-1], body = (
                b"Transfer-Encoding: chunked",
                chunks + rng.choice((b"0\r\n\r\n", b"", b"fffffffffffff\r\n")),
            )
    data = b"\r\n".join([*head, b"", b""]) + body
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 0, 1, 3))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)], kind > 4


def check(answer):
    """Nothing, or a response that is no 500; an error is a short line that gives nothing away."""
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    if not answer:
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), answer[:300]
    if b"application/json" in head and b'{"error"' in body:
        check_error(int(head[9:12]), body, range(400, 500))


@pytest.fixture(scope="module")
def small():
    with serving("--keep", 0, "--most-tokens", 8, "--grace", HUNG) as server:
        yield server


@pytest.mark.parametrize("seeds", blocks())
def test_a_hostile_request(seeds, small):
    truth = small.post(CHAT, {**ASK, "max_tokens": 8})[2]["choices"]
    for seed in seeds:
        rng = random.Random(f"request {seed}")
        pieces, whole = hostile(rng)
        try:
            answer = small.exchange(*pieces, seconds=(seconds := rng.choice((0.0, *[HUNG if whole else 0.5] * 9))))
            check(answer if whole or answer.count(b"HTTP/1.1 ") < 2 else b"")
            assert answer or not whole or not seconds
        except Exception as error:
            raise AssertionError(f"seed {seed}: {b''.join(pieces)[:1000]!r}") from error
    assert small.post(CHAT, {**ASK, "max_tokens": 8})[2]["choices"] == truth

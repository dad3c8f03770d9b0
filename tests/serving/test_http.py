"""The server as a hostile or careless client meets it: each request gets an answer of one sentence."""

import contextlib
import json
import signal
import socket
import struct
import time

import psutil
import pytest
from click.testing import CliRunner
from serving import ASK, check_error, serving

from specdec.cli import main
from tests.processes import HUNG

JSON = {"Content-Type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "def f(", "max_tokens": 4096, "ignore_eos": True, "stream": True}


# --- malformed requests; ``tests/fuzz/test_requests.py`` draws more --------------------------------------------------

MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}


def schema(data):
    return {**ASK, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": data}}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: Input should be 'system', "),
        ({"messages": [{"role": "user", "content": 5}]}, "valid string, or Input should be a valid list, got 5"),
        ({"messages": [{"role": "user", "content": "x", "mood": "y"}]}, "the field 'messages[0].mood' is unknown"),
        ({**ASK, "temprature": 1}, "the field 'temprature' is unknown. Did you mean 'temperature'?"),
        ({**ASK, "temperature": "1"}, "temperature: Input should be a valid number, got '1'"),
        ({**ASK, "max_tokens": 5, "max_completion_tokens": 5}, "mean the same"),
        ({**ASK, "stop": [""]}, "stop[0]: String should have at least 1 character"),
        ({**ASK, "logit_bias": {"5000": 1}}, "logit_bias takes token ids of 0 to 4095, got '5000'"),
        ({**ASK, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        (
            {**ASK, "response_format": {"type": "xml"}},
            "response_format.type: Input should be 'text', 'json_object' or 'json_schema', got 'xml'",
        ),
        (schema({"type": "elephant"}), "the json_schema cannot be used as a grammar"),
        # these compile, and no text fits them, or the rows of the parser are too long
        (schema({"$ref": "#"}), "the grammar cannot continue"),
        (schema(MANY), "the grammar cannot be followed further: Parser Error"),
        ({**ASK, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs cannot set 'messages'"),
        ({**ASK, "tool_choice": "required"}, "tool_choice needs at least one tool in tools"),
        ({**ASK, "n": 2}, "n: Input should be 1, got 2"),
        ({**ASK, "audio": {}}, "the field 'audio' is unknown"),
        ({**ASK, "min_tokens": 30}, "min_tokens is at most max_tokens (24), got 30"),
        ({**ASK, "speculation": {"depth": 16}}, "speculation.depth: Input should be less than or equal to 15, got 16"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "tokens, and at most 8191 fit"),
        ({**ASK, "speculation": 3}, "speculation: Input should be an object, got 3"),
        ({**ASK, "response_format": "json"}, "response_format: Input should be an object, got 'json'"),
        ({**ASK, "chat_template_kwargs": []}, "chat_template_kwargs: Input should be an object, got []"),
        ("[1, 2]", "the body takes a JSON object, got [1, 2]"),
        ('{"messages": NaN', "the body cannot be read as JSON: "),
        ('{"model": "a", "model": "b"}', "it has the key 'model' twice"),
        (b"\xff\xfe{}", "the body cannot be read as JSON: "),
    ],
)
def test_a_mistake_is_named(server, data, message):
    status, _, answer = server.post(CHAT, data)
    error = check_error(status, json.dumps(answer), {400})
    assert message in error["message"]
    for field in ("logit_bias", "min_tokens", "max_tokens", "speculation.depth"):  # the request's own names
        if error["message"].startswith(field):
            assert error["param"] == field


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"GET http://[::1/ HTTP/1.1\r\nHost: [::1\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 33_000 + b"\r\nContent-Length: 1\r\n\r\n",  # whole at once
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_or_nothing(server, data):
    answer = server.exchange(data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert server.request("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/../../etc/passwd", {}, 404),
        ("GET", "/v1/models/%00", {}, 404),
        ("GET", CHAT, {}, 405),
        ("DELETE", "/v1/models", {}, 405),
        ("POST", CHAT, {}, 415),
        ("POST", CHAT, {**JSON, "Content-Encoding": "gzip"}, 415),
        ("GET", "/v1/models", {"Host": "evil.example"}, 403),
        ("GET", "/v1/models", {"Origin": "http://evil.example"}, 403),
        ("GET", "/v1/models", {"Origin": "null"}, 403),
    ],
)
def test_other_pages_methods_and_origins_are_refused(server, method, path, headers, status):
    found, _, body = server.request(method, path, b"{}" if method == "POST" else None, headers)
    check_error(found, body, {status})


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server):
    big = b"x" * (2**20 + 1)
    status, _, body = server.request("POST", TEXT, big, JSON)
    check_error(status, body, {413})
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = server.exchange(f"{head}Content-Length: {10**15}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413")
    chunk = b"%x\r\n%s\r\n" % (2**16, b" " * 2**16)
    answer = server.exchange(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 17)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx"])
def test_connections_that_wait_for_ever_lock_nobody_out(server, sent):
    """They say nothing, or begin a body that no page reads."""
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            connection = stack.enter_context(server.connect())
            with contextlib.suppress(ConnectionError):
                connection.sendall(sent)
        assert server.request("GET", "/health")[0] == 200
        assert server.post(CHAT, {**ASK, "max_tokens": 1})[0] == 200
    if sent:
        assert b"connection: close" in server.exchange(sent).lower()


QUICK = """
import socket
import specdec.serving.app, specdec.serving.server as server
server.HEAD_SECONDS = specdec.serving.app.BODY_SECONDS = server.WRITE_SECONDS = 0.3
make = server.listening_socket
def small(*where):
    made = make(*where)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    return made
server.listening_socket = small
"""


@pytest.mark.slow
def test_a_slow_client_is_cut_off():
    """A head or a body that comes byte by byte, and an answer that nobody reads."""
    with serving(before=QUICK) as server:
        assert server.exchange(b"GET /hea") == b""
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        assert server.exchange(head.encode() + b"{").startswith(b"HTTP/1.1 408")
        body = json.dumps({**ASK, "max_tokens": 200, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.socket() as connection:
            connection.settimeout(HUNG)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", int(server.host.split(":")[1])))
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: server.metric('specdec_responses_total{route="/v1/chat/completions",status="200"}') == 1)
            client, process = connection.getsockname(), psutil.Process(server.process.pid)
            wait_until(lambda: client not in [other.raddr for other in process.net_connections()])  # it was cut off
            found = len(connection.recv(1000))
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(65536):
                    found += len(piece)
        assert found < 200 * 21 * 60, "all of it came"  # bytes of the smallest answer
        assert server.post(CHAT, ASK)[0] == 200


# --- clients that go, queues, the end --------------------------------------------------------------------------------


def wait_until(happened):
    """Look again until it has happened; the test hangs, and is ended from outside, if it never does."""
    ends = time.monotonic() + HUNG
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.02)


def interrupted(server):
    return server.metric('specdec_finished_total{reason="interrupted"}')


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_goes_away_frees_its_turn(server, how):
    before, made = interrupted(server), server.metric("specdec_generated_tokens_total")
    body = json.dumps(LONG).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with server.connect() as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert server.post(CHAT, ASK)[0] == 200  # the next in line
    wait_until(lambda: interrupted(server) == before + 1)
    assert server.metric("specdec_generated_tokens_total") - made < LONG["max_tokens"]
    assert server.metric("specdec_requests_waiting") == 0


@pytest.mark.slow
def test_a_full_queue_is_said_and_a_waiting_client_may_go(server):
    with serving("--queue", 1, "--parallel", 1, key="a-secret") as small, contextlib.ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(small.connection())
            connection.request("POST", TEXT, json.dumps(LONG), {**JSON, "Authorization": "Bearer a-secret"})
            if not _:
                connection.getresponse().read(1)  # it runs
            else:
                wait_until(lambda: small.metric("specdec_requests_waiting") == 1)
        status, headers, answer = small.post(CHAT, ASK)
        error = check_error(status, json.dumps(answer), {429})
        assert (error["code"], error["message"]) == ("queue_full", "the queue is full, with 1 waiting")
        assert int(headers["retry-after"]) >= 1
        stack.close()  # both go
        wait_until(lambda: small.post(CHAT, ASK)[0] == 200)
        assert small.metric("specdec_queue_full_total") >= 1


def test_metrics_count_acceptance_by_position(server):
    data = {"prompt": "class Stack:\n    def __init__(self):\n", "max_tokens": 64}
    server.post(CHAT, ASK)  # whatever was still running is counted
    before = [server.metric(f'specdec_draft_{what}_total{{position="0"}}') for what in ("offered", "accepted")]
    made = server.post(TEXT, data)[2]["specdec"]
    after = [server.metric(f'specdec_draft_{what}_total{{position="0"}}') for what in ("offered", "accepted")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [made["offered"][0], made["accepted"][0]]
    text = server.request("GET", "/metrics")[2].decode()
    for name in ("tokens_per_cycle_bucket", "queue_seconds_bucket", "first_token_seconds_bucket", "token_seconds_sum"):
        assert f"specdec_{name}" in text


def test_an_api_key_is_asked_for_everywhere_but_for_the_health():
    """The server also has two names, bans the end, and has a verifier that is not exact: it keeps no session.

    A request for more tokens than it gives gets those.
    """
    options = ("--served-model-name", "first", "--served-model-name", "second", "--verifier", "margin")
    options += ("--most-tokens", 4)
    with serving("--host", "0.0.0.0", *options, "-s", "generation.banned=[0,1,2,3,4]", key="a-secret-key") as server:
        models = json.loads(server.request("GET", "/v1/models")[2])["data"]
        assert [model["id"] for model in models] == ["first", "second"]
        assert server.request("GET", "/v1/models", headers={"Host": "my.box:80"})[0] == 200  # it has names of its own
        for value in ("", "Bearer", "Bearer wrong", "Basic a-secret-key", "Bearer a-secret-ke", "Bearer \xe9"):
            for path in ("/v1/models", "/metrics", TEXT):
                status, _, body = server.request("GET", path, headers={"Authorization": value})
                assert "a-secret-key" not in check_error(status, body, {401})["message"]
        nobody = {"Authorization": "", "Host": "localhost/health?"}  # an URL made from it would have another path
        assert server.request("GET", "/v1/models", headers=nobody)[0] == 401
        assert server.request("GET", "/health", headers={"Authorization": ""})[0] == 200
        answer = server.post(CHAT, {**ASK, "model": "second", "max_tokens": 10**6})[2]
        assert answer["model"] == "second"
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (4, "length")
        assert server.metric("specdec_sessions_kept") == 0
        status, _, answer = server.post(CHAT, schema({"const": 1}))
        assert "no token is allowed here" in check_error(status, json.dumps(answer), {400})["message"]


def test_sessions_are_kept_within_their_bound(server):
    for number in range(4):
        server.post(TEXT, {"prompt": [number + 10, *range(20, 120)], "max_tokens": 1})
    assert server.metric("specdec_sessions_kept") == 2
    assert 0 < server.metric("specdec_sessions_bytes") <= 40 * 2**20  # of --keep


@pytest.mark.slow
def test_a_signal_right_after_the_address_ends_it_in_order():
    with serving("--most-tokens", 2):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines, and there is no API key"),
        (["--host", "::"], "can be reached from other machines"),
        (["--host", "some.where.invalid", "--api-key", "x"], "is no address of this machine"),
        (["--api-key", "two words"], "printable ASCII characters without spaces"),
        (["--port", "70000"], "70000 is not in the range"),
        (["-m", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_a_server_that_cannot_start_says_why(options, message):
    done = CliRunner().invoke(main, ["serve", "--port", "0", *options], env={"SPECDEC_API_KEY": None})
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(server):
    done = CliRunner().invoke(main, ["serve", "--port", server.host.split(":")[1], "-m", "/no/such/folder"])
    assert done.exit_code == 2
    assert "cannot listen at 127.0.0.1" in done.stderr
    assert "Address already in use" in done.stderr
    assert "--port 0" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("grace", "ends"), [(HUNG, "[DONE]"), (0, "the server shut down after")])
def test_a_shutdown_finishes_or_reports_what_runs(grace, ends):
    with (
        serving("--parallel", 1, "--grace", grace) as server,
        server.connection() as runs,
        server.connection() as waits,
    ):
        runs.request("POST", TEXT, json.dumps(LONG), JSON)
        answer = runs.getresponse()
        answer.read(1)
        waits.request("POST", CHAT, json.dumps(ASK), JSON)
        wait_until(lambda: server.metric("specdec_requests_waiting") == 1)
        server.process.send_signal(signal.SIGINT)
        refused = waits.getresponse()
        check_error(refused.status, refused.read(), {503})
        assert ends in answer.read().decode().strip().split("\n\n")[-1]
        server.process.wait(HUNG)  # a second signal would end it at once
        assert (f"waiting up to {HUNG} s for running answers" in server.process.stderr.read()) == bool(grace)


STUCK = """
import time, specdec.serving.engine as engine, specdec.serving.server as server
server.STOP_SECONDS = 1
engine.Batch.tick = lambda *_: time.sleep(10_000)
"""


@pytest.mark.slow
def test_a_pass_that_does_not_return_does_not_hold_the_end():
    with serving("--grace", 0, before=STUCK) as server, server.connection() as connection:
        connection.request("POST", CHAT, json.dumps(ASK), JSON)
        wait_until(lambda: server.metric("specdec_requests_waiting") == 0)
        time.sleep(0.5)  # until it runs

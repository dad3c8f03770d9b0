"""Load `specdec serve`: what it adds to a token's time, hours of use in minutes, and llama.cpp's server beside it.

    python -m benchmarks.serve_load overhead [--tokens 1024] [--repeats 51] [--json FILE]
    python -m benchmarks.serve_load load [--model demo] [--minutes 10] [--clients 8] [--json FILE]
    python -m benchmarks.serve_load peer --model FILE.gguf --llama-server PATH [--sizes 1 4 8] [--tokens 128]

``overhead`` compares a generation in this process with the same one streamed by a server, in turns: wall-clock time
from the request to the last byte, and the processor time of this process or of the server. Where other programs run,
processor time spreads less. A request of one token gives what is paid once, the rest is paid per token.

``load`` sends generations, cancellations and malformed bodies from several clients at once, compares every text with
that of plain decoding alone, and watches the server's memory, queue, threads and open files. Its exit status is 1 if a
text is wrong, a malformed body is not refused, memory grows by more than 2 % after the first minute, threads or files
are left behind, or the server ends.

``peer`` lets 1, 4 and 8 clients ask both servers, in turns, for the prompts of ``tasks.jsonl``, with as many places in
each server as clients. Its exit status is 1 if a text of ours depends on the number of clients.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import attrs
import psutil

import specdec
from benchmarks.common import (
    arguments,
    call,
    counters,
    free_port,
    median,
    memory_growth,
    resident,
    save,
    together,
    wait_for,
)

CHAT = "/v1/chat/completions"
QUESTIONS = ("Name three colours.", "Write a Python function that adds two numbers.", "Tell me about railways.")
WAITING = "specdec_requests_waiting"
TASKS = pathlib.Path(__file__).with_name("tasks.jsonl")
MALFORMED = (
    b"{",
    b"[]",
    b'{"messages": []}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b"\xff" * 100,
    b" " * (2**20 + 1),
)


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def server(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server at a free port: its host and port, and its process."""
    with running(sys.executable, "-m", "specdec", "serve", "--port", "0", *options) as process:
        assert process.stdout is not None
        yield urlsplit(process.stdout.readline().strip()).netloc, process


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process, in the system's steps (10 ms)."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def threads_and_files(pid: int) -> int:
    """Threads and open files of a process, connections included."""
    process = psutil.Process(pid)
    return process.num_threads() + process.num_fds()


def streamed(answer: bytes) -> str:
    """The text of a stream of events."""
    chunks = [json.loads(line[6:]) for line in answer.decode().split("\n\n") if line.startswith("data: {")]
    if any("error" in chunk for chunk in chunks):
        raise AssertionError(chunks[-1])
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


# --- overhead --------------------------------------------------------------------------------------------------------


def overhead(tokens: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a request and of each token after the first, in this process and by a server."""
    lm = specdec.load(depth=3)
    settings = {"ignore_eos": True}
    messages = [{"role": "user", "content": QUESTIONS[1]}]
    texts: dict[Any, str] = {}
    times: dict[tuple[str, int], list[float]] = {(name, n): [] for n in (tokens, 1) for name in ("direct", "server")}
    used = dict.fromkeys(times, 0.0)
    with server("-s", "depth.depth=3", "--keep", "0") as (host, process):

        def ask(name: str, count: int) -> str:
            if name == "direct":
                return lm.generate(messages=messages, max_new_tokens=count, **settings).text
            asked = {"messages": messages, "max_tokens": count, "stream": True, **settings}
            return streamed(call(host, "POST", CHAT, json.dumps(asked).encode())[1])

        for repeat in range(repeats + 1):  # the first round warms up
            for key in times if repeat % 2 == 0 else reversed(times):
                pid = os.getpid() if key[0] == "direct" else process.pid
                worked, started = cpu_seconds(pid), time.perf_counter()
                texts[key] = ask(*key)
                if repeat:
                    times[key].append(time.perf_counter() - started)
                    used[key] += cpu_seconds(pid) - worked
    if texts["direct", tokens] != texts["server", tokens]:
        raise SystemExit("the server's text differs")
    middle = {key: median(values) for key, values in times.items()}
    once = {name: middle[name, 1] for name in ("direct", "server")}
    pairs = zip(times["direct", tokens], times["server", tokens], strict=True)  # of one round: the machine is the same
    ratios = [(served - once["server"]) / (direct - once["direct"]) for direct, served in pairs]
    per_token = {name: (middle[name, tokens] - middle[name, 1]) / (tokens - 1) for name in ("direct", "server")}
    cpu = {name: (used[name, tokens] - used[name, 1]) / repeats / (tokens - 1) for name in ("direct", "server")}
    return {
        "tokens": tokens,
        "repeats": repeats,
        "direct_cpu_ms_per_token": cpu["direct"] * 1e3,
        "server_cpu_ms_per_token": cpu["server"] * 1e3,
        # a difference below the system's steps is no time to compare with
        "cpu_ratio_per_token": cpu["server"] / cpu["direct"] if cpu["direct"] > 0 else None,
        "direct_ms_per_token": per_token["direct"] * 1e3,
        "server_ms_per_token": per_token["server"] * 1e3,
        "ratio_per_token": median(ratios),
        "ratio_per_token_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "ms_added_to_a_request_of_one_token": (middle["server", 1] - middle["direct", 1]) * 1e3,
        "ratio_of_the_whole_request": middle["server", tokens] / middle["direct", tokens],
    }


# --- load ------------------------------------------------------------------------------------------------------------


class Client(threading.Thread):
    """Sends requests until the end, and counts what went wrong."""

    def __init__(self, host: str, number: int, expected: dict[Any, str], ends: float) -> None:
        super().__init__()
        self.host, self.expected, self.ends = host, expected, ends
        self.random = random.Random(number)
        self.counts = dict.fromkeys(("compared", "cancelled", "malformed", "queue_full"), 0)
        self.wrong: list[str] = []

    def run(self) -> None:
        while time.monotonic() < self.ends and not self.wrong:
            try:
                self.random.choices((self._compare, self._cancel, self._spoil), (6, 3, 2))[0]()
            except (AssertionError, OSError, http.client.HTTPException, ValueError) as error:
                self.wrong.append(repr(error)[:500])

    def _body(self, key: tuple[int, float, int, int], **more: Any) -> bytes:
        question, temperature, seed, tokens = key
        messages = [{"role": "user", "content": QUESTIONS[question]}]
        asked = {"messages": messages, "temperature": temperature, "seed": seed, "max_tokens": tokens, **more}
        return json.dumps(asked).encode()

    def _compare(self) -> None:
        key = self.random.choice(list(self.expected))
        stream = self.random.random() < 0.7
        status, answer = call(self.host, "POST", CHAT, self._body(key, stream=stream))
        if status == 429:
            self.counts["queue_full"] += 1
            return
        text = streamed(answer) if stream else json.loads(answer)["choices"][0]["message"]["content"]
        assert text == self.expected[key], (key, text)
        self.counts["compared"] += 1

    def _cancel(self) -> None:
        connection = http.client.HTTPConnection(self.host)
        body = self._body((0, 0.9, 1, 4096), stream=True, ignore_eos=True)
        with contextlib.closing(connection):
            connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
            if self.random.random() < 0.7:
                connection.getresponse().read(self.random.randrange(1, 2000))
        self.counts["cancelled"] += 1

    def _spoil(self) -> None:
        with contextlib.suppress(ConnectionError):  # of a body that is refused before it is read
            status, _ = call(self.host, "POST", CHAT, self.random.choice(MALFORMED))
            assert status in (400, 413, 429), status
        self.counts["malformed"] += 1


def load(model: str, minutes: float, clients: int) -> dict[str, Any]:
    """Counts of all clients, and what the server held by time."""
    lm = specdec.load(model)
    expected = {
        (question, temperature, seed, tokens): lm.generate(
            messages=[{"role": "user", "content": QUESTIONS[question]}],
            temperature=temperature,
            seed=seed,
            max_new_tokens=tokens,
            depth=0,
        ).text
        for question in range(len(QUESTIONS))
        for temperature, seed in ((0.0, 0), (0.8, 5), (1.0, 6))
        for tokens in (16, 200)
    }
    del lm
    with server(model, "--queue", str(clients)) as (host, process):
        started = time.monotonic()
        team = [Client(host, number, expected, started + minutes * 60) for number in range(clients)]
        for client in team:
            client.start()
        memory: list[tuple[float, int]] = []
        handles: list[int] = []
        waiting = 0.0
        while any(client.is_alive() for client in team):
            time.sleep(1.0)
            memory.append((time.monotonic() - started, resident(process.pid)))
            handles.append(threads_and_files(process.pid))
            waiting = max(waiting, *counters(host, WAITING).values())
        for client in team:
            client.join()
        alive = process.poll() is None
        time.sleep(1.0)
        left = counters(host, WAITING)[WAITING]
        handles_left = threads_and_files(process.pid) - max(handles[: 1 + len(handles) // 5])
    wrong = [text for client in team for text in client.wrong]
    memory_told = memory_growth(memory, minutes)
    return {
        "model": pathlib.Path(model).name,
        "minutes": minutes,
        "clients": clients,
        "requests": {name: sum(client.counts[name] for client in team) for name in team[0].counts},
        "wrong": wrong,
        "longest_queue": waiting,
        "waiting_at_the_end": left,
        "threads_and_files_left": max(0, handles_left),
        "alive": alive,
        **memory_told,
        "passed": alive
        and not (wrong or left)
        and handles_left <= 0
        and waiting <= clients
        and memory_told["memory_growth"] < 0.02,
    }


# --- llama.cpp's server beside ours ----------------------------------------------------------------------------------


@contextlib.contextmanager
def llama_server(program: str, model: str, places: int) -> Iterator[str]:
    """llama.cpp's server with this many slots of 2,048 tokens: its host and port."""
    port, threads = str(free_port()), str(os.cpu_count())
    shape = ("-np", str(places), "-c", str(2048 * places), "-t", threads, "-tb", threads)
    with running(program, "-m", model, *shape, "--port", port, "--log-disable") as process:
        host = f"127.0.0.1:{port}"
        wait_for(host, process)
        yield host


@attrs.define
class Answer:
    """One streamed answer. Times in seconds: to the first text, and from each text to the next."""

    text: str
    tokens: int
    first: float
    gaps: list[float]


def ask(host: str, prompt: str, tokens: int) -> Answer:
    """Stream the greedy answer to a prompt."""
    asked = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0.0}
    body = json.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}})
    connection = http.client.HTTPConnection(host, timeout=600.0)
    started, texts, times, count = time.perf_counter(), [], [], 0
    with contextlib.closing(connection):
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            count = (event.get("usage") or {}).get("completion_tokens", count)
            text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if text:
                texts.append(text)
                times.append(time.perf_counter())
    return Answer("".join(texts), count, times[0] - started, [b - a for a, b in itertools.pairwise(times)])


def peer(model: str, program: str, sizes: Sequence[int], tokens: int) -> dict[str, Any]:
    """Tokens per second in sum, and milliseconds to the first and from one text to the next, by number of clients."""
    tasks = [json.loads(line) for line in TASKS.read_text().splitlines()]
    kinds = {task["class"]: [other["prompt"] for other in tasks if other["class"] == task["class"]] for task in tasks}
    mixed = [prompt for group in zip(*kinds.values(), strict=False) for prompt in group][: max(sizes) * 2]
    texts: dict[str, str] = {}
    found: dict[str, Any] = {"model": pathlib.Path(model).name, "tokens": tokens, "prompts": len(mixed), "equal": True}
    for size in sizes:
        prompts = mixed[: max(size * 2, 4)]
        with (
            server(model, "--parallel", str(size), "--keep", "0", "--queue", "64") as (ours, _),
            llama_server(program, model, size) as theirs,
        ):
            for name, host in (("specdec", ours), ("llama.cpp", theirs)):
                together(size, [functools.partial(ask, host, "Say hello.", 8)] * size)
                answers, seconds = together(size, [functools.partial(ask, host, prompt, tokens) for prompt in prompts])
                gaps = sorted(gap for answer in answers for gap in answer.gaps)
                firsts = sorted(answer.first for answer in answers)
                found[f"{name}, {size} clients"] = {
                    "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
                    "first_ms_p50_p95": [1e3 * firsts[int(share * (len(firsts) - 1))] for share in (0.5, 0.95)],
                    "gap_ms_p50_p95": [1e3 * gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.95)],
                }
                if name == "specdec":
                    for prompt, answer in zip(prompts, answers, strict=True):
                        found["equal"] &= texts.setdefault(prompt, answer.text) == answer.text
    return found


def main() -> None:
    defaults = {"tokens": 0, "repeats": 51, "minutes": 10.0, "clients": 8, "sizes": [1, 4, 8]}
    options = arguments(__doc__, ("overhead", "load", "peer"), **defaults, model="demo", llama_server="")
    if options.what == "overhead":
        result, passed = overhead(options.tokens or 1024, options.repeats), True
    elif options.what == "peer":
        result = peer(options.model, options.llama_server, options.sizes, options.tokens or 128)
        passed = result["equal"]
    else:
        result = load(options.model, options.minutes, options.clients)
        passed = result["passed"]
    save(result, options)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()

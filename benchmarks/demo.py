"""Compare the embedded model's speculative and plain decoding, and plain decoding with transformers' ``generate``.

    python -m benchmarks.demo [--tokens 128] [--repeats 5] [--depth 2 3] [--json FILE]

Prints tokens per second and ratios by prompt class and depth. Arms alternate in one process; speculative and plain
outputs must be equal. ``specdec bench`` compares any model in the same way.
"""

from __future__ import annotations

import statistics
from typing import Any

import attrs
import torch

import specdec
from benchmarks.common import arguments, encoded_prompts, in_turns, measured_prompts, median, save
from specdec.checkpoints import locate
from specdec.measuring.bench import compare


def embedded(depth: int, *, tokens: int, repeats: int) -> dict[str, Any]:
    """Plain and speculative decoding of the embedded model by class of prompt, A B B A; outputs are compared."""
    report = compare(specdec.load(depth=depth), measured_prompts(), repeats=repeats, max_new_tokens=tokens)
    if not report.equal:
        raise SystemExit("outputs differ")
    classes = {group.name: attrs.asdict(group) | {"ratio": group.speedup} for group in report.classes}
    return {"depth": depth, "classes": classes, "mean_ratio": statistics.fmean(g.speedup for g in report.classes)}


def against_transformers(tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of our plain decoding and of transformers' ``generate``, on the same weights and prompt."""
    from transformers import AutoModelForCausalLM

    lm = specdec.load(drafter="none")
    prompt = encoded_prompts(lm.tokenizer)["code"]

    def theirs(dtype: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(locate("demo"), dtype=getattr(torch, dtype)).eval()

        def run() -> None:
            with torch.inference_mode():
                model.generate(torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)

        return run

    calls = {dtype: theirs(dtype) for dtype in ("bfloat16", "float32")}
    calls["specdec"] = lambda: lm.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
    rates = {name: tokens / median(values) for name, values in in_turns(calls, repeats, warm_up=1).items()}
    ours = rates.pop("specdec")
    return {
        "plain_tokens_per_second": ours,
        "transformers_tokens_per_second": rates,
        "ratio_to_its_best": ours / max(rates.values()),
    }


def main() -> None:
    options = arguments(__doc__, tokens=128, repeats=5, depth=[2])
    compared = [embedded(depth, tokens=options.tokens, repeats=options.repeats) for depth in options.depth]
    theirs = against_transformers(options.tokens, options.repeats)
    save({"speculative_against_plain": compared, "plain_against_transformers": theirs}, options)


if __name__ == "__main__":
    main()

"""Compare prefill of the 0.8B shape with transformers on the same weights, interleaved in one process.

    python -m benchmarks.prefill [--tokens 4096] [--repeats 2] [--attention sdpa eager] [--dtype bfloat16 float32]
        [--folder DIR] [--json FILE]

Prints seconds, tokens per second and our speed-up. transformers runs with each attention implementation and dtype
named, ours with the default dtype; the fastest run of each side counts. Both sides compute all layers for all tokens
and keep their caches, and compute logits only for the last token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import BYTE_TOKENS, arguments, in_turns, save, shape_0_8b


def transformers_prefill(folder: Path, attention: str, dtype: str, tokens: list[int]) -> Callable[[], Any]:
    """A call that runs the prompt through transformers' model with an empty cache."""
    from transformers import Qwen3_5ForCausalLM

    model = Qwen3_5ForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).eval()
    ids = torch.tensor([tokens])

    def run() -> Any:
        with torch.inference_mode():
            return model(ids, use_cache=True, logits_to_keep=1)

    return run


def our_prefill(folder: Path, tokens: list[int]) -> Callable[[], Any]:
    """A call that runs the prompt through our model in a fresh state and computes the last token's logits."""
    import specdec

    target = specdec.load(str(folder)).target

    def run() -> Any:
        state = target.new_state(len(tokens))
        target.prefill(state, tokens[:-1])
        return target.decode(state, tokens[-1:])

    return run


def main() -> None:
    options = arguments(__doc__, tokens=4096, repeats=2, attention=["sdpa", "eager"], dtype=["bfloat16"], folder=None)
    tokens = [(37 * i) % BYTE_TOKENS for i in range(options.tokens)]
    with shape_0_8b(options.folder) as folder:
        runs = {"specdec": our_prefill(folder, tokens)}
        runs |= {
            f"transformers {attention} {dtype}": transformers_prefill(folder, attention, dtype, tokens)
            for attention in options.attention
            for dtype in options.dtype
        }
        times = in_turns(runs, options.repeats)
    fastest = {name: min(values) for name, values in times.items()}
    theirs = min(value for name, value in fastest.items() if name != "specdec")
    result = {
        "tokens": options.tokens,
        "seconds": times,
        "tokens_per_second": {name: options.tokens / value for name, value in fastest.items()},
        "speedup_over_transformers": theirs / fastest["specdec"],
    }
    save(result, options)


if __name__ == "__main__":
    main()

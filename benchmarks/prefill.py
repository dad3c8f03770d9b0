"""Prefill of the 0.8B shape against transformers' on the same weights, interleaved in one process.

    python -m benchmarks.prefill [--tokens 4096] [--repeats 2] [--folder DIR] [--json FILE]

transformers runs in bfloat16 with each attention implementation of ``--attention``; its fastest run counts, and ours.
Both sides compute all layers for all tokens and keep their caches; neither computes logits of more than the last token.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine, save, seconds
from benchmarks.shape_0_8b import write_checkpoint

BYTE_TOKENS = 200  # of the vocabulary; random weights do not care which tokens they see


def transformers_prefill(folder: Path, attention: str, tokens: list[int]) -> Callable[[], Any]:
    """A call that runs the prompt through transformers' own model with an empty cache."""
    from transformers import Qwen3_5ForCausalLM

    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=attention).eval()
    ids = torch.tensor([tokens])

    def run() -> Any:
        with torch.inference_mode():
            return model(ids, use_cache=True, logits_to_keep=1)

    return run


def our_prefill(folder: Path, tokens: list[int]) -> Callable[[], Any]:
    """A call that runs the prompt through our model in a fresh state, and the last token's logits."""
    import specdec

    target = specdec.load(str(folder), dtype="bfloat16").target

    def run() -> Any:
        state = target.new_state(len(tokens))
        target.prefill(state, tokens[:-1])
        return target.decode(state, tokens[-1:])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--attention", nargs="+", default=["sdpa", "eager"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = [(37 * i) % BYTE_TOKENS for i in range(options.tokens)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "model.safetensors").exists():
            write_checkpoint(folder)
        runs = {"specdec": our_prefill(folder, tokens)}
        runs |= {f"transformers {name}": transformers_prefill(folder, name, tokens) for name in options.attention}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(options.repeats):
            for name in list(runs) if repeat % 2 == 0 else reversed(list(runs)):
                times[name].append(seconds(runs[name]))
    fastest = {name: min(values) for name, values in times.items()}
    theirs = min(value for name, value in fastest.items() if name != "specdec")
    result = {
        "machine": machine(),
        "tokens": options.tokens,
        "seconds": times,
        "tokens_per_second": {name: options.tokens / value for name, value in fastest.items()},
        "speedup_over_transformers": theirs / fastest["specdec"],
    }
    save(result, options.json)


if __name__ == "__main__":
    main()

"""What int8 activations cost in quality: perplexity, and how far the distributions move, on a text file.

    python -m benchmarks.int8_quality --model FILE.gguf --text wikitext2_test.txt [--tokens 4096] [--window 512]
        [--peer PYTHON] [--json FILE]

The text is cut into windows, of which every token but the first is predicted from those before it. Each arm is a dtype
with ``target.activations``; it is compared with the first, float32 as it is: the mean divergence (Kullback-Leibler, in
nats) and how often both have the same best token. ``--peer`` adds llama.cpp, as in ``benchmarks.released``.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import specdec
from benchmarks.common import Worker, arguments, llama_cpp, save

ARMS = {"float32": ("float32", "float"), "bfloat16": ("bfloat16", "float")}
ARMS |= {f"{dtype}, int8 activations": (dtype, "int8") for dtype in ARMS}


def log_probs(target: Any, tokens: list[int]) -> torch.Tensor:
    """Of every next token but the first: float32 ``[len(tokens) - 1, V]``."""
    state = target.new_state(len(tokens))
    parts = []
    for at in range(0, len(tokens) - 1, target.info.max_rows):
        rows = tokens[at : min(at + target.info.max_rows, len(tokens) - 1)]
        logits = target.decode(state, rows).need_logits().rows()
        parts.append(torch.as_tensor(logits).log_softmax(-1))
        target.commit(state, len(rows))
    return torch.cat(parts)


def theirs(peer: Worker, model: str, tokens: list[int]) -> torch.Tensor:
    """As ``log_probs``, of llama.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        peer.ask("logits", model, tokens[:-1], f"{folder}/logits.npy")
        return torch.from_numpy(np.load(f"{folder}/logits.npy")).log_softmax(-1)


def main() -> None:
    options = arguments(__doc__, model=None, text=None, tokens=4096, window=512, peer=None)
    models = {
        name: specdec.load(str(options.model), drafter="none", dtype=dtype, activations=activations)
        for name, (dtype, activations) in ARMS.items()
    }
    arms: dict[str, Callable[[list[int]], torch.Tensor]] = {
        name: functools.partial(log_probs, model.target) for name, model in models.items()
    }
    if options.peer:
        arms["llama.cpp"] = functools.partial(theirs, llama_cpp(options.peer, options.window), str(options.model))
    tokens = models["float32"].tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in arms}
    predicted = 0
    for start in range(0, max(len(tokens) - options.window, 0) + 1, options.window):
        window = tokens[start : start + options.window]
        following = torch.tensor(window[1:])
        predicted += len(following)
        exact = None
        for name, arm in arms.items():
            found = arm(window)
            exact = found if exact is None else exact
            sums[name] += torch.stack(
                [
                    -found.gather(1, following[:, None]).double().sum(),
                    (exact.exp() * (exact - found)).double().sum(),
                    (exact.argmax(-1) == found.argmax(-1)).double().sum(),
                ]
            )
    report = {
        name: {
            "perplexity": float((loss / predicted).exp()),
            "divergence": float(off / predicted),
            "same_best": float(same / predicted),
        }
        for name, (loss, off, same) in sums.items()
    }
    save({"model": options.model.name, "tokens": predicted, "arms": report}, options)


if __name__ == "__main__":
    main()

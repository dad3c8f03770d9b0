"""Random GPT-2 checkpoints, written by transformers itself, with a byte-level BPE tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

SHAPE: dict[str, Any] = {
    "n_embd": 36,
    "n_head": 3,
    "n_layer": 2,
    "n_positions": 96,
    "bos_token_id": 260,
    "eos_token_id": 260,
}
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n")]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = {token: i for i, token in enumerate([*ALPHABET, *(a + b for a, b in MERGES), "<|endoftext|>"])}


def model(*, seed: int = 0, **config: Any) -> GPT2LMHeadModel:
    """Weights, biases and norms are drawn so that each of them changes the logits."""
    made = GPT2LMHeadModel(GPT2Config(**{"vocab_size": len(TOKENS), **SHAPE, **config})).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in made.named_parameters():
            spread = 0.2 if tensor.ndim == 1 else 2 * tensor.shape[0] ** -0.5 if ".c_" in name else 0.3
            tensor.copy_(torch.randn(tensor.shape, generator=draw) * spread)
            if ".ln_" in name and name.endswith("weight"):
                tensor += 1.0
    return made


def write(folder: Path, *, dtype: str = "float32", prefix: bool = True, **config: Any) -> Path:
    """``prefix``: names start with ``transformer.``, as transformers writes them; without it as on the hub.

    The hub's files also have the causal masks of every layer.
    """
    made = model(**config).to(getattr(torch, dtype))
    made.save_pretrained(folder)
    if not prefix:
        file = folder / "model.safetensors"
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
        size = made.config.n_positions
        mask = torch.tril(torch.ones(1, 1, size, size))
        tensors |= {f"h.{i}.attn.bias": mask.clone() for i in range(made.config.n_layer)}
        save_file(tensors, file, metadata={"format": "pt"})
    tokenizer = Tokenizer(models.BPE(vocab=TOKENS, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder

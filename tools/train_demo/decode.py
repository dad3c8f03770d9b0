"""Batched decoding with the training model: prompts of one length, or caches of prompts of several lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from tools.train_demo.model import DemoModel, LayerCache


def pick(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row of ``logits [B, V]``; rows with temperature 0 take the largest."""
    greedy = logits.argmax(-1)
    probs = (logits / temperature.clamp_min(1e-3)[:, None]).softmax(-1)
    return torch.where(temperature > 0, torch.multinomial(probs, 1, generator=generator)[:, 0], greedy)


@torch.no_grad()
def decode(
    model: DemoModel,
    caches: list[LayerCache],
    hidden: Tensor,
    lengths: Tensor,
    valid: Tensor,
    count: int,
    temperature: Tensor,
    seed: int = 0,
) -> Tensor:
    """Append ``count`` tokens to each row; returns them as ``[B, count]``.

    Args: hidden ``[B, hidden]`` of each row's last token; lengths ``[B]`` tokens so far; valid ``[B, S]`` live slots
    of the attention caches; temperature ``[B]``.
    """
    generator = torch.Generator(hidden.device).manual_seed(seed)
    tokens = []
    for _ in range(count):
        token = pick(model.logits(hidden), temperature, generator)
        tokens.append(token)
        valid = torch.cat([valid, valid.new_ones(len(valid), 1)], 1)
        states, _ = model.hidden_states(token[:, None], caches, lengths[:, None], valid)
        hidden, lengths = states[:, 0], lengths + 1
    return torch.stack(tokens, 1)


@torch.no_grad()
def generate(model: DemoModel, prompts: Tensor, count: int, temperature: Tensor, seed: int = 0) -> Tensor:
    """Continue ``prompts [B, P]`` of one length; returns prompt and continuation ``[B, P + count]``."""
    batch, length = prompts.shape
    caches = [LayerCache() for _ in range(model.config.num_hidden_layers)]
    states, _ = model.hidden_states(prompts, caches)
    lengths = torch.full((batch,), length, device=prompts.device)
    valid = torch.ones(batch, length, dtype=torch.bool, device=prompts.device)
    new = decode(model, caches, states[:, -1], lengths, valid, count, temperature, seed)
    return torch.cat([prompts, new], 1)


@torch.no_grad()
def generate_ragged(model: DemoModel, prompts: list[Tensor], count: int) -> Tensor:
    """Continue prompts of different lengths greedily; returns the new tokens ``[B, count]``.

    Each prompt is read alone. Keys are already rotated by true positions, so caches are padded at their left end.
    """
    longest = max(len(prompt) for prompt in prompts)
    device = model.model.embed_tokens.weight.device
    merged: list[list[LayerCache]] = []
    hidden = []
    valid = torch.zeros(len(prompts), longest, dtype=torch.bool, device=device)
    for row, prompt in enumerate(prompts):
        caches = [LayerCache() for _ in range(model.config.num_hidden_layers)]
        states, _ = model.hidden_states(prompt[None].to(device), caches)
        hidden.append(states[:, -1])
        pad = longest - len(prompt)
        valid[row, pad:] = True
        for cache in caches:
            if cache.key is not None and cache.value is not None:
                cache.key = torch.nn.functional.pad(cache.key, (0, 0, pad, 0))
                cache.value = torch.nn.functional.pad(cache.value, (0, 0, pad, 0))
        merged.append(caches)

    def join(name: str, layer: int) -> Tensor | None:
        parts = [getattr(caches[layer], name) for caches in merged]
        return None if parts[0] is None else torch.cat(parts)

    joined = [
        LayerCache(*(join(name, layer) for name in ("key", "value", "state", "conv")))
        for layer in range(model.config.num_hidden_layers)
    ]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    zero = torch.zeros(len(prompts), device=device)
    return decode(model, joined, torch.cat(hidden), lengths, valid, count, zero)

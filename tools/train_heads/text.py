"""What heads are trained on: windows of the embedded model's text, with its hidden states and its distribution."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_demo.data import WindowSampler, load_documents
from tools.train_demo.decode import generate
from tools.train_demo.export import load_model
from tools.train_demo.model import AttentionLayer, DemoModel, LinearLayer, rotary_table
from tools.train_demo.tokenizer import encode_documents

BATCH, LENGTH, AHEAD = 8, 256, 16  # windows per batch, tokens per window, tokens after it that drafts may need
KEPT = 60  # batches that are used again
POOL = 64  # generated windows per refill


@dataclasses.dataclass(frozen=True)
class Batch:
    """Tokens ``[B, T + AHEAD]``, and of the first T the states ``[B, T, n * H]`` and the final state ``[B, T, H]``."""

    tokens: Tensor
    states: Tensor
    final: Tensor


def states_of(model: DemoModel, tokens: Tensor, boundaries: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The residual streams at ``boundaries`` side by side, and the state after the final norm."""
    rotary = rotary_table(model.config, torch.arange(tokens.shape[1]))
    x = model.model.embed_tokens(tokens)
    streams = [x]
    for layer in model.model.layers:
        x = (
            layer(x, model.compute_dtype)
            if isinstance(layer, LinearLayer)
            else layer(x, rotary, None, model.compute_dtype)[0]
        )
        streams.append(x)
    return torch.cat([streams[k] for k in boundaries], -1), model.model.norm(x)


class Text:
    """Batches from corpus text and from text that the model continued itself."""

    def __init__(self, folder: Path, data: Path, boundaries: tuple[int, ...], *, compile_layers: bool) -> None:
        self.model = load_model(folder, torch.bfloat16)
        self.boundaries = boundaries
        training, _ = load_documents(data)
        random.Random(3).shuffle(training)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        streams, starts = encode_documents(tokenizer, training, seed=1)
        self._sampler = WindowSampler(streams, starts, LENGTH + AHEAD)
        self._pool = np.zeros((0, LENGTH + AHEAD), dtype=np.int64)
        self._kept: list[Batch] = []
        self._rng = np.random.default_rng(0)
        if compile_layers:
            LinearLayer.forward = torch.compile(LinearLayer.forward)  # type: ignore[method-assign]
            AttentionLayer.forward = torch.compile(AttentionLayer.forward)  # type: ignore[method-assign]

    def refill(self) -> None:
        """Add windows that the model continues, half greedily and half at temperature 0.8."""
        opening = int(self._rng.integers(16, 97))
        prompts = torch.from_numpy(self._sampler.draw_openings(POOL, opening, self._rng))
        temperature = torch.where(torch.arange(POOL) % 2 == 0, 0.0, 0.8)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            made = generate(
                self.model, prompts, LENGTH + AHEAD - opening, temperature, seed=int(self._rng.integers(2**31))
            )
        self._pool = np.concatenate([self._pool, made.numpy()])

    @torch.no_grad()
    def new(self) -> Batch:
        """A batch that was not used before; from generated text every other time."""
        if len(self._pool) and len(self._kept) % 2:
            tokens = self._pool[self._rng.integers(len(self._pool), size=BATCH)]
        else:
            tokens = self._sampler.draw(BATCH, self._rng)
        given = torch.from_numpy(tokens)
        states, final = states_of(self.model, given[:, :LENGTH], self.boundaries)
        batch = Batch(given, states.bfloat16(), final.bfloat16())
        self._kept = [*self._kept[1 - KEPT :], batch]
        return batch

    def old(self) -> Batch:
        """One of the last batches again."""
        return self._kept[int(self._rng.integers(len(self._kept)))]

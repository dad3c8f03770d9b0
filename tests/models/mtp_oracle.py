"""An oracle of trunks and their MTP heads: transformers' decoder layers in float32, which share no code with specdec.

It keeps no state at all. Every answer is computed from the whole list of tokens, so there is nothing to roll back and
nothing that gets out of step. The library loads a head's layers as further layers of the trunk; what a head has beside
them is read here. Positions are 0, 1, 2, ...; row i of a hidden array belongs to token i.

``mistake`` is a switch of ``specdec.measuring.ablations``, which ``tests/measuring/test_ablation.py`` compares with.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from specdec.checkpoints import text_config

ODD_NAMES = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "smollm3": "SmolLM3"}
QWEN = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head.norm": "mtp.norm",
    "shared_head.head": "mtp.lm_head",
    "embed_tokens": "mtp.embed_tokens",
}


def class_of(family: str) -> str:
    """What transformers calls a family's model."""
    return f"{ODD_NAMES.get(family, family.title().replace('_', ''))}ForCausalLM"


class MtpOracle:
    """Tokens in, drafts out."""

    def __init__(self, folder: pathlib.Path, mistake: str = "", *, first: int = 0, noise: float = 0.0) -> None:
        """``first``: the pair that the head begins with; ``noise``: relative, added to every weight."""
        transformers = pytest.importorskip("transformers")
        self._made, self.mistake, self.first = (folder, mistake), mistake, first
        c = text_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        family = c["model_type"].removesuffix("_text")
        self.last, self.qwen = c["num_hidden_layers"], family.startswith("qwen")
        self.modules = range(self.last, self.last + (1 if self.qwen else c["num_nextn_predict_layers"]))
        changes = {"num_hidden_layers": self.modules.stop}
        if self.qwen:
            changes["layer_types"] = [*c["layer_types"], "full_attention"]
        kind = getattr(transformers, class_of(family))
        w: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            w |= load_file(file)
        w = {name.replace("model.language_model.", "model."): weight.float() for name, weight in w.items()}
        some = torch.Generator().manual_seed(0)
        self.w = {name: weight * (1 + noise * torch.randn(weight.shape, generator=some)) for name, weight in w.items()}
        whole = kind.from_pretrained(
            None,
            config=kind.config_class(**{**c, **changes}),
            state_dict={name.replace("mtp.layers.0.", f"model.layers.{self.last}."): w for name, w in self.w.items()},
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        ).eval()
        self.model, self.eps, self.tied = whole.model, c["rms_norm_eps"], c["tie_word_embeddings"]
        self.head = whole.lm_head.weight

    @functools.cached_property
    def nearby(self) -> MtpOracle:
        """The same with weights that are off by a rounding to float32: how far its answers are from ours is how much
        they depend on rounding."""
        return MtpOracle(*self._made, first=self.first, noise=2.0**-23)

    def _own(self, module: int, name: str) -> Tensor | None:
        """A weight that the head has beside its layers."""
        return self.w.get(f"{QWEN[name] if self.qwen else f'model.layers.{module}.{name}'}.weight")

    def _rms(self, x: Tensor, module: int, name: str) -> Tensor:
        weight = self._own(module, name)
        assert weight is not None
        return functional.rms_norm(x, x.shape[-1:], weight + self.qwen, self.eps)

    def _layer(self, x: Tensor, number: int) -> Tensor:
        """``x [n, H]`` through one layer."""
        at, mask = torch.arange(len(x))[None], torch.full((1, 1, len(x), len(x)), -torch.inf).triu(1)
        layer, cos, sin = self.model.layers[number], *self.model.rotary_emb(x[None], at)
        if self.mistake == "no-rotary" and number >= self.last:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        recurrent = getattr(layer, "block_type", "") == "linear_attention"
        out = layer(
            x[None], attention_mask=None if recurrent else mask, position_ids=at, position_embeddings=(cos, sin)
        )
        return (out[0] if isinstance(out, tuple) else out).view(x.shape)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], depth: int) -> tuple[list[int], list[object]]:
        """The ``depth`` tokens that the head drafts after ``tokens`` (the last one pending), and each one's logits."""
        known, logits = list(tokens), list[object]()
        trunk = self.model.embed_tokens(torch.tensor(tokens[:-1]))
        for number in range(self.last):
            trunk = self._layer(trunk, number)
        trunk = trunk if self.mistake == "hidden-pre-norm" else self.model.norm(trunk)
        hidden, out, paired = trunk[self.first :], torch.empty(0), list[int]()
        for step in range(depth):
            module = self.modules[min(step, len(self.modules) - 1)]
            if step < len(self.modules):  # for every position, over the module before
                hidden, paired = out if step else hidden, known[self.first + step + 1 : step + len(tokens)]
            else:
                hidden, paired = torch.cat([hidden, out[-1:]]), [*paired, known[-1]]
            own = self._own(module, "embed_tokens")
            table = self.model.embed_tokens.weight if own is None else own
            pairs = self._rms(table[paired], module, "enorm"), self._rms(hidden, module, "hnorm")
            wrong = functional.silu if self.mistake == "gate-silu" else torch.sigmoid
            with mock.patch.object(torch, "sigmoid", wrong):
                x = self._layer(torch.cat(pairs, -1) @ self._own(module, "eh_proj").T, module)  # type: ignore[union-attr]
            normed = self._rms(x, module, "shared_head.norm")
            head = self._own(module, "shared_head.head")
            logits.append((normed[-1] @ ((table if self.tied else self.head) if head is None else head).T).numpy())
            out = x if self.mistake == "chain-pre-norm" else normed
            known.append(int(logits[-1].argmax()))  # type: ignore[attr-defined]
        return known[len(tokens) :], logits

"""Weights of a published shape, created on the device tensor by tensor, and language models over them.

No large files are written or read. Every tensor has its own seed, so the same name always gives the same bits.

With random weights no draft is accepted, and timing such cycles would be unfair. So the MTP head is made right in a
given share of cases (``AGREEMENT``): layer outputs are scaled down to a trace (the work stays, the effect vanishes)
except the last MLP's, so that the next token is a fixed function of the last one,

    argmax_v head[v] . s rms_norm(E[t] + mlp(rms_norm(E[t])))       s random signs (the final norm)

The MTP head has the same MLP, and enough noise on s to agree that often. Speeds with such weights are timings, not
results of a model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from torch import Tensor

from benchmarks.common import byte_tokenizer
from benchmarks.cuda.shapes import Shape
from specdec.backends.ops import Ops
from specdec.checkpoints.reader import HeadSource
from specdec.config import Choice, GenerationConfig, RunConfig, TargetConfig
from specdec.contract import PrepareEnv
from specdec.drafters.draft_vocabulary import DraftVocabulary
from specdec.models import loading
from specdec.models.causal_lm import CausalLM
from specdec.models.weights import Weights
from specdec.pipeline import LanguageModel
from specdec.registry import registry
from specdec.registry.parts import DepthPart, DrafterPart, make_verifier
from specdec.text import Tokenizer

AGREEMENT = 0.78  # conditional, at every position: about the profile "mixed" (0.763, 0.817, 0.737, 0.863)
TRACE = 1e-3  # scale of the other layers' outputs
GAIN = 4.0  # of the MLP that decides
_TRIED = 1024  # tokens used to tune the noise
_BRANCHES = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


class MadeWeights:
    """A replacement for a checkpoint's weights, as ``specdec.models.weights.Weights`` takes them.

    Args:
        shape: determines the tensors.
        device, dtype: of the matrices; small vectors are float32.
    """

    checkpoint = SimpleNamespace(head=HeadSource())

    def __init__(self, shape: Shape, device: torch.device, *, dtype: torch.dtype = torch.bfloat16) -> None:
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._noise: float | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._shape.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._shape.tensors)

    def __len__(self) -> int:
        return len(self._shape.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape.tensors[name]

    def matrix(self, name: str, *, exact: bool = False) -> Tensor:
        return self[name]

    def __getitem__(self, name: str) -> Tensor:
        size = self._shape.tensors[name]
        made = self._agreeing(name, size)
        return self._random(name, size) if made is None else made

    def _normal(self, name: str, size: tuple[int, ...], std: float, mean: float = 0.0) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        dtype = self._dtype if len(size) == 2 else torch.float32
        return torch.empty(size, dtype=dtype, device=self._device).normal_(mean, std, generator=generator)

    def _random(self, name: str, size: tuple[int, ...]) -> Tensor:
        if name.endswith("A_log"):
            return self._normal(name, size, 1.0).sigmoid_().mul_(4).add_(0.05).log_()  # decays from slow to fast
        if name.endswith("dt_bias"):
            return self._normal(name, size, 1.0, -2.0)
        if name.endswith("linear_attn.norm.weight"):
            return self._normal(name, size, 0.1, 1.0)  # the only norm that is stored without an offset
        if name.endswith("conv1d.weight"):
            return self._normal(name, size, 0.5)
        if len(size) == 1:
            return self._normal(name, size, 0.1)
        if name.startswith(("embed_tokens", "lm_head")):
            return self._normal(name, size, 3 * size[1] ** -0.5)
        return self._normal(name, size, size[1] ** -0.5)

    # --- a head that agrees ------------------------------------------------------------------------------------------

    def _agreeing(self, name: str, size: tuple[int, ...]) -> Tensor | None:
        """The tensors that make the next token a function of the last; None for all others."""
        hidden = self._shape.hidden
        last = f"layers.{len(self._shape.config['layer_types']) - 1}."
        if name.startswith(("mtp.layers.0.mlp.", f"{last}mlp.")):
            return self._mlp(name.rsplit("mlp.", 1)[1], size)
        if name in ("mtp.layers.0.post_attention_layernorm.weight", f"{last}post_attention_layernorm.weight"):
            return torch.zeros(size, device=self._device)
        if name.endswith(_BRANCHES):
            return self._normal(name, size, TRACE * size[1] ** -0.5)
        if name.startswith(("embed_tokens", "lm_head")):
            made = self._normal(name, size, 1.0)
            made /= made.float().square().mean(1, keepdim=True).sqrt()  # equal lengths, or a few tokens always win
            made[self._shape.draft_rows :] *= 0.5  # never the best: a pruned head misses nothing
            return made
        if name == "norm.weight":
            return self._signs() - 1.0
        if name == "mtp.norm.weight":
            return self._noisy(self._tuned()) - 1.0
        if name == "mtp.fc.weight":
            made = self._normal(name, size, TRACE * hidden**-0.5)
            made[:, :hidden] = torch.eye(hidden, dtype=self._dtype, device=self._device)
            return made
        if name in ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"):
            return torch.zeros(size, device=self._device)
        return None

    def _mlp(self, which: str, size: tuple[int, ...]) -> Tensor:
        return self._normal(f"mlp.{which}", size, (GAIN if which == "down_proj.weight" else 1.0) * size[1] ** -0.5)

    def _signs(self) -> Tensor:
        return torch.where(self._normal("signs", (self._shape.hidden,), 1.0) < 0, -1.0, 1.0)

    def _noisy(self, noise: float) -> Tensor:
        return self._signs() * (1 + noise * self._normal("noise", (self._shape.hidden,), 1.0))

    def _tuned(self) -> float:
        """Find the noise at which the head is right as often as requested, by bisection over random tokens."""
        if self._noise is None:
            low, high = 0.0, 4.0
            for _ in range(12):
                self._noise = (low + high) / 2
                share = self.agreement(self._noise)
                low, high = (self._noise, high) if share > AGREEMENT else (low, self._noise)
        assert self._noise is not None
        return self._noise

    def agreement(self, noise: float) -> float:
        """The share of tokens whose successor the head finds, at that noise."""
        embed = self["embed_tokens.weight"][: self._shape.draft_rows]
        head = embed if self._shape.config["tie_word_embeddings"] else self["lm_head.weight"][: self._shape.draft_rows]
        tried = embed[:: max(1, len(embed) // _TRIED)]
        names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        last = f"layers.{len(self._shape.config['layer_types']) - 1}.mlp."
        gate, up, down = (self[last + name] for name in names)
        normed = _rms(tried)
        mixed = _rms(tried + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T)
        best = [((mixed * signs).to(head.dtype) @ head.T).argmax(1) for signs in (self._signs(), self._noisy(noise))]
        return (best[0] == best[1]).float().mean().item()


def _rms(x: Tensor) -> Tensor:
    return (x.float() * x.float().square().mean(1, keepdim=True).rsqrt()).to(x.dtype)


def build_target(shape: Shape, ops: Ops, weights: MadeWeights, *, backend: str, dtype: str) -> CausalLM:
    """The model of a shape over ``ops``, as loading a checkpoint would make it."""
    source: Any = weights
    facts = {"backend": backend, "dtype": dtype, "fingerprint": shape.name}
    return loading.build_target(registry().model("qwen3_5_text"), shape.family, Weights(ops, source), **facts)


def language_model(
    target: CausalLM,
    shape: Shape,
    folder: Path,
    *,
    drafter: str = "mtp",
    depth: int = 0,
    pruned: bool = False,
    capacity: int | None = None,
) -> LanguageModel:
    """A pipeline over an existing target, with a fixed depth; ``folder`` gets two small files."""
    options: dict[str, Any] = {}
    if drafter == "mtp" and pruned:
        path = folder / f"{shape.name}-vocabulary.json"
        DraftVocabulary(tokens=tuple(range(shape.draft_rows)), vocab_size=shape.vocabulary).write(path)
        options = {"vocabulary": str(path)}
    config = RunConfig(
        target=TargetConfig(capacity=capacity),
        drafter=Choice(drafter, options),
        depth=Choice("fixed", {"depth": depth}),
        generation=GenerationConfig(ignore_eos=True),
    )
    tokenizer = _tokenizer(folder)
    return LanguageModel(
        config=config,
        target=target,
        tokenizer=tokenizer,
        drafter=DrafterPart.of(config.drafter).prepared(PrepareEnv(target=target, tokenizer=tokenizer)),
        verifier=make_verifier(config.verifier),
        depth=DepthPart.of(config.depth),
    )


def _tokenizer(folder: Path) -> Tokenizer:
    """One token per byte; higher ids have no text."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(folder, 64)
    (folder / "config.json").write_text("{}")
    return Tokenizer.from_folder(folder)

"""Random weights for a family's ``build``, without a checkpoint, and a small ``config.json`` for its ``parse``."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from specdec.backends.cpu.reference import ReferenceOps
from specdec.contract import FamilyConfig, ForwardPass, ModelSpec
from specdec.models.loading import build_target
from specdec.models.weights import Weights

SMALL: Mapping[str, Any] = {
    "vocab_size": 97,
    # sizes, by the names that checkpoints usually have for them
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 512,
    "layer_norm_epsilon": 1e-5,
    # experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "first_k_dense_replace": 1,
    # latent attention and the delta rule
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    # MTP heads
    "mtp_num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    # what every config.json has beside what the computation needs
    "architectures": ["SmallForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    "torch_dtype": "float32",
    "transformers_version": "5.0.0",
    "use_cache": True,
}
"""A ``config.json`` of a few thousand parameters; what a family does not know, it does not read."""

WIDTHS: Mapping[str, int] = {"float32": 4, "bfloat16": 2}  # bytes of an activation


@attrs.frozen
class RandomWeights(Weights):
    """Weights drawn from their names and a seed, so that asking again gives the same; it holds every one of them."""

    seed: int = 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        name = self.prefix + name
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self.seed)
        drawn = torch.randn(shape, generator=generator)
        if math.prod(shape) == max(shape, default=1) or "norm" in name:  # a vector
            return drawn.mul_(0.3).add_(1)
        return drawn.mul_(1.5 / math.sqrt(shape[-1]))

    def host_matrix(self, name: str, shape: tuple[int, ...], *, exact: bool = False) -> torch.Tensor:
        return self.tensor(name, shape)

    def host_matrices(self, names: str | Sequence[str], shape: tuple[int, ...]) -> Sequence[torch.Tensor]:
        if isinstance(names, str):
            return self.tensor(names, shape).unbind()
        return [self.tensor(name, shape) for name in names]


def random_target(spec: ModelSpec, family: FamilyConfig, seed: int = 0, dtype: str = "float32") -> ForwardPass:
    """The family's model over random weights, on the host."""
    ops: Any = ReferenceOps(getattr(torch, dtype))
    facts: dict[str, Any] = {"backend": "cpu", "device": "cpu", "dtype": dtype, "fingerprint": f"random-{seed}"}
    return build_target(spec, family, RandomWeights(ops, None, seed=seed), **facts)

"""An EAGLE-3 head for training: the arithmetic of ``specdec/drafters/heads/eagle.py``, all rows and steps at once."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_heads.text import Batch

HIDDEN, MLP, HEADS, KV_HEADS, DIM, THETA, EPS = 256, 768, 4, 2, 64, 1e4, 1e-6
STEPS, DECAY = 4, 0.8


def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    """A random weight ``[rows, columns]``."""
    return nn.Parameter(torch.randn(rows, columns) * scale / math.sqrt(columns))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm in float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in bfloat16, as float32."""
    return F.linear(x.bfloat16(), weight.bfloat16()).float()


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate all of ``x [B, T, n, DIM]``, half-split."""
    angle = positions.float()[:, None] * THETA ** -(torch.arange(0, DIM, 2) / DIM)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Layer(nn.Module):
    """A decoder layer whose projections read ``width`` values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = matrix(HEADS * DIM, width), matrix(KV_HEADS * DIM, width)
        self.v_proj, self.o_proj = matrix(KV_HEADS * DIM, width), matrix(HIDDEN, HEADS * DIM, 0.3)
        self.gate_proj, self.up_proj = matrix(MLP, HIDDEN), matrix(MLP, HIDDEN)
        self.down_proj = matrix(HIDDEN, MLP, 0.3)
        self.input_layernorm = nn.Parameter(torch.ones(HIDDEN))
        self.post_attention_layernorm = nn.Parameter(torch.ones(HIDDEN))

    def heads(self, x: Tensor, weight: Tensor, count: int) -> Tensor:
        """``[B, T, count, DIM]``."""
        return product(x, weight).view(*x.shape[:2], count, DIM)

    def mlp(self, x: Tensor) -> Tensor:
        """The gated MLP after its norm, added."""
        y = rms(x, self.post_attention_layernorm)
        return x + product(F.silu(product(y, self.gate_proj)) * product(y, self.up_proj), self.down_proj)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attention of ``q [B, T, HEADS, DIM]`` over ``k, v [B, S, KV_HEADS, DIM]``: ``[B, T, HEADS * DIM]``."""
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2) for one in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2)

    def tensors(self) -> dict[str, Tensor]:
        """Weights under the names that checkpoints have."""
        found: dict[str, Tensor] = {}
        for name, weight in self.named_parameters():
            room = "self_attn." if name[1:] == "_proj" else "mlp." if name.endswith("_proj") else ""
            found[f"{room}{name}.weight"] = weight.detach()
        return found


class Eagle(nn.Module):
    """The head; embedding and output matrix are the model's."""

    kind, boundaries = "eagle3", (4, 8, 12)

    def __init__(self, embedding: Tensor, final_norm: Tensor) -> None:
        super().__init__()
        self.embedding = embedding
        self.fc = nn.Parameter(torch.cat([torch.zeros(HIDDEN, 2 * HIDDEN), torch.eye(HIDDEN)], 1))
        self.layer = Layer(2 * HIDDEN)
        self.hidden_norm = nn.Parameter(torch.ones(HIDDEN))
        self.norm = nn.Parameter(final_norm.clone())

    def loss(self, batch: Batch, tally: list[float]) -> Tensor:
        """Cross entropy to the model's distribution at every step of a chain; ``tally`` gets each step's accuracy."""
        layer, (_, length, _) = self.layer, batch.states.shape
        rows = torch.arange(length)
        causal, own = rows[:, None] >= rows[None, :], rows[:, None] == rows[None, :]
        g, keys, values, masks = product(batch.states, self.fc), [], [], []
        loss = torch.zeros(())
        for step in range(STEPS):
            e = rms(self.embedding[batch.tokens[:, step + 1 : step + 1 + length]], layer.input_layernorm)
            both = torch.cat([e, rms(g, self.hidden_norm)], -1)
            q = turn(layer.heads(both, layer.q_proj, HEADS), rows + step)
            keys.append(turn(layer.heads(both, layer.k_proj, KV_HEADS), rows + step))
            values.append(layer.heads(both, layer.v_proj, KV_HEADS))
            masks.append(own if step else causal)
            mixed = layer.mix(q, torch.cat(keys, 1), torch.cat(values, 1), torch.cat(masks, 1))
            g = layer.mlp(g + product(mixed, layer.o_proj))
            loss = loss + DECAY**step * self.step_loss(rms(g, self.norm), batch, step + 1, tally)
        return loss

    def step_loss(self, y: Tensor, batch: Batch, ahead: int, tally: list[float]) -> Tensor:
        """Mean cross entropy of rows ``y [B, T, H]`` to the distribution ``ahead`` positions later."""
        y, final = y[:, : -ahead or None].flatten(0, 1), batch.final[:, ahead:].flatten(0, 1)
        logits = product(y, self.embedding)
        with torch.no_grad():
            wanted = product(final, self.embedding)
            tally.append(float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()))
            wanted = wanted.softmax(-1)
        return -(wanted * logits.log_softmax(-1)).sum(-1).mean()

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """``config.json`` in speculators' layout, and the tensors."""
        layer = {f"layers.0.{name}": weight for name, weight in self.layer.tensors().items()}
        tensors = {"fc.weight": self.fc, "norm.weight": self.norm, "layers.0.hidden_norm.weight": self.hidden_norm}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.embedding.shape[0],
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(self.boundaries),
            "transformer_layer_config": geometry(self.embedding.shape[0], "llama", 1),
            "speculators_config": about("eagle3", STEPS),
        }
        return config, {**{name: weight.detach() for name, weight in tensors.items()}, **layer}


def geometry(vocab: int, model_type: str, layers: int) -> dict[str, Any]:
    """``transformer_layer_config``."""
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }


def about(kind: str, depth: int) -> dict[str, Any]:
    """``speculators_config``."""
    return {
        "algorithm": kind,
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "demo", "architectures": ["Qwen3_5ForCausalLM"]},
    }

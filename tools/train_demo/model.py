"""The Qwen3.5 text architecture with its MTP head, written for training on short sequences.

Module names equal the checkpoint's tensor names, so ``state_dict()`` is the export. Matrices are kept in float32 and
cast to ``compute_dtype`` for each product; the residual stream, norms and the recurrence stay in float32.
Axes: B sequences, T positions, H heads, D head size, C chunk length, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the network; the names are those of Hugging Face's ``Qwen3_5TextConfig``."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 384
    num_hidden_layers: int = 12
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.25
    rope_theta: float = 1e7
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192

    def is_full_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0


@dataclasses.dataclass(frozen=True)
class MtpVariant:
    """How the MTP head is run. The defaults are correct; every other value is a known mistake."""

    gate: str = "sigmoid"  # "silu": the linear layers' gate used in the MTP attention
    hidden: str = "post"  # "pre": the trunk's hidden before its final norm
    chain: str = "post"  # "pre": the chained hidden before mtp.norm
    norm_offset: float = 1.0  # 0.0: the stored norm weights without an offset
    interleave: str = "per_head"  # "halves": all queries first, then all gates
    order: str = "embedding_first"  # "hidden_first"


RIGHT = MtpVariant()


@dataclasses.dataclass
class LayerCache:
    """A layer's cache for decoding; only the fields of its kind are set."""

    key: Tensor | None = None  # [B, H_kv, S, D], rotated
    value: Tensor | None = None  # [B, H_kv, S, D]
    state: Tensor | None = None  # [B, H_v, D_k, D_v] float32
    conv: Tensor | None = None  # [B, channels, kernel - 1], the last inputs of the convolution, oldest first


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype))


class Matrix(nn.Module):
    """A bias-free projection ``[out, in]``; the product is taken in the dtype of the call."""

    def __init__(self, fan_in: int, fan_out: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in) * scale / math.sqrt(fan_in))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return linear(x, self.weight, dtype)


class OffsetNorm(nn.Module):
    """RMS norm over the last axis, scaled by ``offset + weight``: the weight is stored as a distance from 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor, offset: float = 1.0) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (offset + self.weight)


def rotary_table(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[..., R / 2]`` float32 of integer ``positions`` of any shape; R dims of a head rotate."""
    rotary_dim = int(config.head_dim * config.partial_rotary_factor)
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / rotary_dim
    angle = positions.float()[..., None] * config.rope_theta**-exponent
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first R of the D dims of ``x [B, T, H, D]``: pair (j, j + R/2) by angle j. Tables ``[(B,) T, R/2]``."""
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def delta_rule_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule: the reference of :func:`delta_rule_chunked`.

    S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q.
    Args: query, key ``[B, H, D_k]``; value ``[B, H, D_v]``; decay (g, at most 0), beta ``[B, H]``; state float32.
    """
    state = state * decay.exp()[..., None, None]
    delta = beta[..., None] * (value - torch.einsum("bhkv,bhk->bhv", state, key))
    state = state + key[..., :, None] * delta[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, query), state


def delta_rule_chunked(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over T tokens, C at a time; algebraically equal to T single steps.

    With G the running sum of g inside a chunk and S0 its entry state, unrolling the step gives
    ``(I + A) d = beta (v - e^G K S0)``, ``A_ij = beta_i e^(G_i - G_j) k_i.k_j`` for j < i, a unit lower triangular
    system. Solving it for the right-hand sides ``beta v`` and ``beta e^G K`` leaves only S0 to be carried along.

    Args: query, key ``[B, H, T, D_k]``, value ``[B, H, T, D_v]``, decay, beta ``[B, H, T]``, all float32.
    Returns: output ``[B, H, T, D_v]`` and the state after the last token ``[B, H, D_k, D_v]``.
    """
    batch, heads, length, key_dim = key.shape
    value_dim = value.shape[-1]
    pad = -length % chunk  # zero key, zero beta and zero decay leave the state alone
    if pad:
        query, key, value = (F.pad(x, (0, 0, 0, pad)) for x in (query, key, value))
        decay, beta = F.pad(decay, (0, pad)), F.pad(beta, (0, pad))
    num_chunks = (length + pad) // chunk
    query, key, value = (x.reshape(batch, heads, num_chunks, chunk, x.shape[-1]) for x in (query, key, value))
    total = decay.reshape(batch, heads, num_chunks, chunk).cumsum(-1)
    beta = beta.reshape(batch, heads, num_chunks, chunk, 1)

    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=key.device).tril()
    # masked before exp: above the diagonal the exponent is positive and may overflow
    fade = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    system = (key * beta) @ key.transpose(-1, -2) * fade  # diagonal and above are ignored by unitriangular=True
    entry = total.exp()[..., None]
    rhs = torch.cat([value * beta, key * (beta * entry)], -1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    own, carried = solved[..., :value_dim], solved[..., value_dim:]
    scores = query @ key.transpose(-1, -2) * fade
    query_in = query * entry
    last = total[..., -1:]
    key_out = (key * (last - total).exp()[..., None]).transpose(-1, -2)
    last = last.exp()[..., None]

    if state is None:
        state = key.new_zeros(batch, heads, key_dim, value_dim)
    outputs = []
    for c in range(num_chunks):
        delta = own[:, :, c] - carried[:, :, c] @ state
        outputs.append(query_in[:, :, c] @ state + scores[:, :, c] @ delta)
        state = state * last[:, :, c] + key_out[:, :, c] @ delta
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length], state


class GatedNorm(nn.Module):
    """RMS norm over one value head, times the weight (no offset), times silu of the gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * self.weight * F.silu(gate.float())


class DepthwiseConv(nn.Module):
    """Causal depthwise convolution over time, then silu; the last tap multiplies the newest input."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.rand(channels, 1, kernel) * 2 - 1) / math.sqrt(kernel))

    def forward(self, x: Tensor, tail: Tensor | None) -> Tensor:
        """``x [B, T, channels]``; ``tail [B, channels, kernel - 1]`` holds the inputs before it, zeros if None."""
        kernel, length = self.weight.shape[-1], x.shape[1]
        x = F.pad(x, (0, 0, kernel - 1, 0)) if tail is None else torch.cat([tail.transpose(1, 2).to(x), x], 1)
        out = sum(x[:, j : j + length].float() * self.weight[:, 0, j] for j in range(kernel))
        return F.silu(out)


class GatedDeltaNet(nn.Module):
    """Linear attention with a matrix-valued state per value head (gated delta rule)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.key_size = c.linear_num_key_heads * c.linear_key_head_dim
        self.value_size = c.linear_num_value_heads * c.linear_value_head_dim
        channels = 2 * self.key_size + self.value_size
        self.in_proj_qkv = Matrix(c.hidden_size, channels)
        self.in_proj_z = Matrix(c.hidden_size, self.value_size)
        self.in_proj_b = Matrix(c.hidden_size, c.linear_num_value_heads)
        self.in_proj_a = Matrix(c.hidden_size, c.linear_num_value_heads)
        self.conv1d = DepthwiseConv(channels, c.linear_conv_kernel_dim)
        step = torch.exp(torch.empty(c.linear_num_value_heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
        self.A_log = nn.Parameter(torch.empty(c.linear_num_value_heads).uniform_(1, 16).log())
        self.norm = GatedNorm(c.linear_value_head_dim, c.rms_norm_eps)
        self.out_proj = Matrix(self.value_size, c.hidden_size, scale=1 / math.sqrt(2 * c.num_hidden_layers))

    def forward(self, x: Tensor, dtype: torch.dtype, cache: LayerCache | None = None) -> Tensor:
        c, (batch, length, _) = self.config, x.shape
        qkv = self.in_proj_qkv(x, dtype)
        mixed = self.conv1d(qkv, cache.conv if cache else None)
        query, key, value = mixed.split([self.key_size, self.key_size, self.value_size], -1)
        query = query.view(batch, length, c.linear_num_key_heads, -1)
        key = key.view(batch, length, c.linear_num_key_heads, -1)
        value = value.view(batch, length, c.linear_num_value_heads, -1)
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6) * c.linear_key_head_dim**-0.5
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
        repeat = c.linear_num_value_heads // c.linear_num_key_heads
        query, key = query.repeat_interleave(repeat, 2), key.repeat_interleave(repeat, 2)
        beta = self.in_proj_b(x, dtype).float().sigmoid()
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x, dtype).float() + self.dt_bias)

        state = cache.state if cache else None
        if length == 1 and state is not None:
            out, state = delta_rule_step(query[:, 0], key[:, 0], value[:, 0], decay[:, 0], beta[:, 0], state)
            out = out[:, None]
        else:
            heads_first = [t.transpose(1, 2) for t in (query, key, value, decay, beta)]
            out, state = delta_rule_chunked(*heads_first, state)
            out = out.transpose(1, 2)
        if cache is not None:
            cache.state = state
            tail = F.pad(qkv, (0, 0, c.linear_conv_kernel_dim - 1, 0)).transpose(1, 2)
            if cache.conv is not None:
                tail = torch.cat([cache.conv.to(qkv), qkv.transpose(1, 2)], -1)
            cache.conv = tail[..., -(c.linear_conv_kernel_dim - 1) :]
        gate = self.in_proj_z(x, dtype).view(batch, length, c.linear_num_value_heads, -1)
        return self.out_proj(self.norm(out, gate).flatten(2), dtype)


class GatedAttention(nn.Module):
    """Softmax attention with normed, partly rotated heads and an output gate from the query projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        size = c.num_attention_heads * c.head_dim
        self.q_proj = Matrix(c.hidden_size, 2 * size)  # per head: D of query, then D of gate
        self.k_proj = Matrix(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Matrix(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Matrix(size, c.hidden_size, scale=1 / math.sqrt(2 * c.num_hidden_layers))
        self.q_norm = OffsetNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = OffsetNorm(c.head_dim, c.rms_norm_eps)

    def project(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], dtype: torch.dtype, variant: MtpVariant = RIGHT
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query ``[B, H, T, D]``, key and value ``[B, H_kv, T, D]``, gate ``[B, T, H * D]`` of ``x [B, T, hidden]``."""
        c, (batch, length, _) = self.config, x.shape
        packed = self.q_proj(x, dtype)
        if variant.interleave == "per_head":
            query, gate = packed.view(batch, length, c.num_attention_heads, 2, c.head_dim).unbind(3)
        else:
            query, gate = packed.view(batch, length, 2, c.num_attention_heads, c.head_dim).unbind(2)
        key = self.k_proj(x, dtype).view(batch, length, c.num_key_value_heads, c.head_dim)
        value = self.v_proj(x, dtype).view(batch, length, c.num_key_value_heads, c.head_dim)
        query = rotate(self.q_norm(query, variant.norm_offset), *rotary).to(dtype)
        key = rotate(self.k_norm(key, variant.norm_offset), *rotary).to(dtype)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), gate.flatten(2)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor,
        mask: Tensor | None,
        dtype: torch.dtype,
        variant: MtpVariant = RIGHT,
    ) -> Tensor:
        """Mix values and gate them; ``mask`` is additive or boolean, broadcastable to [B, H, T, S]; None is causal."""
        repeat = self.config.num_attention_heads // self.config.num_key_value_heads
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        gate = gate.float()
        gate = gate.sigmoid() if variant.gate == "sigmoid" else F.silu(gate)
        return self.o_proj(out.transpose(1, 2).flatten(2) * gate, dtype)


class GatedMlp(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Matrix(config.hidden_size, config.intermediate_size)
        self.up_proj = Matrix(config.hidden_size, config.intermediate_size)
        scale = 1 / math.sqrt(2 * config.num_hidden_layers)
        self.down_proj = Matrix(config.intermediate_size, config.hidden_size, scale=scale)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(dtype)
        return self.down_proj(F.silu(self.gate_proj(x, dtype)) * self.up_proj(x, dtype), dtype)


class LinearLayer(nn.Module):
    """One block of the trunk around a :class:`GatedDeltaNet`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.linear_attn = GatedDeltaNet(config)
        self.post_attention_layernorm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMlp(config)

    def forward(self, x: Tensor, dtype: torch.dtype, cache: LayerCache | None = None) -> Tensor:
        x = x + self.linear_attn(self.input_layernorm(x).to(dtype), dtype, cache)
        return x + self.mlp(self.post_attention_layernorm(x), dtype)


class AttentionLayer(nn.Module):
    """One block around a :class:`GatedAttention`; the MTP head owns one more of these."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GatedAttention(config)
        self.post_attention_layernorm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMlp(config)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        dtype: torch.dtype,
        past: tuple[Tensor, Tensor] | None = None,
        variant: MtpVariant = RIGHT,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the block's output and all keys and values, ``past`` ones first."""
        y = self.input_layernorm(x, variant.norm_offset).to(dtype)
        query, key, value, gate = self.self_attn.project(y, rotary, dtype, variant)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        x = x + self.self_attn.attend(query, key, value, gate, mask, dtype, variant)
        x = x + self.mlp(self.post_attention_layernorm(x, variant.norm_offset), dtype)
        return x, key, value


class Trunk(nn.Module):
    """Embedding, the layers and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(
            AttentionLayer(config) if config.is_full_attention(i) else LinearLayer(config)
            for i in range(config.num_hidden_layers)
        )
        self.norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)


class MtpHead(nn.Module):
    """Predict the token after next from the trunk's hidden state and the next token; can chain on its own output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = Matrix(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([AttentionLayer(config)])
        self.norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        embedding: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        dtype: torch.dtype,
        past: tuple[Tensor, Tensor] | None = None,
        variant: MtpVariant = RIGHT,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the normed output (lm_head's input), the hidden to chain, and all keys and values."""
        parts = [
            self.pre_fc_norm_embedding(embedding, variant.norm_offset),
            self.pre_fc_norm_hidden(hidden, variant.norm_offset),
        ]
        if variant.order == "hidden_first":
            parts.reverse()
        x = self.fc(torch.cat(parts, -1), dtype).float()
        x, key, value = self.layers[0](x, rotary, mask, dtype, past, variant)
        out = self.norm(x, variant.norm_offset)
        return out, out if variant.chain == "post" else x, key, value


class DemoModel(nn.Module):
    """Trunk and MTP head; the output matrix is the embedding's."""

    def __init__(self, config: ModelConfig, compute_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.model = Trunk(config)
        self.mtp = MtpHead(config)

    def hidden_states(
        self,
        tokens: Tensor,
        caches: list[LayerCache] | None = None,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The trunk over ``tokens [B, T]``: hidden after and before the final norm, each ``[B, T, hidden]`` float32.

        With ``caches``, ``positions [B, T]`` are the absolute ones and ``valid [B, S]`` marks the live cached slots
        including the new ones; caches are extended in place.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotary = rotary_table(self.config, positions)
        mask = None
        if valid is not None:
            length, slots = tokens.shape[1], valid.shape[1]
            causal = torch.ones(length, slots, dtype=torch.bool, device=tokens.device).tril(slots - length)
            mask = (causal & valid[:, None, :])[:, None]
        x = self.model.embed_tokens(tokens)
        for i, layer in enumerate(self.model.layers):
            cache = caches[i] if caches is not None else None
            if isinstance(layer, LinearLayer):
                x = layer(x, self.compute_dtype, cache)
            else:
                past = (cache.key, cache.value) if cache is not None and cache.key is not None else None
                x, key, value = layer(x, rotary, mask, self.compute_dtype, past)
                if cache is not None:
                    cache.key, cache.value = key, value
        return self.model.norm(x), x

    def draft_states(
        self, hidden: Tensor, tokens: Tensor, depth: int, variant: MtpVariant = RIGHT, first_row: int = 0
    ) -> list[Tensor]:
        """The MTP head over every pair (h_j, x_{j+1}), then chained on itself, all rows at once.

        Args: hidden ``[B, T, hidden]`` for positions 0..T-1; tokens ``[B, T + depth]`` so that step s of row j reads
        x_{j+s+1} (s counted from 0). Step s attends to the true pairs up to j and to row j's own chained keys, as in
        decoding, where chained entries of earlier rows have been dropped. Rows before ``first_row`` serve as keys
        only.
        Returns: ``depth`` tensors ``[B, T - first_row, hidden]``; number s predicts x_{j+s+2}.
        """
        length = hidden.shape[1]
        index = torch.arange(length, device=hidden.device)
        embedding = self.model.embed_tokens(tokens[:, 1 : length + 1])
        rotary = rotary_table(self.config, index)
        out, hidden, key, value = self.mtp(hidden, embedding, rotary, None, self.compute_dtype, None, variant)
        outputs, hidden = [out[:, first_row:]], hidden[:, first_row:]
        rows = index[first_row:]
        causal, own = rows[:, None] >= index[None, :], rows[:, None] == rows[None, :]
        for s in range(1, depth):
            embedding = self.model.embed_tokens(tokens[:, first_row + s + 1 : length + s + 1])
            rotary = rotary_table(self.config, rows + s)
            mask = torch.cat([causal] + [own] * s, -1)
            past = (key, value)
            out, hidden, key, value = self.mtp(hidden, embedding, rotary, mask, self.compute_dtype, past, variant)
            outputs.append(out)
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., V]`` float32."""
        return linear(hidden, self.model.embed_tokens.weight, self.compute_dtype).float()

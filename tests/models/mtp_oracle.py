"""An independent oracle of the Qwen3.5 trunk and its MTP head: float64 numpy, straight from the equations.

It shares no code with specdec: it reads the safetensors itself, computes with ``tests/backends/oracle.py``, and keeps
no state at all. Every answer is computed from the whole list of tokens, so there is nothing to roll back and nothing
that gets out of step. Positions are 0, 1, 2, ...; row i of a hidden array belongs to token i.

``mistake`` switches one convention to a wrong one: ``silu_gate`` (the attention's output gate is silu in place of
sigmoid), ``prenorm_hidden`` (h from before the trunk's final norm) or ``prenorm_chain`` (chained steps feed the vector
from before mtp.norm). ``tests/measuring/test_ablation.py`` compares with them.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from specdec.backends.ops import DeltaShape
from tests.backends.oracle import attend, conv_window, gated_delta, rms_norm, sigmoid, silu

Float64 = NDArray[np.float64]


class MtpOracle:
    """Tokens in, hidden states, logits and drafts out."""

    def __init__(self, folder: pathlib.Path, mistake: str | None = None, noise: float = 0.0) -> None:
        """``noise``: relative, added to every weight."""
        self.mistake, self._folder, rng = mistake, folder, np.random.default_rng(0)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.c = config.get("text_config", config)
        self.w: dict[str, Float64] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    short = name.replace("model.language_model.", "").removeprefix("model.")
                    weight = tensors.get_tensor(name).to(torch.float64).numpy()
                    self.w[short] = weight * (1 + noise * rng.standard_normal(weight.shape))
        rope = self.c["rope_parameters"]
        self.rotary = int(self.c["head_dim"] * rope["partial_rotary_factor"])
        self.theta = float(rope["rope_theta"])
        self.head = self.w["embed_tokens.weight" if self.c["tie_word_embeddings"] else "lm_head.weight"]
        dedicated = self.c.get("mtp_use_dedicated_embeddings", False)
        self.mtp_table = self.w["mtp.embed_tokens.weight" if dedicated else "embed_tokens.weight"]
        shared = self.mtp_table if self.c["tie_word_embeddings"] else self.head
        self.mtp_head = self.w.get("mtp.lm_head.weight", shared)

    @functools.cached_property
    def nearby(self) -> MtpOracle:
        """The same with weights that are off by a rounding to float32: how far its answers are from ours is how much
        they depend on rounding."""
        return MtpOracle(self._folder, self.mistake, 2.0**-23)

    # --- the trunk ---------------------------------------------------------------------------------------------------

    def hidden(self, tokens: Sequence[int]) -> tuple[Float64, Float64]:
        """``[n, H]`` before and after the final norm."""
        x = self.w["embed_tokens.weight"][list(tokens)]
        for i, kind in enumerate(self.c["layer_types"]):
            at = f"layers.{i}."
            y = self._rms(x, self.w[at + "input_layernorm.weight"])
            x = x + (self._attention(y, at, "sigmoid") if kind == "full_attention" else self._delta_net(y, at))
            x = x + self._mlp(self._rms(x, self.w[at + "post_attention_layernorm.weight"]), at)
        return x, self._rms(x, self.w["norm.weight"])

    def logits(self, tokens: Sequence[int]) -> Float64:
        """``[n, V]``: row i predicts token i + 1."""
        return self.hidden(tokens)[1] @ self.head.T

    def _rms(self, x: Float64, offset: Float64) -> Float64:
        return rms_norm(x, 1 + offset, self.c["rms_norm_eps"])

    def _mlp(self, y: Float64, at: str) -> Float64:
        gate, up, down = (self.w[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (silu(y @ gate.T) * (y @ up.T)) @ down.T

    def _attention(self, y: Float64, at: str, gate_kind: str) -> Float64:
        rows, heads, kv, dim = len(y), self.c["num_attention_heads"], self.c["num_key_value_heads"], self.c["head_dim"]
        at += "self_attn."
        pair = (y @ self.w[at + "q_proj.weight"].T).reshape(rows, heads, 2 * dim)
        q, gate = pair[..., :dim], pair[..., dim:]
        k = (y @ self.w[at + "k_proj.weight"].T).reshape(rows, kv, dim)
        v = (y @ self.w[at + "v_proj.weight"].T).reshape(rows, kv, dim)
        q = self._rotate(self._rms(q, self.w[at + "q_norm.weight"]))
        k = self._rotate(self._rms(k, self.w[at + "k_norm.weight"]))
        out = attend(q, k, v, dim**-0.5) * (silu(gate) if gate_kind == "silu" else sigmoid(gate))
        return out.reshape(rows, heads * dim) @ self.w[at + "o_proj.weight"].T

    def _rotate(self, x: Float64) -> Float64:
        half = self.rotary // 2
        angle = np.arange(len(x))[:, None] * self.theta ** (-2 * np.arange(half) / self.rotary)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out = x.copy()
        out[..., :half] = x[..., :half] * cos - x[..., half : self.rotary] * sin
        out[..., half : self.rotary] = x[..., half : self.rotary] * cos + x[..., :half] * sin
        return out

    def _delta_net(self, y: Float64, at: str) -> Float64:
        c, at = self.c, at + "linear_attn."
        shape = DeltaShape(
            key_heads=c["linear_num_key_heads"],
            value_heads=c["linear_num_value_heads"],
            key_dim=c["linear_key_head_dim"],
            value_dim=c["linear_value_head_dim"],
            kernel=c["linear_conv_kernel_dim"],
        )
        raw, z, b, a = (y @ self.w[f"{at}in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
        u = conv_window(np.pad(raw, ((shape.kernel - 1, 0), (0, 0))), self.w[at + "conv1d.weight"][:, 0])
        zeros = np.zeros((shape.value_heads, shape.key_dim, shape.value_dim))
        out, _ = gated_delta(u, a, b, self.w[at + "A_log"], self.w[at + "dt_bias"], shape, zeros)
        gated = rms_norm(out, self.w[at + "norm.weight"], c["rms_norm_eps"]) * silu(z.reshape(out.shape))
        return gated.reshape(len(y), -1) @ self.w[at + "out_proj.weight"].T

    # --- the head ----------------------------------------------------------------------------------------------------

    def drafts(self, tokens: Sequence[int], depth: int) -> tuple[list[int], list[Float64]]:
        """The ``depth`` tokens that the head drafts after ``tokens`` (the last one pending), and each one's logits."""
        before, after = self.hidden(tokens[:-1])
        hidden, paired = list(before if self.mistake == "prenorm_hidden" else after), list(tokens[1:])
        drafted: list[int] = []
        logits: list[Float64] = []
        for _ in range(depth):
            unnormed, normed = self.mtp(paired, np.array(hidden))
            row = normed[-1] @ self.mtp_head.T
            drafted.append(int(row.argmax()))
            logits.append(row)
            hidden.append(unnormed[-1] if self.mistake == "prenorm_chain" else normed[-1])
            paired.append(drafted[-1])
        return drafted, logits

    def mtp(self, tokens: Sequence[int], hidden: Float64) -> tuple[Float64, Float64]:
        """The head over all pairs ``(hidden[j], tokens[j])``: ``[n, H]`` before and after ``mtp.norm``."""
        e = self._rms(self.mtp_table[list(tokens)], self.w["mtp.pre_fc_norm_embedding.weight"])
        h = self._rms(hidden, self.w["mtp.pre_fc_norm_hidden.weight"])
        x = np.concatenate((e, h), axis=-1) @ self.w["mtp.fc.weight"].T
        at = "mtp.layers.0."
        y = self._rms(x, self.w[at + "input_layernorm.weight"])
        x = x + self._attention(y, at, "silu" if self.mistake == "silu_gate" else "sigmoid")
        x = x + self._mlp(self._rms(x, self.w[at + "post_attention_layernorm.weight"]), at)
        return x, self._rms(x, self.w["mtp.norm.weight"])

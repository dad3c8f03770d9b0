"""MTP heads of the families of ``tiny_families`` against oracles in float64 numpy, straight from the equations.

An oracle reads the files itself and keeps no state (see ``mtp_oracle``). Its trunk is checked with ours by way of the
hidden states that the head starts from; the trunk's own logits are compared with transformers elsewhere.
"""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.backends.oracle import attend, rms_norm, sigmoid, silu
from tests.comparisons import record
from tests.drafters.test_mtp_drafts import Run, check, prompt_of, steps, token_ids, told
from tests.models.mtp_oracle import MtpOracle
from tests.tiny_families import FAMILIES, SHAPES


def expert(w, at, e, y):
    """``down(silu(gate y) * up y)`` of expert e, in either layout."""
    if at + "experts.gate_up_proj" in w:
        both, down = w[at + "experts.gate_up_proj"][e], w[at + "experts.down_proj"][e]
        gate, up = both[: len(both) // 2], both[len(both) // 2 :]
    else:
        gate, up, down = (w[f"{at}experts.{e}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return down @ (silu(gate @ y) * (up @ y))


class QwenMoeOracle(MtpOracle):
    """Qwen3.5 MoE and Qwen3-Next: the dense oracle with experts, and with the grouped projections taken apart."""

    def __init__(self, folder):
        super().__init__(folder)
        c = self.c
        hk, dk = c["linear_num_key_heads"], c["linear_key_head_dim"]
        ratio, dv = c["linear_num_value_heads"] // hk, c["linear_value_head_dim"]
        for name in [name for name in self.w if name.endswith("in_proj_qkvz.weight")]:
            at = name.removesuffix("in_proj_qkvz.weight")
            rows = {"q": [], "k": [], "v": [], "z": [], "b": [], "a": []}
            for j in range(hk):  # key head by key head, row by row
                head = list(self.w[name][j * (2 * dk + 2 * ratio * dv) : (j + 1) * (2 * dk + 2 * ratio * dv)])
                for part, count in (("q", dk), ("k", dk), ("v", ratio * dv), ("z", ratio * dv)):
                    rows[part] += [head.pop(0) for _ in range(count)]
                pair = list(self.w[at + "in_proj_ba.weight"][j * 2 * ratio : (j + 1) * 2 * ratio])
                rows["b"] += pair[:ratio]
                rows["a"] += pair[ratio:]
            self.w[at + "in_proj_qkv.weight"] = np.array(rows["q"] + rows["k"] + rows["v"])
            for part in "zba":
                self.w[f"{at}in_proj_{part}.weight"] = np.array(rows[part])

    def _mlp(self, y, at):
        w, at, k = self.w, at + "mlp.", self.c["num_experts_per_tok"]
        out = np.zeros_like(y)
        for t, row in enumerate(y):
            scores = np.exp(w[at + "gate.weight"] @ row)  # over their sum; it cancels below
            chosen = np.argsort(-scores, kind="stable")[:k]
            for e in chosen:
                out[t] += scores[e] / scores[chosen].sum() * expert(w, at, e, row)
            gate, up, down = (w[f"{at}shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down"))
            shared = down @ (silu(gate @ row) * (up @ row))
            out[t] += sigmoid(w[at + "shared_expert_gate.weight"] @ row) * shared
        return out


class ExtraLayerOracle:
    """DeepSeek-V3 and GLM-4.5: plain norms, experts by sigmoid scores, the head in the layer behind the last."""

    def __init__(self, folder):
        self.c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.w = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    self.w[name.removeprefix("model.")] = tensors.get_tensor(name).double().numpy()
        self.head = self.w["embed_tokens.weight" if self.c["tie_word_embeddings"] else "lm_head.weight"]
        last, modules = self.c["num_hidden_layers"], self.c["num_nextn_predict_layers"]
        self.modules = [f"layers.{last + number}." for number in range(modules)]

    def _rms(self, x, name):
        return rms_norm(x, self.w[name], self.c["rms_norm_eps"])

    def _layer(self, x, at):
        y = self._rms(x, at + "input_layernorm.weight")
        x = x + (self._latent(y, at) if self.c["model_type"] == "deepseek_v3" else self._grouped(y, at))
        y = self._rms(x, at + "post_attention_layernorm.weight")
        return x + np.array([self._mlp(row, at + "mlp.") for row in y])

    def _mlp(self, y, at):
        c, w = self.c, self.w

        def plain(prefix):
            gate, up, down = (w[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
            return down @ (silu(gate @ y) * (up @ y))

        if at + "gate.weight" not in w:
            return plain(at)
        scores = sigmoid(w[at + "gate.weight"] @ y)
        corrected = scores + w[at + "gate.e_score_correction_bias"]
        size = len(scores) // c["n_group"]
        worth = [np.sort(corrected[g * size : (g + 1) * size])[-2:].sum() for g in range(c["n_group"])]
        kept = np.argsort(-np.array(worth), kind="stable")[: c["topk_group"]]
        allowed = [e for e in range(len(scores)) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: -corrected[e])[: c["num_experts_per_tok"]]
        weights = scores[chosen] / scores[chosen].sum() * c["routed_scaling_factor"]
        routed = sum(weight * expert(w, at, e, y) for weight, e in zip(weights, chosen, strict=True))
        return routed + plain(at + "shared_experts.")

    def _grouped(self, y, at):
        c, at = self.c, at + "self_attn."
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

        def project(name, count):
            bias = self.w.get(f"{at}{name}_proj.bias", 0.0)
            return (y @ self.w[f"{at}{name}_proj.weight"].T + bias).reshape(len(y), count, dim)

        q, k, v = project("q", heads), project("k", kv), project("v", kv)
        if c["use_qk_norm"]:
            q, k = self._rms(q, at + "q_norm.weight"), self._rms(k, at + "k_norm.weight")
        half = int(dim * c["partial_rotary_factor"]) // 2
        angle = np.arange(len(y))[:, None] * c["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

        def turned(x):
            left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            return np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], -1)

        q, k = turned(q), turned(k)
        return attend(q, k, v, dim**-0.5).reshape(len(y), -1) @ self.w[at + "o_proj.weight"].T

    def _latent(self, y, at):
        """Latent attention, keys and values of every head spelt out (nothing absorbed), pairs turned as complex
        numbers."""
        c, at, w = self.c, at + "self_attn.", self.w
        nope, rope, value, rank = (
            c[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        )
        heads = c["num_attention_heads"]
        if c["q_lora_rank"]:
            compressed = self._rms(y @ w[at + "q_a_proj.weight"].T, at + "q_a_layernorm.weight")
            q = compressed @ w[at + "q_b_proj.weight"].T
        else:
            q = y @ w[at + "q_proj.weight"].T
        q = q.reshape(len(y), heads, nope + rope)
        both = y @ w[at + "kv_a_proj_with_mqa.weight"].T
        latent = self._rms(both[:, :rank], at + "kv_a_layernorm.weight")
        frequencies, scale = self._frequencies()
        turn = np.exp(1j * np.arange(len(y))[:, None] * frequencies)

        def turned(x):
            pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
            return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

        shared = np.repeat(turned(both[:, rank:])[:, None], heads, 1)
        kv = (latent @ w[at + "kv_b_proj.weight"].T).reshape(len(y), heads, nope + value)
        query = np.concatenate([q[..., :nope], np.stack([turned(q[:, h, nope:]) for h in range(heads)], 1)], -1)
        key = np.concatenate([kv[..., :nope], shared], -1)
        return (
            attend(query, key, kv[..., nope:], (nope + rope) ** -0.5 * scale).reshape(len(y), -1)
            @ w[at + "o_proj.weight"].T
        )

    def _frequencies(self):
        """YaRN's frequencies, and the factor on the scores."""
        size, theta, scaling = self.c["qk_rope_head_dim"], self.c["rope_theta"], self.c["rope_scaling"]
        plain = theta ** (-2 * np.arange(size // 2) / size)
        if scaling is None:
            return plain, 1.0

        def corrected(rotations):
            turns = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
            return size * math.log(turns) / (2 * math.log(theta))

        low = max(math.floor(corrected(scaling["beta_fast"])), 0)
        high = min(math.ceil(corrected(scaling["beta_slow"])), size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)
        mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
        return plain / scaling["factor"] * ramp + plain * (1 - ramp), mscale**2

    def hidden(self, tokens):
        x = self.w["embed_tokens.weight"][list(tokens)]
        for i in range(self.c["num_hidden_layers"]):
            x = self._layer(x, f"layers.{i}.")
        return self._rms(x, "norm.weight")

    def drafts(self, tokens, depth):
        """The ``depth`` tokens that the head drafts after ``tokens`` (the last one pending), and each one's logits."""
        w, known, logits = self.w, list(tokens), []
        hidden, out, paired = self.hidden(tokens[:-1]), np.empty(0), list[int]()
        for step in range(depth):
            at = self.modules[min(step, len(self.modules) - 1)]
            if step < len(self.modules):  # for every position, over the module before
                hidden, paired = out if step else hidden, known[step + 1 : step + len(tokens)]
            else:
                hidden, paired = np.concatenate([hidden, out[-1:]]), [*paired, known[-1]]
            table = w.get(at + "embed_tokens.weight", w["embed_tokens.weight"])
            head = w.get(at + "shared_head.head.weight", self.head)
            e = self._rms(table[paired], at + "enorm.weight")
            h = self._rms(hidden, at + "hnorm.weight")
            x = self._layer(np.concatenate([e, h], -1) @ w[at + "eh_proj.weight"].T, at)
            out = self._rms(x, at + "shared_head.norm.weight")
            logits.append(out[-1] @ head.T)
            known.append(int(logits[-1].argmax()))
        return known[len(tokens) :], logits


ORACLES = {
    "qwen3_5_moe": QwenMoeOracle,
    "qwen3_next": QwenMoeOracle,
    "glm4_moe": ExtraLayerOracle,
    "deepseek_v3": ExtraLayerOracle,
}
CASES = [
    pytest.param(family, name, marks=[pytest.mark.slow] * (number > 1))
    for family in FAMILIES
    if family in ORACLES
    for number, (name, shape) in enumerate(SHAPES[family].items())
    if shape.get("mtp", True)
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_drafts_equal_the_oracle(family, name, kernels, make_target, checkpoint, record_property):
    """After prompts of several lengths, and after a cycle that kept part of a draft."""
    worst = 0.0
    oracle = ORACLES[family](checkpoint(family, dtype="float32", **SHAPES[family][name]))
    target = make_target(family, kernels=kernels, **SHAPES[family][name])
    for length in (1, 2, 19, 40):
        run = Run(target, capacity=64)
        run.prefill(prompt_of(length), sizes=[7])
        worst = max(worst, check(run, oracle, 4))
        run.verify([5, 6, 7], length % 3, 11)
        worst = max(worst, check(run, oracle, 2))
    record(record_property, family, "MTP drafts", "a float64 oracle in numpy", name, worst)


@pytest.mark.parametrize(("family", "name"), [("glm4_moe", "no-bias-groups"), ("deepseek_v3", "all-sparse-mixed")])
@given(prompt=st.lists(token_ids, min_size=1, max_size=20), chunk=st.integers(1, 20), plan=st.lists(steps, max_size=7))
def test_chained_modules_draft_as_the_oracle_whatever_happened_before(
    family, name, kernels, make_target, checkpoint, prompt, chunk, plan
):
    oracle = ORACLES[family](checkpoint(family, dtype="float32", **SHAPES[family][name]))
    run = told(make_target(family, kernels=kernels, **SHAPES[family][name]), prompt, chunk, plan)
    assert run.target.info.mtp_layers == len(oracle.modules) > 1
    check(run, oracle, 5)

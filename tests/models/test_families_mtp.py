"""MTP heads of the families of ``tiny_families`` against oracles that keep no state (see ``mtp_oracle``).

An oracle's trunk is checked with ours by way of the hidden states that the head starts from; the trunk's own logits are
compared with transformers elsewhere.
"""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional

from tests.backends.oracle import sigmoid, silu
from tests.comparisons import record
from tests.drafters.test_mtp_drafts import Run, check, prompt_of, steps, token_ids, told
from tests.models.mtp_oracle import MtpOracle
from tests.tiny_families import FAMILIES, SHAPES, TRANSFORMERS


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

    against = "a float64 oracle in numpy"

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
    """DeepSeek-V3 and GLM-4.5 from transformers' decoder layers, in float32; the head stands behind the last one.

    The library loads the head's modules as further layers of the trunk, and what they have beside is read here.
    """

    against = "transformers' layers"

    def __init__(self, folder):
        transformers = pytest.importorskip("transformers")
        c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.eps, self.last, modules = c["rms_norm_eps"], c["num_hidden_layers"], c["num_nextn_predict_layers"]
        self.modules = range(self.last, self.last + modules)
        self.w = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.w |= load_file(file)
        whole = getattr(transformers, TRANSFORMERS[c["model_type"]]).from_pretrained(
            folder,
            num_hidden_layers=self.last + modules,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        self.model, self.head = whole.eval().model, whole.lm_head.weight

    def _rms(self, x, name):
        return functional.rms_norm(x, x.shape[-1:], self.w[name], self.eps)

    def _layer(self, x, number):
        """``x [n, H]`` through one layer."""
        at, mask = torch.arange(len(x))[None], torch.full((1, 1, len(x), len(x)), -torch.inf).triu(1)
        rotary = self.model.rotary_emb(x[None], at)
        layer = self.model.layers[number]
        out = layer(x[None], attention_mask=mask, position_ids=at, position_embeddings=rotary)
        return (out[0] if isinstance(out, tuple) else out).view(x.shape)

    def hidden(self, tokens):
        x = self.model.embed_tokens(torch.tensor(tokens))
        for number in range(self.last):
            x = self._layer(x, number)
        return self.model.norm(x)

    @torch.no_grad()
    def drafts(self, tokens, depth):
        """The ``depth`` tokens that the head drafts after ``tokens`` (the last one pending), and each one's logits."""
        known, logits = list(tokens), []
        hidden, out, paired = self.hidden(tokens[:-1]), torch.empty(0), list[int]()
        for step in range(depth):
            module = self.modules[min(step, len(self.modules) - 1)]
            at = f"model.layers.{module}."
            if step < len(self.modules):  # for every position, over the module before
                hidden, paired = out if step else hidden, known[step + 1 : step + len(tokens)]
            else:
                hidden, paired = torch.cat([hidden, out[-1:]]), [*paired, known[-1]]
            table = self.w.get(at + "embed_tokens.weight", self.model.embed_tokens.weight)
            e = self._rms(table[paired], at + "enorm.weight")
            h = self._rms(hidden, at + "hnorm.weight")
            x = self._layer(torch.cat([e, h], -1) @ self.w[at + "eh_proj.weight"].T, module)
            out = self._rms(x, at + "shared_head.norm.weight")
            logits.append((out[-1] @ self.w.get(at + "shared_head.head.weight", self.head).T).numpy())
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
    record(record_property, family, "MTP drafts", oracle.against, name, worst)


@pytest.mark.parametrize(("family", "name"), [("glm4_moe", "no-bias-groups"), ("deepseek_v3", "all-sparse-mixed")])
@given(prompt=st.lists(token_ids, min_size=1, max_size=20), chunk=st.integers(1, 20), plan=st.lists(steps, max_size=7))
def test_chained_modules_draft_as_the_oracle_whatever_happened_before(
    family, name, kernels, make_target, checkpoint, prompt, chunk, plan
):
    oracle = ORACLES[family](checkpoint(family, dtype="float32", **SHAPES[family][name]))
    run = told(make_target(family, kernels=kernels, **SHAPES[family][name]), prompt, chunk, plan)
    assert run.target.info.mtp_layers == len(oracle.modules) > 1
    check(run, oracle, 5)

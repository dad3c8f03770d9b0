"""Record what speculators' own classes compute: the reference that the drafters of trained heads are compared with.

speculators pins another transformers than this project, so it runs in a virtual environment of its own:

    $ python -m venv build/speculators && build/speculators/bin/pip install speculators==0.9.0
    $ build/speculators/bin/python tools/record_heads.py tests/drafters/heads/recorded

For every variant it writes a small random head as speculators saves it, and ``expected.safetensors``: tokens and target
states that are fed, and for some lengths the drafts with the logits of every step.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.peagle import core as peagle_core
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

VOCAB, HIDDEN, LENGTH, DEPTH, MASK = 40, 16, 14, 8, 7
ENDS = (6, 9, 10, 13)  # tokens held when a draft begins; the pending one comes after them
IDS = [1, 2, 4]
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
}
REDUCED = {"draft_vocab_size": 24}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 4, "use_sliding_window": True}
EAGLE: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "eagle3": (LlamaConfig, {}, {}),
    "eagle3-residual": (LlamaConfig, {}, {"norm_before_residual": True}),
    "eagle3-before-fc": (LlamaConfig, {}, {"norm_before_fc": True}),
    "eagle3-fc-norm": (LlamaConfig, {}, {"fc_norm": True}),
    "eagle3-output": (LlamaConfig, {}, {"norm_output": True}),
    "eagle3-reduced": (LlamaConfig, {}, REDUCED),
    "eagle3-bias": (LlamaConfig, {"attention_bias": True}, {}),
    "eagle3-qwen3": (Qwen3Config, {}, REDUCED),
    "eagle3-two-layers": (LlamaConfig, {"num_hidden_layers": 2}, {}),
    "eagle3-window": (Qwen3Config, SLIDING, {}),
    "eagle3-two-states": (LlamaConfig, {}, {"eagle_aux_hidden_state_layer_ids": [2, 5]}),
}
PARALLEL = {
    "p_eagle": (LlamaConfig, {}, {}),
    "p_eagle-reduced": (Qwen3Config, {}, REDUCED | {"norm_before_residual": True}),
    "p_eagle-before-fc": (LlamaConfig, {}, {"norm_before_fc": True}),
}
TWO = {"num_hidden_layers": 2}
MIXED = TWO | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
MARKOV = {"markov_rank": 6}
CLASSES = {"dflash": (DFlashSpeculatorConfig, DFlashDraftModel), "dspark": (DSparkSpeculatorConfig, DSparkDraftModel)}
BLOCK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": (TWO, {}),
    "dflash-reduced": (TWO, REDUCED),
    "dflash-bias": ({"attention_bias": True}, {}),
    "dflash-window": (MIXED, {}),
    "dflash-window-both": (MIXED, {"sliding_window_non_causal": True}),
    "dflash-anchor": ({}, {"sample_from_anchor": True}),
    "dspark": (TWO, MARKOV),
    "dspark-reduced": ({}, REDUCED | MARKOV),
    "dspark-gated": ({}, MARKOV | {"markov_head_type": "gated"}),
    "dspark-rnn": ({}, MARKOV | {"markov_head_type": "rnn"}),
    "dspark-mask-rows": ({}, MARKOV | {"sample_from_anchor": False, "enable_confidence_head": False}),
    "dspark-no-markov-confidence": ({}, MARKOV | {"confidence_head_with_markov": False}),
}


def about(kind: str) -> SpeculatorsConfig:
    verifier = VerifierConfig(name_or_path=None, architectures=[])
    methods = [GreedyTokenProposalConfig(speculative_tokens=DEPTH)]
    return SpeculatorsConfig(
        algorithm=kind, proposal_methods=methods, default_proposal_method="greedy", verifier=verifier
    )


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that spread the logits; norms that scatter around 1."""
    draw = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 1 and "norm" in name:
            weight.copy_(1 + 0.4 * torch.randn(weight.shape, generator=draw))
        elif weight.ndim == 1:
            weight.copy_(0.5 * torch.randn(weight.shape, generator=draw))
        else:
            spread = 2.0 if "embed" in name or "lm_head" in name else 1.3
            weight.copy_(spread * torch.randn(weight.shape, generator=draw) / weight.shape[-1] ** 0.5)
    if model.use_draft_vocab:
        kept = torch.sort(torch.randperm(VOCAB, generator=draw)[: model.draft_vocab_size]).values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[kept] = True
        model.load_vocab_mappings(t2d, kept - torch.arange(len(kept)))


def fed(states: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[LENGTH + 1]`` and states ``[LENGTH, n * H]`` of different sizes."""
    draw = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(0, VOCAB, (LENGTH + 1,), generator=draw)
    rows = torch.randn(LENGTH, states, HIDDEN, generator=draw) * torch.arange(1, states + 1)[None, :, None]
    return tokens, rows.reshape(LENGTH, -1)


def mapped(model: Any, token: int) -> int:
    return token + int(model.d2t[token]) if model.use_draft_vocab else token


def watched(module: torch.nn.Module) -> list[torch.Tensor]:
    """A list that every output of a module is appended to."""
    outputs: list[torch.Tensor] = []
    module.register_forward_hook(lambda *call: outputs.append(call[-1][0]))
    return outputs


def save(folder: Path, model: Any, **expected: torch.Tensor) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for noise in ("speculators_version", "transformers_version"):
        config.pop(noise, None)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    shared = {
        "target.embed_tokens": model.embed_tokens.weight.detach(),
        "target.lm_head": model.lm_head.weight.detach(),
    }
    if model.use_draft_vocab:
        del shared["target.lm_head"]
    tensors = {name: value.contiguous() for name, value in (expected | shared).items()}
    save_file(tensors, folder / "expected.safetensors")
    for file in folder.iterdir():
        if file.suffix not in (".json", ".safetensors"):
            file.unlink()


def eagle(name: str, folder: Path, seed: int) -> None:
    config_class, layer, switches = EAGLE[name]
    switches = {"draft_vocab_size": VOCAB, "eagle_aux_hidden_state_layer_ids": IDS} | switches
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=config_class(**(SMALL | layer)), speculators_config=about("eagle3"), **switches
        )
    ).eval()
    randomise(model, seed)
    tokens, states = fed(len(switches["eagle_aux_hidden_state_layer_ids"]), seed)
    logits = watched(model.lm_head)
    drafts, scores = [], []
    for end in ENDS:
        row, rows = end - 1, end + DEPTH
        ids = torch.zeros(rows, dtype=torch.long)
        ids[:end] = tokens[1 : end + 1]  # row i joins the states of token i with token i + 1
        hidden = torch.zeros(rows, states.shape[1])
        hidden[:end] = states[:end]
        drafted, found = [], []
        for step in range(DEPTH):
            logits.clear()
            model(hidden[None], ids[None], torch.zeros(1, rows, dtype=torch.long), ttt_steps=step + 1)
            found.append(logits[step][row])
            drafted.append(mapped(model, int(found[-1].argmax())))
            ids[row + 1 + step] = drafted[-1]
        drafts.append(drafted)
        scores.append(torch.stack(found))
    save(folder, model, tokens=tokens, states=states, drafts=torch.tensor(drafts), logits=torch.stack(scores))


def whole_rollouts(seq_length: int, num_depths: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rollout at every depth, in place of a random sample of them: anchors and depths of all rows."""
    parts = [torch.arange(seq_length - depth) for depth in range(num_depths)]
    depths = [torch.full_like(part, depth) for depth, part in enumerate(parts)]
    return torch.cat(parts), torch.cat(depths)


def parallel(name: str, folder: Path, seed: int) -> None:
    config_class, layer, switches = PARALLEL[name]
    switches = {"draft_vocab_size": VOCAB, "eagle_aux_hidden_state_layer_ids": IDS} | switches
    model = PEagleDraftModel(
        PEagleSpeculatorConfig(
            transformer_layer_config=config_class(**(SMALL | layer)),
            speculators_config=about("peagle"),
            mask_token_id=MASK,
            **switches,
        )
    ).eval()
    randomise(model, seed)
    peagle_core.generate_cod_sample_indices = whole_rollouts
    tokens, states = fed(len(IDS), seed)
    logits = watched(model.lm_head)
    drafts, scores = [], []
    for end in ENDS:
        rows = end + DEPTH
        ids, hidden = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, states.shape[1])
        ids[:end], hidden[:end] = tokens[1 : end + 1], states[:end]
        logits.clear()
        model(
            hidden[None],
            ids[None],
            torch.zeros(1, rows, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, rows, HIDDEN),
            loss_config=resolve_loss_config("kl_div", "eager"),
            num_depths=DEPTH,
        )
        starts = [0]
        for depth in range(DEPTH - 1):
            starts.append(starts[-1] + rows - depth)
        found = torch.stack([logits[0][start + end - 1] for start in starts])
        drafts.append([mapped(model, int(row.argmax())) for row in found])
        scores.append(found)
    save(folder, model, tokens=tokens, states=states, drafts=torch.tensor(drafts), logits=torch.stack(scores))


def block(name: str, folder: Path, seed: int) -> None:
    (config_class, model_class), (layer, switches) = CLASSES[name.split("-")[0]], BLOCK[name]
    switches = {"draft_vocab_size": VOCAB, "aux_hidden_state_layer_ids": IDS} | switches
    model = model_class(
        config_class(
            transformer_layer_config=Qwen3Config(**(SMALL | layer)),
            speculators_config=about(name.split("-")[0]),
            block_size=DEPTH,
            mask_token_id=MASK,
            **switches,
        )
    ).eval()
    randomise(model, seed)
    tokens, states = fed(len(IDS), seed)
    from_anchor = model.config.sample_from_anchor
    drafts, scores, sure = [], [], []
    for end in ENDS:
        rows = end + 2 * DEPTH
        ids, hidden = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, states.shape[1])
        ids[: end + 1], hidden[:end] = tokens[: end + 1], states[:end]
        mask = torch.zeros(1, rows)
        mask[0, end] = 1  # the only anchor: the pending token
        state, base, *_ = model._backbone_forward(
            hidden[None],
            ids[None],
            mask,
            torch.zeros(1, rows, HIDDEN),
            torch.zeros(1, rows, dtype=torch.long),
            max_anchors=1,
        )
        first = 0 if from_anchor else 1
        state, base = state[0], base[0]
        markov = getattr(model, "markov_head", None)
        chosen, found, confidence = [int(tokens[end])], [], []
        for row in range(DEPTH):
            logits = base[row]
            previous = torch.tensor([chosen if from_anchor else [chosen[0], *chosen]])[:, : row + 1]
            if markov is not None and row >= first:
                bias = markov.block_bias(prev_token_ids=previous, hidden_states=state[None, : row + 1])
                logits = logits + bias[0, -1]
            if getattr(model, "confidence_head", None) is not None and row >= first:
                features = state[row]
                if model.config.confidence_head_with_markov:
                    features = torch.cat([features, markov.prev_embeddings(previous)[0, -1]])
                confidence.append(torch.sigmoid(model.confidence_head(features)))
            if row >= first:
                found.append(logits)
                chosen.append(mapped(model, int(logits.argmax())))
        drafts.append(chosen[1:])
        scores.append(torch.stack(found))
        sure.append(torch.stack(confidence) if confidence else torch.zeros(0))
    expected = {"drafts": torch.tensor(drafts), "logits": torch.stack(scores), "confidence": torch.stack(sure)}
    save(folder, model, tokens=tokens, states=states, **expected)


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_grad_enabled(False)
    for seed, name in enumerate([*EAGLE, *PARALLEL, *BLOCK]):
        record = eagle if name in EAGLE else parallel if name in PARALLEL else block
        record(name, root / name, seed)
        print(name)


if __name__ == "__main__":
    main()

"""Drafts of DFlash heads are those of transformers' own generator, for random small heads that transformers saved.

A second reference beside speculators' classes, in the layout that numbers layers: the generator takes the output of
layer k from ``hidden_states[k + 1]``, embeds a block with the target's module, and keeps its own cache over the cycles.
Sliding layers are left out: transformers' mask and its cache count a window differently.
"""

from types import SimpleNamespace

import attrs
import pytest
import torch

from tests.drafters.heads.recorded_heads import ENDS, LAYERS, Recorded, RecordedTarget
from tests.drafters.heads.test_recorded_heads import BOUND, run

VOCAB, HIDDEN, LENGTH, BLOCK, MASK = 40, 16, 14, 8, 7
SMALL = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [0, 1, 3],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
VARIANTS = {
    "three layers": {"num_hidden_layers": 3, "num_key_value_heads": 1},
    "another base and eps": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-2},
    "long": {"rope_parameters": YARN},
    "state after the final norm": {"target_layer_ids": [0, 2, LAYERS - 1]},
    "embeddings": {"target_layer_ids": [-1, 4]},
    "scaled embedding": {},
}


@torch.no_grad()
def generated(variant, folder):
    """Save a random head; returns what the generator drafts at every length, and the boundaries of its states."""
    transformers = pytest.importorskip("transformers")
    config_of = transformers.MuseGlimmerAssistantConfig
    given = SMALL | VARIANTS[variant]
    config = config_of(**given, layer_types=["full_attention"] * given["num_hidden_layers"])
    draw = torch.Generator().manual_seed(sorted(VARIANTS).index(variant))
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=draw)
        weight.copy_(1 + 0.4 * noise if "norm" in name else 1.3 * noise / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)

    boundaries = [k + 1 for k in given["target_layer_ids"]]
    tokens = torch.randint(0, VOCAB, (LENGTH + 1,), generator=draw)
    states = {k: (k + 1) * torch.randn(LENGTH, HIDDEN, generator=draw) for k in boundaries}
    embed = torch.nn.Embedding(VOCAB, HIDDEN)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    for weight in (embed.weight, head.weight):
        weight.copy_(2 * torch.randn(weight.shape, generator=draw) / HIDDEN**0.5)
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    settings = transformers.GenerationConfig(max_length=64, do_sample=False)
    drafts, logits = [], []
    generator = DFlashTokenCandidateGenerator(model, embed, head, settings)
    before = 0
    for end in ENDS:
        hidden = {k: rows[None, before:end] for k, rows in states.items()}
        ids, scores = generator.get_candidates(
            tokens[None, : end + 1],
            {"position_ids": torch.arange(end + 1)[None], "attention_mask": torch.ones(1, end + 1)},
            SimpleNamespace(hidden_states=hidden),
            is_first_iteration=False,
            n_last_matches=end - before - 1,
        )
        drafts.append(ids[0, end + 1 :])
        logits.append(scores[0])
        before = end
    expected = {
        "tokens": tokens,
        "states": torch.cat(list(states.values()), dim=1),
        "drafts": torch.stack(drafts),
        "logits": torch.stack(logits),
        "target.embed_tokens": embed.weight.detach() / (4 if variant == "scaled embedding" else 1),
        "target.lm_head": head.weight.detach(),
    }
    return expected, [min(k, LAYERS - 1) for k in boundaries]  # the last layer's state comes after the final norm


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_transformers(variant, tmp_path, monkeypatch):
    expected, boundaries = generated(variant, tmp_path / "head")
    if variant == "scaled embedding":
        shared = RecordedTarget.shared_weights
        monkeypatch.setattr(RecordedTarget, "shared_weights", lambda self: attrs.evolve(shared(self), embed_scale=4.0))
    for chunk, depths in ((64, (7, 1, 2, 7)), (1, (3, 7, 5, 4)), (5, (6, 7, 7, 1))):
        recorded = Recorded.of(tmp_path / "head", expected, boundaries)
        assert run(recorded, monkeypatch, chunk, depths) < BOUND
    assert len({tuple(draft.tolist()) for draft in expected["drafts"]}) > 1

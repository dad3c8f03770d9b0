"""What a head's files say is taken as every tool takes it: read otherwise, the head drafts something else."""

import itertools

import attrs
import pytest
import torch
from safetensors.torch import load_file

from tests.drafters.heads.recorded_heads import ENDS, RECORDED, Recorded, RecordedTarget
from tests.drafters.heads.test_head_layouts import edited, flat, tensor, zlab
from tests.drafters.heads.test_recorded_heads import BOUND, run


def test_layer_ids_can_be_read_by_the_other_convention(monkeypatch):
    """Read as layers, boundaries 1, 2 and 4 become 2, 3 and 5, and only their states give the same drafts."""
    assert run(Recorded.load("eagle3", layer_ids="layer", states=(2, 3, 5)), monkeypatch) < BOUND


def test_a_bias_of_fc_is_added(tmp_path, monkeypatch):
    """States that are moved by what the bias adds give the drafts of the head without one."""
    bias = torch.linspace(-1, 1, 16)
    folder = edited("eagle3", tmp_path / "head", tensor("fc.bias", bias))
    expected = load_file(RECORDED / "eagle3" / "expected.safetensors")
    fc = load_file(RECORDED / "eagle3" / "model.safetensors")["fc.weight"]
    moved = expected | {"states": expected["states"] - torch.linalg.pinv(fc) @ bias}
    assert run(Recorded.of(folder, moved, (1, 2, 4)), monkeypatch) < BOUND


def test_a_block_of_z_labs_takes_the_target_s_embedding_with_its_scale(tmp_path, monkeypatch):
    right = RecordedTarget.shared_weights

    def scaled(self):
        shared = right(self)
        return attrs.evolve(shared, embed_tokens=shared.embed_tokens / 4, embed_scale=4.0)

    monkeypatch.setattr(RecordedTarget, "shared_weights", scaled)
    assert run(Recorded.load("dflash", folder=edited("dflash", tmp_path / "head", zlab)), monkeypatch) < BOUND


def repeated(config, tensors):
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()


def tied(config, tensors):
    del tensors["lm_head.weight"]
    config["tie_word_embeddings"] = True


def one_state(config, tensors):
    flat(config, tensors)
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [3]
    tensors["fc.weight"] = torch.eye(tensors["fc.weight"].shape[0])


def without_fc(config, tensors):
    flat(config, tensors)
    del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], tensors["fc.weight"]
    config["eagle_config"]["use_aux_hidden_state"] = False


@pytest.mark.parametrize("edits", [(repeated, tied), (one_state, without_fc)])
def test_what_a_head_lacks_is_what_the_formats_say(edits, tmp_path):
    """A tied head computes with its own embedding, and one without fc reads the state after the final norm."""
    drafts = []
    for number, edit in enumerate(edits):
        recorded = Recorded.load("eagle3", folder=edited("eagle3", tmp_path / str(number), edit))
        recorded.prefill(6)
        drafts.append([recorded.drafter.propose(recorded.context(6), depth).tokens for depth in (1, 8)])
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("name", ["dspark", "dspark-reduced", "dspark-gated", "dspark-no-markov-confidence"])
def test_the_confidence_is_that_of_speculators_and_cuts_the_draft(name):
    """A draft ends before the first row whose confidence in speculators' class is below a threshold."""
    recorded = Recorded.load(name)
    for number in range(len(recorded.expected["confidence"])):
        confidence = recorded.expected["confidence"][number].tolist()
        drafts = recorded.expected["drafts"][number].tolist()
        for low, high in itertools.pairwise(sorted(confidence)):
            if high - low < 1e-4:  # the threshold between them would decide by rounding
                continue
            cut = Recorded.load(name, min_acceptance=(low + high) / 2)
            cut.prefill(ENDS[number])
            kept = next(row for row, value in enumerate(confidence) if value <= low)
            assert list(cut.drafter.propose(cut.context(ENDS[number]), 8).tokens) == drafts[:kept]

"""What a head's files say is taken as every tool takes it: read otherwise, the head drafts something else."""

import itertools

import attrs
import pytest
import torch
from safetensors.torch import load_file

from specdec.drafters.heads import eagle, layout, plugin
from tests.drafters.heads.recorded_heads import ENDS, LAYERS, RECORDED, Recorded
from tests.drafters.heads.test_head_layouts import edited, flat, tensor
from tests.drafters.heads.test_recorded_heads import BOUND, run


def evolved(**changes):
    return lambda found: attrs.evolve(found, **changes)


def differs(recorded, monkeypatch):
    """Whether drafts or logits are not those of speculators' classes."""
    try:
        return not run(recorded(), monkeypatch) < BOUND
    except AssertionError:
        return True


def misread(patch, wrong):
    """Let every head be loaded with a layout that is changed."""
    read = layout.read_layout
    patch.setattr(plugin, "read_layout", lambda *files, **options: wrong(read(*files, **options)))


def test_layer_ids_that_are_read_by_the_other_convention_are_found(monkeypatch):
    """Read as layers, boundaries 1, 2 and 4 become 2, 3 and 5, and only their states give the same drafts."""
    assert differs(lambda: Recorded.load("eagle3", layer_ids="layer"), monkeypatch)
    assert differs(lambda: Recorded.load("dflash", layer_ids="layer"), monkeypatch)
    assert run(Recorded.load("eagle3", layer_ids="layer", states=(2, 3, 5)), monkeypatch) < BOUND


def test_states_by_default_are_those_that_all_engines_take(tmp_path, monkeypatch):
    """Without ids the boundaries are 2, L/2 and L - 3; read as layers they would be the next ones."""

    def unsaid(config, tensors):
        flat(config, tensors)
        del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]

    folder = edited("eagle3", tmp_path / "head", unsaid)
    default = (2, LAYERS // 2, LAYERS - 3)
    assert run(Recorded.load("eagle3", folder=folder, states=default), monkeypatch) < BOUND
    moved = tuple(k + 1 for k in default)
    assert differs(lambda: Recorded.load("eagle3", folder=folder, states=moved), monkeypatch)


def test_a_bias_of_fc_is_added(tmp_path, monkeypatch):
    """States that are moved by what the bias adds give the drafts of the head without one."""
    bias = torch.linspace(-1, 1, 16)
    folder = edited("eagle3", tmp_path / "head", tensor("fc.bias", bias))
    expected = load_file(RECORDED / "eagle3" / "expected.safetensors")
    fc = load_file(RECORDED / "eagle3" / "model.safetensors")["fc.weight"]
    moved = expected | {"states": expected["states"] - torch.linalg.pinv(fc) @ bias}

    def biased():
        return Recorded.of(folder, moved, (1, 2, 4))

    assert run(biased(), monkeypatch) < BOUND
    built(monkeypatch, eagle.EagleNetwork, fc_bias=None)
    assert differs(biased, monkeypatch)


def test_a_tied_head_computes_with_its_own_embedding(tmp_path, monkeypatch):
    """It drafts as one whose files repeat the embedding as the output matrix; the target's matrix drafts otherwise."""

    def repeated(config, tensors):
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()

    def tied(config, tensors):
        del tensors["lm_head.weight"]
        config["tie_word_embeddings"] = True

    def drafts(folder):
        recorded = Recorded.load("eagle3", folder=folder)
        recorded.prefill(6)
        return [recorded.drafter.propose(recorded.context(6), depth).tokens for depth in (1, 8)]

    wanted = drafts(edited("eagle3", tmp_path / "repeated", repeated))
    folder = edited("eagle3", tmp_path / "tied", tied)
    assert drafts(folder) == wanted
    misread(monkeypatch, evolved(own_head=False))
    assert drafts(folder) != wanted


def test_a_head_without_fc_reads_the_state_after_the_final_norm(tmp_path):
    """It drafts as one whose fc is the identity over that state."""

    def one_state(config, tensors):
        flat(config, tensors)
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [3]
        tensors["fc.weight"] = torch.eye(tensors["fc.weight"].shape[0])

    def without_fc(config, tensors):
        flat(config, tensors)
        del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], tensors["fc.weight"]
        config["eagle_config"]["use_aux_hidden_state"] = False

    drafts = []
    for number, edit in enumerate((one_state, without_fc)):
        recorded = Recorded.load("eagle3", folder=edited("eagle3", tmp_path / str(number), edit))
        recorded.prefill(6)
        drafts.append(recorded.drafter.propose(recorded.context(6), 6).tokens)
    assert drafts[0] == drafts[1]


def built(patch, kind, **parts):
    """Build the networks of this kind without some of their parts."""
    of = kind.of.__func__
    patch.setattr(kind, "of", classmethod(lambda cls, *given, **named: attrs.evolve(of(cls, *given, **named), **parts)))


def cut_as_recorded(name):
    """Whether a draft ends before the first row whose confidence in speculators' class is below a threshold."""
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
            if list(cut.drafter.propose(cut.context(ENDS[number]), 8).tokens) != drafts[:kept]:
                return False
    return True


@pytest.mark.parametrize("name", ["dspark", "dspark-reduced", "dspark-gated", "dspark-no-markov-confidence"])
def test_the_confidence_is_that_of_speculators_and_cuts_the_draft(name):
    assert cut_as_recorded(name)

"""Hidden states at layer boundaries only where they are asked for; ``test_transformers_parity.py`` compares them."""

import numpy as np
import pytest
import torch

import specdec
from specdec.contract import DrafterSpec, MtpPairs, Needs
from specdec.drafters.none import NoDrafter
from specdec.errors import UnsupportedError
from tests import tiny
from tests.plugin_objects import plugin_of
from tests.tiny_families import SHAPES


def test_what_is_not_asked_for_is_neither_computed_nor_kept(checkpoint, monkeypatch):
    """No hidden state in any output, no pass that takes boundaries, no pairs, and no cache for the head."""
    folder = checkpoint("qwen3_5", **tiny.QWEN3_5_SHAPES["mixed-layers"])
    target = tiny.make_target(folder)  # of its own: what passes it has made is looked at
    joined = []
    concat = type(target.ops).concat
    monkeypatch.setattr(type(target.ops), "concat", lambda self, a, b: joined.append(a) or concat(self, a, b))
    monkeypatch.setattr(MtpPairs, "add", lambda *arguments: pytest.fail("pairs were kept"))
    monkeypatch.setattr(type(target.ops), "hidden", lambda self, x: pytest.fail("hidden states were wrapped"))
    state = target.new_state(64)
    outputs = [target.prefill(state, [1, 2, 3, 4, 5]), target.decode(state, [6, 7])]
    target.commit(state, 1)
    assert [(output.hidden, output.boundaries) for output in outputs] == [(None, {})] * 2
    assert not joined
    assert list(target._target_passes) == [()]
    assert state.pairs is state.mtp is None
    assert state.nbytes() < target.new_state(64, Needs(mtp=True)).nbytes()
    assert not any(name.startswith(("mtp", "last")) for name in target.snapshot(state).arrays)


def test_columns_of_passes_are_those_of_the_boundaries_in_any_order_of_cutting_and_joining(checkpoint):
    """Of passes with equal layouts, and of one that gives another boundary as well."""
    target = tiny.make_target(checkpoint("qwen3_5", **tiny.QWEN3_5_SHAPES["mixed-layers"]))
    last = target.info.layers
    needs, more = Needs(boundaries=(1, last), final_hidden=True), Needs(boundaries=(0, 1, last), final_hidden=True)
    outputs = [target.prefill(target.new_state(8, asked), [1, 2, 3]) for asked in (needs, needs, more)]
    columns = [output.boundaries.side_by_side(needs) for output in outputs]
    apart = (*(outputs[0].boundaries[k] for k in needs.boundaries), outputs[0].hidden)
    expected = np.concatenate([hidden.rows() for hidden in apart], axis=1)
    for one in columns:
        assert np.array_equal(one.rows(), expected)
    for joined in (columns[0].join(columns[1:2]), columns[0].join(columns[1:]), columns[2].join(columns[:2])):
        assert np.array_equal(joined[2:5].rows(), np.concatenate([expected] * 3)[2:5])
    assert outputs[2].boundaries.side_by_side(Needs(boundaries=(0, last))) is None
    with pytest.raises(KeyError):
        outputs[0].boundaries[0]


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (Needs(boundaries=(0, 99)), r"layer boundary 99, and this target has boundaries 0 to \d+"),
        (Needs(boundaries=(-1,)), "layer boundary -1"),
        (Needs(mtp=True), "an MTP head, and this qwen3 checkpoint has none"),
    ],
)
def test_what_a_target_cannot_give_is_refused_when_the_pipeline_is_built(needs, said, checkpoint, make_target, install):
    """For needs that are known beforehand, and for those that a drafter's own checkpoint decides."""
    with pytest.raises(UnsupportedError, match=said):
        make_target("qwen3").new_state(8, needs)
    for given in (needs, lambda config, shared: needs):
        spec = DrafterSpec(name="needy", factory=NoDrafter, needs=given)
        install(plugin_of(specdec_drafters=lambda self, spec=spec: [spec]))
        with pytest.raises(UnsupportedError, match=f"the drafter 'needy' needs .*{said}"):
            specdec.load(str(checkpoint("qwen3")), drafter="needy", depth=1)


def test_a_prompt_runs_only_the_layers_that_fill_caches_unless_somebody_reads_the_others(checkpoint, monkeypatch):
    """With the bits of all layers, and a cache for each layer that has keys and values."""
    target = tiny.make_target(checkpoint("gemma4", **SHAPES["gemma4"]["small"]))
    read, attend = list[int](), type(target.ops).call
    monkeypatch.setattr(
        type(target.ops), "call", lambda self, name, *a, **n: read.append(name) or attend(self, name, *a, **n)
    )
    found = []
    for needs in (Needs(), Needs(final_hidden=True)):
        read.clear()
        state = target.new_state(64, needs)
        assert len(state.caches) == 2
        target.prefill(state, list(range(20)))
        assert read.count("attend_cached") == (3 if needs.final_hidden else 0)
        arrays = tiny.on_host(target, target.snapshot(state).arrays)
        found.append(arrays | {"logits": torch.tensor(target.decode(state, [5, 6]).need_logits().rows())})
    tiny.assert_same_bits(*found)


def test_attention_alone_rewinds_to_the_very_length(make_target):
    target = make_target("llama")
    state = target.new_state(20)
    target.prefill(state, list(range(9)))
    assert [target.rewind(state, length) for length in (7, 7, 1, 0)] == [7, 7, 1, 0]

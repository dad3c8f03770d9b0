"""Every switch of every layout matters: a head that is read with one of them wrong drafts something else.

The killer of all of these is ``test_recorded_heads.py::test_drafts_are_those_of_speculators``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdec.backends.ops import Rope
from specdec.drafters.heads import dflash, drafter, eagle, layout, network, plugin, refiner
from specdec.drafters.heads.files import HeadFiles
from specdec.drafters.heads.layout import Layout
from tests.drafters.heads.recorded_heads import ENDS, LAYERS, RECORDED, Recorded, RecordedTarget
from tests.drafters.heads.test_head_layouts import Config, Edit, Tensors, both, change, edited, flat, tensor, zlab
from tests.drafters.heads.test_recorded_heads import BOUND, run
from tests.drafters.heads.test_transformers_dflash import generated, scale_embedding

Change = Callable[[Layout], Layout]


def evolved(**changes: Any) -> Change:
    return lambda found: attrs.evolve(found, **changes)


def shaped(**changes: Any) -> Change:
    return lambda found: attrs.evolve(found, geometry=attrs.evolve(found.geometry, **changes))


def turned(theta: float, dims: int) -> Change:
    return shaped(rope=Rope.of(theta, dims))


def narrower(found: Layout) -> Layout:
    return shaped(windows=tuple(w and w - 1 for w in found.geometry.windows))(found)


def unmapped(found: Layout) -> Layout:
    return attrs.evolve(found, tokens=tuple(range(found.draft_vocab)))


def misordered(found: Layout) -> Layout:
    return attrs.evolve(found, order=(*range(1, found.draft_vocab), 0))


def unfinal(found: Layout) -> Layout:
    assert found.states is not None
    return attrs.evolve(found, states=attrs.evolve(found.states, final=False))


def boundaries(found: Layout) -> Layout:
    assert found.states is not None
    return attrs.evolve(found, states=attrs.evolve(found.states, shift=0))


def offsets_as_ids(found: Layout) -> Layout:
    """``d2t`` without the draft id that its offsets count from."""
    assert found.tokens is not None
    ids = sorted({max(0, token - number) for number, token in enumerate(found.tokens)})
    rest = [token for token in range(found.target_vocab or 0) if token not in ids]
    return attrs.evolve(found, tokens=tuple(sorted([*ids, *rest][: found.draft_vocab])))


def last_layer(config: Config, tensors: Tensors) -> None:
    """The last of three states is that of the target's last layer."""
    config["dflash_config"]["target_layer_ids"] = [0, 1, LAYERS - 1]


def scaled(config: Config, tensors: Tensors) -> None:
    flat(config, tensors)
    config["logit_scale"] = 4.0
    tensors["lm_head.weight"] = tensors["lm_head.weight"] / 4


LAYOUTS: dict[str, tuple[str, Change]] = {
    "residual before the norm": ("eagle3-residual", evolved(norm_before_residual=False)),
    "residual after the norm": ("eagle3", evolved(norm_before_residual=True)),
    "fed back before the norm": ("eagle3-output", evolved(norm_output=False)),
    "fed back after the norm": ("eagle3", evolved(norm_output=True)),
    "eps": ("eagle3", shaped(eps=1e-1)),
    "theta": ("eagle3", turned(1e6, 8)),
    "head size of twice the width": ("eagle3", shaped(scale=16**-0.5)),
    "partial rotation": ("eagle3", turned(1e4, 4)),
    "no window": ("eagle3-window", shaped(windows=(None,))),
    "a window of one less": ("eagle3-window", narrower),
    "draft ids unmapped": ("eagle3-reduced", unmapped),
    "rows of the head in another order": ("eagle3-reduced", misordered),
    "another mask token": ("p_eagle", evolved(mask_token=3)),
    "P-EAGLE's residual": ("p_eagle-reduced", evolved(norm_before_residual=False)),
    "another mask token of a block": ("dflash", evolved(mask_token=3)),
    "a shorter block": ("dflash", evolved(block_size=7)),
    "a causal block": ("dflash", evolved(bidirectional=(False, False))),
    "sliding layers that see both ways": ("dflash-window", evolved(bidirectional=(True, True))),
    "sliding layers that are causal": ("dflash-window-both", evolved(bidirectional=(False, True))),
    "a window from the query": ("dflash-window", evolved(window_from_anchor=False)),
    "a block's window of one less": ("dflash-window", narrower),
    "drafts from the anchor": ("dflash", evolved(from_anchor=True)),
    "drafts from the masked rows": ("dflash-anchor", evolved(from_anchor=False)),
    "block theta": ("dflash", turned(1e6, 8)),
    "DSpark from the masked rows": ("dspark", evolved(from_anchor=False)),
    "DSpark unmapped": ("dspark-reduced", unmapped),
}


def killed(recorded: Callable[[], Recorded], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the comparison with speculators' classes finds it: other drafts or other logits, and no other error."""
    try:
        return not run(recorded(), monkeypatch) < BOUND
    except AssertionError:
        return True


@pytest.mark.parametrize("mutant", LAYOUTS)
def test_a_switch_that_is_read_wrongly_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = LAYOUTS[mutant]
    read = layout.read_layout
    monkeypatch.setattr(plugin, "read_layout", lambda *files, **options: change(read(*files, **options)))
    assert killed(lambda: Recorded.load(name), monkeypatch)


def test_layer_ids_that_are_read_by_the_other_convention_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as layers, boundaries 1, 2 and 4 become 2, 3 and 5, and only their states give the same drafts."""
    assert killed(lambda: Recorded.load("eagle3", layer_ids="layer"), monkeypatch)
    assert killed(lambda: Recorded.load("dflash", layer_ids="layer"), monkeypatch)
    assert run(Recorded.load("eagle3", layer_ids="layer", states=(2, 3, 5)), monkeypatch) < BOUND


EDITED: dict[str, tuple[str, Edit, Change]] = {
    "the last layer's state before the final norm": ("dflash", both(zlab, last_layer), unfinal),
    "layers of z-lab's head read as boundaries": ("dflash", zlab, boundaries),
    "layers of NVIDIA's head read as boundaries": ("eagle3", flat, boundaries),
    "the scale of the logits left out": ("eagle3", scaled, evolved(logit_scale=1.0)),
    "the map read as ids": ("eagle3-reduced", change(), offsets_as_ids),
}


@pytest.mark.parametrize("mutant", EDITED)
def test_a_switch_of_an_edited_head_matters(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The edited head drafts as the recorded one; with the switch read wrongly it does not."""
    name, edit, wrong = EDITED[mutant]
    folder = edited(name, tmp_path / "head", edit)
    assert run(Recorded.load(name, folder=folder), monkeypatch) < BOUND
    read = layout.read_layout
    monkeypatch.setattr(plugin, "read_layout", lambda *files, **options: wrong(read(*files, **options)))
    assert killed(lambda: Recorded.load(name, folder=folder), monkeypatch)


GENERATED: dict[str, tuple[str, Change]] = {
    "a stretched rotation read as a plain one": ("long", turned(1e4, 8)),
    "scores without the stretched rotation's factor": ("long", shaped(scale=8**-0.5)),
    "the last layer's state before the final norm": ("state after the final norm", unfinal),
    "layers read as boundaries": ("plain", boundaries),
    "an embedding without its scale": ("scaled embedding", evolved(scaled_embedding=False)),
}


@pytest.mark.parametrize("mutant", GENERATED)
def test_a_switch_of_a_head_that_transformers_saved_matters(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed by ``test_transformers_dflash.py::test_drafts_are_those_of_transformers``."""
    variant, wrong = GENERATED[mutant]
    expected, states = generated(variant, tmp_path)
    if variant == "scaled embedding":
        scale_embedding(monkeypatch, 4.0)
    read = layout.read_layout
    monkeypatch.setattr(plugin, "read_layout", lambda *files, **options: wrong(read(*files, **options)))
    assert killed(lambda: Recorded.of(tmp_path, expected, states), monkeypatch)


def test_states_by_default_are_those_that_all_engines_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ids the boundaries are 2, L/2 and L - 3; read as layers they would be the next ones."""

    def unsaid(config: Config, tensors: Tensors) -> None:
        flat(config, tensors)
        del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]

    folder = edited("eagle3", tmp_path / "head", unsaid)
    default = (2, LAYERS // 2, LAYERS - 3)
    assert run(Recorded.load("eagle3", folder=folder, states=default), monkeypatch) < BOUND
    moved = tuple(k + 1 for k in default)
    assert killed(lambda: Recorded.load("eagle3", folder=folder, states=moved), monkeypatch)


def test_a_bias_of_fc_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that are moved by what the bias adds give the drafts of the head without one."""
    bias = torch.linspace(-1, 1, 16)
    folder = edited("eagle3", tmp_path / "head", tensor("fc.bias", bias))
    expected = load_file(RECORDED / "eagle3" / "expected.safetensors")
    fc = load_file(RECORDED / "eagle3" / "model.safetensors")["fc.weight"]
    moved = expected | {"states": expected["states"] - torch.linalg.pinv(fc) @ bias}

    def biased() -> Recorded:
        return Recorded.of(folder, moved, (1, 2, 4))

    assert run(biased(), monkeypatch) < BOUND
    built = eagle.EagleNetwork.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        eagle.EagleNetwork, "of", classmethod(lambda cls, *given: attrs.evolve(built(cls, *given), fc_bias=None))
    )
    assert killed(biased, monkeypatch)


def test_a_tied_head_computes_with_its_own_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts as one whose files repeat the embedding as the output matrix; the target's matrix drafts otherwise."""

    def repeated(config: Config, tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()

    def tied(config: Config, tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        config["tie_word_embeddings"] = True

    def drafts(folder: Path) -> list[tuple[int, ...]]:
        recorded = Recorded.load("eagle3", folder=folder)
        recorded.prefill(6)
        return [recorded.drafter.propose(recorded.context(6), depth).tokens for depth in (1, 8)]

    wanted = drafts(edited("eagle3", tmp_path / "repeated", repeated))
    folder = edited("eagle3", tmp_path / "tied", tied)
    assert drafts(folder) == wanted
    read = layout.read_layout
    monkeypatch.setattr(
        plugin, "read_layout", lambda *files, **options: attrs.evolve(read(*files, **options), own_head=False)
    )
    assert drafts(folder) != wanted


def interleaved(config: Config, tensors: Tensors) -> None:
    """Queries and keys whose rotated pairs lie side by side."""
    for kind in "qk":
        at = f"layers.0.self_attn.{kind}_proj.weight"
        rows = tensors[at].reshape(-1, 2, 4, tensors[at].shape[1])
        tensors[at] = rows.transpose(1, 2).reshape(tensors[at].shape).contiguous()


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_another_pairing_of_rotated_channels_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = edited(name, tmp_path / "head", interleaved)
    assert killed(lambda: Recorded.load(name, folder=folder), monkeypatch)


@pytest.mark.parametrize("own", ["embed_tokens.weight", "lm_head.weight"])
def test_a_matrix_of_the_heads_own_is_not_the_targets(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that ships one computes with it: without it, the target's makes other drafts."""
    name = next(name for name in ("p_eagle", "dspark", "eagle3") if own in HeadFiles.open(str(RECORDED / name)))
    folder = edited(name, tmp_path / "head", tensor(own, None))
    shared = RecordedTarget.shared_weights
    monkeypatch.setattr(
        RecordedTarget,
        "shared_weights",
        lambda self: attrs.evolve(
            shared(self), embed_tokens=shared(self).embed_tokens.flip(0), lm_head=shared(self).lm_head.flip(0)
        ),
    )
    assert killed(lambda: Recorded.load(name, folder=folder), monkeypatch)


def test_a_head_without_fc_reads_the_state_after_the_final_norm(tmp_path: Path) -> None:
    """It drafts as one whose fc is the identity over that state."""

    def one_state(config: Config, tensors: Tensors) -> None:
        flat(config, tensors)
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [3]
        tensors["fc.weight"] = torch.eye(tensors["fc.weight"].shape[0])

    def without_fc(config: Config, tensors: Tensors) -> None:
        flat(config, tensors)
        del config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], tensors["fc.weight"]
        config["eagle_config"]["use_aux_hidden_state"] = False

    drafts = []
    for number, edit in enumerate((one_state, without_fc)):
        recorded = Recorded.load("eagle3", folder=edited("eagle3", tmp_path / str(number), edit))
        recorded.prefill(6)
        drafts.append(recorded.drafter.propose(recorded.context(6), 6).tokens)
    assert drafts[0] == drafts[1]


CODE: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {}


def code(name: str) -> Callable[[Callable[[pytest.MonkeyPatch], None]], None]:
    def register(apply: Callable[[pytest.MonkeyPatch], None]) -> None:
        CODE[f"{apply.__name__} ({name})"] = name, apply

    return register


@code("eagle3-before-fc")
def no_norm_before_fc(patch: pytest.MonkeyPatch) -> None:
    built = eagle.EagleNetwork.of.__func__  # type: ignore[attr-defined]
    patch.setattr(
        eagle.EagleNetwork, "of", classmethod(lambda cls, *given: attrs.evolve(built(cls, *given), state_norms=()))
    )


@code("eagle3-fc-norm")
def no_norm_of_each_state(patch: pytest.MonkeyPatch) -> None:
    no_norm = CODE["no_norm_before_fc (eagle3-before-fc)"][1]
    no_norm(patch)


@code("eagle3")
def embedding_and_state_swapped(patch: pytest.MonkeyPatch) -> None:
    def call(self: Any, x: Any, embedded: Any, cache: Any, true: int) -> Any:
        u = self.hidden_norm(x)
        x = self.mixer(self.ops.concat(u, self.input_norm(embedded)), x, cache)
        return self.mlp(self.post_norm(x), x)

    patch.setattr(eagle.EagleLayer, "__call__", call)


@code("eagle3")
def a_norm_after_fc(patch: pytest.MonkeyPatch) -> None:
    fused = eagle.EagleNetwork.fused
    patch.setattr(eagle.EagleNetwork, "fused", lambda self, states: self.norm(fused(self, states)))


@code("eagle3")
def pairs_one_token_off(patch: pytest.MonkeyPatch) -> None:
    take = drafter.MtpPairs.take

    def shifted_take(self: Any, pending: int | None = None) -> Any:
        tokens, hidden = take(self, pending)
        return [pending or 0, *tokens[:-1]] if tokens else tokens, hidden

    patch.setattr(drafter.MtpPairs, "take", shifted_take)


@code("eagle3")
def chained_entries_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drafter.HeadDrafter, "_truncate", lambda self: None)


def without(patch: pytest.MonkeyPatch, **parts: Any) -> None:
    """Attention without some of its parts."""
    built = network.HeadAttention.of.__func__  # type: ignore[attr-defined]
    patch.setattr(
        network.HeadAttention,
        "of",
        classmethod(lambda cls, *given, **named: attrs.evolve(built(cls, *given, **named), **parts)),
    )


@code("eagle3-bias")
def no_bias_of_the_output(patch: pytest.MonkeyPatch) -> None:
    without(patch, o_bias=None)


@code("eagle3-bias")
def no_bias_of_the_queries(patch: pytest.MonkeyPatch) -> None:
    without(patch, biases=())


@code("eagle3")
def states_in_descending_order(patch: pytest.MonkeyPatch) -> None:
    columns = network.state_columns
    patch.setattr(network, "state_columns", lambda *given: columns(*given)[::-1])


@code("eagle3-qwen3")
def no_norm_of_queries_and_keys(patch: pytest.MonkeyPatch) -> None:
    without(patch, norms=(None, None))


@code("p_eagle")
def masked_rows_stay_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    run_rows = drafter.HeadDrafter._run
    patch.setattr(
        drafter.HeadDrafter,
        "_run",
        lambda self, tokens, hidden, kept, true: run_rows(self, tokens, hidden, len(tokens), true),
    )
    patch.setattr(drafter.HeadDrafter, "_truncate", lambda self: None)


@code("p_eagle-before-fc")
def the_mask_is_not_fused(patch: pytest.MonkeyPatch) -> None:
    made = plugin.PreparedHead

    def prepared(**named: Any) -> Any:
        masked = named["network"].masked
        hidden = named["layout"].geometry.hidden
        return made(**{**named, "masked": named["around"].ops.hidden(masked[:, :hidden].contiguous())})

    patch.setattr(plugin, "PreparedHead", prepared)


@code("p_eagle")
def masked_rows_repeat_the_last_state(patch: pytest.MonkeyPatch) -> None:
    made = plugin.PreparedHead
    patch.setattr(
        plugin,
        "PreparedHead",
        lambda **named: made(
            **{**named, "masked": named["around"].ops.hidden(torch.zeros(1, named["layout"].geometry.hidden))}
        ),
    )


@code("dflash")
def context_without_its_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dflash.BlockNetwork, "fused", lambda self, states: self.ops.linear(states, self.fc))


@code("dflash")
def context_through_the_input_norm(patch: pytest.MonkeyPatch) -> None:
    extend = dflash.BlockLayer.extend
    patch.setattr(
        dflash.BlockLayer, "extend", lambda self, features, cache: extend(self, self.input_norm(features), cache)
    )


@code("dflash")
def context_keys_without_their_norm(patch: pytest.MonkeyPatch) -> None:
    def extend(self: Any, features: Any, cache: Any) -> None:
        mixer, g, rows = self.mixer, self.mixer.geometry, features.shape[0]
        k, v = mixer.ops.project(features, mixer.projections[1:], mixer.biases[1:])
        k = mixer.ops.norm_rope(k.reshape(rows, g.kv_heads, g.head_dim), None, g.eps, g.rope, cache.length)
        mixer.ops.append(k, v.reshape(rows, g.kv_heads, g.head_dim), cache)
        cache.commit(rows)

    patch.setattr(dflash.BlockLayer, "extend", extend)


@code("dflash")
def the_block_stays_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    call = dflash.BlockNetwork.__call__

    def kept(self: Any, caches: Any, embedded: Any) -> Any:
        out = call(self, caches, embedded)
        for cache in caches:
            cache.commit(1)
        return out

    patch.setattr(dflash.BlockNetwork, "__call__", kept)
    patch.setattr(drafter.HeadDrafter, "_truncate", lambda self: None)


def previous_wrong(patch: pytest.MonkeyPatch) -> None:
    """The bias from the pending token in every row, and from its neighbour in the first."""
    refine = refiner.MarkovRefiner.refine

    def stuck(self: Any, block: Any) -> Any:
        steps = refine(self, attrs.evolve(block, pending=(block.pending + 7) % 24))
        given = next(steps, None)
        while given is not None:
            yield given
            try:
                given = steps.send(block.pending)
            except StopIteration:
                return

    patch.setattr(refiner.MarkovRefiner, "refine", stuck)


for head in ("dspark", "dspark-gated", "dspark-rnn"):
    code(head)(previous_wrong)


@code("dspark")
def the_bias_of_the_token_before_is_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refiner.MarkovRefiner, "refine", refiner.Marginals.refine)


@code("dspark-reduced")
def w1_read_by_draft_ids(patch: pytest.MonkeyPatch) -> None:
    """The id in the head's vocabulary in place of the target's."""
    refine = refiner.MarkovRefiner.refine

    def by_draft_ids(self: Any, block: Any) -> Any:
        steps = refine(self, block)
        given = next(steps, None)
        while given is not None:
            token = yield given
            try:
                given = steps.send(int(np.searchsorted(block.ids, token)))
            except StopIteration:
                return

    patch.setattr(refiner.MarkovRefiner, "refine", by_draft_ids)


@code("eagle3-two-layers")
def later_layers_norm_their_residual(patch: pytest.MonkeyPatch) -> None:
    call = eagle.EagleLayer.__call__

    def normed(self: Any, x: Any, *rest: Any) -> Any:
        return call(self, self.input_norm(x) if self.hidden_norm is None else x, *rest)

    patch.setattr(eagle.EagleLayer, "__call__", normed)


@code("dflash-bias")
def no_bias_of_a_blocks_projections(patch: pytest.MonkeyPatch) -> None:
    without(patch, biases=())


@code("dflash-bias")
def no_bias_of_a_blocks_output(patch: pytest.MonkeyPatch) -> None:
    without(patch, o_bias=None)


@code("dflash")
def a_blocks_queries_without_their_norm(patch: pytest.MonkeyPatch) -> None:
    call = network.HeadAttention.__call__

    def unnormed(self: Any, *given: Any, **named: Any) -> Any:
        return call(attrs.evolve(self, norms=(None, self.norms[1])), *given, **named)

    patch.setattr(network.HeadAttention, "__call__", unnormed)


@code("dspark-gated")
def the_gate_is_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(refiner.MarkovRefiner, "_gated", lambda self, hidden, known, state: (known, state))


@code("dspark-rnn")
def the_state_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    gated = refiner.MarkovRefiner._gated
    patch.setattr(
        refiner.MarkovRefiner,
        "_gated",
        lambda self, hidden, known, state: gated(self, hidden, known, np.zeros_like(state)),
    )


@pytest.mark.parametrize("mutant", CODE)
def test_wrong_arithmetic_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, apply = CODE[mutant]
    apply(monkeypatch)
    assert killed(lambda: Recorded.load(name), monkeypatch)


def cut_as_recorded(name: str) -> bool:
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
def test_the_confidence_is_that_of_speculators_and_cuts_the_draft(name: str) -> None:
    assert cut_as_recorded(name)


def unjoined(self: Any, hidden: Any, known: Any) -> float:
    """The state without the token."""
    weight, bias = self.proj
    return sigmoid(weight[0, : len(hidden)] @ hidden + bias[0])


def swapped(self: Any, hidden: Any, known: Any) -> float:
    """Token first, state second."""
    weight, bias = self.proj
    return sigmoid(weight[0] @ np.concatenate([known, hidden]) + bias[0])


def unbiased(self: Any, hidden: Any, known: Any) -> float:
    weight, _ = self.proj
    return sigmoid(weight[0] @ np.concatenate([hidden, known]))


def bare(self: Any, hidden: Any, known: Any) -> float:
    """A score that is compared as if it were a probability."""
    weight, bias = self.proj
    return float(weight[0] @ np.concatenate([hidden, known]) + bias[0])


def reversed_sense(self: Any, hidden: Any, known: Any) -> float:
    """The probability of a rejection."""
    return 1 - confidence_of(self, hidden, known)


confidence_of = refiner.MarkovRefiner._confidence


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


@pytest.mark.parametrize("wrong", [unjoined, swapped, unbiased, bare, reversed_sense])
def test_a_confidence_that_is_computed_wrongly_is_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refiner.MarkovRefiner, "_confidence", wrong)
    assert not cut_as_recorded("dspark")


def test_a_confidence_of_the_token_after_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the token before its row, not the pending one in every row."""
    previous_wrong(monkeypatch)
    assert not cut_as_recorded("dspark")

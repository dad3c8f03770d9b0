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
from tests.selection import cases

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


SWITCHES: dict[str, tuple[str, Change]] = {
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


EDITED: dict[str, tuple[str, Edit, Change]] = {
    "the last layer's state before the final norm": ("dflash", both(zlab, last_layer), unfinal),
    "layers of z-lab's head read as boundaries": ("dflash", zlab, boundaries),
    "layers of NVIDIA's head read as boundaries": ("eagle3", flat, boundaries),
    "the scale of the logits left out": ("eagle3", scaled, evolved(logit_scale=1.0)),
    "the map read as ids": ("eagle3-reduced", change(), offsets_as_ids),
}
GENERATED: dict[str, tuple[str, Change]] = {
    "a stretched rotation read as a plain one": ("long", turned(1e4, 8)),
    "scores without the stretched rotation's factor": ("long", shaped(scale=8**-0.5)),
    "the last layer's state before the final norm": ("state after the final norm", unfinal),
    "layers read as boundaries": ("plain", boundaries),
    "an embedding without its scale": ("scaled embedding", evolved(scaled_embedding=False)),
}


def killed(recorded: Callable[[], Recorded], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the comparison with speculators' classes finds it: other drafts or other logits, and no other error."""
    try:
        return not run(recorded(), monkeypatch) < BOUND
    except AssertionError:
        return True


def misread(patch: pytest.MonkeyPatch, wrong: Change) -> None:
    """Let every head be loaded with a layout that is changed."""
    read = layout.read_layout
    patch.setattr(plugin, "read_layout", lambda *files, **options: wrong(read(*files, **options)))


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", cases(SWITCHES, sample=1))
def test_a_switch_that_is_read_wrongly_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = SWITCHES[mutant]
    misread(monkeypatch, wrong)
    assert killed(lambda: Recorded.load(name), monkeypatch)


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", cases(EDITED, sample=1))
def test_a_switch_of_an_edited_head_matters(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The edited head drafts as the recorded one; with the switch read wrongly it does not."""
    name, edit, wrong = EDITED[mutant]
    folder = edited(name, tmp_path / "head", edit)
    assert run(Recorded.load(name, folder=folder), monkeypatch) < BOUND
    misread(monkeypatch, wrong)
    assert killed(lambda: Recorded.load(name, folder=folder), monkeypatch)


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", cases(GENERATED, sample=1))
def test_a_switch_of_a_head_that_transformers_saved_matters(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed by ``test_transformers_dflash.py::test_drafts_are_those_of_transformers``."""
    variant, wrong = GENERATED[mutant]
    expected, states = generated(variant, tmp_path)
    if variant == "scaled embedding":
        scale_embedding(monkeypatch, 4.0)
    misread(monkeypatch, wrong)
    assert killed(lambda: Recorded.of(tmp_path, expected, states), monkeypatch)


def test_layer_ids_that_are_read_by_the_other_convention_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as layers, boundaries 1, 2 and 4 become 2, 3 and 5, and only their states give the same drafts."""
    assert killed(lambda: Recorded.load("eagle3", layer_ids="layer"), monkeypatch)
    assert killed(lambda: Recorded.load("dflash", layer_ids="layer"), monkeypatch)
    assert run(Recorded.load("eagle3", layer_ids="layer", states=(2, 3, 5)), monkeypatch) < BOUND


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
    built(monkeypatch, eagle.EagleNetwork, fc_bias=None)
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
    misread(monkeypatch, evolved(own_head=False))
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


# --- arithmetic: what is replaced, by a function of the original ------------------------------------------------------


def built(patch: pytest.MonkeyPatch, kind: Any, **parts: Any) -> None:
    """Build the networks of this kind without some of their parts."""
    of = kind.of.__func__
    patch.setattr(kind, "of", classmethod(lambda cls, *given, **named: attrs.evolve(of(cls, *given, **named), **parts)))


def replaced(owner: Any, method: str, wrong: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Replace a method by ``wrong(original, self, ...)``."""
    original = getattr(owner, method)
    return lambda patch: patch.setattr(owner, method, lambda *given, **named: wrong(original, *given, **named))


def lacking(kind: Any, **parts: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: built(patch, kind, **parts)


def masked_by(state: Callable[[dict[str, Any]], torch.Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Another state in masked rows."""
    made = plugin.PreparedHead
    return lambda patch: patch.setattr(
        plugin, "PreparedHead", lambda **named: made(**{**named, "masked": named["around"].ops.hidden(state(named))})
    )


def kept(owner: Any, method: str, wrong: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """``replaced``, and nothing takes provisional entries back."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        replaced(owner, method, wrong)(patch)
        patch.setattr(drafter.HeadDrafter, "_truncate", lambda self: None)

    return apply


def swapped_inputs(call: Any, self: Any, x: Any, embedded: Any, cache: Any, true: int) -> Any:
    x = self.mixer(self.ops.concat(self.hidden_norm(x), self.input_norm(embedded)), x, cache)
    return self.mlp(self.post_norm(x), x)


def shifted_pairs(take: Any, self: Any, pending: int | None = None) -> Any:
    tokens, hidden = take(self, pending)
    return [pending or 0, *tokens[:-1]] if tokens else tokens, hidden


def unnormed_keys(extend: Any, self: Any, features: Any, cache: Any) -> None:
    extend(attrs.evolve(self, mixer=attrs.evolve(self.mixer, norms=(self.mixer.norms[0], None))), features, cache)


def block_that_stays(call: Any, self: Any, caches: Any, embedded: Any) -> Any:
    rows = call(self, caches, embedded)
    for cache in caches:
        cache.commit(1)
    return rows


def told(refine: Any, self: Any, block: Any, token_of: Callable[[int], int]) -> Any:
    """The refiner, told another token than the one that was drafted."""
    steps = refine(self, block)
    logits = next(steps, None)
    while logits is not None:
        token = yield logits
        try:
            logits = steps.send(token_of(token))
        except StopIteration:
            return


def previous_wrong(refine: Any, self: Any, block: Any) -> Any:
    """The bias from the pending token in every row, and from its neighbour in the first."""
    other = attrs.evolve(block, pending=(block.pending + 7) % 24)
    return told(refine, self, other, lambda token: block.pending)


def by_draft_ids(refine: Any, self: Any, block: Any) -> Any:
    """W1 is read by the id in the head's vocabulary in place of the target's."""
    return told(refine, self, block, lambda token: int(np.searchsorted(block.ids, token)))


EagleNetwork, EagleLayer = eagle.EagleNetwork, eagle.EagleLayer
BlockNetwork, BlockLayer = dflash.BlockNetwork, dflash.BlockLayer
Attention, Markov, Heads = network.HeadAttention, refiner.MarkovRefiner, drafter.HeadDrafter
ARITHMETIC: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "no norm before fc": ("eagle3-before-fc", lacking(EagleNetwork, state_norms=())),
    "no norm of each state": ("eagle3-fc-norm", lacking(EagleNetwork, state_norms=())),
    "embedding and state swapped": ("eagle3", replaced(EagleLayer, "__call__", swapped_inputs)),
    "a norm after fc": ("eagle3", replaced(EagleNetwork, "fused", lambda of, self, x: self.norm(of(self, x)))),
    "pairs one token off": ("eagle3", replaced(drafter.MtpPairs, "take", shifted_pairs)),
    "chained entries stay": ("eagle3", replaced(Heads, "_truncate", lambda of, self: None)),
    "no bias of the output": ("eagle3-bias", lacking(Attention, o_bias=None)),
    "no bias of the queries": ("eagle3-bias", lacking(Attention, biases=())),
    "states in descending order": (
        "eagle3",
        replaced(
            network.Surroundings,
            "states",
            lambda of, self, output, rows: torch.cat(of(self, output, rows).chunk(3, dim=1)[::-1], dim=1),
        ),
    ),
    "no norm of queries and keys": ("eagle3-qwen3", lacking(Attention, norms=(None, None))),
    "masked rows stay in the cache": (
        "p_eagle",
        kept(Heads, "_run", lambda of, self, tokens, hidden, rows, true: of(self, tokens, hidden, len(tokens), true)),
    ),
    "the mask is not fused": (
        "p_eagle-before-fc",
        masked_by(lambda named: named["network"].masked[:, : named["layout"].geometry.hidden].contiguous()),
    ),
    "a mask of zeros": ("p_eagle", masked_by(lambda named: torch.zeros(1, named["layout"].geometry.hidden))),
    "context without its norm": (
        "dflash",
        replaced(BlockNetwork, "fused", lambda of, self, states: self.ops.linear(states, self.fc)),
    ),
    "context through the input norm": (
        "dflash",
        replaced(BlockLayer, "extend", lambda of, self, rows, cache: of(self, self.input_norm(rows), cache)),
    ),
    "context keys without their norm": ("dflash", replaced(BlockLayer, "extend", unnormed_keys)),
    "the block stays in the cache": ("dflash", kept(BlockNetwork, "__call__", block_that_stays)),
    "the bias of another token": ("dspark", replaced(Markov, "refine", previous_wrong)),
    "the gate of another token": ("dspark-gated", replaced(Markov, "refine", previous_wrong)),
    "the state of another token": ("dspark-rnn", replaced(Markov, "refine", previous_wrong)),
    "no bias": ("dspark", lambda patch: patch.setattr(Markov, "refine", refiner.Marginals.refine)),
    "W1 read by draft ids": ("dspark-reduced", replaced(Markov, "refine", by_draft_ids)),
    "later layers norm their residual": (
        "eagle3-two-layers",
        replaced(
            EagleLayer,
            "__call__",
            lambda of, self, x, *rest: of(self, self.input_norm(x) if self.hidden_norm is None else x, *rest),
        ),
    ),
    "no bias of a block's projections": ("dflash-bias", lacking(Attention, biases=())),
    "no bias of a block's output": ("dflash-bias", lacking(Attention, o_bias=None)),
    "a block's queries without their norm": (
        "dflash",
        replaced(
            Attention,
            "__call__",
            lambda of, self, *rest, **named: of(attrs.evolve(self, norms=(None, self.norms[1])), *rest, **named),
        ),
    ),
    "no gate": ("dspark-gated", replaced(Markov, "_gated", lambda of, self, hidden, known, state: (known, state))),
    "the state is not kept": (
        "dspark-rnn",
        replaced(Markov, "_gated", lambda of, self, hidden, known, state: of(self, hidden, known, 0 * state)),
    ),
}


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", cases(ARITHMETIC, sample=1))
def test_wrong_arithmetic_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, apply = ARITHMETIC[mutant]
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


def score(self: Any, features: list[Any], bias: bool = True) -> float:
    """A confidence computed from other features, or without its bias; not yet a probability."""
    weight, offset = self.proj
    features = np.concatenate(features)
    return float(weight[0, : len(features)] @ features + bias * offset[0])


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


CONFIDENCES: dict[str, Callable[..., float]] = {
    "of the state alone": lambda of, self, hidden, known: sigmoid(score(self, [hidden])),
    "token first": lambda of, self, hidden, known: sigmoid(score(self, [known, hidden])),
    "without its bias": lambda of, self, hidden, known: sigmoid(score(self, [hidden, known], bias=False)),
    "no probability": lambda of, self, hidden, known: score(self, [hidden, known]),
    "of a rejection": lambda of, self, hidden, known: 1 - of(self, hidden, known),
}


@pytest.mark.mutants
@pytest.mark.parametrize("wrong", cases(CONFIDENCES, sample=1))
def test_a_confidence_that_is_computed_wrongly_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(Markov, "_confidence", CONFIDENCES[wrong])(monkeypatch)
    assert not cut_as_recorded("dspark")


def test_a_confidence_of_the_token_after_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the token before its row, not the pending one in every row."""
    replaced(Markov, "refine", previous_wrong)(monkeypatch)
    assert not cut_as_recorded("dspark")

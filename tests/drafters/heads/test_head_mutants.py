"""Every switch of every layout matters: a head that is read with one of them wrong drafts something else.

The killer of all of these is ``test_recorded_heads.py::test_drafts_are_those_of_speculators``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from specdec.backends.ops import Rope
from specdec.drafters.heads import dflash, drafter, eagle, layout, network, plugin, refiner
from specdec.drafters.heads.layout import Layout
from tests.drafters.heads.recorded_heads import Recorded
from tests.drafters.heads.test_recorded_heads import BOUND, run

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
    """Whether the comparison with speculators' classes finds it."""
    try:
        return not run(recorded(), monkeypatch) < BOUND
    except (AssertionError, ValueError, IndexError):
        return True


@pytest.mark.parametrize("mutant", LAYOUTS)
def test_a_switch_that_is_read_wrongly_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = LAYOUTS[mutant]
    read = layout.read_layout
    monkeypatch.setattr(plugin, "read_layout", lambda *files, **options: change(read(*files, **options)))
    assert killed(lambda: Recorded.load(name), monkeypatch)


def test_layer_ids_that_are_read_by_the_other_convention_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target gives its states at boundaries 1, 2 and 4; read as layers, the head asks for 2, 3 and 5."""
    with pytest.raises(KeyError):
        run(Recorded.load("eagle3", layer_ids="layer"), monkeypatch)
    assert run(Recorded.load("eagle3", layer_ids="layer", states=(2, 3, 5)), monkeypatch) < BOUND


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
    """The bias from the pending token in every row."""
    refine = refiner.MarkovRefiner.refine

    def stuck(self: Any, block: Any) -> Any:
        steps = refine(self, block)
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


@pytest.mark.parametrize("name", ["dspark", "dspark-reduced", "dspark-gated", "dspark-no-markov-confidence"])
def test_the_confidence_is_that_of_speculators_and_cuts_the_draft(name: str) -> None:
    """A draft ends before the first row whose predicted acceptance is below the threshold."""
    recorded = Recorded.load(name)
    confidence = recorded.expected["confidence"][0].tolist()
    ordered = sorted(confidence)
    least = (ordered[2] + ordered[3]) / 2
    cut = Recorded.load(name, min_acceptance=least)
    cut.prefill(6)
    kept = next(row for row, value in enumerate(confidence) if value < least)
    assert list(cut.drafter.propose(cut.context(6), 8).tokens) == recorded.expected["drafts"][0].tolist()[:kept]

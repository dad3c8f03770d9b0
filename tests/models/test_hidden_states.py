"""Hidden states at layer boundaries: those of transformers, in any feeding the same bits, and only where asked for."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import specdec
from specdec.contract import DrafterSpec, MtpPairs, Needs
from specdec.drafters.none import NoDrafter
from specdec.errors import UnsupportedError
from tests import tiny
from tests.models.test_transformers_parity import FEEDS, FLOAT32_BOUND, TOKENS, tokens_for
from tests.tiny_families import SHAPES, TRANSFORMERS

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5ForCausalLM", tiny.QWEN3_5_SHAPES["mixed-layers"]),
    "qwen3": ("Qwen3ForCausalLM", next(iter(tiny.QWEN3_SHAPES.values()))),
    **{
        family: (name, next(iter(SHAPES[family].values()))) for family, name in TRANSFORMERS.items() if family in SHAPES
    },
}


def fed(target: Any, needs: Needs, feed: Sequence[tuple[str, int]]) -> dict[str, np.ndarray]:
    """``[n, H]`` by name, of every position."""
    tokens = tokens_for(target.info.vocab_size)
    state, parts, at = target.new_state(len(tokens), needs), [], 0
    for how, rows in feed:
        chunk = tokens[at : at + rows]
        at += len(chunk)
        if how == "prefill":
            parts.append(target.prefill(state, chunk))
        elif chunk:
            parts.append(target.decode(state, chunk))
            target.commit(state, len(chunk))
    named = [{"final": part.hidden, **{f"boundary {k}": h for k, h in part.boundaries.items()}} for part in parts]
    return {
        name: np.concatenate([target.ops.to_host(target.ops.array(part[name])).float().numpy() for part in named])
        for name in named[0]
    }


@functools.cache
def of_transformers(folder: pathlib.Path, model_class: str) -> dict[str, np.ndarray]:
    """The same from transformers; a hook on the last layer, since its list ends with the state after the norm."""
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, model_class).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    last: list[torch.Tensor] = []
    layers = model.get_decoder().layers
    layers[-1].register_forward_hook(
        lambda *call: last.append(call[-1][0] if isinstance(call[-1], tuple) else call[-1])
    )
    with torch.no_grad():
        ids = torch.tensor([tokens_for(model.config.vocab_size)])
        states = model.eval()(ids, output_hidden_states=True).hidden_states
    found = {f"boundary {k}": state[0].numpy() for k, state in enumerate(states[:-1])}
    found[f"boundary {len(layers)}"] = last[0].reshape(TOKENS, -1).numpy()
    return {**found, "final": states[-1][0].numpy()}


@pytest.mark.parametrize("family", CASES)
def test_boundaries_are_those_of_transformers(
    family: str, kernels: str, checkpoint: Callable[..., pathlib.Path], make_target: Callable[..., Any]
) -> None:
    """Every boundary at once, in one chunk and in a mixture of chunks and blocks."""
    model_class, shape = CASES[family]
    plain = {key: value for key, value in shape.items() if key not in ("vl", "shards")}
    wanted = of_transformers(checkpoint(family, **plain), model_class)
    target = make_target(family, kernels=kernels, **shape)
    needs = Needs(final_hidden=True, boundaries=range(target.info.layers + 1))
    for how in ("whole", "chunks"):
        got = fed(target, needs, FEEDS[how])
        assert got.keys() == wanted.keys()
        for name, rows in got.items():
            difference = float(np.abs(rows - wanted[name]).max() / np.abs(wanted[name]).max())
            assert difference < FLOAT32_BOUND, f"{how}, {name}: {difference:.2e}"


@pytest.mark.parametrize("family", CASES)
def test_any_feeding_and_any_selection_give_the_same_bits(
    family: str, kernels: str, make_target: Callable[..., Any]
) -> None:
    """Rows do not depend on how many others there are, nor on what else was asked for."""
    target = make_target(family, kernels=kernels, **CASES[family][1])
    layers = target.info.layers
    truth = fed(target, Needs(final_hidden=True, boundaries=range(layers + 1)), FEEDS["token by token"])
    for how, boundaries in (("blocks", (0, layers)), ("chunks", (layers, 1, 1)), ("whole", (layers - 1,))):
        if kernels == "torch" and how != "blocks":
            continue  # the reference computes prompt chunks in bulk, and says so
        got = fed(target, Needs(final_hidden=True, boundaries=boundaries), FEEDS[how])
        assert list(got) == ["final", *(f"boundary {k}" for k in sorted(set(boundaries)))]
        for name, rows in got.items():
            assert (rows == truth[name]).all(), f"{how}, {name}"


def test_the_last_row_of_a_prompt_is_enough_for_some(make_target: Callable[..., Any]) -> None:
    target = make_target("qwen3_5", **tiny.QWEN3_5_SHAPES["mixed-layers"])
    rows = []
    for prompt_rows in ("all", "last"):
        state = target.new_state(40, Needs(final_hidden=True, boundaries=(1,), prompt_rows=prompt_rows))
        output = target.prefill(state, list(range(1, 31)))
        assert output.rows == 30
        rows.append([target.ops.array(hidden) for hidden in (output.hidden, output.boundaries[1])])
        decoded = target.decode(state, [3, 4, 5])
        assert len(decoded.hidden) == len(decoded.boundaries[1]) == 3
    assert all(torch.equal(whole[-1:], last) for whole, last in zip(*rows, strict=True))


def test_what_is_not_asked_for_is_neither_computed_nor_kept(
    checkpoint: Callable[..., pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hidden state in any output, no pass that takes boundaries, no pairs, and no cache for the head."""
    folder = checkpoint("qwen3_5", **tiny.QWEN3_5_SHAPES["mixed-layers"])
    target = tiny.make_target(folder)  # of its own: what passes it has made is looked at
    joined: list[Any] = []
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


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (Needs(boundaries=(0, 99)), r"layer boundary 99, and this target has boundaries 0 to \d+"),
        (Needs(boundaries=(-1,)), "layer boundary -1"),
        (Needs(mtp=True), "an MTP head, and this qwen3 checkpoint has none"),
    ],
)
def test_what_a_target_cannot_give_is_refused_when_the_pipeline_is_built(
    needs: Needs, said: str, checkpoint: Callable[..., pathlib.Path], make_target: Callable[..., Any]
) -> None:
    """For needs that are known beforehand, and for those that a drafter's own checkpoint decides."""
    from specdec.registry import BUILT_INS, Registry, use_registry

    with pytest.raises(UnsupportedError, match=said):
        make_target("qwen3").new_state(8, needs)
    for given in (needs, lambda config, shared: needs):

        class Plugin:
            @specdec.hookimpl
            def specdec_drafters(self, given: Any = given) -> list[DrafterSpec]:
                return [DrafterSpec(name="needy", factory=lambda config, env: NoDrafter(config, env), needs=given)]

        registry = Registry(BUILT_INS, entry_points=())
        registry.register(Plugin())
        former = use_registry(registry)
        try:
            with pytest.raises(UnsupportedError, match=f"the drafter 'needy' needs .*{said}"):
                specdec.load(str(checkpoint("qwen3")), drafter="needy", depth=1)
        finally:
            use_registry(former)

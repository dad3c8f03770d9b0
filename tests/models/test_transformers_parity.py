"""Logits and hidden states of every family against Hugging Face transformers, which shares no code with us.

The measure is ``max |difference| / max |reference|`` over all positions and the whole vocabulary. Float32 differs by
the order of sums only; a wrong convention (a missing ``1 +``, a swapped half, a head mapping) by tens of percent.
"""

import functools

import numpy as np
import pytest
import torch

from specdec.contract import Needs
from tests.comparisons import record
from tests.models.mtp_oracle import class_of
from tests.tiny_families import ALL_SHAPES

TOKENS = 83  # longer than one chunk of transformers' delta rule (64), and no multiple of anything
FLOAT32_BOUND = 1e-4

CASES = [
    pytest.param(family, name, marks=[pytest.mark.slow] * (number > 0))
    for family, shapes in ALL_SHAPES.items()
    for number, name in enumerate(shapes)
]
FEEDS = {
    "whole": [("prefill", TOKENS)],
    "chunks": [("prefill", 1), ("prefill", 37), ("prefill", 2), ("decode", 16), ("decode", 3), ("prefill", 24)],
}


def tokens_for(vocab, count=TOKENS):
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def fed(target, feed):
    """Logits ``[n, V]`` and hidden states ``[n, H]`` of every position and boundary by name.

    Prefill gives hidden states only, so the head runs on them here.
    """
    needs = Needs(final_hidden=True, boundaries=range(target.info.layers + 1))
    tokens = tokens_for(target.info.vocab_size)
    state, parts, at = target.new_state(len(tokens), needs), list[dict[str, np.ndarray]](), 0
    for how, rows in feed:
        chunk = tokens[at : at + rows]
        at += len(chunk)
        if how == "prefill":
            output = target.prefill(state, chunk)
            logits = target.model.logits(target.ops.array(output.need_hidden()))
        elif chunk:
            output = target.decode(state, chunk)
            logits = output.need_logits()
            target.commit(state, len(chunk))
        else:
            continue
        hidden = {"final": output.hidden, **{f"boundary {k}": states for k, states in output.boundaries.items()}}
        on_host = {name: target.ops.to_host(target.ops.array(rows)).float().numpy() for name, rows in hidden.items()}
        parts.append({"logits": logits.rows(), **on_host})
    assert at == len(tokens) == state.length
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.fixture(scope="session")
def reference(checkpoint):
    """``reference(family, name)``: what ``fed`` gives, from transformers in float32, computed once.

    A hook on the last layer, since the library's list ends with the state after the norm.
    """
    transformers = pytest.importorskip("transformers")

    @functools.cache
    def computed(family, name):
        # transformers' text class reads the text layout; names do not change a weight
        shape = {key: value for key, value in ALL_SHAPES[family][name].items() if key not in ("vl", "shards")}
        model, info = getattr(transformers, class_of(family)).from_pretrained(
            checkpoint(family, **shape, dtype="float32"),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        assert not info["missing_keys"], "transformers would compare with random weights"
        last = []
        layers = model.get_decoder().layers
        layers[-1].register_forward_hook(
            lambda *call: last.append(call[-1][0] if isinstance(call[-1], tuple) else call[-1])
        )
        with torch.no_grad():
            output = model.eval()(torch.tensor([tokens_for(model.config.vocab_size)]), output_hidden_states=True)
        *inner, final = output.hidden_states
        found = {f"boundary {k}": state for k, state in enumerate(inner)} | {f"boundary {len(layers)}": last[0]}
        found |= {"final": final, "logits": output.logits}
        return {name: states.reshape(TOKENS, -1).numpy() for name, states in found.items()}

    return computed


@pytest.mark.parametrize(("family", "name"), CASES)
def test_logits_and_hidden_states_equal_transformers(family, name, kernels, make_target, reference, record_property):
    wanted = reference(family, name)
    target = make_target(family, kernels=kernels, **ALL_SHAPES[family][name])
    # the comparison can fail: logits are spread and the argmax moves from position to position
    assert len(set(wanted["logits"].argmax(-1).tolist())) > TOKENS // 4
    worst = 0.0
    for how in ("whole", "chunks") if kernels == "torch" else ("whole",):  # native bits are the same in any way
        got = fed(target, FEEDS[how])
        assert got.keys() == wanted.keys()
        assert (got["logits"].argmax(-1) == wanted["logits"].argmax(-1)).all(), how
        for what, rows in got.items():
            difference = float(np.abs(rows - wanted[what]).max() / np.abs(wanted[what]).max())
            assert difference < FLOAT32_BOUND, f"{how}, {what}: {difference:.2e}"
            if what == "logits":
                worst = max(worst, difference)
    record(record_property, family, "logits", f"transformers' {class_of(family)}", name, worst)

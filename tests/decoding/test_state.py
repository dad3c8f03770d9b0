"""State is transactional: whatever was fed, dropped, rewound or saved, what is committed has one set of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specdec.errors import PromptError, ShapeError, StateError
from tests import tiny

VOCAB = 277
CAPACITY = 96
SHAPES = {
    "hybrid": ("qwen3_5", tiny.HYBRID | {"tied": True, "printable": False}),
    "attention-only": ("qwen3_5", tiny.QWEN3_5_SHAPES["attention-only"]),
    "qwen3": ("qwen3", {"hidden": 36, "heads": 4, "kv_heads": 2, "head_dim": 10, "intermediate": 44}),
}

tokens_ = st.integers(0, VOCAB - 1)


@pytest.fixture(scope="module", params=SHAPES)
def shape(request):
    return str(request.param)


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def dtype(request):
    return str(request.param)


@pytest.fixture
def target(shape, make_target):
    family, settings = SHAPES[shape]
    return make_target(family, **settings)


def poison(state):
    """NaN into everything that is not committed: stale and provisional rows, and the buffer that a pass fills."""
    for cache in [*state.caches, *([state.mtp] if state.mtp is not None else [])]:
        if hasattr(cache, "keys"):
            end = state.pairs.fed if cache is state.mtp else cache.length
            cache.keys[end:] = torch.nan
            cache.values[end:] = torch.nan
        else:
            cache.after[:] = torch.nan


def fresh_run(target, tokens):
    """A state that was given the tokens one by one."""
    state = target.new_state(CAPACITY, tiny.needs_of(target))
    for token in tokens:
        target.decode(state, [token])
        target.commit(state, 1)
    return state


# --- any story --------------------------------------------------------------------------------------------------------


class Story(RuleBasedStateMachine):
    """Passes, commits, rewinds and snapshots in any order; the model is the list of committed tokens."""

    target: Any
    longest_chunk: int  # the reference computes longer prompt chunks in bulk, with other bits

    @initialize()
    def begin(self):
        self.state = self.target.new_state(CAPACITY, tiny.needs_of(self.target))
        self.tokens = []
        self.decoded = None
        self.saved = []

    def room(self, rows):
        return len(self.tokens) + rows <= CAPACITY

    @rule(chunk=st.lists(tokens_, min_size=1, max_size=40))
    def prefill(self, chunk):
        chunk = chunk[: self.longest_chunk]
        if not self.room(len(chunk)):
            with pytest.raises(StateError, match="do not fit"):
                self.target.prefill(self.state, chunk)
            return
        output = self.target.prefill(self.state, chunk)
        assert output.rows == len(output.need_hidden()) == len(chunk)
        self.tokens += chunk
        self.decoded = None

    @rule(rows=st.lists(tokens_, min_size=1, max_size=16))
    def decode(self, rows):
        if not self.room(len(rows)):
            with pytest.raises(StateError, match="do not fit"):
                self.target.decode(self.state, rows)
            return
        logits = self.target.decode(self.state, rows).need_logits()
        assert len(logits) == len(rows)
        assert np.isfinite(logits.rows()).all()
        self.decoded = rows

    @precondition(lambda self: self.decoded is not None)
    @rule(data=st.data())
    def commit(self, data):
        assert self.decoded is not None
        kept = data.draw(st.integers(0, len(self.decoded)))
        self.target.commit(self.state, kept)
        self.tokens += self.decoded[:kept]
        self.decoded = None

    @precondition(lambda self: self.decoded is not None)
    @rule(more=st.integers(1, 3))
    def commit_too_many(self, more):
        assert self.decoded is not None
        with pytest.raises(StateError, match="commit takes"):
            self.target.commit(self.state, len(self.decoded) + more)

    @precondition(lambda self: self.decoded is None)
    @rule()
    def commit_nothing(self):
        with pytest.raises(StateError, match="without a decode"):
            self.target.commit(self.state, 1)

    @rule(data=st.data(), again=st.booleans())
    def rewind(self, data, again):
        length = data.draw(st.integers(0, len(self.tokens)))
        reached = self.target.rewind(self.state, length)
        assert 0 <= reached <= length
        note(f"rewind to {length} reached {reached}")
        lost, self.tokens = self.tokens[reached:length], self.tokens[:reached]
        self.decoded = None
        if again and lost:
            for at in range(0, len(lost), self.longest_chunk):
                self.target.prefill(self.state, lost[at : at + self.longest_chunk])
            self.tokens += lost

    @rule(by=st.integers(1, 5))
    def rewind_forwards(self, by):
        for wrong in (len(self.tokens) + by, -by):
            with pytest.raises(StateError, match="rewind takes"):
                self.target.rewind(self.state, wrong)

    @precondition(lambda self: self.target.info.mtp_layers and self.decoded is None)
    @rule(depth=st.integers(0, 4))
    def draft(self, depth):
        """MTP passes between target passes must not touch the target's state."""
        waiting = self.state.pairs.waiting
        drafted = self.target.draft_mtp(self.state, 5, depth)
        assert len(drafted) == (depth if waiting else 0)

    @rule()
    def save(self):
        self.saved = [*self.saved[-2:], (list(self.tokens), self.target.snapshot(self.state))]

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 2))
    def restore(self, which):
        tokens, snapshot = self.saved[which % len(self.saved)]
        self.state = self.target.restore(snapshot, tiny.needs_of(self.target))
        self.tokens = list(tokens)
        self.decoded = None

    @precondition(lambda self: self.decoded is None)
    @rule()
    def poison_what_is_stale(self):
        poison(self.state)

    @invariant()
    def length_is_what_was_committed(self):
        if hasattr(self, "tokens"):
            assert self.state.length == len(self.tokens)
            if self.state.pairs is not None:
                assert self.state.pairs.length == len(self.tokens)

    def teardown(self):
        if not hasattr(self, "tokens"):
            return
        wanted = fresh_run(self.target, self.tokens)
        ours, theirs = (tiny.state_arrays(self.target, state) for state in (self.state, wanted))
        if self.state.pairs is not None and self.state.pairs.last is None:  # drafted from, or cut
            theirs.pop("last_hidden", None)
        tiny.assert_same_bits(ours, theirs)
        if self.room(3):
            rows = [self.target.decode(state, [7, 8, 9]).need_logits().rows() for state in (self.state, wanted)]
            assert (rows[0].view(np.int32) == rows[1].view(np.int32)).all()


def test_any_story_leaves_the_bits_of_a_fresh_run(shape, dtype, kernels, make_target):
    family, settings = SHAPES[shape]
    loaded = make_target(family, kernels=kernels, dtype=dtype, stored=dtype, **settings)

    class Told(Story):
        target = loaded
        longest_chunk = 40 if kernels == "native" else 16

    run_state_machine_as_test(Told)


# --- single properties ------------------------------------------------------------------------------------------------


def test_refusals(target):
    """Each with the error class and the number that is wrong; the state stays as it was."""
    state = target.new_state(CAPACITY)
    target.prefill(state, [1, 2, 3])
    before = tiny.state_arrays(target, state)
    rows = target.info.max_rows
    for error, match, call in [
        (ShapeError, f"1 to {rows} rows, got {rows + 1}", lambda: target.decode(state, [1] * (rows + 1))),
        (ShapeError, "at least one token", lambda: target.decode(state, [])),
        (ShapeError, "at least one token", lambda: target.prefill(state, [])),
        (PromptError, f"token id {VOCAB} is outside", lambda: target.decode(state, [1, VOCAB])),
        (PromptError, "token id -1 is outside", lambda: target.prefill(state, [1, -1])),
        (StateError, "do not fit", lambda: target.prefill(state, [1] * CAPACITY)),
        (StateError, "without a decode", lambda: target.commit(state, 1)),
        (StateError, "rewind takes 0 to 3 tokens, got 4", lambda: target.rewind(state, 4)),
        (PromptError, "asked for 513", lambda: target.new_state(513)),
        (PromptError, "asked for 0", lambda: target.new_state(0)),
    ]:
        with pytest.raises(error, match=match):
            call()
        tiny.assert_same_bits(tiny.state_arrays(target, state), before)

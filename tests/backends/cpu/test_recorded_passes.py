"""Recorded passes against the same ops one by one: the same bits, in any order of passes, sequences and threads.

Between passes the shared work memory is filled with NaN, so that a replay which reads what an earlier pass left shows.
"""

import contextlib
import functools
import threading
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.backends.batching import BatchingOps
from specdec.backends.cpu import tape as tapes
from specdec.backends.cpu.caches import CpuKVCache
from specdec.backends.cpu.library import load_kernels
from specdec.backends.cpu.native import FEATURES, WORD, NativeOps
from specdec.backends.ops import DeltaShape, Rope
from specdec.backends.passes import EagerPasses
from specdec.errors import ContractError, ShapeError, StateError
from tests import tiny

pytestmark = pytest.mark.skipif("native" not in tiny.kernels_available(), reason="the native kernels do not compile")

VOCAB = 250
CAPACITY = 120
MAX_ROWS = 16
tokens_ = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=MAX_ROWS)


def new_state(target):
    return target.new_state(CAPACITY, tiny.needs_of(target))


@attrs.frozen
class Pair:
    """One checkpoint, run from recordings and op by op."""

    recorded: Any
    eager: Any

    def state(self):
        return Both(self, new_state(self.recorded), new_state(self.eager))


@attrs.define
class Both:
    """A sequence in both, and everything that a caller of its passes still holds, with the bits that it had."""

    pair: Pair
    mine: Any
    truth: Any
    held: list[tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=list)

    def decode(self, tokens):
        poison(self.pair.recorded)
        mine, truth = self.pair.recorded.decode(self.mine, tokens), self.pair.eager.decode(self.truth, tokens)
        self.compare(mine, truth)
        return mine, truth

    def decode_mtp(self, tokens, hidden, provisional):
        poison(self.pair.recorded)
        mine = self.pair.recorded.decode_mtp(self.mine, tokens, hidden[0], provisional=provisional)
        truth = self.pair.eager.decode_mtp(self.truth, tokens, hidden[1], provisional=provisional)
        self.compare(mine, truth)
        return mine, truth

    def compare(self, mine, truth):
        for ours, theirs in ((mine.hidden.array, truth.hidden.array), (mine.logits.array, truth.logits.array)):
            tiny.assert_equal_bits(ours, theirs)
            self.held.append((ours, theirs.clone()))

    def restore(self):
        """Go on over copies."""
        self.mine = self.pair.recorded.restore(self.pair.recorded.snapshot(self.mine), self.mine.needs)
        self.truth = self.pair.eager.restore(self.pair.eager.snapshot(self.truth), self.truth.needs)

    def each(self, method, *arguments):
        """Call a method of the targets on both states; gives what both agree on."""
        got = getattr(self.pair.recorded, method)(self.mine, *arguments)
        assert got == getattr(self.pair.eager, method)(self.truth, *arguments)
        return got

    def finish(self):
        for ours, theirs in self.held:
            tiny.assert_equal_bits(ours, theirs)
        mine, truth = self.pair.recorded.snapshot(self.mine), self.pair.eager.snapshot(self.truth)
        assert mine.meta == truth.meta
        tiny.assert_same_bits(mine.arrays, truth.arrays)


def poison(target):
    target.ops.inner._work.fill_(0xFF)  # NaN in either dtype


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request):
    return str(request.param)


@pytest.fixture(scope="module")
def make_pair(checkpoint):
    @functools.cache
    def make(dtype, **changed):
        folder = checkpoint("qwen3_5", dtype=dtype, **{**tiny.QWEN3_5_SHAPES["mixed-layers"], **changed})
        eager = NativeOps(getattr(torch, dtype), load_kernels(), eager_reason="compared with")
        pair = Pair(
            tiny.make_target(folder, kernels="native", dtype=dtype),
            tiny.make_target(folder, kernels="native", dtype=dtype, ops=eager),
        )
        assert "eagerly" not in pair.recorded.info.kernels
        assert "passes run eagerly: compared with" in pair.eager.info.kernels
        return pair

    return make


@pytest.fixture(scope="module")
def pair(make_pair, dtype):
    return make_pair(dtype)


# --- bits ------------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_any_story_has_the_bits_of_the_ops(pair, data):
    """Prompts, passes, repeated passes, rewinds, snapshots and MTP passes in any order."""
    both = pair.state()
    tokens = []
    steps = st.sampled_from(["prefill", "decode", "decode", "again", "rewind", "restore", "mtp"])
    for step in data.draw(st.lists(steps, min_size=1, max_size=12)):
        if step in ("prefill", "decode", "again"):
            chunk = data.draw(tokens_)
            if len(tokens) + len(chunk) > CAPACITY:
                continue
            if step == "prefill":
                chunk = (
                    chunk * data.draw(st.sampled_from([1, 2])) if len(tokens) + 2 * len(chunk) <= CAPACITY else chunk
                )
                for target, state in ((pair.recorded, both.mine), (pair.eager, both.truth)):
                    target.prefill(state, chunk)
                tokens += chunk
            else:
                if step == "again":
                    both.decode(data.draw(tokens_)[: CAPACITY - len(tokens)])
                both.decode(chunk)
                kept = data.draw(st.integers(0, len(chunk)))
                both.each("commit", kept)
                tokens += chunk[:kept]
        elif step == "rewind":
            del tokens[both.each("rewind", data.draw(st.integers(0, len(tokens)))) :]
        elif step == "restore":
            both.restore()
        elif len(tokens) < CAPACITY:
            mine, truth = both.decode(data.draw(tokens_)[: CAPACITY - len(tokens)])
            pairs = data.draw(st.integers(1, len(mine.hidden)))
            waiting = max(both.mine.pairs.waiting - 1, 0)  # a snapshot feeds all but the last
            if both.mine.pairs.fed + waiting + pairs <= len(tokens):  # no more pairs than there are tokens
                out = both.decode_mtp(list(range(pairs)), (mine.hidden[:pairs], truth.hidden[:pairs]), False)
                for _ in range(data.draw(st.integers(0, 3))):
                    out = both.decode_mtp([7], (out[0].hidden[-1:], out[1].hidden[-1:]), True)
            both.each("commit", 0)
    both.finish()


@given(data=st.data())
def test_sequences_share_recordings_and_nothing_else(pair, data):
    """Passes of one sequence and of several, the commit of each long after other passes began; forks among them."""
    sequences = [pair.state() for _ in range(3)]
    pending = {}
    groups = st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=3, unique=True)
    for group in data.draw(st.lists(groups, min_size=3, max_size=24)):
        begun = {}
        for which in group:
            both = sequences[which]
            if which in pending:
                both.each("commit", data.draw(st.integers(0, pending.pop(which))))
                if data.draw(st.booleans()):
                    both.finish()
                    other = sequences[which - 1]
                    both.mine = pair.recorded.restore(pair.recorded.snapshot(other.mine), other.mine.needs)
                    both.truth = pair.eager.restore(pair.eager.snapshot(other.truth), other.truth.needs)
                    both.held.clear()
            elif both.mine.length <= CAPACITY - MAX_ROWS:
                begun[which] = data.draw(tokens_)[: MAX_ROWS if len(group) == 1 else 2]
        poison(pair.recorded)
        outputs = pair.recorded.decode_batch([(sequences[which].mine, chunk) for which, chunk in begun.items()])
        for (which, chunk), output in zip(begun.items(), outputs, strict=True):
            both = sequences[which]
            both.compare(output, pair.eager.decode(both.truth, chunk))
            pending[which] = len(chunk)
    for both in sequences:
        both.finish()


def test_threads_take_turns(pair):
    """Four threads with a sequence each, over one model and one set of recordings."""
    plans = [
        [[(i * 41 + 13 * step + t) % VOCAB for t in range(1 + (step + i) % 5)] for step in range(20)] for i in range(4)
    ]
    results = [None] * len(plans)

    def play(target, plan):
        state = target.new_state(CAPACITY)
        logits = []
        for chunk in plan:
            logits.append(target.decode(state, chunk).logits.array.clone())
            target.commit(state, 1 + len(chunk) // 2)
        return logits, target.snapshot(state).arrays

    def run(i):
        results[i] = play(pair.recorded, plans[i])

    workers = [threading.Thread(target=run, args=(i,)) for i in range(len(plans))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for plan, (logits, arrays) in zip(plans, results, strict=True):
        wanted, state = play(pair.eager, plan)
        for ours, theirs in zip(logits, wanted, strict=True):
            tiny.assert_equal_bits(ours, theirs)
        tiny.assert_same_bits(arrays, state)


# --- greedy drafts in one call ---------------------------------------------------------------------------------------


def step_by_step(target, state, tokens, hidden, depth):
    """What ``Pass.chain`` says it does."""
    output = target.decode_mtp(state, tokens, hidden)
    drafted = output.logits.argmax()
    while len(drafted) < depth:
        output = target.decode_mtp(state, drafted[-1:], output.hidden[-1:], provisional=True)
        drafted += output.logits.argmax()
    return tuple(drafted)


def chained(target, state, tokens, hidden, depth):
    """The same in one call, over true pairs that come in place of provisional ones."""
    fed = state.pairs.fed
    state.mtp.truncate(fed)
    try:
        drafted = state.mtp_pass.chain(tokens, hidden.array, depth, target._lm_head_of(0))
    finally:
        if state.mtp.length > fed:
            state.pairs.fed = fed + len(tokens)
    return drafted


def same_heads(mine, truth):
    """The head's caches, provisional rows included."""
    assert mine.pairs.fed == truth.pairs.fed
    assert mine.mtp.length == truth.mtp.length
    tiny.assert_same_bits(mine.mtp.save(), truth.mtp.save())


@given(data=st.data())
def test_a_chain_drafts_what_the_steps_draft(pair, data):
    """1 to 8 pairs, depths 1 to 8, one draft after the other, with rewinds, copies and held outputs between them."""
    both = pair.state()
    for _ in range(data.draw(st.integers(1, 5))):
        mine, truth = both.decode(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=8, max_size=8)))
        pairs, depth = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
        tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=pairs, max_size=pairs))
        poison(pair.recorded)
        drafted = chained(pair.recorded, both.mine, tokens, mine.hidden[:pairs], depth)
        assert chained(pair.eager, both.truth, tokens, truth.hidden[:pairs], depth) is None
        assert drafted == step_by_step(pair.eager, both.truth, tokens, truth.hidden[:pairs], depth)
        same_heads(both.mine, both.truth)
        if data.draw(st.booleans()):  # a step behind the chain sees the rows that it left
            both.decode_mtp([5], (mine.hidden[-1:], truth.hidden[-1:]), True)
        both.each("commit", data.draw(st.integers(pairs, 8)))  # the head never knows more pairs than there are tokens
        then = data.draw(st.sampled_from(["on", "rewind", "restore"]))
        if then == "rewind":
            both.each("rewind", data.draw(st.integers(0, both.mine.length)))
        elif then == "restore":
            both.restore()
    both.finish()


@contextlib.contextmanager
def no_numbers_for(target, token):
    """The embedding of a token is NaN."""
    copy = target.ops.inner._panels(target.model.embed_tokens)
    panels = copy.view(torch.uint8).view(len(copy) // FEATURES, -1, FEATURES, WORD)
    row = panels[token // FEATURES, :, token % FEATURES]
    kept = row.clone()
    row.fill_(0xFF)
    try:
        yield
    finally:
        row.copy_(kept)


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_chain_fails_as_the_steps_do(make_pair, dtype, step):
    """Logits that are not finite from some step on: the same error, and the same rows counted."""
    pair = make_pair(dtype, tied=False)  # a token that the embedding spoils, and the head can choose
    hidden = pair.eager.decode(new_state(pair.eager), [1, 2]).hidden
    for first in range(VOCAB):  # a draft that tells its steps apart
        fed = [first, *step_by_step(pair.eager, new_state(pair.eager), [3, first], hidden, 4)]
        if first != 3 and len(set(fed[: step + 1])) == step + 1:
            break
    states, messages = [], []
    for target, draft in ((pair.recorded, chained), (pair.eager, step_by_step)):
        states.append(new_state(target))
        with no_numbers_for(target, fed[step]), pytest.raises(ContractError, match="row 0 are not finite") as caught:
            draft(target, states[-1], [3, first], hidden, 6)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert states[0].mtp.length == states[1].mtp.length == 2 + step
    assert states[0].pairs.fed == states[1].pairs.fed == 2


def test_a_chain_that_does_not_fit_is_left_to_the_steps(pair):
    target = pair.recorded
    state = target.new_state(4, tiny.needs_of(target))  # and max_rows more for provisional rows
    hidden = target.decode(state, [1, 2, 3]).hidden
    room = 4 + target.info.max_rows
    assert chained(target, state, [2, 3, 4], hidden, room - 1) is None
    assert (state.mtp.length, state.pairs.fed) == (0, 0)
    drafted = chained(target, state, [2, 3, 4], hidden, room - 2)
    assert drafted is not None
    assert len(drafted) == room - 2


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_full_cache_and_wrong_inputs_are_refused(pair):
    target = pair.recorded
    bound = target._target_passes[()].bind(target._new_caches(4))
    with pytest.raises(StateError, match="the KV cache holds 4 tokens, 5 are needed"):
        bound.run([1, 2, 3, 4, 5])
    with pytest.raises(ContractError, match="outside the vocabulary"):
        bound.run([1, 100_000])
    draft = target._mtp_passes[0].bind(target._new_mtp_caches(4))
    width = target.info.hidden_size
    for wrong in (None, torch.zeros(1, width), torch.zeros(2, width + 1), torch.zeros(2, width, dtype=torch.float64)):
        with pytest.raises(ShapeError, match="hidden states that do not fit"):
            draft.run([1, 2], wrong)


class OwnOps(NativeOps):
    pass


class OwnCache(CpuKVCache):
    pass


ROPE = Rope.of(1e4, 16)


@attrs.frozen
class Small:
    """One layer's worth of ops to write bodies with."""

    ops: BatchingOps
    table: torch.Tensor
    weight: torch.Tensor
    norm: torch.Tensor
    foreign: torch.Tensor

    @classmethod
    def of(cls, kind=NativeOps):
        ops = BatchingOps(kind(torch.float32, load_kernels()))
        draw = torch.Generator().manual_seed(3)
        table = ops.weight(torch.randn(VOCAB, 32, generator=draw))
        weight, foreign = torch.randn(32, 32, generator=draw), torch.randn(32, 32, generator=draw)
        return cls(ops, table, ops.weight(weight), ops.vector(torch.ones(32)), foreign)

    def attend(self, x, cache, position):
        heads = x.view(-1, 2, 16)
        turned = self.ops.norm_rope(heads, None, 1e-6, ROPE, position)
        return self.ops.attend(turned, turned, heads, cache, scale=0.25)


def _in_place(m, x, tokens, cache):
    x += 1
    return m.attend(x, cache, cache.length)


BODIES = {
    "torch's cat": ("a torch function", lambda m, x, t, c: m.attend(torch.cat([x, x])[: len(t)], c, c.length)),
    "torch's add cannot": ("an operator", lambda m, x, t, c: m.attend(x + 1, c, c.length)),
    "torch's add_ cannot": ("in place", _in_place),
    "torch's item": ("a value of a tensor", lambda m, x, t, c: m.attend(x if x[0, 0].item() else x, c, c.length)),
    "torch's __bool__": ("a decision", lambda m, x, t, c: m.attend(x if x[0, 0] else x, c, c.length)),
    "torch's numpy": ("numpy", lambda m, x, t, c: m.attend(torch.from_numpy(x.numpy()), c, c.length)),
    "linear_f32 reads memory": ("a foreign weight", lambda m, x, t, c: m.ops.linear(x, m.foreign)),
    "'_Sampled' object has no": ("the cache's own", lambda m, x, t, c: m.attend(x, c, c.nbytes())),
    "rms_norm_f32 reads memory": (
        "a copying view",
        lambda m, x, t, c: m.ops.rms_norm(x.t().reshape(len(t), -1), m.norm, 1e-6),
    ),
    "unsupported operand type": ("arithmetic", lambda m, x, t, c: m.attend(x, c, c.length + 1)),
    "'<' not supported": ("a comparison", lambda m, x, t, c: m.attend(x, c, c.length if c.length < 9 else 0)),
    "interpreted as an integer": ("a loop", lambda m, x, t, c: [m.attend(x, c, 0) for _ in range(c.length)][-1]),
    "token ids are read": ("a token", lambda m, x, t, c: m.attend(x, c, c.length) if t[0] else x),
    "token ids": ("all tokens", lambda m, x, t, c: m.attend(m.ops.embed(m.table, list(t)), c, c.length)),
    "return a whole output": ("a part", lambda m, x, t, c: m.attend(x, c, c.length)[:1]),
    "a pass must return": ("a weight", lambda m, x, t, c: m.table[: len(t)]),
}


@pytest.mark.parametrize("reason", BODIES)
def test_what_a_replay_could_not_repeat_runs_eagerly(reason):
    small, body = Small.of(), BODIES[reason][1]

    def run(caches, tokens, hidden):
        return body(small, small.ops.embed(small.table, tokens), tokens, caches[0])

    passes = small.ops.record_passes(run, [small.ops.new_kv(4, 2, 16)], 0)
    assert isinstance(passes, EagerPasses)
    assert reason in passes.eager_reason, passes.eager_reason
    assert tapes.current.get() is None
    assert torch.cat([torch.ones(1), torch.ones(1)]).sum() == 2  # torch is not watched any more


def test_foreign_ops_and_caches_run_eagerly():
    own, small = Small.of(OwnOps), Small.of()
    kv = small.ops.new_kv(4, 2, 16)
    assert "OwnOps changes the native ops" in own.ops.record_passes(lambda *_: None, [kv], 0).eager_reason
    wanted = "a cache of type OwnCache cannot be recorded"
    assert small.ops.record_passes(lambda *_: None, [OwnCache(4, 2, 16, torch.float32)], 0).eager_reason == wanted


def test_a_convolution_without_its_delta_rule_is_refused():
    small, shape = Small.of(), DeltaShape(key_heads=1, value_heads=2, key_dim=8, value_dim=8, kernel=4)
    taps = small.ops.vector(torch.ones(32, 4))

    def run(caches, tokens, hidden):
        return small.ops.conv_window(small.ops.embed(small.table, tokens), taps, caches[0])

    passes = small.ops.record_passes(run, [small.ops.new_delta(shape)], 0)
    assert "a convolution without the delta rule" in passes.eager_reason


def test_weights_that_a_recording_reads_live_as_long_as_it():
    small = Small.of()

    def run(caches, tokens, hidden):
        x = small.ops.embed(small.table, tokens)
        return small.ops.linear(small.attend(x, caches[0], caches[0].length), *weights)

    weights = [small.ops.weight(torch.eye(32))]
    passes = small.ops.record_passes(run, [small.ops.new_kv(4, 2, 16)], 0)
    assert passes.eager_reason == ""
    bound, plain = passes.bind([small.ops.new_kv(4, 2, 16)]), small.ops.new_kv(4, 2, 16)
    wanted = run([plain], [9], None)
    weights.clear()
    junk = [torch.full((32, 32), torch.nan) for _ in range(100)]  # would take the memory over
    tiny.assert_equal_bits(bound.run([9]), wanted)
    del junk

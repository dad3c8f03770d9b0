"""Graphs of passes: one for every sequence, nothing of a sequence in them, and drafts without the host."""

import pytest
import torch

from specdec.backends.cuda import caches, memory
from specdec.backends.cuda.ops import CudaOps
from specdec.contract import Needs
from specdec.errors import ContractError, StateError
from tests import tiny
from tests.backends import families
from tests.backends.cuda.fake import FakeDevice
from tests.backends.cuda.test_models import TINY, _short_caches

__all__ = ["_short_caches"]  # a fixture
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(torch.cuda.is_available(), reason="looks into graphs of the interpreter's device"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # numpy, over NaN
]

CAPACITY = 200
HYBRID = TINY["qwen3_5"]
HIDDEN = Needs(final_hidden=True)
HEAD = {**HYBRID, "layer_types": ["full_attention"]}


@pytest.fixture
def build(checkpoint):
    """``build(eager=False, **settings)``: a new target of the hybrid family."""

    def get(*, eager=False, **settings):
        ops = CudaOps(FakeDevice(), torch.float32, eager_reason="asked for" if eager else "")
        return tiny.make_target(checkpoint("qwen3_5", **(settings or HYBRID)), ops=ops)

    return get


def decoded(target, state, tokens, keep=None):
    """The bits of a pass's hidden states, of which ``keep`` rows (all) are committed."""
    output = target.decode(state, tokens)
    target.commit(state, len(tokens) if keep is None else keep)
    return target.ops.array(output.need_hidden()).view(torch.int32)


# --- one graph for every sequence ------------------------------------------------------------------------------------


def test_sequences_share_a_graph(build):
    """Two sequences of different lengths in turn, and each alone op by op; rows are dropped on the way."""
    target, truth = build(), build(eager=True)
    prompts = ([5, 6, 7], [9])
    steps = [([1, 2], 2), ([3, 4], 1), ([5, 6], 0), ([7, 8], 2)]
    wanted = []
    for prompt in prompts:
        state = truth.new_state(CAPACITY, HIDDEN)
        truth.prefill(state, prompt)
        wanted.append([decoded(truth, state, tokens, keep) for tokens, keep in steps])
    states = [target.new_state(CAPACITY, HIDDEN) for _ in prompts]
    for state, prompt in zip(states, prompts, strict=True):
        target.prefill(state, prompt)
    for at, (tokens, keep) in enumerate(steps):
        for which, state in enumerate(states):
            assert torch.equal(decoded(target, state, tokens, keep), wanted[which][at]), (which, at)
    graphs = target._target_passes[()].graphs
    assert {rows for rows, _ in graphs} == {1, 2, 3}
    assert graphs[2, 64].graph.replays == len(steps) * len(states)


def test_caches_grow_and_the_bits_stay(build, monkeypatch):
    """A sequence that outgrows its memory twice, beside one that had room from the start."""
    monkeypatch.setattr(memory, "FIRST_ROWS", 4)
    monkeypatch.setattr(memory, "GROWTH", 2)
    target = build()
    state = target.new_state(CAPACITY, HIDDEN)
    tokens = [(3 * i + 1) % 200 for i in range(19)]
    first = state.nbytes()
    found = [decoded(target, state, tokens[at : at + 3]) for at in range(0, 18, 3)]
    assert state.nbytes() > first
    stages = {bound for _, bound in target._target_passes[()].graphs}
    assert stages == {4, 8, 16, 32}
    monkeypatch.setattr(memory, "FIRST_ROWS", 64)
    roomy = build(eager=True)
    other = roomy.new_state(CAPACITY, HIDDEN)
    for at, got in zip(range(0, 18, 3), found, strict=True):
        assert torch.equal(got, decoded(roomy, other, tokens[at : at + 3]))
    tiny.assert_same_bits(tiny.state_arrays(target, state), tiny.state_arrays(roomy, other))


def test_a_pass_after_the_end_of_the_capacity_is_refused(build):
    ops = CudaOps(FakeDevice(), torch.float32)
    made = [ops.new_kv(5, 1, 16)]
    table = ops.weight(torch.randn(7, 16))
    one = ops.record_passes(lambda caches, tokens, hidden: ops.embed(table, tokens), made, 0).bind(made)
    one.run([1, 2, 3])
    one.commit(3)
    with pytest.raises(StateError, match="holds 5 tokens, 6 are needed"):
        one.run([1, 2, 3])


def test_long_passes_make_room_for_states(build):
    """A delta cache begins with the states of short passes; the committed one moves when a longer pass comes."""
    target, truth = build(), build(eager=True)
    state, other = target.new_state(CAPACITY, HIDDEN), truth.new_state(CAPACITY, HIDDEN)
    delta = state.caches[0]
    for count, keep in ((4, 3), (2, 2), (7, 4)):
        tokens = list(range(10, 10 + count))
        assert torch.equal(decoded(target, state, tokens, keep), decoded(truth, other, tokens, keep))
    assert caches.FIRST_SLOTS < 8 <= delta.slots
    single = build().new_state(CAPACITY, HIDDEN)
    assert single.caches[0].slots == caches.FIRST_SLOTS


def test_a_prompt_that_was_not_committed_leaves_the_state(build):
    """An interruption between a prompt's pass and its commit: the window's rows are still there."""
    target = build()
    state = target.new_state(CAPACITY, HIDDEN)
    target.prefill(state, list(range(3, 20)))
    kept = {name: array.clone() for name, array in tiny.state_arrays(target, state).items()}
    state.target_pass.run(list(range(40, 80)))
    tiny.assert_same_bits(tiny.state_arrays(target, state), kept)


# --- drafts ----------------------------------------------------------------------------------------------------------


def test_a_draft_has_the_tokens_and_the_state_of_its_steps(build):
    """Graphs are made per number of pairs and per number of steps."""
    target = build(**HEAD)
    families.check_drafts(target, [(1, None, 3), (2, None, 1), (3, None, 1)])
    (drafts,) = target._mtp_passes[0]._drafts.values()
    assert (sorted(drafts.firsts), sorted(drafts.rests)) == ([(1, 64), (3, 64)], [(1, 64), (2, 64)])


def test_a_draft_with_a_pruned_head_has_the_tokens_of_its_steps(build):
    """Rows that a sequence adds go to a buffer of the graphs, which sequences use in turn."""
    target = build(**HEAD)
    base = target.draft_head(range(0, 120, 3))
    heads = [base, base.extended([1, 2, 100]), base.extended([7, 50])]
    found = families.check_drafts(target, [(2, head, 1) for head in (*heads, *heads)])
    assert len(set(found)) > 1
    assert len(target._mtp_passes[0]._drafts) == 2  # with and without room for added rows


def test_a_draft_that_meets_a_nan_fails_as_its_steps_do(build):
    """The embedding of one token breaks, so that the second step fails."""
    target = build(**HEAD)
    embedding = target.model.embed_tokens
    object.__setattr__(target.model.mtp[0], "lm_head", target.ops.weight(embedding.tensor.clone()))  # they are tied
    embedding.tensor = embedding.tensor.clone()
    states = [target.new_state(20, Needs(mtp=True)) for _ in range(3)]
    for state in states:
        target.prefill(state, [1, 2, 3])
    (first,) = target.draft_mtp(states[2], 2, 1)
    embedding.tensor[first] = float("nan")  # in place: graphs hold its address
    for state, choose in zip(states, (None, families.best), strict=False):
        with pytest.raises(ContractError, match="not finite"):
            target.draft_mtp(state, 2, 3, choose=choose)
        assert (state.mtp.length, state.pairs.fed) == (4, 3)

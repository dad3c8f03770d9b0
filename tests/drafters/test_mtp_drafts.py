"""The MTP drafter against an oracle that keeps no state: transformers' layers (``models/mtp_oracle.py``).

Wrong drafts never show in the output (verification repairs them), only in the acceptance of trained weights. So each
draft is compared here, token by token, after prefill and over cycles of any accept counts, chunkings and rewinds. The
mistakes that other engines made change the drafts (``tests/measuring/test_ablation.py``).
"""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract import Context, DrafterEnv, Needs, Verdict
from specdec.drafters.mtp import MtpDrafter
from specdec.drafters.pruned_head import PrunedHeadConfig
from specdec.errors import StateError
from tests import tiny
from tests.comparisons import record
from tests.models.mtp_oracle import MtpOracle
from tests.tiny_families import ALL_SHAPES

MTP = Needs(mtp=True)
LOGITS_BOUND = 1e-4  # max |difference| / max |reference|; float32 through trunk, head and chain
ORACLES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "deepseek_v3")
CASES = [
    pytest.param(family, name, marks=[pytest.mark.slow] * (number > 1))
    for family in ORACLES
    for number, (name, shape) in enumerate(ALL_SHAPES[family].items())
    if shape.get("mtp", True)
]
VOCAB = 277

token_ids = st.integers(0, VOCAB - 1)


class Spied:
    """The target, with the logits of each MTP pass kept."""

    def __init__(self, target):
        self._target = target
        self.seen = []

    def __getattr__(self, name):
        return getattr(self._target, name)

    def draft_mtp(self, state, pending, depth, *, head=None, choose=None):
        """Step by step, so that the logits of every step are seen."""

        def seen(logits, drafted):
            self.seen.append(logits.rows()[0].copy())
            return logits.argmax()[0] if choose is None else choose(logits, drafted)

        return self._target.draft_mtp(state, pending, depth, head=head, choose=seen)


class Run:
    """One sequence, driven by hand as the engine drives it, with verdicts of our choice."""

    def __init__(self, target, capacity=256):
        self.target = Spied(target)
        self.state = target.new_state(capacity, MTP)
        self.drafter = self._new_drafter()
        self.tokens = []

    def _new_drafter(self):
        return MtpDrafter(PrunedHeadConfig(), DrafterEnv(target=self.target, state=self.state))

    def prefill(self, tokens, sizes=()):
        """Append a prompt; all but its last token run through the target, in chunks of these sizes, then the rest."""
        self.tokens += tokens
        for size in [*sizes, len(self.tokens)]:
            at = self.state.length
            chunk = self.tokens[at : min(at + size, len(self.tokens) - 1)]
            if chunk:
                self.target.prefill(self.state, chunk)

    def draft(self, depth):
        self.target.seen.clear()
        return self.drafter.propose(Context(self.tokens), depth).tokens

    def verify(self, fed, accepted, following):
        """A verification pass over ``fed``, of which ``accepted`` are kept, and the token after them."""
        output = self.target.decode(self.state, [self.tokens[-1], *fed])
        self.target.commit(self.state, accepted + 1)
        self.tokens += [*fed[:accepted], following]
        self.drafter.observe(Verdict(accepted, following), output, Context(self.tokens))

    def rewind(self, length):
        """Keep ``length`` tokens, as a session does: the last one pending, the others held by the state."""
        del self.tokens[length:]
        if self.state.length > length - 1:
            reached = self.target.rewind(self.state, length - 1)
            self.drafter.rewind(reached)
        self.prefill([])

    def save_and_load(self):
        self.state = self.target.restore(self.target.snapshot(self.state), MTP)
        self.drafter = self._new_drafter()


def check(run, oracle, depth):
    """Compare the drafts of the present moment; returns the largest relative difference of the logits."""
    drafted = run.draft(depth)
    if len(run.tokens) < 2 or depth == 0:
        assert drafted == ()  # no true pair exists yet: there is no hidden state
        return 0.0
    wanted, logits = oracle.drafts(run.tokens, depth)
    assert len(drafted) == depth == len(run.target.seen)
    worst = 0.0
    for step, (ours, theirs) in enumerate(zip(run.target.seen, logits, strict=True)):
        scale = np.abs(theirs).max()
        difference, bound = float(np.abs(ours - theirs).max() / scale), LOGITS_BOUND
        if difference > bound:  # the first output of a recurrence may be close to 0, and a norm follows it
            bound += 30 * np.abs(oracle.nearby.drafts(run.tokens, depth)[1][step] - theirs).max() / scale
        assert difference < bound, f"step {step} after {len(run.tokens)} tokens: {difference:.2e}, not {bound:.2e}"
        worst = max(worst, difference)
        best = np.sort(theirs)[-2:]
        if best[1] - best[0] < bound * scale:
            return worst  # a near-tie may fall either way, and the chain after it is another one
        assert drafted[step] == wanted[step]
    return worst


@pytest.fixture(scope="module")
def made(kernels, make_target, checkpoint):
    """``made(family, name)``: the target of that shape, and the oracle."""

    def make(family, name):
        shape = ALL_SHAPES[family][name]
        oracle = _oracle(checkpoint(family, dtype="float32", **shape))
        return make_target(family, kernels=kernels, **shape), oracle

    return make


_oracle = functools.cache(MtpOracle)


def prompt_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


@pytest.mark.parametrize(("family", "name"), CASES)
def test_drafts_equal_the_oracle(family, name, made, record_property):
    """After prompts from one token on, and after a cycle that kept part of a draft: pairing, halves, the chain."""
    worst = 0.0
    target, oracle = made(family, name)
    for length in (1, 2, 3, 19, 40):
        run = Run(target, capacity=64)
        run.prefill(prompt_of(length), sizes=[7])
        worst = max(worst, check(run, oracle, 4))
        run.verify([5, 6, 7], length % 3, 11)
        worst = max(worst, check(run, oracle, 2))
    record(record_property, family, "MTP drafts", "transformers' layers", name, worst)


steps = st.one_of(
    st.tuples(
        st.just("cycle"),  # how many tokens are drafted (and never looked at), which are verified, how many accepted
        st.lists(token_ids, max_size=5).flatmap(
            lambda fed: st.tuples(st.integers(0, 4), st.just(fed), st.integers(0, len(fed)))
        ),
    ),
    st.tuples(st.just("plain"), st.integers(1, 12)),
    st.tuples(st.just("feed"), st.tuples(st.lists(token_ids, min_size=1, max_size=6), st.integers(1, 6))),
    st.tuples(st.just("rewind"), st.integers(1, 12)),
    st.tuples(st.just("save"), st.none()),
)


@pytest.mark.parametrize(
    ("family", "name", "modules"),
    [
        ("qwen3_5", "r3-gqa3-untied", 1),
        ("qwen3_5", "attention-only", 1),
        ("glm4_moe", "no-bias-groups", 2),
        ("deepseek_v3", "all-sparse-mixed", 3),
    ],
)
@given(prompt=st.lists(token_ids, min_size=1, max_size=20), chunk=st.integers(1, 20), plan=st.lists(steps, max_size=7))
def test_drafts_whatever_happened_before(family, name, modules, made, prompt, chunk, plan):
    """Any story of cycles, plain decoding, further prompts, rewinds and saves; then a draft."""
    target, oracle = made(family, name)
    assert target.info.mtp_layers == len(oracle.modules) == modules
    check(told(target, prompt, chunk, plan), oracle, 2 + modules)


def told(target, prompt, chunk, plan):
    """A sequence after this story."""
    run = Run(target)
    run.prefill(prompt, [chunk] * len(prompt))
    for what, with_ in plan:
        if what == "cycle":
            depth, fed, accepted = with_
            run.draft(depth)  # what the chain leaves behind must not matter
            run.verify(fed, accepted, following=(len(run.tokens) * 13) % VOCAB)
        elif what == "plain":
            for _ in range(with_):
                run.verify([], 0, following=(len(run.tokens) * 13) % VOCAB)
        elif what == "feed":
            run.prefill(with_[0], [with_[1]])
        elif what == "rewind":
            run.rewind(max(1, len(run.tokens) - with_))
        else:
            run.save_and_load()
    return run


def test_a_state_without_mtp_entries_is_refused(make_target):
    """A state that another drafter filled has lost the hidden states: drafting from it would pair wrong positions."""
    target = make_target("qwen3_5", **tiny.QWEN3_5_SHAPES["r3-gqa3-untied"])
    tokens = prompt_of(10)
    state = target.new_state(64)
    target.prefill(state, tokens[:-1])
    state = target.restore(target.snapshot(state), MTP)
    drafter = MtpDrafter(PrunedHeadConfig(), DrafterEnv(target=target, state=state))
    with pytest.raises(StateError, match="lacks 9 positions"):
        drafter.propose(Context(tokens), 2)
    target.prefill(state, [tokens[-1]])  # and nothing wrong gets into the cache in other ways
    target.feed_mtp(state)
    assert (state.pairs.fed, state.pairs.waiting) == (0, 0)
    drafter.rewind(target.rewind(state, 0))  # from nothing, all is known again
    target.prefill(state, tokens[:-1])
    assert len(drafter.propose(Context(tokens), 2).tokens) == 2

"""The ledger of MTP pairs against a list of all of them: whatever was added, taken, marked or cut."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.contract import Hidden, MtpPairs


class Rows(Hidden):
    """Hidden states that say which position and which token they are of."""

    def __init__(self, rows):
        self.made_of = list(rows)

    def __len__(self):
        return len(self.made_of)

    def __getitem__(self, rows):
        return Rows(self.made_of[rows])

    def join(self, others):
        return Rows([row for part in (self, *others) for row in part.made_of])

    def rows(self):
        raise AssertionError("a ledger does not look into hidden states")


class Ledger(RuleBasedStateMachine):
    """A target that adds and cuts, a head that takes. ``cache`` is what the head was really fed."""

    @initialize()
    def begin(self):
        self.pairs = MtpPairs()
        self.tokens = []
        self.cache = []
        self.owed = None  # the token that must come next, after a cut that kept its pair

    def feed(self, tokens, hidden):
        assert isinstance(hidden, Rows)
        assert len(tokens) == len(hidden)
        self.cache += zip(hidden.made_of, tokens, strict=True)
        self.pairs.fed += len(tokens)

    @rule(chunk=st.lists(st.integers(0, 9), min_size=1, max_size=6))
    def add(self, chunk):
        if self.owed is not None:
            chunk, self.owed = [self.owed, *chunk], None
        first = len(self.tokens)
        self.tokens += chunk
        self.pairs.add(chunk, Rows([(first + i, token) for i, token in enumerate(chunk)]), first)

    @rule()
    def feed_all_but_the_last(self):
        if self.pairs.waiting > 1:
            self.feed(*self.pairs.take())

    @precondition(lambda self: self.pairs.waiting and self.owed is None)
    @rule(pending=st.integers(0, 9))
    def draft(self, pending):
        """A draft feeds the pair of the pending token too, which is committed next."""
        self.feed(*self.pairs.take(pending))
        self.owed = pending

    @rule()
    def mark(self):
        if self.pairs.length == len(self.tokens):
            self.pairs.mark([*range(0, len(self.tokens), 3), len(self.tokens)])

    @rule(share=st.floats(0, 1))
    def cut(self, share):
        length = round(share * len(self.tokens))
        known = self.pairs.knows(length)
        if not known:  # as a target does: one token less, and the same one runs again
            length -= 1
        back, self.tokens = self.tokens[length:], self.tokens[:length]
        self.pairs.cut(length)
        del self.cache[self.pairs.fed :]
        self.owed = None if known else back[0]

    @rule(places=st.integers(1, 3))
    def what_follows_a_gap_is_not_taken_in(self, places):
        before = self.pairs.length, self.pairs.waiting
        self.pairs.add([1], Rows([(0, 0)]), self.pairs.length + places)
        assert (self.pairs.length, self.pairs.waiting) == before

    @invariant()
    def every_pair_is_true(self):
        assert self.pairs.length == len(self.tokens)
        assert self.pairs.fed == len(self.cache)
        for place, ((position, token), following) in enumerate(self.cache):
            assert (position, token) == (place, self.tokens[place])
            if place + 1 < len(self.tokens):
                assert following == self.tokens[place + 1]
            else:
                assert following == self.owed
        last = self.pairs.last
        assert last is None or last.made_of == [(len(self.tokens) - 1, self.tokens[-1])]


test_any_story_feeds_true_pairs = Ledger.TestCase


def test_going_on_from_saved_pairs():
    pairs = MtpPairs()
    pairs.resume(4, [8, 9], Rows([(4, 7), (5, 8), (6, 9)]))
    pairs.add([3], Rows([(7, 3)]), 7)
    tokens, hidden = pairs.take(2)
    assert tokens == [8, 9, 3, 2]
    assert [position for position, _ in hidden.made_of] == [4, 5, 6, 7]
    with pytest.raises(IndexError):
        pairs.take()

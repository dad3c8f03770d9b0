"""The automaton against a brute-force reference, on highly repetitive texts of two or three distinct tokens."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import reference
from hypothesis import given, settings

from specdec_suffix import SuffixAutomaton

TEXTS = st.integers(1, 3).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=40))
BOUNDS = st.tuples(st.integers(1, 3), st.integers(0, 5)).map(lambda drawn: (drawn[0], drawn[0] + drawn[1]))


def built(text: list[int], bounds: tuple[int, int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton(*bounds)
    automaton.extend(text)
    return automaton


def fields(automaton: SuffixAutomaton) -> dict[str, object]:
    """All fields, with edges in order."""
    return {**vars(automaton), "edges": [list(edges.items()) for edges in automaton.edges]}


@settings(max_examples=300, deadline=None)
@given(TEXTS, BOUNDS)
def test_the_longest_match_is_the_longest(text, bounds):
    automaton = SuffixAutomaton(*bounds)
    for end, token in enumerate(text, start=1):
        automaton.push(token)
        longest = reference.longest_repeat(text[:end])
        assert automaton.longest == longest
        assert automaton.match()[1] == min(longest, bounds[1])


@settings(max_examples=300, deadline=None)
@given(TEXTS, BOUNDS, st.integers(1, 12), st.sampled_from([0.0, 0.3, 0.6]))
def test_the_continuation_is_what_followed_most_often_and_then_latest(text, bounds, limit, min_share):
    automaton = built(text, bounds)
    state, matched = automaton.match()
    if matched >= bounds[0]:
        expected = reference.continuation(
            text, text[-matched:], limit, min_match=bounds[0], max_match=bounds[1], min_share=min_share
        )
        assert automaton.follow(state, limit, min_share) == expected


@settings(max_examples=300, deadline=None)
@given(TEXTS, TEXTS, BOUNDS, st.integers(1, 8))
def test_another_text_is_matched_and_continued_the_same_way(text, other, bounds, limit):
    automaton = built([*text, -1, *reversed(text), -1], bounds)
    state, matched = 0, 0
    for end, token in enumerate(other, start=1):
        state, matched = automaton.advance(state, matched, token)
        whole = [*text, -1, *reversed(text), -1]
        assert matched == min(reference.longest_match(whole, other[:end]), bounds[1])
        if matched >= bounds[0]:
            context = other[end - matched : end]
            assert automaton.follow(state, limit) == reference.continuation(
                whole, context, limit, min_match=bounds[0], max_match=bounds[1], min_share=0.0
            )


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 2), max_size=8)), max_size=4), BOUNDS)
def test_taking_tokens_back_leaves_the_automaton_of_the_shorter_text(text, edits, bounds):
    automaton = built(text, bounds)
    for length, more in edits:
        automaton.truncate(length)
        text = [*text[:length], *more]
        automaton.extend(more)
        assert fields(automaton) == fields(built(text, bounds))


def test_an_automaton_without_undo_says_so():
    automaton = SuffixAutomaton(1, 4, undo=False)
    automaton.push(1)
    with pytest.raises(IndexError, match="no token to take back"):
        automaton.pop()


class CountedReads(list):
    """A list that counts how often an entry is read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("text", [[7] * 20_000, [i % 3 for i in range(20_000)], [(i * i) % 97 for i in range(20_000)]])
def test_a_token_takes_as_many_steps_late_as_early(text):
    """Every step over the automaton reads a link, an edge or a length; an O(n) step would read seven times as many."""
    automaton = SuffixAutomaton(2, 32)
    columns = ("link", "edges", "length")
    for name in columns:
        setattr(automaton, name, CountedReads(getattr(automaton, name)))

    def reads(tokens: list[int]) -> int:
        before = sum(getattr(automaton, name).reads for name in columns)
        for token in tokens:
            automaton.push(token)
            automaton.match()
        return sum(getattr(automaton, name).reads for name in columns) - before

    early = reads(text[:5_000])
    reads(text[5_000:15_000])
    assert reads(text[15_000:]) < 1.5 * early
    assert len(automaton.edges) <= 2 * len(text)

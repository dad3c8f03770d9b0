"""The n-gram drafter against its definition, written as a search through the text."""

from hypothesis import given
from hypothesis import strategies as st

from specdec.contract import Context
from specdec.drafters.ngram import NgramConfig, NgramDrafter


def _searched(text, depth, orders):
    for order in orders:
        for end in range(len(text) - 1, order - 1, -1):
            if text[end - order : end] == text[len(text) - order :]:
                length, copied = min(depth, 2 * order), list(text)
                for at in range(end, end + length):
                    copied.append(copied[at])
                return copied[len(text) :]
    return []


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 15)), min_size=1, max_size=6),
    shortest=st.integers(1, 4),
    more=st.integers(0, 6),
)
def test_drafts_are_those_of_a_search(text, steps, shortest, more):
    drafter = NgramDrafter(NgramConfig(min_order=shortest, max_order=shortest + more))
    orders = range(shortest + more, shortest - 1, -1)
    for taken_back, depth in steps:
        draft = drafter.propose(Context(text), depth).tokens
        assert list(draft) == _searched(text, depth, orders)
        text = [*text[: max(len(text) - taken_back, 1)], *draft[:2], taken_back % 3]
        drafter.rewind(min(len(text) - 2, max(len(text) - taken_back - 4, 0)))

"""Which head a draft runs with: a function of the tokens, whatever the drafter saw of them at a time."""

from typing import Any

import attrs
from hypothesis import event, given
from hypothesis import strategies as st

from specdec.contract import Context, DraftHead
from specdec.drafters.pruned_head import WINDOW, HeadChoice, PreparedVocabulary, PrunedHeadConfig

VOCAB = 40


@attrs.frozen
class Head(DraftHead):
    ids: tuple[int, ...]
    log: list[Any]

    @property
    def tokens(self):
        return tuple(sorted(self.ids))

    def extended(self, tokens):
        assert len(set(tokens)) == len(tokens)
        assert not set(tokens) & set(self.ids)
        self.log.append(tuple(tokens))
        return Head((*self.ids, *tokens), self.log)


def choice(kept, **settings):
    return HeadChoice(PreparedVocabulary.of(Head(tuple(kept), []), VOCAB), PrunedHeadConfig(**settings))


def expected(tokens, kept, max_miss, max_extra):
    """The definition, with nothing kept between tokens but what it speaks of: added ids, share, head."""
    added = []  # by last occurrence
    history = []  # 1 for each miss
    full = False
    for token in tokens:
        outside = token not in kept and token not in added
        if token not in kept and max_extra:
            added = [a for a in added if a != token] + [token]
            if len(added) > max_extra:
                added = added[max(1, max_extra // 4) :]
        history.append(int(outside))
        share = sum(m * (1 - 1 / WINDOW) ** age for age, m in enumerate(reversed(history))) / WINDOW
        full = share > (max_miss / 2 if full else max_miss)
    return set(added), share, full


@given(
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=120),
    kept=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30, unique=True),
    max_miss=st.sampled_from([0.0, 0.03, 0.1, 0.5, 1.0]),
    max_extra=st.sampled_from([0, 1, 3, 8, 2048]),
    cuts=st.lists(st.integers(1, 120), max_size=6),
    rewound=st.booleans(),
)
def test_the_choice_is_a_function_of_the_tokens(tokens, kept, max_miss, max_extra, cuts, rewound):
    followed = choice(kept, max_miss=max_miss, max_extra=max_extra)
    if rewound:  # a past that is not this one
        followed.follow(Context([(t + 1) % VOCAB for t in tokens]))
        followed.forget()
    for cut in sorted(cuts):
        followed.follow(Context(tokens[:cut]))
    head = followed.follow(Context(tokens))
    added, share, full = expected(tokens, kept, max_miss, max_extra)
    assert abs(followed.share - share) < 1e-9
    if abs(share - max_miss) > 1e-6 and abs(share - max_miss / 2) > 1e-6:
        assert followed.full == full
    if head is None:
        assert followed.full
        assert followed.report()["head"] == "full"
    else:
        assert set(head.tokens) == {*kept, *added}
    event(f"full: {full}")


def test_added_rows_are_asked_for_once():
    head = Head(tuple(range(10)), [])
    followed = HeadChoice(PreparedVocabulary.of(head, VOCAB), PrunedHeadConfig(max_miss=1.0, max_extra=100))
    tokens = [1, 20, 2, 21, 20]
    for end in range(1, len(tokens) + 1):
        followed.follow(Context(tokens[:end]))
    followed.follow(Context(tokens))
    assert head.log == [(20,), (21,)]

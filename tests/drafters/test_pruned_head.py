"""Which head a draft runs with: a function of the tokens, whatever the drafter saw of them at a time."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from specdec.contract import Context, DraftHead, PrepareEnv
from specdec.drafters.pruned_head import LEAST, WINDOW, HeadChoice, PreparedVocabulary, PrunedHeadConfig
from specdec.drafters.token_counts import always_kept
from specdec.testing import TableModel
from specdec.text import Tokenizer

VOCAB = 40


@attrs.frozen
class Head(DraftHead):
    ids: tuple[int, ...]
    log: list[Any]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(sorted(self.ids))

    def extended(self, tokens: Any) -> Head:
        assert len(set(tokens)) == len(tokens)
        assert not set(tokens) & set(self.ids)
        self.log.append(tuple(tokens))
        return Head((*self.ids, *tokens), self.log)


def choice(kept: range | list[int], **settings: Any) -> HeadChoice:
    return HeadChoice(PreparedVocabulary.of(Head(tuple(kept), []), VOCAB), PrunedHeadConfig(**settings))


def expected(tokens: list[int], kept: list[int], max_miss: float, max_extra: int) -> tuple[set[int], float, bool]:
    """The definition, with nothing kept between tokens but what it speaks of: added ids, share, head."""
    added: list[int] = []  # by last occurrence
    history: list[int] = []  # 1 for each miss
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
def test_the_choice_is_a_function_of_the_tokens(
    tokens: list[int], kept: list[int], max_miss: float, max_extra: int, cuts: list[int], rewound: bool
) -> None:
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


SIZES = {  # pass_weights, mtp_weights, hidden_size, vocab_size; ids kept and the limit of misses
    "the head is most of a step": ((1, 1, 1, 1_000_000), LEAST, 0.5),
    "as many rows as the rest": ((3_400_000, 5_000, 1, 100_000), 5_000, math.log1p(3 * 95_000 / 3_430_000) / 2),
    "half of the rows would stay": ((900_000, 50_001, 1, 100_000), None, None),
    "a small vocabulary": ((900, 10, 1, 2 * LEAST - 1), None, None),
    "sizes that nobody knows": ((0, 0, 1, 100_000), None, None),
}


@pytest.mark.parametrize(("sizes", "kept", "limit"), SIZES.values(), ids=SIZES)
def test_the_default_follows_from_sizes_and_tokenizer(
    sizes: tuple[int, ...], kept: int | None, limit: float | None, checkpoint: Callable[..., pathlib.Path]
) -> None:
    names = ("pass_weights", "mtp_weights", "hidden_size", "vocab_size")
    target = TableModel.random(5, mtp=True)
    target.info = attrs.evolve(target.info, **dict(zip(names, sizes, strict=True)))
    tokenizer = Tokenizer.from_folder(checkpoint("qwen3_5"))

    def prepare(vocabulary: str, tokenizer: Any) -> PreparedVocabulary | None:
        env = PrepareEnv(target=target, tokenizer=tokenizer)
        config = PrunedHeadConfig(vocabulary=vocabulary)
        return config.prepare(env, lambda tokens: Head(tuple(tokens), []), target.info.mtp_weights, 1)

    assert prepare("full", tokenizer) is None
    assert prepare("auto", None) is None
    chosen = prepare("auto", tokenizer)
    if kept is None or limit is None:
        assert chosen is None
        return
    assert chosen is not None
    assert len(chosen.head.tokens) == kept
    assert {*always_kept(tokenizer), *range(kept - 3 - 256)} <= {*chosen.head.tokens}
    assert chosen.max_miss == pytest.approx(limit)


def test_a_prompt_in_another_script_starts_with_the_full_head() -> None:
    followed = choice(range(10))
    tokens = [1, *range(10, 30)]
    assert followed.follow(Context(tokens)) is None


def test_falling_back_and_coming_back() -> None:
    """A scripted sequence: known text, then text outside, then known text again; the report tells each time."""
    followed = choice(range(10), max_miss=0.1, max_extra=0)
    tokens = [0] * 20
    told = []
    for token in [3] * 30 + [33] * 30 + [4] * 200:
        tokens.append(token)
        head = followed.follow(Context(tokens))
        told.append((head is None, followed.report()))
    full = [is_full for is_full, _ in told]
    first, last = full.index(True), len(full) - 1 - full[::-1].index(True)
    assert first == 30 + 6  # the seventh miss: 1 - (63/64)^7 > 0.1
    assert all(full[first : last + 1])  # no flapping
    assert last > 60  # stays while the share falls from its peak to half of the limit
    reason = "10% of the last tokens were outside the draft vocabulary, more than max_miss (0.1)"
    assert told[first][1]["reason"] == reason
    assert "more than half of max_miss (0.1)" in told[last][1]["reason"]
    assert told[last][1]["outside"] > 0.05
    report = told[-1][1]
    assert (report["head"], report["reason"], report["vocabulary"], report["extra"]) == ("pruned", "", 10, 0)
    assert (report["pruned_drafts"], report["full_drafts"]) == (full.count(False), full.count(True))


def test_added_rows_are_asked_for_once() -> None:
    head = Head(tuple(range(10)), [])
    followed = HeadChoice(PreparedVocabulary.of(head, VOCAB), PrunedHeadConfig(max_miss=1.0, max_extra=100))
    tokens = [1, 20, 2, 21, 20]
    for end in range(1, len(tokens) + 1):
        followed.follow(Context(tokens[:end]))
    followed.follow(Context(tokens))
    assert head.log == [(20,), (21,)]

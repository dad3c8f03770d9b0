"""The drafter's drafts, corpus and configuration."""

from __future__ import annotations

import json

import attrs
import hypothesis.strategies as st
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from specdec.config import structure_options
from specdec.contract import Context, DrafterEnv, PrepareEnv
from specdec.errors import ConfigError
from specdec.registry import Registry
from specdec.testing import TableModel

from specdec_suffix import SuffixConfig, SuffixDrafter, load_corpus

TARGET = TableModel.random(4, order=2, seed=3, peak=0.3)
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
CONFIGS = st.builds(
    SuffixConfig,
    min_match=st.integers(1, 2),
    max_match=st.integers(2, 6),
    max_draft=st.integers(1, 9),
    factor=st.sampled_from([0.5, 1.0, 2.5]),
    min_share=st.sampled_from([0.0, 0.4]),
)


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.json"
    path.write_text(json.dumps([[0, 1, 2, 3, 0, 1, 3], [3, 2, 1, 0, 3, 2]]))
    return str(path)


def drafter(config: SuffixConfig) -> SuffixDrafter:
    corpus = load_corpus(config, PrepareEnv(target=TARGET))
    return SuffixDrafter(config, DrafterEnv(target=TARGET, state=TARGET.new_state(64), shared=corpus))


def propose(made: SuffixDrafter, tokens: list[int], depth: int = 8) -> tuple[int, ...]:
    return made.propose(Context(list(tokens)), depth).tokens


def expected(config: SuffixConfig, tokens: list[int], corpus: list[int], depth: int) -> tuple[int, ...]:
    text, matched = tokens, min(reference.longest_repeat(tokens), config.max_match)
    in_corpus = min(reference.longest_match(corpus, tokens), config.max_match)
    if in_corpus > matched:
        text, matched = corpus, in_corpus
    if matched < config.min_match:
        return ()
    limit = min(depth, config.max_draft, max(1, int(config.factor * matched)))
    return tuple(
        reference.continuation(
            text,
            tokens[-matched:],
            limit,
            min_match=config.min_match,
            max_match=config.max_match,
            min_share=config.min_share,
        )
    )


def test_a_repetition_is_continued():
    assert propose(drafter(SuffixConfig()), [5, 6, 7, 8, 9, 5, 6], depth=3) == (7, 8, 9)
    assert propose(drafter(SuffixConfig()), [1, 2, 1, 2, 1, 2], depth=5) == (1, 2, 1, 2, 1)  # continues past the end
    assert propose(drafter(SuffixConfig()), [1, 2, 3, 4]) == ()


def test_a_short_match_gives_a_short_draft():
    text = [5, 6, *range(10, 30), 5, 6]
    assert len(propose(drafter(SuffixConfig(factor=1.0)), text, depth=15)) == 2
    assert len(propose(drafter(SuffixConfig(factor=3.0)), text, depth=15)) == 6
    assert len(propose(drafter(SuffixConfig(factor=100.0, max_draft=9)), text, depth=15)) == 9


@settings(max_examples=200, deadline=None)
@given(TEXTS, CONFIGS, st.booleans(), st.integers(0, 9))
def test_drafts_are_those_of_the_reference(corpus_file, tokens, config, with_corpus, depth):
    corpus = [0, 1, 2, 3, 0, 1, 3, -1, 3, 2, 1, 0, 3, 2, -1] if with_corpus else []
    made = drafter(attrs.evolve(config, corpus=corpus_file) if with_corpus else config)
    for end in range(1, len(tokens) + 1):
        draft = made.propose(Context(tokens[:end]), depth)
        assert draft.tokens == expected(config, tokens[:end], corpus, depth)
        assert draft.probs is None


# --- the corpus ------------------------------------------------------------------------------------------------------


def test_every_kind_of_corpus_file_is_read(tmp_path):
    (tmp_path / "ids.json").write_text("[3, 1, 2, 3, 0]")
    np.save(tmp_path / "ids.npy", np.array([3, 1, 2, 3, 0], dtype=np.uint16))
    for name in ("ids.json", "ids.npy"):
        config = SuffixConfig(corpus=str(tmp_path / name), factor=9)
        assert propose(drafter(config), [3, 1], depth=3) == (2, 3, 0)


def test_a_corpus_of_text_takes_a_tokenizer(tmp_path):
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "c": 2, "[UNK]": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "corpus.txt").write_text("a b c a")
    config = SuffixConfig(corpus=str(tmp_path / "corpus.txt"), tokenizer=str(tmp_path), factor=9)
    assert propose(drafter(config), [0, 1], depth=2) == (2, 0)
    with pytest.raises(ConfigError, match="is text, and no tokenizer is named"):
        load_corpus(attrs.evolve(config, tokenizer=None), PrepareEnv(target=TARGET))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, "cannot read the corpus"),
        ("ids.json", "[1, 2", "cannot read the corpus"),
        ("ids.json", '{"a": 1}', "a list of token ids"),
        ("ids.json", "[1, true]", "a list of token ids"),
        ("ids.json", "[1, 4]", "token id 4, outside 0 to 3"),
        ("ids.json", "[-1]", "token id -1, outside"),
        ("ids.npy", "not an array", "cannot read the corpus"),
    ],
)
def test_an_unusable_corpus_is_an_error_with_its_reason(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_corpus(SuffixConfig(corpus=str(tmp_path / name)), PrepareEnv(target=TARGET))


# --- configuration and registration -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 0}, "min_match"),
        ({"min_match": 5, "max_match": 4}, "above max_match"),
        ({"factor": 0.0}, "factor"),
        ({"min_share": 1.5}, "min_share"),
        ({"max_draft": True}, "max_draft"),
        ({"tokenizer": "x"}, "no corpus is named"),
        ({"max_length": 3}, "max_length"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        structure_options(options, SuffixConfig, "drafter")


def test_it_registers_through_the_hook():
    import specdec_suffix

    registry = Registry(["specdec.drafters.none", specdec_suffix], entry_points=())
    assert registry.failures == []
    assert registry.drafter("suffix").config is SuffixConfig

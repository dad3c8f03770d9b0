"""The file of a draft vocabulary: what is written is read, and what is another model's or damaged is refused."""

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters.draft_vocabulary import DraftVocabulary, tokenizer_hash
from specdec.errors import ConfigError
from specdec.text import Tokenizer
from tests.selection import examples

vocabularies = st.integers(1, 60).flatmap(
    lambda size: st.builds(
        DraftVocabulary,
        tokens=st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(tuple),
        vocab_size=st.just(size),
        tokenizer=st.text(max_size=5),
        model=st.text(max_size=5),
        made=st.dictionaries(st.text(max_size=4), st.one_of(st.integers(), st.text(max_size=4)), max_size=3),
        coverage=st.dictionaries(st.integers(1, 99), st.floats(0, 1), max_size=3),
    )
)


@examples(30)
@given(made=vocabularies)
def test_what_is_written_is_read(made, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "vocabulary.json"
    made.write(file)
    assert DraftVocabulary.read(file) == made


GOOD = {"format": "specdec draft vocabulary", "version": 1, "vocab_size": 9, "tokens": [3, 1]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "different kind of file"),
        ({"version": 2}, "version 2, this specdec reads version 1"),
        ({"vocab_size": True}, "the vocab_size True"),
        ({"vocab_size": 0}, "the vocab_size 0"),
        ({"tokens": []}, "no list of tokens"),
        ({"tokens": "12"}, "no list of tokens"),
        ({"tokens": [1, 9]}, "the token 9, outside 0 to 8"),
        ({"tokens": [1.0]}, "the token 1.0"),
        ({"tokens": [1, 2, 1]}, "a token twice"),
        ({"made": "x"}, "no tables under 'made' and 'coverage'"),
        ({"coverage": [1]}, "no tables under 'made' and 'coverage'"),
        ({"coverage": {"1": [2]}}, "no tables under 'made' and 'coverage'"),
    ],
)
def test_damaged_files_are_refused(change, said, tmp_path):
    file = tmp_path / "v.json"
    file.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ConfigError, match=said) as caught:
        DraftVocabulary.read(file)
    assert caught.value.facts["file"] == str(file)
    assert "specdec vocab" in caught.value.facts["try"]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"7"])
def test_other_files_are_refused(content, tmp_path):
    file = tmp_path / "v.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be read as JSON|different kind"):
        DraftVocabulary.read(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        DraftVocabulary.read(tmp_path)


def test_another_model_or_tokenizer_is_refused(checkpoint, make_target, tmp_path):
    folder = checkpoint("qwen3_5")
    info, tokenizer = make_target("qwen3_5").info, Tokenizer.from_folder(folder)
    made = DraftVocabulary(tokens=(1, 2), vocab_size=info.vocab_size, tokenizer=tokenizer_hash(tokenizer))
    made.check(info, tokenizer, "v.json")
    made.check(info, None, "v.json")
    with pytest.raises(ConfigError, match="its vocab_size is 12, this model's 277"):
        attrs.evolve(made, vocab_size=12).check(info, tokenizer, "v.json")
    core = json.loads(tokenizer.core.to_str())
    pieces = core["model"]["vocab"]
    first, second = list(pieces)[:2]
    pieces[first], pieces[second] = pieces[second], pieces[first]
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text(json.dumps(core))
    with pytest.raises(ConfigError, match="for another tokenizer"):
        made.check(info, Tokenizer.from_folder(other), "v.json")

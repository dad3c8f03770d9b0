"""Text between two tokenizers: what is read depends on the tokens alone, and what is drafted extends them."""

import itertools

from hypothesis import assume, event, example, given
from hypothesis import strategies as st

from specdec.drafters.retokenise import LONGEST_SEGMENT, WINDOW, Transcript, continuation
from specdec.text import common_prefix
from tests.drafters.two_tokenizers import WORDS, byte_level, letters, sentence_piece

TOKENIZERS = {
    "bytes": byte_level(),
    "other bytes": byte_level(("th", "the", "ory", "inn ", "日", "本", " ab"), ("<|end|>", "<|user|>")),
    "pieces": sentence_piece(),
    "letters": letters("a", " ", "b", "ab", "a "),
}
PAIRS = [pair for pair in itertools.product(TOKENIZERS, repeat=2) if "letters" not in pair] + [("letters", "letters")]
READS_ALL = ("bytes", "other bytes")  # their tokens spell any text, and are joined by their bytes

pairs = st.sampled_from(PAIRS)
texts = st.lists(st.sampled_from([*WORDS, " ", "\n", "🙂", "x", "  "]), max_size=12).map("".join)


def ids_of(name):
    """Any token ids: words, special tokens, single bytes, ids of no token."""
    tokenizer = TOKENIZERS[name]
    some = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=20)
    spelt = texts.map(lambda text: tokenizer.encode(text, add_special=False))
    return st.lists(st.one_of(some, spelt), max_size=3).map(lambda parts: [i for part in parts for i in part])


def transcript(pair):
    return Transcript(TOKENIZERS[pair[0]], TOKENIZERS[pair[1]])


# --- reading ----------------------------------------------------------------------------------------------------------


@given(data=st.data(), pair=pairs)
def test_what_is_read_depends_on_the_tokens_and_not_on_their_chunks_and_rewinds(data, pair):
    read, tokens = transcript(pair), []
    for step in range(data.draw(st.integers(1, 5))):
        before, closed = list(read.ids), read.closed
        back = data.draw(st.integers(0, len(tokens))) if step else 0
        if back:
            del tokens[len(tokens) - back :]
            read.restart()
        tokens += data.draw(ids_of(pair[0]))
        kept = read.follow(tokens)
        assert read.ids[:kept] == before[:kept]
        assert kept == common_prefix(before, read.ids)
        if not back:
            assert kept >= closed  # what was closed never changes
        fresh = transcript(pair)
        fresh.follow(tokens)
        assert (read.ids, read.closed, read.text) == (fresh.ids, fresh.closed, fresh.text)


@given(data=st.data(), pair=pairs)
@example(data=None, pair=("bytes", "other bytes"))
def test_the_draft_model_reads_the_text_of_the_tokens(data, pair):
    assume(pair[1] in READS_ALL)
    target, draft = (TOKENIZERS[name] for name in pair)
    tokens = target.encode("in the日本") if data is None else data.draw(ids_of(pair[0]))
    tokens = [i for i in tokens if i not in target.special_ids]
    read = transcript(pair)
    read.follow(tokens)
    assert draft.decode(read.ids) == read.text
    whole = target.decode(tokens)
    assert whole.startswith(read.text)
    assert len(whole) - len(read.text) <= 4 or pair[0] == "pieces"  # of a character, three bytes can be there
    event("held back" if whole != read.text else "complete")


@given(text=texts.filter(lambda text: len(text) < LONGEST_SEGMENT), pair=pairs)
def test_the_segments_are_those_of_the_tokenizer_itself(text, pair):
    """Nothing is lost by tokenising a text piece by piece: the tokens are those of the whole text."""
    assume("letters" not in pair)
    target, draft = (TOKENIZERS[name] for name in pair)
    assume(pair[0] != "pieces" or text == text.strip(" "))  # its decoder strips a space
    read = transcript(pair)
    read.follow(target.encode(text, add_special=False))
    assume(read.text == text)
    assert read.ids == draft.encode(text)


# --- drafting ---------------------------------------------------------------------------------------------------------


@given(data=st.data(), pair=pairs, text=texts)
def test_a_continuation_extends_the_tokens_by_the_text_and_nothing_else(data, pair, text):
    target = TOKENIZERS[pair[0]]
    context = data.draw(ids_of(pair[0]))
    vocab_size = data.draw(st.integers(target.vocab_size // 2, target.vocab_size + 2))
    read = transcript(pair)
    read.follow(context)
    found = continuation(target, context, read.text, text, vocab_size)
    if found is None:
        event("dropped")
        return
    assert all(i < vocab_size and i not in target.special_ids for i in found)
    whole = target.encode(text, add_special=False)
    if pair[0] in READS_ALL:
        spelt, before = target.decode([*context, *found]), target.decode(context)
        assert spelt.startswith(before)
        assert text.startswith(spelt[len(before) :].rstrip("\ufffd"))  # a cut can go through a character
        if all(i < vocab_size for i in whole):
            event("whole")


@given(words=st.lists(st.text("theinab", min_size=1, max_size=WINDOW - 1), min_size=2, max_size=6), data=st.data())
def test_text_that_the_target_would_have_written_itself_gives_its_own_tokens(words, data):
    """A text cut between two of its tokens: the tokens behind the cut come back."""
    name = data.draw(st.sampled_from(["bytes", "other bytes", "pieces"]))
    target = TOKENIZERS[name]
    tokens = target.encode(" ".join(words), add_special=False)
    cut = data.draw(st.integers(1, len(tokens) - 1))
    assume(target.piece(tokens[cut - 1]) != "▁")  # has no text without what follows it
    read = transcript((name, "bytes"))
    read.follow(tokens[:cut])
    rest = target.decode(tokens)[len(target.decode(tokens[:cut])) :]
    assert continuation(target, tokens[:cut], read.text, rest, target.vocab_size) == tokens[cut:]


@given(data=st.data(), pair=pairs)
def test_the_text_of_drafted_tokens_is_what_they_add(data, pair):
    target, draft = (TOKENIZERS[name] for name in pair)
    read = transcript(pair)
    read.follow(target.encode(data.draw(texts), add_special=False))
    drafted = [i for i in data.draw(ids_of(pair[1])) if i not in draft.special_ids]
    spelt = read.spelt(drafted)
    assert not spelt.endswith("\ufffd")
    if pair[1] in READS_ALL:
        before = draft.decode(read.ids)
        assert draft.decode([*read.ids, *drafted]).rstrip("\ufffd") == (before + spelt).rstrip("\ufffd")

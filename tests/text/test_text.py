"""Text: what is streamed is what decoding at once gives, whatever the tokens and the pieces."""

import json
import math

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from specdec.checkpoints import Checkpoint
from specdec.errors import CheckpointError, PromptError
from specdec.text import IncrementalDecoder, StopMatcher, Tokenizer, rendering
from specdec.text.chat_template import SOURCE_LIMIT
from specdec.text.tokenizer import MOST_GROWTH, check_named_tokens, check_parts, limited
from tests.drafters import two_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the thin thing that they think",
    "naïve café, über 10 €",
    "日本語のテキスト",
    "😀 👩‍👩‍👧 🏳️‍🌈",
    "def f(x):\n    return x",
]


def byte_level():
    """Byte-level BPE whose merges end inside characters, with added tokens that are not spelt in the byte alphabet."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens([AddedToken("a b", normalized=False), AddedToken("→🙂")])
    return core


def latin_token():
    """An added token whose letters are taken for the byte alphabet: the library decodes "é" as the lone byte E9."""
    core = byte_level()
    core.add_tokens([AddedToken("é", normalized=False)])
    return core


def byte_fallback():
    """The SentencePiece kind (Llama 2, Gemma)."""
    return two_tokenizers.sentence_piece((" abc", "bc", "d", "é", "€", "�"), ["<s>", *SPECIAL]).core


def word_piece():
    """Words and ## continuations."""
    pieces = ["[UNK]", "a", "b", "##a", "##b", ".", "'", "do", "n't", "é"]
    core = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    core.add_special_tokens(SPECIAL)
    return core


def metaspace():
    """Unigram pieces with ▁ for spaces, no bytes."""
    core = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *((c, -1.0) for c in "▁ab�€"), ("▁a", -1.0)], 0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.add_special_tokens(SPECIAL)
    return core


def bytes_and_strip():
    """Byte-level with another decoder behind it, which the exact path does not cover."""
    core = byte_level()
    core.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return core


def plain():
    """No decoder at all: pieces are joined with spaces."""
    return tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))


MAKERS = (byte_level, latin_token, byte_fallback, word_piece, metaspace, bytes_and_strip, plain)
KINDS = {make.__name__: Tokenizer(make()) for make in MAKERS}


def pushed(tokenizer, ids, cuts, skip_special=True):
    """What a decoder returns for ``ids`` in chunks of the sizes ``cuts``, then one by one; the flush is the last."""
    decoder = IncrementalDecoder(tokenizer, skip_special=skip_special)
    pieces, at = [], 0
    for size in [*cuts, *([1] * len(ids))]:
        pieces.append(decoder.push(ids[at : at + size]))
        at += size
    return [*pieces, decoder.flush()]


CUTS = st.lists(st.integers(0, 9), max_size=12)


# --- the incremental decoder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), cuts=CUTS, special=st.booleans())
def test_streamed_tokens_are_decoded_tokens(kind, data, cuts, special):
    """Any ids at all: invalid UTF-8, special tokens inside a character, ids without a piece."""
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert "".join(pushed(tokenizer, ids, cuts, special)) == tokenizer.decode(ids, special)


@given(st.binary(max_size=24), CUTS)
@example(b"\xf0\x9f\x98", [])
@example(b"\xed\xa0\x80\xe2\x82", [1, 1])
@example(b"\xc3\xff\xf4\x90\x80\x80\xe2\x82\xac", [2])
def test_streamed_bytes_are_decoded_bytes(content, cuts):
    """Byte by byte, so that Python's and Rust's ideas of one invalid part are compared everywhere."""
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = KINDS[kind]
        ids = byte_ids(tokenizer, content)
        assert "".join(pushed(tokenizer, ids, cuts)) == tokenizer.decode(ids)


def byte_ids(tokenizer, content):
    vocabulary = {tokenizer.piece(i): i for i in range(tokenizer.vocab_size)}
    if not tokenizer.decodes_bytes:
        return [vocabulary[f"<0x{byte:02X}>"] for byte in content]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2's alphabet: these are themselves
    others = [byte for byte in range(256) if byte not in printable]
    piece_of = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [vocabulary[piece_of[byte]] for byte in content]


class CountingTokenizer(Tokenizer):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, ids, skip_special=True):
        ids = list(ids)
        self.decoded += len(ids)
        return super().decode(ids, skip_special)

    def piece(self, token):
        self.decoded += 1
        return super().piece(token)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("count", [100, 1000])
def test_the_work_of_a_push_does_not_grow(make, count):
    """Also in a stream of one token again and again, which may be an invalid byte that never ends."""
    for token in (5, 130, 231):
        tokenizer = CountingTokenizer(make())
        decoder = IncrementalDecoder(tokenizer)
        for _ in range(count):
            decoder.push([token % tokenizer.vocab_size])
        decoder.flush()
        assert tokenizer.decoded <= 20 * count


# --- the tokenizer -------------------------------------------------------------------------------------------------


def folder_with(path, core=None, **files):
    """A folder with tokenizer.json and JSON files (``name`` for ``name.json``)."""
    path.mkdir(parents=True, exist_ok=True)
    (core or byte_level()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_tokenizer_from_a_folder(tmp_path):
    core = byte_level()
    core.enable_truncation(4)  # as left behind by training scripts
    core.enable_padding(length=64)
    core.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", pair="$A $B", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, core))
    text = "the thin thing that they think\n" * 3
    assert len(tokenizer.encode("the")) < 64  # not padded
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text
    assert tokenizer.encode(text) == [0, *tokenizer.encode(text, add_special=False)]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == core.get_vocab_size(with_added_tokens=True)
    assert not tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("files", "eos", "bos"),
    [
        ({}, set(), None),
        ({"generation_config": {"eos_token_id": [2, 0]}}, {0, 2}, None),
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": 1}}, {0}, None),
        ({"config": {"text_config": {"eos_token_id": 1, "bos_token_id": 0}}}, {1}, 0),
        ({"config": {"eos_token_id": 0}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, {0, 2}, None),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|endoftext|>"}}, {2}, 0),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}, "tokenizer_config": {}}, {2}, None),
        ({"tokenizer_config": {"eos_token": "<no such token>", "bos_token": None}}, set(), None),
    ],
)
def test_where_end_and_beginning_are_declared(tmp_path, files, eos, bos):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, **files))
    assert tokenizer.eos_ids == eos
    assert tokenizer.bos_id == bos


@pytest.mark.parametrize(
    ("file", "key", "value", "told"),
    [
        ("generation_config", "eos_token_id", "<|im_end|>", "takes"),
        ("generation_config", "eos_token_id", 10**12, "names"),
        ("config", "eos_token_id", [1, 400], "names"),
        ("config", "bos_token_id", 400, "names"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(tmp_path, file, key, value, told):
    with pytest.raises(CheckpointError, match=rf"^{file}\.json: '{key}' {told}"):
        check_named_tokens(
            Checkpoint(tmp_path, **{"config": {}, "generation_config": {}, file: {key: value}}, tensors={}), 400
        )


@pytest.mark.parametrize("other", ["tokenizer.model", "vocab.json", "qwen.tiktoken"])
def test_a_folder_without_tokenizer_json_names_what_is_there(tmp_path, other):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / other).write_text("x")
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert other in caught.value.facts["found"]
    assert "AutoTokenizer" in caught.value.facts["try"]


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe"])
def test_a_broken_tokenizer_json_names_its_file(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_a_lone_surrogate_is_an_error_of_the_prompt():
    with pytest.raises(PromptError, match="surrogate at character 2"):
        KINDS["byte_level"].encode("ab\ud800")


# --- chat templates ------------------------------------------------------------------------------------------------

CHATML = (
    "{%- for m in messages %}\n    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
)
HELLO = [{"role": "user", "content": "Hi <there> & “you”"}]
RENDERED = "<|im_start|>user\nHi <there> & “you”<|im_end|>\n"


def with_template(path, template, **files):
    config = {"chat_template": template, "eos_token": "<|im_end|>", "bos_token": {"content": "<|endoftext|>"}}
    return Tokenizer.from_folder(folder_with(path, tokenizer_config=config, **files))


def test_a_chat_template_is_rendered(tmp_path):
    tokenizer = with_template(tmp_path, CHATML)
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=False) == RENDERED
    assert tokenizer.apply_chat_template(HELLO) == RENDERED + "<|im_start|>assistant\n"


def test_a_template_file_wins_and_named_templates_are_chosen(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    tokenizer = with_template(tmp_path / "named", named)
    assert tokenizer.apply_chat_template(HELLO) == "plain"
    assert tokenizer.apply_chat_template(HELLO, tools=[{"name": "f"}]) == "1 tools"
    folder = folder_with(
        tmp_path / "files", tokenizer_config={"chat_template": "old"}, chat_template={"chat_template": "json"}
    )
    assert Tokenizer.from_folder(folder).apply_chat_template(HELLO) == "json"
    (folder / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    assert Tokenizer.from_folder(folder).apply_chat_template(HELLO) == "jinja é"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi <there> & “you”"}'),
        ("{{ {'b': 1, 'a': [1]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  1\n ]\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ bos_token }}{{ eos_token }}", "<|endoftext|><|im_end|>"),
        ("a\n  {% if true %}\nb\n  {% endif %}\n", "a\nb\n"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{{ enable_thinking is defined }} {{ tools is none }}", "False True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{%- set ns = namespace(n=0) -%}{% set ns.n = 5 %}{{ ns.n }}", "5"),
    ],
)
def test_what_templates_of_the_hub_rely_on(tmp_path, template, text):
    assert with_template(tmp_path, template).apply_chat_template(HELLO) == text


DOUBLED = "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = ? %}{% endfor %}{{ n.s | length }}"


@pytest.mark.parametrize(
    ("template", "fact"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("ok\n{{ 'a' + messages[0].missing.x }}", "line: 2"),
        ("ok\n{% if %}", "line: 2"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        ("{% include 'x' %}", "loader"),
        ("{{ 2**31 * messages }}", "characters"),
        ("{{ 9 ** 999999999 }}", "characters"),
        ("{{ 'a' * 10**7 }}{{ 'a' * 10**7 }}", "characters"),
        (DOUBLED.replace("?", "n.s ~ n.s"), "characters"),
        ("{% set n = namespace(a=[1]) %}{% for i in range(9999) %}{% set n.a = [n.a] %}{% endfor %}{{ n.a }}", "Error"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_a_failing_template_names_its_file(tmp_path, template, fact):
    with pytest.raises(PromptError, match="the chat template failed") as caught:
        with_template(tmp_path, template).apply_chat_template(HELLO)
    assert fact in str(caught.value)
    assert caught.value.facts["file"] == str(tmp_path / "tokenizer_config.json")


@pytest.mark.parametrize(
    "body",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        DOUBLED.replace("?", "[n.s, n.s]").replace("length", "tojson"),
    ],
)
def test_a_template_that_takes_too_long_is_ended(tmp_path, monkeypatch, body):
    monkeypatch.setattr(rendering, "SECONDS", 0.05)
    with pytest.raises(PromptError, match=r"it takes more than 0.05 seconds"):
        with_template(tmp_path, body).apply_chat_template(HELLO)


def test_no_template_no_chat(tmp_path):
    with pytest.raises(PromptError, match="no chat template"):
        Tokenizer.from_folder(folder_with(tmp_path / "a")).apply_chat_template(HELLO)
    with pytest.raises(PromptError, match="only rag"):
        with_template(tmp_path / "b", [{"name": "rag", "template": ""}]).apply_chat_template(HELLO)
    with pytest.raises(CheckpointError, match="a chat template is text"):
        with_template(tmp_path / "c", [{"name": "rag"}])
    messages = [{"content": "Hi"}]
    with pytest.raises(PromptError, match="'role'"):
        with_template(tmp_path / "d", CHATML).apply_chat_template(messages)


# --- stop strings --------------------------------------------------------------------------------------------------


def naive(text, stops):
    """Character by character: the longest stop string that the text so far ends with."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


PIECES = st.lists(st.text("ab\n", max_size=5), max_size=12)


@given(PIECES, st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4))
def test_a_match_does_not_depend_on_the_pieces(pieces, stops):
    matcher, emitted, matched = StopMatcher(stops), "", None
    for piece in pieces:
        text, matched = matcher.push(piece)
        emitted += text
        expected, stop = naive("".join(pieces), stops)
        assert expected.startswith(emitted)  # nothing of a match is ever let out
        if matched is not None:
            assert matched == stop
    emitted += "" if matched is not None else matcher.flush()
    assert (emitted, matched) == naive("".join(pieces), stops)


# --- a stranger's tokenizer and template ----------------------------------------------------------------------------


def with_part(path, **part):
    """A folder whose tokenizer.json has other parts."""
    folder = folder_with(path)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | part), encoding="utf-8")
    return folder


def splitting(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@given(
    part=st.sampled_from(["normalizer", "decoder"]),
    steps=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 60)), min_size=1, max_size=12),
)
def test_a_tokenizer_that_multiplies_a_text_is_refused(part, steps):
    """Exactly if the bound of what its replacements make of one character is above the limit."""
    replacements = [
        {"type": "Replace", "pattern": {"String": "x" * replaced}, "content": "x" * content}
        for replaced, content in steps
    ]
    document = {part: {"type": "Sequence", f"{part}s": replacements}}
    growth = math.prod(max(1.0, content / replaced) for replaced, content in steps)
    if growth > MOST_GROWTH:
        with pytest.raises(ValueError, match=part):
            check_parts(document)
        return
    check_parts(document)
    if part == "normalizer":
        made = normalizers.Sequence([normalizers.Replace("x" * r, "x" * c) for r, c in steps])
        assert len(made.normalize_str("x" * 64)) <= growth * 64


def test_a_panic_of_the_library_is_an_error(tmp_path):
    """It is no ``Exception``: without the guard it ends the program past every handler."""
    tokenizer = Tokenizer.from_folder(with_part(tmp_path / "encoding", pre_tokenizer=splitting("^(a+)+$")))
    assert tokenizer.encode("the end") != []
    with pytest.raises(PromptError, match="panicked"):
        tokenizer.encode("a" * 50 + "!")


@pytest.mark.parametrize("charsmap", ["", "AAAA", "/////w==", "AQAAAA==", "CAAAAAAAAAA=", "!"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_character_map_that_says_it_is_longer_is_refused(tmp_path, charsmap, wrapped):
    """The library panics, or reserves as much as it says."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    folder = with_part(tmp_path, normalizer={"normalizers": [normalizer]} if wrapped else normalizer)
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read"):
        Tokenizer.from_folder(folder)


def test_a_pattern_that_takes_forever_is_left_alone(tmp_path):
    """Between two matches nothing interrupts the library; the call ends all the same."""
    tokenizer = Tokenizer.from_folder(with_part(tmp_path, pre_tokenizer=splitting("(?:a+a+a+a+)[^a]zz")))
    text = ("a" * 60 + "!zy") * 100
    with pytest.raises(ValueError, match="takes more than"):
        limited(lambda: tokenizer.core.encode_batch([text]), seconds=0.2)


def test_a_template_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=f"at most {SOURCE_LIMIT:,} characters"):
        with_template(tmp_path, "x" * (SOURCE_LIMIT + 1))

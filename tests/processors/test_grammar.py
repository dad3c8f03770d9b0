"""Every output under a grammar is one of its sentences. That no draft can change which is in clauses L2, L5 and V12."""

import json
import re

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

from specdec.contract import Context, Sampling
from specdec.errors import ConfigError, UnsupportedError
from specdec.processors import grammar
from specdec.processors.grammar import GrammarConfig, GrammarProcessor
from specdec.testing.engine_run import plain_decoding
from specdec.testing.table_model import TableModel
from specdec.verifiers.strict import StrictVerifier
from tests.processors import words

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance", reason="the extra is not installed: pip install 'specdec-framework[grammar]'")

ENDS = frozenset(words.end_tokens())
V = words.vocab_size()
PROMPT = words.tokenizer().encode("ab12")  # would itself be illegal under most grammars: only the output counts
LONGEST = 80  # tokens of an output; the grammars below end long before, JSON strings may not

# --- grammars, each with a check that knows nothing of llguidance ----------------------------------------------------

_ATOMS = st.sampled_from(["a", "b", "t", "true", "12", "[ab]", "[^t]", "é"])


def _joined(inner):
    bounds = st.sampled_from(["?", "{2}", "{0,2}", "{1,3}"])
    return st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, bounds).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


REGEXES = st.recursive(_ATOMS, _joined, max_leaves=6)

SCHEMAS = [
    {"enum": ["abc", "ab", 12, None, True]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "null"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"ab": {"type": "string", "maxLength": 4}},
        "required": ["ab"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 120}, "maxItems": 2},
]


BALANCED = 'start: "(" start ")" | "[" start "]" | "ab"'


def balanced(text):
    """Whether ``text`` is a sentence of BALANCED."""
    while text != "ab":
        if len(text) < 2 or (text[0], text[-1]) not in {("(", ")"), ("[", "]")}:
            return False
        text = text[1:-1]
    return True


# --- generation ------------------------------------------------------------------------------------------------------


def generate(target, config, *, temperature=0.0, seed=0, least=0):
    """The output under a grammar: its tokens, the end token included where it ended."""
    processor = fresh(config)
    sampling = Sampling(
        temperature=temperature, seed=seed, processors=(processor,), min_new_tokens=least, end_tokens=tuple(ENDS)
    )
    output = plain_decoding(target, StrictVerifier(), PROMPT, LONGEST, sampling)
    return output[: next((at for at, token in enumerate(output, 1) if token in ENDS), LONGEST)]


def text_of(output):
    """The text without its end token."""
    return words.tokenizer().decode([token for token in output if token not in ENDS])


MODELS = st.integers(0, 20).map(lambda seed: TableModel.random(V, order=1, seed=seed, peak=0.3, tilt=2.0))
LAWS = {"temperature": st.sampled_from([0.0, 1.0, 3.0]), "seed": st.integers(0, 99)}


@given(REGEXES, MODELS, st.fixed_dictionaries(LAWS))
@example("[^a-y]{1,3}z", TableModel.random(V, order=1, seed=1), {"temperature": 1.0, "seed": 3})
def test_output_under_a_regular_expression_matches_it(regex, target, law):
    output = generate(target, GrammarConfig(regex=regex), **law)
    assert output[-1] in ENDS
    assert re.fullmatch(regex, text_of(output))


@given(st.sampled_from(SCHEMAS), st.booleans(), MODELS, st.fixed_dictionaries(LAWS))
def test_output_under_a_schema_is_json_of_that_schema(schema, whitespace, target, law):
    output = generate(target, GrammarConfig(json_schema=schema, whitespace=whitespace), **law)
    if output[-1] in ENDS:
        text = text_of(output)
        jsonschema.validate(json.loads(text), schema)
        if not whitespace and "maxLength" not in str(schema):
            assert text == json.dumps(json.loads(text), separators=(",", ":"))
    else:
        assert whitespace  # JSON may hold any amount of it, which is why it can be switched off


@given(MODELS, st.fixed_dictionaries(LAWS))
def test_output_under_a_context_free_grammar_is_a_sentence_of_it(target, law):
    output = generate(target, GrammarConfig(lark=BALANCED), **law)
    assert balanced(text_of(output)) or output[-1] not in ENDS


# --- the processor by itself -----------------------------------------------------------------------------------------


def allowed(processor, history):
    """The tokens that may follow."""
    masked = processor.process(np.zeros(V, np.float32), [*PROMPT, *history])
    assert masked.dtype == np.float32
    assert set(np.unique(masked)) <= {0.0, -np.inf}
    return set(np.flatnonzero(masked == 0).tolist())


def fresh(config):
    return GrammarProcessor(config, words.env(len(PROMPT)))


@given(st.integers(0, 6), MODELS, st.fixed_dictionaries(LAWS))
def test_a_complete_grammar_ends_the_text_before_min_new_tokens_if_it_allows_nothing_else(least, target, law):
    for regex in ("abc?", "a{1,9}"):
        plain = generate(target, GrammarConfig(regex=regex), least=least, **law)
        text = text_of(plain)
        assert re.fullmatch(regex, text)
        assert len(plain) > least or text in ("abc", "a" * 9), (plain, text)


def test_a_padding_token_of_the_model_is_never_allowed():
    processor = fresh(GrammarConfig(regex="(?s:.*)"))
    padding = set(range(words.tokenizer().vocab_size, V))
    assert not allowed(processor, []) & padding
    assert processor.legal(sorted(padding), Context(PROMPT)) == 0
    assert allowed(processor, sorted(padding)) == ENDS


# --- what cannot be used ---------------------------------------------------------------------------------------------


CHAIN = {"$ref": "#/$defs/0", "$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)} | {"3000": {}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GrammarConfig(regex="a(b"), "the regex cannot be used as a grammar: .*unclosed group"),
        (GrammarConfig(lark="start: nothere"), "the lark cannot be used as a grammar: .*nothere"),
        (GrammarConfig(json_schema='{"type": "foo"}'), "the json_schema cannot be used as a grammar: .*foo"),
        (GrammarConfig(json_schema='{"not": {}}'), "the json_schema cannot be used as a grammar: .*not"),
        (GrammarConfig(json_schema='{"type": '), "the json_schema cannot be used as a grammar: not JSON"),
        (GrammarConfig(json_schema="missing.json"), "the json_schema file 'missing.json'(.|\n)*try: +a UTF-8"),
        (GrammarConfig(lark="missing.lark"), "cannot read the lark file 'missing.lark'"),
        (GrammarConfig(json_schema={"type": "integer", "minimum": 10**30}), "cannot be used as a grammar: .*10000"),
        # these end the process that compiles them
        (GrammarConfig(json_schema=CHAIN), "the json_schema .* too large or too deep"),
        (
            GrammarConfig(lark="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"'),
            "too deep",
        ),
    ],
)
def test_an_unusable_grammar_is_an_error_with_its_reason(config, message):
    with pytest.raises(ConfigError, match=message):
        fresh(config)


def test_a_long_grammar_that_compiles_is_tried_out_and_used_and_not_kept(monkeypatch):
    monkeypatch.setattr(grammar, "SHORT", 1)
    monkeypatch.setattr(grammar, "KEPT_LENGTH", 1)
    monkeypatch.setattr(grammar, "_vocabularies", type(grammar._vocabularies)())
    assert allowed(fresh(GrammarConfig(json_schema={"enum": ["ab", "cab"]})), words.tokenizer().encode('"ab"')) == ENDS
    assert grammar._vocabulary(words.env())._matchers == {}


def test_a_grammar_that_takes_too_long_for_its_masks_is_refused(monkeypatch):
    monkeypatch.setattr(grammar, "CALL_SECONDS", 0.0)
    monkeypatch.setattr(grammar, "CALL_SECONDS_EACH", 0.0)
    processor = fresh(GrammarConfig(json_schema={"const": "x" * 30_000}))
    with pytest.raises(UnsupportedError, match=r"the grammar takes too long: [0-9.]+ seconds for 0 tokens"):
        processor.process(np.zeros(words.vocab_size(), np.float32), [])


def test_a_schema_and_a_grammar_may_be_files(tmp_path):
    (tmp_path / "schema.json").write_text('{"enum": ["ab"]}')
    (tmp_path / "balanced.lark").write_text(BALANCED)
    encode = words.tokenizer().encode
    assert allowed(fresh(GrammarConfig(json_schema=str(tmp_path / "schema.json"))), encode('"ab"')) == ENDS
    assert allowed(fresh(GrammarConfig(lark=str(tmp_path / "balanced.lark"))), encode("(ab)")) == ENDS


def test_a_tokenizer_without_an_end_cannot_end_a_grammar():
    import attrs

    with pytest.raises(ConfigError, match="needs an end token"):
        GrammarProcessor(GrammarConfig(regex="a"), attrs.evolve(words.env(), end_tokens=()))


def test_a_grammar_that_no_token_can_spell_says_so():
    import attrs
    import tokenizers

    from specdec.text import Tokenizer

    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "<e>": 1}, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<e>"])
    env = attrs.evolve(words.env(), tokenizer=Tokenizer(core), vocab_size=2, end_tokens=(1,))
    processor = GrammarProcessor(GrammarConfig(regex="ab"), env)
    assert processor.process(np.zeros(2, np.float32), []).tolist() == [0.0, -np.inf]
    with pytest.raises(UnsupportedError, match="cannot continue after 1 tokens"):
        processor.process(np.zeros(2, np.float32), [0])

"""One TOML file plus overrides, read strictly: every mistake names its key."""

import enum
import fractions
import pathlib
from typing import Literal

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specdec
from specdec.checking import Mismatch, convert
from specdec.config import (
    Choice,
    GenerationConfig,
    Override,
    RunConfig,
    between,
    load_config,
    one_of,
    structure_options,
)
from specdec.contract import NoConfig
from specdec.errors import ConfigError


@attrs.frozen(kw_only=True)
class Options:
    """A plugin's config with a field of every kind."""

    whole: int = attrs.field(default=3, validator=between(1, 8))
    number: float = attrs.field(default=0.5, validator=between(0.0, 1.0))
    flag: bool = False
    word: str = attrs.field(default="soft", validator=one_of("soft", "hard"))
    words: list[str] = attrs.field(factory=list)
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    table: dict[str, int] = attrs.field(factory=dict)
    maybe: int | None = None
    either: int | str = 1
    mode: Literal["a", "b", 1] = "a"
    where: pathlib.Path = pathlib.Path("x")
    kinds: frozenset[str] = frozenset()


def write(folder, text):
    path = folder / "run.toml"
    path.write_text(text)
    return path


def failure(*overrides, path=None):
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    return str(raised.value)


# --- the file and the overrides --------------------------------------------------------------------------------------


def test_without_a_file_there_are_the_defaults():
    config = load_config()
    assert config == RunConfig()
    assert (config.target.model, config.drafter.name, config.verifier.name) == ("demo", "auto", "strict")
    assert config.depth == Choice("auto")
    assert config.generation == GenerationConfig(max_new_tokens=128, temperature=0.0, seed=None)


def test_the_file_wins_over_the_defaults_and_overrides_over_the_file(tmp_path):
    path = write(
        tmp_path,
        '[target]\nmodel = "a/b"\ndtype = "float32"\n[drafter]\nname = "ngram"\nmax_order = 5\nmin_order = 2\n'
        "[generation]\ntemperature = 1\nstop = ['x']\n",
    )
    config = load_config(path, ["drafter.max_order=6", "generation.stop=['a', 'b']", "target.backend=cpu"])
    assert (config.target.model, config.target.dtype, config.target.backend) == ("a/b", "float32", "cpu")
    assert config.drafter == Choice("ngram", {"max_order": 6, "min_order": 2})
    assert config.generation.stop == ("a", "b")
    assert type(config.generation.temperature) is float
    assert config.depth == Choice("auto")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1),
        ("a.b=1.5", 1.5),
        ("a.b=true", True),
        ("a.b=Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-4B"),
        ('a.b="1"', "1"),
        ("a.b = [1, 2]", [1, 2]),
        ("a.b={x = 1}", {"x": 1}),
        ("a.b=x=y", "x=y"),
        ("a.b=1\nc=2", "1\nc=2"),
    ],
)
def test_an_override_is_toml_or_a_bare_word(text, value):
    override = Override.parse(text)
    assert (override.path, override.value, type(override.value)) == (("a", "b"), value, type(value))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[target", "cannot be read as TOML"),
        (b"\xff\xfe", "is not UTF-8: byte 0xff at offset 0"),
        (None, "there is no file"),
    ],
)
def test_a_file_that_is_no_toml_says_so(tmp_path, content, text):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    assert text in failure(path=path)
    assert "run.toml" in failure(path=path)
    path = write(tmp_path, "\ufeff[generation]\nmax_new_tokens = 7")
    assert load_config(path).generation.max_new_tokens == 7  # with a byte order mark


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("targt.model=x", "key targt is unknown. Did you mean 'target'?"),
        ("generation.temprature=1", "key generation.temprature is unknown. Did you mean 'temperature'?"),
        ("generation.temperature=-1", "key generation.temperature takes 0.0 to 100.0, got -1.0 (float)"),
        ("generation.temperature=nan", "key generation.temperature takes a finite number, got nan"),
        ("generation.max_new_tokens=0", "key generation.max_new_tokens takes 1 to 2147483647, got 0 (int)"),
        ("generation.seed=true", "key generation.seed takes an integer, got True (bool)"),
        ("generation.stop=x", "key generation.stop takes a list, got 'x' (str)"),
        ("generation.stop=['']", "key generation.stop takes text of one character or more"),
        ("generation.stop=['x', 3]", "key generation.stop[1] takes a string, got 3 (int)"),
        ("target.dtype=bfloat61", "'bfloat16'"),
        ("target.revision=1234567", 'quotes around it: "1234567"'),
        ("target.source=x", "key target.source is unknown"),
        ("drafter=3", "key drafter takes a table, got 3 (int)"),
        ("drafter.name=3", "key drafter.name takes the name of a plugin, got 3"),
        ("drafter.max_order=3", "drafter.max_order is an option of a drafter, but none is chosen"),
        ("target=1", "key target takes a table, got 1 (int)"),
    ],
)
def test_an_error_names_the_key_what_was_got_and_where_it_came_from(tmp_path, override, expected):
    text = failure(override)
    assert expected in text
    assert f"-s {override}" in text


def test_a_value_that_a_later_layer_overrides_is_checked_too(tmp_path):
    assert "key target takes a table" in failure("target=1", "target.model=demo")
    path = write(tmp_path, "[generation]\nseed = 'x'\n")
    assert f"{path}" in failure("generation.seed=1", path=path)


# --- plugins' options ------------------------------------------------------------------------------------------------


KINDS = {"whole": int, "flag": bool, "word": str, "words": list, "sizes": list, "pair": list, "table": dict}
KINDS |= {"maybe": int, "where": str, "kinds": list}
VALUES = st.one_of(
    st.integers(-10, 10),
    st.floats(),
    st.booleans(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@given(st.sampled_from(sorted(KINDS)), VALUES)
def test_a_value_of_another_type_is_never_cast(field, value):
    if type(value) is KINDS[field]:
        return
    with pytest.raises(ConfigError) as raised:
        structure_options({field: value}, Options, "drafter", {f"drafter.{field}": "run.toml"})
    assert f"drafter.{field} takes" in raised.value.message
    assert raised.value.facts["asked for by"] == "run.toml"


class Text(str):
    pass


class Word(enum.StrEnum):
    ONE = "one"


@pytest.mark.parametrize(
    ("value", "kind", "plain"),
    [
        (np.int64(3), int, 3),
        (np.float32(0.5), float, 0.5),
        (fractions.Fraction(1, 2), float, 0.5),
        (Text("the"), str, "the"),
        (Word.ONE, str, "one"),
        *((ids, list[int], [1, 2]) for ids in ((1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2]))),
        *((value, bool, None) for value in (1, np.bool_(True), "true")),
        *((value, int, None) for value in (True, 2.0, "7", torch.tensor(3), 10**30 * 1.0)),
        *((value, float, None) for value in (float("nan"), "1")),
        *((value, str, None) for value in (b"the", 3, pathlib.Path("x"))),
        *((value, list[int], None) for value in ("12", [5.5], [True], np.ones((2, 2), int), iter((1, 2)))),
    ],
)
def test_a_callers_value_is_converted_without_loss_or_refused(value, kind, plain):
    if plain is None:
        with pytest.raises(Mismatch):
            convert(value, kind)
    else:
        got = convert(value, kind)
        assert (got, type(got)) == (plain, type(plain))


@given(VALUES)
def test_what_a_number_takes_keeps_its_value(value):
    try:
        made = structure_options({"number": value}, Options).number
    except ConfigError:
        assert type(value) not in (int, float) or not 0 <= value <= 1
    else:
        assert type(value) in (int, float)
        assert made == value


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"wole": 1}, "key drafter.wole is unknown. Did you mean 'whole'? Known keys: whole, number,"),
        ({"whole": 900}, "key drafter.whole takes 1 to 8, got 900"),
        ({"word": "hrd"}, "key drafter.word takes 'soft' or 'hard', got 'hrd'"),
        ({"table": {"k": "v"}}, "key drafter.table.k takes an integer"),
    ],
)
def test_the_error_of_an_option_has_its_path_and_the_nearest_name(options, told):
    with pytest.raises(ConfigError) as raised:
        structure_options(options, Options, "drafter", {"": "run.toml"})
    assert told in raised.value.message
    with pytest.raises(ConfigError, match=r"key verifier\.x is unknown\. There are no options"):
        structure_options({"x": 1}, NoConfig, "verifier")


def test_unreadable_fields_blame_the_author():
    @attrs.frozen
    class Odd:
        thing: Override | complex = 1j

    with pytest.raises(TypeError, match="a field of type complex cannot be read from a file"):
        structure_options({"thing": 1}, Odd)


def test_validators_work_without_a_file():
    with pytest.raises(ConfigError, match=r"Options\.whole takes 1 to 8, got True"):
        Options(whole=True)
    with pytest.raises(ConfigError, match=r"GenerationConfig\.max_new_tokens takes 1 to 2147483647, got 0"):
        GenerationConfig(max_new_tokens=0)
    assert GenerationConfig(stop="END").stop == ("END",)  # not three stop strings


def test_how_tokens_are_chosen_can_be_written_in_the_file(tmp_path):
    path = write(
        tmp_path,
        "[generation]\ntop_p = 0.9\nbanned = [3, 4]\nlogprobs = 2\n[generation.logit_bias]\n17 = -1\n"
        '[[generation.processors]]\nname = "json"\nschema = "s"\n',
    )
    generation = load_config(path).generation
    assert (generation.top_p, generation.banned, generation.logprobs) == (0.9, (3, 4), 2)
    assert generation.logit_bias == {"17": -1.0}
    assert generation.processors == (Choice("json", {"schema": "s"}),)
    assert load_config(path).to_dict()["generation"]["processors"] == [{"name": "json", "schema": "s"}]
    assert "key generation.top_p takes 1e-06 to 1.0, got 0.0" in failure("generation.top_p=0")
    assert "key generation.processors[0].name takes the name of a plugin" in failure("generation.processors=[{a = 1}]")
    assert "key generation.logit_bias.17 takes a number, got 'x'" in failure("generation.logit_bias={17 = 'x'}")
    assert "key generation.banned[0] takes an integer" in failure("generation.banned=['3']")


@pytest.mark.parametrize("given", [{"max_order": 3}, {"name": "auto", "max_order": 3}])
def test_a_program_cannot_give_options_to_no_drafter_either(given):
    with pytest.raises(ConfigError, match="drafter.max_order is an option of a drafter, but none is chosen"):
        specdec.load(drafter=given)
    with pytest.raises(ConfigError, match="^key drafter.min_confidence takes 0.0 to 1.0"):  # not drafters[1] of a chain
        specdec.load(drafter={"model": "demo", "min_confidence": 3})

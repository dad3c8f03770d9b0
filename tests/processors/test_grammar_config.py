"""What holds without the extra: the configuration, the registration, and the error that names what to install."""

import sys

import pytest

from specdec.config import structure_options
from specdec.errors import ConfigError, UnsupportedError
from specdec.processors import grammar
from specdec.processors.grammar import GrammarConfig
from specdec.registry import Kind, Registry
from tests.processors import words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of regex, json_schema and lark, got none"),
        ({"regex": "a", "lark": "start: A"}, "got regex and lark"),
        ({"regex": "a", "whitespace": False}, "whitespace = false is for json_schema"),
        ({"regexp": "a"}, "regexp"),
        ({"regex": 3}, "regex"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        structure_options(options, GrammarConfig, "generation.processors")
    assert "try:" not in caught.value.message  # it is a fact


def test_a_schema_may_be_given_as_data():
    assert GrammarConfig(json_schema={"type": "null"}) == GrammarConfig(json_schema='{"type": "null"}')


def test_it_registers_through_the_hook_and_is_found_by_name():
    registry = Registry(["specdec.processors.grammar"], entry_points=())
    assert registry.failures == []
    spec = registry.processor("grammar")
    assert spec.config is GrammarConfig
    assert [entry.spec for entry in registry.entries(Kind.PROCESSOR)] == [spec]
    with pytest.raises(ConfigError, match="no logits processor is called 'grammer'. Did you mean 'grammar'"):
        registry.processor("grammer", asked_by="generation.processors")


def test_a_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(grammar, "_vocabularies", type(grammar._vocabularies)())
    registry = Registry(["specdec.processors.grammar"], entry_points=())
    spec = registry.processor("grammar")
    with pytest.raises(UnsupportedError) as caught:
        spec.factory(GrammarConfig(regex="a"), words.env())
    assert caught.value.facts["try"] == "pip install 'specdec-framework[grammar]'"

"""The JSON Schema of the configuration, against the loader: an editor marks what a run would refuse, and no more."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.cli.schema import configuration_schema, table_schema
from specdec.config import GenerationConfig, RunConfig, TargetConfig, between
from specdec.config.loading import structure
from specdec.errors import SpecdecError
from specdec.registry import KINDS, Kind, registry
from tests.selection import examples

jsonschema = pytest.importorskip("jsonschema")
GOOD = [
    {},
    {"target": {"model": "Qwen/Qwen3.5-0.8B", "revision": "main", "threads": 2, "backend_options": {"mode": "x"}}},
    {"drafter": {"name": "ngram", "max_order": 3}, "depth": {"name": "fixed", "depth": 4}},
    {"depth": {"depth": 4}},
    {"drafter": {"name": "auto"}, "verifier": {"name": "margin"}, "depth": {"name": "auto"}},
    {"generation": {"stop": "x", "logit_bias": {"5": -2.5}, "temperature": 1, "seed": 2**40, "banned": [1, 2]}},
    {"generation": {"stop": ["x", "y"], "processors": [{"name": "grammar", "regex": "a+"}]}},
]
BAD = [
    {"targets": {}},
    {"target": {"threads": 0}},
    {"target": {"dtype": "float64"}},
    {"target": {"model": 3}},
    {"drafter": {"name": "ngram", "max_ordr": 3}},
    {"drafter": {"name": "ngram", "max_order": "3"}},
    {"verifier": {"name": "strict", "margin": 1}},
    {"depth": {"name": "fixed", "depth": -1}},
    {"generation": {"top_p": 1.5}},
    {"generation": {"max_new_tokens": 2.5}},
    {"generation": {"banned": [-1]}},
    {"generation": {"processors": [{"regex": "a"}]}},
]


@pytest.fixture(scope="module")
def validator():
    made = configuration_schema()
    jsonschema.Draft7Validator.check_schema(made)
    return jsonschema.Draft7Validator(json.loads(json.dumps(made)))


@pytest.mark.parametrize("data", [*GOOD, *BAD], ids=json.dumps)
def test_a_mistake_is_marked_and_what_runs_is_not(validator, data):
    assert validator.is_valid(data) == (data in GOOD)


def test_every_key_and_plugin_is_known(validator):
    tables = validator.schema["properties"]
    assert tables.keys() == {field.name for field in attrs.fields(RunConfig)}
    for table, kind in (("drafter", Kind.DRAFTER), ("verifier", Kind.VERIFIER), ("depth", Kind.DEPTH_POLICY)):
        names = {one["title"] for one in tables[table]["anyOf"]} - {"auto"}
        assert names == {entry.spec.name for entry in registry().entries(kind)}, KINDS[kind]
        for one in tables[table]["anyOf"]:
            assert validator.evolve(schema=one).is_valid({"name": one["title"]}) or one["required"] != ["name"]


scalars = st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats(-2, 200) | st.sampled_from(["auto", "x", ""])
anything = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.sampled_from(["1", "x"]), scalars, max_size=1)


@given(st.sampled_from([TargetConfig, GenerationConfig]), st.data())
@examples(200)
def test_whatever_the_loader_takes_the_schema_takes(kind, data):
    known = sorted(table_schema(kind)["properties"])
    given_table = data.draw(st.dictionaries(st.sampled_from([*known, "other"]), anything, max_size=3))
    given_table = {key: value for key, value in given_table.items() if value is not None}  # TOML has no null
    try:
        structure(given_table, kind, (), lambda key: "")
    except SpecdecError:
        return
    found = [error.message for error in jsonschema.Draft7Validator(table_schema(kind)).iter_errors(given_table)]
    assert found == [] or "processors" in given_table


@attrs.frozen
class Inner:
    size: int


@attrs.frozen
class Options:
    needed: Annotated[int, between(1, 8)]
    mode: Literal["fast", "slow"] = "fast"
    pair: tuple[int, float] = (1, 2.0)
    inner: Inner | None = None
    named: dict[str, float] = attrs.field(factory=dict)


@pytest.mark.parametrize(
    "options",
    [
        {"needed": 3, "mode": "slow", "pair": [1, 2.5], "inner": {"size": 3}, "named": {"a": 1}},
        {"needed": 9},
        {"mode": "fast"},
        {"needed": 1, "mode": "quick"},
        {"needed": 1, "pair": [1]},
        {"needed": 1, "inner": {"sizes": 3}},
        {"needed": 1, "named": {"a": "b"}},
    ],
    ids=json.dumps,
)
def test_a_plugins_class_of_any_shape(options):
    try:
        structure(options, Options, (), lambda key: "")
        taken = True
    except SpecdecError:
        taken = False
    assert jsonschema.Draft7Validator(table_schema(Options)).is_valid(options) == taken

"""Forced drafts: what a grammar leaves no choice about is drafted."""

import json

import pytest

import specdec

SCHEMA = {
    "type": "object",
    "properties": {"measurement": {"type": "integer"}, "certainty": {"enum": ["high", "low"]}},
    "required": ["measurement", "certainty"],
    "additionalProperties": False,
}


def test_a_schema_forces_its_keys():
    """On the embedded model: the same JSON with and without, in fewer passes, greedily and sampled."""
    pytest.importorskip("llguidance")
    grammar = {"name": "grammar", "json_schema": json.dumps(SCHEMA), "whitespace": False}
    plain = specdec.load("demo", drafter="none")
    lm = specdec.load("demo", drafter={"name": "first_of", "drafters": [{"name": "forced"}, {"name": "mtp"}]}, depth=6)
    for settings in ({}, {"temperature": 1.0, "seed": 5}):
        options = {"max_new_tokens": 40, "processors": [grammar], **settings}
        wanted, got = (one.generate("Report: ", **options) for one in (plain, lm))
        assert got.text == wanted.text
        assert got.tokens == wanted.tokens
        forced = got.stats.draft["drafters"]["forced"]
        assert forced["accepted"] > 0
        assert got.stats.cycles < wanted.stats.cycles

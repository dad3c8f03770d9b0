"""How each token came to be, from the records of hand-made cycles."""

import pytest

import specdec
from specdec.contract import CycleRecord
from specdec.decoding.origins import Origins


@pytest.mark.parametrize(
    ("drafted", "accepted", "emitted", "origins"),
    [((), 0, (9,), ["plain"]), ((5,), 1, (5, 6), ["drafted", "bonus"]), ((5, 7), 1, (5, 6), ["drafted", "corrected"])],
)
def test_a_token_is_drafted_corrected_a_bonus_or_plain(drafted, accepted, emitted, origins):
    record = CycleRecord(9, len(drafted), len(drafted), accepted, emitted, 0.0, 0.0, 0.0, drafted)
    made = Origins(specdec.load("demo", drafter="none").tokenizer).add(record)
    assert [token.origin for token in made] == origins
    assert [token.guess for token in made if token.origin == "corrected"] == list(drafted[accepted:])

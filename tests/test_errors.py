"""The errors' own promise: whatever is put into one, its message is short, printable and keeps what helps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import MESSAGE_LIMIT, CheckpointError, SpecdecError, nearest, shown

LONG = st.one_of(st.text(max_size=80), st.text(max_size=40).map(lambda text: text * 200), st.just("x" * 5_000))
LABELS = st.text("abc_", min_size=1, max_size=20)


class Broken:
    """A value of a plugin that cannot be printed."""

    def __repr__(self):
        raise ZeroDivisionError

    __str__ = __repr__


@given(LONG, st.dictionaries(LABELS, LONG, max_size=12), LONG)
def test_a_message_is_bounded_and_can_be_printed(message, facts, hint):
    error = CheckpointError(message, **{**facts, "try_": hint})
    said = f"CheckpointError: {error}"
    assert len(said) <= 2000
    assert said.encode("utf-8")
    assert all(character.isprintable() or character in "\n\t" for character in said)
    assert "try" in error.facts
    assert len(error.message) + sum(map(len, error.facts.values())) <= MESSAGE_LIMIT
    escaped = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in message[:20])
    assert error.message.startswith(escaped)


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=300), st.integers(1, 5))
def test_an_ordinary_message_is_left_as_it_is(message, count):
    error = SpecdecError(message, **{f"fact_{number}": message for number in range(count)})
    assert error.message == message
    assert list(error.facts.values()) == [message] * count


def test_what_was_cut_is_counted():
    error = SpecdecError("a" * 5000, file="model.safetensors", try_="another")
    assert error.facts == {"file": "model.safetensors", "try": "another"}
    kept = len(error.message.partition("...")[0])
    assert kept > 1000
    assert error.message == "a" * kept + f"... ({5000 - kept:,} more characters)"


@pytest.mark.parametrize("value", [Broken(), 10**5000, [10**5000], "x" * 10**6], ids=["broken", "int", "list", "text"])
def test_any_value_can_be_shown(value):
    assert 0 < len(shown(value)) <= 200
    assert len(str(SpecdecError("wrong", got=value))) <= MESSAGE_LIMIT


def test_the_nearest_name_is_found_among_long_and_many_ones():
    """Comparing takes the product of two lengths: a name of a megabyte is not compared."""
    names = ["y" * 10**6, "x" * 10**6, *(f"layers.{i}.weight" for i in range(900)), "lm_head.weight"]
    assert nearest("lm_head.weihgt", names) == "lm_head.weight"
    assert nearest("x" * 10**6, names) is None
    assert nearest("medusa", ["dspark", "eagle3"]) is None
    assert nearest("CPU", ["gpu", "cpu", "CPUs"]) == "cpu"

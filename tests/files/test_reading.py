"""Files of strangers: what is no file, too long, nested too deeply or ambiguous is refused at once."""

import contextlib
import json
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdec
from specdec.errors import ConfigError
from specdec.files.reading import NESTING_LIMIT, DuplicateKeyError, parse_json, parse_toml, read_bytes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    """Opening a pipe waits for a writer, and a device never ends."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**40)
    for path, what in [
        (tmp_path / "pipe", "pipe"),
        (tmp_path / "large", "1,099,511,627,776 bytes"),
        ("/dev/zero", "device"),
        (tmp_path, "folder"),
        ("a\0b", "null"),
    ]:
        with pytest.raises(OSError, match=what):
            read_bytes(path)
        with pytest.raises(ConfigError, match="cannot be read"):
            specdec.load_config(path)


def test_ctrl_c_while_a_file_is_opened_stays_ctrl_c(monkeypatch):
    """At any call of Python's: it once closed the handle of a stream that had it already, and failed with that."""
    for name in ("open", "fstat", "fdopen", "close"):
        original = getattr(os, name)

        def interrupted(*args, original=original):
            result = original(*args)
            signal.raise_signal(signal.SIGINT)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(os, name, interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                read_bytes(__file__)


@pytest.mark.parametrize("limit", [0, 1, 7, 8, 9, 100])
def test_a_file_of_unknown_size_is_read_up_to_the_limit(limit, monkeypatch):
    """Files of the system have a size of 0, and others grow while they are read."""
    content = b"8 bytes!"

    def opened(path):
        reading, writing = os.pipe()
        os.write(writing, content)
        os.close(writing)
        return os.fdopen(reading, "rb")

    monkeypatch.setattr(specdec.files.reading, "open_file", opened)
    if limit < len(content):
        with pytest.raises(OSError, match=f"more than the {limit} bytes"):
            read_bytes("file", limit)
    else:
        assert read_bytes("file", limit) == content


@pytest.mark.parametrize(("parse", "before"), [(parse_json, ""), (parse_toml, "a = ")])
def test_an_integer_of_many_digits_is_the_files_fault(parse, before):
    with pytest.raises(ValueError, match="an integer in it has more than 4,300 digits") as caught:
        parse(before + "9" * 5000)
    assert "sys" not in str(caught.value)


@given(JSON)
def test_any_document_is_what_python_reads(value):
    assert parse_json(json.dumps(value)) == value


@given(st.integers(1, 3 * NESTING_LIMIT), st.booleans())
def test_nesting_is_bounded_exactly(depth, lists):
    opened, closed = ("[", "]") if lists else ('{"a":', "}")
    text = opened * depth + "0" + closed * depth
    if depth < NESTING_LIMIT:
        assert parse_json(text) is not None
    else:
        with pytest.raises(ValueError, match="nested more than"):
            parse_json(text)


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_nesting_beyond_the_parsers_is_an_error_of_the_file(depth):
    for parse, text in [(parse_json, "[" * depth), (parse_toml, "a = " + "[" * depth + "]" * depth)]:
        with pytest.raises(ValueError, match="nested more than"):
            parse(text)


@given(st.dictionaries(st.text(), st.integers(), min_size=1), st.data())
def test_a_repeated_key_is_refused(pairs, data):
    again = data.draw(st.sampled_from(sorted(pairs)))
    members = [f"{json.dumps(key)}: {value}" for key, value in [*pairs.items(), (again, 0)]]
    with pytest.raises(DuplicateKeyError):
        parse_json("[{" + ", ".join(members) + "}]")


@pytest.mark.parametrize("half", [r"\ud800", r"\uDFFF", r"a\uD83Db"])
def test_half_of_a_surrogate_pair_is_refused(half):
    """It is no text: whatever encodes it later fails."""
    for document in (f'["{half}"]', f'{{"{half}": 1}}'):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            parse_json(document)
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            parse_json(document.encode())
    assert parse_json(r'["\uD83D\uDE00"]') == ["😀"]


@pytest.mark.parametrize("number", ["9" * 5_000, "0x" + "f" * 5_000, str(2**63), "0b1" + "0" * 64])
def test_an_integer_of_toml_has_64_bits(number):
    """Python reads a longer hexadecimal one, and then fails to print it."""
    with pytest.raises(ValueError, match=r"64 bits|digits|Invalid"):
        parse_toml(f"a = [{number}]")
    assert parse_toml(f"a = {2**63 - 1}") == {"a": 2**63 - 1}

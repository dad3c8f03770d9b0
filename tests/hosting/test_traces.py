"""Traces: what was written is read again, whatever was cut off; a wrong line is named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import Choice
from specdec.errors import PromptError, UnsupportedError
from specdec.hosting import TraceWriter, read_trace, replay
from tests.selection import examples

TOKENS = st.lists(st.integers(0, 9), max_size=4)


@examples(60)
@given(
    sections=st.lists(
        st.lists(st.tuples(TOKENS, st.lists(st.tuples(st.integers(0, 5), TOKENS, TOKENS))), max_size=3),
        min_size=1,
        max_size=3,
    ),
    lost=st.integers(0, 30),
)
def test_what_was_recorded_is_read_again(tmp_path_factory, sections, lost):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    expected = []
    for requests in sections:
        writer = TraceWriter(path, host="h", drafter=Choice("ngram", {"max_order": 3}), vocab_size=10, model="m")
        for prompt, rounds in requests:
            number = writer.begin(prompt)
            position = len(prompt)
            for depth, drafted, committed in rounds:
                writer.draft(number, position, depth, drafted)
                writer.commit(number, committed)
                position += len(committed)
            expected.append((tuple(prompt), [tuple(map(tuple, one[1:])) for one in rounds]))
        writer.close()
    requests = read_trace(path).requests
    assert [(one.prompt, [(r.drafted, r.committed) for r in one.rounds]) for one in requests] == expected
    data = path.read_bytes()
    if lost < len(data.splitlines()[-1]) and len(data.splitlines()) > 1:
        path.write_bytes(data[: len(data) - lost])  # a process that was ended in the middle of a line
        read_trace(path)


HEADER = {"specdec": "trace", "version": 1, "vocab_size": 10}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "is empty"),
        (["x"], "line 1 of the trace is not JSON"),
        ([[1]], "line 1 of the trace is no JSON object"),
        ([{"a": 1}], "line 1 .* no header of a trace"),
        ([{**HEADER, "version": 9}], "version 9, and this specdec reads 1"),
        ([{**HEADER, "vocab_size": "many"}], "vocab_size is a whole number"),
        ([{**HEADER, "drafter": "ngram"}], "drafter is an object with a name, got 'ngram'"),
        ([{**HEADER, "drafter": {"name": 3}}], "drafter is an object with a name"),
        ([HEADER, {"request": 0, "commit": [1]}], "line 2 .* has not begun"),
        ([HEADER, {"request": 0, "prompt": [10]}], "line 2 .* from 0 to 9"),
        ([HEADER, {"request": 0, "prompt": []}, {"request": 0, "prompt": []}], "line 3 .* begins twice"),
        ([HEADER, {"request": 0, "prompt": [1]}, {"request": 0, "position": 3, "depth": 1, "draft": []}], "position 3"),
        ([HEADER, {"request": 0, "prompt": [1]}, {"request": 0, "rewind": 3}], "rewind to 3 of 1"),
        ([HEADER, {"prompt": [1]}], "line 2 of the trace breaks the format"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path, lines, said):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    with pytest.raises(PromptError, match=said):
        read_trace(path)


def test_a_trace_that_cannot_be_opened_is_refused_and_one_that_breaks_later_ends_the_recording(tmp_path):
    with pytest.raises(UnsupportedError, match="the trace cannot be written: No such file"):
        TraceWriter(tmp_path / "none" / "t", host="h", drafter=Choice("ngram"), vocab_size=10)
    with pytest.raises(PromptError, match="the trace cannot be read"):
        read_trace(tmp_path / "none")
    writer = TraceWriter(tmp_path / "t", host="h", drafter=Choice("ngram"), vocab_size=10)
    writer._file.close()
    assert writer.begin([1]) == 0
    assert "cannot be written" in str(writer.failure)
    writer.commit(0, [1])


@given(cut=st.integers(0, 400))
def test_a_recording_goes_on_after_one_that_was_cut_anywhere(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "t"

    def record(prompt):
        writer = TraceWriter(path, host="h", drafter=Choice("ngram"), vocab_size=10)
        writer.commit(writer.begin(prompt), [7])
        writer.close()

    record([1, 2])
    whole = path.read_bytes()
    header = whole.index(b"\n")
    path.write_bytes(whole[: header + cut % (len(whole) - header + 1)])
    left = path.read_bytes()
    found = read_trace(path)
    cut_line = left.rpartition(b"\n")[2]
    assert found.cut == (left.count(b"\n") + 1 if cut_line and cut_line + b"\n" not in whole else 0)
    record([3, 4])
    *kept, last = read_trace(path).requests
    assert [(one.prompt, one.tokens) for one in kept] == [(one.prompt, one.tokens) for one in found.requests]
    assert (last.prompt, last.tokens) == ((3, 4), (7,))


@pytest.mark.parametrize("text", ["a shopping list\nmilk", '{"specdec": "costs"}\n', '{"specdec":"tra', "[1]\n"])
def test_a_trace_is_not_appended_to_another_file(tmp_path, text):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(UnsupportedError, match="a file of another kind"):
        TraceWriter(path, host="h", drafter=Choice("ngram"), vocab_size=10)
    assert path.read_text() == text


@pytest.mark.parametrize("wrong", [-1, 10, 2**70])
def test_an_id_outside_the_vocabulary_ends_the_recording_of_its_request_only(tmp_path, wrong):
    writer = TraceWriter(tmp_path / "t", host="h", drafter=Choice("ngram"), vocab_size=10)
    never, begun, right = writer.begin([1, wrong]), writer.begin([2]), writer.begin([3])
    for number in (never, begun, right):
        writer.commit(number, [4])
        writer.draft(number, 2, 2, [5, wrong] if number == begun else [5])
        writer.commit(number, [6])
        writer.rewind(number, 1)
    requests = read_trace(tmp_path / "t").requests
    assert [(one.prompt, one.tokens) for one in requests] == [((2,), (4,)), ((3,), (4, 6)), ((3,), ())]


def test_a_replay_finds_a_draft_that_is_not_the_engines(tmp_path):
    writer = TraceWriter(tmp_path / "t", host="h", drafter=Choice("ngram"), vocab_size=10)
    number = writer.begin([1, 2, 3, 1, 2])
    for position, draft, committed in ((5, [3, 1], [3, 1, 2]), (8, [3, 9], [3, 4])):
        writer.draft(number, position, 2, draft)
        writer.commit(number, committed)
    (request,) = read_trace(tmp_path / "t").requests
    ((recorded, drafted),) = replay(request)
    assert (recorded.position, recorded.drafted, drafted) == (8, (3, 9), (3, 1))

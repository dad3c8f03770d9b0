"""Our prompts are what they claim to be, and a user's file is read whole or refused with file and line."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import PromptError
from specdec.measuring.prompts import CHAT_CLASSES, Prompt, load_prompts
from specdec.text import Tokenizer

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(
    st.lists(st.tuples(words, words, st.none() | st.booleans()), min_size=1, max_size=8), st.booleans(), st.booleans()
)
def test_json_lines_come_back_as_they_were_written(tmp_path_factory, rows, empty_lines, messages):
    file = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    lines = [
        json.dumps({"class": kind, "prompt": text} | ({} if chat is None else {"chat": chat}))
        for kind, text, chat in rows
    ]
    file.write_text(("\n\n" if empty_lines else "\n").join(lines), encoding="utf-8")
    wanted = {}
    for kind, text, chat in rows:
        kind = kind.strip()
        wanted.setdefault(kind, []).append(
            Prompt(kind=kind, text=text, chat=messages or kind in CHAT_CLASSES if chat is None else chat)
        )
    assert load_prompts(file, chat=messages) == wanted


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "cannot be used: takes a table, got"),
        ('{"prompt": 5}', "prompt takes a string, got 5"),
        ('{"class": "mail"}', "prompt is required and missing"),
        ('{"class": "mail", "prompt": " "}', "prompt takes text that is not empty"),
        ('{"class": 3, "prompt": "a"}', "class takes a string, got 3"),
        ('{"class": "mail", "prompt": "a", "chat": 1}', "chat takes true or false, got 1"),
        ('{"class": "mail", "promt": "a"}', "promt is unknown. Did you mean 'prompt'"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    file = tmp_path / "mine.jsonl"
    file.write_text(f'{{"class": "mail", "prompt": "Dear all,"}}\n\n{line}\n')
    with pytest.raises(PromptError, match=message) as caught:
        load_prompts(file)
    assert caught.value.facts["file"] == str(file)
    assert caught.value.facts["line"] == "3"


def test_a_prompt_that_cannot_be_encoded_is_named(checkpoint):
    tokenizer = Tokenizer.from_folder(checkpoint("qwen3_5"))
    with pytest.raises(PromptError, match="lone surrogate") as caught:
        Prompt(kind="code", text="\ud800", source="mine.jsonl, line 7").encode(tokenizer)
    assert caught.value.facts["prompt"] == "mine.jsonl, line 7"

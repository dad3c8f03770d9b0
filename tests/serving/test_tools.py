"""Calls and thinking in an answer, whatever pieces it comes in; templates that know tools, and those that do not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.serving.tools import Splitter, render_with_tools
from tests.selection import examples

CALL = '{"name": "f", "arguments": {"a": [1, "<"]}}'
ARGUMENTS = {"a": [1, "<"]}
ANSWERS = [  # text, whether the prompt has opened <think>, thinking, content, calls
    ("Hello <b>there</b>", False, "", "Hello <b>there</b>", 0),
    ("<think>hm\n</think>\n\nyes", False, "hm\n", "yes", 0),
    ("hm</think>yes", True, "hm", "yes", 0),
    ("hm", True, "hm", "", 0),
    (f"<think>hm</think>\n<tool_call>\n{CALL}\n</tool_call>", False, "hm", "", 1),
    (f"Let me see. <tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", False, "", "Let me see. ", 2),
    (f"[TOOL_CALLS][{CALL}, {CALL}]", False, "", "", 2),
    (f"[TOOL_CALLS]f[ARGS]{json.dumps(ARGUMENTS)}", False, "", "", 1),
    (CALL.replace("arguments", "parameters"), False, "", "", 1),
    (CALL.replace('"f"', '"g"'), False, "", CALL.replace('"f"', '"g"'), 0),
    ("<tool_call>{", False, "", "<tool_call>{", 0),
    ("f of x is <tool", False, "", "f of x is <tool", 0),
]


@given(st.sampled_from(ANSWERS), st.lists(st.integers(1, 12)))
@examples(200)
def test_an_answer_is_split_in_the_same_way_in_any_pieces(answer, lengths):
    text, thinking, *expected, count = answer
    splitter = Splitter(names=["f"], thinking=thinking)
    deltas = []
    for length in lengths:
        deltas.append(splitter.push(text[:length]))
        text = text[length:]
    deltas.append(splitter.push(text))
    rest, calls = splitter.finish()
    deltas.append(rest)
    fields = ("reasoning_content", "content")
    assert ["".join(delta.get(field, "") for delta in deltas) for field in fields] == expected
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [ARGUMENTS] * count


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "12"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "what it does"}}]


@pytest.mark.parametrize("knows", [True, False])
def test_a_template_gets_tools_in_its_own_way_or_as_text(knows):
    def render(messages, tools):
        text = json.dumps([[message["role"], message["content"]] for message in messages])
        return text + json.dumps([tools, [message.get("tool_calls") for message in messages]]) if knows else text

    text = render_with_tools(render, MESSAGES, TOOLS)
    assert ("<tool_call>" in text) is not knows
    for piece in ("Be brief.", "what it does", "arguments", "12"):
        assert piece in text

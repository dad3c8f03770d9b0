"""Tools that a model may call: how they get into a prompt, the grammar of a call, and calls read from an answer."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from specdec.errors import PromptError
from specdec.text.incremental import open_end

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], str]
"""A chat template's text for messages and tools."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"  # of Hermes and Qwen
_THINK, _THOUGHT = "<think>", "</think>"
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>")  # of Mistral and Llama; usually special tokens, which no text shows
_COMBINED = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}  # where a schema has parameters besides
_INSTRUCTIONS = (
    "You may call functions. Their signatures, one a line:\n{tools}\n"
    'To call one, answer with {open}{{"name": ..., "arguments": {{...}}}}{close} and nothing else.'
)


def render_with_tools(render: Render, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    """The prompt's text. A template that ignores tools gets them as Hermes writes them, in a system message.

    Raises: PromptError when the template fails.
    """
    text = render(messages, tools)
    bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    if tools or bare != messages:
        with contextlib.suppress(PromptError):  # a template that checks calls knows them
            if render(bare, ()) == text:
                return render(_spelled_out(messages, tools), ())
    return text


def _spelled_out(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The conversation with tools, calls and their results as text."""
    spelled: list[Message] = []
    if tools:
        lines = "\n".join(json.dumps(tool["function"]) for tool in tools)
        instructions = _INSTRUCTIONS.format(tools=lines, open=_OPEN, close=_CLOSE)
        if messages[0]["role"] == "system":
            instructions = f"{messages[0]['content']}\n\n{instructions}"
            messages = messages[1:]
        spelled.append({"role": "system", "content": instructions})
    for message in messages:
        role, content = message["role"], message["content"]
        for call in message.get("tool_calls", ()):
            content += f"{_OPEN}{json.dumps(call['function'])}{_CLOSE}"
        if role == "tool":
            role, content = "user", f"<tool_response>{content}</tool_response>"
        spelled.append({"role": role, "content": content})
    return spelled


def call_grammar(tools: Sequence[Mapping[str, Any]], prompt: str) -> str:
    """A Lark grammar of one call of one of these tools, in the form that the prompt asks for."""
    before, after = (_OPEN + "\n", "\n" + _CLOSE) if _OPEN in prompt else ("", "")
    key = "parameters" if '"parameters": dictionary' in prompt else "arguments"  # Llama's templates
    rules, calls = [], []
    for number, tool in enumerate(tools):
        head = f'{before}{{"name": {json.dumps(tool["function"]["name"])}, "{key}": '
        calls.append(f"{json.dumps(head)} arguments{number} {json.dumps('}' + after)}")
        parameters = tool["function"].get("parameters", {})
        schema = {"type": "object", **parameters, "x-guidance": {"whitespace_flexible": False}}
        if not _COMBINED & parameters.keys():  # else they may be named elsewhere
            schema.setdefault("additionalProperties", False)
        rules.append(f"arguments{number}: %json {json.dumps(schema)}")
    return "\n".join(["start: " + " | ".join(calls), *rules])


def parse_calls(text: str, names: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """The text before the calls, and the calls as OpenAI's API words them; no calls if any of them is malformed."""
    before, *blocks = text.split(_OPEN)
    if blocks:
        calls = [_call(block.partition(_CLOSE)[0], names) for block in blocks]
    else:
        before, body = "", text.strip()
        for mark in _MARKS:
            body = body.removeprefix(mark).strip()
        named = re.match(r"([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*)\Z", body, re.DOTALL)  # Mistral's newer form
        if named:
            body = f'{{"name": {json.dumps(named[1])}, "arguments": {named[2]}}}'
        value = _parsed(body)
        calls = [_call(item, names) for item in (value if isinstance(value, list) else [value])]
    if not calls or None in calls:
        return text, []
    return before.strip(), [call for call in calls if call is not None]


def _call(value: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """One call from JSON, or from its text; None if it is not one of these functions with an object of arguments."""
    value = _parsed(value) if isinstance(value, str) else value
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@attrs.define
class Splitter:
    """Splits an answer's text into thinking, content and calls, whatever pieces it comes in.

    Attributes:
        names: of the tools that may be called; empty for none.
        thinking: whether the text is inside ``<think>``, which a prompt may have opened.
    """

    names: Sequence[str] = ()
    thinking: bool = False
    _begun: bool = False  # <think> can no longer open
    _trimmed: bool = True  # the newlines after </think> are gone
    _shown: bool = False  # there was content
    _text: str = ""  # held back

    def push(self, text: str) -> dict[str, str]:
        """What is certain now: ``reasoning_content`` and ``content``, each only if there is some."""
        self._text += text
        delta: dict[str, str] = {}
        if not self._begun and not self.thinking:
            start = self._text.lstrip()
            if _THINK.startswith(start):
                return delta
            if start.startswith(_THINK):
                self.thinking, self._text = True, start[len(_THINK) :]
        self._begun = True
        if self.thinking:
            place = self._text.find(_THOUGHT)
            self._hand_out(delta, "reasoning_content", self._certain(_THOUGHT))
            if place < 0:
                return delta
            self.thinking, self._trimmed, self._text = False, False, self._text[len(_THOUGHT) :]
        if not self._trimmed:
            self._text = self._text.lstrip("\n")
            self._trimmed = bool(self._text)
        if not self._may_be_a_call():
            self._hand_out(delta, "content", self._certain(_OPEN) if self.names else len(self._text))
        return delta

    def finish(self) -> tuple[dict[str, str], list[dict[str, Any]]]:
        """What was held back, and the calls."""
        field = "reasoning_content" if self.thinking else "content"
        calls: list[dict[str, Any]] = []
        if self.names and not self.thinking:
            self._text, calls = parse_calls(self._text, self.names)
        delta: dict[str, str] = {}
        self._hand_out(delta, field, len(self._text))
        return delta, calls

    def _may_be_a_call(self) -> bool:
        """Whether the content is, from its first character on, a call without ``<tool_call>``, or may become one."""
        if self._shown or not self.names:
            return False
        start = self._text.lstrip()
        return not start or start[0] in "{[<" or any(start.startswith(n) or n.startswith(start) for n in self.names)

    def _certain(self, mark: str) -> int:
        """How many characters come before ``mark``, or before what may become it."""
        place = self._text.find(mark)
        return place if place >= 0 else len(self._text) - open_end(self._text, [mark])

    def _hand_out(self, delta: dict[str, str], field: str, count: int) -> None:
        if count:
            delta[field] = self._text[:count]
            self._shown = self._shown or field == "content"
            self._text = self._text[count:]

"""The bodies of requests: what is unknown, or would change the answer and is not supported, is refused by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import attrs
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from specdec.config import Choice
from specdec.decoding.parts import Parts, make_sampling, override_generation
from specdec.errors import did_you_mean, shown
from specdec.files.reading import parse_json
from specdec.policies.fixed import MAX_DEPTH
from specdec.serving.refusal import Refusal
from specdec.serving.tools import call_grammar, render_with_tools
from specdec.text.chat_template import OWN_VARIABLES

R = TypeVar("R", bound="Body")

_JSON_WORDS = dict.fromkeys(("model_type", "dict_type"), "Input should be an object")  # pydantic's name our classes
Item = TypeVar("Item")
_List = Annotated[list[Item], Field(fail_fast=True)]  # an error for each of 300,000 items would take seconds
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Top = Annotated[int, Field(ge=0, le=20)]
_Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
_Stop = Annotated[
    list[Annotated[str, StringConstraints(min_length=1)]],
    Field(max_length=16),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class _Object(BaseModel):
    """A JSON object: strict types, no unknown fields; a field that is null is left out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {key: item for key, item in data.items() if item is not None} if isinstance(data, dict) else data


class StreamOptions(_Object):
    """``stream_options``."""

    include_usage: bool = False


class Schema(_Object):
    """The schema of a ``response_format``, with what OpenAI's clients send beside it."""

    json_schema: dict[str, Any] = Field(alias="schema")
    name: str = ""
    strict: bool = True
    description: str = ""


class ResponseFormat(_Object):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class Speculation(_Object):
    """``speculation``: how far to draft; 0 is plain decoding."""

    depth: Annotated[int, Field(ge=0, le=MAX_DEPTH)]


class TextPart(_Object):
    """A part of a message."""

    type: Literal["text"]
    text: str


_Content = str | _List[TextPart]


def _text(content: _Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(_Object):
    """``prediction``: most of the answer, as the client expects it."""

    type: Literal["content"]
    content: _Content


class Body(_Object):
    """What every endpoint takes: the name of the model, and fields of OpenAI's API while they have no effect here."""

    model: str | None = None
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    function_call: Literal["none", "auto"] = "auto"
    functions: Annotated[list[Any], Field(max_length=0)] = []
    metadata: Any = None
    modalities: list[Literal["text"]] = []
    n: Literal[1] = 1
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    suffix: Literal[""] = ""
    user: Any = None
    verbosity: Any = None


class Request(Body):
    """What both generating endpoints take. ``None`` stands for the server's own setting."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: _Tokens | None = None
    min_tokens: _Count | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=1e-6, le=1.0)] | None = None
    top_k: _Count | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    stop: _Stop | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    speculation: Speculation | None = None
    origins: bool = False  # for the page: how each token came to be

    @property
    def token_limit(self) -> int | None:
        """How many tokens the answer may have."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """How many log-probabilities beside the chosen token's; None for none at all."""
        raise AssertionError("for subclasses")

    @property
    def tool_names(self) -> list[str]:
        """The functions that the answer may call."""
        return []

    def prompt_of(self, lm: Parts) -> tuple[list[int], str]:
        """The prompt, and its text if a template made it. Raises: SpecdecError."""
        raise AssertionError("for subclasses")

    def settings(self, prompt: str, limit: int) -> dict[str, Any]:
        """The settings of the generation after this prompt, of at most ``limit`` tokens. Raises: Refusal."""
        requested = self.token_limit
        settings = {
            "max_new_tokens": None if requested is None else min(requested, limit),
            "min_new_tokens": self.min_tokens,
            "logprobs": self.top,
            "processors": self.grammar(prompt),
            **{name: getattr(self, name) for name in (*_SAMPLING, "seed", "stop", "ignore_eos", "logit_bias")},
        }
        return {name: value for name, value in settings.items() if value is not None}

    def grammar(self, prompt: str) -> list[Choice] | None:
        """The processors that ``response_format`` or a required call asks for."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_schema" and form.json_schema is None:
            raise Refusal(400, "response_format.json_schema is required and missing", param="response_format")
        schema = form.json_schema.json_schema if form.json_schema else {"type": "object"}
        return [Choice("grammar", {"json_schema": json.dumps(schema), "whitespace": False})]


class CompletionRequest(Request):
    """The body of ``/v1/completions``; a prompt is text or token ids."""

    prompt: str | _List[int] | _List[str] | _List[_List[int]]
    logprobs: _Top | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    def prompt_of(self, lm: Parts) -> tuple[list[int], str]:
        prompt: Any = self.prompt
        if prompt and not isinstance(prompt, str) and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise Refusal(400, f"prompt takes one prompt for each request, got {len(prompt)}", param="prompt")
            prompt = prompt[0]
        return lm.encode(prompt), ""


class CalledFunction(_Object):
    """The function of a call."""

    name: str
    arguments: str


class Call(_Object):
    """A call in an earlier answer; clients that add up a stream send its index back."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: int = 0


class Message(_Object):
    """A message of a conversation; an answer that only calls has no content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content = ""
    name: str = ""
    tool_calls: _List[Call] = []
    tool_call_id: str = ""
    reasoning_content: str = ""

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise PydanticCustomError("empty", "content is required and missing")
        return self

    def rendered(self) -> dict[str, Any]:
        """As a chat template takes it: with ``developer`` under its former name, and arguments as objects."""
        data = self.model_dump(exclude_unset=True) | {"content": _text(self.content)}
        data["role"] = "system" if self.role == "developer" else self.role
        for call in data.get("tool_calls", ()):
            call.pop("index", None)
            with contextlib.suppress(ValueError):  # else as the model wrote it
                call["function"]["arguments"] = parse_json(call["function"]["arguments"])
        return data


class Function(_Object):
    """A function that the model may call."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Tool(_Object):
    """An entry of ``tools``, or a ``tool_choice`` that names one."""

    type: Literal["function"]
    function: Function


class Conversation(Body):
    """Messages, and what a chat template reads beside them."""

    messages: Annotated[_List[Message], Field(min_length=1)]
    tools: Annotated[_List[Tool], Field(max_length=128)] = []
    tool_choice: Literal["none", "auto", "required"] | Tool = "auto"
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def prompt_of(self, lm: Parts) -> tuple[list[int], str]:
        """The prompt, and its text. Raises: SpecdecError; Refusal."""
        taken = sorted({*OWN_VARIABLES, "tools"} & self.chat_template_kwargs.keys())
        if taken:
            raise Refusal(400, f"chat_template_kwargs cannot set {taken[0]!r}", param="chat_template_kwargs")
        variables = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        text = render_with_tools(
            lambda messages, tools: lm.tokenizer.apply_chat_template(messages, tools=list(tools) or None, **variables),
            [message.rendered() for message in self.messages],
            [tool.model_dump(exclude_unset=True) for tool in self.offered()],
        )
        return lm.encode(lm.tokenizer.encode(text, add_special=False)), text

    def offered(self) -> Sequence[Tool]:
        """The tools that the prompt shows."""
        return [] if self.tool_choice == "none" else self.tools


class ChatRequest(Conversation, Request):
    """The body of ``/v1/chat/completions``."""

    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: _Top | None = None

    @property
    def token_limit(self) -> int | None:
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            raise Refusal(400, "max_tokens and max_completion_tokens mean the same: give one", param="max_tokens")
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tool_names(self) -> list[str]:
        return [tool.function.name for tool in self.offered()]

    def grammar(self, prompt: str) -> list[Choice] | None:
        choice = self.tool_choice
        if choice in ("none", "auto"):
            return super().grammar(prompt)
        wanted = choice.function.name if isinstance(choice, Tool) else None
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools if wanted in (None, tool.function.name)]
        if not tools:
            what = "at least one tool" if wanted is None else f"a tool that is called {shown(wanted, 60)}"
            raise Refusal(400, f"tool_choice needs {what} in tools", param="tool_choice")
        if super().grammar(prompt):
            raise Refusal(
                400, "a required call and a response_format cannot both shape the answer", param="tool_choice"
            )
        return [Choice("grammar", {"lark": call_grammar(tools, prompt)})]


class TokenizeRequest(Body):
    """The body of ``/tokenize`` with text; with ``messages`` it is that of a conversation."""

    prompt: str
    add_special_tokens: bool = True

    def prompt_of(self, lm: Parts) -> tuple[list[int], str]:
        """The tokens. Raises: SpecdecError."""
        return lm.tokenizer.encode(self.prompt, add_special=self.add_special_tokens), ""


class DetokenizeRequest(Body):
    """The body of ``/detokenize``."""

    tokens: _List[Annotated[int, Field(ge=0, le=2**31 - 1)]]


def parsed(kind: type[R], data: Mapping[str, Any]) -> R:
    """The request in a JSON object. Raises: Refusal that names the field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # in a union, the member that fits best fails farthest inside
        errors = error.errors(include_url=False)
        worst = max(errors, key=lambda item: len(item["loc"]))
        place = _place(worst["loc"], data, missing=worst["type"] == "missing")
        if worst["type"] == "extra_forbidden":
            known = kind.model_fields if place == worst["loc"][0] else ()
            text = f"the field {shown(place, 60)} is unknown.{did_you_mean(place, known)}"
        elif worst["type"] == "missing":
            text = f"{place} is required and missing"
        elif worst["type"] == "empty":
            text = f"{place}.{worst['msg']}"
        else:
            same = (item for item in errors if item["input"] is worst["input"])
            alternatives = dict.fromkeys(_JSON_WORDS.get(item["type"], item["msg"]) for item in same)
            text = f"{place or 'the body'}: {', or '.join(alternatives)}, got {shown(worst['input'], 60)}"
        raise Refusal(400, text, param=place[:60] or None) from None


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises: Refusal."""
    try:
        data = parse_json(body)  # nesting, digits and repeated keys are checked before anything reads the values
    except ValueError as error:
        raise Refusal(400, f"the body cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise Refusal(400, f"the body takes a JSON object, got {shown(data, 60)}")
    return data


def _place(path: Sequence[str | int], data: Any, *, missing: bool) -> str:
    """A field's path, such as ``messages[0].role``, without the names of types that pydantic puts into it."""
    place = ""
    for number, part in enumerate(path):
        last = missing and number == len(path) - 1
        if isinstance(data, dict) and (part in data or last):
            place, data = f"{place}.{part}".lstrip("."), data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            place, data = f"{place}[{part}]", data[part]
    return place


@attrs.frozen(kw_only=True)
class Prepared:
    """A request whose prompt and settings the model can take.

    Attributes:
        prompt: its tokens.
        settings: for ``Session.stream``.
        thinking: whether the prompt ends inside ``<think>``.
    """

    prompt: list[int]
    settings: Mapping[str, Any]
    thinking: bool


def prepared(request: Request, lm: Parts, most_prompt: int | None, most_tokens: int) -> Prepared:
    """Tokens and settings of a request, all checked, so that it does not fail when its turn comes.

    It may take as long as the tokenizer and a grammar need.

    Args:
        most_prompt: tokens of the prompt; None for what the model takes.
        most_tokens: that the answer may have; a request for more gets as many.

    Raises: Refusal; SpecdecError.
    """
    prompt, text = request.prompt_of(lm)
    most = min(most_prompt or lm.capacity, lm.capacity - 1)
    if len(prompt) > most:
        raise Refusal(
            400, f"the prompt has {len(prompt)} tokens, and at most {most} fit", code="context_length_exceeded"
        )
    settings = request.settings(text, most_tokens)
    generation = override_generation(lm.config.generation, settings)
    make_sampling(lm, generation, generated_from=len(prompt))
    if request.speculation is not None:
        settings["depth"] = request.speculation.depth
    if request.prediction is not None:
        settings["prediction"] = _text(request.prediction.content)
    return Prepared(prompt=prompt, settings=settings, thinking=text.rstrip().endswith("<think>"))

"""The bodies of requests, strictly: a field that is unknown, unsupported or of the wrong type is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import attrs
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from specdec.config import Choice
from specdec.decoding.parts import Parts, make_sampling, override_generation
from specdec.errors import SpecdecError, did_you_mean, shown
from specdec.files.reading import parse_json
from specdec.serving.refusal import Refusal

R = TypeVar("R", bound="Request")
T = TypeVar("T")

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (False,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "user": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of OpenAI's API that are refused, and the values that ask for nothing."""

Item = TypeVar("Item")
_List = Annotated[
    list[Item], Field(fail_fast=True)
]  # one wrong item is enough: an error for each of 300,000 takes seconds
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


class PlainFormat(_Object):
    """A ``response_format`` without a schema of its own."""

    type: Literal["text", "json_object"]


class Schema(_Object):
    """The schema of a ``response_format``, with what OpenAI's clients send beside it."""

    json_schema: dict[str, Any] = Field(alias="schema")
    name: str = ""
    strict: bool = True
    description: str = ""


class SchemaFormat(_Object):
    """A ``response_format`` with a JSON schema."""

    type: Literal["json_schema"]
    json_schema: Schema


class Request(_Object):
    """What both endpoints take. ``None`` stands for the server's own setting."""

    model: str | None = None
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
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    origins: bool = False  # for the page: how each token came to be

    @property
    def token_limit(self) -> int | None:
        """How many tokens the answer may have."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """How many log-probabilities beside the chosen token's; None for none at all."""
        raise AssertionError("for subclasses")

    def tokens(self, lm: Parts) -> list[int]:
        """The prompt. Raises: SpecdecError."""
        raise AssertionError("for subclasses")

    def settings(self) -> dict[str, Any]:
        """The settings of the generation. Raises: Refusal."""
        settings = {
            "max_new_tokens": self.token_limit,
            "min_new_tokens": self.min_tokens,
            "logprobs": self.top,
            "processors": self._grammar(),
            **{name: getattr(self, name) for name in (*_SAMPLING, "seed", "stop", "ignore_eos", "logit_bias")},
        }
        return {name: value for name, value in settings.items() if value is not None}

    def _grammar(self) -> list[Choice] | None:
        """The processors that ``response_format`` asks for."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        schema = {"type": "object"}
        if isinstance(self.response_format, SchemaFormat):
            schema = self.response_format.json_schema.json_schema
        return [Choice("grammar", {"json_schema": json.dumps(schema), "whitespace": False})]


class CompletionRequest(Request):
    """The body of ``/v1/completions``; a prompt is text or token ids."""

    prompt: str | _List[int] | _List[str] | _List[_List[int]]
    logprobs: _Top | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    def tokens(self, lm: Parts) -> list[int]:
        prompt: Any = self.prompt
        if prompt and not isinstance(prompt, str) and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise Refusal(400, f"prompt takes one prompt for each request, got {len(prompt)}", param="prompt")
            prompt = prompt[0]
        return lm.encode(prompt)


class TextPart(_Object):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Object):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | _List[TextPart]

    def rendered(self) -> dict[str, str]:
        """As a chat template takes it; templates know ``developer`` by its former name."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(Request):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[_List[Message], Field(min_length=1)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: _Top | None = None
    chat_template_kwargs: dict[str, Any] = {}

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

    def tokens(self, lm: Parts) -> list[int]:
        taken = sorted({"self", "messages", "add_generation_prompt", "tools"} & self.chat_template_kwargs.keys())
        if taken:
            raise Refusal(400, f"chat_template_kwargs cannot set {taken[0]!r}", param="chat_template_kwargs")
        messages = [message.rendered() for message in self.messages]
        text = lm.tokenizer.apply_chat_template(messages, **self.chat_template_kwargs)
        return lm.encode(lm.tokenizer.encode(text, add_special=False))


def parsed(kind: type[R], body: bytes) -> R:
    """The request in a body. Raises: Refusal that names the field."""
    try:
        data = parse_json(body)  # nesting, digits and repeated keys are checked before anything reads the values
    except UnicodeDecodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON that can be read: {error}") from None
    if not isinstance(data, dict):
        raise Refusal(400, f"the body takes a JSON object, got {shown(data, 60)}")
    for name in UNSUPPORTED.keys() & data.keys():
        value = data.pop(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in UNSUPPORTED[name]):
            raise Refusal(400, f"this server does not support {name!r}: leave it out", param=name, code="unsupported")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # in a union, the member that fits best fails farthest inside
        worst = max(error.errors(include_url=False, include_context=False), key=lambda one: len(one["loc"]))
        place = _place(worst["loc"], data, missing=worst["type"] == "missing")
        if worst["type"] == "extra_forbidden":
            known = kind.model_fields if place == worst["loc"][0] else ()
            text = f"the field {shown(place, 60)} is unknown.{did_you_mean(place, known)}"
        elif worst["type"] == "missing":
            text = f"{place} is required and missing"
        else:
            text = f"{place}: {worst['msg']}, got {shown(worst['input'], 60)}"
        raise Refusal(400, text, param=place[:60]) from None


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


@attrs.frozen
class Prepared:
    """A request whose prompt and settings the model can take."""

    prompt: list[int]
    settings: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Limits:
    """Bounds on a request.

    Attributes:
        body_bytes: of the request's body.
        prompt_tokens: of the prompt.
        new_tokens: that a request may ask for.
    """

    body_bytes: int = 2**20
    prompt_tokens: int | None = None
    new_tokens: int = 4096


def prepared(request: Request, lm: Parts, limits: Limits) -> Prepared:
    """Tokens and settings of a request, all checked, so that it does not fail when its turn comes.

    Raises: Refusal; it may take as long as the tokenizer and a grammar need.
    """
    requested = request.token_limit
    if requested is not None and requested > limits.new_tokens:
        raise Refusal(400, f"max_tokens is at most {limits.new_tokens} here, got {requested}", param="max_tokens")
    prompt = _or_refusal(lambda: request.tokens(lm))
    most = min(limits.prompt_tokens or lm.capacity, lm.capacity - 1)
    if len(prompt) > most:
        raise Refusal(
            400, f"the prompt has {len(prompt)} tokens, and at most {most} fit", code="context_length_exceeded"
        )
    settings = request.settings()
    generation = _or_refusal(lambda: override_generation(lm.config.generation, settings))
    _or_refusal(lambda: make_sampling(lm, generation, generated_from=len(prompt)))
    return Prepared(prompt, settings)


def _or_refusal(call: Callable[[], T]) -> T:
    try:
        return call()
    except SpecdecError as error:
        raise Refusal.of(error) from None

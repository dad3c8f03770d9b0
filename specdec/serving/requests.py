"""The bodies of requests, strictly: a field that is unknown, unsupported or of the wrong type is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import attrs

from specdec.checking import (
    CANNOT_CONVERT,
    FieldError,
    between,
    checked_fields,
    converter_for,
    dotted,
    known_fields,
    problems_of,
)
from specdec.config import Choice
from specdec.decoding.parts import Parts, make_sampling, override_generation
from specdec.errors import SpecdecError, did_you_mean, shown
from specdec.files.reading import parse_json
from specdec.serving.refusal import Refusal

R = TypeVar("R", bound="Request")

LARGEST = 2**31 - 1
STOPS = 16  # stop strings of a request
TOP_LOGPROBS = 20

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


def _strings(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _few(owner: object, field: attrs.Attribute[Any], value: Sequence[Any]) -> None:
    if len(value) > STOPS or not all(value):
        raise FieldError(owner, field.name, f"at most {STOPS} strings of one character or more", list(value))


def _optional(low: float, high: float) -> Any:
    return attrs.field(default=None, validator=attrs.validators.optional(between(low, high)))


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class StreamOptions:
    """``stream_options``."""

    include_usage: bool = False


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class Request:
    """What both endpoints take. ``None`` stands for the server's own setting."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = _optional(1, LARGEST)
    min_tokens: int | None = _optional(0, LARGEST)
    temperature: float | None = _optional(0.0, 2.0)
    top_p: float | None = _optional(1e-6, 1.0)
    top_k: int | None = _optional(0, LARGEST)
    min_p: float | None = _optional(0.0, 1.0)
    presence_penalty: float | None = _optional(-2.0, 2.0)
    frequency_penalty: float | None = _optional(-2.0, 2.0)
    repetition_penalty: float | None = _optional(0.01, 100.0)
    seed: int | None = _optional(0, 2**63 - 1)
    stop: tuple[str, ...] | None = attrs.field(
        default=None, converter=_strings, validator=attrs.validators.optional(_few)
    )
    ignore_eos: bool | None = None
    logit_bias: Mapping[str, float] | None = None
    response_format: Mapping[str, Any] | None = None
    origins: bool = False  # for the page: how each token came to be

    @property
    def most_tokens(self) -> int | None:
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
        return {
            "max_new_tokens": self.most_tokens,
            "min_new_tokens": self.min_tokens,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "logit_bias": self.logit_bias,
            "logprobs": self.top,
            "processors": _grammar(self.response_format),
            **{
                name: getattr(self, name)
                for name in (
                    "temperature",
                    "top_p",
                    "top_k",
                    "min_p",
                    "presence_penalty",
                    "frequency_penalty",
                    "repetition_penalty",
                    "seed",
                )
            },
        }


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class CompletionRequest(Request):
    """The body of ``/v1/completions``; a prompt is text or token ids."""

    prompt: str | tuple[int, ...] | tuple[str, ...] | tuple[tuple[int, ...], ...]
    logprobs: int | None = _optional(0, TOP_LOGPROBS)

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


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class TextPart:
    """A part of a message."""

    type: Literal["text"]
    text: str


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class Message:
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[TextPart, ...]

    def rendered(self) -> dict[str, str]:
        """As a chat template takes it; templates know ``developer`` by its former name."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class ChatRequest(Request):
    """The body of ``/v1/chat/completions``."""

    messages: tuple[Message, ...]
    max_completion_tokens: int | None = _optional(1, LARGEST)
    logprobs: bool = False
    top_logprobs: int | None = _optional(0, TOP_LOGPROBS)
    chat_template_kwargs: Mapping[str, Any] | None = None

    @property
    def most_tokens(self) -> int | None:
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            raise Refusal(400, "max_tokens and max_completion_tokens mean the same: give one", param="max_tokens")
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def tokens(self, lm: Parts) -> list[int]:
        if not self.messages:
            raise Refusal(400, "messages takes one message or more, got none", param="messages")
        variables = dict(self.chat_template_kwargs or {})
        taken = sorted({"self", "messages", "add_generation_prompt", "tools"} & variables.keys())
        if taken:
            raise Refusal(400, f"chat_template_kwargs cannot set {taken[0]!r}", param="chat_template_kwargs")
        messages = [message.rendered() for message in self.messages]
        text = lm.tokenizer.apply_chat_template(messages, **variables)
        return lm.encode(lm.tokenizer.encode(text, add_special=False))


def parsed(kind: type[R], body: bytes) -> R:
    """The request in a body. Raises: Refusal that names the field."""
    try:
        data = parse_json(body)
    except UnicodeDecodeError:
        raise Refusal(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON that can be read: {error}") from None
    if not isinstance(data, dict):
        raise Refusal(400, f"the body takes a JSON object, got {shown(data, 60)}")
    given = {name: value for name, value in data.items() if value is not None and not _asks_nothing(name, value)}
    known = known_fields(kind)
    for name in given:
        if name in UNSUPPORTED:
            raise Refusal(400, f"this server does not support {name!r}: leave it out", param=name, code="unsupported")
        if name not in known:
            named = shown(name, 60)
            raise Refusal(400, f"the field {named} is unknown.{did_you_mean(name, known)}", param=name[:60])
    try:
        made: R = converter_for(files=True).structure(_without_nulls(given), kind)
    except CANNOT_CONVERT as error:
        problem = next(iter(problems_of(error, (), kind, lambda value: shown(value, 60))))
        hint = f" (try {problem.hint})" if problem.hint else ""
        text = problem.text.replace("a table", "an object")
        raise Refusal(400, f"{dotted(problem.path)} {text}{hint}", param=dotted(problem.path)) from None
    return made


def _asks_nothing(name: str, value: Any) -> bool:
    return any(type(value) is type(one) and value == one for one in UNSUPPORTED.get(name, ()))


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, whose messages and options lose those that are null, which means the same as left out."""

    def stripped(value: Any) -> Any:
        return {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value

    made = dict(fields)
    if isinstance(made.get("messages"), list):
        made["messages"] = [stripped(message) for message in made["messages"]]
    made |= {name: stripped(made[name]) for name in ("stream_options",) if name in made}
    return made


def _grammar(response_format: Mapping[str, Any] | None) -> list[Choice] | None:
    """The processors that a ``response_format`` asks for. Raises: Refusal."""
    if response_format is None:
        return None
    given = dict(response_format)
    kind = given.pop("type", None)
    schema: Any
    if kind == "text":
        schema = None
    elif kind == "json_object":
        schema = {"type": "object"}
    elif kind == "json_schema":
        described = given.pop("json_schema", None)
        if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
            raise Refusal(
                400,
                "response_format.json_schema takes an object with 'name' and 'schema'",
                param="response_format.json_schema",
            )
        other = sorted(described.keys() - {"name", "schema", "strict", "description"})
        if other:
            raise Refusal(
                400, f"the field 'response_format.json_schema.{other[0]}' is unknown", param="response_format"
            )
        schema = described["schema"]
    else:
        takes = "'text', 'json_object' or 'json_schema'"
        raise Refusal(400, f"response_format.type takes {takes}, got {shown(kind, 60)}", param="response_format.type")
    if given:
        raise Refusal(400, f"the field 'response_format.{min(given)}' is unknown", param="response_format")
    return None if schema is None else [Choice("grammar", {"json_schema": json.dumps(schema), "whitespace": False})]


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
    asked = request.most_tokens
    if asked is not None and asked > limits.new_tokens:
        raise Refusal(400, f"max_tokens is at most {limits.new_tokens} here, got {asked}", param="max_tokens")
    prompt = _or_refusal(lambda: request.tokens(lm))
    most = min(limits.prompt_tokens or lm.capacity, lm.capacity - 1)
    if len(prompt) > most:
        raise Refusal(
            400, f"the prompt has {len(prompt)} tokens, and at most {most} fit", code="context_length_exceeded"
        )
    settings = {name: value for name, value in request.settings().items() if value is not None}

    def check() -> None:
        make_sampling(lm, override_generation(lm.config.generation, settings), generated_from=len(prompt))

    _or_refusal(check)
    return Prepared(prompt, settings)


T = TypeVar("T")


def _or_refusal(call: Callable[[], T]) -> T:
    try:
        return call()
    except SpecdecError as error:
        raise Refusal.of(error) from None

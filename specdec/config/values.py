"""The configuration of a run: everything that its output and its speed depend on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import attrs

from specdec.checking import Mismatch, between, checked_fields, each, filled, known_fields, one_of, one_or_many
from specdec.contract import BIASES, SEED, SamplingSettings
from specdec.errors import ConfigError, cut, did_you_mean


def _sources() -> Any:
    """Where each key was written, by path: "run.toml", "-s drafter.name=ngram"; no key of a table."""
    return attrs.field(factory=dict, eq=False, repr=False, metadata={"key": False})


def _model(value: str | os.PathLike[str]) -> str:
    """A path as text that is always read as a path: ``Path("demo")`` is a folder, "demo" the embedded model."""
    text: str = os.fspath(value) if isinstance(value, os.PathLike) else value
    explicit = not isinstance(value, os.PathLike) or os.path.isabs(text) or text.startswith((".", "~"))
    return text if explicit else os.path.join(os.curdir, text)


_INT32 = 2**31 - 1


@attrs.frozen(field_transformer=checked_fields)
class Choice:
    """A plugin by name, and its options as written; the plugin's own class validates them later."""

    name: str = attrs.field(validator=filled)
    options: Mapping[str, Any] = attrs.field(factory=dict)
    sources: Mapping[str, str] = _sources()

    @property
    def drafts_with_a_model(self) -> bool:
        """Whether no drafter is named, but a model to draft with (``drafter.model``)."""
        return self.name == "auto" and "model" in self.options

    @classmethod
    def from_table(cls, value: Any) -> Choice:
        """A plugin table: ``name`` plus the plugin's options. Raises: Mismatch."""
        if not isinstance(value, Mapping):
            raise Mismatch(
                "a table", value, f'name = "{cut(value, 60)}" inside the table' if isinstance(value, str) else None
            )
        options = dict(value)
        name = options.pop("name", None)
        if not isinstance(name, str) or not name:
            raise Mismatch("the name of a plugin", name, path=("name",))
        return cls(name, options)

    def to_table(self) -> dict[str, Any]:
        """As it is written: the inverse of ``from_table``."""
        return {"name": self.name, **{key: _plain(value) for key, value in self.options.items()}}


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class TargetConfig:
    """Which model to run, and where."""

    # a folder, a hub id, or "demo" (embedded); a pathlib.Path is a folder
    model: str = attrs.field(default="demo", converter=_model, validator=filled)
    revision: str | None = None  # a hub branch, tag or commit
    # a file or folder with the MTP head; None: the checkpoint's own, or mtp.safetensors beside the weights
    mtp: str | None = attrs.field(default=None, validator=attrs.validators.optional(filled))
    # hidden states that an MTP head reads: after the final norm, or before it; "auto": as its layout was trained
    mtp_states: str = attrs.field(default="auto", validator=one_of("auto", "normed", "residual"))
    backend: str = attrs.field(default="auto", validator=filled)
    # as written; the backend's class validates them
    backend_options: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    threads: int | None = attrs.field(default=None, validator=attrs.validators.optional(between(1, 256)))
    instruction_set: str = attrs.field(default="auto", validator=filled)
    dtype: str = attrs.field(default="auto", validator=one_of("auto", "bfloat16", "float16", "float32"))
    # "decoded": quantised weights become dtype; "int8" and "int4" quantise plain ones at load
    weights: str = attrs.field(default="auto", validator=one_of("auto", "decoded", "int8", "int4"))
    # of products with packed integers: as they are, or rounded to int8; "auto" rounds those of GGUF files
    activations: str = attrs.field(default="auto", validator=one_of("auto", "float", "int8"))
    capacity: int | None = attrs.field(default=None, validator=attrs.validators.optional(between(1, _INT32)))
    # a folder, or "off"
    decoded_cache: str | None = attrs.field(default=None, validator=attrs.validators.optional(filled))
    sources: Mapping[str, str] = _sources()


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class GenerationConfig(SamplingSettings):
    """Length and sampling of a generation. A key of ``logit_bias`` is a string in TOML."""

    max_new_tokens: int = attrs.field(default=128, validator=between(1, _INT32))
    seed: int | None = attrs.field(default=None, validator=attrs.validators.optional(SEED))  # None: drawn, and reported
    logit_bias: Mapping[str | int, float] = attrs.field(factory=dict, validator=BIASES)
    processors: tuple[Choice, ...] = ()  # [[generation.processors]] tables
    stop: tuple[str, ...] = attrs.field(default=(), converter=one_or_many, validator=each(filled))
    ignore_eos: bool = False


class GenerationSettings(TypedDict, total=False):
    """The fields of ``GenerationConfig`` as keyword arguments; None stands for the configuration's value."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[str | int, float] | Mapping[str, float] | Mapping[int, float] | None
    banned: Sequence[int] | None
    processors: Sequence[Choice] | None
    logprobs: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool | None


@attrs.frozen(kw_only=True, field_transformer=checked_fields)
class RunConfig:
    """Everything that a run depends on."""

    target: TargetConfig = attrs.field(factory=TargetConfig)
    drafter: Choice = attrs.field(factory=lambda: Choice("auto"))
    verifier: Choice = attrs.field(factory=lambda: Choice("strict"))
    depth: Choice = attrs.field(factory=lambda: Choice("auto"))
    generation: GenerationConfig = attrs.field(factory=GenerationConfig)

    def check_auto(self) -> RunConfig:
        """The same. Raises: ConfigError for options beside ``name = "auto"``, which belong to no plugin."""
        for table, kind, example in (("drafter", "drafter", "ngram"), ("depth", "depth policy", "adaptive")):
            choice: Choice = getattr(self, table)
            if choice.name == "auto" and choice.options and not choice.drafts_with_a_model:
                option = next(iter(choice.options))
                raise ConfigError(
                    f"{table}.{option} is an option of a {kind}, but none is chosen: {table}.name is 'auto'."
                    f"{did_you_mean(option, ['name', *(['depth'] if table == 'depth' else [])])}",
                    asked_for_by=choice.sources.get(f"{table}.{option}"),
                    try_=f'name the {kind} it is for, such as {table}.name = "{example}"',
                )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the shape of the TOML file; ``None`` values are omitted, because TOML has no null."""
        return {field.name: _plain(getattr(self, field.name)) for field in attrs.fields(RunConfig)}


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return value.to_table()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not attrs.has(type(value)):
        return value
    values = {key: getattr(value, key) for key in known_fields(type(value))}
    return {key: _plain(item) for key, item in values.items() if item is not None}


PLUGIN_TABLES = ("drafter", "verifier", "depth")

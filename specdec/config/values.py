"""The configuration of a run: everything that its output and its speed depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from specdec.config.validators import FieldError, between, one_of


def _source() -> Any:
    """Where a table was written: "run.toml", "-s drafter.name=ngram", or "" for a program. Not a key of the table."""
    return attrs.field(default="", eq=False, repr=False, metadata={"key": False})


def keys_of(config_class: type) -> list[str]:
    """The keys of a table with the fields of ``config_class``."""
    if not attrs.has(config_class):
        return list(getattr(config_class, "__dataclass_fields__", ()))
    return [field.name for field in attrs.fields(config_class) if field.metadata.get("key", True)]


def _filled(owner: object, field: attrs.Attribute[Any], value: str) -> None:
    if not value:
        raise FieldError(owner, field.name, "a name", value)


def _strings(value: Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)  # tuple("END") would be three stop strings


def _stop_strings(owner: object, field: attrs.Attribute[Any], value: Iterable[object]) -> None:
    if not all(isinstance(text, str) and text for text in value):
        raise FieldError(owner, field.name, "strings of one character or more", list(value))


_INT32 = 2**31 - 1


@attrs.frozen
class Choice:
    """A plugin by name, and its options as written; the plugin's own class validates them later."""

    name: str = attrs.field(validator=_filled)
    options: Mapping[str, Any] = attrs.field(factory=dict)
    source: str = _source()


@attrs.frozen(kw_only=True)
class TargetConfig:
    """Which model to run, and where."""

    model: str = attrs.field(default="demo", validator=_filled)  # a folder, a hub id, or "demo" (embedded)
    revision: str | None = None  # a hub branch, tag or commit
    backend: str = attrs.field(default="auto", validator=_filled)
    # as written; the backend's class validates them
    backend_options: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    dtype: str = attrs.field(default="auto", validator=one_of("auto", "bfloat16", "float16", "float32"))
    capacity: int | None = attrs.field(default=None, validator=attrs.validators.optional(between(1, _INT32)))
    decoded_cache: str | None = attrs.field(default=None, validator=attrs.validators.optional(_filled))  # a folder
    source: str = _source()


@attrs.frozen(kw_only=True)
class GenerationConfig:
    """Length and sampling of a generation. Temperature 0 is greedy; ``contract.Sampling`` explains the rest."""

    max_new_tokens: int = attrs.field(default=128, validator=between(1, _INT32))
    min_new_tokens: int = attrs.field(default=0, validator=between(0, _INT32))
    temperature: float = attrs.field(default=0.0, validator=between(0.0, 100.0))
    top_k: int = attrs.field(default=0, validator=between(0, _INT32))  # 0 keeps all
    top_p: float = attrs.field(default=1.0, validator=between(1e-6, 1.0))  # 0 would keep no token at all
    min_p: float = attrs.field(default=0.0, validator=between(0.0, 1.0))
    repetition_penalty: float = attrs.field(default=1.0, validator=between(0.01, 100.0))
    presence_penalty: float = attrs.field(default=0.0, validator=between(-100.0, 100.0))
    frequency_penalty: float = attrs.field(default=0.0, validator=between(-100.0, 100.0))
    logit_bias: Mapping[str | int, float] = attrs.field(factory=dict)  # by token id; a TOML key is a string
    banned: tuple[int, ...] = attrs.field(default=(), converter=tuple)  # token ids
    processors: tuple[Choice, ...] = attrs.field(default=(), converter=tuple)  # [[generation.processors]] tables
    logprobs: int | None = attrs.field(default=None, validator=attrs.validators.optional(between(0, _INT32)))
    seed: int = attrs.field(default=0, validator=between(0, 2**63 - 1))  # the largest TOML integer
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings, validator=_stop_strings)
    ignore_eos: bool = False


@attrs.frozen(kw_only=True)
class RunConfig:
    """Everything that a run depends on."""

    target: TargetConfig = attrs.field(factory=TargetConfig)
    drafter: Choice = attrs.field(factory=lambda: Choice("auto"))
    verifier: Choice = attrs.field(factory=lambda: Choice("strict"))
    depth: Choice = attrs.field(factory=lambda: Choice("auto"))
    generation: GenerationConfig = attrs.field(factory=GenerationConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the shape of the TOML file; ``None`` values are omitted, because TOML has no null."""
        return {field.name: _table_of(getattr(self, field.name)) for field in attrs.fields(RunConfig)}


def _table_of(section: Any) -> dict[str, Any]:
    if isinstance(section, Choice):
        return {"name": section.name, **section.options}
    values = {key: getattr(section, key) for key in keys_of(type(section))}
    return {
        key: [_table_of(v) if isinstance(v, Choice) else v for v in value] if isinstance(value, tuple) else value
        for key, value in values.items()
        if value is not None
    }


PLUGIN_TABLES = ("drafter", "verifier", "depth")

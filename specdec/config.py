"""Run configuration: one TOML file plus overrides, structured strictly; every error names the key's path.

Three layers, later ones win: the defaults below, the file, the overrides. A layer that gives a plugin table
(``drafter``, ``verifier``, ``depth``) another name discards the options that lower layers set for the former name.
"""

from __future__ import annotations

import functools
import math
import pathlib
import tomllib
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.cols import (
    is_any_set,
    is_mapping,
    is_mutable_sequence,
    is_sequence,
    list_structure_factory,
    mapping_structure_factory,
)
from cattrs.errors import (
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    StructureHandlerNotFoundError,
)
from cattrs.gen import make_dict_structure_fn

from specdec.errors import ConfigError, PluginError, did_you_mean, nearest

T = TypeVar("T")
Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]

# --- validators, also for plugins' config classes --------------------------------------------------------------------


class FieldError(ConfigError):
    """A value outside what a field takes. Keeps the parts, so that a loader can name the key's path instead."""

    def __init__(self, owner: object, field: str, takes: str, got: object, **facts: object) -> None:
        self.field, self.takes, self.got = field, takes, got
        super().__init__(f"{type(owner).__name__}.{field} takes {takes}, got {got!r}", **facts)


def between(low: float, high: float) -> Validator:
    """An attrs validator, both ends included: integers when both ends are, else any finite number. Never a bool."""
    whole = type(low) is int and type(high) is int

    def check(owner: object, field: attrs.Attribute[Any], value: object) -> None:
        number = type(value) is int or (not whole and type(value) is float)
        if not number or not low <= value <= high:  # type: ignore[operator]  # NaN fails the comparison, as it should
            raise FieldError(owner, field.name, f"{low} to {high}", value)

    return check


def one_of(*choices: str) -> Validator:
    """An attrs validator for a fixed set of words; the error suggests the nearest one."""
    *others, last = (repr(choice) for choice in choices)
    takes = f"{', '.join(others)} or {last}" if others else last

    def check(owner: object, field: attrs.Attribute[Any], value: object) -> None:
        if value not in choices:
            hint = nearest(value, choices) if isinstance(value, str) else None
            raise FieldError(owner, field.name, takes, value, **{"try": f"{hint!r}" if hint else None})

    return check


def _filled(owner: object, field: attrs.Attribute[Any], value: str) -> None:
    if not value:
        raise FieldError(owner, field.name, "a name", value)


def _strings(value: Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)  # tuple("END") would be three stop strings


def _stop_strings(owner: object, field: attrs.Attribute[Any], value: Iterable[object]) -> None:
    if not all(isinstance(text, str) and text for text in value):
        raise FieldError(owner, field.name, "strings of one character or more", list(value))


_INT32 = 2**31 - 1


# --- the configuration -----------------------------------------------------------------------------------------------


@attrs.frozen
class Choice:
    """A plugin by name, and its options as they were written; the plugin's own class structures them later."""

    name: str = attrs.field(validator=_filled)
    options: Mapping[str, Any] = attrs.field(factory=dict)
    source: str = attrs.field(default="", eq=False, repr=False)  # "run.toml", "-s drafter.name=ngram"; "": a program


@attrs.frozen(kw_only=True)
class TargetConfig:
    """Which model runs where."""

    model: str = attrs.field(default="demo", validator=_filled)  # a folder, a hub id, or "demo" (embedded)
    revision: str | None = None  # a hub branch, tag or commit
    backend: str = attrs.field(default="auto", validator=_filled)
    # as written; the backend's class structures them
    backend_options: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    dtype: str = attrs.field(default="auto", validator=one_of("auto", "bfloat16", "float16", "float32"))
    capacity: int | None = attrs.field(default=None, validator=attrs.validators.optional(between(1, _INT32)))
    decoded_cache: str | None = attrs.field(default=None, validator=attrs.validators.optional(_filled))  # a folder
    source: str = attrs.field(default="", eq=False, repr=False)


@attrs.frozen(kw_only=True)
class GenerationConfig:
    """How long to generate and how to choose. Temperature 0 is greedy; ``contract.Sampling`` explains the rest."""

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
    seed: int = attrs.field(default=0, validator=between(0, 2**63 - 1))  # TOML's integers end there
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
        """Plain data in the shape of the TOML file; ``None`` values are left out, as TOML has none."""
        return {field.name: _table_of(getattr(self, field.name)) for field in attrs.fields(RunConfig)}


def _table_of(section: Any) -> dict[str, Any]:
    if isinstance(section, Choice):
        return _choice_table(section)
    values = {field.name: getattr(section, field.name) for field in attrs.fields(type(section))}
    return {
        name: [_choice_table(v) if isinstance(v, Choice) else v for v in value] if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not None and name != "source"
    }


def _choice_table(choice: Choice) -> dict[str, Any]:
    return {"name": choice.name, **choice.options}


PLUGIN_TABLES = ("drafter", "verifier", "depth")

# --- overrides -------------------------------------------------------------------------------------------------------


@attrs.frozen
class Override:
    """One ``key.path = value`` that wins over the file; ``source`` is how the user wrote it."""

    path: tuple[str, ...]
    value: Any
    source: str

    @classmethod
    def parse(cls, text: str) -> Override:
        """``key.path=value``: the value is TOML, and a bare word is a string.

        Raises: ConfigError when there is no key, no value, or broken TOML that cannot be meant as a word.
        """
        source = f"-s {text}"
        key, equals, raw = text.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        raw = raw.strip()
        if not equals or not all(path):
            raise ConfigError(
                f"an override is key.path=value, got {text!r}", **{"try": "-s depth.depth=4, -s target.model=demo"}
            )
        if not raw:
            raise ConfigError(f"the override of {key.strip()} has no value", **{"try": f"-s '{key.strip()}=\"\"'"})
        return cls(path, _toml_value(raw, source), source)


def _toml_value(raw: str, source: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError as error:
        if raw[0] in "[{\"'":
            raise ConfigError(
                f"the value {raw!r} is not TOML: {error}",
                asked_for_by=source,
                **{"try": 'quote the strings in it: -s \'generation.stop=["a", "b"]\''},
            ) from error
        return raw
    return parsed["value"] if parsed.keys() == {"value"} else raw  # a line break must not smuggle in another key


# --- loading ---------------------------------------------------------------------------------------------------------


def load_config(path: str | pathlib.Path | None = None, overrides: Sequence[str | Override] = ()) -> RunConfig:
    """The defaults, then the file at ``path``, then ``overrides``.

    Raises: ConfigError that names the file, the key's path, what was got, and what would work.
    """
    sources: dict[tuple[str, ...], str] = {}
    data: dict[str, Any] = {}
    if path is not None:
        data = read_toml(path)
        sources.update((key, str(path)) for key in _key_paths(data))
    top: dict[str, Any] = {}
    for override in (Override.parse(text) if isinstance(text, str) else text for text in overrides):
        _put(top, override.path, override.value)
        sources[override.path] = override.source
    merged = _merge(_merge(_plugin_defaults(), data), top)
    if ("depth", "depth") in sources and ("depth", "name") not in sources:
        merged["depth"]["name"] = "fixed"  # a depth alone says which policy, as it does in specdec.load(depth=4)
    config: RunConfig = _structure(merged, RunConfig, (), lambda key: _source_of(key, sources))
    return _checked(_with_sources(config, sources))


def read_toml(path: str | pathlib.Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises: ConfigError when it cannot be read, is not UTF-8 or not TOML.
    """
    try:
        return tomllib.loads(pathlib.Path(path).read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{str(path)!r} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}",
            **{"try": "save the file as UTF-8; TOML allows no other encoding"},
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not TOML: {error}") from error


def structure_options(options: Mapping[str, Any], config_class: type[T], path: str = "", source: str = "") -> T:
    """A plugin's options as its own config class: strict types, no unknown keys.

    Args:
        options: as written, ``Choice.options``.
        config_class: an attrs class or a dataclass.
        path: the table they stand in, such as ``drafter``; error messages start keys with it.
        source: the file or override they come from, ``Choice.source``.
    Raises: ConfigError when the options are wrong, PluginError when the class itself cannot be read from TOML.
    """
    return _structure(dict(options), config_class, tuple(path.split(".")) if path else (), lambda key: source)


def structure_choice(choice: Choice, config_class: type[T], path: str) -> T:
    """``structure_options`` for a ``Choice``, with its own source."""
    return structure_options(choice.options, config_class, path, choice.source)


def _plugin_defaults() -> dict[str, Any]:
    """The lowest layer. Only plugin tables: their defaults depend on the name, attrs does the others."""
    defaults = RunConfig()
    return {table: _choice_table(getattr(defaults, table)) for table in PLUGIN_TABLES}


def _merge(low: Mapping[str, Any], high: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """``high`` over ``low``, table by table; a plugin table that changes its name starts from nothing."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            renamed = not path and key in PLUGIN_TABLES and value.get("name", below.get("name")) != below.get("name")
            merged[key] = dict(value) if renamed else _merge(below, value, (*path, key))
        else:
            merged[key] = value
    return merged


def _put(tables: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        below = tables.get(part)
        tables[part] = below = dict(below) if isinstance(below, Mapping) else {}
        tables = below
    tables[path[-1]] = value


def _key_paths(tables: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tables.items():
        yield (*path, key)
        if isinstance(value, Mapping):
            yield from _key_paths(value, (*path, key))


def _source_of(path: tuple[str, ...], sources: Mapping[tuple[str, ...], str]) -> str:
    for end in range(len(path), 0, -1):
        if path[:end] in sources:
            return sources[path[:end]]
    return next((source for key, source in sources.items() if key[: len(path)] == path), "")  # a key inside it


def _with_sources(config: RunConfig, sources: Mapping[tuple[str, ...], str]) -> RunConfig:
    """Each table remembers where it was written, for errors that come later (an unknown name, a bad option)."""

    def of(table: str, keys: Collection[str]) -> str:
        found = [_source_of((table, key), sources) for key in keys]
        return ", ".join(dict.fromkeys(source for source in found if source))

    choices = {table: getattr(config, table) for table in PLUGIN_TABLES}
    return attrs.evolve(
        config,
        target=attrs.evolve(config.target, source=of("target", ("model", "backend", "backend_options"))),
        **{
            table: attrs.evolve(choice, source=of(table, ("name", *choice.options)))
            for table, choice in choices.items()
        },
    )


def _checked(config: RunConfig) -> RunConfig:
    for table, kind, example in (("drafter", "drafter", "ngram"), ("depth", "depth policy", "adaptive")):
        choice: Choice = getattr(config, table)
        if choice.name == "auto" and choice.options:
            option = next(iter(choice.options))
            raise ConfigError(
                f"{table}.{option} is the option of a {kind}, and none is named: {table}.name is 'auto'."
                f"{did_you_mean(option, ['name', *(['depth'] if table == 'depth' else [])])}",
                asked_for_by=choice.source or None,
                **{"try": f'name the {kind} it is for, such as {table}.name = "{example}"'},
            )
    return config


# --- structuring -----------------------------------------------------------------------------------------------------


class _Mismatch(Exception):
    """A value of another type than the key takes; only ever seen by ``_problems``."""

    def __init__(self, takes: str, got: object, hint: str | None = None) -> None:
        self.takes, self.got, self.hint = takes, got, hint


@attrs.frozen
class _Problem:
    path: tuple[str, ...]
    text: str  # continues "key depth.depth "
    hint: str | None = None


def _structure(data: Any, config_class: type[T], path: tuple[str, ...], source: Callable[[tuple[str, ...]], str]) -> T:
    try:
        return _converter().structure(data, config_class)
    except StructureHandlerNotFoundError as error:
        raise PluginError(
            f"{config_class.__module__}.{config_class.__qualname__} cannot be read from TOML: {error}",
            **{"try": "fields of int, float, bool, str, list, dict, attrs classes, or None beside one of them"},
        ) from error
    except (ClassValidationError, IterableValidationError, ConfigError, _Mismatch) as error:
        problems = list(_problems(error, path, config_class))
        cause = error
    first = problems[0]
    if len(problems) == 1:
        raise ConfigError(
            f"key {dotted(first.path)} {first.text}" if first.path else f"the configuration {first.text}",
            asked_for_by=source(first.path) or None,
            **{"try": first.hint},
        ) from cause
    lines = []
    for problem in problems:
        origin = source(problem.path)
        hint = f" (try: {problem.hint})" if problem.hint else ""
        lines.append(f"\n  {f'{origin}: ' if origin else ''}key {dotted(problem.path)} {problem.text}{hint}")
    raise ConfigError(f"{len(problems)} keys of the configuration cannot be used{''.join(lines)}") from cause


def dotted(path: Sequence[str]) -> str:
    """``("generation", "stop", "[0]")`` as ``generation.stop[0]``."""
    return ".".join(path).replace(".[", "[")


def _problems(error: Exception, path: tuple[str, ...], owner: Any) -> Iterator[_Problem]:
    """Every leaf of cattrs' exception group, with its key's path. Unlike cattrs' own formatter it keeps our text."""
    if isinstance(error, ClassValidationError):
        named, whole = error.group_exceptions()
        for inner, note in named:
            yield from _problems(inner, (*path, note.name), note.type)
        for inner in whole:
            yield from _problems(inner, path, error.cl)
    elif isinstance(error, IterableValidationError):
        items, whole = error.group_exceptions()
        for inner, item in items:
            place = f"[{item.index}]" if isinstance(item.index, int) else item.index
            yield from _problems(inner, (*path, place), item.type)
        for inner in whole:
            yield from _problems(inner, path, owner)
    elif isinstance(error, ForbiddenExtraKeysError):
        known = _keys_of(error.cl)
        for key in sorted(error.extra_fields):
            takes = f"takes {', '.join(known)}" if known else "takes no options"
            yield _Problem((*path, key), f"is unknown.{did_you_mean(key, known)} {_table(path)} {takes}")
    elif isinstance(error, _Mismatch):
        yield _Problem(path, f"takes {error.takes}, got {_shown(error.got)}", error.hint)
    elif isinstance(error, FieldError):
        yield _Problem((*path, error.field), f"takes {error.takes}, got {_shown(error.got)}", error.facts.get("try"))
    elif isinstance(error, ConfigError):  # a class's own validator: its text says more than we could
        yield _Problem(path, f"cannot be used: {error}")
    elif isinstance(error, KeyError):
        yield _Problem(path, "is required and missing")
    else:  # attrs' own validators put the field and its settings behind the message
        text = str(error.args[0]) if error.args and isinstance(error.args[0], str) else str(error)
        yield _Problem(path, f"cannot be used: {text or type(error).__name__}")


def _keys_of(config_class: type) -> list[str]:
    if config_class is Choice:
        return ["name"]
    return (
        [field.name for field in attrs.fields(config_class) if field.name != "source"]
        if attrs.has(config_class)
        else list(getattr(config_class, "__dataclass_fields__", ()))
    )


def _table(path: tuple[str, ...]) -> str:
    return f"[{dotted(path)}]" if path else "The configuration"


def _shown(value: object) -> str:
    """A value as TOML would spell its kind: ``'4' (a string)``."""
    kinds: dict[type, str] = {str: "a string", bool: "a boolean", int: "an integer", float: "a number"}
    kinds |= {dict: "a table", list: "a list"}
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kinds.get(type(value), type(value).__name__)})"


@functools.cache
def _converter() -> cattrs.Converter:
    """Strict where cattrs is lenient: 2.9 is no int, true is no 1, "7" is no 7, and a string is no list."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    converter.register_structure_hook(bool, _primitive(bool, "true or false"))
    converter.register_structure_hook(int, _primitive(int, "an integer"))
    converter.register_structure_hook(str, _string)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(pathlib.Path, lambda value, _: pathlib.Path(_string(value, str)))
    lists: tuple[type, ...] = (list, tuple)
    for predicate, factory, kinds, takes in (
        (is_sequence, _sequence_factory, lists, "a list"),
        (is_mutable_sequence, list_structure_factory, lists, "a list"),
        (_is_fixed_tuple, _fixed_tuple_factory, lists, "a list"),
        (is_any_set, _set_factory, lists, "a list"),
        (is_mapping, mapping_structure_factory, (Mapping,), "a table"),
    ):
        converter.register_structure_hook_factory(
            predicate, functools.partial(_guarded, factory, kinds=kinds, takes=takes)
        )
    converter.register_structure_hook_factory(_is_record, _record_factory)
    converter.register_structure_hook_factory(_is_union, _union_factory)
    converter.register_structure_hook_factory(_is_literal, _literal_factory)
    converter.register_structure_hook(Choice, _structure_choice)
    return converter


def _primitive(kind: type, takes: str) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise _Mismatch(takes, value)
        return value

    return structure


def _string(value: Any, _: Any) -> str:
    if type(value) is not str:
        quoted = f'"{str(value).lower() if isinstance(value, bool) else value}"'
        raise _Mismatch("a string", value, None if isinstance(value, list | Mapping) else f"quotes around it: {quoted}")
    return value


def _number(value: Any, _: Any) -> float:
    """An int is taken for a number when nothing is lost: ``temperature = 1`` is what people write."""
    if type(value) is float and not math.isnan(value):
        return value
    if type(value) is int and abs(value) <= 2**53:
        return float(value)
    raise _Mismatch("a finite number" if type(value) is float else "a number", value)


def _guarded(
    factory: Callable[..., Callable[[Any, Any], Any]],
    kind: Any,
    converter: cattrs.Converter,
    *,
    kinds: tuple[type, ...],
    takes: str,
) -> Callable[[Any, Any], Any]:
    inner = factory(kind, converter)

    def structure(value: Any, wanted: Any) -> Any:
        if not isinstance(value, kinds):
            raise _Mismatch(takes, value)
        return inner(value, wanted)

    return structure


def _sequence_factory(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    if (get_origin(kind) or kind) is not tuple:
        return list_structure_factory(kind, converter)
    item = (get_args(kind) or (Any,))[0]
    inner = list_structure_factory(list[item], converter)  # type: ignore[valid-type]
    return lambda value, _: tuple(inner(value, list[item]))  # type: ignore[valid-type]


def _is_fixed_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple and get_args(kind)[-1:] != (...,)


def _fixed_tuple_factory(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    kinds = get_args(kind)

    def structure(value: Any, _: Any) -> Any:
        if len(value) != len(kinds):
            raise _Mismatch(f"a list of {len(kinds)}", value)
        return tuple(converter.structure(item, wanted) for item, wanted in zip(value, kinds, strict=True))

    return structure


def _set_factory(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    (item,) = get_args(kind) or (Any,)
    inner = list_structure_factory(list[item], converter)  # type: ignore[valid-type]
    build = frozenset if (get_origin(kind) or kind) is frozenset else set
    return lambda value, _: build(inner(value, list[item]))  # type: ignore[valid-type]


def _is_record(kind: Any) -> bool:
    return attrs.has(kind) or (isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"))


def _record_factory(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    hidden = {"source": cattrs.gen.override(omit=True)} if kind is TargetConfig else {}
    inner = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True, **hidden)  # type: ignore[arg-type]

    def structure(value: Any, wanted: Any) -> Any:
        if not isinstance(value, Mapping):
            keys = _keys_of(kind)
            raise _Mismatch("a table", value, f"{keys[0]} = ... inside the table" if keys else None)
        return inner(value, wanted)

    return structure


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _union_factory(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Members in their order; the first that takes the value wins. ``None`` stands for a key that is left out."""
    members = [member for member in get_args(kind) if member is not type(None)]
    optional = len(members) < len(get_args(kind))

    def structure(value: Any, _: Any) -> Any:
        if value is None and optional:
            return None
        if len(members) == 1:
            return converter.structure(value, members[0])
        takes: list[str] = []
        for member in members:
            try:
                return converter.structure(value, member)
            except _Mismatch as error:
                takes.append(error.takes)
            except (ClassValidationError, IterableValidationError):
                takes.append(getattr(member, "__name__", str(member)))
        raise _Mismatch(" or ".join(takes), value)

    return structure


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _literal_factory(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    choices = get_args(kind)

    def structure(value: Any, _: Any) -> Any:
        for choice in choices:
            if type(choice) is type(value) and choice == value:  # True == 1, and 1 is not what was offered
                return choice
        hint = nearest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else None
        raise _Mismatch(", ".join(map(repr, choices)), value, repr(hint) if hint else None)

    return structure


def _structure_choice(value: Any, _: Any) -> Choice:
    """A plugin table: ``name``, and the plugin's options flat beside it."""
    if not isinstance(value, Mapping):
        raise _Mismatch("a table", value, f'name = "{value}" inside the table' if isinstance(value, str) else None)
    options = dict(value)
    name = options.pop("name", None)
    if type(name) is not str or not name:
        raise FieldError(Choice("?"), "name", "the name of a plugin", name)
    return Choice(name, options)

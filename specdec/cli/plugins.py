"""``specdec plugins``: list what is registered, where it comes from, and what failed to load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import click

from specdec.checking import fields_of
from specdec.cli import output
from specdec.contract import BackendSpec, DrafterSpec, ModelSpec, Needs
from specdec.registry import KINDS, Entry, Kind, Origin, registry


@click.command()
@output.json_option
def plugins(as_json: bool) -> None:
    """List what is registered and what failed.

    Lists drafters, verifiers, depth policies, logits processors, backends, model families, observers and plugins that
    bring forward passes or commands, each with its distribution.
    """
    registered = registry()
    if as_json:
        output.print_json(
            {
                **{info.plural: [_entry(entry) for entry in registered.entries(kind)] for kind, info in KINDS.items()},
                "hooks": [
                    {"kind": word, **_named(plugin.name, plugin.origin), "module": plugin.origin.module}
                    for word, plugin in registered.hooks()
                ],
                "conflicts": [
                    {"kind": kind.value, "name": name, "origins": [str(claim.origin) for claim in claims]}
                    for kind, name, claims in registered.conflicts()
                ],
                "failures": [
                    {
                        **_named(failure.name, failure.origin),
                        "module": failure.origin.module,
                        "during": failure.during,
                        "error": failure.reason,
                    }
                    for failure in registered.failures
                ],
            }
        )
        return
    console = output.console()
    headings = ("kind", "name", "origin", "what it does (options)")
    rows = [_row(kind, number, entry) for kind in Kind for number, entry in enumerate(registered.entries(kind))]
    rows += [(word, plugin.name, str(plugin.origin), "") for word, plugin in registered.hooks()]
    console.print(output.table(headings, rows, left=headings))
    for kind, name, claims in registered.conflicts():
        console.print(f"conflict: {kind.value} {name}: {' and '.join(str(claim.origin) for claim in claims)}")
    for failure in registered.failures:
        output.lines(console, f"failed ({failure.during})", [str(failure)])


def _row(kind: Kind, number: int, entry: Entry) -> tuple[str, ...]:
    data = _entry(entry)
    note = "" if data.get("reason") is None else f" (cannot run here: {data['reason']})"
    options = {} if isinstance(entry.spec, ModelSpec) else _options(entry.spec.config, _as_written)
    listed = f" ({', '.join(f'{key}={value}' for key, value in options.items())})" if options else ""
    return "" if number else kind.value, data["name"], data["origin"], f"{data['help']}{note}{listed}"


def _entry(entry: Entry) -> dict[str, Any]:
    spec, origin = entry.spec, entry.origin
    data: dict[str, Any] = {**_named(spec.name, origin), "help": spec.help}
    if isinstance(spec, ModelSpec):
        return {**data, "model_types": list(spec.model_types)}
    data["options"] = _options(spec.config)
    if isinstance(spec, DrafterSpec):
        known = attrs.asdict(spec.needs) if isinstance(spec.needs, Needs) else {}  # a function depends on the options
        data["needs"] = [field for field, value in known.items() if value is True]
    if isinstance(spec, BackendSpec):
        data["reason"] = registry().unavailable(spec)
        data["available"] = data["reason"] is None
    return data


def _options(config: type, written: Callable[[object], str] = repr) -> dict[str, str]:
    """Option names with their defaults as text."""
    return {field.name: _default(field.default, written) for field in fields_of(config)}


def _default(value: object, written: Callable[[object], str]) -> str:
    if value is attrs.NOTHING:
        return "required"
    return "computed" if isinstance(value, attrs.Factory) else written(value)  # type: ignore[arg-type]


def _as_written(value: object) -> str:
    """A default as ``-s`` takes it, as far as there is such a form."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _named(name: str, origin: Origin) -> dict[str, Any]:
    return {"name": name, "origin": str(origin), "distribution": origin.distribution, "version": origin.version or None}

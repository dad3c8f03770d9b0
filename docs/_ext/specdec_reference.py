"""Reference pages that are made from the code: ``{specdec-cli}``, ``{specdec-plugins}``, ``{specdec-requests}`` and
``{specdec-modules}``.

They give Markdown, so that what a page shows can be tested without Sphinx.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import click
from module_map import modules_markdown

CHOSEN_BY = {
    "logits processor": "Chosen by the tables `[[generation.processors]]`, any number of them, in their order.",
    "model family": "Chosen by `model_type` in the checkpoint's `config.json`.",
}
"""For kinds that no single key names."""


def cli_markdown() -> str:
    """Every command of our own: what it does, its arguments and options."""
    from specdec.cli import main

    with click.Context(main, info_name="specdec") as ctx:
        lines = ["## specdec", "", _prose(main.help), "", *_options(main, ctx)]
        for name, command in sorted(main.commands.items()):
            with click.Context(command, parent=ctx, info_name=name) as inner:
                arguments = " ".join(p.make_metavar(inner) for p in command.params if isinstance(p, click.Argument))
                lines += ["", f"## specdec {name}", ""]
                lines += [f"`specdec {name} {arguments}`".replace(" `", "`"), ""]
                lines += [_prose(command.help), "", *_options(command, inner)]
                if isinstance(command, click.Group):
                    lines += [f"- `{sub}`: {_prose(one.help)}" for sub, one in sorted(command.commands.items())]
    return "\n".join(lines)


def _prose(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("\b\n", "").replace("<", "&lt;")


def _options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    yield from ("| option | |", "|---|---|")
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None and isinstance(parameter, click.Option):
            yield f"| `{_cell(record[0])}` | {_cell(record[1])} |"


def plugins_markdown() -> str:
    """Every built-in plugin: its name, what it does, its options with their defaults."""
    from specdec.cli.plugins import _options as options_of
    from specdec.contract import ModelSpec
    from specdec.registry import BUILT_INS, KINDS, Kind, Registry

    registry = Registry(BUILT_INS, entry_points=(), strict=True)
    lines: list[str] = []
    for kind in Kind:
        key = KINDS[kind].key
        lines += [f"## {kind.value}", "", f"Chosen by `{key}`." if key else CHOSEN_BY.get(kind.value, ""), ""]
        lines += ["| name | what it does | options |", "|---|---|---|"]
        for entry in registry.entries(kind):
            spec: Any = entry.spec
            if isinstance(spec, ModelSpec):
                options = "reads model_type " + ", ".join(f"`{word}`" for word in spec.model_types)
            else:
                options = ", ".join(f"`{key} = {_toml(value)}`" for key, value in options_of(spec.config).items())
            lines.append(f"| `{spec.name}` | {_cell(spec.help)} | {options or 'none'} |")
        lines.append("")
    return "\n".join(lines)


def requests_markdown() -> str:
    """The bounds of the server's request fields, as its models check them."""
    from specdec.serving.requests import ChatRequest, CompletionRequest

    lines = ["| field | takes |", "|---|---|"]
    fields = {name: field for kind in (ChatRequest, CompletionRequest) for name, field in _bounded(kind)}
    return "\n".join([*lines, *(f"| `{name}` | {_cell(takes)} |" for name, takes in fields.items())])


def _bounded(kind: Any) -> Iterator[tuple[str, str]]:
    """Fields with their bounds; of one that takes several types, the first type with bounds counts."""
    schema = kind.model_json_schema()
    for name, field in schema["properties"].items():
        for one in field.get("anyOf", [field]):
            if "$ref" in one:
                inner = schema["$defs"][one["$ref"].rpartition("/")[2]]["properties"]
                yield from ((f"{name}.{key}", _bounds(value)) for key, value in inner.items() if _bounds(value))
            elif _bounds(one):
                yield name, _bounds(one)


def _bounds(schema: Any) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    fewest, most = schema.get("minItems", 0), schema.get("maxItems")
    words = [f"{low:,} to {high:,}"] if high is not None else []
    if fewest or most:
        words.append(f"{fewest} to {most} items" if most else f"{fewest} or more items")
    words += [", ".join(f"`{word}`" for word in schema["enum"])] if "enum" in schema else []
    return "; ".join(words)


def _toml(default: str) -> str:
    """A default, given as Python spells it, as TOML does."""
    return _cell({"True": "true", "False": "false", "None": "(none)"}.get(default, default.replace("'", '"')))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def setup(app: Any) -> dict[str, bool]:
    """Register the directives."""
    from sphinx.util.docutils import SphinxDirective

    def directive(make: Any) -> type[SphinxDirective]:
        class Generated(SphinxDirective):
            def run(self) -> list[Any]:
                return self.parse_text_to_nodes(make(), allow_section_headings=True)

        return Generated

    app.add_directive("specdec-cli", directive(cli_markdown))
    app.add_directive("specdec-plugins", directive(plugins_markdown))
    app.add_directive("specdec-requests", directive(requests_markdown))
    app.add_directive("specdec-modules", directive(modules_markdown))
    return {"parallel_read_safe": True}

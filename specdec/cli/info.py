"""``specdec info MODEL``: what is in a checkpoint, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from specdec.cli import output


@click.command()
@click.argument("model", default="demo")
@output.json_option
def info(model: str, as_json: bool) -> None:
    """Show what is in a checkpoint.

    MODEL is a folder, a hub id, or "demo" (the default). Nothing is run.
    """
    import specdec

    told = specdec.inspect_checkpoint(model).to_dict()
    if as_json:
        output.print_json(told)
        return
    console = output.console()
    console.print(output.facts(_facts(told)))
    for label in ("missing", "misshaped", "unused", "problems"):
        for name in told.get(label, ()):
            console.print(f"{label}: {name}")


def _facts(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    parts, tied = told["parameters"], told["tied"]
    total = told.get("total_parameters", sum(parts.values()))
    return [
        ("path", told["path"]),
        ("family", f"{told['family']} (model_type {told['model_type']})"),
        ("size", amount(told["size_bytes"])),
        ("parameters", f"{total:,}: " + ", ".join(f"{part} {number:,}" for part, number in parts.items())),
        ("dtypes", ", ".join(f"{dtype} {number:,}" for dtype, number in told["dtypes"].items())),
        ("head", "shares the embedding's weights" if tied else "has its own weights"),
        ("MTP", told["mtp"]),
        ("state", f"{amount(told['state_bytes_per_token'])} per token, and {amount(told['fixed_state_bytes'])} fixed"),
        ("tensors", _audit(told)),
        ("config", ", ".join(f"{key}={_shown(value)}" for key, value in told["config"].items())),
    ]


def _audit(told: Mapping[str, Any]) -> str:
    found = [
        f"{len(told[label])} {label}" for label in ("missing", "misshaped", "unused", "problems") if told.get(label)
    ]
    return ", ".join(found) or "all that the family expects, and no other"


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def amount(size: int) -> str:
    """Bytes for people: ``3.2 MiB``."""
    number, unit = float(size), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{size} bytes" if unit == "bytes" else f"{number:.1f} {unit}"

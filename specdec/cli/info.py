"""``specdec info MODEL``: what is in a checkpoint, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from specdec.cli import output

if TYPE_CHECKING:
    from rich.table import Table

_FINDINGS = ("missing", "misshaped", "unused", "problems")
_NO_WEIGHTS = "no weights in this folder"
_LISTED = 20  # names under one label; --json has all


@click.command()
@click.argument("model", default="demo")
@output.json_option
def info(model: str, as_json: bool) -> None:
    """Show what is in a checkpoint.

    MODEL is a folder, a hub id, or "demo" (the default). Nothing is run. A folder with config.json and no weights is
    described from the config alone.
    """
    import specdec

    told = specdec.inspect_checkpoint(model).to_dict()
    if as_json:
        output.print_json(told)
        return
    console = output.console()
    console.print(output.facts(_facts(told)))
    if told["formats"]:
        console.print(_formats(told["formats"]))
    for label in _FINDINGS:
        for name in told[label][:_LISTED]:
            console.print(f"{_one(label)}: {name}")
        if len(told[label]) > _LISTED:
            console.print(f"{_one(label)}: {len(told[label]) - _LISTED} more, which --json lists")


def _facts(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("path", told["path"]), *(_of_family(told) if told["family"] else _of_no_family(told))]


def _of_no_family(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("family", f"none of specdec's reads model_type {told['model_type']!r}"),
        ("run by", told["taken_by"]),
        ("size", amount(told["size_bytes"]) if told["weights_present"] else _NO_WEIGHTS),
        *([("dtypes", _counts(told["dtypes"]))] if told["weights_present"] else []),
    ]


def _of_family(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    total, here = told["total_parameters"], told["weights_present"]
    return [
        ("family", f"{told['family']} (model_type {told['model_type']})"),
        ("size", amount(told["size_bytes"]) if here else f"{_NO_WEIGHTS}; what follows is from config.json"),
        ("parameters", f"{total:,}: {_parameters(told['parameters'])}"),
        *([("dtypes", _counts(told["dtypes"]))] if here else []),
        ("head", "shares the embedding's weights" if told["tied"] else "has its own weights"),
        ("MTP", told["mtp"]),
        ("state", f"{amount(told['state_bytes_per_token'])} per token, and {amount(told['fixed_state_bytes'])} fixed"),
        ("a decode step", _step(told["decode_step"])),
        *([("tensors", _audit(told))] if here else []),
        ("config", ", ".join(f"{key}={_shown(value)}" for key, value in told["config"].items())),
    ]


def _parameters(parts: Mapping[str, int]) -> str:
    """The parts of the total, then the MTP head, which it leaves out."""
    counted = _counts({part: number for part, number in parts.items() if part != "mtp"})
    return f"{counted}; and {parts['mtp']:,} in the MTP head" if "mtp" in parts else counted


def _counts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {number:,}" for part, number in parts.items())


def _step(step: Mapping[str, int]) -> str:
    reads = [f"reads {amount(step['weights'])} of weights at {step['width']} bytes each"]
    if step["stored"]:
        reads[0] += f" ({amount(step['stored'])} as stored)"
    if step["state"]:
        reads.append(f"{amount(step['state'])} of recurrent state read and written")
    reads.append(f"{amount(step['per_context_token'])} per token of context")
    if step["mtp_weights"]:
        reads.append(f"an MTP draft step reads {amount(step['mtp_weights'])}")
    return "; ".join(reads)


def _formats(rows: Sequence[Mapping[str, Any]]) -> Table:
    numbers = ("weights", "parameters", "stored")
    table = output.table("module", "format", *numbers, right=numbers)
    for row in rows:
        table.add_row(
            row["module"], row["format"], f"{row['weights']:,}", f"{row['parameters']:,}", amount(row["stored_bytes"])
        )
    return table


def _audit(told: Mapping[str, Any]) -> str:
    found = [
        f"{len(told[label])} {label if len(told[label]) > 1 else _one(label)}" for label in _FINDINGS if told[label]
    ]
    return ", ".join(found) or "all that the family expects, and no other"


def _one(label: str) -> str:
    return label.removesuffix("s")


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

"""``specdec info MODEL``: describe a checkpoint without running it."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

import click

from specdec.cli import output
from specdec.cli.options import FILE
from specdec.cli.output import amount

_FINDINGS = ("missing", "misshaped", "unused", "problems")
_NO_WEIGHTS = "no weights in this folder"
_LISTED = 20  # names under one label; --json has all


@click.command()
@click.argument("model", type=FILE, default="demo")
@click.option("--mtp", metavar="PATH", type=FILE, help="A file or folder with the MTP head, as for target.mtp.")
@output.json_option
def info(model: str, mtp: str | None, as_json: bool) -> None:
    """Show what is in a model's or a draft head's checkpoint.

    MODEL is a folder, a hub id, or "demo" (the default). The model is not run. Without weights, the description comes
    from config.json alone.
    """
    import specdec

    data = specdec.inspect_checkpoint(model, mtp=mtp).to_dict()
    if as_json:
        output.print_json(data)
        return
    console = output.console()
    if "kind" in data:
        console.print(output.facts(_of_head(data)))
        return
    console.print(output.facts([("path", data["path"]), *(_of_family if data["family"] else _of_no_family)(data)]))
    if data["formats"]:
        rows = [
            (row["module"], row["format"], f"{row['weights']:,}", f"{row['parameters']:,}", amount(row["stored_bytes"]))
            for row in data["formats"]
        ]
        headings = ("module", "format", "weights", "parameters", "stored")
        console.print(output.table(headings, rows, left=headings[:2]))
    for label in _FINDINGS:
        singular = label.removesuffix("s")
        output.lines(console, singular, data[label][:_LISTED])
        if len(data[label]) > _LISTED:
            console.print(f"{singular}: {len(data[label]) - _LISTED} more, which --json lists")


def _of_head(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    vocabulary = f"{data['draft_vocab']:,} tokens"
    if data["target_vocab"] not in (None, data["draft_vocab"]):
        vocabulary += f" of the target's {data['target_vocab']:,}"
    return [
        ("path", data["path"]),
        ("draft head", f"{data['kind']}, in the layout of {data['layout']}"),
        ("trained for", data["target"] or "a target that config.json does not name"),
        ("target", f"hidden size {data['target_hidden']}"),
        (
            "size",
            f"{amount(data['size_bytes'])}, {data['parameters']:,} parameters, {output.count(data['layers'], 'layer')}",
        ),
        ("vocabulary", vocabulary),
        ("embedding", "its own" if data["own_embedding"] else "the target's"),
        ("output head", "its own" if data["own_head"] else "the target's"),
        ("depth", "not stated" if data["depth"] is None else f"{data['depth']} tokens per draft"),
        *data["rules"].items(),
    ]


def _of_no_family(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("family", f"none of specdec's reads model_type {data['model_type']!r}"),
        ("run by", data["taken_by"]),
        ("size", amount(data["size_bytes"]) if data["weights_present"] else _NO_WEIGHTS),
        *([("dtypes", _counts(data["dtypes"]))] if data["weights_present"] else []),
    ]


def _of_family(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    total, here = data["total_parameters"], data["weights_present"]
    ignored = data["generation_config_ignored"]
    return [
        ("family", f"{data['family']} (model_type {data['model_type']})"),
        ("size", amount(data["size_bytes"]) if here else f"{_NO_WEIGHTS}; what follows is from config.json"),
        ("parameters", f"{total:,}: {_parameters(data['parameters'])}"),
        *([("dtypes", _counts(data["dtypes"]))] if here else []),
        ("head", "shares the embedding's weights" if data["tied"] else "has its own weights"),
        ("MTP", data["mtp"]),
        ("state", f"{amount(data['state_bytes_per_token'])} per token, and {amount(data['fixed_state_bytes'])} fixed"),
        ("a decode step", _step(data["decode_step"])),
        *([("tensors", _weight_check(data))] if here else []),
        ("config", ", ".join(_settings(data["config"]))),
        *([("not used", f"generation_config.json: {', '.join(_settings(ignored))}")] if ignored else []),
    ]


def _parameters(parts: Mapping[str, int]) -> str:
    """The parts of the total, then the MTP head, which the total excludes."""
    counted = _counts({part: number for part, number in parts.items() if part != "mtp"})
    return f"{counted}; and {parts['mtp']:,} in the MTP head" if "mtp" in parts else counted


def _counts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {number:,}" for part, number in parts.items())


def _step(step: Mapping[str, Any]) -> str:
    reads = [f"reads {amount(step['weights'])} of weights at {step['width']} bytes each"]
    if step["stored"]:
        reads[0] += f" ({amount(step['stored'])} as stored)"
    if step["rounded"]:
        sizes = (f"{amount(size)} with target.weights = {kind!r}" for kind, size in step["rounded"].items())
        reads.append(", ".join(sizes))
    if step["state"]:
        reads.append(f"{amount(step['state'])} of recurrent state read and written")
    reads.append(f"{amount(step['per_context_token'])} per token of context")
    if step["mtp_weights"]:
        reads.append(f"an MTP draft step reads {amount(step['mtp_weights'])}")
    return "; ".join(reads)


def _weight_check(data: Mapping[str, Any]) -> str:
    counts = [f"{n} {label if n > 1 else label.removesuffix('s')}" for label in _FINDINGS if (n := len(data[label]))]
    return ", ".join(counts) or "all that the family expects, and no other"


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """``key value`` pairs; nested keys are joined by dots."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} {_words(value)}"


def _words(value: Any) -> str:
    """A value as people write it: yes, no, none, how often each word of a list, the ends of a list of numbers."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, list | tuple):
        return str(value) or "none"
    if len(value) > 4 and all(isinstance(number, int | float) for number in value):
        return f"{len(value)} numbers from {value[0]:g} to {value[-1]:g}"
    counted = collections.Counter(map(_words, value))
    return " + ".join(word if count == 1 else f"{count} x {word}" for word, count in counted.items()) or "none"

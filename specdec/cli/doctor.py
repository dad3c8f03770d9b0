"""``specdec doctor [MODEL]``: report what this machine can guarantee."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import click

from specdec.cli import output
from specdec.cli.options import FILE, integer, refuse, settings_option
from specdec.cli.output import amount
from specdec.config import Override, RunConfig, load_config
from specdec.errors import ConfigError
from specdec.records.store import weights_folder

SHOWN_FACTS = ("family", "fingerprint", "backend", "device", "dtype", "kernels", "weights", "max_rows")


@click.command()
@click.argument("model", type=FILE, required=False)
@settings_option("target.backend=metal", help="Override a key of [target]")
@integer("--context", "Also compare after N tokens: kernels may depend on length")
@click.option("--clear-weights", is_flag=True, help="First delete the rounded weights that loads have kept.")
@output.json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    model: str | None,
    settings: tuple[str, ...],
    context: int | None,
    clear_weights: bool,
    as_json: bool,
) -> None:
    """Report what this machine can guarantee.

    Without MODEL: versions, compiler, which backends can run and why others cannot, what "auto" selects, failed
    plugins, memory, the cache folder.

    With MODEL (a folder, a hub id or "demo"), loads and probes it. Bits: runs the comparison of every load with more
    rows and contexts: blocks of 2 or more rows, through each kind of layer and whole passes, against the same rows one
    by one. The verdict is "exact" only if the backend promises equal bits and no comparison differs.

    The exit status is 1 if a backend that promises equal bits gave different ones.
    """
    if model is None:
        refuse(("settings", "context"), "it needs a MODEL, such as demo.")
    config = None if model is None else _config(model, settings)

    if clear_weights:
        _clear_weights()

    from specdec.doctor import examine_machine

    with output.status("inspecting this machine"):
        machine = examine_machine()
    examined = None if config is None else _examine(config, context)
    if as_json:
        output.print_json({"machine": machine, "model": examined})
    elif examined is not None:
        _show_model(examined)
    else:
        _show_machine(machine)
    if examined is not None and examined["promise"]["broken"]:
        ctx.exit(output.BROKEN_PROMISE)


def _clear_weights() -> None:
    folder = weights_folder()
    with output.os_errors("the kept weights cannot be deleted", folder=folder), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _config(model: str, settings: tuple[str, ...]) -> RunConfig:
    overrides = list(map(Override.parse, settings))
    for override in overrides:
        if override.path[0] != "target":
            raise ConfigError(
                f"specdec doctor loads a target only, so {'.'.join(override.path)} has no effect",
                asked_for_by=override.source,
                try_="-s target.backend=..., -s target.dtype=...",
            )
        if override.path == ("target", "model"):
            raise ConfigError(f"MODEL says {model!r} already", asked_for_by=override.source, try_="one model, as MODEL")
    return load_config(None, [*overrides, Override(("target", "model"), model, "MODEL")])


# --- without a model -------------------------------------------------------------------------------------------------


def _show_machine(machine: Mapping[str, Any]) -> None:
    console = output.console()
    console.print(output.facts(_machine_facts(machine)))
    headings = ("backend", "runs", "about", "origin")
    rows = [
        (one["name"], "yes" if one["available"] else "no", one["reason"] or one["help"], one["origin"])
        for one in machine["backends"]
    ]
    console.print(output.table(headings, rows, left=headings))
    output.lines(console, "plugin failed", machine["failures"])


def _machine_facts(machine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    memory, stream = machine["memory"], machine["stream_bandwidth"]
    yield "specdec", f"{machine['specdec']}, python {machine['python']}"
    libraries = machine["libraries"].items()
    yield "libraries", ", ".join(f"{name} {version or 'not installed'}" for name, version in libraries)
    yield "machine", f"{machine['processor']}, {output.count(machine['cores'], 'core')}, {machine['system']}"
    yield "memory", f"{amount(memory['free'])} free of {amount(memory['total'])}"
    if memory["device"]:
        yield "device", f"{memory['device']}, {amount(memory['device_free'])} free of {amount(memory['device_total'])}"
    yield "threads", str(machine["threads"])
    yield "compiler", machine["compiler"]
    yield "CPU kernels", machine["kernels"]
    yield "instruction sets", ", ".join(machine["instruction_sets"])
    if stream and (product := machine["product_bandwidth"]):
        read = f"{stream / 1e9:.0f} GB/s read, {product / 1e9:.0f} GB/s in products"
        yield "memory speed", f"{read} ({product / stream:.2f})"
    reason = f" ({machine['auto_reason']})" if machine["auto_reason"] else ""
    yield "auto", f"{machine['auto'] or 'none'}{reason}"
    yield "plugins", output.count(len(machine["failures"]), "failure") if machine["failures"] else "none failed"
    problem = f" ({machine['cache_problem']})" if machine["cache_problem"] else ""
    yield "cache", f"{machine['cache_folder'] or 'none'}, {amount(machine['cache_bytes'])}{problem}"


# --- with a model ----------------------------------------------------------------------------------------------------


def _examine(config: RunConfig, context: int | None) -> dict[str, Any]:
    """Load the model and compare bits: the object under ``model`` of ``doctor --json``."""
    from specdec.doctor import probe_bits, promise
    from specdec.models.loading import load_target

    with output.status(f"loading {config.target.model}"):
        loaded = load_target(config)
    target, info = loaded.target, loaded.target.info
    if context is not None and context + info.max_rows > info.max_positions:
        raise ConfigError(
            f"--context {context} leaves no room: the model takes {info.max_positions} tokens",
            try_=f"--context {max(1, info.max_positions - info.max_rows)}",
        )
    with output.status("comparing bits"):
        findings = probe_bits(target, context)
    return {
        "model": config.target.model,
        **{name: getattr(info, name) for name in SHOWN_FACTS},
        "parity_at_load": info.parity.value,
        "parity_reason": info.parity_reason,
        "notices": list(loaded.notices),
        "findings": [
            {**attrs.asdict(finding), "equal": finding.equal, "blocks": finding.blocks()} for finding in findings
        ],
        "promise": promise(target, findings),
    }


def _show_model(model: Mapping[str, Any]) -> None:
    console, promise = output.console(), model["promise"]
    rows = [
        ("model", f"{model['model']} ({model['family']}, fingerprint {model['fingerprint'][:12] or 'unknown'})"),
        ("runs on", f"{model['backend']}: {model['device']}, {model['dtype']}, up to {model['max_rows']} rows"),
        ("kernels", model["kernels"]),
        *([("weights", model["weights"])] if model["weights"] else []),
        *(("notice", notice) for notice in model["notices"]),
    ]
    console.print(output.facts(rows))
    headings = ("bits", "rows", "off by", "compared")
    console.print(output.table(headings, map(_bits, model["findings"]), left=("bits", "rows", "compared")))
    console.print()
    console.print(output.facts([("promise", f"{'exact' if promise['exact'] else 'numeric'}: {promise['reason']}")]))


def _bits(finding: Mapping[str, Any]) -> tuple[str, ...]:
    if finding["equal"]:
        return "equal", f"2 to {finding['rows']}", "", finding["subject"]
    row = "" if finding["first_row"] is None else f", first in row {finding['first_row']}"
    off = "not finite" if finding["difference"] is None else f"{finding['difference']:.2g}"
    return "differ", finding["blocks"], off, f"{finding['subject']}{row}"

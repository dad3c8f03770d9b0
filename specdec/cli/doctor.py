"""``specdec doctor [MODEL]``: report what this machine can guarantee."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec.cli import output
from specdec.cli.options import FILE, integer, settings_option
from specdec.cli.output import amount
from specdec.config import Override, RunConfig, load_config
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from specdec.contract import ModelInfo
    from specdec.doctor import MachineReport, Promise
    from specdec.records.bits import Finding

SHOWN_FACTS = ("family", "fingerprint", "backend", "device", "dtype", "kernels", "max_rows")


@click.command()
@click.argument("model", type=FILE, required=False)
@settings_option("target.backend=metal", help="Override a key of [target]")
@integer("--context", "Also compare after N tokens: kernels may depend on length")
@output.json_option
@click.pass_context
def doctor(
    ctx: click.Context, model: str | None, settings: tuple[str, ...], context: int | None, as_json: bool
) -> None:
    """Report what this machine can guarantee.

    Without MODEL: versions, compiler, which backends can run and why others cannot, what "auto" selects, failed
    plugins, memory, the cache folder.

    With MODEL (a folder, a hub id or "demo"), loads and probes it. Bits: runs the comparison of every load with more
    rows and contexts: blocks of 2 or more rows, through each kind of layer and whole passes, against the same rows one
    by one. The verdict is "exact" only if the backend promises equal bits and no comparison differs.

    The exit status is 1 if a backend that promises equal bits gave different ones.
    """
    options = {"-s": bool(settings), "--context": context is not None}
    if model is None and (unused := [name for name, given in options.items() if given]):
        need = "needs" if len(unused) == 1 else "need"
        raise click.UsageError(f"{' and '.join(unused)} {need} a MODEL: specdec doctor demo {unused[0]} ...")
    config = None if model is None else _config(model, settings)

    from specdec.doctor import examine_machine

    with output.status("inspecting this machine"):
        machine = examine_machine()
    examined = None if config is None else _examine(config, context)
    if as_json:
        output.print_json({"machine": machine.to_dict(), "model": None if examined is None else examined.to_dict()})
    elif examined is not None:
        examined.show()
    else:
        _show_machine(machine)
    if examined is not None and examined.promise.broken:
        ctx.exit(output.BROKEN_PROMISE)


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
            raise ConfigError(f"MODEL says {model!r} already", asked_for_by=override.source)
    return load_config(None, [*overrides, Override(("target", "model"), model, "MODEL")])


# --- without a model -------------------------------------------------------------------------------------------------


def _show_machine(machine: MachineReport) -> None:
    console = output.console()
    console.print(output.facts(_machine_facts(machine)))
    headings = ("backend", "runs", "about", "origin")
    rows = [
        (backend.name, "yes" if backend.available else "no", backend.reason or backend.help, backend.origin)
        for backend in machine.backends
    ]
    console.print(output.table(headings, rows, left=headings))
    output.lines(console, "plugin failed", map(str, machine.failures))


def _machine_facts(machine: MachineReport) -> Iterator[tuple[str, str]]:
    memory = machine.memory
    yield "specdec", f"{machine.specdec}, python {machine.python}"
    yield "libraries", ", ".join(f"{name} {version or 'not installed'}" for name, version in machine.libraries.items())
    yield "machine", f"{machine.processor}, {output.count(machine.cores, 'core')}, {machine.system}"
    yield "memory", f"{amount(memory.free)} free of {amount(memory.total)}"
    if memory.device:
        yield "device", f"{memory.device}, {amount(memory.device_free)} free of {amount(memory.device_total)}"
    yield "threads", str(machine.threads)
    yield "compiler", machine.compiler
    yield "CPU kernels", machine.kernels
    yield "instruction sets", ", ".join(machine.instruction_sets)
    if machine.stream_bandwidth and machine.product_bandwidth:
        share = machine.product_bandwidth / machine.stream_bandwidth
        read = f"{machine.stream_bandwidth / 1e9:.0f} GB/s read"
        yield "memory speed", f"{read}, {machine.product_bandwidth / 1e9:.0f} GB/s in products ({share:.2f})"
    yield "auto", f"{machine.auto or 'none'}{f' ({machine.auto_reason})' if machine.auto_reason else ''}"
    yield "plugins", output.count(len(machine.failures), "failure") if machine.failures else "none failed"
    problem = f" ({machine.cache_problem})" if machine.cache_problem else ""
    yield "cache", f"{machine.cache_folder or 'none'}, {amount(machine.cache_bytes)}{problem}"


# --- with a model ----------------------------------------------------------------------------------------------------


def _examine(config: RunConfig, context: int | None) -> _Examined:
    """Load the model and compare bits."""
    from specdec.doctor import probe_bits, promise
    from specdec.models.loading import load_target

    with output.status(f"loading {config.target.model}"):
        loaded = load_target(config)
    target = loaded.target
    if context is not None and context + target.info.max_rows > target.info.max_positions:
        raise ConfigError(
            f"--context {context} leaves no room: the model takes {target.info.max_positions} tokens",
            try_=f"--context {max(1, target.info.max_positions - target.info.max_rows)}",
        )
    with output.status("comparing bits"):
        findings = probe_bits(target, context)
    return _Examined(
        model=config.target.model,
        info=target.info,
        findings=findings,
        promise=promise(target, findings),
        notices=tuple(loaded.notices),
    )


@attrs.frozen(kw_only=True)
class _Examined:
    """The result of a model's probe."""

    model: str
    info: ModelInfo
    findings: list[Finding]
    promise: Promise
    notices: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The object under ``model`` of ``doctor --json``."""
        info = self.info
        return {
            "model": self.model,
            **{name: getattr(info, name) for name in SHOWN_FACTS},
            "parity_at_load": info.parity.value,
            "parity_reason": info.parity_reason,
            "notices": list(self.notices),
            "findings": [{**attrs.asdict(finding), "equal": finding.equal} for finding in self.findings],
            "promise": {**attrs.asdict(self.promise), "broken": self.promise.broken},
        }

    def show(self) -> None:
        """Tables on stdout."""
        console, info, promise = output.console(), self.info, self.promise
        rows = [
            ("model", f"{self.model} ({info.family}, fingerprint {info.fingerprint[:12] or 'unknown'})"),
            ("runs on", f"{info.backend}: {info.device}, {info.dtype}, up to {info.max_rows} rows"),
            ("kernels", info.kernels),
            *([("weights", info.weights)] if info.weights else []),
            *(("notice", notice) for notice in self.notices),
        ]
        console.print(output.facts(rows))
        headings = ("bits", "rows", "off by", "compared")
        console.print(output.table(headings, _bits(self.findings), left=("bits", "rows", "compared")))
        console.print()
        rows = [("promise", f"{'exact' if promise.exact else 'numeric'}: {promise.reason}")]
        console.print(output.facts(rows))


def _bits(findings: list[Finding]) -> Iterator[tuple[str, ...]]:
    for finding in findings:
        if finding.equal:
            yield "equal", f"2 to {finding.rows}", "", finding.subject
            continue
        row = "" if finding.first_row is None else f", first in row {finding.first_row}"
        off = "not finite" if finding.difference is None else f"{finding.difference:.2g}"
        yield "differ", finding.blocks(), off, f"{finding.subject}{row}"

"""``specdec doctor [MODEL]``: what this machine can promise."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

import attrs
import click

from specdec.cli import output
from specdec.cli.info import amount
from specdec.cli.measuring import BROKEN_PROMISE
from specdec.config import Override, RunConfig, load_config
from specdec.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from rich.table import Table

    from specdec.contract import ModelInfo
    from specdec.doctor import MachineReport, Promise, RowCosts
    from specdec.records.probes import ProbeRecord

SHOWN_ACCEPTANCES = ("0.6", "0.7", "0.8", "0.9")  # columns of expected speed-ups; --json has all


@click.command()
@click.argument("model", required=False)
@click.option(
    "-s",
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of [target]: target.backend=metal.",
)
@click.option(
    "--context", type=click.IntRange(1), metavar="N", help="Compare after N tokens too: kernels may change with length."
)
@click.option("--no-store", is_flag=True, help="Keep no record of the probe.")
@output.json_option
@click.pass_context
def doctor(
    ctx: click.Context, model: str | None, settings: tuple[str, ...], context: int | None, no_store: bool, as_json: bool
) -> None:
    """Say what this machine can promise.

    Without MODEL: versions, compiler, which backends can run and why others cannot, what "auto" takes, plugins that
    failed, memory, the cache folder.

    With MODEL (a folder, a hub id or "demo") it is loaded and probed. Bits: every operation with the model's own
    weights, and whole passes, blocks of 2 rows and more against the same rows one by one, results and states. Costs: a
    pass of so many rows against one row, and what acceptance a depth must earn. The verdict is "exact" only where the
    backend promises equal bits and no comparison found others. The record is stored; a backend that promises bits only
    where a probe has shown them asks for it at every load.

    The exit status is 1 when a backend that promises equal bits without a probe gave others, 2 when the record cannot
    be stored.
    """
    if model is None:
        _refuse_without_model(settings, context, no_store=no_store)
    config = None if model is None else _config(model, settings)

    from specdec.doctor import examine_machine

    with output.status("looking around"):
        machine = examine_machine()
    if config is None:
        if as_json:
            output.print_json({"machine": machine.to_dict(), "model": None})
        else:
            _show_machine(machine)
        return

    from specdec.doctor import make_record, measure_row_costs, probe_bits, promise
    from specdec.doctor.operations import CONTEXTS
    from specdec.models.loading import load_target
    from specdec.records.probes import PROBES, write_probe

    with output.status(f"loading {config.target.model}"):
        loaded = load_target(config)
    target = loaded.target
    if context is not None and context + target.info.max_rows > target.info.max_positions:
        raise ConfigError(
            f"--context {context} leaves no room: the model takes {target.info.max_positions} tokens",
            try_=f"--context {max(1, target.info.max_positions - target.info.max_rows)}",
        )
    with output.status("comparing bits"):
        findings, notes = probe_bits(target, CONTEXTS if context is None else (*CONTEXTS, context))
    with output.status("timing passes"):
        costs = measure_row_costs(target)
    record = make_record(target, findings, notes, costs)
    verdict = promise(target, record, costs)
    folder = PROBES.folder()
    path, not_stored, unwritable = None, "", None
    if no_store:
        not_stored = "--no-store"
    elif folder is None:
        not_stored = f"{PROBES.switch}=off"
    elif not target.info.fingerprint:
        not_stored = "the target has no fingerprint, so the record would fit any other"
    else:
        try:
            path = write_probe(record, folder)
        except UnsupportedError as error:  # said at the end: what took minutes to find out is shown first
            unwritable, not_stored = error, error.message
    if as_json:
        output.print_json(
            {
                "machine": machine.to_dict(),
                "model": _told(config, target.info, record, costs, verdict, loaded.notices, path, not_stored),
            }
        )
    else:
        _show_model(config, target.info, record, costs, verdict, loaded.notices, path, not_stored)
    if unwritable is not None:
        raise unwritable
    if verdict.broken:
        ctx.exit(BROKEN_PROMISE)


def _refuse_without_model(settings: tuple[str, ...], context: int | None, *, no_store: bool) -> None:
    given = {"-s": bool(settings), "--context": context is not None, "--no-store": no_store}
    unused = [name for name, there in given.items() if there]
    if unused:
        need = "needs" if len(unused) == 1 else "need"
        raise click.UsageError(f"{' and '.join(unused)} {need} a MODEL: specdec doctor demo {unused[0]} ...")


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
    table = output.table("backend", "runs", "about", "origin")
    for backend in machine.backends:
        table.add_row(
            backend.name, "yes" if backend.available else "no", backend.reason or backend.help, backend.origin
        )
    console.print(table)
    for failure in machine.failures:
        console.print(f"plugin failed: {failure}")


def _machine_facts(machine: MachineReport) -> list[tuple[str, str]]:
    libraries = ", ".join(f"{name} {version or 'not installed'}" for name, version in machine.libraries.items())
    memory = machine.memory
    return [
        ("specdec", f"{machine.specdec}, python {machine.python}"),
        ("libraries", libraries),
        ("machine", f"{machine.processor}, {output.count(machine.cores, 'core')}, {machine.system}"),
        ("memory", f"{_bytes(memory.free)} free of {_bytes(memory.total)}"),
        *(
            [("device", f"{memory.device}, {_bytes(memory.device_free)} free of {_bytes(memory.device_total)}")]
            if memory.device
            else []
        ),
        ("threads", str(machine.threads)),
        ("compiler", machine.compiler),
        ("CPU kernels", machine.kernels),
        ("auto", f"{machine.auto or 'none'}{_because(machine.auto_reason)}"),
        ("plugins", output.count(len(machine.failures), "failure") if machine.failures else "none failed"),
        ("cache", _cache(machine)),
    ]


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else amount(size)


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _cache(machine: MachineReport) -> str:
    told = f"{machine.cache_folder}, {amount(machine.cache_bytes)}{_because(machine.cache_problem)}"
    own = str(pathlib.Path(machine.cache_folder) / "probes")
    return told if machine.probe_folder == own else f"{told}; probes: {machine.probe_folder or 'not kept'}"


# --- with a model ----------------------------------------------------------------------------------------------------


def _told(
    config: RunConfig,
    info: ModelInfo,
    record: ProbeRecord,
    costs: RowCosts,
    verdict: Promise,
    notices: tuple[str, ...],
    path: pathlib.Path | None,
    not_stored: str,
) -> dict[str, Any]:
    return {
        "model": config.target.model,
        "family": info.family,
        **attrs.asdict(record.identity),
        "parity_at_load": info.parity.value,
        "parity_reason": info.parity_reason,
        "notices": list(notices),
        "probed": record.probed,
        "findings": [{**attrs.asdict(finding), "equal": finding.equal} for finding in record.findings],
        "notes": list(record.notes),
        "costs": {
            "rows": [attrs.asdict(row) for row in costs.rows],
            "draft_step": costs.draft_step,
            "context": costs.context,
            "repeats": costs.repeats,
            "steady": costs.steady,
            "depths": [attrs.asdict(price) for price in costs.depths()],
        },
        "promise": {**attrs.asdict(verdict), "broken": verdict.broken},
        "stored": None if path is None else str(path),
        "not_stored": not_stored or None,
    }


def _show_model(
    config: RunConfig,
    info: ModelInfo,
    record: ProbeRecord,
    costs: RowCosts,
    verdict: Promise,
    notices: tuple[str, ...],
    path: pathlib.Path | None,
    not_stored: str,
) -> None:
    console = output.console()
    console.print(
        output.facts(
            [
                ("model", f"{config.target.model} ({info.family}, fingerprint {info.fingerprint[:12] or 'unknown'})"),
                ("runs on", f"{info.backend}: {info.device}, {info.dtype}, up to {info.max_rows} rows"),
                ("kernels", info.kernels),
                *(("notice", notice) for notice in notices),
            ]
        )
    )
    console.print(_bits_table(record))
    for note in record.notes:
        console.print(f"not compared: {note}")
    console.print(_costs_table(costs))
    console.print(_costs_line(costs))
    console.print()
    console.print(
        output.facts(
            [
                ("promise", f"{'exact' if verdict.exact else 'numeric'}: {verdict.reason}"),
                *([("needs", _needs(verdict, path))] if verdict.needs_probe else []),
                ("depth", f"{verdict.depth}: {verdict.depth_reason}"),
                ("record", str(path) if path is not None else f"not stored ({not_stored})"),
            ]
        )
    )


def _needs(verdict: Promise, path: pathlib.Path | None) -> str:
    if not verdict.exact:
        return "this backend is exact only where a probe has shown it; loads stay numeric here"
    kept = "loads from now on are exact here" if path is not None else "loads stay numeric until a record is stored"
    return f"this backend is exact only where a stored probe has shown it; {kept}"


def _bits_table(record: ProbeRecord) -> Table:
    table = output.table("bits", "rows", "off by", "compared", right=["off by"])
    for finding in record.findings:
        if finding.equal:
            table.add_row("equal", f"2 to {finding.rows}", "", finding.subject)
            continue
        row = "" if finding.first_row is None else f", first in row {finding.first_row}"
        where = f" ({finding.where})" if finding.where else ""
        off = "not finite" if finding.difference is None else f"{finding.difference:.2g}"
        table.add_row("differ", finding.blocks(), off, f"{finding.subject}{where}{row}")
    return table


def _costs_table(costs: RowCosts) -> Table:
    columns = [f"at {float(acceptance):.0%}" for acceptance in SHOWN_ACCEPTANCES]
    headings = ("rows", "ms", "r(M)", "depth", "cycle", "break-even", *columns)
    table = output.table(*headings, right=headings)
    prices = {price.depth: price for price in costs.depths()}
    for row in costs.rows:
        cells = [str(row.rows), f"{row.seconds * 1e3:.2f}", f"{row.ratio:.2f}"]
        price = prices.get(row.rows - 1)
        if price is not None:
            even = "never" if price.break_even is None else f"{price.break_even:.0%}"
            cells += [str(price.depth), f"{price.cost:.2f}", even]
            cells += [f"{price.speedups[acceptance]:.2f}x" for acceptance in SHOWN_ACCEPTANCES]
        table.add_row(*cells)
    return table


def _costs_line(costs: RowCosts) -> str:
    step = "no MTP head: drafts are counted as free"
    if costs.draft_step is not None:
        share = costs.draft_step / costs.rows[0].seconds
        step = f"a step of the MTP head takes {costs.draft_step * 1e3:.2f} ms, {share:.2f} of a plain step"
    busy = (
        "" if costs.steady else "The times of one row differ by more than a quarter: measure again on an idle machine. "
    )
    measured = f"Medians of {output.count(costs.repeats, 'repeat')} after {output.count(costs.context, 'token')}"
    return (
        f"{busy}{measured}; {step}. "
        "Cycle: drafts and their pass in plain steps. Break-even: the share of drafts accepted, of those reached, from "
        "which the depth pays; behind it the expected speed-up at some shares. specdec accept measures the share."
    )

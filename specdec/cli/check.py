"""``specdec check NAME``: run the conformance kit from the shell."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from specdec.cli import output
from specdec.cli.options import NAME, integer, settings_option
from specdec.config import Override
from specdec.errors import ConfigError, cut, import_extra

if TYPE_CHECKING:
    from specdec.testing import Report


@click.command()
@click.argument("name", type=NAME)
@settings_option("block=true", help="An option of the plugin")
@integer("--seed", "Seed of the drawn cases", 0, low=0, high=2**63 - 1)
@click.option(
    "--effort",
    type=click.Choice(["sample", "quick", "full"]),
    default="quick",
    show_default=True,
    help="How long to look: at most 5 s, 30 s or 10 minutes of one core.",
)
@click.option("--only", multiple=True, metavar="ID", help="Run only this check; may be repeated.")
@output.json_option
@click.pass_context
def check(
    context: click.Context,
    name: str,
    settings: tuple[str, ...],
    seed: int,
    effort: str,
    only: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check that a plugin conforms, or show the smallest failing case.

    NAME is a drafter, verifier, depth policy, logits processor, backend, model family, observer, a plugin's
    distribution, or a target of another engine (target.backend). With a checkpoint, a model family is checked as a
    target: specdec check gpt2 -s model=FOLDER.

    Exit status: 0 if every clause of the contract holds, 1 if one does not, 2 if there is no such plugin.
    """
    import_extra("hypothesis", "testing")
    from specdec.testing import check_plugin

    how: dict[str, Any] = {"seed": seed, "effort": effort, "only": only or None}
    options = _options(settings)
    asked = [*(f"-s {shlex.quote(text)}" for text in settings), f"--seed {seed}", f"--effort {effort}"]
    how["replay"] = " ".join(["specdec check", name, *asked])
    with output.status(f"checking {name}") as show:
        report = check_plugin(name, options=options, progress=show, **how)
    if as_json:
        output.print_json(report.to_dict())
    else:
        _show(report)
    context.exit(0 if report.ok else 1)


def _options(settings: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in settings:
        override = Override.parse(text)
        if len(override.path) != 1:
            raise ConfigError(f"an option of the plugin has no dots, got {text!r}", try_="-s max_order=3")
        options[override.path[0]] = override.value
    return options


SHOWN = 3  # failures in full; all output fits two screens
LINES = 36  # clauses in the table; of more, those that passed are only counted


def _show(report: Report) -> None:
    from specdec.testing import CONTRACT, Status

    console = output.console()
    outcomes = list(report.outcomes)
    if len(outcomes) > LINES:
        passed = sum(one.status is Status.PASSED for one in outcomes)
        outcomes = [one for one in outcomes if one.status is not Status.PASSED][:LINES]
        console.print(f"{output.count(passed, 'check')} passed")
    rows = [
        (one.check.id, one.check.sentence.replace("``", ""), one.status.value, f"{one.seconds:.1f}") for one in outcomes
    ]
    headings = ("clause", "what must hold", "status", "seconds")
    console.print(output.table(headings, rows, left=headings[:3]))
    failed = report.failures
    for number, outcome in enumerate(failed):
        if number < SHOWN:
            console.print(f"\n{outcome.detail}")
        elif number < LINES:
            console.print(f"{outcome.check.id} {outcome.status.value}: --only {outcome.check.id} shows its case")
    others = [(one.check.id, one.status.value, one.detail) for one in report.outcomes if one.detail]
    shown = [f"{id_} {status}: {detail}" for id_, status, detail in others if id_ not in {o.check.id for o in failed}]
    for line in [*shown, *report.notes][:LINES]:
        console.print(cut(line, 230))
    ids = ", ".join(dict.fromkeys(one.check.id for one in report.failures))
    verdict = f"fails {ids}" if ids else "passes"
    console.print(f"\n{report.name} {verdict} (contract {CONTRACT}, seed {report.seed})")

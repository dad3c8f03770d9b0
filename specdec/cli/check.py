"""``specdec check NAME``: run the conformance kit from the shell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from specdec.cli import output
from specdec.cli.options import settings_option
from specdec.config import Override
from specdec.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from specdec.testing import Report


@click.command()
@click.argument("name")
@settings_option("block=true", help="An option of the plugin")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the drawn cases.")
@click.option("--effort", type=click.FloatRange(0.01, 1000), default=1.0, help="Factor on the number of cases.")
@click.option("--only", multiple=True, metavar="ID", help="Run only this check; may be repeated.")
@click.option("--contract", metavar="DATE", default=None, help="The contract version that the plugin claims.")
@output.json_option
@click.pass_context
def check(
    context: click.Context,
    name: str,
    settings: tuple[str, ...],
    seed: int,
    effort: float,
    only: tuple[str, ...],
    contract: str | None,
    as_json: bool,
) -> None:
    """Check that a plugin conforms, or show the smallest failing case.

    NAME is a drafter, verifier, depth policy or backend, or a plugin's distribution. Exit status: 0 if every clause of
    the contract holds, 1 if one does not, 2 if there is no such plugin.
    """
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "the conformance kit needs hypothesis", try_="pip install 'specdec-framework[testing]'"
        ) from error
    from specdec.testing import CONTRACT, check_plugin

    how: dict[str, Any] = {"seed": seed, "effort": effort, "only": only or None, "contract": contract or CONTRACT}
    options = _options(settings)
    how["replay"] = " ".join(["specdec check", name, *(f"-s {text}" for text in settings), f"--seed {seed}"])
    with output.status(f"checking {name}"):
        report = check_plugin(name, options=options, **how)
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


def _show(report: Report) -> None:
    from specdec.testing import Status

    console = output.console()
    rows = [
        (one.check.id, one.check.sentence.replace("``", ""), one.status.value, f"{one.seconds:.1f}")
        for one in report.outcomes
    ]
    headings = ("clause", "", "status", "seconds")
    console.print(output.table(headings, rows, left=headings[:3]))
    for outcome in report.outcomes:
        if outcome.failure is not None and outcome.status is not Status.KNOWN:
            console.print(f"\n{outcome.detail}")
        elif outcome.detail:
            console.print(f"{outcome.check.id} {outcome.status.value}: {outcome.detail}")
    for note in report.notes:
        console.print(note)
    failed = [outcome.check.id for outcome in report.failures]
    verdict = f"fails {', '.join(failed)}" if failed else "passes"
    console.print(f"\n{report.name} {verdict} (contract {report.contract}, seed {report.seed})")

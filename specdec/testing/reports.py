"""Run checks and report their outcomes."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter, process_time
from typing import Any

import attrs
import numpy as np

from specdec.checking import checked
from specdec.config import structure_options
from specdec.errors import ConfigError, SpecdecError, cut, shown
from specdec.testing.checks import CONTRACT, EFFORTS, Broken, Check, EffortName, NotApplicable, Run, Seed
from specdec.testing.clauses import expect_ids, iter_checks
from specdec.testing.subjects import AnySubject, as_subject, registered_subjects, subject_of


class CheckFailure(SpecdecError, AssertionError):
    """A failed check: the clause, the smallest case, actual and expected values, and how to run it again."""


class Status(enum.Enum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@attrs.frozen
class Outcome:
    """The result of one check."""

    check: Check
    status: Status
    seconds: float
    detail: str = ""  # text of the failure, or the reason
    failure: CheckFailure | None = attrs.field(default=None, repr=False)


@checked()
def run_check(
    check: Check,
    given: AnySubject,
    *,
    seed: Seed = 0,
    effort: EffortName = "quick",
    seconds: float | None = None,
    replay: str = "",
    shrink: bool = True,
) -> Outcome:
    """Run one check. What the plugin prints, logs and warns of is dropped; whatever it raises is a failure.

    Args:
        effort: "sample", "quick" or "full".
        seconds: how long the check may look for a failing case; None: its share of the effort's seconds.
        replay: the command to run this check again, for the failure's text.
        shrink: search for the smallest failing case; otherwise report the first.
    """
    started = perf_counter()
    if seconds is None:
        seconds = EFFORTS[effort].seconds / SHARES
    try:
        with _quiet():
            check.run(given, Run(seed, effort, seconds=seconds, shrink=shrink))
    except NotApplicable as reason:
        return Outcome(check, Status.NOT_APPLICABLE, perf_counter() - started, _short(str(reason)))
    except Exception as error:  # noqa: BLE001  (whatever a plugin raises is a failure)
        failure = _failure(check, error, replay or f"run_check(check, plugin, seed={seed}, effort={effort!r})")
        return Outcome(check, Status.FAILED, perf_counter() - started, str(failure), failure)
    return Outcome(check, Status.PASSED, perf_counter() - started)


def _failure(check: Check, error: Exception, replay: str) -> CheckFailure:
    broken = Broken.by(error, {})
    failure = CheckFailure(
        f"{check.id} {check.sentence}",
        broken=_short(broken.what),
        smallest_case=", ".join(f"{name} = {_short(value)}" for name, value in broken.case.items())[:MOST] or None,
        got=None if broken.got is None else _short(broken.got),
        expected=None if broken.expected is None else _short(broken.expected),
        replay=replay,
        more=f"docs/contract/{check.subject.document}.md, clause {check.id} (contract {CONTRACT})",
    )
    failure.__cause__ = error
    return failure


SHARES = 4  # one check may take this many equal shares of the seconds
MOST = 600  # characters of one value in a failure


def _short(value: object) -> str:
    if isinstance(value, np.ndarray):
        value = np.array2string(value, precision=4, separator=", ", threshold=40, max_line_width=10**6)
    text = value if isinstance(value, str) else shown(value, 4 * MOST)  # some objects have no repr
    return cut(" ".join(text[: 8 * MOST].split()), MOST)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what the block prints, logs and warns of."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            with warnings.catch_warnings(action="ignore"):
                yield
    finally:
        logging.disable(before)


@attrs.frozen
class Report:
    """The outcomes of all checks of one plugin."""

    name: str
    seed: int
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()  # unchecked parts, and why

    @property
    def failures(self) -> list[Outcome]:
        """The outcomes that fail the plugin."""
        return [one for one in self.outcomes if one.status is Status.FAILED]

    @property
    def ok(self) -> bool:
        """Whether every clause of the contract holds."""
        return not self.failures

    def raise_for_failures(self) -> Report:
        """Raises: CheckFailure with the text of the first failure and the ids of all."""
        failed = self.failures
        if failed:
            ids = ", ".join(one.check.id for one in failed)
            raise CheckFailure(f"{self.name} fails {ids}\n{failed[0].detail}") from failed[0].failure
        return self

    def to_dict(self) -> dict[str, Any]:
        """The object that ``specdec check --json`` prints."""
        counts = {status.value: sum(one.status is status for one in self.outcomes) for status in Status}
        checks = [
            {"id": one.check.id, "sentence": one.check.sentence, "status": one.status.value, "detail": one.detail}
            | {"seconds": round(one.seconds, 3)}
            for one in self.outcomes
        ]
        return {
            "name": self.name,
            "seed": self.seed,
            "ok": self.ok,
            "counts": counts,
            "notes": list(self.notes),
            "checks": checks,
        }


@checked()
def check_plugin(
    plugin: str | Any,
    *,
    options: Mapping[str, Any] | None = None,
    seed: Seed = 0,
    effort: EffortName = "quick",
    only: Iterable[str] | None = None,
    replay: str = "",
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run every check on a plugin.

    Args:
        plugin: a registered name (checked as every kind it is registered as), a spec, a verifier, a target, a logits
            processor, an observer or a subject.
        options: of the plugin's config class, as plain data; None takes its defaults.
        effort: "sample", "quick" or "full": at most 5, 30 or 600 s of one core.
        only: the ids of the checks to run; None runs all.
        replay: the command that runs a check again, without its id.
        progress: called with a line before each check.
    Raises: UnknownNameError when nothing is registered under the name; ConfigError for an id that no check of these
        plugins has.
    """
    notes: Sequence[str] = ()
    if isinstance(plugin, str):
        name = plugin
        given, notes = registered_subjects(plugin, options)
        replay = replay or f"specdec check {name} --seed {seed} --effort {effort}"
    else:
        name, given = str(getattr(plugin, "name", type(plugin).__name__)), [_subject(plugin, options)]
    wanted = None if only is None else set(only)
    expect_ids(wanted or (), [one.kind for one in given])
    checks = [check for check in iter_checks() if wanted is None or check.id in wanted]
    planned = [(check, one) for check in checks for one in given if one.kind is check.subject]
    seconds, began = EFFORTS[effort].seconds, process_time()
    outcomes: list[Outcome] = []
    for number, (check, under_test) in enumerate(planned):
        used = process_time() - began
        if progress is not None:
            progress(f"{name}: {check.id}, {number + 1} of {len(planned)} checks, {used:.0f} of {seconds:.0f} s")
        again = f"check_plugin({name}, seed={seed}, effort={effort!r}, only=[{check.id!r}])"
        share = min(max(seconds - used, 0.0), SHARES * seconds / len(planned))  # what quicker checks leave goes on
        how: dict[str, Any] = {"seed": seed, "effort": effort, "seconds": share}
        outcomes.append(run_check(check, under_test, replay=f"{replay} --only {check.id}" if replay else again, **how))
    return Report(name, seed, tuple(outcomes), tuple(notes))


def _subject(plugin: Any, options: Mapping[str, Any] | None) -> AnySubject:
    kind = subject_of(plugin)
    if kind is None:
        raise ConfigError(
            f"check_plugin takes a name, a spec, a verifier or a target, got {type(plugin).__name__}",
            try_="parametrize_checks(drafter=...), or as_subject for a factory",
        )
    config = None if options is None else structure_options(options, plugin.config, kind.document)
    return as_subject(kind, plugin, config)

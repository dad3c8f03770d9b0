"""Checks, the clauses they prove, and what is under test.

A check has the id of the clause in ``docs/contract`` that it proves, and its docstring's first line is that clause's
sentence. It raises ``Broken`` when it finds a case that breaks the clause, ``NotApplicable`` when the clause says
nothing about this plugin; the runner turns the former into a ``CheckFailure`` that a plugin's author can act on.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import attrs
import numpy as np

from specdec.contract import (
    NO_NEEDS,
    DepthPolicy,
    DepthPolicySpec,
    Drafter,
    DrafterEnv,
    DrafterSpec,
    ForwardPass,
    Needs,
    NoConfig,
    PrepareEnv,
    Verifier,
    VerifierSpec,
)
from specdec.errors import ConfigError, SpecdecError, did_you_mean

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from specdec.backends.ops import Ops

CONTRACT = "2027.1"
"""The date of the present contract. A plugin names the one it claims; later checks report and do not fail."""


class Subject(enum.Enum):
    """What a check tests; the value is the letter of its ids and the name of its document."""

    DRAFTER = ("D", "drafter")
    VERIFIER = ("V", "verifier")
    FORWARD_PASS = ("F", "forward_pass")
    DEPTH_POLICY = ("P", "depth_policy")
    OPS = ("O", "ops")

    @property
    def letter(self) -> str:
        """The first letter of its clauses."""
        return self.value[0]

    @property
    def document(self) -> str:
        """The name of its document in ``docs/contract``, and of its keyword in ``parametrize_checks``."""
        return self.value[1]


# --- what a check raises ---------------------------------------------------------------------------------------------


class Broken(AssertionError):
    """A clause is broken: what was seen, what the contract asks for, and the case."""

    def __init__(self, what: str, *, got: object = None, expected: object = None, **case: object) -> None:
        super().__init__(what)
        self.what, self.got, self.expected, self.case = what, got, expected, dict(case)


class NotApplicable(Exception):
    """The clause says nothing about this plugin, and why."""


def expect(truth: object, what: str, *, got: object = None, expected: object = None, **case: object) -> None:
    """Raises: Broken unless ``truth``."""
    if not truth:
        raise Broken(what, got=got, expected=expected, **case)


def not_applicable(reason: str) -> NoReturn:
    """Leave a check, with the reason."""
    raise NotApplicable(reason)


class CheckFailure(SpecdecError, AssertionError):
    """A failed check, for people: clause, its sentence, the smallest case, got, expected, how to replay it."""


# --- what is under test ----------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class DrafterSubject:
    """How to build a drafter for a sequence."""

    make: Callable[[DrafterEnv], Drafter]
    needs: Needs = NO_NEEDS
    prepare: Callable[[ForwardPass], Any] = lambda target: None


@attrs.frozen(kw_only=True)
class VerifierSubject:
    """How to build a verifier, and the bound in nats where it is BOUNDED and states none itself."""

    make: Callable[[], Verifier]
    bound: float | None = None


@attrs.frozen(kw_only=True)
class ForwardPassSubject:
    """How to get a target; ``make`` may give the same one each time."""

    make: Callable[[], ForwardPass]


@attrs.frozen(kw_only=True)
class DepthPolicySubject:
    """How to build a depth policy for a sequence."""

    make: Callable[[], DepthPolicy]


@attrs.frozen(kw_only=True)
class OpsSubject:
    """How to get a backend's operations."""

    make: Callable[[], Ops]


AnySubject = DrafterSubject | VerifierSubject | ForwardPassSubject | DepthPolicySubject | OpsSubject

T = TypeVar("T")


def _as_drafter(given: Any, config: Any) -> DrafterSubject:
    if isinstance(given, DrafterSubject):
        return given
    if isinstance(given, DrafterSpec):
        spec, options = given, _config(given.config, config)

        def prepare(target: ForwardPass) -> Any:
            return None if spec.prepare is None else spec.prepare(options, PrepareEnv(target=target))

        from specdec.testing.models import TableModel

        needs = spec.needs
        if not isinstance(needs, Needs):
            needs = needs(options, prepare(TableModel.random(mtp=True)))
        return DrafterSubject(make=lambda env: spec.factory(options, env), needs=needs, prepare=prepare)
    make = given if _parameters(given) else (lambda env: given())
    return DrafterSubject(make=make, needs=getattr(given, "needs", NO_NEEDS))


def _as_verifier(given: Any, config: Any) -> VerifierSubject:
    if isinstance(given, VerifierSubject):
        return given
    if isinstance(given, VerifierSpec):
        spec, options = given, _config(given.config, config)
        return VerifierSubject(make=lambda: spec.factory(options))
    if isinstance(given, Verifier):
        return VerifierSubject(make=lambda: given)
    return VerifierSubject(make=given)


def _as_forward_pass(given: Any, config: Any) -> ForwardPassSubject:
    if isinstance(given, ForwardPassSubject):
        return given
    return ForwardPassSubject(make=(lambda: given) if isinstance(given, ForwardPass) else given)


def _as_depth_policy(given: Any, config: Any) -> DepthPolicySubject:
    if isinstance(given, DepthPolicySubject):
        return given
    if isinstance(given, DepthPolicySpec):
        spec, options = given, _config(given.config, config)
        prepare = spec.prepare
        if prepare is None:
            return DepthPolicySubject(make=lambda: spec.factory(options))
        # a pipeline of its own for each: what one generation learnt is no subject here
        return DepthPolicySubject(make=lambda: spec.factory(options, prepare(options, _priced_env())))
    return DepthPolicySubject(make=given)


def _priced_env() -> PrepareEnv:
    """What ``prepare`` of a depth policy gets: a small target, and costs that nobody measured."""
    from specdec.records.cost_table import CostTable
    from specdec.testing.models import TableModel

    table = CostTable(verify={1: 0.010, 4: 0.012, 8: 0.015}, draft={0: 0.0, 1: 0.001, 6: 0.006}, commit=0.0005)
    return PrepareEnv(target=TableModel.random(mtp=True), costs=lambda file=None: table)


def _as_ops(given: Any, config: Any) -> OpsSubject:
    if isinstance(given, OpsSubject):
        return given
    return OpsSubject(make=given if callable(given) else (lambda: given))


_ADAPTERS: Mapping[Subject, Callable[[Any, Any], AnySubject]] = {
    Subject.DRAFTER: _as_drafter,
    Subject.VERIFIER: _as_verifier,
    Subject.FORWARD_PASS: _as_forward_pass,
    Subject.DEPTH_POLICY: _as_depth_policy,
    Subject.OPS: _as_ops,
}


def as_subject(subject: Subject, given: Any, config: Any = None) -> AnySubject:
    """What the checks of ``subject`` take, from a spec (with its config), an object or a factory."""
    return _ADAPTERS[subject](given, config)


def _config(wanted: type, given: Any) -> Any:
    return given if given is not None else NoConfig() if wanted is NoConfig else wanted()


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Positional parameters without a default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return [one for one in found if one.kind in kinds and one.default is inspect.Parameter.empty]


# --- checks ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Check:
    """One clause's check."""

    id: str
    subject: Subject
    kind: str  # "contract", or "advice": taste and speed, reported and never failed
    contract: str  # since which contract
    sentence: str
    run: Callable[[Any, Run], None] = attrs.field(repr=False)


_MODULES = ("drafter", "verifier", "forward_pass", "depth_policy", "ops", "end_to_end")
_checks: dict[str, Check] = {}


def check(id: str, *, contract: str = CONTRACT, kind: str = "contract") -> Callable[[T], T]:
    """Register a function ``(subject, run)`` as the check of clause ``id``; its docstring is the clause's sentence."""
    subject = next((one for one in Subject if one.letter == id[:1]), None)
    if subject is None or not id[1:].isdigit() or kind not in ("contract", "advice"):
        raise ValueError(f"a check is called D1, V1, F1, P1 or O1, of kind contract or advice; got {id!r}, {kind!r}")

    def register(function: T) -> T:
        if id in _checks:
            raise ValueError(f"there is a check {id} already")
        sentence = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        _checks[id] = Check(id, subject, kind, contract, sentence, function)  # type: ignore[arg-type]
        return function

    return register


def iter_checks(subject: Subject | None = None) -> Iterator[Check]:
    """All checks, or those of one subject, by document and number."""
    for module in _MODULES:
        importlib.import_module(f"specdec.testing.{module}")
    order = list(Subject)
    for one in sorted(_checks.values(), key=lambda c: (order.index(c.subject), int(c.id[1:]))):
        if subject is None or one.subject is subject:
            yield one


# --- running ---------------------------------------------------------------------------------------------------------


class Run:
    """What a check runs with: a seed, how long to look, and how to look for a smallest case."""

    def __init__(self, seed: int = 0, effort: float = 1.0, *, shrink: bool = True) -> None:
        self.seed = seed
        self.effort = effort
        self.shrink = shrink

    def count(self, usual: int) -> int:
        """How often to repeat what is repeated ``usual`` times."""
        return max(1, round(usual * self.effort))

    def explore(self, body: Callable[..., None], *, examples: int = 30, **strategies: SearchStrategy[Any]) -> None:
        """Call ``body`` with drawn arguments; a failure is shrunk, and raised as Broken with the smallest case.

        The same seed draws the same cases.
        """
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import seed as with_seed
        from hypothesis import strategies as st
        from hypothesis.errors import Flaky

        first: list[tuple[dict[str, Any], Exception]] = []
        last: dict[str, Any] = {}

        @settings(
            max_examples=self.count(examples),
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink) if self.shrink else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        @with_seed(self.seed)
        @given(st.fixed_dictionaries(strategies))
        def cases(case: dict[str, Any]) -> None:
            last.clear()
            last.update(case)
            try:
                body(**case)
            except NotApplicable:
                raise
            except Exception as error:
                if not first:
                    first.append((dict(case), error))
                raise

        random_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            cases()
        except NotApplicable:
            raise
        except Flaky as flaky:  # a plugin that draws from somewhere else: the first case is as good as any
            case, error = first[0] if first else (last, flaky)
            raise _broken(error, case, note="it failed once and passed when tried again") from error
        except Exception as error:
            raise _broken(error, last) from error
        finally:
            random.setstate(random_state)
            np.random.set_state(numpy_state)


def _broken(error: BaseException, case: Mapping[str, object], note: str = "") -> Broken:
    if isinstance(error, Broken):
        merged = Broken(error.what, got=error.got, expected=error.expected, **{**case, **error.case})
    else:
        merged = Broken("an exception was raised", got=_told(error), **case)
    if note:
        merged.case["note"] = note
    return merged


def _told(error: BaseException) -> str:
    """An exception on one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].name}, {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{at}"


class Status(enum.Enum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    KNOWN = "known failure"
    """Failed, and listed among the known failures with a reason."""
    NEWER = "newer contract"
    """Failed a clause of a later contract than the plugin claims."""
    ADVICE = "advice"
    """Did not follow a piece of advice."""
    NOT_APPLICABLE = "not applicable"


@attrs.frozen
class Outcome:
    """What became of one check."""

    check: Check
    status: Status
    seconds: float
    detail: str = ""  # the failure's text, or the reason
    failure: CheckFailure | None = attrs.field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "id": self.check.id,
            "sentence": self.check.sentence,
            "kind": self.check.kind,
            "contract": self.check.contract,
            "status": self.status.value,
            "detail": self.detail,
            "seconds": round(self.seconds, 3),
        }


def run_check(
    check: Check,
    given: AnySubject,
    *,
    seed: int = 0,
    effort: float = 1.0,
    contract: str = CONTRACT,
    known: str | None = None,
    replay: str = "",
    shrink: bool = True,
) -> Outcome:
    """Run one check.

    Args:
        known: the reason why a failure is expected; then it is a pass that fails.
        shrink: look for the smallest case of a failure; without, any case will do.
    """
    started = perf_counter()
    error: BaseException | None = None
    try:
        check.run(given, Run(seed, effort, shrink=shrink))
    except NotApplicable as reason:
        return Outcome(check, Status.NOT_APPLICABLE, perf_counter() - started, str(reason))
    except Exception as raised:  # noqa: BLE001  (whatever a third party's plugin raises is its failure)
        error = raised
    seconds = perf_counter() - started
    if error is None:
        if known is None:
            return Outcome(check, Status.PASSED, seconds)
        passed = CheckFailure(
            f"{check.id} is listed as a known failure, and it passes", reason=known, **{"try": "take it off the list"}
        )
        return Outcome(check, Status.FAILED, seconds, str(passed), passed)
    failure = _failure(check, _broken(error, {}), replay or f"Run(seed={seed})", effort)
    failure.__cause__ = error
    if known is not None:
        return Outcome(check, Status.KNOWN, seconds, known, failure)
    status = Status.ADVICE if check.kind == "advice" else Status.FAILED if check.contract <= contract else Status.NEWER
    return Outcome(check, status, seconds, str(failure), failure)


def _failure(check: Check, broken: Broken, replay: str, effort: float) -> CheckFailure:
    return CheckFailure(
        f"{check.id}: {check.sentence}",
        broken=broken.what,
        smallest_case=", ".join(f"{name} = {_short(value)}" for name, value in broken.case.items()) or None,
        got=None if broken.got is None else _short(broken.got),
        expected=None if broken.expected is None else _short(broken.expected),
        replay=replay,
        effort=None if effort == 1.0 else effort,
        more=f"docs/contract/{check.subject.document}.md, clause {check.id} (contract {check.contract})",
    )


def _short(value: object) -> str:
    if isinstance(value, np.ndarray):
        value = np.array2string(value, precision=4, separator=", ", threshold=40, max_line_width=10**6)
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 400 else f"{text[:397]}..."


@attrs.frozen
class Report:
    """What became of all checks of one plugin."""

    name: str
    contract: str
    seed: int
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()  # what was not tested, and why

    @property
    def failures(self) -> list[Outcome]:
        """The outcomes that fail the plugin."""
        return [one for one in self.outcomes if one.status is Status.FAILED]

    @property
    def ok(self) -> bool:
        """Whether every clause of the contract holds, known failures aside."""
        return not self.failures

    def raise_for_failures(self) -> Report:
        """Raises: CheckFailure for the first failure, which says how many more there are."""
        failed = self.failures
        if failed:
            first = failed[0].failure
            more = f"{self.name} fails {', '.join(one.check.id for one in failed)}"
            raise CheckFailure(f"{more}\n{failed[0].detail}") from first
        return self

    def to_dict(self) -> dict[str, Any]:
        """The object that ``specdec check --json`` prints."""
        counts = {status.value: sum(one.status is status for one in self.outcomes) for status in Status}
        return {
            "name": self.name,
            "contract": self.contract,
            "seed": self.seed,
            "ok": self.ok,
            "counts": counts,
            "notes": list(self.notes),
            "checks": [one.to_dict() for one in self.outcomes],
        }

    def __str__(self) -> str:
        lines = [f"{self.name}: {'passes' if self.ok else 'fails'} contract {self.contract}"]
        for one in self.outcomes:
            if one.status is not Status.PASSED:
                lines += [f"{one.check.id} {one.status.value}", *(f"  {line}" for line in one.detail.splitlines())]
        return "\n".join([*lines, *self.notes])


def check_subjects(
    name: str,
    subjects: Mapping[Subject, AnySubject] | Sequence[tuple[str, Subject, AnySubject]],
    *,
    seed: int = 0,
    effort: float = 1.0,
    contract: str = CONTRACT,
    known_failures: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
    notes: Sequence[str] = (),
    replay: str = "",
    progress: Callable[[Outcome], None] | None = None,
) -> Report:
    """Run the checks of every subject; ``only`` restricts them to some ids.

    Raises: ConfigError for an id that is no check's.
    """
    known = dict(known_failures or {})
    wanted = None if only is None else set(only)
    check_ids([*known, *(wanted or ())])
    given = [("", s, g) for s, g in subjects.items()] if isinstance(subjects, Mapping) else list(subjects)
    outcomes = []
    for _, subject, under_test in given:
        for one in iter_checks(subject):
            if wanted is None or one.id in wanted:
                outcome = run_check(
                    one,
                    under_test,
                    seed=seed,
                    effort=effort,
                    contract=contract,
                    known=known.get(one.id),
                    replay=replay and f"{replay} --only {one.id}",
                )
                outcomes.append(outcome)
                if progress is not None:
                    progress(outcome)
    return Report(name, contract, seed, tuple(outcomes), tuple(notes))


def check_ids(ids: Iterable[str]) -> None:
    """Raises: ConfigError for an id that is no check's, with the nearest one."""
    there = [one.id for one in iter_checks()]
    for id_ in ids:
        if id_ not in there:
            raise ConfigError(f"there is no check {id_!r}.{did_you_mean(id_, there)}", available=", ".join(there))


def check_plugin(plugin: Any, *, config: Any = None, options: Mapping[str, Any] | None = None, **how: Any) -> Report:
    """Run every check on a plugin.

    Args:
        plugin: a registered name (all kinds that it is registered as are checked), a spec, or a verifier, target or
            depth policy itself.
        config: the plugin's own config object; None takes its defaults.
        options: the same as plain data, structured into the plugin's config class.
        **how: ``seed``, ``effort`` (a factor on the number of cases), ``contract``, ``known_failures`` ({id: reason}),
            ``only`` (ids), ``progress`` (called with each Outcome).
    Raises: UnknownNameError when nothing is registered under the name.
    """
    if isinstance(plugin, str):
        from specdec.testing.named import subjects_named

        subjects, notes = subjects_named(plugin, config, options)
        how.setdefault("replay", f"specdec check {plugin} --seed {how.get('seed', 0)}")
        return check_subjects(plugin, subjects, notes=notes, **how)
    kind = _subject_of(plugin)
    if options is not None:
        from specdec.config import Choice, structure_choice

        config = structure_choice(Choice(plugin.name, options), plugin.config, kind.document)
    name = getattr(plugin, "name", type(plugin).__name__)
    return check_subjects(str(name), {kind: as_subject(kind, plugin, config)}, **how)


def _subject_of(plugin: Any) -> Subject:
    kinds: list[tuple[Subject, tuple[type, ...]]] = [
        (Subject.DRAFTER, (DrafterSpec, DrafterSubject)),
        (Subject.VERIFIER, (VerifierSpec, Verifier, VerifierSubject)),
        (Subject.FORWARD_PASS, (ForwardPass, ForwardPassSubject)),
        (Subject.DEPTH_POLICY, (DepthPolicySpec, DepthPolicySubject)),
        (Subject.OPS, (OpsSubject,)),
    ]
    for subject, types in kinds:
        if isinstance(plugin, types):
            return subject
    raise ConfigError(
        f"check_plugin takes a name, a spec, a verifier or a target, got {type(plugin).__name__}",
        try_="parametrize_checks(drafter=...) or one of the Subject classes for a factory",
    )


def parametrize_checks(
    *,
    drafter: Any = None,
    verifier: Any = None,
    forward_pass: Any = None,
    depth_policy: Any = None,
    ops: Any = None,
    contract: str | None = None,
    known_failures: Mapping[str, str] | None = None,
    seed: int | None = None,
    effort: float = 1.0,
) -> Callable[[T], T]:
    """Decorate a test ``def test_contract(check): check()``: pytest runs it once per check.

    Args:
        drafter: a DrafterSpec, or a factory with the sequence's ``env`` as its argument, or with none; the other
            subjects likewise.
        contract: the date that the plugin claims; newer clauses warn instead of failing.
        known_failures: ``{id: reason}``. One that passes is a failure.
        seed: of all drawn cases; None takes pytest's ``--specdec-seed`` (0 unless given).
    Raises: ConfigError for an id among the known failures that is no check's.
    """
    import pytest

    known = dict(known_failures or {})
    check_ids(known)
    handed = {
        Subject.DRAFTER: drafter,
        Subject.VERIFIER: verifier,
        Subject.FORWARD_PASS: forward_pass,
        Subject.DEPTH_POLICY: depth_policy,
        Subject.OPS: ops,
    }
    chosen = {subject: given for subject, given in handed.items() if given is not None}
    if not chosen:
        raise ConfigError("parametrize_checks needs something to check", **{"try": "parametrize_checks(drafter=...)"})
    for id_ in known:
        if not any(subject.letter == id_[0] for subject in chosen):
            raise ConfigError(f"known_failures names {id_}, and no such subject is checked here")

    def item(check: Check, given: Any) -> Callable[[], None]:
        def run() -> None:
            plugin = sys.modules.get("specdec.testing.pytest_plugin")
            outcome = run_check(
                check,
                as_subject(check.subject, given),
                seed=seed if seed is not None else getattr(plugin, "seed", 0),
                effort=effort,
                contract=getattr(plugin, "contract", None) or contract or CONTRACT,
                known=known.get(check.id),
            )
            if outcome.status is Status.FAILED and outcome.failure is not None:
                raise outcome.failure
            if outcome.status is Status.KNOWN:
                pytest.xfail(outcome.detail)
            if outcome.status is Status.NOT_APPLICABLE:
                pytest.skip(outcome.detail)
            if outcome.status in (Status.ADVICE, Status.NEWER):
                warnings.warn(f"{outcome.status.value}: {outcome.detail}", stacklevel=2)

        return run

    items = [
        pytest.param(item(one, given), id=one.id) for subject, given in chosen.items() for one in iter_checks(subject)
    ]
    mark: Any = pytest.mark.parametrize("check", items)

    def decorate(test: T) -> T:
        marked: T = mark(test)
        return marked

    return decorate

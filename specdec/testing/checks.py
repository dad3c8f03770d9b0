"""Write checks: register one under its clause, search for a failing case with hypothesis, report the result.

A check has the id of a clause in ``docs/contract``; its docstring is that clause's heading. It raises ``Broken`` with a
case that breaks the clause, or ``NotApplicable`` if the clause does not apply to a plugin.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from time import process_time
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import attrs
import numpy as np
import torch

from specdec.checking import between, checked
from specdec.errors import described
from specdec.testing.subjects import PluginSubject, Subject

CONTRACT = "2026.2"
"""The version of the contract, by date."""

T = TypeVar("T")

Seed = Annotated[int, between(0, 2**63 - 1)]
EffortName = Literal["sample", "quick", "full"]


@attrs.frozen
class Effort:
    """How hard to look: a factor on the number of cases, and the seconds of one core that one plugin may take."""

    factor: float
    seconds: float


EFFORTS: Mapping[str, Effort] = {
    "sample": Effort(0.15, 5.0),  # for a run in a test suite
    "quick": Effort(1.0, 30.0),
    "full": Effort(10.0, 600.0),
}


# --- what a check raises ---------------------------------------------------------------------------------------------


class Broken(AssertionError):
    """A clause is broken: the problem, the plugin's value, the expected value, and the case."""

    def __init__(self, what: str, *, got: object = None, expected: object = None, **case: object) -> None:
        super().__init__(what)
        self.what, self.got, self.expected, self.case = what, got, expected, dict(case)

    @classmethod
    def by(cls, error: BaseException, case: Mapping[str, object]) -> Broken:
        """The failure for ``error`` in this case; unexpected exceptions are failures too."""
        if isinstance(error, Broken):
            return cls(error.what, got=error.got, expected=error.expected, **{**case, **error.case})
        return cls("an exception was raised", got=_one_line(error), **case)


def _one_line(error: BaseException) -> str:
    """An exception with its location."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].name}, {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{described(error)}{at}"


class NotApplicable(Exception):
    """The clause does not apply to this plugin; the message says why."""


def expect(truth: object, what: str, *, got: object = None, expected: object = None, **case: object) -> None:
    """Raises: Broken with ``what`` unless ``truth``."""
    if not truth:
        raise Broken(what, got=got, expected=expected, **case)


def expect_equal(got: Any, expected: Any, what: str, **case: object) -> None:
    """Raises: Broken unless the two are equal; arrays in shape and in every bit that ``==`` sees."""
    arrays = isinstance(got, np.ndarray) or isinstance(expected, np.ndarray)
    if not (np.array_equal(got, expected) if arrays else got == expected):
        raise Broken(what, got=got, expected=expected, **case)


def expect_error(kind: type[Exception], call: Callable[[], object], what: str, **case: object) -> None:
    """Raises: Broken unless ``call`` raises ``kind``; ``what`` names the call in the failure."""
    try:
        got = call()
    except kind:
        return
    except Exception as error:
        raise Broken(f"{what} raises a wrong error", got=_one_line(error), expected=kind.__name__, **case) from error
    raise Broken(f"{what} is not refused", got=got, expected=kind.__name__, **case)


def not_applicable(reason: str) -> NoReturn:
    """Leave a check because its clause does not apply, with the reason."""
    raise NotApplicable(reason)


# --- global generators -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_generators(seed: int) -> Iterator[None]:
    """Seed the global generators. They are restored afterwards.

    Raises: Broken if the block moves one of them.
    """
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def states() -> bytes:
        return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))

    try:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        seeded = states()
        yield
        expect(states() == seeded, "a global generator was advanced")
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


# --- registering -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Check:
    """The check of one clause."""

    id: str
    subject: Subject
    sentence: str  # the clause's heading in docs/contract
    run: Callable[[Any, Run], None] = attrs.field(repr=False)


CHECKS: dict[str, Check] = {}
"""By id, all registered so far; ``specdec.testing.clauses.iter_checks`` gives all of them, in order."""


def _register(id: str, sentence: str, run: Callable[[Any, Run], None]) -> None:
    subject = next(subject for subject in Subject if subject.letter == id[0])
    CHECKS[id] = Check(id, subject, " ".join(sentence.split("\n\n")[0].split()), run)


def check(id: str) -> Callable[[T], T]:
    """Register a function ``(subject, run)`` as the check of clause ``id``; its docstring is the clause's sentence."""

    def register(function: T) -> T:
        _register(id, function.__doc__ or "", function)  # type: ignore[arg-type]
        return function

    return register


def checks_of(drive: Callable[[Any, Run, str], None], sentences: Mapping[str, str]) -> None:
    """Register the clauses that one driver checks, by id: ``drive(subject, run, id)`` raises the fault of one."""
    for id, sentence in sentences.items():
        _register(id, sentence, lambda subject, run, id=id: drive(subject, run, id))  # type: ignore[misc]


def driven(driver: Callable[..., Faults], sentences: Mapping[str, str], *, examples: int, **strategies: Any) -> None:
    """Register the clauses whose faults ``driver(subject, **case)`` looks for, in cases drawn by ``strategies``."""

    checks_of(lambda subject, run, id: run.drive(subject, id, driver, examples=examples, **strategies), sentences)


# --- searching -------------------------------------------------------------------------------------------------------

SHRINKING = 2.0  # seconds for the search for a smaller case
LEAST = 3  # drawn cases, however little time there is


class Faults(dict[str, Broken]):
    """What one case of a driver shows: the first fault of each clause, by id."""

    def note(self, clause: str, truth: object, what: str, **facts: Any) -> None:
        """Note a fault of the clause unless ``truth``."""
        if not truth and clause not in self:
            self[clause] = Broken(what, **facts)

    def note_equal(self, clause: str, got: Any, expected: Any, what: str, **facts: Any) -> None:
        """Note a fault of the clause unless the two are equal, as ``expect_equal`` compares them."""
        with self.of(clause):
            expect_equal(got, expected, what, **facts)

    @contextlib.contextmanager
    def of(self, clause: str) -> Iterator[None]:
        """Note under the clause what the block finds broken."""
        try:
            yield
        except Broken as broken:
            self.setdefault(clause, broken)


@functools.cache
def _backend() -> str:
    """Register a hypothesis backend whose cases depend on the seed alone, and return its name.

    Its own one also draws constants from the source of whatever modules are loaded.
    """
    from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

    class Seeded(HypothesisProvider):
        def _maybe_draw_constant(self, *_: object, **__: object) -> None:
            return None

    AVAILABLE_PROVIDERS["specdec"] = Seeded
    return "specdec"


class Run:
    """One run of a check: its seed, its effort, and the search for failing cases.

    The effort decides how many cases are drawn. ``seconds`` of processor time bound them: when they are spent, no
    further case is tried, and the check has passed as far as it went. The same seed draws the same cases.
    """

    @checked()
    def __init__(
        self,
        seed: Seed = 0,
        effort: EffortName = "quick",
        *,
        seconds: Annotated[float, between(0.0, 1e6)] | None = None,
        shrink: bool = True,
    ) -> None:
        self.seed = seed
        self.effort = EFFORTS[effort]
        self.shrink = shrink
        self._end = process_time() + (self.effort.seconds if seconds is None else seconds)

    def count(self, usual: int) -> int:
        """The number of repeats for something repeated ``usual`` times at quick effort."""
        return max(1, round(usual * self.effort.factor))

    def repeat(self, usual: int, least: int = 1) -> Iterator[int]:
        """0, 1, ... to ``count(usual)``, fewer when the time is spent, but ``least`` or all of them."""
        for number in range(self.count(usual)):
            if number >= least and process_time() >= self._end:
                return
            yield number

    def drive(
        self,
        subject: PluginSubject,
        clause: str,
        driver: Callable[..., Faults],
        *,
        examples: int = 30,
        **strategies: Any,  # of the arguments
    ) -> None:
        """Call ``driver(subject, **case)``, which looks for faults of many clauses.

        Clauses of one plugin share a run: what a complete one did not show is not searched for again.

        Raises: Broken for a fault of ``clause``.
        """
        key = (driver, self.seed, self.effort)
        if clause not in subject.known.get(key, {clause}):
            return
        shown: set[str] = set()

        def body(**case: Any) -> None:
            faults = driver(subject, **case)
            shown.update(faults)
            if clause in faults:
                raise faults[clause]

        self.explore(body, examples=examples, **strategies)
        subject.known[key] = shown  # of a complete run

    def explore(self, body: Callable[..., None], *, examples: int = 30, **strategies: Any) -> None:
        """Call ``body`` with drawn arguments; the same seed draws the same cases.

        Raises: Broken with the smallest failing case.
        """
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import seed as with_seed
        from hypothesis import strategies as st
        from hypothesis.errors import Flaky

        failed: list[tuple[dict[str, Any], Broken]] = []
        begun, end = 0, self._end

        @settings(
            max_examples=max(self.count(examples), LEAST),
            backend=_backend(),
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
            nonlocal begun, end
            begun += 1
            if begun > LEAST and process_time() >= end:
                return  # the time is spent
            try:
                body(**case)
            except NotApplicable:
                raise
            except Exception as error:
                if not failed:
                    end = process_time() + SHRINKING
                failed.append(({name: case[name] for name in strategies}, Broken.by(error, {})))
                raise failed[-1][1] from error

        try:
            cases()
        except (Broken, Flaky) as error:
            if not failed:
                raise
            # the last failing case is the smallest; it may pass when tried again, or come after the time for shrinking
            case, broken = failed[-1]
            raise Broken.by(broken, case) from error

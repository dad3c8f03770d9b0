"""Write checks: register one under its clause, search for a failing case, report the result.

A check has the id of a clause in ``docs/contract``; its docstring is that clause's heading. It raises ``Broken`` with a
case that breaks the clause, or ``NotApplicable`` if the clause does not apply to a plugin.
"""

from __future__ import annotations

import copy
import inspect
import os
import random
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter, process_time, sleep
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import attrs
import numpy as np

from specdec.checking import between, checked
from specdec.errors import described
from specdec.registry.guard import is_from_plugin
from specdec.testing.subjects import Subject

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

CONTRACT = "2026.1"
"""The version of the contract, by date. A plugin names the one it claims; newer clauses warn and do not fail it."""

T = TypeVar("T")

Seed = Annotated[int, between(0, 2**63 - 1)]
EffortName = Literal["sample", "quick", "full"]


@attrs.frozen
class Effort:
    """How hard to look: a factor on the number of cases, and the seconds of one core that one plugin may take."""

    factor: float
    seconds: float


SHARED = 0.9  # of an effort's seconds; the rest is for cases that are under way when the time of a check ends

EFFORTS: Mapping[str, Effort] = {
    "sample": Effort(0.1, 5.0),  # for a run in a test suite
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
    def by(cls, error: BaseException, case: Mapping[str, object], note: str = "") -> Broken:
        """The failure for ``error`` in this case; unexpected exceptions are failures too."""
        case = {**case, **({"note": note} if note else {})}
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


def expect_error(wanted: type[Exception], call: Callable[[], object], what: str, **case: object) -> None:
    """Raises: Broken unless ``call`` raises ``wanted``; ``what`` names the call in the failure."""
    try:
        got = call()
    except wanted:
        return
    except BaseException as error:
        if not is_from_plugin(error):
            raise
        raise Broken(f"{what} raises a wrong error", got=_one_line(error), expected=wanted.__name__, **case) from error
    raise Broken(f"{what} is not refused", got=got, expected=wanted.__name__, **case)


def not_applicable(reason: str) -> NoReturn:
    """Leave a check because its clause does not apply, with the reason."""
    raise NotApplicable(reason)


# --- registering -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Check:
    """The check of one clause."""

    id: str
    subject: Subject
    kind: str  # "contract", or "advice": style and speed, reported and never failed
    contract: str  # the contract that introduced it
    sentence: str  # the clause's heading in docs/contract
    run: Callable[[Any, Run], None] = attrs.field(repr=False)
    share: float = 1.0  # of the seconds that a plugin's checks may take together
    early: bool = False
    """Runs before the others, which may leave so much in a class or a module that nothing changes any more."""


CHECKS: dict[str, Check] = {}
"""By id, all registered so far; ``specdec.testing.clauses.iter_checks`` gives all of them, in order."""


def check(
    id: str, *, contract: str = CONTRACT, kind: str = "contract", share: float = 1.0, early: bool = False
) -> Callable[[T], T]:
    """Register a function ``(subject, run)`` as the check of clause ``id``; its docstring is the clause's sentence.

    ``share``: what the check takes of the time for all checks of the plugin, relative to the others. ``early``: run it
    before those.
    """
    subject = next((one for one in Subject if one.letter == id[:1]), None)
    if subject is None or not id[1:].isdigit() or kind not in ("contract", "advice"):
        raise ValueError(f"an id is a Subject's letter and a number, a kind contract or advice; got {id!r}, {kind!r}")

    def register(function: T) -> T:
        if id in CHECKS:
            raise ValueError(f"there is a check {id} already")
        sentence = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        CHECKS[id] = Check(id, subject, kind, contract, sentence, function, share, early)  # type: ignore[arg-type]
        return function

    return register


# --- searching -------------------------------------------------------------------------------------------------------

SLACK = 3.0  # this many seconds of waiting count as one of a core
SMALLER = 3.0  # the least seconds for the search for a smaller case
LEAST = 5  # drawn cases of each part of a check, however little time there is


BEAT = 0.05  # seconds between two looks at the clock


class Awake:
    """Seconds in which this process was not stopped: a stop, or a machine that sleeps, counts as one beat."""

    def __init__(self) -> None:
        self.seconds, self._last, self._process = 0.0, 0.0, 0

    def tick(self, now: float) -> None:
        """Count the time since the last tick, at most two beats of it."""
        self.seconds += min(max(now - self._last, 0.0), 2 * BEAT)
        self._last = now

    def run(self) -> None:
        """Tick in a thread of its own, in this process and no fork of it."""
        if self._process == os.getpid():
            return
        self._process, self._last = os.getpid(), perf_counter()
        threading.Thread(target=self._beat, name="specdec-check-clock", daemon=True).start()

    def _beat(self) -> None:
        while True:
            sleep(BEAT)
            self.tick(perf_counter())


_awake = Awake()


def _queued() -> float:
    """Seconds that this thread has waited for a core, on a busy machine; 0 where the system does not count them."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Stopwatch:
    """Seconds of one core since it was made."""

    def __init__(self) -> None:
        _awake.run()
        self._began = process_time(), _awake.seconds, _queued()

    @property
    def seconds(self) -> float:
        """Processor time, or a third of the time on the clock if that is more: of a plugin that waits.

        Time in which a busy machine lets it stand, or in which the process is stopped, does not count.
        """
        used, passed = process_time() - self._began[0], _awake.seconds - self._began[1]
        return max(used, (passed - (_queued() - self._began[2])) / SLACK)


class _Spent(BaseException):
    """Leaves hypothesis when the time for a clause is over."""


class Run:
    """One run of a check: its seed, its effort, and the search for failing cases.

    The effort decides how many cases are drawn. ``seconds`` of one core bound them: when they are spent, no further
    case begins, and the check has passed as far as it went. A stated minimum of every part runs even then, so that no
    check passes on a slow machine without having looked. The same seed draws the same cases.
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
        self._seconds = self.effort.seconds if seconds is None else seconds
        self._watch = Stopwatch()

    @property
    def spent(self) -> bool:
        """Whether the time for this check is over."""
        return self._watch.seconds >= self._seconds

    def count(self, usual: int) -> int:
        """The number of repeats for something repeated ``usual`` times at quick effort."""
        return max(1, round(usual * self.effort.factor))

    def repeat(self, usual: int, least: int = 1) -> Iterator[int]:
        """0, 1, ... to ``count(usual)``, fewer when the time is spent, but ``least`` or all of them."""
        for number in range(self.count(usual)):
            if number >= least and self.spent:
                return
            yield number

    def shares(self, parts: Sequence[T]) -> Iterator[tuple[T, Run]]:
        """Each part with a run of its own, which has an equal share of the time that is left."""
        for number, part in enumerate(parts):
            run = copy.copy(self)
            left = max(self._seconds - self._watch.seconds, 0.0)
            run._seconds, run._watch = left / (len(parts) - number), Stopwatch()
            yield part, run

    def parts(self, *parts: Callable[[Run], object]) -> None:
        """Call each part of a check with its own run: what decides fails whether or not others had much to do."""
        for part, own in self.shares(parts):
            part(own)

    def explore(self, body: Callable[..., None], *, examples: int = 30, **strategies: SearchStrategy[Any]) -> None:
        """Call ``body`` with drawn arguments; the same seed draws the same cases.

        Raises: Broken with the smallest failing case.
        """
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import seed as with_seed
        from hypothesis import strategies as st
        from hypothesis.errors import Flaky

        failed: list[tuple[dict[str, Any], Broken]] = []
        begun = 0

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
            nonlocal begun
            extra = SMALLER if failed else 0.0
            if begun >= LEAST and self._watch.seconds >= self._seconds + extra:
                raise _Spent
            begun += 1
            try:
                body(**case)
            except NotApplicable:
                raise
            except BaseException as error:
                if not is_from_plugin(error):
                    raise
                failed.append((dict(case), Broken.by(error, {})))
                raise failed[-1][1] from error

        random_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            cases()
        except NotApplicable:
            raise
        except _Spent:
            if failed:
                case, broken = failed[-1]
                raise Broken.by(broken, case) from broken
        except Flaky as flaky:  # the plugin uses other randomness: any failing case will do
            if not failed:
                raise
            case, broken = failed[0]
            raise Broken.by(broken, case, "it failed once and passed when it was tried again") from flaky
        except Broken as broken:
            raise Broken.by(broken, failed[-1][0]) from broken
        finally:
            random.setstate(random_state)
            np.random.set_state(numpy_state)

    def halve(self, body: Callable[[Sequence[T]], object], steps: Sequence[T], **case: object) -> None:
        """Call ``body`` with all ``steps``; if it fails, with half of them, and so on to the fewest.

        Raises: Broken with the smallest failing number of steps as ``length``.
        """
        passed, length = 0, len(steps)
        failing = self._broken(body, steps)
        while (
            failing is not None
            and self.shrink
            and length - passed > 1
            and self._watch.seconds < self._seconds + SMALLER
        ):
            middle = (passed + length) // 2
            found = self._broken(body, steps[:middle])
            if found is None:
                passed = middle
            else:
                length, failing = middle, found
        if failing is not None:
            raise Broken.by(failing, {"length": length, **case}) from failing

    @staticmethod
    def _broken(body: Callable[[Sequence[T]], object], steps: Sequence[T]) -> Broken | None:
        try:
            body(steps)
        except NotApplicable:
            raise
        except BaseException as error:
            if not is_from_plugin(error):
                raise
            return Broken.by(error, {})
        return None

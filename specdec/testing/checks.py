"""Write checks: register one under its clause, search for a failing case, report the result.

A check has the id of a clause in ``docs/contract``; its docstring is that clause's heading. It raises ``Broken`` with a
case that breaks the clause, or ``NotApplicable`` if the clause does not apply to a plugin.
"""

from __future__ import annotations

import inspect
import random
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import attrs
import numpy as np

from specdec.testing.subjects import Subject

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

CONTRACT = "2026.1"
"""The version of the contract, by date. A plugin names the one it claims; newer clauses warn and do not fail it."""

T = TypeVar("T")


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
    return f"{type(error).__name__}: {' '.join(str(error).split())}{at}"


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
    except Exception as error:
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


CHECKS: dict[str, Check] = {}
"""By id, all registered so far; ``specdec.testing.clauses.iter_checks`` gives all of them, in order."""


def check(id: str, *, contract: str = CONTRACT, kind: str = "contract") -> Callable[[T], T]:
    """Register a function ``(subject, run)`` as the check of clause ``id``; its docstring is the clause's sentence."""
    subject = next((one for one in Subject if one.letter == id[:1]), None)
    if subject is None or not id[1:].isdigit() or kind not in ("contract", "advice"):
        raise ValueError(f"an id is D1, V1, F1, P1 or O1, a kind is contract or advice; got {id!r}, {kind!r}")

    def register(function: T) -> T:
        if id in CHECKS:
            raise ValueError(f"there is a check {id} already")
        sentence = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        CHECKS[id] = Check(id, subject, kind, contract, sentence, function)  # type: ignore[arg-type]
        return function

    return register


# --- searching -------------------------------------------------------------------------------------------------------


class Run:
    """One run of a check: its seed, its effort (a factor on the number of cases), and the search for failing cases."""

    def __init__(self, seed: int = 0, effort: float = 1.0, *, shrink: bool = True) -> None:
        self.seed = seed
        self.effort = effort
        self.shrink = shrink

    def count(self, usual: int) -> int:
        """The number of repeats for something repeated ``usual`` times at effort 1."""
        return max(1, round(usual * self.effort))

    def explore(self, body: Callable[..., None], *, examples: int = 30, **strategies: SearchStrategy[Any]) -> None:
        """Call ``body`` with drawn arguments; the same seed draws the same cases.

        Raises: Broken with the smallest failing case.
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
        except Flaky as flaky:  # the plugin uses other randomness: any failing case will do
            case, error = first[0] if first else (last, flaky)
            raise Broken.by(error, case, "it failed once and passed when it was tried again") from error
        except Exception as error:
            raise Broken.by(error, last) from error
        finally:
            random.setstate(random_state)
            np.random.set_state(numpy_state)

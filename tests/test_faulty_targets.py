"""Targets of another engine that are right but for one fault, drawn at random: an error names the target and keeps the
tokens so far, which are those of plain decoding, or the fault changed nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

import specdec
from specdec.contract import ForwardOutput
from specdec.errors import SpecdecError
from specdec.hookspecs import hookimpl
from specdec.registry import BUILT_INS, Registry, use_registry
from tests.selection import examples
from tests.test_faulty_plugins import ANSWERS, COUNT, RAISED, SETTINGS

FIRST_TARGET = Path(__file__).parent.parent / "examples" / "first_target.py"
METHODS = ("new_state", "prefill", "decode", "commit", "rewind", "snapshot", "restore")
LOGITS = ("argmax", "rows", "topk", "gather")
PLAUSIBLE = {"argmax": {"a list"}, "rows": {"an array"}}  # of the right type: only another target would disagree
UNREAD = ("prefill", "commit")  # what they return is not looked at


def _markov() -> Any:
    spec = importlib.util.spec_from_file_location("first_target", FIRST_TARGET)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIRST = _markov()


class Readings(FIRST.HostLogits):  # type: ignore[misc, name-defined]
    """Logits that ask ``target`` before they answer."""

    target: Any = None

    def argmax(self) -> Any:
        return self.target.answer("argmax", lambda: FIRST.HostLogits.argmax(self))

    def rows(self) -> Any:
        return self.target.answer("rows", lambda: FIRST.HostLogits.rows(self))

    def topk(self, k: int) -> Any:
        return self.target.answer("topk", lambda: FIRST.HostLogits.topk(self, k))

    def gather(self, tokens: Any) -> Any:
        return self.target.answer("gather", lambda: FIRST.HostLogits.gather(self, tokens))


def _logits(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda output: ForwardOutput(rows=output.rows, logits=FIRST.HostLogits(change(output.logits.array)))


SPECIAL: dict[str, dict[str, Callable[[Any], Any]]] = {
    "decode": {
        "no logits": lambda output: ForwardOutput(rows=output.rows),
        "logits of a list": lambda output: ForwardOutput(rows=output.rows, logits=output.logits.array.tolist()),
        "bare logits": lambda output: ForwardOutput(rows=output.rows, logits=output.logits.array),
        "rows as text": lambda output: ForwardOutput(rows="two", logits=output.logits),  # type: ignore[arg-type]
        "another count": lambda output: ForwardOutput(rows=output.rows + 1, logits=output.logits),
        "no rows of logits": _logits(lambda array: array[:0]),
        "NaN": _logits(lambda array: np.full_like(array, np.nan)),
        "all forbidden": _logits(lambda array: np.full_like(array, -np.inf)),
        "without a vocabulary": _logits(lambda array: array[:, :0]),
    },
    "rewind": {"one more": lambda length: length + 1, "a float": float, "minus": lambda length: -1},
    "new_state": {"its type": type},
    "restore": {"its type": type},
    "snapshot": {
        "too long": lambda snapshot: attrs.evolve(snapshot, length=snapshot.length + 1),
        "too short": lambda snapshot: attrs.evolve(snapshot, length=snapshot.length - 1),
    },
}


@attrs.frozen
class Fault:
    """One fault of one method, of the target or of its logits, at its n-th call or from it on."""

    method: str
    sort: str  # "raises", "answers", "special"
    name: str
    call: int
    stays: bool


NOTHING = Fault("", "", "", 0, False)


class Faulty(FIRST.Markov):  # type: ignore[misc, name-defined]
    def __init__(self, fault: Fault) -> None:
        super().__init__(FIRST.TEXT)
        self.fault, self.calls, self.struck = fault, 0, 0

    def answer(self, method: str, right: Callable[[], Any]) -> Any:
        fault = self.fault
        if method != fault.method:
            return right()
        self.calls += 1
        if self.calls < fault.call or (self.calls > fault.call and not fault.stays):
            return right()
        self.struck += 1
        if fault.sort == "raises":
            raise RAISED[fault.name]()
        if fault.sort == "answers":
            right()
            return ANSWERS[fault.name]()
        return SPECIAL[method][fault.name](right())

    def decode(self, state: Any, tokens: Any) -> Any:
        output = FIRST.Markov.decode(self, state, tokens)
        if self.fault.method in LOGITS:
            logits = Readings(output.logits.array)
            logits.target = self
            output = ForwardOutput(rows=output.rows, logits=logits)
        return self.answer("decode", lambda: output)


def _asked(method: str) -> Any:
    def called(self: Faulty, *arguments: Any) -> Any:
        return self.answer(method, lambda: getattr(FIRST.Markov, method)(self, *arguments))

    return called


for _name in METHODS:
    if _name != "decode":
        setattr(Faulty, _name, _asked(_name))


@attrs.frozen(eq=False)
class Plugin:
    target: Faulty

    @hookimpl
    def specdec_forward_pass(self, target_config: Any) -> Any:
        return self.target


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    method = draw(st.sampled_from((*METHODS, *LOGITS)))
    sorts = ["raises"] + ["answers"] * (method not in UNREAD) + ["special"] * (method in SPECIAL)
    sort = draw(st.sampled_from(sorts))
    table: dict[str, Any] = {"raises": RAISED, "answers": ANSWERS, "special": SPECIAL.get(method, {})}[sort]
    stays = sort == "answers" and method in LOGITS  # asked again, right ones would not say who was wrong
    names = set(table) - PLAUSIBLE.get(method, set())
    name, call = draw(st.sampled_from(sorted(names))), draw(st.integers(1, 5))
    return Fault(method, sort, name, call, stays or draw(st.booleans()))


def run(fault: Fault, settings: dict[str, Any], *, drafter: str) -> tuple[Any, Any, Faulty]:
    """The session, the result or the error, and the target."""
    target = Faulty(fault)
    registry = Registry(BUILT_INS, entry_points=())
    registry.register(Plugin(target), "faulty")
    former = use_registry(registry)
    session = None
    try:
        lm = specdec.load(backend="markov", drafter=drafter, depth=3)
        session = lm.session()
        result = session.generate("the dog sat on", max_new_tokens=COUNT, ignore_eos=True, **settings)
        session.fork().generate("the dog sat", max_new_tokens=2, ignore_eos=True, **settings)  # a rewind
        return session, result, target
    except SpecdecError as error:
        return session, error, target
    finally:
        use_registry(former)


@examples(200)
@given(fault=faults(), settings=st.sampled_from(SETTINGS))
def test_a_fault_of_a_target_is_named(fault: Fault, settings: dict[str, Any]) -> None:
    _, truth, _ = run(NOTHING, settings, drafter="none")
    session, outcome, target = run(fault, settings, drafter="ngram")
    event(f"{fault.method}, {fault.sort}: {'ended' if isinstance(outcome, SpecdecError) else 'went on'}")
    if isinstance(outcome, SpecdecError):
        assert target.struck, outcome
        assert outcome.plugin, outcome
        assert outcome.plugin[0] == "target", outcome
        assert len(str(outcome)) <= 2000
        assert list(outcome.tokens) == truth.tokens[: len(outcome.tokens)] or session is None or session.tokens
        return
    assert outcome.tokens == truth.tokens
    assert outcome.guarantee == "exact"


def test_the_target_without_a_fault_is_right() -> None:
    session, result, _ = run(NOTHING, {}, drafter="ngram")
    assert result.guarantee == "exact"
    assert sum(result.stats.accepted) > 0
    assert session.tokens

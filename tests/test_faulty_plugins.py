"""Plugins that are right but for one fault, drawn at random: the output is that of plain decoding, or an error names
the plugin and keeps the tokens. A guarantee never stands where it does not hold.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import specdec
from specdec.config import Choice
from specdec.contract import (
    CycleRecord,
    DepthPolicy,
    DepthPolicySpec,
    Draft,
    Drafter,
    DrafterSnapshot,
    DrafterSpec,
    Guarantee,
    LogitsProcessor,
    ProcessorSpec,
    Sampling,
    Verdict,
    Verifier,
    VerifierSpec,
)
from specdec.decoding.parts import DepthPart, DrafterPart, make_verifier
from specdec.errors import SpecdecError, StateError
from specdec.hookspecs import hookimpl
from specdec.registry import BUILT_INS, Registry, use_registry
from specdec.verifiers.strict import StrictVerifier
from tests.selection import examples

PROMPT = [7, 8, 9, 7, 8, 9, 7, 8]
COUNT = 10
METHODS = {
    "drafter": ("factory", "prefill", "propose", "observe", "device_draft", "rewind", "snapshot", "report"),
    "verifier": ("factory", "verify", "is_argmax"),
    "depth policy": ("factory", "next_depth", "record", "reason"),
    "logits processor": ("factory", "process", "legal"),
    "observer": ("specdec_cycle",),
}
ENDS = ("verifier", "logits processor")  # without these nothing says what the output should be


class Panic(BaseException):
    """As compiled libraries raise it."""


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Shy:
    def __repr__(self) -> str:
        raise SystemExit("no repr")


RAISED: dict[str, Callable[[], BaseException]] = {
    "an error": lambda: ValueError("boom"),
    "no memory": MemoryError,
    "recursion": RecursionError,
    "exit": lambda: SystemExit(3),
    "generator exit": GeneratorExit,
    "stop iteration": StopIteration,
    "panic": lambda: Panic("index out of bounds"),
    "mute": Mute,
    "ours": lambda: StateError("out of order"),
    "a long text": lambda: ValueError("x" * 100_000),
}
ANSWERS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a float": lambda: 1.5,
    "a whole float": lambda: 2.0,
    "NaN": lambda: float("nan"),
    "text": lambda: "three",
    "a list": lambda: [1, 2],
    "a numpy float": lambda: np.float32(1),
    "a bool": lambda: True,
    "minus one": lambda: -1,
    "huge": lambda: 10**4400,
    "shy": Shy,
    "a generator": lambda: (number for number in itertools.count()),
    "an array": lambda: np.zeros((2, 2)),
    "a class": lambda: type("Made", (Draft,), {}),
}
SPECIAL: dict[str, dict[str, Callable[[Any], Any]]] = {  # from the right answer
    "propose": {
        "float tokens": lambda draft: Draft((1.0, 2.0)),  # type: ignore[arg-type]
        "numpy tokens": lambda draft: Draft(tuple(np.array(draft.tokens, np.int64))),
        "endless tokens": lambda draft: Draft(itertools.count()),  # type: ignore[arg-type]
        "too many": lambda draft: Draft((1,) * 500),
        "outside": lambda draft: Draft((10**9, -5)),
        "huge ids": lambda draft: Draft((10**40,)),
        "probs of another shape": lambda draft: Draft(draft.tokens, np.ones((1, 3), np.float32)),
        "probs as a list": lambda draft: Draft(draft.tokens, [[1.0]]),  # type: ignore[arg-type]
        "tokens None": lambda draft: Draft(None),  # type: ignore[arg-type]
        "shy tokens": lambda draft: Draft(Shy()),  # type: ignore[arg-type]
    },
    "verify": {
        "numpy numbers": lambda verdict: Verdict(np.int64(verdict.accepted), np.int32(verdict.next_token)),  # type: ignore[arg-type]
        "too many accepted": lambda verdict: Verdict(verdict.accepted + 20, verdict.next_token),
        "minus accepted": lambda verdict: Verdict(-1, verdict.next_token),
        "a token outside": lambda verdict: Verdict(verdict.accepted, 10**6),
        "a float token": lambda verdict: Verdict(verdict.accepted, float(verdict.next_token)),  # type: ignore[arg-type]
        "deviations None": lambda verdict: Verdict(verdict.accepted, verdict.next_token, 5),  # type: ignore[arg-type]
        "a deviation that is none": lambda verdict: Verdict(verdict.accepted, verdict.next_token, ((99, 1.0),)),
        "a tuple": lambda verdict: (verdict.accepted, verdict.next_token),
    },
    "process": {
        "wider": lambda row: np.append(row, row),
        "in double precision": lambda row: row.astype(np.float64),
        "with NaN": lambda row: np.full_like(row, np.nan),
        "infinite": lambda row: np.full_like(row, np.inf),
        "a list of it": lambda row: row.tolist(),
        "nothing allowed": lambda row: np.full_like(row, -np.inf),
        "two rows": lambda row: np.stack([row, row]),
        "objects": lambda row: row.astype(object),
    },
    "legal": {"one more": lambda count: count + 1, "a numpy int": np.int64},
    "next_depth": {"a numpy int": np.int64},
    "snapshot": {
        "endless": lambda _: DrafterSnapshot(Endless()),  # type: ignore[arg-type]
        "objects": lambda _: DrafterSnapshot({"a": np.array([Shy()], dtype=object)}),
        "objects in meta": lambda _: DrafterSnapshot({}, {"a": Shy()}),  # type: ignore[dict-item]
        "no names": lambda _: DrafterSnapshot({5: np.zeros(2)}),  # type: ignore[dict-item]
    },
    "report": {
        "endless": lambda _: Endless(),
        "objects": lambda _: {"a": Shy()},
        "nested": lambda _: nested(),
        "NaN": lambda _: {"a": float("nan")},
    },
}
CHANGES: dict[str, Callable[..., None]] = {  # what a plugin does to its arguments
    "context.cycle": lambda context: setattr(context, "cycle", context.cycle + 1),
    "context.sampling": lambda context: setattr(context, "sampling", Sampling(temperature=2.0, seed=5)),
    "context.generated_from": lambda context: setattr(context, "generated_from", 0),
    "context._tokens": lambda context: context._tokens.append(3),
}
UNSTEADY: dict[str, Callable[[int], float]] = {  # what a processor adds to the even ids
    "the clock": lambda call: time.perf_counter_ns() % 97,
    "the global generator": lambda call: random.random() * 50,
    "the call": lambda call: float(call),
    "every second call": lambda call: 40.0 * (call % 2),
}


class Endless(dict[str, Any]):
    def __iter__(self) -> Iterator[str]:
        return map(str, itertools.count())

    def __getitem__(self, name: str) -> int:
        return 1


def nested() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["self"] = made
    return made


@attrs.frozen
class Fault:
    """One fault of one method, at its n-th call or from it on."""

    kind: str
    method: str
    sort: str  # "raises", "answers", "special", "changes", "unsteady"
    name: str
    call: int
    stays: bool


class Faulty:
    """Counts the calls of the faulty method, and decides what comes back."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.calls = 0
        self.struck = 0

    def answer(self, method: str, right: Callable[[], Any], context: Any = None) -> Any:
        fault = self.fault
        if method != fault.method:
            return right()
        self.calls += 1
        if fault.sort == "unsteady" or self.calls < fault.call or (self.calls > fault.call and not fault.stays):
            return right()
        self.struck += 1
        if fault.sort == "raises":
            raise RAISED[fault.name]()
        if fault.sort == "answers":
            return ANSWERS[fault.name]()
        if fault.sort == "special":
            return SPECIAL[method][fault.name](right())
        answer = right()
        CHANGES[fault.name](context)
        return answer


def plugins(faulty: Faulty) -> Any:
    """A plugin of every kind; the one that the fault is about has it."""
    ask = faulty.answer

    class FaultyDrafter(Drafter):
        def prefill(self, context: Any, output: Any) -> Any:
            return ask("prefill", lambda: None)

        def propose(self, context: Any, depth: int) -> Any:
            history = list(context)  # what followed the same token last time
            before = [at for at, token in enumerate(history[:-1]) if token == history[-1]]
            right = Draft(tuple(history[before[-1] + 1 :][:depth])) if before else Draft()
            return ask("propose", lambda: right, context)

        def observe(self, verdict: Any, output: Any, context: Any) -> Any:
            return ask("observe", lambda: None, context)

        def device_draft(self, context: Any) -> Any:
            return ask("device_draft", lambda: None, context)

        def rewind(self, length: int) -> Any:
            return ask("rewind", lambda: None)

        def snapshot(self, context: Any) -> Any:
            return ask("snapshot", lambda: None, context)

        def report(self) -> Any:
            return ask("report", lambda: {"fine": 1})

    class FaultyVerifier(Verifier):
        guarantee = Guarantee.EXACT

        def verify(self, draft: Any, logits: Any, context: Any) -> Any:
            return ask("verify", lambda: StrictVerifier().verify(draft, logits, context), context)

        def is_argmax(self, sampling: Any) -> Any:
            return ask("is_argmax", lambda: False)

    class FaultyPolicy(DepthPolicy):
        @property
        def reason(self) -> Any:
            return ask("reason", lambda: "")

        def next_depth(self, stats: Any) -> Any:
            stats.offered = None if faulty.struck and faulty.fault.method == "next_depth" else stats.offered
            return ask("next_depth", lambda: 3)

        def record(self, cycle: Any) -> Any:
            return ask("record", lambda: None)

    class FaultyProcessor(LogitsProcessor):
        calls = 0

        def process(self, logits: Any, history: Any) -> Any:
            right = logits.copy()
            right[:: 2 + history[-1] % 3] += 2.0
            if faulty.fault.sort == "unsteady":
                faulty.struck += 1
                FaultyProcessor.calls += 1
                right[::2] += np.float32(UNSTEADY[faulty.fault.name](FaultyProcessor.calls))
            answer = ask("process", lambda: right)
            if faulty.fault.method == "process":  # its arguments are its own
                logits[:] = 0
                history.clear()
            return answer

        def legal(self, draft: Any, history: Any) -> Any:
            return ask("legal", lambda: len(draft), history)

    def factory(kind: str, make: Callable[[], Any]) -> Callable[..., Any]:
        return lambda *_: ask("factory", make) if faulty.fault.kind == kind else make()

    class Plugin:
        @hookimpl
        def specdec_drafters(self) -> list[DrafterSpec]:
            return [DrafterSpec(name="faulty", factory=factory("drafter", FaultyDrafter))]

        @hookimpl
        def specdec_verifiers(self) -> list[VerifierSpec]:
            return [VerifierSpec(name="faulty", factory=factory("verifier", FaultyVerifier))]

        @hookimpl
        def specdec_depth_policies(self) -> list[DepthPolicySpec]:
            return [DepthPolicySpec(name="faulty", factory=factory("depth policy", FaultyPolicy))]

        @hookimpl
        def specdec_logits_processors(self) -> list[ProcessorSpec]:
            return [ProcessorSpec(name="faulty", factory=factory("logits processor", FaultyProcessor))]

        @hookimpl
        def specdec_cycle(self, record: CycleRecord) -> Any:
            return ask("specdec_cycle", lambda: None)

    return Plugin()


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(sorted(METHODS)))
    method = draw(st.sampled_from(METHODS[kind]))
    sorts = ["raises"] + ["answers"] * (method not in ("prefill", "observe", "record", "specdec_cycle"))
    sorts += ["special"] * (method in SPECIAL) + ["changes"] * (method in ("propose", "observe", "verify", "snapshot"))
    sorts += ["unsteady"] * (method == "process")
    sort = draw(st.sampled_from(sorts))
    table: dict[str, Any] = {
        "raises": RAISED,
        "answers": ANSWERS,
        "special": SPECIAL.get(method, {}),
        "changes": CHANGES,
        "unsteady": UNSTEADY,
    }[sort]
    return Fault(kind, method, sort, draw(st.sampled_from(sorted(table))), draw(st.integers(1, 6)), draw(st.booleans()))


@pytest.fixture(scope="module")
def lm() -> Any:
    return specdec.load("demo", drafter="none", depth=0)


def run(lm: Any, plugin: Any, settings: dict[str, Any], *, plain: bool) -> Any:
    """The session, and the result or the error."""
    registry = Registry(BUILT_INS, entry_points=())
    registry.register(plugin, "faulty")
    former = use_registry(registry)
    session = None
    try:
        if not plain:
            lm = attrs.evolve(
                lm,
                drafter=DrafterPart.of(Choice("faulty")),
                depth=DepthPart.of(Choice("faulty")),
                verifier=make_verifier(Choice("faulty")),
            )
        session = lm.session()
        settings = {**settings, "max_new_tokens": COUNT, "ignore_eos": True, "processors": (Choice("faulty"),)}
        result = session.generate(PROMPT, **settings)
        session.fork()
        for back in range(1, 5):
            session.rewind(len(PROMPT) + COUNT - back)
        return session, result
    except SpecdecError as error:
        return session, error
    finally:
        use_registry(former)


NOTHING = Fault("", "", "", "", 0, False)


SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"logprobs": 1}, {"repetition_penalty": 1.3}]


@examples(500)
@given(fault=faults(), settings=st.sampled_from(SETTINGS))
def test_a_fault_of_a_plugin_never_changes_the_output_of_strict(lm: Any, fault: Fault, settings: Any) -> None:
    right = plugins(Faulty(NOTHING))
    _, truth = run(lm, right, settings, plain=True)
    faulty = Faulty(fault)
    session, outcome = run(lm, plugins(faulty), settings, plain=False)
    event(f"{fault.kind}, {fault.sort}: {'ended' if isinstance(outcome, SpecdecError) else 'went on'}")
    if isinstance(outcome, SpecdecError):
        assert outcome.plugin == (fault.kind, "faulty"), outcome
        assert fault.kind in ENDS or fault.sort == "changes" or fault.method == "factory"
        assert len(str(outcome)) <= 2000
        assert list(outcome.tokens) == truth.tokens[: len(outcome.tokens)]
        if session is not None:
            kept = list(session.tokens[len(PROMPT) :])
            assert kept == list(outcome.tokens) or (not outcome.tokens and kept == truth.tokens)  # or in fork
        return
    if outcome.guarantee == "exact":
        assert outcome.tokens == truth.tokens
        assert outcome.parity == "bitwise"
    else:
        assert fault.sort == "unsteady"
        assert any("does not hold" in notice and "'faulty'" in notice for notice in outcome.notices)
    outcome.to_dict()
    reasons = " ".join([*outcome.notices, outcome.stats.speculation()["reason"]])
    if fault.sort == "raises" and faulty.struck and fault.method not in ("rewind", "snapshot", "factory"):
        assert "'faulty' failed in " + fault.method in reasons


@given(name=st.sampled_from(sorted(UNSTEADY)), settings=st.sampled_from([{}, {"temperature": 0.8, "seed": 3}]))
@examples(40)
def test_a_processor_whose_answers_change_costs_the_guarantee(lm: Any, name: str, settings: dict[str, Any]) -> None:
    faulty = Faulty(Fault("logits processor", "process", "unsteady", name, 1, True))
    _, result = run(lm, plugins(faulty), settings, plain=False)
    assert result.guarantee == "heuristic"


def test_ctrl_c_in_a_plugin_stays_ctrl_c(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> BaseException:
        return KeyboardInterrupt()

    monkeypatch.setitem(RAISED, "an error", interrupt)
    for kind, methods in METHODS.items():
        for method in methods:
            if method in ("legal", "device_draft"):
                continue  # not called here
            with pytest.raises(KeyboardInterrupt):
                run(lm, plugins(Faulty(Fault(kind, method, "raises", "an error", 1, True))), {}, plain=False)

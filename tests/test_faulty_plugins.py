"""Plugins that are right but for one fault: the output is that of plain decoding, or an error names plugin and method
and keeps the tokens. A guarantee never stands where it does not hold.
"""

import inspect
import runpy
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import specdec
from specdec.backends import Backend
from specdec.config import Choice
from specdec.contract import (
    BackendSpec,
    DepthPolicySpec,
    Draft,
    Drafter,
    DrafterSpec,
    ForwardOutput,
    LogitsProcessor,
    ProcessorSpec,
    Verdict,
    VerifierSpec,
)
from specdec.errors import PluginError, SpecdecError, StateError
from specdec.policies.fixed import FixedConfig, FixedPolicy
from specdec.registry import BUILT_INS, Registry, use_registry
from specdec.registry.parts import DepthPart, DrafterPart, make_verifier
from specdec.verifiers.strict import StrictVerifier
from tests.plugin_objects import plugin_of
from tests.processes import ROOT
from tests.selection import examples

PROMPT = [7, 8, 9, 7, 8, 9, 7, 8]
COUNT = 10
SETTINGS = [{}, {"temperature": 0.8, "seed": 3}, {"logprobs": 1}, {"repetition_penalty": 1.3}]
METHODS = {
    "drafter": ("factory", "prefill", "propose", "observe", "rewind", "snapshot", "report"),
    "verifier": ("factory", "verify"),
    "depth policy": ("factory", "next_depth", "record", "reason"),
    "logits processor": ("factory", "process", "legal"),
    "observer": ("specdec_cycle",),
}
ENDS = ("verifier", "logits processor", "depth policy")  # a failure of these ends the generation
RAISED = {
    "an error": lambda: ValueError("boom"),
    "stop iteration": StopIteration,
    "a long text": lambda: ValueError("x" * 100_000),
    "ours": lambda: StateError("out of order"),
}
ANSWERS = {  # from the right answer
    "propose": {
        "nothing": lambda draft: None,
        "float tokens": lambda draft: Draft((1.0, 2.0)),
        "numpy tokens": lambda draft: Draft(tuple(np.array(draft.tokens, np.int64))),
        "too many": lambda draft: Draft((1,) * 500),
        "outside": lambda draft: Draft((10**9, -5)),
        "probs of another shape": lambda draft: Draft((1,), np.ones((1, 3), np.float32)),
        "probs of too few rows": lambda draft: Draft((1, 2), np.ones((1, 277), np.float32)),
    },
    "verify": {
        "nothing": lambda verdict: None,
        "numpy numbers": lambda verdict: Verdict(np.int64(verdict.accepted), np.int32(verdict.next_token)),
        "too many accepted": lambda verdict: Verdict(verdict.accepted + 20, verdict.next_token),
        "minus accepted": lambda verdict: Verdict(-1, verdict.next_token),
        "a token outside": lambda verdict: Verdict(verdict.accepted, 10**6),
        "a float token": lambda verdict: Verdict(verdict.accepted, float(verdict.next_token)),
    },
    "process": {
        "nothing": lambda row: None,
        "wider": lambda row: np.append(row, row),
        "in double precision": lambda row: row.astype(np.float64),
        "with NaN": lambda row: np.full_like(row, np.nan),
        "nothing allowed": lambda row: np.full_like(row, -np.inf),
    },
    "next_depth": {"nothing": lambda _: None, "text": lambda _: "3", "a numpy int": np.int64},
}


@attrs.frozen
class Fault:
    """One fault of one method, from its n-th call on."""

    kind: str
    method: str
    name: str  # in RAISED, or in ANSWERS of the method
    call: int = 1


class Faulty:
    """Counts the calls of the faulty method, and decides what comes back."""

    def __init__(self, fault=None):
        self.fault = fault
        self.calls = 0

    def answer(self, method, right):
        fault = self.fault
        if fault is None or method != fault.method:
            return right()
        self.calls += 1
        if self.calls < fault.call:
            return right()
        if fault.name in RAISED:
            raise RAISED[fault.name]()
        return ANSWERS[method][fault.name](right())


class Repeats(Drafter):
    """What followed the same token last time."""

    def propose(self, context, depth):
        history = list(context)
        before = [at for at, token in enumerate(history[:-1]) if token == history[-1]]
        return Draft(tuple(history[before[-1] + 1 :][:depth])) if before else Draft()

    def report(self):
        return {"fine": 1}


class Favours(LogitsProcessor):
    """Adds to some logits, depending on the last token."""

    def process(self, logits, history):
        right = logits.copy()
        right[:: 2 + history[-1] % 3] += 2.0
        return right


class Faulted:
    """A right plugin whose methods, and ``reason``, answer through ``Faulty``."""

    def __init__(self, right, faulty):
        self._right, self._faulty = right, faulty

    drafting = Drafter.drafting

    def __getattr__(self, name):
        right, ask = getattr(self._right, name), self._faulty.answer
        if name == "reason":
            return ask(name, lambda: right)
        return (lambda *given: ask(name, lambda: right(*given))) if inspect.ismethod(right) else right


def plugin(faulty):
    """A plugin of every kind; the one that the fault is about has it."""
    ask = faulty.answer

    def listed(spec, kind, make):
        own = faulty.fault is not None and faulty.fault.kind == kind

        def factory(*_):
            return ask("factory", lambda: Faulted(make(), faulty)) if own else make()

        return lambda self: [spec(name="faulty", factory=factory)]

    return plugin_of(
        specdec_drafters=listed(DrafterSpec, "drafter", Repeats),
        specdec_verifiers=listed(VerifierSpec, "verifier", StrictVerifier),
        specdec_depth_policies=listed(DepthPolicySpec, "depth policy", lambda: FixedPolicy(FixedConfig(depth=3))),
        specdec_logits_processors=listed(ProcessorSpec, "logits processor", Favours),
        specdec_cycle=lambda self, record: ask("specdec_cycle", lambda: None),
    )


@st.composite
def faults(draw):
    kind = draw(st.sampled_from(sorted(METHODS)))
    method = draw(st.sampled_from(METHODS[kind]))
    name = draw(st.sampled_from(sorted({**RAISED, **ANSWERS.get(method, {})})))
    return Fault(kind, method, name, draw(st.integers(1, 6)))


@pytest.fixture(scope="module")
def lm():
    return specdec.load("demo", drafter="none", depth=0)


def run(lm, settings, *, plain):
    """The session, and the result or the error."""
    session = None
    try:
        if not plain:
            lm = attrs.evolve(
                lm,
                drafter=DrafterPart.of(Choice("faulty")),
                depth=DepthPart.of(Choice("faulty")),
                verifier=make_verifier(Choice("faulty")),
                config=attrs.evolve(lm.config, verifier=Choice("faulty")),
            )
        session = lm.session()
        settings = {**settings, "max_new_tokens": COUNT, "ignore_eos": True, "processors": (Choice("faulty"),)}
        result = session.generate(PROMPT, **settings)
        session.fork()
        session.rewind(len(PROMPT) + 4)
    except SpecdecError as error:
        return session, error
    return session, result


@examples(240)
@given(fault=faults(), settings=st.sampled_from(SETTINGS))
def test_a_fault_of_a_plugin_never_changes_the_output_of_strict(lm, fault, settings):
    former = use_registry(Registry([*BUILT_INS, plugin(Faulty())], entry_points=()))
    try:
        _, truth = run(lm, settings, plain=True)
        faulty = Faulty(fault)
        use_registry(Registry([*BUILT_INS, plugin(faulty)], entry_points=()))
        session, outcome = run(lm, settings, plain=False)
    finally:
        use_registry(former)
    event(f"{fault.kind}: {'ended' if isinstance(outcome, SpecdecError) else 'went on'}")
    if isinstance(outcome, SpecdecError):
        assert outcome.plugin in ((fault.kind, "faulty"), ("verifier", "faulty")), outcome  # the latter ran it
        assert fault.kind in ENDS or fault.method == "factory"
        assert len(str(outcome)) <= 2000
        if fault.name == "an error":
            assert f"'faulty' failed in {fault.method}: ValueError: boom" in outcome.message
        assert list(outcome.tokens) == truth.tokens[: len(outcome.tokens)]
        if session is not None and outcome.tokens:
            assert list(session.tokens[len(PROMPT) :]) == list(outcome.tokens)
        return
    assert outcome.tokens == truth.tokens
    assert (outcome.guarantee, outcome.parity) == ("exact", "bitwise")
    reasons = " ".join([*outcome.notices, outcome.stats.speculation()["reason"]])
    struck = faulty.calls >= fault.call
    if fault.name in RAISED and struck and fault.method not in ("rewind", "snapshot"):
        assert f" failed in {fault.method}" in reasons
    assert len(reasons) < 4000


@pytest.mark.parametrize("kind", METHODS)
def test_ctrl_c_in_a_plugin_stays_ctrl_c(lm, kind, install, monkeypatch):
    monkeypatch.setitem(RAISED, "an error", KeyboardInterrupt)
    for method in set(METHODS[kind]) - {"legal"}:  # not called here
        install(plugin(Faulty(Fault(kind, method, "an error"))))
        with pytest.raises(KeyboardInterrupt):
            run(lm, {}, plain=False)


# --- before the first token ------------------------------------------------------------------------------------------


def boom(*_):
    raise OSError("no licence")


class NoOps(Backend):
    name, device, dtypes = "faulty", "none", ("float32",)

    def ops(self, dtype):
        raise OSError("no licence")


BUILDING = {
    "drafter prepare": ("specdec_drafters", DrafterSpec(name="faulty", factory=boom, prepare=boom)),
    "drafter needs": ("specdec_drafters", DrafterSpec(name="faulty", factory=boom, needs=boom)),
    "drafter factory": ("specdec_drafters", DrafterSpec(name="faulty", factory=boom)),
    "verifier factory": ("specdec_verifiers", VerifierSpec(name="faulty", factory=boom)),
    "depth policy factory": ("specdec_depth_policies", DepthPolicySpec(name="faulty", factory=boom)),
    "backend factory": ("specdec_backends", BackendSpec(name="faulty", factory=boom)),
    "backend ops": ("specdec_backends", BackendSpec(name="faulty", factory=lambda config: NoOps())),
    "plugin specdec_forward_pass": ("specdec_forward_pass", None),
}


@pytest.mark.parametrize("case", BUILDING)
def test_a_failure_while_the_parts_are_built_names_kind_and_method(case, install):
    hook, spec = BUILDING[case]
    kind, _, method = case.rpartition(" ")
    install(plugin_of(**{hook: (lambda self: [spec]) if spec else lambda self, target_config: boom()}))
    with pytest.raises(PluginError, match=rf"the {kind} '.*' failed in {method}: OSError: no licence"):
        specdec.load("demo", **({kind.split()[0]: "faulty"} if spec else {}))


def test_a_verifier_without_a_guarantee_is_refused(install):
    install(plugin_of(specdec_verifiers=lambda self: [VerifierSpec(name="odd", factory=lambda config: object())]))
    with pytest.raises(PluginError, match="'odd' failed in factory: AttributeError: .*'guarantee'"):
        make_verifier(Choice("odd"))


# --- targets of another engine ----------------------------------------------------------------------------------------


FIRST = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "first_target.py")))


CALLS = {
    "new_state": lambda lm, session: lm.session(),
    "prefill": lambda lm, session: session.generate("the cat sat", max_new_tokens=6),
    "decode": lambda lm, session: session.generate(max_new_tokens=6, ignore_eos=True),
    "commit": lambda lm, session: session.generate(max_new_tokens=6, ignore_eos=True),
    "rewind": lambda lm, session: session.rewind(3),
    "snapshot": lambda lm, session: session.fork(),
    "restore": lambda lm, session: session.fork(),
}


@pytest.fixture
def markov(install):
    install(plugin_of(specdec_forward_pass=lambda self, target_config: FIRST.Markov(FIRST.TEXT)))
    return specdec.load(backend="markov", drafter="ngram", depth=3)


@pytest.mark.parametrize("method", CALLS)
def test_a_fault_of_a_target_is_named_and_keeps_the_tokens(method, markov, monkeypatch):
    def fails(*_):
        raise OSError("the server is gone")

    session = markov.session()
    first = session.generate("the dog sat on", max_new_tokens=4, ignore_eos=True)
    truth = markov.generate("the dog sat on", max_new_tokens=12, ignore_eos=True).tokens
    monkeypatch.setattr(markov.target, method, fails, raising=False)
    with pytest.raises(PluginError, match=f"the target '.*' failed in {method}: OSError: the server is gone") as error:
        CALLS[method](markov, session)
    assert error.value.plugin[0] == "target"
    monkeypatch.undo()
    if method == "rewind":  # the tokens are the truth, and they were shorter already
        assert session.tokens == tuple(first.prompt[:3])
        return
    made = session.tokens[len(first.prompt) :]
    assert list(made[:4]) == first.tokens
    if method != "prefill":
        rest = session.generate(max_new_tokens=12 - len(made), ignore_eos=True)
        assert [*made, *rest.tokens] == truth


def test_logits_that_are_not_finite_end_the_generation(markov, monkeypatch):
    decode = markov.target.decode

    def nan(state, tokens):
        rows = np.full_like(decode(state, tokens).logits.rows(), np.nan)
        return ForwardOutput(rows=len(tokens), logits=FIRST.HostLogits(rows))

    monkeypatch.setattr(markov.target, "decode", nan)
    for settings in ({}, {"temperature": 1.0}, {"repetition_penalty": 1.2}):
        with pytest.raises(SpecdecError, match="finite|outside the vocabulary"):
            markov.generate("the dog sat on", max_new_tokens=4, **settings)

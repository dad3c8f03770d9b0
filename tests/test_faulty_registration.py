"""Plugins whose registration, configuration or preparation is faulty, drawn at random: every error is a SpecdecError,
and ``specdec plugins`` lists what is left and names what failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from hypothesis import event, given
from hypothesis import strategies as st

import specdec
from specdec.backends import Backend
from specdec.cli import main
from specdec.contract import (
    BackendSpec,
    DepthPolicy,
    DepthPolicySpec,
    Draft,
    Drafter,
    DrafterSpec,
    LogitsProcessor,
    ModelSpec,
    ProcessorSpec,
    VerifierSpec,
)
from specdec.errors import SpecdecError
from specdec.hookspecs import hookimpl
from specdec.registry import BUILT_INS, Registry, use_registry
from specdec.verifiers.strict import StrictVerifier
from tests.selection import examples
from tests.test_faulty_plugins import ANSWERS, PROMPT, RAISED

HOOKS = {
    "specdec_drafters": "drafter",
    "specdec_verifiers": "verifier",
    "specdec_depth_policies": "depth",
    "specdec_logits_processors": "processor",
    "specdec_backends": "backend",
    "specdec_models": "family",
    "specdec_forward_pass": "target",
}


CALLED = ("factory", "prepare", "needs", "available", "preference", "parse", "build")


class Fine(Drafter):
    def propose(self, context: Any, depth: int) -> Draft:
        return Draft((1,))


class FinePolicy(DepthPolicy):
    def next_depth(self, stats: Any) -> int:
        return 1


class FineProcessor(LogitsProcessor):
    def process(self, logits: Any, history: Any) -> Any:
        return logits


class HalfBackend(Backend):
    name, device, dtypes = "faulty", "none", ("float32",)

    def ops(self, dtype: str) -> Any:
        raise ValueError("no operations")


def _ignore(*_: object) -> None:
    pass


def specs(config: type) -> dict[str, Any]:
    """A right spec of every kind."""
    shared: dict[str, Any] = {"name": "faulty", "config": config}
    return {
        "drafter": DrafterSpec(**shared, factory=lambda *_: Fine(), prepare=_ignore),
        "verifier": VerifierSpec(**shared, factory=lambda *_: StrictVerifier()),
        "depth": DepthPolicySpec(**shared, factory=lambda *_: FinePolicy(), prepare=_ignore),
        "processor": ProcessorSpec(**shared, factory=lambda *_: FineProcessor()),
        "backend": BackendSpec(**shared, factory=lambda *_: HalfBackend(), preference=lambda: 1000),
        "family": ModelSpec(name="faulty", model_types=("faulty",), parse=_ignore, build=_ignore),
    }


@attrs.frozen
class Option:
    """A config class that is right."""

    size: int = 3
    path: str = "x"


@attrs.frozen
class Fault:
    place: str  # a key of HOOKS' values, or "hook" for the whole answer of one
    field: str
    value: Any = attrs.field(repr=False)
    name: str = ""


def raising(name: str) -> Callable[..., Any]:
    def fails(*_: object, **__: object) -> Any:
        raise RAISED[name]()

    return fails


def configs(name: str) -> dict[str, type]:
    """Config classes with one fault: what raises is ``RAISED[name]``."""
    fails = raising(name)

    @attrs.frozen
    class BadDefault:
        size: int = attrs.field(factory=fails)

    @attrs.frozen
    class BadValidator:
        size: int = attrs.field(default=3, validator=fails)

    @attrs.frozen
    class BadConverter:
        size: int = attrs.field(default=3, converter=fails)

    @attrs.frozen
    class BadInit:
        size: int = 3
        __attrs_post_init__ = fails

    @attrs.frozen
    class Unreadable:
        size: Callable[[], int] = int

    @attrs.frozen
    class Required:
        size: int

    @attrs.frozen
    class Unknown:
        size: "Nothing" = 3  # type: ignore[name-defined]  # noqa: F821, UP037

    return {
        made.__name__: made for made in (BadDefault, BadValidator, BadConverter, BadInit, Unreadable, Required, Unknown)
    }


@st.composite
def faults(draw: st.DrawFn) -> tuple[Fault, type, dict[str, Any]]:
    """A fault, the config class, and the options that are given."""
    raised = draw(st.sampled_from(sorted(RAISED)))
    sort = draw(st.sampled_from(["field", "returns", "raises", "hook returns", "hook raises", "config", "options"]))
    options: dict[str, Any] = {}
    config: type = Option
    if sort.startswith("hook"):
        hook = draw(st.sampled_from(sorted(HOOKS)))
        answer = draw(st.sampled_from(sorted(ANSWERS)))
        value = raising(raised) if sort == "hook raises" else lambda *_: ANSWERS[answer]()
        return Fault("hook", hook, value, f"{sort} {raised if sort == 'hook raises' else answer}"), config, options
    place = draw(st.sampled_from(sorted(specs(Option))))
    fields = [field.name for field in attrs.fields(type(specs(Option)[place]))]
    field = draw(st.sampled_from(fields))
    if sort == "config":
        found = configs(raised)
        name = draw(st.sampled_from(sorted(found)))
        return Fault(place, "none", None, f"{name} {raised}"), found[name], options
    if sort == "options":
        value = draw(
            st.one_of(
                st.sampled_from([None, "x", 1.5, True, [1], {"a": 1}, 10**30, float("nan"), b"x", object(), (1,)]),
                st.text(max_size=5),
            )
        )
        options = {draw(st.sampled_from(["size", "path", "other", "", "name", 5])): value}  # type: ignore[list-item]
        return Fault(place, "none", None, f"options {options}"), config, options
    answer = draw(st.sampled_from(sorted(ANSWERS)))
    if sort == "field":
        return Fault(place, field, ANSWERS[answer](), f"{answer} as {field}"), config, options
    called = [
        one for one in fields if one in ("factory", "prepare", "needs", "available", "preference", "parse", "build")
    ]
    field = draw(st.sampled_from(called))
    value = raising(raised) if sort == "raises" else lambda *_: ANSWERS[answer]()
    return Fault(place, field, value, f"{field} {sort} {raised if sort == 'raises' else answer}"), config, options


def plugin(fault: Fault, config: type) -> Any:
    made = specs(config)
    if fault.field != "none" and fault.place != "hook":
        made[fault.place] = attrs.evolve(made[fault.place], **{fault.field: fault.value})

    def hook(name: str) -> Any:
        if name == "specdec_forward_pass":

            def function(self: object, target_config: Any) -> Any:
                return fault.value() if fault.field == name else None

        else:

            def function(self: object) -> Any:  # type: ignore[misc]
                return fault.value() if fault.field == name else [made[HOOKS[name]]]

        function.__name__ = name
        return hookimpl(function)

    return type("Plugin", (), {name: hook(name) for name in HOOKS})()


def use(fault: Fault, options: dict[str, Any]) -> None:
    """Load and generate with the plugin's part; a failure anywhere is a SpecdecError."""
    choice = {"name": "faulty", **options}
    chosen: dict[str, Any] = {"drafter": "ngram", "depth": 2}
    if fault.place in ("drafter", "verifier", "depth"):
        chosen[fault.place] = choice
    chosen["backend"] = "faulty" if fault.place == "backend" else "cpu"
    lm = specdec.load("demo", **chosen)
    extra = {"processors": [choice]} if fault.place == "processor" else {}
    lm.generate(PROMPT, max_new_tokens=4, ignore_eos=True, **extra)


@examples(250)
@given(drawn=faults())
def test_every_fault_of_a_registration_is_a_sentence(drawn: tuple[Fault, type, dict[str, Any]]) -> None:
    fault, config, options = drawn
    registry = Registry([*BUILT_INS, plugin(fault, config)], entry_points=())
    former = use_registry(registry)
    try:
        try:
            said = ""
            use(fault, options)
        except SpecdecError as error:
            said = str(error)
        assert len(said) <= 2000
        event("an error" if said else "went on")
        listed = CliRunner().invoke(main, ["plugins", "--json"])
        assert listed.exit_code == 0, listed.output + repr(listed.exception)
        found = json.loads(listed.stdout)
        registered = any(one["name"] == "faulty" for one in found["drafters"])
        if not registered and fault.name != "hook returns None":  # to pluggy, None is no answer
            (failure,) = (one for one in found["failures"] if one["name"] == "Plugin")
            assert failure["error"]
            assert failure["module"]
    finally:
        use_registry(former)


@pytest.mark.parametrize("processors", [["t"], "t", [5], [None], {"name": "t"}, [{"name": 5}], [{}], 7])
def test_odd_processors_are_refused_in_a_sentence(processors: Any) -> None:
    lm = specdec.load("demo", drafter="none", depth=0)
    with pytest.raises(SpecdecError):
        lm.generate(PROMPT, max_new_tokens=2, processors=processors)

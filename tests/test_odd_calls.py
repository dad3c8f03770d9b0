"""Public calls with odd values: an error of specdec's, or the result of the equivalent plain value.

Which parameters there are is read from the signatures, so a new one is tried as well.
"""

from __future__ import annotations

import collections
import enum
import fractions
import inspect
import math
import os
import pathlib
import random
import re
import types
import typing
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import specdec
from specdec.config import Choice, GenerationConfig, Override, RunConfig, TargetConfig, load_config
from specdec.contract import Sampling
from specdec.decoding.conversation import Conversation
from specdec.decoding.parts import CallSettings
from specdec.errors import SpecdecError
from specdec.measuring import choose_prompts, load_prompts, own_prompts
from specdec.measuring.acceptance import AcceptanceMeasurement
from specdec.measuring.bench import BenchMeasurement
from specdec.measuring.prompts import FOLDER
from specdec.registry import registry
from specdec.testing import check_plugin, check_subjects
from specdec.testing.checks import Run
from tests import tiny

# --- odd values ------------------------------------------------------------------------------------------------------


class Text(str):
    pass


class Whole(int):
    pass


class Word(enum.StrEnum):
    ONE = "one"


def ignoring(*_):
    pass


def one_and_two():
    yield from (1, 2)


NOTHING = object()
"""The value stands for no plain one: it must be refused everywhere."""

ODD = {
    "None": (lambda: None, None),
    "True": (lambda: True, True),
    "False": (lambda: False, False),
    "0": (lambda: 0, 0),
    "3": (lambda: 3, 3),
    "-1": (lambda: -1, -1),
    "2**31": (lambda: 2**31, 2**31),
    "2**63": (lambda: 2**63, 2**63),
    "0.5": (lambda: 0.5, 0.5),
    "1.5": (lambda: 1.5, 1.5),
    "nan": (lambda: math.nan, math.nan),
    "inf": (lambda: math.inf, math.inf),
    "5e-324": (lambda: 5e-324, 5e-324),
    "empty text": (lambda: "", ""),
    "text": (lambda: "the", "the"),
    "123": (lambda: "123", "123"),
    "NUL": (lambda: "a\0b", "a\0b"),
    "long text": (lambda: "x" * 5000, "x" * 5000),
    "bytes": (lambda: b"the", NOTHING),
    "path": (lambda: pathlib.Path("no/such"), pathlib.Path("no/such")),
    "empty list": (lambda: [], []),
    "list": (lambda: [1, 2], [1, 2]),
    "tuple": (lambda: (1, 2), [1, 2]),
    "range": (lambda: range(3), [0, 1, 2]),
    "floats": (lambda: [5.5], [5.5]),
    "booleans": (lambda: [True], [True]),
    "nested": (lambda: [[1], [2]], [[1], [2]]),
    "set": (lambda: {1, 2}, {1, 2}),
    "dict": (lambda: {"a": 1}, {"a": 1}),
    "ids": (lambda: {1: 1.0}, {1: 1.0}),
    "generator": (one_and_two, [1, 2]),
    "function": (lambda: ignoring, ignoring),
    "fraction": (lambda: fractions.Fraction(1, 2), 0.5),
    "np.int64": (lambda: np.int64(3), 3),
    "np.float32": (lambda: np.float32(0.5), 0.5),
    "np.bool": (lambda: np.bool_(True), NOTHING),
    "np ids": (lambda: np.array([1, 2]), [1, 2]),
    "np floats": (lambda: np.array([1.0, 2.0]), [1.0, 2.0]),
    "np 2-d": (lambda: np.ones((2, 2), int), NOTHING),
    "torch ids": (lambda: torch.tensor([1, 2]), [1, 2]),
    "torch 0-d": (lambda: torch.tensor(3), NOTHING),
    "subclass of str": (lambda: Text("the"), "the"),
    "subclass of int": (lambda: Whole(3), 3),
    "enum of str": (lambda: Word.ONE, "one"),
}


def fits(value, kind):
    """Whether a plain value has the declared type. Says nothing about ranges."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return True
    if origin is typing.Annotated:
        return fits(value, inner[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin in (list, tuple, collections.abc.Sequence, collections.abc.Iterable, frozenset):
        items = isinstance(value, list) or (isinstance(value, set) and origin is collections.abc.Iterable)
        return items and all(fits(item, inner[0]) for item in value)
    if origin in (dict, collections.abc.Mapping):
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if origin is os.PathLike or kind is pathlib.Path:
        return isinstance(value, pathlib.PurePath)
    if kind is float:
        return type(value) in (int, float) and value == value
    if kind in (int, bool, str, type(None)):
        return type(value) is (kind or type(None))
    return isinstance(value, kind)


# --- calls -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Call:
    """A public callable: what to call, with which usual arguments, and what to compare afterwards."""

    name: str
    make: Callable[[Any], Callable[..., Any]]
    usual: Callable[[Any], dict[str, Any]] = lambda lm: {}
    outcome: Callable[[Any], Any] = lambda result: result
    settings: bool = False  # **settings are those of a generation


WIDER = {"stop", "processors", "model", "drafter"}


def result_of(result):
    return result.tokens, result.text, result.finish_reason


def methods(owner, names, make, **how):
    for name in names:
        yield Call(f"{owner.__name__}.{name}", lambda lm, n=name: getattr(make(lm), n), **how)


def fed(lm):
    session = lm.session()
    session.feed([1, 2, 3])
    return session


CALLS = [
    Call(
        "load",
        lambda lm: specdec.load,
        lambda lm: {"model": lm.config.target.model, "drafter": "none"},
        outcome=lambda lm: lm.config,
    ),
    Call("load_config", lambda lm: load_config),
    Call(
        "inspect_checkpoint",
        lambda lm: specdec.inspect_checkpoint,
        lambda lm: {"model": lm.config.target.model},
        outcome=lambda report: report.to_dict(),
    ),
    Call("LanguageModel.encode", lambda lm: lm.encode),
    *(
        Call(name, make, lambda lm, usual=usual: {**usual, "max_new_tokens": 2}, outcome, settings=True)
        for name, make, usual, outcome in (
            ("LanguageModel.generate", lambda lm: lm.generate, {"prompt": "the"}, result_of),
            ("LanguageModel.stream", lambda lm: lm.stream, {"prompt": "the"}, lambda stream: result_of(stream.result)),
            (
                "LanguageModel.generate_batch",
                lambda lm: lm.generate_batch,
                {"prompts": ["the"]},
                lambda results: [*map(result_of, results)],
            ),
            ("Session.generate", lambda lm: fed(lm).generate, {}, result_of),
            (
                "Conversation.ask",
                lambda lm: Conversation(lm).ask,
                {"text": "x"},
                lambda answer: result_of(answer.result),
            ),
        )
    ),
    *methods(specdec.Session, ["feed", "set_prompt", "rewind", "save", "load"], fed),
    Call("Conversation", lambda lm: Conversation, lambda lm: {"lm": lm}, outcome=lambda talk: talk.messages),
    Call("Conversation.rewind", lambda lm: Conversation(lm).rewind),
    *methods(specdec.text.Tokenizer, ["encode"], lambda lm: lm.tokenizer, usual=lambda lm: {"text": "the"}),
    *methods(specdec.text.Tokenizer, ["decode"], lambda lm: lm.tokenizer, usual=lambda lm: {"ids": [1]}),
    *methods(
        specdec.text.Tokenizer,
        ["apply_chat_template"],
        lambda lm: lm.tokenizer,
        usual=lambda lm: {"messages": [{"role": "user", "content": "x"}]},
    ),
    *(
        Call(kind.__name__, lambda lm, kind=kind: kind)
        for kind in (RunConfig, GenerationConfig, TargetConfig, Sampling)
    ),
    Call("Choice", lambda lm: Choice, lambda lm: {"name": "x"}),
    Call("Override", lambda lm: Override, lambda lm: {"path": ("a",), "value": 1, "source": ""}),
    Call("Override.parse", lambda lm: Override.parse),
    *methods(
        type(registry()),
        ["drafter", "verifier", "depth_policy", "processor", "backend", "model"],
        lambda lm: registry(),
        usual=lambda lm: {"name": "no such name", "model_type": "no such type"},
    ),
    *methods(type(registry()), ["entries", "has_distribution"], lambda lm: registry()),
    Call("load_prompts", lambda lm: load_prompts, lambda lm: {"path": FOLDER / "copy.jsonl"}),
    Call("choose_prompts", lambda lm: choose_prompts, lambda lm: {"prompts": own_prompts()}),
    *(
        Call(kind.__name__, lambda lm, kind=kind: kind, lambda lm: {"lm": lm, "prompts": {}}, lambda made: None, True)
        for kind in (AcceptanceMeasurement, BenchMeasurement)
    ),
    *(
        Call(check.__name__, lambda lm, check=check: check, lambda lm, usual=usual: usual, lambda report: report.name)
        for check, usual in (
            (check_plugin, {"plugin": "fixed", "only": []}),
            (check_subjects, {"name": "x", "subjects": {}}),
        )
    ),
    Call("Run", lambda lm: Run, outcome=lambda run: (run.seed, run.effort)),
]


@pytest.fixture(scope="module")
def lm(checkpoint):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CPU_KERNELS", "torch")
        yield specdec.load(checkpoint("qwen3_5", **tiny.HYBRID), dtype="float32", drafter="ngram", depth=2)


def parameters(call, target):
    """The annotation of every parameter."""
    function = inspect.unwrap(target)
    if inspect.isclass(function):
        owner = function.__init__ if not attrs.has(function) else function
    else:
        owner = getattr(function, "__func__", function)
    hints = typing.get_type_hints(inspect.unwrap(owner), include_extras=True)
    named = inspect.signature(target).parameters
    found = {
        name: hints[name]
        for name, one in named.items()
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and name in hints
    }
    if call.settings:
        kinds = typing.get_type_hints(CallSettings, include_extras=True) | typing.get_type_hints(GenerationConfig)
        found |= {name: kinds[name] for name in CallSettings.__annotations__}
    return found


@pytest.mark.parametrize("share", [pytest.param(64, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_an_odd_value_is_refused_or_means_the_plain_one(call, share, lm, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CPU_KERNELS", "torch")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    wrong = []
    kinds = parameters(call, call.make(lm))
    pairs = [(parameter, odd) for parameter in kinds for odd in ODD]
    for parameter, odd in random.Random(call.name).sample(pairs, len(pairs) // share):
        complaint = tried(call, parameter, kinds[parameter], odd, lm)
        if complaint:
            wrong.append(f"{call.name}({parameter}={odd}): {complaint}")
    assert not wrong, "\n".join([f"{len(wrong)} calls", *wrong])


def tried(call, parameter, kind, odd, lm):
    make, plain = ODD[odd]

    def outcome(value):
        target = call.make(lm)
        given = {**({"seed": 1} if call.settings else {}), **call.usual(lm), parameter: value}
        known = inspect.signature(target).parameters
        return call.outcome(target(**{name: one for name, one in given.items() if name in known or call.settings}))

    try:
        got = outcome(make())
    except SpecdecError as error:
        if "\n" in error.message:
            return f"a message of several lines: {error.message}"
        if re.search(r"\w\(\)|GenerationConfig\.", str(error)) and call.name != "GenerationConfig":
            return f"a message that names something inside: {error}"
        return None if len(str(error)) <= 2000 else f"a message of {len(str(error))} characters"
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        return f"{type(error).__name__}: {error}"[:300]
    if kind is Any or kind is object or parameter in WIDER:
        return None
    if plain is None and call.settings:
        return None  # the configuration's value
    if plain is NOTHING or not fits(plain, kind):
        return f"was taken, and {kind} does not say so"
    return None if got == outcome(plain) or plain != plain else "gives something else than the plain value"

"""Public calls with odd values: they work, or raise one short error of specdec's that names nothing inside.

Which parameters there are is read from the signatures, so a new one is tried as well. What is converted, and how, is in
``tests/config/test_config.py``.
"""

import enum
import fractions
import inspect
import math
import pathlib
import random
import re
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
from specdec.testing import check_plugin
from specdec.testing.checks import Run
from specdec.text import Tokenizer
from tests import tiny


class Word(enum.StrEnum):
    ONE = "one"


ODD: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (None, True, False, 0, 3, -1, 2**31, 2**63)),
    *(lambda value=value: value for value in (0.5, 1.5, math.nan, math.inf, 5e-324, fractions.Fraction(1, 2))),
    *(lambda value=value: value for value in ("", "the", "123", "a\0b", "x" * 5000, b"the", Word.ONE)),
    lambda: pathlib.Path("no/such"),
    *(lambda value=value: value for value in ([], [1, 2], (1, 2), range(3), [5.5], [True], [[1], [2]], {1, 2})),
    *(lambda value=value: value for value in ({"a": 1}, {1: 1.0})),
    lambda: iter((1, 2)),
    lambda: print,
    *(lambda value=value: value for value in (np.int64(3), np.float32(0.5), np.bool_(True))),
    *(lambda value=value: np.array(value) for value in ([1, 2], [1.0, 2.0], [[1, 1], [1, 1]])),
    *(lambda value=value: torch.tensor(value) for value in (3, [1, 2])),
]


@attrs.frozen
class Call:
    """A public callable: what to call, with which usual arguments, and what to do with what it returns."""

    name: str
    make: Callable[[Any], Callable[..., Any]]
    usual: Callable[[Any], dict[str, Any]] = lambda lm: {}
    use: Callable[[Any], Any] = lambda made: made
    settings: bool = False  # **settings are those of a generation


def methods(owner, names, make, **usual):
    return [
        Call(f"{owner.__name__}.{name}", lambda lm, n=name: getattr(make(lm), n), lambda lm: usual) for name in names
    ]


def fed(lm):
    session = lm.session()
    session.feed([1, 2, 3])
    return session


def generations(*calls):
    """Calls that generate two tokens."""
    for name, make, usual, *use in calls:
        yield Call(name, make, lambda lm, usual=usual: {**usual, "max_new_tokens": 2}, *use, settings=True)


MESSAGES = [{"role": "user", "content": "x"}]
CALLS = [
    Call("load", lambda lm: specdec.load, lambda lm: {"model": lm.config.target.model, "drafter": "none"}),
    Call("load_config", lambda lm: load_config),
    Call("inspect_checkpoint", lambda lm: specdec.inspect_checkpoint, lambda lm: {"model": lm.config.target.model}),
    Call("LanguageModel.encode", lambda lm: lm.encode),
    *generations(
        ("LanguageModel.generate", lambda lm: lm.generate, {"prompt": "the"}),
        ("LanguageModel.stream", lambda lm: lm.stream, {"prompt": "the"}, lambda stream: stream.result),
        ("LanguageModel.generate_batch", lambda lm: lm.generate_batch, {"prompts": ["the"]}),
        ("Session.generate", lambda lm: fed(lm).generate, {}),
        ("Conversation.ask", lambda lm: Conversation(lm).ask, {"text": "x"}, lambda answer: answer.result),
    ),
    *methods(specdec.Session, ["feed", "set_prompt", "rewind", "save", "load"], fed),
    Call("Conversation", lambda lm: Conversation, lambda lm: {"lm": lm}),
    Call("Conversation.rewind", lambda lm: Conversation(lm).rewind),
    *methods(Tokenizer, ["encode"], lambda lm: lm.tokenizer, text="the"),
    *methods(Tokenizer, ["decode"], lambda lm: lm.tokenizer, ids=[1]),
    *methods(Tokenizer, ["apply_chat_template"], lambda lm: lm.tokenizer, messages=MESSAGES),
    *(
        Call(kind.__name__, lambda lm, kind=kind: kind)
        for kind in (RunConfig, GenerationConfig, TargetConfig, Sampling, Run)
    ),
    Call("Choice", lambda lm: Choice, lambda lm: {"name": "x"}),
    Call("Override", lambda lm: Override, lambda lm: {"path": ("a",), "value": 1, "source": ""}),
    Call("Override.parse", lambda lm: Override.parse),
    *methods(
        type(registry()),
        ["drafter", "verifier", "depth_policy", "processor", "backend", "model", "entries", "has_distribution"],
        lambda lm: registry(),
        name="no such name",
        model_type="no such type",
    ),
    Call("load_prompts", lambda lm: load_prompts, lambda lm: {"path": FOLDER / "copy.jsonl"}),
    Call("choose_prompts", lambda lm: choose_prompts, lambda lm: {"prompts": own_prompts()}),
    *(
        Call(kind.__name__, lambda lm, kind=kind: kind, lambda lm: {"lm": lm, "prompts": {}}, settings=True)
        for kind in (AcceptanceMeasurement, BenchMeasurement)
    ),
    Call("check_plugin", lambda lm: check_plugin, lambda lm: {"plugin": "fixed", "only": ["P1"]}),
]


@pytest.fixture(scope="module")
def lm(checkpoint):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CPU_KERNELS", "torch")
        yield specdec.load(checkpoint("qwen3_5", **tiny.HYBRID), dtype="float32", drafter="ngram", depth=2)


@pytest.mark.parametrize("share", [pytest.param(64, id="sample"), pytest.param(1, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_an_odd_value_is_taken_or_refused_in_a_sentence(call, share, lm, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CPU_KERNELS", "torch")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    wrong, known = [], inspect.signature(call.make(lm)).parameters
    names = {name for name, one in known.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    names |= CallSettings.__annotations__.keys() if call.settings else set()
    pairs = [(name, make) for name in sorted(names) for make in ODD]
    for name, make in random.Random(call.name).sample(pairs, len(pairs) // share):
        complaint = tried(call, {name: make()}, known, lm)
        if complaint:
            wrong.append(f"{call.name}({name}={make()!r}): {complaint}"[:300])
    assert not wrong, "\n".join([f"{len(wrong)} calls", *wrong])


def tried(call, odd, known, lm):
    """What is wrong with the error of a call, "" if there is none."""
    given = {**({"seed": 1} if call.settings else {}), **call.usual(lm), **odd}
    try:
        call.use(call.make(lm)(**{name: one for name, one in given.items() if name in known or call.settings}))
    except SpecdecError as error:
        if "\n" in error.message or len(str(error)) > 2000:
            return f"a message of several lines, or of many characters: {error}"
        if re.search(r"\w\(\)|GenerationConfig\.", str(error)) and call.name != "GenerationConfig":
            return f"a message that names something inside: {error}"
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        return f"{type(error).__name__}: {error}"
    return ""

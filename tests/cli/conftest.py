"""The command line in this process."""

import itertools
import os
import signal

import attrs
import pytest
from click.testing import CliRunner

import specdec
from specdec.cli import main
from specdec.decoding.stream import Stream
from specdec.registry import BUILT_INS, Registry, use_registry


class Asked:
    """The embedded model, whatever model a configuration names; keeps what it is asked."""

    def __init__(self, lm, config):
        self.lm, self.config = attrs.evolve(lm, config=config, notices=("[not markup] slow kernels",)), config

    def __getattr__(self, name):
        return getattr(self.lm, name)

    def stream(self, prompt, *, prediction=None):
        self.prompt, self.prediction = prompt, prediction
        return self.lm.stream(prompt, prediction=prediction)


@pytest.fixture(scope="session")
def demo():
    return specdec.load("demo", depth=2)  # what an adaptive depth drafts in so few tokens depends on the clock


@pytest.fixture
def asked(demo, monkeypatch):
    """What was loaded, with its configuration and prompt."""
    loaded = []

    def load(model=None, *, config=None, **others):
        loaded.append(Asked(demo, config))
        return loaded[-1]

    monkeypatch.setitem(vars(specdec), "load", load)
    return loaded


@pytest.fixture
def ctrl_c(monkeypatch):
    """``ctrl_c(2, 3)``: Ctrl-C after these pieces of text, as a terminal sends it."""
    following = Stream.__next__

    def after(*numbers):
        pieces = itertools.count(1)

        def counted(stream):
            piece = following(stream)
            if next(pieces) in numbers:
                os.kill(os.getpid(), signal.SIGINT)
            return piece

        monkeypatch.setattr(Stream, "__next__", counted)

    return after


@pytest.fixture
def invoke():
    """``invoke("generate", "-n", "3")`` -> exit_code, stdout, stderr; only built-in plugins, unless it is told."""

    def invoke(*args, registry=None, stdin=None):
        former = use_registry(registry or Registry(BUILT_INS, entry_points=()))
        before = dict(main.commands)
        main.extended = False
        try:
            return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)
        finally:
            main.commands.clear()
            main.commands.update(before)
            main.extended = False
            use_registry(former)

    return invoke


@pytest.fixture(scope="module")
def loaded_once():
    """``specdec.load`` loads each configuration once per module."""
    load, known = specdec.load, {}

    def cached(model=None, *, config=None, **others):
        key = repr((model, config and config.to_dict(), others))
        if key not in known:
            known[key] = load(model, config=config, **others)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(specdec), "load", cached)
        yield


@pytest.fixture
def no_load(monkeypatch):
    """A wrong command line is refused before any weight is read."""

    def load(*args, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setitem(vars(specdec), "load", load)

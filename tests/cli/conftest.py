"""The command line in this process, with a stand-in for the model but the real configuration, parsing and printing."""

import pytest
from cli_fakes import FakeModel
from click.testing import CliRunner

import specdec
from specdec.cli import main
from specdec.registry import BUILT_INS, Registry, use_registry


@pytest.fixture
def models(monkeypatch):
    """What was loaded; ``models.interrupts`` are the words after which somebody presses Ctrl-C."""

    class Loaded(list):
        interrupts = ()

    loaded = Loaded()

    def load(model=None, *, config=None, **others):
        loaded.append(FakeModel(config, loaded.interrupts))
        return loaded[-1]

    monkeypatch.setitem(vars(specdec), "load", load)
    return loaded


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

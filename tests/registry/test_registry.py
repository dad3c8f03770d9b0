"""Plugins as strangers ship them: real distributions on disk, some of them broken."""

import sys
import textwrap
import types

import pytest

from specdec.contract import CycleRecord, Draft, Drafter, DrafterSpec, VerifierSpec
from specdec.errors import ConfigError, NoMemoryError, PluginError, UnknownNameError
from specdec.registry import Kind, Registry, calling, notify_cycle
from tests.plugin_objects import plugin_of

LIGHT = ("specdec.drafters.none", "specdec.drafters.ngram", "specdec.verifiers.strict", "specdec.policies.fixed")
RECORD = CycleRecord(5, 2, 2, 1, (7, 8), 0.1, 0.2, 0.3)
HEAD = "from specdec import Draft, Drafter, DrafterSpec, VerifierSpec, hookimpl\n"
GOOD = (
    HEAD
    + """
class Echo(Drafter):
    def __init__(self, config, env): pass
    def propose(self, context, depth): return Draft(tuple([context[-1]] * depth))

@hookimpl
def specdec_drafters():
    return [DrafterSpec(name="{name}", factory=Echo, help="repeats the last token")]
"""
)


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """Install a distribution: ``ship("specdec-echo", source, name="echo")`` with one module of that source."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = []

    def ship(distribution, source, *, name, version="1.0", value=None):
        module = distribution.replace("-", "_")
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[specdec]\n{name} = {value or module}\n")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        modules.append(module)
        return module

    yield ship
    for module in modules:
        sys.modules.pop(module, None)


def names(registry, kind):
    return [entry.spec.name for entry in registry.entries(kind)]


def test_a_strangers_plugin_stands_beside_the_built_in_ones(ship):
    ship("specdec-echo", GOOD.format(name="echo"), name="echo", version="0.3.1")
    registry = Registry(LIGHT)
    assert names(registry, Kind.DRAFTER) == ["ngram", "none", "echo"]
    assert registry.drafter("echo").help == "repeats the last token"
    assert str(registry.origin_of(registry.drafter("echo"))) == "specdec-echo 0.3.1"
    assert str(registry.origin_of(registry.drafter("none"))) == "built in"
    assert registry.verifier("strict").name == "strict"
    assert registry.depth_policy("fixed").name == "fixed"
    assert registry.failures == []


def drafters(returned, mark="@hookimpl\n"):
    return f"{HEAD}{mark}def specdec_drafters(): return {returned}"


BROKEN = {  # a plugin, and what the error says
    "import error": ("import no_such_module_anywhere", "ModuleNotFoundError"),
    "hook raises": (drafters("[1 / 0]"), "ZeroDivisionError"),
    "unknown hook": (HEAD + "@hookimpl\ndef specdec_driters(): return []", "specdec_driters"),
    "unknown argument": (HEAD + "@hookimpl\ndef specdec_drafters(cli): return []", "cli"),
    "not marked": (drafters("[]", mark=""), "not marked @specdec.hookimpl"),
    "returns a spec": (drafters("DrafterSpec(name='x', factory=print)"), "returns a list of DrafterSpec"),
    "name is no word": (drafters("[DrafterSpec(name='', factory=print)]"), "a name is a word"),
    "second half broken": (
        GOOD.format(name="half") + "\n@hookimpl\ndef specdec_verifiers(): return [None]",
        "returns a list of VerifierSpec",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_harms_nobody_until_it_is_asked_for(ship, case):
    source, text = BROKEN[case]
    ship("specdec-zz", source, name="broken", version="0.4.1")
    ship("specdec-echo", GOOD.format(name="echo"), name="echo")
    registry = Registry(LIGHT)
    assert names(registry, Kind.DRAFTER) == ["ngram", "none", "echo"]
    assert registry.drafter("echo").factory(None, None).propose([4], 2) == Draft((4, 4))
    (failure,) = registry.failures
    assert (failure.name, failure.origin.distribution, failure.origin.version) == ("broken", "specdec-zz", "0.4.1")
    assert failure.during == ("import" if case in ("import error", "syntax error") else "registration")
    assert text in failure.reason
    with pytest.raises(PluginError) as raised:
        registry.drafter("broken", asked_by="run.toml, key drafter.name")
    assert raised.value.facts["asked for by"] == "run.toml, key drafter.name"
    assert text in raised.value.facts["error"]
    assert "specdec-zz 0.4.1" in raised.value.facts["plugin"]
    assert raised.value.__cause__ is failure.error
    with pytest.raises(PluginError, match="failed"):
        Registry(LIGHT, strict=True).drafter("echo")


@pytest.mark.parametrize("other", ["specdec-echo", None], ids=["two strangers", "against a built-in"])
def test_two_plugins_of_one_name_are_refused_with_both_origins(ship, other):
    name = "echo" if other else "none"
    if other:
        ship(other, GOOD.format(name=name), name="echo", version="1.0")
    ship("another-echo", GOOD.format(name=name), name="echo2", version="2.0")
    registry = Registry(LIGHT)
    assert registry.drafter("ngram").name == "ngram"
    with pytest.raises(PluginError) as raised:
        registry.drafter(name)
    assert "another-echo 2.0" in raised.value.facts["provided by"]
    assert ("specdec-echo 1.0" if other else "built in") in raised.value.facts["provided by"]
    ((kind, taken, claims),) = registry.conflicts()
    assert (kind, taken, len(claims)) == (Kind.DRAFTER, name, 2)
    with pytest.raises(PluginError, match="2 plugins provide a drafter called"):
        Registry(LIGHT, strict=True).drafter("ngram")


def test_an_unknown_name_says_what_is_there_what_is_not_and_what_is_near(ship):
    ship("specdec-eagle", "import no_such_module_anywhere", name="eagle3", version="0.4.1")
    ship("specdec-echo", GOOD.format(name="echo"), name="echo", version="0.2.0")
    with pytest.raises(UnknownNameError) as raised:
        Registry(LIGHT).drafter("eagel3", asked_by="run.toml, key drafter.name")
    error = raised.value
    assert error.message == "no drafter is called 'eagel3'. Did you mean 'eagle3'?"
    assert error.facts["asked for by"] == "run.toml, key drafter.name"
    assert error.facts["available"] == "auto, echo (specdec-echo 0.2.0), ngram (built in), none (built in)"
    assert error.facts["not loaded"].startswith("eagle3 (specdec-eagle 0.4.1): ModuleNotFoundError: No module named")
    assert error.facts["try"].startswith("set drafter.name = ")
    assert isinstance(error, ConfigError)


def test_registering_by_hand_fails_at_once_and_leaves_nothing():
    def mine():
        specs = [VerifierSpec(name="mine", factory=lambda config: None)]
        return plugin_of(specdec_verifiers=lambda self: specs, specdec_cycle=lambda self, record: pytest.fail("called"))

    registry = Registry((), entry_points=())
    registry.register(mine())
    assert registry.verifier("mine").name == "mine"
    with pytest.raises(PluginError, match="2 plugins provide a verifier"):
        registry.register(mine())
    assert len(registry.entries(Kind.VERIFIER)) == 1
    with pytest.raises(PluginError, match="implements no hook"):
        registry.register(object())


def test_an_observer_that_raises_is_recorded_once_and_the_others_go_on(monkeypatch):
    seen, failed = [], []

    def fails(self, record):
        failed.append(record)
        raise OSError("disk full")

    observers = (lambda self, record: seen.append(record)), fails
    registry = Registry([plugin_of(specdec_cycle=observer) for observer in observers], entry_points=())
    monkeypatch.setattr("specdec.registry.lookup._current", registry)
    notify_cycle(RECORD)  # nothing is loaded before somebody asks for a plugin
    assert seen == failed == []
    registry.load()
    for _ in range(3):
        notify_cycle(RECORD)
    assert seen == [RECORD] * 3
    assert failed == [RECORD]
    assert [failure.reason for failure in registry.failures] == ["OSError: disk full"]


def test_a_plugin_that_leaves_the_forward_pass_to_others_gives_none():
    leaves = plugin_of(specdec_forward_pass=lambda self, target_config: None)
    assert Registry((leaves,), entry_points=()).forward_pass(types.SimpleNamespace(model="demo")) is None


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), OSError("Cannot allocate memory")],
)
def test_memory_that_runs_out_is_no_fault_of_the_plugin_that_asks_for_it(error):
    with pytest.raises(NoMemoryError, match="not enough memory") as raised, calling(("model family", "llama"), "build"):
        raise error
    assert raised.value.facts["asked for by"] == "the model family 'llama', in build"


def test_strict_comes_from_the_environment(ship, monkeypatch):
    ship("specdec-zz", "1 / 0", name="zz")
    monkeypatch.setenv("SPECDEC_STRICT_PLUGINS", "1")
    registry = Registry(LIGHT)
    for _ in range(2):  # not only the first time
        with pytest.raises(PluginError, match="'zz' failed"):
            registry.drafter("none")


def test_a_plugin_that_asks_for_the_registry_while_it_loads_is_told_so(ship, monkeypatch):
    ship("specdec-loop", "import specdec.registry as p\np.registry().drafter('none')", name="loop")
    registry = Registry(LIGHT)
    monkeypatch.setattr("specdec.registry.lookup._current", registry)
    assert registry.drafter("none").name == "none"
    assert "while it was being imported" in registry.failures[0].reason


def test_an_interrupted_load_goes_on_where_it_was():
    interrupts = [KeyboardInterrupt]

    def slow(self):
        if interrupts:
            raise interrupts.pop()
        return [DrafterSpec(name="slow", factory=Drafter)]

    registry = Registry((*LIGHT, plugin_of(specdec_drafters=slow)), entry_points=())
    with pytest.raises(KeyboardInterrupt):
        registry.load()
    assert registry.drafter("slow").name == "slow"
    assert registry.failures == []

"""The other commands, third-party commands, and the command line as a process."""

import json

from specdec.errors import CheckpointError
from specdec.registry import Registry
from tests.plugin_objects import plugin_of

LIGHT = ("specdec.drafters.none", "specdec.drafters.ngram", "specdec.verifiers.strict", "specdec.policies.fixed")


def no_drafters(self):
    raise OSError("no drafters today")


BROKEN = plugin_of(specdec_drafters=no_drafters)


def adds(name, error=None):
    """A plugin with a command; ``name`` may be one of ours."""

    def commands(self, cli):
        @cli.command(name)
        def hello():
            """Say hello."""
            raise CheckpointError("hello failed", **{"try": "again"})

        if error:
            raise error

    return plugin_of(specdec_commands=commands)


def installed(*commands):
    """A registry whose installed plugins are these objects."""
    registry = Registry(LIGHT, entry_points=())
    registry.load()
    for plugin in commands:
        registry.register(plugin)
    return registry


def test_plugins_lists_what_is_there_and_what_failed(invoke):
    registry = Registry((*LIGHT, BROKEN), entry_points=())
    done = invoke("plugins", registry=registry)
    assert done.exit_code == 0
    for text in (
        "ngram",
        "max_order=8",
        "built in",
        "strict",
        "fixed",
        "failed (registration): tests.plugin_objects",
        "no drafters today",
    ):
        assert text in done.stdout
    told = json.loads(invoke("plugins", "--json", registry=registry).stdout)
    assert [entry["name"] for entry in told["drafters"]] == ["ngram", "none"]
    assert told["drafters"][0]["options"]["max_order"] == "8"
    assert told["drafters"][0]["origin"] == "built in"
    assert {"verifiers", "depth_policies", "backends", "models", "conflicts"} <= told.keys()
    (failure,) = told["failures"]
    assert (failure["error"], failure["during"]) == ("OSError: no drafters today", "registration")


def test_a_plugins_command_is_listed_and_its_errors_look_like_ours(invoke):
    registry = installed(adds("hello"))
    assert "Say hello." in invoke("--help", registry=registry).stdout
    done = invoke("hello", registry=registry)
    assert done.exit_code == 2
    assert done.stderr == "CheckpointError: hello failed\n  try: again\n"
    done = invoke("-v", "hello", registry=registry)
    assert "Traceback" in done.stderr


def test_a_plugin_cannot_break_or_replace_commands(invoke):
    registry = installed(adds("info"), adds("half", RuntimeError("in the middle")))
    done = invoke("--help", registry=registry)
    assert done.exit_code == 0
    assert "half" not in done.stdout
    assert "Say hello" not in done.stdout
    assert [failure.reason for failure in registry.failures] == [
        "PluginError: the command 'info' exists already",
        "RuntimeError: in the middle",
    ]
    assert "plugin_failed" in done.stderr or "plugin_failed" in done.output

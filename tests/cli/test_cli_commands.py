"""The other commands, third-party commands, and the command line as a process."""

from __future__ import annotations

import json
import types

import specdec
from specdec.checkpoints.description import CheckpointReport, ModuleFormat, StepBytes
from specdec.errors import CheckpointError
from specdec.hookspecs import hookimpl
from specdec.registry import Registry

LIGHT = ("specdec.drafters.none", "specdec.drafters.ngram", "specdec.verifiers.strict", "specdec.policies.fixed")


class Broken:
    @hookimpl
    def specdec_drafters(self):
        raise OSError("no drafters today")


class Adds:
    """A plugin with a command; ``name`` may be one of ours."""

    def __init__(self, name, error=None):
        self.name, self.error = name, error

    @hookimpl
    def specdec_commands(self, cli):
        @cli.command(self.name)
        def hello():
            """Say hello."""
            raise CheckpointError("hello failed", **{"try": "again"})

        if self.error:
            raise self.error


def installed(*commands):
    """A registry whose installed plugins are these objects."""
    registry = Registry(LIGHT, entry_points=())
    registry.load()
    for plugin in commands:
        registry.register(plugin)
    return registry


def test_plugins_lists_what_is_there_and_what_failed(invoke):
    registry = Registry((*LIGHT, Broken()), entry_points=())
    done = invoke("plugins", registry=registry)
    assert done.exit_code == 0
    for text in ("ngram", "max_order=4", "built in", "strict", "fixed", "failed (registration): Broken"):
        assert text in done.stdout
    assert "OSError: no drafters today" in done.stdout


def test_plugins_json_has_every_kind(invoke):
    done = invoke("plugins", "--json", registry=Registry((*LIGHT, Broken()), entry_points=()))
    told = json.loads(done.stdout)
    assert [entry["name"] for entry in told["drafters"]] == ["ngram", "none"]
    assert told["drafters"][0]["options"]["max_order"] == "4"
    assert told["drafters"][0]["origin"] == "built in"
    assert {"verifiers", "depth_policies", "backends", "models", "conflicts"} <= told.keys()
    (failure,) = told["failures"]
    assert failure["error"] == "OSError: no drafters today"
    assert failure["during"] == "registration"


def test_a_plugins_command_is_listed_and_its_errors_look_like_ours(invoke):
    registry = installed(Adds("hello"))
    assert "Say hello." in invoke("--help", registry=registry).stdout
    done = invoke("hello", registry=registry)
    assert done.exit_code == 2
    assert done.stderr == "CheckpointError: hello failed\n  try: again\n"
    done = invoke("-v", "hello", registry=registry)
    assert "Traceback" in done.stderr


def test_a_plugin_cannot_break_or_replace_commands(invoke):
    registry = installed(Adds("info"), Adds("half", RuntimeError("in the middle")))
    done = invoke("--help", registry=registry)
    assert done.exit_code == 0
    assert "half" not in done.stdout
    assert "Say hello" not in done.stdout
    assert [failure.reason for failure in registry.failures] == [
        "PluginError: the command 'info' exists already",
        "RuntimeError: in the middle",
    ]
    assert "plugin_failed" in done.stderr or "plugin_failed" in done.output


def test_info_shows_the_report(invoke, monkeypatch):
    told = CheckpointReport(
        path="/models/x",
        family="qwen3",
        model_type="qwen3",
        config={"layers": 2},
        mtp="none",
        tied=True,
        parameters={"embedding": 10, "layers": 2000},
        dtypes={"bf16": 2010},
        unused=["a.[b]"],
        size_bytes=4096,
        state_bytes_per_token=512,
        formats=[ModuleFormat(module="experts", format="nvfp4", weights=7, parameters=2000, stored_bytes=1125)],
        decode_step=StepBytes(width=2, weights=2048, stored=1145, state=0, per_context_token=512, mtp_weights=0),
    ).to_dict()
    report = types.SimpleNamespace(to_dict=lambda: told)
    monkeypatch.setitem(vars(specdec), "inspect_checkpoint", lambda model, mtp: report)
    done = invoke("info", "x")
    assert done.exit_code == 0
    for text in ("qwen3 (model_type qwen3)", "4.0 KiB", "2,010: embedding 10, layers 2,000", "unused: a.[b]", "nvfp4"):
        assert text in done.stdout
    assert "reads 2.0 KiB of weights at 2 bytes each (1.1 KiB as stored)" in " ".join(done.stdout.split())
    assert json.loads(invoke("info", "x", "--json").stdout) == told

"""Logging: nothing is printed into a host program; ``-v`` and ``-vv`` say on stderr what was chosen and done."""

import json
import logging

import pytest
from click.testing import CliRunner

from specdec.cli import main
from specdec.logs import get_logger
from tests.processes import ROOT, run_python

EMBEDDED = """
{setup}
import specdec
from specdec import Drafter, DrafterSpec, hookimpl
from specdec.registry import registry

class Fails(Drafter):
    def __init__(self, config, env):
        pass
    def propose(self, context, depth):
        raise RuntimeError("no draft today")

class Plugin:
    @hookimpl
    def specdec_drafters(self):
        return [DrafterSpec(name="fails", factory=Fails)]

registry().register(Plugin())
lm = specdec.load(drafter="fails", dtype="float32", depth=2)
result = lm.generate("def f(", max_new_tokens=4)
assert "no draft today" in result.stats.inactive_reason
assert any("slow kernels" in notice for notice in result.notices), result.notices
assert any(failure.name == "broken" for failure in registry().failures)
"""


@pytest.fixture
def host(tmp_path):
    """An environment in which a plugin fails to load, and no kernel can be compiled."""
    info = tmp_path / "specdec_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: specdec-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[specdec]\nbroken = specdec_broken\n")
    (tmp_path / "specdec_broken.py").write_text("1 / 0")
    return {"PYTHONPATH": f"{ROOT}:{tmp_path}", "CXX": "/no/such/compiler", "XDG_CACHE_HOME": str(tmp_path)}


def test_a_program_that_configures_nothing_sees_nothing(host):
    """A failed plugin, a fallback to slow kernels, a drafter that raises: all of it is in the result alone."""
    done = run_python("-c", EMBEDDED.format(setup=""), env=host)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
def test_a_program_that_configures_logging_gets_the_events(host):
    done = run_python("-c", EMBEDDED.format(setup="import logging; logging.basicConfig(level='INFO')"), env=host)
    assert done.stdout == ""
    for event in ("plugin_failed plugin='broken'", "native_kernels_unavailable", "no draft today", "prefilled"):
        assert event in done.stderr


def test_verbose_commands_write_to_stderr_alone():
    command = ("generate", "-p", "def f(", "-n", "6", "-s", "depth.name=fixed", "--json")
    debug, verbose, quiet = (CliRunner().invoke(main, [*flags, *command]) for flags in (("-vv",), ("-v",), ()))
    outputs = [json.loads(done.stdout) for done in (quiet, verbose, debug)]
    assert outputs[0]["tokens"] == outputs[1]["tokens"] == outputs[2]["tokens"]
    assert "[info]" not in quiet.stderr
    for event in ("checkpoint_read", "target_built", "parity_probed", "pipeline_built", "prefilled", "generated"):
        assert verbose.stderr.count(f"[info] {event} ") == 1
    assert "[debug]" not in verbose.stderr
    assert debug.stderr.count("[debug] cycle position=") == outputs[2]["stats"]["cycles"]


def test_a_record_has_the_facts_apart(caplog):
    log = get_logger("specdec.tested")
    with caplog.at_level(logging.INFO, logger="specdec"):
        log.debug("unseen")
        log.warning("seen", share=1 / 3, name="100 %s")
    (record,) = caplog.records
    assert record.getMessage() == "seen share=0.3333 name='100 %s'"
    assert record.filename == "test_logs.py"
    assert (record.event, record.facts) == ("seen", {"share": 1 / 3, "name": "100 %s"})

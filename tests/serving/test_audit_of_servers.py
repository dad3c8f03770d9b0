"""Our own server under the audit."""

from __future__ import annotations

from specdec.measuring.comparison import Comparison
from specdec.measuring.engines.engine import Asked
from specdec.measuring.engines.server import ServerEngine
from specdec.measuring.prompts import Prompt


def test_the_server_agrees_with_itself(server):
    engine = ServerEngine(server.url)
    prompts = [Prompt(kind="prompts", text="def add(a, b):")]
    report = Comparison(engine, engine, prompts, Asked(max_new_tokens=8, ignore_eos=True)).run()
    assert (report.done, report.tokens) == (1, 8)
    assert (report.divergences, report.control.differences, report.speculation.apart) == ((), (), 0.0)

"""Writes ``docs/models.md`` from what a run compared, where ``SPECDEC_MODELS_MAP`` names the file."""

from __future__ import annotations

import os
import pathlib

import pytest

from tests.comparisons import Comparison, page, recorded

_FOUND: list[Comparison] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _FOUND.extend(recorded(report.user_properties))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    file = os.environ.get("SPECDEC_MODELS_MAP")
    if not file or hasattr(session.config, "workerinput") or exitstatus != pytest.ExitCode.OK:
        return
    from specdec.checkpoints import text_config
    from specdec.plugins import registry
    from tests.models.test_public_configs import PUBLISHED

    released = {
        name: (registry().model(text_config(config)["model_type"]).name, billions)
        for name, (config, billions, _) in PUBLISHED.items()
    }
    pathlib.Path(file).write_text(page(_FOUND, released), encoding="utf-8")

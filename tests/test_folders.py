"""Where specdec keeps things."""

from __future__ import annotations

from pathlib import Path

from specdec.cost_file import cost_folder
from specdec.folders import cache_folder


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.delenv("SPECDEC_CACHE_DIR", raising=False)
    monkeypatch.delenv("SPECDEC_COSTS", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/specdec")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/specdec")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    assert cost_folder() == Path("/elsewhere/costs")

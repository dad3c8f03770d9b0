"""Where specdec keeps things."""

import pwd
from pathlib import Path

import pytest

from specdec.errors import UnsupportedError
from specdec.records.cost_table import costs_folder
from specdec.records.store import cache_folder


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
    assert costs_folder() == Path("/elsewhere/costs")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    for name in ("SPECDEC_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(UnsupportedError, match="HOME is not set") as caught:
        cache_folder()
    assert caught.value.facts["try"] == "SPECDEC_CACHE_DIR=FOLDER"
    monkeypatch.delenv("SPECDEC_COSTS", raising=False)
    assert costs_folder() is None

"""Errors that leave a plugin, also those that only look like ours."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.errors import PluginError, SpecdecError, StateError
from specdec.registry.guard import Guard


class Bare(SpecdecError):
    def __init__(self, code: int) -> None:  # super().__init__ is not called
        self.code = code


class NoFacts(SpecdecError):
    def __init__(self) -> None:
        super().__init__("no facts")
        self.facts = None  # type: ignore[assignment]


class Unsigned(SpecdecError):
    plugin = property(lambda self: None)  # type: ignore[assignment]

    def __init__(self) -> None:
        BaseException.__init__(self)


class Hostile(SpecdecError):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("read me not")


@pytest.mark.parametrize(
    "make", [lambda: Bare(3), NoFacts, Unsigned, lambda: Hostile("x")], ids="bare facts plugin all".split()
)
def test_a_broken_subclass_of_our_error_is_a_failure_of_its_plugin(make: Any) -> None:
    def method() -> None:
        raise make()

    with pytest.raises(PluginError, match="failed in propose") as caught:
        Guard("drafter", "d", "their package 1.0").bind("propose", method)()
    assert caught.value.plugin == ("drafter", "d")


def test_a_plugins_own_error_passes_with_its_name() -> None:
    def method() -> None:
        raise StateError("the server is gone", try_="later")

    with pytest.raises(StateError, match="the server is gone") as caught:
        Guard("drafter", "d", "their package 1.0").bind("propose", method)()
    assert caught.value.plugin == ("drafter", "d")
    assert "d" in str(caught.value.facts["plugin"])

"""Which backend a load would run on, without building it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from specdec.backends import Backend
from specdec.backends import choice as backend_choice
from specdec.contract import BackendSpec
from specdec.registry import Registry


class NotBuilt(Backend):
    """What stands for a backend that would be built."""

    device, dtypes = "none", ("float32",)

    def __init__(self, name: str) -> None:
        self.name = name

    def ops(self, dtype: str) -> Any: ...


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, list[str]]]:
    """``choice(name="auto")``: the backend that would be built, and the notices."""
    original = Registry.backend

    def not_built(self: Registry, name: str, **source: Any) -> BackendSpec:
        return attrs.evolve(original(self, name, **source), factory=lambda config: NotBuilt(name))

    def choose(name: str = "auto") -> tuple[str, list[str]]:
        with monkeypatch.context() as patch:
            patch.setattr(Registry, "backend", not_built)
            backend, notices = backend_choice.make_backend(name)
        return backend.name, list(notices)

    return choose

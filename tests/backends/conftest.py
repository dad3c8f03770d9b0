"""Which backend a load would run on, without building it."""

import attrs
import pytest

from specdec.backends import Backend
from specdec.backends import choice as backend_choice
from specdec.registry import Registry


class NotBuilt(Backend):
    """What stands for a backend that would be built."""

    device, dtypes = "none", ("float32",)

    def __init__(self, name):
        self.name = name

    def ops(self, dtype): ...


@pytest.fixture
def choice(monkeypatch):
    """``choice(name="auto")``: the backend that would be built, and the notices."""
    original = Registry.backend

    def not_built(self, name, **source):
        return attrs.evolve(original(self, name, **source), factory=lambda config: NotBuilt(name))

    def choose(name="auto"):
        with monkeypatch.context() as patch:
            patch.setattr(Registry, "backend", not_built)
            backend, notices = backend_choice.make_backend(name)
        return backend.name, list(notices)

    return choose

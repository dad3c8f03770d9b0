"""Ops, backends and forward passes are asked through their base classes, never by the names of their attributes."""

import pathlib
import re

import pytest
import torch

import specdec
from specdec.backends import Backend, choice
from specdec.backends.cpu.reference import ReferenceOps
from specdec.backends.delegating import DelegatingOps
from specdec.backends.ops import Ops
from specdec.contract import BackendSpec
from specdec.errors import UnsupportedError
from tests.plugin_objects import plugin_of

ROOT = pathlib.Path(specdec.__file__).parent
OWN_BACKENDS = re.compile(r"^\s*(from|import) specdec\.backends\.(cpu|cuda|metal)\b", re.MULTILINE)
EXEMPT = {
    "doctor/machine.py",  # lists the compiler and the native kernels of this machine
    "testing/clauses/ops/operations.py",  # operations are compared with the reference's
    "testing/random_weights.py",  # families are checked over the reference kernels
}


def sources():
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_nothing_outside_the_backends_imports_one_of_them():
    found = {name for name, text in sources() if not name.startswith("backends/") and OWN_BACKENDS.search(text)}
    assert found <= EXEMPT


def test_delegating_ops_delegate_every_operation():
    methods = {name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")}
    assert methods <= vars(DelegatingOps).keys()


# --- target.backend = "auto" -----------------------------------------------------------------------------------------


class Stranger(Backend):
    name, device, dtypes = "stranger", "a device of its own", ("float32",)
    notices = ("it is strange",)

    def ops(self, dtype):
        raise AssertionError("nothing is loaded here")


def stranger(**fields):
    """A plugin with a backend."""
    spec = BackendSpec(**{"name": "stranger", "factory": lambda config: Stranger(), **fields})
    return plugin_of(specdec_backends=lambda self: [spec])


def fails(*_):
    raise RuntimeError("the driver is gone")


def test_the_largest_preference_wins_and_brings_its_notices(install):
    install(stranger(preference=lambda: 100))
    backend, notices = choice.make_backend("auto")
    assert isinstance(backend, Stranger)
    assert notices == ("it is strange",)


def test_without_a_preference_a_backend_is_taken_by_name_only(install):
    install(stranger())
    assert choice.auto_backend()[0] != "stranger"
    assert choice.make_backend("stranger")[0].name == "stranger"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"preference": lambda: 100, "available": lambda: "no such device"}, "no such device"),
        (
            {"preference": lambda: 100, "available": fails},
            "the backend 'stranger' failed in available: RuntimeError: the driver is gone",
        ),
        ({"preference": fails}, "the backend 'stranger' failed in preference: RuntimeError: the driver is gone"),
    ],
)
def test_a_backend_that_cannot_run_is_passed_over_with_the_reason(install, fields, reason):
    install(stranger(**fields))
    name, notices = choice.auto_backend()
    assert name != "stranger"
    assert f"the stranger backend cannot run here: {reason}" in notices[0]


def test_an_operation_that_a_backend_lacks_is_named():
    class Few(ReferenceOps):
        moe = Ops.moe

    with pytest.raises(UnsupportedError, match="Few has no moe, which this model needs"):
        Few(torch.float32).moe(None, None, None, None)

"""CUDA kernels run in Triton's interpreter on host tensors where no CUDA device is; on the device where one is."""

import importlib.util
import os
import pathlib
import threading
import types

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton, which reads it once
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _interpret_quickly():
    """Spare the interpreter two things that it does anew for every launch and call, and that take a third of the time.

    It copies the storages of all arguments to the host and back, where they are already; and every function of a kernel
    that is called patches triton's language again, which the launch around it has done. Nothing that runs is changed.
    """
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("GridExecutor", "_patch_lang", "_LangPatchScope")):
        return  # another release; slower
    if interpreter._patch_lang.__module__ != interpreter.__name__:
        return  # done: this file may be imported under two names

    def both(): ...

    whole = types.FunctionType(both.__code__, {"tl": interpreter.tl, "core": interpreter.tl.core})
    original, state = interpreter._patch_lang, threading.local()

    class Outermost(interpreter._LangPatchScope):
        def restore(self):
            state.inside = False
            super().restore()

    def patch_lang(fn):
        if getattr(state, "inside", False):
            return interpreter._LangPatchScope()
        scope = original(whole)
        scope.__class__ = Outermost
        state.inside = True
        return scope

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None


if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    from tests.backends.cuda.fake import dot_row_by_row

    dot_row_by_row()
    _interpret_quickly()

_HERE = pathlib.Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="session")
def device():
    """The CUDA device, or the host where kernels are interpreted."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def pytest_report_header():
    """Say why the folder's tests are missing, or how its kernels run."""
    if not importlib.util.find_spec("triton"):
        return "tests/backends/cuda: skipped, triton is not installed"
    where = f"on {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "interpreted"
    return f"tests/backends/cuda: kernels run {where}"


@pytest.fixture(scope="session")
def new_device():
    """``new_device()``: the CUDA device, or one over the interpreter where there is none."""
    if torch.cuda.is_available():
        from specdec.backends.cuda.device import CudaDevice

        return CudaDevice
    from tests.backends.cuda.fake import FakeDevice

    return FakeDevice


@pytest.hookimpl(tryfirst=True)  # before the markers select
def pytest_collection_modifyitems(items):
    """Where a device is, every test that asks for one has the marker ``gpu``; else those that have it are skipped."""
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        if not torch.cuda.is_available():
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device is here"))
        elif {"device", "new_device"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.gpu)

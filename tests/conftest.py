"""Environment, fixtures and hypothesis profiles for all tests.

``HYPOTHESIS_PROFILE=dev`` (the default) keeps the run short, ``ci`` tries more cases, ``nightly`` the most. Which tests
run by default is said by ``addopts`` in ``pyproject.toml``.
"""

import gc
import logging
import os
import pathlib
import signal
import sys
import tempfile

# Before torch is imported, and inherited by the processes that tests start: the workers of a run share the cores, so
# each computes on one thread (tests that need more ask for more), and threads that wait sleep instead of spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():  # triton reads it when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()  # until the tests are collected: what that makes stays, and full collections of it take half a second

# A shell that starts the suite in the background has it ignore Ctrl-C, and tests interrupt what they run.
signal.signal(signal.SIGINT, signal.default_int_handler)

# cost tables of tiny models do not belong in the user's cache; the workers of a run share this folder
_COSTS = tempfile.TemporaryDirectory(prefix="specdec-costs-")
os.environ.setdefault("SPECDEC_COSTS", _COSTS.name)

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # `from tests.tiny import ...`, however pytest was started
    sys.path.insert(0, str(ROOT))

# a deadline would measure the machine's other work; a failing example prints the blob that reproduces it
_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("dev", max_examples=12, stateful_step_count=12, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=60, stateful_step_count=30, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=60, stateful_step_count=30, **_COMMON)  # other cases every run
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config):
    """Compile the CPU kernels before the workers start: each of them would compile them as well.

    A file's tests share what they build, so one worker runs them all, unless ``--dist`` says otherwise.
    """
    from tests import tiny

    if config.option.dist == "load":  # the default
        config.option.dist = "loadfile"
    tiny.kernels_available()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown():
    """The command line configures logging for its process; the next test starts from the defaults again."""
    logger = logging.getLogger("specdec")
    logger.setLevel(logging.NOTSET)
    for handler in [handler for handler in logger.handlers if not isinstance(handler, logging.NullHandler)]:
        logger.removeHandler(handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """``checkpoint("qwen3_5", hidden=40)``: the folder of a tiny checkpoint, written once per session. Read only."""
    from tests import tiny

    written = {}

    def folder(family, **settings):
        key = (family, *((name, repr(value)) for name, value in sorted(settings.items())))
        if key not in written:
            written[key] = tiny.WRITERS[family](tmp_path_factory.mktemp(family), **settings)
        return written[key]

    return folder


@pytest.fixture(scope="session")
def make_target(checkpoint):
    """``make_target("qwen3_5", kernels="native", dtype="bfloat16", hidden=40)``: a target, loaded once per session.

    ``dtype`` is what it computes in, ``stored`` what the checkpoint holds.
    """
    from tests import tiny

    loaded = {}

    def target(family, *, kernels="torch", dtype="float32", stored="float32", **settings):
        folder = checkpoint(family, dtype=stored, **settings)
        key = (folder, kernels, dtype)
        if key not in loaded:
            loaded[key] = tiny.make_target(folder, kernels=kernels, dtype=dtype)
        return loaded[key]

    return target


@pytest.fixture
def install():
    """``install(plugin, ...)``: until the test ends the registry has the built-in plugins and these."""
    from specdec.registry import BUILT_INS, Registry, use_registry

    former = use_registry(None)
    yield lambda *plugins: use_registry(Registry([*BUILT_INS, *plugins], entry_points=()))
    use_registry(former)


@pytest.fixture(scope="session", params=["torch", "native"])
def kernels(request):
    """The CPU kernels under test: the torch reference, and the native ones where they compile."""
    from tests import tiny

    if request.param not in tiny.kernels_available():
        pytest.skip("the native kernels do not compile on this machine")
    return str(request.param)

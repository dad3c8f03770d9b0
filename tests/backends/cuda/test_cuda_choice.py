"""Which backend a load runs on where there is an NVIDIA device, none, or one that cannot be used; and what it says."""

import importlib.util
import platform

import pytest
import torch

from specdec.backends import choice as backend_choice
from specdec.backends.cuda import device as devices
from specdec.backends.cuda.backend import CudaBackend
from specdec.errors import ConfigError, UnsupportedError
from specdec.registry import registry
from tests.backends.cuda.fake import FakeDevice

OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: ..."
)


H100 = {
    "triton": True,
    "cuda": "13.0",
    "hip": None,
    "files": True,
    "count": 1,
    "available": True,
    "capability": (9, 0),
    "init": "",
    "visible": None,
}


@pytest.fixture
def machine(monkeypatch):
    """``machine(...)``: what this process sees. By default an H100 that works."""
    find = importlib.util.find_spec

    def has(**changes):
        seen = H100 | changes

        def find_spec(name, *rest):
            return (object() if seen["triton"] else None) if name == "triton" else find(name, *rest)

        def initialise():
            if seen["init"]:
                raise RuntimeError(seen["init"])

        for where, name, value in (
            (importlib.util, "find_spec", find_spec),
            (torch.version, "cuda", seen["cuda"]),
            (torch.version, "hip", seen["hip"]),
            (devices, "_device_files", lambda: seen["files"]),
            (torch.cuda, "device_count", lambda: seen["count"]),
            (torch.cuda, "is_available", lambda: seen["available"]),
            (torch.cuda, "init", initialise),
            (torch.cuda, "get_device_capability", lambda *_: seen["capability"]),
            (torch.cuda, "get_device_name", lambda *_: "NVIDIA Test Card"),
            (platform, "system", lambda: "Linux"),
            (platform, "machine", lambda: "x86_64"),
        ):
            monkeypatch.setattr(where, name, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if seen["visible"] is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen["visible"])

    return has


UNUSABLE = {
    "no triton": ({"triton": False}, "triton is not installed (pip install 'specdec-framework[cuda]')"),
    "torch without CUDA": ({"cuda": None, "available": False, "count": 0}, "built without CUDA"),
    "torch for ROCm": ({"cuda": None, "hip": "7.0", "available": True}, "built for ROCm"),
    "old driver": ({"available": False, "init": OLD_DRIVER}, "driver is too old for this torch"),
    "no driver": ({"available": False, "init": "Found no NVIDIA driver.\nMore."}, "Found no NVIDIA driver"),
    "no reason": ({"available": False, "count": 0}, "no CUDA device was found"),
    "old card": ({"capability": (7, 5)}, "NVIDIA Test Card has compute capability 7.5; the kernels take 8.0 or newer"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_device_that_cannot_be_used_is_named_with_the_reason(machine, choice, case):
    """``auto`` takes the cpu and says why; asked for by name it is an error."""
    seen, reason = UNUSABLE[case]
    machine(**seen)
    assert reason in str(registry().backend("cuda").available())
    name, notices = choice()
    assert name == "cpu"
    assert len(notices) == 1
    assert notices[0].startswith('target.backend = "auto" runs on the cpu: the cuda backend cannot run here: ')
    assert reason in notices[0]
    with pytest.raises(UnsupportedError) as refused:
        backend_choice.make_backend("cuda")
    assert reason in str(refused.value)
    assert refused.value.facts["try"] == 'target.backend = "cpu"'


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_auto_takes_a_device_that_works(machine, choice, capability):
    machine(capability=capability)
    assert choice() == ("cuda", [])
    assert choice("cuda") == ("cuda", [])
    assert choice("cpu") == ("cpu", [])


@pytest.mark.parametrize(
    "seen",
    [
        {"files": False, "count": 0, "available": False, "init": "Found no NVIDIA driver"},
        {"files": False, "count": 0, "available": False, "cuda": None},
        {"visible": "", "available": False},
        {"visible": "-1", "available": False},
        {"triton": False, "visible": ""},
    ],
    ids=["no device", "no device, torch without CUDA", "hidden", "hidden by -1", "hidden, no triton"],
)
def test_without_a_device_nothing_is_said(machine, choice, seen):
    machine(**seen)
    assert choice() == ("cpu", [])
    with pytest.raises(UnsupportedError, match="the cuda backend cannot run here"):
        backend_choice.make_backend("cuda")


def test_opening_a_device_that_is_not_there(machine):
    machine(available=False, count=0)
    with pytest.raises(UnsupportedError, match="no CUDA device was found"):
        devices.open_device()


def test_dtypes():
    backend = CudaBackend(FakeDevice())
    assert backend.device == "Triton's interpreter"
    assert backend.choose_dtype("auto", "bfloat16") == ("bfloat16", "auto: the checkpoint is stored in bfloat16")
    assert backend.choose_dtype("auto", "float16")[0] == "bfloat16"
    assert backend.choose_dtype("auto", "float32")[0] == "float32"
    assert backend.choose_dtype("float32", "bfloat16") == ("float32", "asked for")
    with pytest.raises(ConfigError, match="float16"):
        backend.choose_dtype("float16", "bfloat16")


@pytest.mark.parametrize(("value", "eager"), [("1", True), ("yes", True), ("0", False), ("", False), ("off", False)])
def test_eager_passes_are_asked_for_in_the_environment(monkeypatch, value, eager):
    monkeypatch.setenv("SPECDEC_EAGER", value)
    ops = CudaBackend(FakeDevice()).ops("bfloat16")
    assert ops.eager_reason == ("SPECDEC_EAGER is set" if eager else "")
    assert ops.dtype is torch.bfloat16

"""The libraries that a wheel carries: they are there, are used, and give the bits of a native build.

``SPECDEC_WHEEL=FILE`` tests that wheel, which another compiler may have made; without it one is built.
"""

import os
import zipfile
from pathlib import Path

import pytest
import torch

from specdec.backends.cpu import library
from specdec.backends.cpu.compiler import CompileError, find_compiler
from specdec.backends.cpu.instruction_sets import available, of_this_architecture
from specdec.backends.cpu.native import NativeOps
from specdec.checkpoints import locate
from tests import tiny
from tests.instruction_sets import kernels_of
from tests.processes import ROOT, run_python


def build_wheel(folder, **environment):
    """Build a wheel; return it and what the build said."""
    done = run_python("-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT, env=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    try:
        find_compiler(os.environ.get("CXX", ""), os.environ["PATH"])
    except CompileError as error:
        pytest.skip(error.reason)
    if given := os.environ.get("SPECDEC_WHEEL"):
        return Path(given)
    return build_wheel(tmp_path_factory.mktemp("wheel"))[0]


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure_and_the_build_says_so(tmp_path):
    wheel, said = build_wheel(tmp_path / "dist", CXX="", PATH=str(tmp_path))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "no C++ compiler" in said
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


@pytest.mark.slow
def test_a_wheel_carries_the_sets_of_its_architecture(wheel):
    names = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert names == {f"{one.name}.so" for one in of_this_architecture() if one.packaged}
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [one.name for one in available() if one.packaged])
def test_its_libraries_give_the_bits_of_a_native_build(name, dtype, wheel, tmp_path, monkeypatch):
    """Catches: a sum that one compiler orders or fuses in another way than the other."""
    native = kernels_of(name)
    zipfile.ZipFile(wheel).extractall(tmp_path)
    monkeypatch.setattr(library, "WHEEL", tmp_path / "specdec" / "backends" / "cpu" / "libraries")
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)
    shipped = kernels_of(name)
    assert native.path.parent != shipped.path.parent == library.WHEEL
    for ours, theirs in zip(logits(native, dtype), logits(shipped, dtype), strict=True):
        assert torch.equal(ours, theirs)


def logits(kernels, dtype):
    """The embedded model's logits after a prompt, and of passes with 1 to 8 rows, with every bit as an integer."""
    target = tiny.make_target(locate("demo"), ops=NativeOps(getattr(torch, dtype), kernels), dtype=dtype)
    state = target.new_state(400)
    tokens = [(37 * at) % 200 for at in range(300)]
    target.prefill(state, tokens)
    found = []
    for rows in range(1, 9):
        found.append(target.decode(state, tokens[:rows]).need_logits().rows())
        target.commit(state, rows)
    return [torch.from_numpy(one).view(torch.int32) for one in found]

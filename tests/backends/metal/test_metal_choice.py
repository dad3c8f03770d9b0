"""Which backend a load runs on, and what it says about it."""

import importlib.util
import platform

import pytest

import specdec
from specdec import pipeline
from specdec.backends import choice as backend_choice
from specdec.contract import Parity
from specdec.errors import ConfigError, UnsupportedError
from specdec.registry import registry

PROMPT = "The river"


@pytest.fixture
def machine(monkeypatch):
    """``machine(system, processor, mlx=...)``: what this process sees."""

    def has(system, processor, *, mlx):
        find = importlib.util.find_spec

        def find_spec(name, *rest):
            return (object() if mlx else None) if name == "mlx.core" else find(name, *rest)

        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(platform, "machine", lambda: processor)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    return has


@pytest.mark.parametrize(
    ("system", "processor", "mlx", "chosen"),
    [
        ("Darwin", "arm64", True, "metal"),
        ("Darwin", "arm64", False, "cpu"),
        ("Linux", "x86_64", True, "cpu"),
        ("Linux", "arm64", False, "cpu"),
        ("Darwin", "x86_64", True, "cpu"),
    ],
)
def test_auto_takes_metal_on_apple_silicon_with_mlx(choice, machine, system, processor, mlx, chosen):
    """Without MLX it says there what is missing; elsewhere it says nothing. A name is taken at its word."""
    machine(system, processor, mlx=mlx)
    name, notices = choice()
    assert name == chosen
    if (system, processor, mlx) == ("Darwin", "arm64", False):
        (notice,) = notices
        assert "mlx is not installed" in notice
        assert "specdec-framework[metal]" in notice
    else:
        assert notices == []
    assert choice("cpu") == ("cpu", [])
    if mlx:
        assert choice("metal") == ("metal", [])


def test_metal_by_name_without_mlx_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(UnsupportedError, match=r"specdec-framework\[metal\]"):
        backend_choice.make_backend("metal")

    def no_mlx(name, *rest):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", no_mlx)  # what it does where not even the package exists
    assert "mlx is not installed" in str(registry().backend("metal").available())


def test_dtypes():
    pytest.importorskip("mlx.core", exc_type=ImportError)
    from specdec.backends.metal.backend import MetalBackend

    backend = MetalBackend()
    assert backend.choose_dtype("auto", "float32")[0] == "float32"
    assert backend.choose_dtype("auto", "float16")[0] == "float16"
    assert backend.choose_dtype("bfloat16", "float32") == ("bfloat16", "asked for")
    with pytest.raises(ConfigError, match="float8"):
        backend.choose_dtype("float8", "float32")


def test_the_mode_is_an_option_of_the_backend():
    pytest.importorskip("mlx.core", exc_type=ImportError)
    overrides = ["target.backend=metal", "target.dtype=float32", "depth.depth=2"]
    fast = pipeline.build(specdec.load_config(None, [*overrides, "target.backend_options.mode=fast"]))
    assert fast.info.parity is Parity.NUMERIC
    assert "stock kernels" in fast.info.kernels
    assert any('mode = "fast"' in notice for notice in fast.generate(PROMPT, max_new_tokens=2).notices)
    exact = pipeline.build(specdec.load_config(None, overrides))
    assert "specdec's" in exact.info.kernels
    assert not any("mode" in notice for notice in exact.generate(PROMPT, max_new_tokens=2).notices)

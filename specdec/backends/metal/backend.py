"""The Metal backend: on which of MLX's devices it runs here, and in which dtype."""

from __future__ import annotations

import platform

from specdec.errors import ConfigError, UnsupportedError

try:
    import mlx.core as mx
except ImportError as error:  # the package without its library, as mlx alone is on Linux
    raise UnsupportedError(f"mlx cannot be loaded: {error}", try_="pip install 'specdec-framework[metal]'") from error

from specdec.backends.metal.ops import MetalOps, Mode

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


class MetalBackend:
    """MLX on the default device: the GPU where there is Metal, else the CPU.

    Attributes:
        mode: see ``specdec.backends.metal.ops``.
        notices: what a user should know about the choice of the device, one sentence each.
    """

    name = "metal"

    def __init__(self, mode: Mode = "exact") -> None:
        self.mode = mode
        self.notices: tuple[str, ...] = ()
        if mx.default_device().type == mx.DeviceType.gpu:
            self.device = f"metal ({mx.device_info().get('device_name', 'GPU')})"
        else:
            self.device = f"MLX's CPU device ({platform.machine()})"
            self.notices += ("metal runs on MLX's CPU device here, which is slow: no Metal device was found",)
        if mode == "fast":
            self.notices += (
                'target.backend_options.mode = "fast": the output may differ from plain decoding where two tokens are '
                "nearly equally likely",
            )

    def choose_dtype(self, requested: str, stored: str) -> tuple[str, str]:
        if requested in DTYPES:
            return requested, "asked for"
        if requested != "auto":
            raise ConfigError(f"target.dtype takes auto, {', '.join(DTYPES)} on the metal backend, got {requested!r}")
        if stored in ("float32", "float16"):
            return stored, f"auto: the checkpoint is stored in {stored}"
        return "bfloat16", f"auto: the checkpoint is stored in {stored}"

    def ops(self, dtype: str) -> MetalOps:
        return MetalOps(DTYPES[dtype], mode=self.mode)

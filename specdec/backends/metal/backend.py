"""The Metal backend: choose MLX's device and the dtype."""

from __future__ import annotations

import platform

from specdec.backends import Backend
from specdec.errors import UnsupportedError

try:
    import mlx.core as mx
except ImportError as error:  # the package without its library, as on Linux with mlx alone
    raise UnsupportedError(f"mlx cannot be loaded: {error}", try_="pip install 'specdec-framework[metal]'") from error

from specdec.backends.metal.ops import MetalOps, Mode


class MetalBackend(Backend):
    """MLX on its default device: the GPU with Metal, else the CPU.

    Attributes:
        mode: see ``specdec.backends.metal.ops``.
    """

    name = "metal"
    dtypes = ("bfloat16", "float16", "float32")

    def __init__(self, mode: Mode = "exact") -> None:
        self.mode = mode
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

    def ops(self, dtype: str) -> MetalOps:
        return MetalOps(getattr(mx, dtype), mode=self.mode)

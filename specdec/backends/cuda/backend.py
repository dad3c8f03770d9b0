"""The CUDA backend: on which device it runs, in which dtype, and whether passes are replayed from graphs."""

from __future__ import annotations

import os

import torch

from specdec.backends.cuda.device import Device, open_device
from specdec.errors import ConfigError, UnsupportedError

try:
    import triton
except ImportError as error:
    raise UnsupportedError(f"triton cannot be loaded: {error}", try_="pip install 'specdec-framework[cuda]'") from error

from specdec.backends.cuda.ops import CudaOps

EAGER = "SPECDEC_EAGER"  # set: passes run op by op, for debugging
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class CudaBackend:
    """The current CUDA device (CUDA_VISIBLE_DEVICES chooses among several).

    Raises: UnsupportedError with the reason where the device cannot run the kernels.
    """

    name = "cuda"

    def __init__(self, device: Device | None = None) -> None:
        self._device = open_device() if device is None else device
        self.device = self._device.name

    def choose_dtype(self, requested: str, stored: str) -> tuple[str, str]:
        if requested in DTYPES:
            return requested, "asked for"
        if requested != "auto":
            raise ConfigError(f"target.dtype takes auto, {' or '.join(DTYPES)} on the cuda backend, got {requested!r}")
        if stored == "float32":
            return "float32", "auto: the checkpoint is stored in float32"
        return "bfloat16", f"auto: the checkpoint is stored in {stored}"

    def ops(self, dtype: str) -> CudaOps:
        eager = os.environ.get(EAGER, "").strip().lower() not in ("", "0", "false", "no", "off")
        return CudaOps(
            self._device,
            DTYPES[dtype],
            eager_reason=f"{EAGER} is set" if eager else "",
            kernels=f"Triton {triton.__version__}",
        )

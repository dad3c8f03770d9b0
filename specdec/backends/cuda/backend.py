"""The CUDA backend: choose the device, the dtype, and whether passes are replayed from graphs."""

from __future__ import annotations

import torch

from specdec.backends import Backend, eager_reason
from specdec.backends.cuda.device import CudaDevice, open_device
from specdec.errors import UnsupportedError

try:
    import triton
except ImportError as error:
    raise UnsupportedError(f"triton cannot be loaded: {error}", try_="pip install 'specdec-framework[cuda]'") from error

from specdec.backends.cuda.compiling import announce_compilation
from specdec.backends.cuda.ops import CudaOps


class CudaBackend(Backend):
    """The current CUDA device (CUDA_VISIBLE_DEVICES chooses among several).

    Raises: UnsupportedError with the reason if the device cannot run the kernels.
    """

    name = "cuda"
    dtypes = ("bfloat16", "float32")

    def __init__(self, device: CudaDevice | None = None) -> None:
        self._device = open_device() if device is None else device
        self.device = self._device.name
        announce_compilation()

    def ops(self, dtype: str) -> CudaOps:
        return CudaOps(
            self._device, getattr(torch, dtype), eager_reason=eager_reason(), kernels=f"Triton {triton.__version__}"
        )

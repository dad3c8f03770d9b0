"""What the tests of the kernels share: who runs them, float64 values, and bits.

Kernels run under emulation on Linux and on the GPU where there is Metal. The order of threads and contraction vary;
sums over lanes do not, for no kernel leaves their order to the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from specdec.backends.metal.kernels.kernel import Executor, OnMetal
from specdec.backends.metal.quantised import PackedMatrix
from tests.backends.metal.emulator import Emulated, Knobs, unavailable
from tests.checkpoints.quantised.mlx_layout import bit_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

PARTIAL = ("tops", "masses", "mixes")  # attention leaves parts unwritten that no row reaches
_WHY_NOT = unavailable()
if mx.metal.is_available():
    EMULATED: Executor = OnMetal()
    CONTRACTED: Executor = OnMetal()
    RUNS = [pytest.param(EMULATED, id="metal")]
elif _WHY_NOT is None:
    EMULATED = Emulated(Knobs(), PARTIAL)
    CONTRACTED = Emulated(Knobs(order="descending", contract=True), PARTIAL)
    shuffled = Emulated(Knobs(order="random", contract=True, seed=1), PARTIAL)
    RUNS = [
        pytest.param(None, id="reference"),  # MLX's CPU device on Linux keeps rows apart; elsewhere nobody says so
        pytest.param(EMULATED, id="emulated"),
        pytest.param(CONTRACTED, id="contracted"),
        pytest.param(shuffled, id="shuffled"),
    ]
else:
    pytest.skip(_WHY_NOT, allow_module_level=True)
EXECUTORS = [pytest.param(None, id="reference"), pytest.param(EMULATED, id="kernels")]

UNIT = 2.0**-24  # half the distance from 1 to the next float32: what one rounding costs, relatively
NARROW = {mx.float32: (UNIT, 0.0), mx.bfloat16: (2.0**-8, 0.0), mx.float16: (2.0**-11, 2.0**-25)}


def float64(array: Any) -> Float64:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def rounding(wanted: Float64, dtype: Any) -> Float64:
    """What rounding a result (half as large again at most) to ``dtype`` may cost."""
    relative, absolute = NARROW[dtype]
    cost: Float64 = 1.5 * relative * np.abs(wanted) + absolute
    return cost


def bits(array: Any) -> NDArray[np.uint32]:
    """The array's bits; widening to float32 keeps them apart."""
    return np.array(array.astype(mx.float32)).view(np.uint32)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays are equal bit by bit, and finite: a NaN is memory that nobody should have read."""
    return bool((bits(a) == bits(b)).all() and np.isfinite(np.array(a.astype(mx.float32))).all())


def affine(
    rng: np.random.Generator, features: int, length: int, *, group: int, bits: int, dtype: Any
) -> tuple[PackedMatrix, tuple[Float64, Float64, Float64]]:
    """A random matrix in MLX's format, and its levels, scales and biases in float64."""
    levels = rng.integers(0, 2**bits, (features, length))
    drawn = rng.standard_normal((2, features, length // group)).astype(np.float32)
    scales, biases = (mx.array(array).astype(dtype) for array in drawn)
    codes = mx.array(bit_stream(levels, bits).numpy())
    weight = PackedMatrix(codes=codes, scales=scales, biases=biases, group=group, bits=bits)
    wide = [np.repeat(float64(array), group, axis=1) for array in (scales, biases)]
    return weight, (levels.astype(np.float64), wide[0], wide[1])

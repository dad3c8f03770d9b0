"""Test bench for operations: random inputs created by the backend, comparisons, and float64 helpers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.backends.ops import Ops
from specdec.errors import UnsupportedError
from specdec.testing.checks import Broken, Run, expect_equal, not_applicable
from specdec.testing.numerics import EPSILON, SMALLEST, dot_tolerance
from specdec.testing.subjects import OpsSubject

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

ROWS = (1, 2, 5, 16, 19)  # one, a few, a full verification pass, a prompt
EPS = 1e-6  # of norms


class Bench:
    """A backend's ops, random inputs for them, and comparisons."""

    def __init__(self, subject: OpsSubject, run: Run) -> None:
        self.ops: Ops = subject.make()
        self.rng = np.random.default_rng(run.seed + 1)
        self.inputs: list[Any] = []  # every activation, matrix and vector created here
        steps = {1 + 2.0**-12: "float32", 1 + 2.0**-9: "float16", 1 + 2.0**-6: "bfloat16"}
        kept = self.host(self.act(np.array([list(steps) + [1.0] * 5])))[0].tolist()
        self.dtype = next((dtype for step, dtype in steps.items() if step in kept), "bfloat16")
        self.eps = EPSILON[self.dtype]

    def host(self, array: Any) -> Float64:
        """An array of the backend or of numpy, or a packed weight, as float64, without rounding."""
        if not isinstance(array, np.ndarray):
            array = self.ops.to_host(array).double().numpy()
        return np.asarray(array, np.float64)

    def normal(self, *shape: int) -> Float64:
        """Standard normal values."""
        return self.rng.standard_normal(shape)

    def _made(self, array: Any) -> Any:
        self.inputs.append(array)
        return array

    def act(self, values: Float64) -> Any:
        """An activation ``[T, H]``, created by the backend."""
        return self._made(self.ops.embed(self.matrix(values), list(range(len(values)))))

    def heads(self, values: Float64) -> Any:
        """An activation ``[T, n, D]``."""
        rows, heads, dim = values.shape
        return self.act(values.reshape(rows, heads * dim)).reshape(rows, heads, dim)

    def matrix(self, values: Float64) -> Any:
        """A weight ``[N, H]``."""
        return self._made(self.ops.weight(_tensor(values)))

    def vector(self, values: Float64, *, plus: float = 0.0) -> Any:
        """A float32 parameter."""
        return self._made(self.ops.vector(_tensor(values), plus=plus))

    def stack(self, values: Float64) -> Any:
        """Matrices ``[n, N, H]`` as views of a fused tensor with other rows between them."""
        count, rows, length = values.shape
        fused = _tensor(np.concatenate([values, np.full((count, 3, length), 7.0)], axis=1))
        return self.ops.stack([fused[i, :rows] for i in range(count)])

    def rounded(self, values: Float64) -> Float64:
        """``[n, N, H]`` after rounding to the activation dtype."""
        return self.host(self.matrix(values.reshape(-1, values.shape[-1]))).reshape(values.shape)

    def dot_tolerance(self, x: Float64, weight: Float64, *, plus: Float64 | float = 0.0, roundings: int = 1) -> Float64:
        """The tolerance for ``x @ weight.T + plus``."""
        magnitude = np.abs(x) @ np.abs(weight).T + np.abs(plus)
        return dot_tolerance(self.dtype, weight.shape[-1], magnitude, roundings)

    @contextlib.contextmanager
    def optional(self, *names: str) -> Iterator[None]:
        """Try these ops once in the block: the clause does not apply to a backend that lacks one of them.

        Refusals outside the block are failures.
        """
        try:
            yield
        except (NotImplementedError, UnsupportedError) as error:
            not_applicable(f"this backend lacks one of {', '.join(names)}: {type(error).__name__}: {error}")

    def close(self, got: Any, wanted: Float64, tolerance: Float64 | float, what: str, **case: object) -> None:
        """Raises: Broken if ``got`` is further from ``wanted`` than the tolerance."""
        array = self.host(got)
        expect_equal(array.shape, wanted.shape, f"{what} has the wrong shape", **case)
        off = np.abs(array - wanted)
        wrong = ~(off <= tolerance + SMALLEST[self.dtype])  # NaN is wrong too
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            allowed = float(np.broadcast_to(tolerance, off.shape)[place])
            expected = f"{wanted[place]:.7g} within {allowed:.1e}"
            what = f"{what} is off at {place}"
            raise Broken(what, got=f"{array[place]:.7g}", expected=expected, dtype=self.dtype, **case)


def _tensor(values: Float64) -> Any:
    import torch

    return torch.tensor(np.asarray(values), dtype=torch.float32)


def silu(x: Float64) -> Float64:
    """``x * sigmoid(x)``."""
    return x * sigmoid(x)


def sigmoid(x: Float64) -> Float64:
    """``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x: Float64) -> Float64:
    """Softmax over the last axis."""
    weights = np.exp(x - x.max(-1, keepdims=True))
    probs: Float64 = weights / weights.sum(-1, keepdims=True)
    return probs


def rms_normed(x: Float64, weight: Float64) -> Float64:
    """``x / rms(x) * weight`` over the last axis."""
    normed: Float64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
    return normed

"""MetalOps beside the reference, on MLX's CPU device here and on the GPU on a Mac.

The conformance kit compares every operation with float64 (``test_contract.py``).
"""

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.arrays import MetalLogits  # noqa: E402
from specdec.backends.metal.ops import MetalOps  # noqa: E402
from specdec.backends.ops import DeltaShape, Routing  # noqa: E402
from specdec.errors import ContractError, StateError  # noqa: E402
from tests.backends.refusals import refuses_arrays_of_another_backend, refuses_what_it_lacks  # noqa: E402

OPS = MetalOps(mx.float32)


def test_equal_experts_go_by_id():
    """Equal scores, negative ones and zeros of either sign among them; and a NaN names an expert that exists."""
    bias = OPS.vector(torch.tensor([0.0, -1.0, 2.0, -0.0, 2.0, -3.0, -1.0]) - 0.5)
    x, router = mx.zeros((3, 4)), mx.zeros((7, 4))
    ids, _ = OPS.route(x, router, Routing(top_k=7, scores="sigmoid", normalised=True), bias)
    assert ids.tolist() == [[2, 4, 0, 3, 1, 6, 5]] * 3
    ids, _ = OPS.route(x + mx.nan, router, Routing(top_k=3, scores="softmax", normalised=True))
    assert all(0 <= expert < 7 for row in ids.tolist() for expert in row)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_best_token(value):
    rows = np.zeros((3, 5), np.float32)
    rows[1, 2] = value
    with pytest.raises(ContractError, match="row 1"):
        MetalLogits(mx.array(rows)).argmax()


def test_what_does_not_fit_is_refused():
    refuses_what_it_lacks(OPS)
    refuses_arrays_of_another_backend(OPS, mx.ones((1, 3)))
    with pytest.raises(StateError, match="without a pass"):
        OPS.new_delta(DeltaShape(key_heads=1, value_heads=1, key_dim=2, value_dim=2, kernel=2)).commit(1)
    x = mx.ones((2, 1, 4))
    with pytest.raises(StateError):
        OPS.attend(x, x, x, OPS.new_kv(1, 1, 4), scale=1.0)
    with pytest.raises(StateError):
        OPS.attend_latent(x, x[:, 0], OPS.new_latent(1, 4), scale=1.0, value_dims=2)

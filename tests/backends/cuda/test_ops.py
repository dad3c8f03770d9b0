"""The ops composed of kernels: the conformance kit's clauses, weights of every kind, and logits."""

import attrs
import numpy as np
import pytest
import torch

from specdec.backends.cuda.ops import CudaOps
from specdec.backends.cuda.weights import DenseWeight, Fp8BlockWeight, Nvfp4Weight
from specdec.checkpoints import StoredWeights
from specdec.errors import ContractError, UnsupportedError
from tests.backends.contract import CLAUSES, check_operations
from tests.backends.refusals import refuses_arrays_of_another_backend, refuses_what_it_lacks
from tests.checkpoints.quantised.quantisers import NAME, fp8_block, nvfp4, opened

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # numpy, over NaN
]


@pytest.fixture(scope="module")
def make(new_device):
    """``make(dtype="float32")``: ops on the device."""
    return lambda dtype="float32": CudaOps(new_device(), getattr(torch, dtype))


@pytest.mark.parametrize("clause", CLAUSES)
def test_the_contract_of_operations(make, clause):
    def fewer_rows():
        """Commits of up to 6 rows in O13, whose passes of 16 rows take the interpreter minutes."""
        ops = make()
        ops.capabilities = attrs.evolve(ops.capabilities, max_rows=6)
        return ops

    check_operations(fewer_rows if clause == "O13" else make, clauses=[clause])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "clauses"), [("short", ("O5", "O6", "O7", "O8", "O9")), ("odd", ("O7", "O8", "O19"))])
def test_the_contract_at_other_sizes(make, size, clauses):
    check_operations(make, size, clauses)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", ["kit", "even", "real"])
def test_the_whole_contract_of_operations(make, size, dtype):
    check_operations(lambda: make(dtype), size)


# --- weights ---------------------------------------------------------------------------------------------------------


BLOCK = (16, 32)
STORED = {
    Fp8BlockWeight: (lambda w: fp8_block(w, BLOCK), {"quant_method": "fp8", "weight_block_size": BLOCK}),
    Nvfp4Weight: (nvfp4, {}),
}


@pytest.mark.parametrize("kind", STORED)
def test_weights_stay_packed(make, tmp_path, kind):
    """Tables, heads and stacks, for passes and for prompts; ``test_row_kernels.py`` has the other products."""
    ops, rng = make(), np.random.default_rng(0)
    matrices, (quantise, config) = [], STORED[kind]
    for number in range(2):
        parts, _ = quantise(rng.standard_normal((32, 64)).astype(np.float32))
        checkpoint = opened(tmp_path / str(number), parts, quantization_config=config)
        stored = StoredWeights(checkpoint, dtype=torch.float32, keeps=ops.capabilities.packed_formats)
        matrices.append(stored.matrix(NAME))
    plain = [matrix.decode() for matrix in matrices]
    held, stack = ops.weight(matrices[0]), ops.stack(matrices)
    assert all(isinstance(one, kind) for one in (held, *stack.experts))
    assert torch.allclose(ops.embed(held, [3, 31, 3]).cpu(), plain[0][[3, 31, 3]], rtol=1e-6)
    for count in (3, 18):
        x = torch.from_numpy(rng.standard_normal((count, 64)).astype(np.float32))
        heads = torch.stack([x, x], 1)
        logits, both = ops.head(x.to(ops.device.place), held), ops.project_heads(heads.to(ops.device.place), stack)
        assert np.allclose(logits.rows(), x @ plain[0].T, atol=1e-3)
        assert logits.argmax() == logits.rows().argmax(axis=1).tolist()
        assert torch.allclose(both.cpu(), torch.stack([x @ one.T for one in plain], 1), atol=1e-3)
    mixed = ops.stack([matrices[0], plain[1]])  # one layout or none
    assert all(isinstance(one, DenseWeight) for one in mixed.experts)
    with pytest.raises(UnsupportedError, match="mlx-affine"):
        ops.weight(attrs.evolve(matrices[0], format="mlx-affine"))


@pytest.mark.sample
def test_weights_that_are_projected_together_share_memory(make):
    """So that one launch reads them; a second use, or one of them alone, changes nothing."""
    ops, draw = make(), torch.Generator().manual_seed(4)
    matrices = [torch.randn(n, 32, generator=draw) for n in (16, 8, 8)]
    held = [ops.weight(one) for one in matrices]
    biases = [ops.weight(torch.randn(n, generator=draw)) for n in (16, 8, 8)]
    x = torch.randn(2, 32, generator=draw).to(ops.device.place)
    first = ops.project(x, held, biases)
    assert all(weight.fused for weight in held)
    for again in (ops.project(x, held, biases), ops.project(x, held, biases)):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for weight, matrix, bias, got in zip(held, matrices, biases, first, strict=True):
        wanted = x.cpu() @ matrix.T + bias.tensor.cpu()
        assert torch.allclose(got.cpu(), wanted, atol=1e-4)
        assert torch.equal(weight.tensor.cpu(), matrix)
    assert held[1].tensor.untyped_storage().data_ptr() == held[0].tensor.untyped_storage().data_ptr()


# --- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_best_token(make, value):
    ops = make()
    x = torch.ones(3, 16)
    x[1, 2] = value
    held = ops.weight(torch.eye(16))
    y, pruned = x.to(ops.device.place), ops.head_rows(held, [1], ops.head_rows(held, [2, 5]))
    for logits in (ops.head(y, held), ops.pruned_head(y, pruned)):
        with pytest.raises(ContractError, match="row 1"):
            logits.argmax()


@pytest.mark.sample
def test_arrays_that_do_not_fit_are_refused(make):
    ops = make()
    refuses_what_it_lacks(ops)
    refuses_arrays_of_another_backend(ops, torch.ones(1, 3, device=ops.device.place))
    with pytest.raises(ContractError, match="token 4 of row 1 is not in the vocabulary"):
        ops.embed(ops.weight(torch.ones(4, 3)), [0, 4])

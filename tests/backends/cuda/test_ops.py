"""The ops composed of kernels: the conformance kit's clauses, weights of every kind, and logits."""

import attrs
import numpy as np
import pytest
import torch

from specdec.backends.cpu.reference import ReferenceOps
from specdec.backends.cuda.ops import CudaOps
from specdec.backends.cuda.weights import DenseWeight, Fp8BlockWeight, Nvfp4Weight
from specdec.checkpoints.quantised import fp4, fp8
from specdec.checkpoints.quantised.stored import StoredMatrix
from specdec.errors import ContractError, UnsupportedError
from tests.backends.contract import CLAUSES, check_operations
from tests.backends.refusals import refuses_arrays_of_another_backend, refuses_what_it_lacks

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


def stored(form, n, k, seed, block=(16, 32)):
    """A quantised matrix as a checkpoint has it."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k if form == "fp8-block" else k // 2), generator=draw, dtype=torch.uint8)
    if form == "fp8-block":
        codes[(codes & 127) == 127] = 0  # NaN
        scale = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=draw) / 100
        meta = {"block_rows": block[0], "block_columns": block[1], "group": block[1], "bits": 8}
        return StoredMatrix(
            format=form,
            shape=(n, k),
            parts={"codes": codes, "scale": scale},
            meta=meta,
            dtype=torch.float32,
            values=fp8.numbers(torch.arange(256, dtype=torch.uint8)),
            numbers=fp8.numbers,
        )
    scale = (torch.rand(n, k // 16, generator=draw) + 0.1).to(torch.float8_e4m3fn)
    return StoredMatrix(
        format=form,
        shape=(n, k),
        parts={"codes": codes, "scale": scale, "global_scale": torch.tensor([0.25])},
        meta={"block_rows": 1, "block_columns": 16, "group": 16, "bits": 4},
        dtype=torch.float32,
        values=fp4.E2M1,
        numbers=fp4.numbers,
    )


@pytest.mark.parametrize("form", ["fp8-block", "nvfp4"])
def test_weights_stay_packed(make, form):
    """In every op that takes a weight, for passes and for prompts; beside the reference over the decoded ones."""
    ops, reference = make(), ReferenceOps(torch.float32)
    assert form in ops.capabilities.packed_formats
    kind = Fp8BlockWeight if form == "fp8-block" else Nvfp4Weight
    matrices = [stored(form, 32, 64, seed) for seed in range(4)]
    held, plain = [ops.weight(one) for one in matrices], [reference.weight(one.decode()) for one in matrices]
    assert all(isinstance(one, kind) for one in held)
    assert all(torch.equal(one.decode().cpu(), other) for one, other in zip(held, plain, strict=True))
    draw = torch.Generator().manual_seed(9)
    for count in (3, 18):
        x = torch.randn(count, 64, generator=draw)
        y = x.to(ops.device.place)
        pairs = [
            (ops.project(y, held[:3])[2], reference.project(x, plain[:3])[2]),
            (ops.linear(y, held[3]), reference.linear(x, plain[3])),
            (ops.swiglu(y, held[2], held[3]), reference.swiglu(x, plain[2], plain[3])),
            (ops.embed(held[1], [3, 31, 3]), reference.embed(plain[1], [3, 31, 3])),
        ]
        for got, wanted in pairs:
            assert torch.allclose(got.cpu(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
        got = ops.head(y, held[0])
        assert np.allclose(got.rows(), reference.head(x, plain[0]).rows(), atol=1e-4)
        assert got.argmax() == got.rows().argmax(axis=1).tolist()
    stack = ops.stack(matrices)
    assert stack.shape == (4, 32, 64)
    assert all(isinstance(one, kind) for one in stack.experts)
    wanted = reference.project_heads(x[:, None].repeat(1, 4, 1), plain)
    for count in (2, 18):
        got = ops.project_heads(y[:count, None].repeat(1, 4, 1), stack)
        assert torch.allclose(got.cpu(), wanted[:count], rtol=1e-4, atol=1e-4)
    mixed = ops.stack([matrices[0], matrices[1].decode()])  # one layout or none
    assert all(isinstance(one, DenseWeight) for one in mixed.experts)
    with pytest.raises(UnsupportedError, match="mlx-affine"):
        ops.weight(
            StoredMatrix(
                format="mlx-affine",
                shape=(2, 2),
                parts={},
                meta={},
                dtype=torch.float32,
                values=torch.zeros(0),
                numbers=fp8.numbers,
            )
        )


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

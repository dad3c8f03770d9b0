"""What exact mode would launch on a GPU, read from exported graphs: no GPU is needed, and none is asked.

MLX's CPU device gives a row the same bits in any company, so running there can never show that a stock kernel whose
bits depend on the number of rows slipped in. The graph shows it. A few stock operations stay: those that work on each
element or row alone, those that move data, and those whose result no order changes.
"""

import collections
import importlib
import pkgutil

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal import kernels, passes  # noqa: E402
from specdec.backends.metal import ops as ops_module  # noqa: E402
from specdec.backends.metal.kernels.kernel import MslKernel, OnMetal  # noqa: E402
from specdec.backends.metal.ops import MetalOps  # noqa: E402
from specdec.backends.placeholders import DeviceTokens  # noqa: E402
from specdec.contract import Needs  # noqa: E402
from tests import tiny  # noqa: E402
from tests.backends.metal.kernel_runs import affine  # noqa: E402
from tests.backends.metal.test_metal_families import TRIED  # noqa: E402

KERNELS = sorted(
    {
        one.name
        for module in pkgutil.iter_modules(kernels.__path__)
        for value in vars(importlib.import_module(f"{kernels.__name__}.{module.name}")).values()
        for one in (value if isinstance(value, tuple) else (value,))
        if isinstance(one, MslKernel)
    },
    key=len,
    reverse=True,
)
ROW_WISE = {"rms_norm", "Softmax"}  # one threadgroup per row, whatever the number of rows
MOVES = set(
    (
        "Gather GatherAxis Slice DynamicSlice DynamicSliceUpdate Concatenate Split Reshape Flatten Unflatten "
        "Transpose ExpandDims Squeeze Broadcast AsType View Arange Contiguous ArgSort"
    ).split()
)
ELEMENTWISE = set(
    (
        "Add Subtract Multiply Divide Negative Exp LogAddExp Sigmoid Select Maximum Minimum Equal NotEqual Less "
        "LessEqual Greater GreaterEqual LogicalAnd LogicalOr LogicalNot BitwiseBinary Remainder"
    ).split()
)
ORDERLESS = {0: "all", 1: "any", 4: "min", 5: "max"}  # reductions of any dtype
INTEGERS = (mx.int32, mx.int64, mx.uint32, mx.bool_)

_MARK = MslKernel(name="rms_norm", inputs=("x",), outputs=("y",), source="y[0] = x[0];")


@pytest.fixture(autouse=True)
def marked_norms(monkeypatch):
    """Norms as one primitive, which they are on a GPU; MLX exports them in pieces where there is none."""

    class Fast:
        def __getattr__(self, name):
            return getattr(mx.fast, name)

        def rms_norm(self, x, weight, eps):
            one = (1, 1, 1)
            return OnMetal().run(
                _MARK, [x], template=(), grid=one, threadgroup=one, output_shapes=(x.shape,), output_dtypes=(x.dtype,)
            )[0]

    class Core:
        fast = Fast()

        def __getattr__(self, name):
            return getattr(mx, name)

    monkeypatch.setattr(ops_module, "mx", Core())


def launched(run, *inputs):
    """How often each primitive or kernel stands in the graph of ``run``; a forbidden one as ``"!..."``."""
    found = collections.Counter()

    def record(event):
        if event["type"] != "primitive":
            return
        name = event["name"]
        if name == "CustomKernel":
            made = event["arguments"][0].removeprefix("custom_kernel_")
            name = next((known for known in ["rms_norm", *KERNELS] if made.startswith(known)), f"!{made}")
        elif name in ("Reduce", "Scan"):
            (_, _, dtype), code = event["inputs"][0], event["arguments"][0]
            harmless = dtype in INTEGERS or (name == "Reduce" and code in ORDERLESS)
            name = f"{'' if harmless else '!'}{name} {code} {dtype}"
        elif name not in ROW_WISE | MOVES | ELEMENTWISE:
            name = f"!{name}"
        found[name] += 1

    mx.export_function(record, run, *inputs)
    return found


def forbidden(found):
    return {name for name in found if name.startswith("!")}


@pytest.fixture(autouse=True)
def lazy(monkeypatch):
    """Passes that are not started."""
    monkeypatch.setattr(passes.MetalPass, "_start", lambda self, result: None)


@pytest.fixture(scope="module")
def made(checkpoint):
    def get(family, *, mode="exact", executor=None):
        ops = MetalOps(mx.bfloat16, mode=mode, executor=executor or OnMetal())
        return tiny.make_target(checkpoint(family, **TRIED[family]), dtype="bfloat16", ops=ops)

    return get


def target_pass(target):
    """The pass with its head, from token ids that only the device knows."""

    def run(ids):
        x = target.new_state(64).target_pass.run(DeviceTokens(ids))
        return target.ops.best(x, target.model.lm_head)

    return run


def ids(rows):
    return mx.zeros((rows,), mx.int32)


@pytest.mark.parametrize("family", TRIED)
def test_passes_of_any_length_launch_the_same_kernels_of_our_own(made, family):
    target = made(family)
    one = launched(target_pass(target), ids(1))
    assert not forbidden(one)
    assert one["specdec_matvec"] > 2
    for rows in (2, 4, 8):
        assert launched(target_pass(target), ids(rows)) == one


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
@pytest.mark.parametrize("pruned", [False, True], ids=["full", "pruned"])
def test_a_draft_chain_is_one_graph_of_our_own_kernels(made, family, pruned, monkeypatch):
    """Nothing is read between its passes, or MLX would refuse to export it."""
    target = made(family)
    head = target.draft_head(range(0, 200, 3)).extended([4]).rows[0] if pruned else target.model.lm_head
    drafted = []
    monkeypatch.setattr(passes, "read_tokens", lambda tokens: drafted.append(tokens) or [])

    def chain(hidden):
        mtp_pass = target.new_state(64, Needs(mtp=True)).mtp_pass
        mtp_pass.chain([5, 6], hidden, 3, head)
        return drafted.pop()

    found = launched(chain, mx.zeros((2, target.info.hidden_size), mx.bfloat16))
    assert not forbidden(found)
    assert found["specdec_attend_parts"] == 3


@pytest.mark.parametrize("rows", [1, 5])
def test_packed_weights_have_kernels_of_our_own_too(rows):
    rng = np.random.default_rng(0)
    ops = MetalOps(mx.bfloat16, executor=OnMetal())
    weight, _ = affine(rng, 64, 64, group=32, bits=4, dtype=mx.bfloat16)
    weight_bytes = weight.parts()

    def run(x, residual):
        assert weight_bytes
        head = ops.head_rows(weight, [1, 5, 9])
        return (
            ops.linear(x, weight, residual),
            ops.swiglu(x, weight, weight),
            ops.head(x, weight).array,
            ops.best(x, weight),
            ops.pruned_head(x, head).array,
        )

    found = launched(run, mx.zeros((rows, 64), mx.bfloat16), mx.zeros((rows, 64), mx.bfloat16))
    assert not forbidden(found) - {"!Scatter", "!Full"}
    assert found["specdec_quantised_matvec"] == 5
    assert found["specdec_quantised_matvec_add"] == 1

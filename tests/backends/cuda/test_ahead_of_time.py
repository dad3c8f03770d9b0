"""Every kernel compiled for sm_80 and sm_90 without a device: no spills, shared memory that fits, 16-byte accesses."""

import json
import re

import pytest

from tests.processes import run_python

pytestmark = pytest.mark.interpreter


# In a process of its own: this one interprets. A kernel that the backend must not have is compiled beside the others.
_SCRIPT = """
import json, sys, attrs, torch
from specdec.backends.cuda.kernels.launch import launch
from tests.backends.cuda import catalogue
from tests.backends.cuda.narrow import narrow_kernel

rows = [attrs.asdict(row) for row in catalogue.compiled()]
catalogue.EXAMPLES.clear()
x = torch.empty(64)
catalogue.EXAMPLES["narrow"] = lambda: launch(narrow_kernel, (1,), x, x, 48, 17, BLOCK=16)
narrow = [attrs.asdict(row) for row in catalogue.compiled((90,))]
json.dump({"rows": rows, "narrow": narrow}, sys.stdout)
"""


@pytest.fixture(scope="module")
def compiled():
    run = run_python("-c", _SCRIPT, without=["TRITON_INTERPRET"])
    found = json.loads(run.stdout)
    return found


def _name(row):
    return f"{row['kernel']} of {row['name']!r} on sm_{row['architecture']}"


def test_nothing_spills_and_shared_memory_fits(compiled):
    rows = compiled["rows"]
    assert {row["architecture"] for row in rows} == {80, 90}
    kernels = {"product_kernel", "experts_kernel", "combine_kernel", "_perturb", "_commit_rows", "_attend_splits"}
    assert kernels <= {row["kernel"] for row in rows}
    for row in rows:
        most = _SPILLED.get((row["kernel"], row["architecture"]), 0)
        assert row["spilled"] <= most, f"{_name(row)} spills {row['spilled']} bytes"
        limit = {80: 163, 90: 227}[row["architecture"]] * 1024
        assert row["shared"] <= limit, f"{_name(row)} needs {row['shared']} bytes of shared memory"


_SPILLED = {("_delta_rows", 80): 8}  # bytes of a thread with triton 3.6; none with later ones


def test_weights_are_read_16_bytes_at_a_time(compiled):
    streamed = [
        row
        for row in compiled["rows"]
        if row["kernel"] in ("product_kernel", "experts_kernel") and "float32" not in row["name"]
    ]
    assert streamed
    for row in streamed:
        assert 16 in row["copies"], f"{_name(row)} copies {row['copies']} bytes at a time"
        # weights come through shared memory, asynchronously; loads of single values are scales, norms and residuals
        products = len(re.findall(r"mma\.sync", row["ptx"]))
        assert products >= 4, f"{_name(row)} has {products} tensor core instructions"


def narrow_products(ttir):
    """Products of two 32-bit variables that an address is made of, as lines of Triton's intermediate form."""
    lines = dict(re.findall(r"^\s*(%[\w#]+)(?::\d+)? = (.*)$", ttir, re.MULTILINE))
    found = []

    def constant(name):
        line = lines.get(name, "")
        if line.startswith("arith.constant"):
            return True
        inner = re.match(r"(?:tt\.splat|tt\.broadcast|tt\.expand_dims|arith\.ext\w+) (%[\w#]+)", line)
        return inner is not None and constant(inner[1])

    def walk(name, seen):
        line = lines.get(name)
        if line is None or name in seen:
            return
        seen.add(name)
        names = re.findall(r"%[\w#]+", line.split(" : ")[0])
        narrow = re.search(r"(?:i32|xi32>)(?: loc\(.*\))?$", line) is not None
        if line.startswith("arith.muli") and narrow and not any(constant(part) for part in names):
            found.append(line)
        if not line.startswith("tt.load"):
            for part in names:
                walk(part, seen)

    for at in re.findall(r"tt\.addptr %[\w#]+, (%[\w#]+)", ttir):
        walk(at, set())
    return found


def test_no_address_is_a_32_bit_product(compiled):
    """Rows times a stride can pass 2^31 elements; the factor that is known when compiling cannot."""
    assert narrow_products(compiled["narrow"][0]["ttir"]), "the check does not see what it is there for"
    checked = [row for row in compiled["rows"] if row["kernel"] not in _BOUNDED and row["architecture"] == 90]
    assert {"product_kernel", "_attend_splits", "_write_rows", "_delta_rows", "_perturb"} <= {
        row["kernel"] for row in checked
    }
    for row in checked:
        found = narrow_products(row["ttir"])
        assert not found, f"{_name(row)}: {found[0]}"


# they multiply at most 512 rows of a prompt with the width of a hidden state, or 16 rows with a number of experts
_BOUNDED = ("_choose", "_concat", "_embed")

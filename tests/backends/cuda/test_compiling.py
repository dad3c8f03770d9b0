"""What is said while triton compiles: the first kernel, then now and then; nothing about kernels from its cache."""

import json

import pytest

from tests.processes import run_python

pytestmark = pytest.mark.interpreter

# In a process of its own, which compiles: three kernels, then the same three from the cache.
_SCRIPT = """
import json, logging, sys
import torch, triton
from specdec.backends.cuda import compiling
from specdec.backends.cuda.kernels.launch import launch
from tests.backends.cuda import catalogue
from tests.backends.cuda.narrow import narrow_kernel

compiling.EVERY, compiling.OURS = float(sys.argv[1]), sys.argv[2]
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
compiling.announce_compilation()
compiling.announce_compilation()
assert isinstance(triton.knobs.compilation.listener, compiling.CompilationListener)
catalogue.EXAMPLES.clear()
x = torch.empty(64)
for block in (16, 32, 64):
    catalogue.EXAMPLES[str(block)] = lambda block=block: launch(narrow_kernel, (1,), x, x, 48, 17, BLOCK=block)
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append([record.levelname, record.event, record.facts])
logging.getLogger("specdec").addHandler(handler)
list(catalogue.compiled((90,)))
first = len(said)
narrow_kernel.device_caches.clear()  # of this process
list(catalogue.compiled((90,)))
json.dump({"hits": hits, "said": said, "first": first}, sys.stdout)
"""


@pytest.mark.parametrize(
    ("every", "ours", "lines"),
    [
        (0.0, "tests.", [None, 2, 3]),
        (1e9, "tests.", [None]),
        (0.0, "specdec.", []),  # the kernels are those of the tests
    ],
)
def test_compiling_is_said_and_loading_is_not(tmp_path, every, ours, lines):
    run = run_python("-c", _SCRIPT, every, ours, without=["TRITON_INTERPRET"], env={"TRITON_CACHE_DIR": str(tmp_path)})
    found = json.loads(run.stdout)
    assert found["hits"] == [False] * 3 + [True] * 3
    assert [facts.get("done") for _, _, facts in found["said"]] == lines
    assert found["first"] == len(lines)
    assert all((level, event) == ("WARNING", "compiling_kernels") for level, event, _ in found["said"])

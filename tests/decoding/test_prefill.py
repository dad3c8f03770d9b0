"""A long prompt stays small. That its chunks do not show is in clauses F2 and F6."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.backends.caches import MARKS, MarkedCache
from tests import tiny
from tests.processes import run_python

SHAPE = tiny.QWEN3_5_SHAPES["r2-gqa1-untied"]
VOCAB = 301


MEASURE = """
import resource, sys, torch
from tests import tiny
torch.set_num_threads(1)
folder, kernels, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
import pathlib
from specdec.contract import Context, DrafterEnv
from specdec.drafters.mtp import MtpDrafter
from specdec.drafters.pruned_head import PrunedHeadConfig
target = tiny.make_target(pathlib.Path(folder), kernels=kernels)

def run(length):
    tokens = [(7 * i) % 301 for i in range(length)]
    state = target.new_state(8192)
    drafter = MtpDrafter(PrunedHeadConfig(), DrafterEnv(target=target, state=state))
    drafter.prefill(Context(tokens), target.prefill(state, tokens))
    return state

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

run(600)  # libraries, threads and the first blocks of the allocator
before = peak()
state = run(length)
print("grew", peak() - before, "state", state.nbytes())
"""


@pytest.mark.slow
def test_a_long_prompt_builds_no_square_matrix(kernels, checkpoint):
    """Peak memory of an 8000-token prompt.

    Scores of 128 rows (the reference's block) against 8000 keys and 3 heads are 12 MB in float32, and about five such
    arrays exist at once (product, scaled, masked, weights, a transposed copy). As keys grow from chunk to chunk, so do
    they, and the allocator cannot put a larger one where a smaller one was: twice that. The square would be 768 MB.
    The bound: the state, the hidden states of all positions (8000 x 40 x 4 bytes, held twice while they are joined),
    ten blocks, and 32 MB for everything else.
    """
    heads, length = SHAPE["heads"], 8000
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    folder = checkpoint("qwen3_5", dtype="float32", max_positions=8192, **SHAPE, **layers)
    done = run_python("-c", MEASURE, folder, kernels, length)
    found = re.search(r"grew (\d+) state (\d+)", done.stdout)
    assert found, done.stderr
    grew, state = map(int, found.groups())
    block = 4 * heads * 128 * length
    bound = state + 2 * 4 * length * SHAPE["hidden"] + 10 * block + (32 << 20)
    assert bound < 4 * heads * length**2 / 4  # the bound itself can tell a square matrix
    assert grew < bound, f"{grew / 1e6:.0f} MB, bound {bound / 1e6:.0f} MB"


class Marked(MarkedCache):
    length = 0
    commit = save = load = nbytes = _copied = _become = lambda self, *_: None


@given(chunk=st.integers(1, 600), count=st.integers(MARKS, 200))
def test_marks_reach_far_back_however_small_the_chunks(chunk, count):
    """The last two are kept, and no two neighbours are further apart than two thirds of the prompt."""
    cache = Marked()
    for _ in range(count):
        cache.length += chunk
        cache.mark()
        cache.mark()  # of the same length: nothing
    marks = cache.marks()[:-1]
    assert len(marks) == 1 + MARKS
    assert marks[-2:] == [cache.length - chunk, cache.length]
    assert all(later - mark <= 2 / 3 * cache.length for mark, later in zip(marks, marks[1:], strict=False))

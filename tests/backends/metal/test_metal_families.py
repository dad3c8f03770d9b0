"""Every family on MLX: the reference's logits, and speculation that leaves the tokens and the bits of plain decoding.

Exactness is a promise of MLX's CPU device on Linux only; elsewhere these tests are skipped, but for the logits.
"""

import functools
import threading

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.cpu.caches import CpuKVCache  # noqa: E402
from specdec.backends.metal.ops import MetalOps  # noqa: E402
from specdec.contract import Choosing, Context, Parity  # noqa: E402
from specdec.errors import ContractError, UnsupportedError  # noqa: E402
from specdec.models.parity import probe_rows  # noqa: E402
from tests import tiny  # noqa: E402
from tests.backends import families  # noqa: E402
from tests.backends.families import VOCAB  # noqa: E402
from tests.decoding.test_lossless import Case, mtp  # noqa: E402
from tests.selection import cases  # noqa: E402
from tests.tiny_families import ALL_SHAPES as ALL  # noqa: E402

TRIED = {  # without those that the backend refuses
    family: shape for family, shape in families.TRIED.items() if not shape.get("keys", {}).get("sliding_window")
}
few = cases(TRIED, sample=("qwen3_5", "deepseek_v3"), mark="slow")
FEW = max(1, settings().max_examples // 6)

exact = pytest.mark.skipif(
    MetalOps(mx.float32).capabilities.parity is not Parity.BITWISE,
    reason="rows are the same bits on MLX's CPU device on Linux only",
)


@pytest.fixture(scope="module")
def metal(checkpoint):
    """``metal(family, dtype)``: a target on MLX."""

    @functools.cache
    def get(family, dtype="float32"):
        return tiny.make_target(checkpoint(family, **TRIED[family]), dtype=dtype, ops=MetalOps(getattr(mx, dtype)))

    return get


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param(family, shape, marks=() if number == 0 else pytest.mark.slow)
        for family, shapes in ALL.items()
        for number, shape in enumerate(shapes)
        if not shapes[shape].get("keys", {}).get("sliding_window")  # which the backend refuses
    ],
)
def test_logits_are_those_of_the_torch_reference_and_sliding_windows_are_refused(checkpoint, family, shape):
    folder = checkpoint(family, **ALL[family][shape])
    reference = tiny.make_target(folder)
    if any(isinstance(cache, CpuKVCache) and cache.window for cache in reference.new_state(8).caches):
        with pytest.raises(UnsupportedError, match="MetalOps has no new_window, which this model needs"):
            tiny.make_target(folder, ops=MetalOps(mx.float32))
    else:
        families.check_logits(tiny.make_target(folder, ops=MetalOps(mx.float32)), reference, 3e-4)


@exact
@pytest.mark.parametrize("family", few)
@settings(max_examples=FEW)
@given(prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14).map(tuple), **families.DRAFTS)
def test_any_drafter_gives_the_tokens_and_the_state_of_plain_decoding(
    family, metal, checkpoint, prompt, drafter, depths, numbers
):
    families.check_drafter(checkpoint(family, **TRIED[family]), metal(family), prompt, drafter, depths, numbers)


@exact
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("family", cases(TRIED, sample=1, mark="slow"))
def test_every_family_keeps_the_contract_of_targets(metal, family, dtype):
    target = metal(family, dtype)
    assert probe_rows(target) is None
    families.check_target(family, target)


@exact
@pytest.mark.parametrize("family", cases(["qwen3_5", "glm4_moe", "deepseek_v3"], sample=1, mark="slow"))
@given(data=st.data())
@settings(max_examples=FEW)
def test_a_chain_drafts_what_the_steps_draft(family, metal, data):
    """Full and pruned heads, 1 to 4 waiting pairs, one draft after the other; then the state goes on."""
    target = metal(family)
    head = target.draft_head(range(0, VOCAB, 2)).extended([3, 9, 27])
    drafts = st.tuples(st.integers(1, 6), st.sampled_from([None, head]), st.integers(1, 4))
    families.check_drafts(target, data.draw(st.lists(drafts, min_size=1, max_size=3)))


def test_a_chain_refuses_what_it_cannot_draft(metal, monkeypatch):
    """Logits of the head that are not finite are an error; a chain that does not fit is left to the steps."""
    target = metal("qwen3_5")
    state = tiny.held(target, (3, 1, 4))
    hidden = mx.zeros((1, target.info.hidden_size))
    room = state.mtp.capacity - state.mtp.length
    assert state.mtp_pass.chain([1], hidden, room + 1, target.model.lm_head) is None
    assert state.mtp_pass.chain([1], hidden, 2, target.model.lm_head, Choosing((), Context([1]))) is None
    bad = target.model.lm_head * mx.nan
    monkeypatch.setattr(
        target, "model", attrs.evolve(target.model, mtp=(attrs.evolve(target.model.mtp[0], lm_head=bad),))
    )
    with pytest.raises(ContractError, match="are not finite"):
        target.draft_mtp(state, 4, 3)


@exact
@pytest.mark.parametrize("family", cases(["qwen3_5", "deepseek_v3"], sample=1, mark="slow"))
def test_a_session_may_go_on_in_another_thread(metal, checkpoint, family):
    """MLX computes what a thread asked for in that thread only, so nothing may be left to compute between calls."""
    target, prompt = metal(family), [9, 8, 9, 8, 7]
    truth = tiny.plain_run(target, prompt, 30)
    lm = tiny.make_lm(checkpoint(family, **TRIED[family]), target, lambda env: mtp(Case([], env, [])))
    session = lm.session()
    found = []

    def go_on(more):
        result = session.generate(more, max_new_tokens=5, ignore_eos=True)
        assert not result.stats.faults  # a drafter that fails is left out, and the tokens stay right
        found.extend(result.tokens)

    for part in range(6):
        if part % 2:
            go_on(None)
        else:
            thread = threading.Thread(target=go_on, args=(None if part else prompt,))
            thread.start()
            thread.join()
    assert found == truth


def test_a_pass_writes_keys_and_values_in_place(metal):
    """A view that outlived its pass would make every later one copy the whole cache."""
    target = metal("qwen3")
    cache = target.ops.new_kv(4096, 2, 64)
    rows = mx.ones((4000, 2, 64))
    mx.eval(cache.append(rows, rows))
    cache.commit(4000)
    keys = None
    peaks = []
    for step in range(6):
        row = mx.ones((1, 2, 64))
        mx.synchronize()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        target.ops.attend(mx.ones((1, 2, 64)), row, row, cache, scale=1.0)
        mx.eval(cache.arrays())
        cache.commit(1)
        peaks.append(mx.get_peak_memory() - held)
        if step == 2:
            keys = cache.buckets[0][:, :, :1]  # what the caches must not do
            mx.eval(keys)
    assert max(peaks[:3]) < cache.nbytes() / 8
    assert peaks[3] >= cache.nbytes() / 2  # and the measurement sees it
    assert keys is not None

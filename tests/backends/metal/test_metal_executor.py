"""Cycles as one graph, one ahead of the host: the tokens and the state of single passes, whatever is accepted.

What a cycle drafts is scripted: the truth at its place for so many tokens, then something else. The device reads both
from an array, as it is the only one to know where a cycle begins.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from specdec.backends.metal.cycles import MetalCycles  # noqa: E402
from specdec.decoding.stepwise import StepwiseCycles  # noqa: E402

import specdec  # noqa: E402
from specdec.backends.metal import caches  # noqa: E402
from specdec.backends.metal.device import number, rows_from  # noqa: E402
from specdec.backends.metal.ops import MetalOps  # noqa: E402
from specdec.backends.passes import RunsGreedyCycles  # noqa: E402
from specdec.contract import GreedyCycle, GreedyStart, Parity  # noqa: E402
from specdec.errors import ContractError, StateError  # noqa: E402
from specdec.models.causal_lm import CausalLM  # noqa: E402
from tests import tiny  # noqa: E402
from tests.backends.metal.test_metal_families import TRIED, VOCAB, arrays, poison  # noqa: E402
from tests.decoding.test_lossless import Case, mtp  # noqa: E402

HEADS = ("qwen3_5", "qwen3_5_moe", "glm4_moe", "deepseek_v3")  # delta and attention, experts, latent rows
PROMPT = (3, 1, 4, 1, 5, 9, 2)
LONG = 70
FEW = max(1, settings().max_examples // 2)

exact = pytest.mark.skipif(
    MetalOps(mx.float32).capabilities.parity is not Parity.BITWISE
    or MetalOps(mx.float32).capabilities.parity_needs_probe,
    reason="nobody has shown yet that rows are the same bits on this device",
)


@pytest.fixture(scope="module")
def made(checkpoint: Callable[..., pathlib.Path]) -> Callable[..., Any]:
    """``made(family, **options of MetalOps)``: a target, and the tokens of plain decoding after the prompt."""
    known: dict[tuple[Any, ...], Any] = {}

    def get(family: str, **options: Any) -> tuple[Any, list[int]]:
        key = (family, *sorted(options.items()))
        if key not in known:
            target = tiny.make_target(checkpoint(family, **TRIED[family]), ops=MetalOps(mx.float32, **options))
            known[key] = target, [*PROMPT, *tiny.plain_run(target, PROMPT, LONG)]
        return known[key]

    return get


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "BUCKET", 16)


class Scripted(MetalCycles):
    """Cycles whose drafts are right for so many tokens. What the head makes of it is computed and left out."""

    truth: mx.array
    rights: list[int]

    def _draft(self, depth: int, bound: int) -> mx.array:
        own = super()._draft(depth, bound)
        true = rows_from(self.truth, self._length + 1, depth)
        wrong = (true + 1 + mx.maximum(own, 0) * 0) % VOCAB
        return mx.where(mx.arange(depth) < self.rights.pop(0), true, wrong)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def script(truth: Sequence[int], rights: Sequence[int]) -> None:
        monkeypatch.setattr(Scripted, "truth", mx.array([*truth, *[0] * 40], mx.int32), raising=False)
        monkeypatch.setattr(Scripted, "rights", [*rights], raising=False)
        monkeypatch.setattr("specdec.backends.metal.cycles.MetalCycles", Scripted)

    return script


def opened(target: Any, state: Any, prompt: Sequence[int] = PROMPT, **options: Any) -> Any:
    """Cycles after a prompt; its pairs are in the head's cache but for the last."""
    hidden = target.prefill(state, prompt[:-1]).need_hidden()
    target.prefill_mtp(state, prompt[1:-1], hidden[:-1])
    start = GreedyStart((prompt[-1],), hidden[-1:])
    return target.greedy_cycles(state, start, **{"stop_tokens": (), "limit": 60, **options})


def driven(cycles: Any, depths: Sequence[int], ahead: bool) -> list[GreedyCycle]:
    """Run them, a cycle behind the device or in step with it."""
    done = []
    for i, depth in enumerate(depths):
        cycles.submit(depth)
        if i or not ahead:
            done.append(cycles.collect())
    if ahead:
        done.append(cycles.collect())
    return done


def emitted(done: Sequence[GreedyCycle]) -> list[int]:
    return [token for cycle in done for token in cycle.emitted]


def assert_plain(target: Any, state: Any, tokens: Sequence[int]) -> None:
    """The state is that of plain decoding, and so are the logits of the next pass; stale rows do not matter."""
    wanted = tiny.held(target, PROMPT, tokens[len(PROMPT) :])
    tiny.assert_same_bits(arrays(target, state), arrays(target, wanted))
    poison(state)
    following = [tokens[-1], 7, 11]
    ours, theirs = (target.decode(s, following).need_logits().rows() for s in (state, wanted))
    assert np.array_equal(ours, theirs)


@exact
@pytest.mark.parametrize("family", HEADS)
@settings(max_examples=FEW)
@given(
    plan=st.lists(
        st.integers(1, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), min_size=1, max_size=6
    ),
    ahead=st.booleans(),
    limit=st.integers(1, 30),
    stop=st.none() | st.integers(0, 20),
    cut=st.none() | st.integers(0, 4),
)
def test_every_accept_pattern_leaves_the_tokens_and_the_state_of_plain_decoding(
    family: str, made: Any, plan: list[tuple[int, int]], ahead: bool, limit: int, stop: int | None, cut: int | None
) -> None:
    """Ends inside a block, a limit, tokens taken back; then the state goes on."""
    target, truth = made(family)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Scripted, "truth", mx.array([*truth, *[0] * 40], mx.int32), raising=False)
        patched.setattr(Scripted, "rights", [right for _, right in plan], raising=False)
        patched.setattr("specdec.backends.metal.cycles.MetalCycles", Scripted)
        state = target.new_state(100)
        stops = () if stop is None else (truth[len(PROMPT) + stop],)
        cycles = opened(target, state, stop_tokens=stops, limit=limit)
        done = driven(cycles, [depth for depth, _ in plan], ahead)

    want, at = [], len(PROMPT)
    for depth, right in plan:  # what cycles are, in the words of the contract
        tokens = truth[at : at + right + 1][: limit - len(emitted(want))]
        ends = [i + 1 for i, token in enumerate(tokens) if token in stops]
        tokens = tokens[: ends[0]] if ends else tokens
        ended = limit == len(emitted(want)) or (want and want[-1].emitted[-1:] and want[-1].emitted[-1] in stops)
        if ended or not tokens or (want and not want[-1].emitted):
            want.append(GreedyCycle((), 0, ()))
            continue
        true = truth[at : at + depth + 1]
        wrong = [(token + 1) % VOCAB for token in true[right:depth]]
        assert true[right] not in wrong[:1]
        want.append(GreedyCycle((*true[:right], *wrong), right, tuple(tokens)))
        at += len(tokens)
    assert done == want
    event(f"ended {not done[-1].emitted}")

    last = done[-1].emitted
    if cut is not None and last:
        kept = 1 + cut % len(last)
        cycles.keep(kept)
        at -= len(last) - kept
        event("cut")
    waiting = cycles.close()
    ran = [cycle for cycle in done if cycle.emitted]
    assert state.length == at - 1
    assert len(waiting) == (1 if not ran else kept if cut is not None and last else len(ran[-1].emitted))
    assert state.mtp_length == at - 1 - len(waiting)
    # the head's cache: it drafts from here what a head drafts whose pairs were all prefilled
    other = target.new_state(100)
    hidden = target.prefill(other, truth[: at - 1]).need_hidden()
    target.prefill_mtp(other, truth[1 : at - 1], hidden[:-1])
    pairs = truth[at - len(waiting) : at]
    ours = target.decode_mtp(state, pairs, waiting).need_logits().rows()
    theirs = target.decode_mtp(other, truth[at - 1 : at], hidden[-1:]).need_logits().rows()
    assert np.array_equal(ours, theirs)
    assert_plain(target, state, truth[:at])


@exact
def test_tokens_that_were_taken_back_count_no_more(made: Any, scripted: Any) -> None:
    """Neither for the limit nor for the end: a stop token that was cut away ends nothing."""
    target, truth = made("qwen3_5")
    scripted(truth, [3, 3, 3])
    state, at = target.new_state(100), len(PROMPT)
    assert truth[at + 2] not in truth[at : at + 2]
    cycles = opened(target, state, limit=6, stop_tokens=(truth[at + 2],))
    cycles.submit(3)
    assert cycles.collect().emitted == tuple(truth[at : at + 3])
    cycles.keep(1)
    cycles.submit(3)
    assert cycles.collect().emitted == tuple(truth[at + 1 : at + 3])
    cycles.keep(1)
    cycles.submit(3)
    assert cycles.collect().emitted == (truth[at + 2],)
    cycles.submit(1)
    assert cycles.collect() == GreedyCycle((), 0, ())
    cycles.close()
    assert_plain(target, state, truth[: at + 3])
    scripted(truth, [3, 3, 3])
    state = target.new_state(100)
    cycles = opened(target, state, limit=6)
    for keep, wanted in ((1, 4), (0, 4), (0, 1), (0, 0)):
        cycles.submit(3)
        assert len(cycles.collect().emitted) == wanted
        if keep:
            cycles.keep(keep)
    cycles.close()
    assert_plain(target, state, truth[: at + 6])


@exact
@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("pruned", [False, True], ids=["full", "pruned"])
def test_its_own_drafts_are_those_of_single_passes(made: Any, family: str, pruned: bool) -> None:
    """The head itself: chained steps, rows behind the pairs that wait, gathered rows of a head in two parts."""
    target, truth = made(family)
    found = []
    for cls in (None, StepwiseCycles):
        state = target.new_state(100)
        hidden = target.prefill(state, truth[:10]).need_hidden()
        target.prefill_mtp(state, truth[1:8], hidden[:7])
        head = target.draft_head(range(0, VOCAB, 2)).extended([3, 9, 27]) if pruned else None
        start = GreedyStart(tuple(truth[8:11]), hidden[7:], head)
        options: dict[str, Any] = {"stop_tokens": (), "limit": 60}
        cycles = target.greedy_cycles(state, start, **options) if cls is None else cls(target, state, start, **options)
        done = driven(cycles, [3, 1, 4, 2, 3], ahead=True)
        waiting = cycles.close()
        after = target.decode_mtp(state, emitted(done)[-len(waiting) :], waiting)
        found.append((done, state.length, state.mtp_length, after.need_logits().rows().tolist()))
        if cls is None:
            assert_plain(target, state, truth[: 11 + len(emitted(done))])
    assert found[0] == found[1]
    assert len({cycle.drafted for cycle in found[0][0]}) > 1


@exact
def test_cycles_go_on_after_a_rewind_a_snapshot_and_in_another_thread(made: Any, scripted: Any) -> None:
    target, truth = made("qwen3_5")
    scripted(truth, [2, 0, 3, 1, 2, 2])
    state, at = target.new_state(100), len(PROMPT)
    cycles = opened(target, state)
    at += len(emitted(driven(cycles, [3, 3], ahead=True)))
    waiting = cycles.close()
    state = target.restore(target.snapshot(state))
    found: list[Any] = []

    def go_on() -> None:
        start = GreedyStart(tuple(truth[at - len(waiting) : at]), waiting)
        cycles = target.greedy_cycles(state, start, stop_tokens=(), limit=40)
        done = driven(cycles, [3, 2], ahead=True)
        found.extend((done, cycles.close()))

    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join()
    at += len(emitted(found[0]))
    assert emitted(found[0]) == truth[at - len(emitted(found[0])) : at]
    assert_plain(target, state, truth[:at])
    reached = target.rewind(state, len(PROMPT) - 1)
    assert reached in (0, len(PROMPT) - 1)
    target.rewind(state, 0)
    scripted(truth, [1, 1])
    done = driven(opened(target, state), [2, 2], ahead=True)
    assert emitted(done) == truth[len(PROMPT) : len(PROMPT) + 4]


@exact
def test_sampled_generation_is_that_of_plain_sampling(checkpoint: Any, made: Any) -> None:
    target, _ = made("qwen3_5")
    folder = checkpoint("qwen3_5", **TRIED["qwen3_5"])
    for seed in range(3):
        options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.9, "seed": seed}
        plain = tiny.make_lm(folder, target).generate(list(PROMPT), **options).tokens
        drafting = tiny.make_lm(folder, target, lambda env: mtp(Case([], env, [0])))
        spec = drafting.generate(list(PROMPT), **options)
        assert spec.tokens == plain
        assert sum(spec.stats.offered) > 0


@pytest.mark.slow
@exact
def test_the_embedded_model_says_in_cycles_what_it_says_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is a good one: drafts are accepted, and cycles run ahead of the host."""
    lm = specdec.load("demo", backend="metal", dtype="float32", depth=3)
    opened: list[Any] = []
    cycles = CausalLM.greedy_cycles
    monkeypatch.setattr(CausalLM, "greedy_cycles", lambda *a, **o: opened.append(cycles(*a, **o)) or opened[-1])
    options: dict[str, Any] = {"max_new_tokens": 40, "stop": ("\n",)}
    got = [lm.generate("The sea ", **options), lm.generate("The river", max_new_tokens=40, ignore_eos=True)]
    assert len(opened) == 2
    assert None not in opened
    monkeypatch.setattr(CausalLM, "runs_greedy_cycles", False)
    wanted = [lm.generate("The sea ", **options), lm.generate("The river", max_new_tokens=40, ignore_eos=True)]
    assert len(opened) == 2
    assert [(one.tokens, one.text, one.finish_reason) for one in got] == [
        (one.tokens, one.text, one.finish_reason) for one in wanted
    ]
    assert sum(got[1].stats.accepted) > 8


# --- what the cycles refuse, and what they say -----------------------------------------------------------------------


def test_misuse_is_refused_with_a_reason(made: Any) -> None:
    target, truth = made("qwen3_5")
    assert isinstance(target.ops, RunsGreedyCycles)
    state = target.new_state(40)
    cycles = opened(target, state)
    with pytest.raises(StateError, match="drafts 1 to 15 tokens, got 16"):
        cycles.submit(16)
    with pytest.raises(StateError, match="are kept, of a cycle"):
        cycles.keep(1)
    cycles.submit(2)
    cycles.submit(2)
    with pytest.raises(StateError, match="2 cycles are in flight"):
        cycles.submit(2)
    with pytest.raises(StateError, match="while one is in flight"):
        cycles.close()
    with pytest.raises(StateError, match="of 0 tokens 1 are kept"):
        cycles.keep(1)
    cycles.collect()
    cycles.collect()
    for _ in range(20):
        cycles.submit(1)
        cycles.collect()
    with pytest.raises(StateError, match="the cache holds 40 tokens"):
        cycles.submit(14)
    start = GreedyStart(tuple(truth[:17]), target.ops.hidden(mx.zeros((17, target.info.hidden_size))))
    assert target.greedy_cycles(target.new_state(40), start, stop_tokens=(), limit=3) is None


@pytest.mark.parametrize("where", ["target", "head"])
def test_logits_that_are_not_finite(made: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's are an error; those of the head a draft of -1, which nothing accepts."""
    target, truth = made("qwen3_5")
    state = target.new_state(60)
    good = target.model.lm_head
    bad = good * mx.nan
    heads = {"lm_head": bad, "mtp_lm_head": good} if where == "target" else {"mtp_lm_head": bad}
    monkeypatch.setattr(target, "model", attrs.evolve(target.model, **heads))
    cycles = opened(target, state)
    cycles.submit(3)
    if where == "target":
        with pytest.raises(ContractError, match="logits of row 0 are not finite"):
            cycles.collect()
    else:
        assert cycles.collect() == GreedyCycle((-1, -1, -1), 0, (truth[len(PROMPT)],))


def test_fast_mode_runs_cycles_too(made: Any) -> None:
    target, truth = made("deepseek_v3", mode="fast")
    assert target.info.parity is Parity.NUMERIC
    state = target.new_state(100)
    cycles = opened(target, state)
    done = driven(cycles, [3, 3, 2], ahead=True)
    cycles.close()
    assert emitted(done) == truth[len(PROMPT) : len(PROMPT) + len(emitted(done))]


# --- mutations -------------------------------------------------------------------------------------------------------


@attrs.frozen
class Mutation:
    owner: Any
    name: str
    make: Callable[[Any], Any]


def _settled(change: int) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def settle(self: Any, kept: Any) -> None:
            rows = self.following.raw.shape[0] - (self.shape.kernel - 1)  # none beyond: they are another's memory
            original(self, kept if kept is number(0) else mx.clip(kept + change, 0, rows))

        return settle

    return make


MUTATIONS = {
    "one row too few is folded": Mutation(caches.MetalDeltaCache, "settle", _settled(-1)),
    "one row too many is folded": Mutation(caches.MetalDeltaCache, "settle", _settled(1)),
    "the window stays where it was": Mutation(
        caches.DeltaState, "window", lambda original: lambda self, taps: rows_from(self.raw, number(0), taps)
    ),
    "the window is one row late": Mutation(
        caches.DeltaState,
        "window",
        lambda original: lambda self, taps: rows_from(self.raw, mx.maximum(self.kept - 1, 0), taps),
    ),
    "rows are written one place too far": Mutation(
        caches.RowCache, "write", lambda original: lambda self, rows, at: original(self, rows, at + 1)
    ),
}


@exact
@pytest.mark.parametrize("mutation", [None, *MUTATIONS])
def test_states_with_a_mistake_in_them_are_told_from_right_ones(
    made: Any, mutation: str | None, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the tests above, over a state layer that is wrong in one place."""
    target, truth = made("qwen3_5")
    scripted(truth, [2, 0, 1])
    if mutation is not None:
        mutant = MUTATIONS[mutation]
        monkeypatch.setattr(mutant.owner, mutant.name, mutant.make(getattr(mutant.owner, mutant.name)))
    state = target.new_state(100)
    cycles = opened(target, state)
    try:
        done = driven(cycles, [3, 2, 2], ahead=True)
        cycles.close()
        monkeypatch.undo()
        at = len(PROMPT) + len(emitted(done))
        right = emitted(done) == truth[len(PROMPT) : at]
        if right:
            assert_plain(target, state, truth[:at])
    except (AssertionError, ContractError):  # the latter: logits that are not finite
        right = False
    assert right == (mutation is None)


def address(array: Any) -> int:
    """Where an array lies."""
    mx.eval(array)
    return int(np.asarray(array).__array_interface__["data"][0])


@pytest.mark.skipif(mx.default_device().type == mx.DeviceType.gpu, reason="looks at host memory")
@pytest.mark.parametrize("viewed", [False, True], ids=["no view", "a view kept alive"])
def test_keys_and_values_stay_where_they_are_while_cycles_run(made: Any, viewed: bool) -> None:
    """Also a whole cycle's writes are in place; a view that somebody keeps makes the next one copy everything."""
    target, truth = made("deepseek_v3" if viewed else "qwen3_5")
    state = target.new_state(12)  # one bucket: it never grows
    held = [cache for cache in [*state.caches, state.mtp] if isinstance(cache, caches.RowCache)]
    cycles = opened(target, state, prompt=truth[:3])
    before = [address(bucket) for cache in held for bucket in cache.buckets]
    views = [cache.buckets[0][:, :, :1] for cache in held] if viewed else []
    mx.eval(views)
    driven(cycles, [2, 2], ahead=True)
    after = [address(bucket) for cache in held for bucket in cache.buckets]
    assert (after == before) is not viewed

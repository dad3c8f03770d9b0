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

import specdec  # noqa: E402
from specdec.backends.metal import caches  # noqa: E402
from specdec.backends.metal.device import number, rows_from  # noqa: E402
from specdec.backends.metal.executor import MetalExecutor  # noqa: E402
from specdec.backends.metal.ops import MetalOps  # noqa: E402
from specdec.contract import DeviceDraft, Needs, Outcome, Parity  # noqa: E402
from specdec.errors import ContractError, StateError  # noqa: E402
from specdec.models.causal_lm import CausalLM  # noqa: E402
from tests import tiny  # noqa: E402
from tests.backends.metal.test_metal_families import TRIED, VOCAB, arrays, poison  # noqa: E402
from tests.decoding.fake_device import left_behind, on_device, on_host, prefilled, run  # noqa: E402
from tests.decoding.test_lossless import Case, mtp  # noqa: E402
from tests.selection import cases  # noqa: E402

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


class Scripted(MetalExecutor):
    """Cycles whose drafts are right for so many tokens. What the head makes of it is computed and left out."""

    truth: mx.array
    rights: list[int]

    def _draft(self, depth: int, bound: int) -> list[mx.array]:
        own = super()._draft(depth, bound)
        if not depth:
            return own
        true = rows_from(self.truth, self._length + 1, depth)
        wrong = (true + 1 + mx.maximum(mx.concatenate(own), 0) * 0) % VOCAB
        drafted = mx.where(mx.arange(depth) < self.rights.pop(0), true, wrong)
        return [drafted[i : i + 1] for i in range(depth)]


def script(patched: pytest.MonkeyPatch, truth: Sequence[int], rights: Sequence[int]) -> None:
    """From here on drafts are right for so many tokens each."""
    patched.setattr(Scripted, "truth", mx.array([*truth, *[0] * 40], mx.int32), raising=False)
    patched.setattr(Scripted, "rights", [*rights], raising=False)
    patched.setattr("specdec.backends.metal.executor.MetalExecutor", Scripted)


def opened(target: Any, prompt: Sequence[int] = PROMPT, capacity: int = 100, **options: Any) -> tuple[Any, Any]:
    """A sequence and the executor of its cycles."""
    sequence = prefilled(target, prompt, DeviceDraft(), capacity)
    return sequence, on_device(sequence, DeviceDraft(), **options)


def emitted(done: Sequence[Outcome]) -> list[int]:
    return [token for outcome in done for token in outcome.emitted]


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
        st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), min_size=1, max_size=8
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
    stops = () if stop is None else (truth[len(PROMPT) + stop],)
    with pytest.MonkeyPatch.context() as patched:
        script(patched, truth, [right for depth, right in plan if depth])
        sequence, executor = opened(target, stop=stops, limit=limit)
        done = run(sequence, executor, [depth for depth, _ in plan], ahead=ahead)
    state = sequence.state

    want, at, waiting = [], len(PROMPT), 1
    for depth, right in plan:  # what cycles are, in the words of the contract
        tokens = truth[at : at + right + 1][: limit - len(emitted(want))]
        ends = [i + 1 for i, token in enumerate(tokens) if token in stops]
        tokens = tokens[: ends[0]] if ends else tokens
        ended = limit == len(emitted(want)) or (want and want[-1].emitted[-1:] and want[-1].emitted[-1] in stops)
        if ended or not tokens or (want and not want[-1].emitted):
            want.append(Outcome((), 0, ()))
            continue
        true = truth[at : at + depth + 1]
        wrong = [(token + 1) % VOCAB for token in true[right:depth]]
        assert true[right] not in wrong[:1]
        want.append(Outcome((*true[:right], *wrong), right, tuple(tokens)))
        at += len(tokens)
        waiting = (0 if depth else waiting) + len(tokens)
    assert done == want
    event(f"ended {not done[-1].emitted}")

    last = done[-1].emitted
    if cut is not None and last:
        back = len(last) - 1 - cut % len(last)
        executor.keep(len(last) - back)
        at, waiting = at - back, waiting - back
        event("cut")
    executor.close()
    assert (state.length, state.pairs.length, state.pairs.waiting) == (at - 1, at - 1, waiting)
    # the head's cache: it drafts from here what a head drafts whose pairs were all prefilled
    sequence.tokens[:] = truth[:at]
    copy = attrs.evolve(sequence, state=target.restore(target.snapshot(state), Needs(mtp=True)))
    assert left_behind(copy) == left_behind(prefilled(target, truth[:at], DeviceDraft()))
    assert_plain(target, state, truth[:at])


@exact
def test_tokens_that_were_taken_back_count_no_more(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the limit nor for the end: a stop token that was cut away ends nothing."""
    target, truth = made("qwen3_5")
    script(monkeypatch, truth, [3, 3, 3])
    at = len(PROMPT)
    assert truth[at + 2] not in truth[at : at + 2]
    sequence, executor = opened(target, limit=6, stop=(truth[at + 2],))
    for kept, depth, wanted in ((1, 3, truth[at : at + 3]), (1, 3, truth[at + 1 : at + 3]), (0, 0, []), (0, 3, [])):
        executor.submit(depth)
        found = executor.collect().emitted
        wanted = truth[at + 2 : at + 3] if not kept and depth == 0 else wanted
        assert list(found) == wanted
        if kept:
            executor.keep(kept)
        sequence.tokens.extend(found[: kept or None])
    executor.close()
    assert_plain(target, sequence.state, truth[: at + 3])
    script(monkeypatch, truth, [3, 3, 3])
    sequence, executor = opened(target, limit=6)
    for keep, wanted in ((1, 4), (0, 4), (0, 1), (0, 0)):
        executor.submit(3)
        found = executor.collect().emitted
        assert len(found) == wanted
        if keep:
            executor.keep(keep)
        sequence.tokens.extend(found[: keep or None])
    executor.close()
    assert_plain(target, sequence.state, truth[: at + 6])


@exact
@pytest.mark.parametrize("family", HEADS)
@pytest.mark.slow
@pytest.mark.parametrize("pruned", cases([False, True], sample=["True"]))
def test_its_own_drafts_are_those_of_the_host(made: Any, family: str, pruned: bool) -> None:
    """The head itself: chained steps, rows behind the pairs that wait, gathered rows of a head in two parts.

    Pairs of plain cycles wait for the next draft, and more of them than a pass has rows are fed before.
    """
    target, truth = made(family)
    head = target.draft_head(range(0, VOCAB, 2)).extended([3, 9, 27]) if pruned else None
    draft, found = DeviceDraft(head=head), []
    for host in (False, True):
        sequence = prefilled(target, truth[:11], draft)
        executor = on_host(sequence) if host else on_device(sequence, draft)
        done = run(sequence, executor, [3, 1, 0, 0, 4, 2, *[0] * 20, 3, 3], ahead=not host)
        executor.close()
        if not host:
            assert_plain(target, sequence.state, sequence.tokens)
        found.append((done, left_behind(sequence)))
    assert found[0] == found[1]
    assert len({outcome.drafted for outcome in found[0][0]}) > 2


@exact
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_without_a_head_every_cycle_is_plain(made: Any, family: str) -> None:
    target, truth = made(family)
    draft = DeviceDraft(mtp=False)
    sequence = prefilled(target, PROMPT, draft)
    executor = on_device(sequence, draft)
    assert {len(outcome.drafted) for outcome in run(sequence, executor, [0, 3] * 10, ahead=True)} == {0}
    executor.close()
    assert sequence.tokens == truth[: len(PROMPT) + 20]
    wanted = tiny.held(target, PROMPT, sequence.tokens[len(PROMPT) :])
    ours, theirs = (arrays(target, state) for state in (sequence.state, wanted))
    tiny.assert_same_bits(ours, {name: theirs[name] for name in ours})
    assert sequence.state.pairs is None


@exact
def test_cycles_go_on_after_a_rewind_a_snapshot_and_in_another_thread(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, truth = made("qwen3_5")
    script(monkeypatch, truth, [2, 0, 3, 1, 2, 2])
    sequence, executor = opened(target)
    run(sequence, executor, [3, 3, 0], ahead=True)
    executor.close()
    sequence.state = target.restore(target.snapshot(sequence.state), Needs(mtp=True))
    before = len(sequence.tokens)

    def go_on() -> None:
        executor = on_device(sequence, DeviceDraft())
        run(sequence, executor, [3, 0, 2], ahead=True)
        executor.close()

    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join()
    assert len(sequence.tokens) > before
    assert sequence.tokens == truth[: len(sequence.tokens)]
    assert_plain(target, sequence.state, sequence.tokens)
    reached = target.rewind(sequence.state, len(PROMPT) - 1)
    assert reached in (0, len(PROMPT) - 1)
    target.rewind(sequence.state, 0)
    script(monkeypatch, truth, [1, 1])
    del sequence.tokens[len(PROMPT) :]
    target.prefill(sequence.state, PROMPT[:-1])
    run(sequence, on_device(sequence, DeviceDraft()), [2, 2], ahead=True)
    assert sequence.tokens == truth[: len(PROMPT) + 4]


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
@pytest.mark.parametrize("drafter", ["mtp", "none"])
def test_the_embedded_model_says_on_the_device_what_it_says_on_the_host(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head is a good one: drafts are accepted, and cycles run ahead of the host."""
    lm = specdec.load("demo", backend="metal", dtype="float32", depth=3, drafter=drafter)
    given: list[Any] = []
    original = CausalLM.device_executor
    monkeypatch.setattr(CausalLM, "device_executor", lambda *a, **o: given.append(original(*a, **o)) or given[-1])
    options: dict[str, Any] = {"max_new_tokens": 40, "stop": ("\n",)}
    got = [lm.generate("The sea ", **options), lm.generate("The river", max_new_tokens=40, ignore_eos=True)]
    assert len(given) == 2
    assert None not in given
    monkeypatch.setattr(CausalLM, "device_executor", lambda *a, **o: None)
    wanted = [lm.generate("The sea ", **options), lm.generate("The river", max_new_tokens=40, ignore_eos=True)]
    assert [(one.tokens, one.text, one.finish_reason) for one in got] == [
        (one.tokens, one.text, one.finish_reason) for one in wanted
    ]
    assert sum(got[1].stats.accepted) > 8 or drafter == "none"


# --- what an executor refuses, and what it says -----------------------------------------------------------------------


def test_misuse_is_refused_with_a_reason(made: Any) -> None:
    target, truth = made("qwen3_5")
    _, executor = opened(target, capacity=40)
    with pytest.raises(StateError, match="drafts 0 to 15 tokens, got 16"):
        executor.submit(16)
    with pytest.raises(StateError, match="cannot keep 1 of 0 tokens"):
        executor.keep(1)
    with pytest.raises(StateError, match="no cycle is in flight"):
        executor.collect()
    executor.submit(2)
    executor.submit(2)
    with pytest.raises(StateError, match="2 cycles are already in flight"):
        executor.submit(2)
    with pytest.raises(StateError, match="while a cycle is in flight"):
        executor.close()
    with pytest.raises(StateError, match="cannot keep 1 of 0 tokens"):
        executor.keep(1)
    executor.keep(len(executor.collect().emitted))
    executor.collect()
    for _ in range(20):
        executor.submit(1)
        executor.collect()
    with pytest.raises(StateError, match="the cache holds 40 tokens"):
        executor.submit(14)


@pytest.mark.parametrize("where", ["target", "head"])
def test_logits_that_are_not_finite(made: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's are an error; those of the head a draft of -1, which nothing accepts."""
    target, truth = made("qwen3_5")
    good = target.model.lm_head
    bad = good * mx.nan
    heads = {"lm_head": bad, "mtp_lm_head": good} if where == "target" else {"mtp_lm_head": bad}
    monkeypatch.setattr(target, "model", attrs.evolve(target.model, **heads))
    _, executor = opened(target, capacity=60)
    executor.submit(3)
    if where == "target":
        with pytest.raises(ContractError, match="logits of row 0 are not finite"):
            executor.collect()
    else:
        assert executor.collect() == Outcome((-1, -1, -1), 0, (truth[len(PROMPT)],))


def test_fast_mode_runs_cycles_too(made: Any) -> None:
    target, truth = made("deepseek_v3", mode="fast")
    assert target.info.parity is Parity.NUMERIC
    sequence, executor = opened(target)
    run(sequence, executor, [3, 0, 3, 2], ahead=True)
    executor.close()
    assert sequence.tokens == truth[: len(sequence.tokens)]


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
    made: Any, mutation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the tests above, over a state layer that is wrong in one place."""
    target, truth = made("qwen3_5")
    script(monkeypatch, truth, [2, 0, 1])
    if mutation is not None:
        mutant = MUTATIONS[mutation]
        monkeypatch.setattr(mutant.owner, mutant.name, mutant.make(getattr(mutant.owner, mutant.name)))
    try:
        sequence, executor = opened(target)
        run(sequence, executor, [3, 0, 2, 2], ahead=True)
        executor.close()
        monkeypatch.undo()
        right = sequence.tokens == truth[: len(sequence.tokens)]
        if right:
            assert_plain(target, sequence.state, sequence.tokens)
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
    sequence, executor = opened(target, truth[:3], capacity=12)  # one bucket: it never grows
    state = sequence.state
    held = [cache for cache in [*state.caches, state.mtp] if isinstance(cache, caches.RowCache)]
    before = [address(bucket) for cache in held for bucket in cache.buckets]
    views = [cache.buckets[0][:, :, :1] for cache in held] if viewed else []
    mx.eval(views)
    run(sequence, executor, [2, 2], ahead=True)
    after = [address(bucket) for cache in held for bucket in cache.buckets]
    assert (after == before) is not viewed

"""Several generations at once: each has the tokens, log-probabilities and state bits that it has alone."""

import itertools
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.contract import Draft, Drafter, DrafterSpec, MtpDraft, PassRequest
from specdec.decoding import batch
from specdec.decoding.batch import Batch
from specdec.drafters.draft_model import DraftModel, DraftModelConfig, DraftModelDrafter
from specdec.drafters.first_of import FirstOfDrafter
from specdec.drafters.mtp import MtpDrafter
from specdec.drafters.ngram import NgramConfig, NgramDrafter
from specdec.drafters.pruned_head import PrunedHeadConfig
from specdec.models import causal_lm
from specdec.registry.parts import DrafterPart
from tests import tiny
from tests.decoding.test_lossless import SHAPES
from tests.selection import cases

VOCAB = 277
COMBINATIONS = cases(
    itertools.product(("qwen3_5", "qwen3"), ("native", "torch"), ("float32", "bfloat16")),
    sample={"qwen3_5-native-bfloat16", "qwen3-native-float32"},
    name="-".join,
    mark="slow",
)


def smaller(make_target, kernels, dtype="float32"):
    """A model of one layer with the vocabulary of the others."""
    return make_target("qwen3", kernels=kernels, dtype=dtype, stored=dtype, **SHAPES["qwen3"] | {"layers": 1})


def by_model(env, model):
    return DraftModelDrafter(DraftModelConfig(model="smaller"), attrs.evolve(env, shared=DraftModel(model=model)))


@pytest.fixture(scope="module", params=COMBINATIONS)
def made(request, checkpoint, make_target):
    """A language model that drafts with its MTP head, n-grams or a smaller model, and its target."""
    family, kernels, dtype = request.param
    target = make_target(family, kernels=kernels, dtype=dtype, stored=dtype, **SHAPES[family])

    def drafter(env):
        if env.target.info.mtp_layers:
            return MtpDrafter(PrunedHeadConfig(), env)
        if dtype == "float32":
            return by_model(env, smaller(make_target, kernels, dtype))
        return NgramDrafter(NgramConfig(min_order=1))

    return tiny.make_lm(checkpoint(family, dtype=dtype, **SHAPES[family]), target, drafter), target


@pytest.fixture(scope="module", autouse=True)
def small_heads_share_passes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_lm, "SHARED_MTP", 0)
        yield


@attrs.frozen
class Asked:
    """A generation, and when it comes and goes."""

    prompt: list[int]
    settings: dict[str, Any]
    depth: int | None
    tick: int
    leaves: int | None


@st.composite
def generations(draw):
    settings = {"max_new_tokens": draw(st.integers(1, 20)), "ignore_eos": True}
    if draw(st.booleans()):
        settings |= {"temperature": draw(st.sampled_from([0.7, 1.5])), "seed": draw(st.integers(0, 9))}
    if draw(st.integers(0, 3)) == 0:
        settings |= {"logprobs": 2, "repetition_penalty": 1.3}
    return Asked(
        prompt=draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=17)),
        settings=settings,
        depth=draw(st.one_of(st.none(), st.integers(0, 6))),
        tick=draw(st.integers(0, 12)),
        leaves=draw(st.one_of(st.none(), st.none(), st.integers(0, 12))),
    )


def play(lm, asked):
    """Run all in one batch; returns their streams, which have ended."""
    streams = [lm.stream(one.prompt, depth=one.depth, **one.settings) for one in asked]
    running = Batch()
    for tick in itertools.count():
        for one, stream in zip(asked, streams, strict=True):
            if one.tick == tick:
                running.add(stream)
            if one.leaves is not None and one.tick + one.leaves == tick:
                stream.stop()
        running.tick()
        if tick > 12 and not running.running:
            break
    assert not running.failures
    return streams


def check(lm, target, asked):
    """Whatever the others do, each has the result and the state of a generation alone."""
    for one, stream in zip(asked, play(lm, asked), strict=True):
        result, alone = stream.result, lm.generate(one.prompt, depth=one.depth, **one.settings)
        count = len(result.tokens)
        assert result.tokens == alone.tokens[:count]
        assert count == len(alone.tokens) or one.leaves is not None
        if result.logprobs is not None:
            assert result.logprobs == alone.logprobs[:count]
        state = stream._sequence.state
        prompt, generated = (one.prompt, result.tokens) if count else (one.prompt, [])
        if state.length == len(prompt) + count - 1:
            tiny.assert_same_bits(
                tiny.state_arrays(target, state), tiny.state_arrays(target, tiny.held(target, prompt, generated))
            )


@given(asked=st.lists(generations(), min_size=1, max_size=6))
def test_each_generation_of_a_batch_is_the_one_alone(made, asked):
    check(*made, asked)


@pytest.fixture
def small(checkpoint, make_target):
    """``small(drafter)``: a language model of attention layers only."""
    folder, target = checkpoint("qwen3", **SHAPES["qwen3"]), make_target("qwen3", **SHAPES["qwen3"])
    return lambda drafter=None: tiny.make_lm(folder, target, drafter)


@given(
    fixed=st.floats(0.001, 10.0),
    row=st.floats(0.0, 1.0),
    passes=st.lists(st.integers(2, 40), min_size=30, max_size=60).filter(lambda rows: len(set(rows[-10:])) > 4),
    sequences=st.integers(2, 9),
    drafted=st.integers(0, 8),
)
def test_a_drafted_row_is_priced_at_what_it_adds_for_all(fixed, row, passes, sequences, drafted):
    """With ``seconds = fixed + row * rows``, a sequence that drafts k tokens pays for k rows more."""
    prices = batch._Prices()
    for rows in passes:
        prices.add(rows, fixed + row * rows)
    share, plain = (prices.share(fixed + row * (9 + count), sequences, count) for count in (drafted, 0))
    assert share - plain == pytest.approx(row * drafted, rel=1e-6, abs=1e-6 * fixed)


def test_where_rows_never_vary_each_costs_the_mean():
    prices = batch._Prices()
    for _ in range(50):
        prices.add(4, 2.0)
    assert prices.share(2.0, 4, 2) == pytest.approx(0.5 + 0.75 * 0.5 * 2)


@given(depth=st.integers(0, 9))
def test_a_pass_is_a_step_and_a_draft_as_many_as_its_passes(depth):
    assert PassRequest(None, None, [1]).steps == 1
    assert MtpDraft(None, None, [1], depth=depth).steps == max(depth, 1)


@pytest.mark.parametrize("chained", [False, True])
def test_the_passes_of_a_draft_model_are_shared(small, make_target, monkeypatch, chained):
    """Also where the model is part of a chain."""
    model, shared = smaller(make_target, tiny.kernels_available()[-1]), []

    def drafter(env):
        if not chained:
            return by_model(env, model)
        spec = DrafterSpec(name="smaller", factory=lambda config, env: by_model(env, model))
        return FirstOfDrafter(None, attrs.evolve(env, shared={"smaller": DrafterPart(spec=spec)}))

    def decode_batch(batch, run=model.decode_batch):
        shared.append(len(batch))
        return run(batch)

    monkeypatch.setattr(model, "decode_batch", decode_batch)
    lm = small(drafter)
    asked = [Asked([5 + n, 7], {"max_new_tokens": 9, "ignore_eos": True}, 3, 0, None) for n in range(3)]
    check(lm, lm.target, asked)
    assert max(shared) == 3


class Failing(Drafter):
    """Raises from its third draft on."""

    calls = 0

    def propose(self, context, depth):
        self.calls += 1
        if self.calls > 2:
            raise ZeroDivisionError
        return Draft(tuple(context[-1:] * depth))


class Yielding(Failing):
    """Leaves something else than a pass to the engine."""

    def drafting(self, context, depth):
        yield "a text"


def test_a_drafter_that_yields_no_pass_is_switched_off(small):
    result = small(lambda env: Yielding()).generate([5, 7], max_new_tokens=4)
    assert "a draft yielded 'a text'" in result.stats.speculation()["reason"]


def test_a_failure_of_one_leaves_the_others_alone(small):
    """A drafter that fails is off for its own sequence; a pass that fails ends its own generation."""
    lm = small(lambda env: Failing())
    streams = [lm.stream([5 + n, 7], max_new_tokens=12) for n in range(3)]
    alone = [lm.generate([5 + n, 7], max_new_tokens=12).tokens for n in range(3)]
    running = Batch()
    for stream in streams:
        running.add(stream)
    for _ in range(4):
        running.tick()
    streams[1]._sequence.state.capacity = 0  # its next pass has no room
    while running.running:
        running.tick()
    assert list(running.failures) == [streams[1]]
    assert [streams[0].result.tokens, streams[2].result.tokens] == [alone[0], alone[2]]
    assert "failed in propose" in streams[0].result.stats.speculation()["reason"]


def test_a_long_prompt_delays_the_others_by_a_chunk_at_most(small, monkeypatch):
    monkeypatch.setattr("specdec.decoding.sequence.SHARED_CHUNK", 8)
    lm = small()
    running, other = Batch(), lm.stream([1, 2], max_new_tokens=30, depth=0)
    running.add(other)
    while len(other._sequence.tokens) == 2:
        running.tick()
    for _ in range(2):
        running.add(lm.stream(list(range(60)), max_new_tokens=4))
    for _ in range(12):
        before, prefilled = len(other._sequence.tokens), sum(s._stats.prefilled for s in running.running)
        running.tick()
        assert len(other._sequence.tokens) == before + 1
        assert sum(s._stats.prefilled for s in running.running) <= prefilled + 8


@pytest.mark.parametrize(("rows", "others", "left"), [(8, 1, 51), (7, 1, 8), (8, 0, 8)])
def test_chunks_are_small_only_for_others_and_where_bits_allow(small, monkeypatch, rows, others, left):
    """A target that promises nothing for so many rows may round a prompt in other chunks differently."""
    monkeypatch.setattr("specdec.decoding.sequence.SHARED_CHUNK", 8)
    lm, running = small(), Batch()
    monkeypatch.setattr(lm.target, "info", attrs.evolve(lm.target.info, batch_rows=rows))
    for _ in range(others):
        running.add(lm.stream([1], max_new_tokens=30, ignore_eos=True, depth=0))
        running.tick()
    long = lm.stream(list(range(60)), max_new_tokens=4)
    running.add(long)
    running.tick()
    assert long.waiting == left


def test_a_short_prompt_does_not_wait_for_a_long_one(small, monkeypatch):
    """Nor does the long one starve while short ones keep coming."""
    monkeypatch.setattr("specdec.decoding.sequence.PREFILL_CHUNK", 8)
    lm = small()
    running, long = Batch(), lm.stream(list(range(100)), max_new_tokens=4, ignore_eos=True)
    running.add(long)
    running.tick()
    for _ in range(20):
        short = lm.stream([1, 2, 3], max_new_tokens=2, ignore_eos=True)
        running.add(short)
        before = long.waiting
        for _ in range(5):
            running.tick()
        assert short.finished
        assert long.waiting < before or not before
    while running.running:
        running.tick()
    assert long.result.tokens == lm.generate(list(range(100)), max_new_tokens=4, ignore_eos=True).tokens


@pytest.mark.parametrize("idle", [1, 2])
def test_only_chunks_of_prompts_change_whose_turn_it_is(small, monkeypatch, idle):
    """The oldest had the last one; the shortest has the next one, however long no prompt waited meanwhile."""
    monkeypatch.setattr("specdec.decoding.sequence.SHARED_CHUNK", 8)
    lm, running = small(), Batch()
    running.add(lm.stream([1, 2], max_new_tokens=30, ignore_eos=True, depth=0))
    for _ in range(1 + idle):
        running.tick()
    long, short = (lm.stream(list(range(length)), max_new_tokens=4) for length in (60, 40))
    for stream in (long, short):
        running.add(stream)
    running.tick()
    assert (long.waiting, short.waiting) == (59, 31)


def test_generate_batch_keeps_at_most_so_many_and_names_each(small):
    lm = small()
    begun = []

    def start(number):
        def begin():
            begun.append(number)
            if number == 3:
                raise ValueError("no such prompt")
            stream = lm.stream([number + 1, 5], max_new_tokens=3 + number)
            return stream

        return begin

    ended = 0
    results = {}
    for number, result in Batch().run(map(start, range(6)), 2):
        assert len(begun) - ended <= 2 + 1
        ended += 1
        results[number] = result
    assert begun == [*range(6)]
    assert isinstance(results.pop(3), ValueError)
    assert {n: r.tokens for n, r in results.items()} == {
        n: lm.generate([n + 1, 5], max_new_tokens=3 + n).tokens for n in (0, 1, 2, 4, 5)
    }

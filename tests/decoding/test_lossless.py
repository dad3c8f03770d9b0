"""The promise: whatever is drafted, at whatever depth, ``strict`` gives the tokens of plain decoding, bit for bit.

Tokens alone would not show a wrong state for a while, so after each run the state's bits (keys and values, convolution
window, recurrent matrix, last hidden state) are compared with those of a run that never speculated.
"""

import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from specdec.contract import CycleRecord, Draft, Drafter, Parity
from specdec.decoding.result import Result
from specdec.drafters.mtp import MtpDrafter
from specdec.drafters.ngram import NgramConfig, NgramDrafter
from specdec.drafters.pruned_head import PrunedHeadConfig
from specdec.policies.fixed import MAX_DEPTH
from tests import tiny
from tests.drafters import composed
from tests.selection import cases

VOCAB = 277
SHAPES = {
    "qwen3_5": tiny.HYBRID,
    "qwen3": {"hidden": 36, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 10, "intermediate": 44},
}


# --- drafters that nobody would install -------------------------------------------------------------------------------


@attrs.define
class Scripted(Drafter):
    """Drafts ``make(position, depth, cycle)``; ``truth`` holds prompt and plain output."""

    make: Callable[[int, int, int], Any]
    cycle: int = 0

    def propose(self, context, depth):
        self.cycle += 1
        drafted = self.make(len(context), depth, self.cycle - 1)
        return Draft(tuple(drafted)) if isinstance(drafted, list) else drafted


@attrs.frozen
class Case:
    """What a drafter may know when it is made."""

    truth: list[int]  # prompt and plain output, longer than any run
    env: Any
    numbers: list[int]  # anything, from hypothesis

    def number(self, cycle, limit):
        return self.numbers[cycle % len(self.numbers)] % limit

    def right(self, at, count):
        return self.truth[at : at + count]

    def wrong(self, at, count):
        """Never the token of plain decoding at the first position; the positions after it do not matter."""
        return [(token + 1 + i) % VOCAB for i, token in enumerate(self.right(at, count))]


def oracle(case):
    return Scripted(lambda at, depth, cycle: case.right(at, depth))


def adversarial(case):
    return Scripted(lambda at, depth, cycle: case.wrong(at, depth))


def partly_right(case):
    def make(at, depth, cycle):
        right = case.number(cycle, depth + 1)
        return case.right(at, right) + case.wrong(at + right, depth - right)

    return Scripted(make)


def too_short(case):
    return Scripted(lambda at, depth, cycle: case.right(at, case.number(cycle, depth + 1)))


def random(case):
    rng = np.random.default_rng(case.numbers)
    return Scripted(lambda at, depth, cycle: rng.integers(0, VOCAB, depth).tolist())


def empty(case):
    return Scripted(lambda at, depth, cycle: [])


def too_long(case):
    return Scripted(lambda at, depth, cycle: case.right(at, depth + 1 + case.number(cycle, 20)))


def wrong_ids(case):
    bad = [-1, VOCAB, -(2**40), 2**40]

    def make(at, depth, cycle):
        drafted = case.right(at, depth)
        return [*drafted[: case.number(cycle, depth)], bad[case.number(cycle, 4)], *drafted]

    return Scripted(make)


def no_draft(case):
    things = [None, (1, 2), "abc", Draft((1.0, 2.0)), Draft(("a",)), Draft(None)]
    return Scripted(lambda at, depth, cycle: things[case.number(0, len(things))])


def raising(case):
    moment = case.number(0, 5)

    class Raising(MtpDrafter if case.env.target.info.mtp_layers else NgramDrafter):
        calls = 0

        def propose(self, context, depth):
            self.calls += 1
            if self.calls > moment:
                raise ZeroDivisionError("in propose")
            return super().propose(context, depth)

        def observe(self, verdict, output, context):
            if self.calls > moment + 1:
                raise ZeroDivisionError("in observe")
            super().observe(verdict, output, context)

    return Raising(NgramConfig() if not case.env.target.info.mtp_layers else PrunedHeadConfig(), case.env)


def ngram(case):
    return NgramDrafter(NgramConfig(min_order=1))


def mtp(case):
    return MtpDrafter(PrunedHeadConfig(), case.env) if case.env.target.info.mtp_layers else ngram(case)


DRAFTERS = [
    oracle,
    adversarial,
    partly_right,
    partly_right,
    too_short,
    random,
    empty,
    too_long,
    wrong_ids,
    no_draft,
    raising,
    ngram,
    mtp,
]


# --- the property -----------------------------------------------------------------------------------------------------


def check_counters(stats, tokens, cut=0):
    """The three counters fit each other, the rows that were paid for, and the tokens that came out."""
    offered, reached, accepted = stats.offered, stats.reached, stats.accepted
    assert len(offered) == len(reached) == len(accepted)
    assert all(a <= r <= o for a, r, o in zip(accepted, reached, offered, strict=True))
    assert reached[:1] == offered[:1]
    assert all(later <= earlier for earlier, later in zip(accepted, reached[1:], strict=False))
    assert all(later <= earlier for earlier, later in itertools.pairwise(offered))
    assert stats.rows == sum(offered) + stats.cycles
    assert stats.tokens == tokens == sum(accepted) + stats.cycles - cut
    assert sum(stats.draft_lengths.values()) == stats.cycles
    assert sum(depth * count for depth, count in stats.draft_lengths.items()) == sum(offered)


def check_drafter(
    folder: pathlib.Path,
    target: Any,
    prompt: Sequence[int],
    drafter: Callable[[Case], Drafter],
    depths: Sequence[int],
    numbers: Sequence[int] = (5, 2, 9),
    count: int = 10,
    **sampling: Any,
) -> tuple[Result, list[CycleRecord]]:
    """Whatever is drafted at these depths, the tokens and the state are those of plain decoding; returns the result
    and the records of its cycles."""
    longest = count + max(depths) + 1
    settings = {"ignore_eos": True, **sampling}
    if sampling:
        plain = tiny.make_lm(folder, target).generate(list(prompt), max_new_tokens=longest, **settings).tokens
    else:
        plain = tiny.plain_run(target, prompt, longest)
    truth, policies = [*prompt, *plain], list[composed.Scripted]()

    def policy() -> composed.Scripted:
        policies.append(composed.Scripted(depths))
        return policies[-1]

    session = tiny.make_lm(folder, target, lambda env: drafter(Case(truth, env, list(numbers))), policy).session()
    result = session.generate(list(prompt), max_new_tokens=count, **settings)
    assert result.tokens == plain[:count]
    assert all(type(token) is int for token in result.tokens)  # a numpy integer would break --json
    assert result.finish_reason == "length"
    assert (result.guarantee, result.deviation.count) == ("exact", 0)
    check_counters(result.stats, count)
    records = policies[-1].records
    assert len(records) == result.stats.cycles
    assert [token for record in records for token in record.emitted] == result.tokens
    if drafter is oracle:
        assert result.stats.accepted == result.stats.reached == result.stats.offered
    if drafter is adversarial:
        assert (sum(result.stats.accepted), result.stats.cycles) == (0, count)
    state = session.sequence.state
    assert state.length == len(prompt) + count - 1
    tiny.assert_same_bits(
        tiny.state_arrays(target, state), tiny.state_arrays(target, tiny.held(target, prompt, plain[:count]))
    )
    return result, records


COMBINATIONS = cases(
    itertools.product(("qwen3_5", "qwen3"), ("native", "torch"), ("float32", "bfloat16")),
    sample={"qwen3_5-native-float32", "qwen3_5-native-bfloat16", "qwen3-native-bfloat16", "qwen3-torch-float32"},
    name="-".join,
    mark="slow",
)


@pytest.fixture(scope="module", params=COMBINATIONS)
def combination(request):
    """Family, kernels and dtype."""
    return tuple(request.param)


prompts = st.one_of(
    st.sampled_from([(7,), (1, 2, 3), (9, 8, 9, 8, 9, 8, 9), tuple(range(40, 60))]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24).map(tuple),
)
GENERATED = 24


@given(
    prompt=prompts,
    count=st.integers(1, GENERATED),
    drafter=st.sampled_from(DRAFTERS),
    depths=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    numbers=st.lists(st.integers(0, 2**16), min_size=1, max_size=6),
)
def test_any_drafter_at_any_depth_gives_the_tokens_and_the_state_of_plain_decoding(
    combination, checkpoint, make_target, prompt, count, drafter, depths, numbers
):
    family, kernels, dtype = combination
    if kernels == "torch":
        prompt = prompt[:17]  # the reference computes prompt chunks of more than 16 rows in bulk, with other bits
    target = make_target(family, kernels=kernels, dtype=dtype, stored=dtype, **SHAPES[family])
    assert target.info.parity is Parity.BITWISE
    folder = checkpoint(family, dtype=dtype, **SHAPES[family])
    result, records = check_drafter(folder, target, prompt, drafter, depths, numbers, count)
    event(drafter.__name__)
    event(f"accepted {min(sum(result.stats.accepted), 8)}")
    stats, asked = result.stats, any(record.depth for record in records)
    if drafter is no_draft and asked:
        assert stats.inactive_reason.startswith("the drafter ")
    if drafter is too_long and stats.offered:
        assert stats.faults.keys() == {"draft longer than asked for"}
    elif drafter is wrong_ids and asked:
        assert "draft token outside the vocabulary" in stats.faults
    elif drafter not in (too_long, wrong_ids):
        assert not stats.faults


PREDICTIONS = {
    "the output": lambda output: output,
    "every tenth token changed": lambda output: [token if at % 10 else 0 for at, token in enumerate(output, 1)],
    "a line left out and one put in": lambda output: [*output[:8], *range(90, 97), *output[8:14], *output[17:]],
    "another text": lambda output: [(7 * at) % 94 for at in range(40)],
    "backwards": lambda output: output[::-1],
    "nothing": lambda output: [],
    "longer than the context": lambda output: output * 20,
}


@given(
    prompt=prompts,
    count=st.integers(1, 40),
    prediction=st.sampled_from(sorted(PREDICTIONS)),
    drafter=st.sampled_from([mtp, adversarial, raising]),
    depth=st.one_of(st.none(), st.integers(0, MAX_DEPTH)),
    numbers=st.lists(st.integers(0, 2**16), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_a_prediction_changes_neither_tokens_nor_state(
    checkpoint, make_target, prompt, count, prediction, drafter, depth, numbers, temperature
):
    prompt = prompt[:17]
    folder = checkpoint("qwen3_5", dtype="float32", **SHAPES["qwen3_5"])
    target = make_target("qwen3_5", kernels=tiny.kernels_available()[-1], **SHAPES["qwen3_5"])
    settings = {"ignore_eos": True, "seed": 3, "temperature": temperature, "max_new_tokens": 48}
    truth = [*prompt, *tiny.make_lm(folder, target).generate(list(prompt), **settings).tokens]
    lm = tiny.make_lm(folder, target, lambda env: drafter(Case(truth, env, numbers)))
    predicted = PREDICTIONS[prediction](truth[len(prompt) :][:count])
    session, settings["max_new_tokens"] = lm.session(), count
    result = session.generate(list(prompt), prediction=predicted, depth=depth, **settings)

    assert result.tokens == truth[len(prompt) :][:count]
    stats = result.stats
    check_counters(stats, count)
    assert stats.prediction_accepted <= stats.prediction_offered <= sum(stats.offered)
    assert len(stats.offered) <= min(target.info.max_rows - 1, count, 99 if depth is None else depth)
    if prediction == "the output" and depth != 0:
        assert stats.prediction_accepted == stats.prediction_offered == sum(stats.offered)
        assert depth is not None or stats.cycles <= 6
    if prediction == "every tenth token changed" and depth is None and count == 40:
        assert stats.prediction_accepted >= 12  # at least three of the nine tokens between two changes
    if depth == 0:
        assert stats.speculation()["reason"] == "depth 0 was requested"
    state = session.sequence.state
    wanted = tiny.held(target, prompt, truth[len(prompt) :][:count])
    tiny.assert_same_bits(tiny.state_arrays(target, state), tiny.state_arrays(target, wanted))

"""Cycles that a device runs give what those of the host give: tokens, text, ends, state.

The target is the embedded model behind a fake device (``tests.decoding.fake_device``).
"""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import specdec
from specdec.contract import DepthPolicy, DepthPolicySpec, Outcome, Stats
from specdec.decoding.parts import DepthPart
from specdec.drafters.mtp import MtpDrafter
from specdec.errors import PluginError
from tests import tiny
from tests.decoding.fake_device import FakeExecutor, OnDevice
from tests.selection import examples

TEXTS = ["def add(a, b):\n    return", "The sea ", "for i in range(", "1, 2, 3, 4, "]


class Depths(DepthPolicy):
    """The given depths in turn."""

    def __init__(self, depths: list[int]) -> None:
        self.depths = depths

    def next_depth(self, stats: Stats) -> int:
        return self.depths[stats.cycles % len(self.depths)]


@pytest.fixture(scope="module")
def demo() -> Any:
    return specdec.load("demo", depth=2, dtype="float32")


@pytest.fixture(scope="module")
def headless() -> Any:
    return specdec.load("demo", drafter="none", dtype="float32")


def with_depths(lm: Any, depths: list[int], made: type[FakeExecutor] | None = FakeExecutor) -> Any:
    depth = DepthPart(spec=DepthPolicySpec(name="given", factory=lambda config: Depths(depths)))
    return attrs.evolve(lm, target=lm.target if made is None else OnDevice(lm.target, made), depth=depth)


def run(lm: Any, parts: list[str], **options: Any) -> tuple[list[Any], Any]:
    session = lm.session()
    results = []
    for part in parts:
        result = session.generate(part, **options)
        results.append((result.tokens, result.text, result.finish_reason))
    return results, session


@given(
    parts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3),
    count=st.integers(1, 40),
    depths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    stop=st.lists(st.sampled_from(["\n", "e", " th", "zzz"]), max_size=2),
)
@examples(60)
def test_cycles_of_the_target_give_what_the_engine_gives(
    demo: Any, parts: list[str], count: int, depths: list[int], stop: list[str]
) -> None:
    ours = with_depths(demo, depths)
    options = {"max_new_tokens": count, "stop": tuple(stop)}
    got, session = run(ours, parts, **options)
    wanted, other = run(with_depths(demo, depths, None), parts, **options)
    event(f"opened {min(len(ours.target.opened), 3)}")
    assert got == wanted
    assert len(ours.target.opened) == len(parts)
    states = [one._sequence.state for one in (session, other)]
    tiny.assert_same_bits(*(demo.target.snapshot(state).arrays for state in states))  # the head's cache too


def test_plain_decoding_runs_on_the_device(headless: Any) -> None:
    """Without a drafter, and for as long as a depth policy says 0; every cycle but the first is submitted ahead."""
    ours = with_depths(headless, [0])
    (got, session), (wanted, other) = (run(lm, TEXTS, max_new_tokens=24) for lm in (ours, headless))
    assert got == wanted
    assert len(ours.target.opened) == len(TEXTS)
    assert {executor.most for executor in ours.target.opened} == {2}
    states = [one._sequence.state for one in (session, other)]
    tiny.assert_same_bits(*(headless.target.snapshot(state).arrays for state in states))
    result = ours.generate(TEXTS[0], max_new_tokens=24)
    assert result.stats.whole_cycles == result.stats.cycles == len(result.tokens)


def test_a_drafter_that_fails_leaves_plain_decoding_on_the_device(demo: Any) -> None:
    class Fails(MtpDrafter):
        def device_draft(self, context: Any) -> Any:
            raise RuntimeError("no idea")

    spec = attrs.evolve(demo.drafter.spec, factory=Fails)
    lm = with_depths(attrs.evolve(demo, drafter=attrs.evolve(demo.drafter, spec=spec)), [2])
    result = lm.generate(TEXTS[0], max_new_tokens=24)
    assert result.tokens == demo.generate(TEXTS[0], max_new_tokens=24).tokens
    assert "no idea" in result.stats.inactive_reason
    assert result.stats.whole_cycles == result.stats.cycles == len(result.tokens)


@given(text=st.sampled_from(TEXTS), stops=st.sets(st.integers(0, 276), max_size=40), depth=st.integers(0, 5))
@examples(40)
def test_a_stop_token_ends_them_on_the_device(demo: Any, text: str, stops: set[int], depth: int) -> None:
    tokenizer = copy.copy(demo.tokenizer)
    tokenizer.eos_ids = frozenset(stops)
    lm = attrs.evolve(with_depths(demo, [depth]), tokenizer=tokenizer)
    plain = attrs.evolve(lm, target=demo.target)
    (got, session), (wanted, _) = run(lm, [text], max_new_tokens=32), run(plain, [text], max_new_tokens=32)
    assert got == wanted
    event(got[0][2])
    assert session._sequence.state.length == len(session.tokens) - 1


def test_the_host_is_one_cycle_late_only_where_no_text_ends_generation(demo: Any) -> None:
    for stop, most in (((), 2), (("zzz",), 1)):
        lm = with_depths(demo, [2])
        run(lm, TEXTS[:1], max_new_tokens=40, stop=stop)
        assert [executor.most for executor in lm.target.opened] == [most]


def test_the_time_of_a_whole_cycle_is_told_as_one(demo: Any) -> None:
    """No phases: a draft of 0 s would read as one that costs nothing."""
    stats = with_depths(demo, [2]).generate(TEXTS[0], max_new_tokens=20).stats
    assert stats.whole_cycles == stats.to_dict()["whole_cycles"] > 0
    assert stats.seconds["verify"] > 0.0
    if stats.whole_cycles == stats.cycles:
        assert stats.seconds["draft"] == stats.seconds["commit"] == 0.0
    assert with_depths(demo, [2], None).generate(TEXTS[0], max_new_tokens=20).stats.whole_cycles == 0


@pytest.mark.parametrize("how", ["temperature", "logprobs", "bias", "gate", "verifier"])
def test_what_needs_the_host_goes_step_by_step(demo: Any, how: str) -> None:
    if how in ("gate", "verifier"):
        other = {"drafter": {"name": "mtp", "min_margin": 0.5}} if how == "gate" else {"verifier": "margin"}
        demo = specdec.load("demo", depth=2, dtype="float32", **other)
    options: dict[str, Any] = {
        "temperature": {"temperature": 1.0},
        "logprobs": {"logprobs": 2},
        "bias": {"logit_bias": {"5": 1.0}},
    }.get(how, {})
    lm = with_depths(demo, [2])
    got, _ = run(lm, TEXTS[:1], max_new_tokens=24, **options)
    wanted, _ = run(with_depths(demo, [2], None), TEXTS[:1], max_new_tokens=24, **options)
    assert got == wanted
    assert not lm.target.opened


def test_a_stream_that_is_stopped_or_dropped_leaves_a_session_that_goes_on(demo: Any) -> None:
    wanted = demo.generate(TEXTS[0], max_new_tokens=60).tokens
    prompt = len(demo.encode(TEXTS[0]))
    for way in ("stop", "close"):
        session = with_depths(demo, [3]).session()
        stream = session.stream(TEXTS[0], max_new_tokens=40)
        for _ in range(3):
            next(stream)
        if way == "stop":
            stream.stop()
            result = stream.result
            assert result.finish_reason == "interrupted"
            assert result.tokens == list(session.tokens[prompt:])
        else:
            stream._pieces.close()
            stream._over = True
        so_far = len(session.tokens) - prompt
        assert 0 < so_far < 40
        more = session.generate(max_new_tokens=60 - so_far)
        assert list(session.tokens[prompt:]) == wanted[: len(session.tokens) - prompt]
        assert len(more.tokens) == 60 - so_far


def test_a_failure_on_the_device_leaves_a_session_that_builds_its_states_again(demo: Any) -> None:
    class Failing(FakeExecutor):
        left = 4

        def collect(self) -> Outcome:
            Failing.left -= 1
            if Failing.left == 0:
                raise RuntimeError("the device is gone")
            return super().collect()

    session = with_depths(demo, [2], Failing).session()
    with pytest.raises(PluginError, match="the target .* failed in collect: RuntimeError: the device is gone"):
        session.generate(TEXTS[0], max_new_tokens=40)
    session.generate(max_new_tokens=40)
    prompt = demo.encode(TEXTS[0])
    made = list(session.tokens[len(prompt) :])
    assert made == demo.generate(TEXTS[0], max_new_tokens=len(made)).tokens


def test_a_head_of_nonsense_is_given_up(demo: Any) -> None:
    class Nonsense(FakeExecutor):
        def collect(self) -> Outcome:
            cycle = super().collect()
            return Outcome((*cycle.drafted[:-1], -1), min(cycle.accepted, len(cycle.drafted) - 1), cycle.emitted)

    session = with_depths(demo, [2], Nonsense).session()
    result = session.generate(TEXTS[0], max_new_tokens=40)
    assert result.tokens == demo.generate(TEXTS[0], max_new_tokens=40).tokens
    assert "not finite" in result.stats.inactive_reason

"""Cycles that a target runs by itself give what the engine's cycles give: tokens, text, ends, state.

The target is the embedded model with ``StepwiseCycles`` in front of it, which behaves as a device does: it runs ahead
of the host, ends by itself, and commits a cycle when the next one begins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from specdec.decoding.stepwise import StepwiseCycles

import specdec
from specdec.contract import DepthPolicy, DepthPolicySpec, GreedyCycle, Stats
from specdec.decoding.parts import DepthPart
from specdec.doctor.passes import PassProbe
from tests import tiny
from tests.selection import examples

TEXTS = ["def add(a, b):\n    return", "The sea ", "for i in range(", "1, 2, 3, 4, "]


class Depths(DepthPolicy):
    """The given depths in turn."""

    def __init__(self, depths: list[int]) -> None:
        self.depths = depths

    def next_depth(self, stats: Stats) -> int:
        return self.depths[stats.cycles % len(self.depths)]


class OnDevice:
    """The embedded model as a target that runs cycles by itself; counts what it was asked for."""

    runs_greedy_cycles = True

    def __init__(self, target: Any, made: Callable[..., Any] = StepwiseCycles) -> None:
        self._target = target
        self._made = made
        self.opened: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def greedy_cycles(self, state: Any, start: Any, **options: Any) -> Any:
        cycles = self._made(self._target, state, start, **options)
        self.opened.append(cycles)
        return cycles


@pytest.fixture(scope="module")
def demo() -> Any:
    return specdec.load("demo", depth=2, dtype="float32")


def with_depths(lm: Any, depths: list[int], made: Callable[..., Any] | None = StepwiseCycles) -> Any:
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
    if any(depths) and count > 8:
        assert ours.target.opened
    for one in (session, other):  # what waits for its pair must be the same too
        one._snapshot()
    tiny.assert_same_bits(
        tiny.state_arrays(demo.target, session.sequence.state), tiny.state_arrays(demo.target, other.sequence.state)
    )


@given(text=st.sampled_from(TEXTS), stops=st.sets(st.integers(0, 276), max_size=40), depth=st.integers(1, 5))
@examples(40)
def test_a_stop_token_ends_them_on_the_device(demo: Any, text: str, stops: set[int], depth: int) -> None:
    tokenizer = copy.copy(demo.tokenizer)
    tokenizer.eos_ids = frozenset(stops)
    lm = attrs.evolve(with_depths(demo, [depth]), tokenizer=tokenizer)
    plain = attrs.evolve(lm, target=demo.target)
    (got, session), (wanted, _) = run(lm, [text], max_new_tokens=32), run(plain, [text], max_new_tokens=32)
    assert got == wanted
    event(got[0][2])
    assert session.sequence.state.length == len(session.tokens) - 1


def test_the_host_is_one_cycle_late_only_where_no_text_ends_generation(demo: Any) -> None:
    class Watched(StepwiseCycles):
        most = 0

        def submit(self, depth: int) -> None:
            super().submit(depth)
            Watched.most = max(Watched.most, len(self._flying))

    run(with_depths(demo, [2], Watched), TEXTS[:1], max_new_tokens=40)
    assert Watched.most == 2
    Watched.most = 0
    run(with_depths(demo, [2], Watched), TEXTS[:1], max_new_tokens=40, stop=("zzz",))
    assert Watched.most == 1


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
    class Failing(StepwiseCycles):
        left = 4

        def collect(self) -> GreedyCycle:
            Failing.left -= 1
            if Failing.left == 0:
                raise RuntimeError("the device is gone")
            return super().collect()

    session = with_depths(demo, [2], Failing).session()
    with pytest.raises(RuntimeError, match="gone"):
        session.generate(TEXTS[0], max_new_tokens=40)
    session.generate(max_new_tokens=40)
    prompt = demo.encode(TEXTS[0])
    made = list(session.tokens[len(prompt) :])
    assert made == demo.generate(TEXTS[0], max_new_tokens=len(made)).tokens


def test_a_head_of_nonsense_is_given_up(demo: Any) -> None:
    class Nonsense(StepwiseCycles):
        def collect(self) -> GreedyCycle:
            cycle = super().collect()
            return GreedyCycle((*cycle.drafted[:-1], -1), min(cycle.accepted, len(cycle.drafted) - 1), cycle.emitted)

    session = with_depths(demo, [2], Nonsense).session()
    result = session.generate(TEXTS[0], max_new_tokens=40)
    assert result.tokens == demo.generate(TEXTS[0], max_new_tokens=40).tokens
    assert "not finite" in result.stats.inactive_reason


def test_doctor_tells_cycles_that_differ_from_single_passes(demo: Any) -> None:
    class KeepsARowTooFew(StepwiseCycles):
        def _settle(self) -> None:
            if len(self._emitted) > 1:
                self._emitted = self._emitted[:-1]
            super()._settle()

    def cycle_finding(target: Any) -> Any:
        return [finding for finding in PassProbe(target, context=12).findings() if finding.kind == "cycle"]

    assert cycle_finding(demo.target) == []  # it offers none
    (right,) = cycle_finding(OnDevice(demo.target))
    (wrong,) = cycle_finding(OnDevice(demo.target, KeepsARowTooFew))
    assert not right.differing
    assert wrong.differing

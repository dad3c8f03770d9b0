"""A head's state in a session's life: any history leaves the bits of a fresh start, and every measure works with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

import specdec
from specdec.decoding import cycle as cycle_module
from specdec.decoding.parts import DepthPart
from specdec.drafters.heads.drafter import HeadConfig
from specdec.drafters.heads.plugin import specdec_drafters
from specdec.measuring import bench as bench_module
from specdec.measuring.acceptance import measure_acceptance
from specdec.measuring.bench import compare
from specdec.policies.adaptive import AdaptiveConfig, Learnt, specdec_depth_policies
from specdec.records.cost_table import CostTable
from specdec.testing import Subject, as_subject
from specdec.testing.scripted_session import CAPACITY, ScriptedSession, drafts_equal
from tests import tiny
from tests.decoding.test_sessions import Told, operations
from tests.drafters.composed import composed, load_base, write_folders
from tests.measuring.test_acceptance import prompts
from tests.selection import examples

SPECS = {spec.name: spec for spec in specdec_drafters()}
KINDS = tuple(name for name in SPECS if name != "head")
CHEAP = CostTable(verify={1: 1.0, 8: 1.0}, draft={0: 0.0, 6: 1e-3}, commit=0.0)
DEAR = CostTable(verify={1: 1.0, 8: 9.0}, draft={0: 0.0, 6: 9.0}, commit=0.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Qwen3.5 with recurrent layers, without a drafter."""
    return load_base(write_folders(tmp_path_factory.mktemp("heads")))


@pytest.fixture(scope="module")
def with_head(base: Any) -> Callable[..., Any]:
    made: dict[str, Any] = {}

    def make(kind: str, **options: Any) -> Any:
        key = f"{kind}{options}"
        if key not in made:
            made[key] = composed(base, {"name": kind, "model": "random", **options}, (3, 0, 5))
        return made[key]

    return make


steps = st.one_of(
    st.tuples(st.just("cycle"), st.integers(0, 8), st.integers(0, 8), st.integers(0, 276)),
    st.tuples(st.just("cycle"), st.integers(1, 8), st.integers(1, 8), st.integers(0, 276)),
    st.tuples(st.just("rewind"), st.floats(0.2, 1.0), st.just(0), st.just(0)),
    st.tuples(st.just("feed"), st.lists(st.integers(0, 276), min_size=1, max_size=12), st.integers(1, 5), st.just(0)),
    st.tuples(st.just("restore"), st.booleans(), st.just(0), st.just(0)),
)


WHOLE_LIFE: list[tuple[str, Any, Any, Any]] = [
    ("cycle", 8, 5, 9),
    ("cycle", 6, 0, 9),
    ("restore", True, 0, 0),
    ("cycle", 4, 4, 9),
    ("rewind", 0.6, 0, 0),
    ("cycle", 3, 2, 9),
    ("restore", False, 0, 0),
    ("cycle", 3, 2, 9),
    ("feed", [7, 8, 9], 2, 0),
    ("cycle", 5, 1, 9),
]


SLOW_KINDS = [pytest.param(kind, marks=[pytest.mark.sample] * (kind == "eagle3")) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_after_any_history_the_drafts_and_the_targets_bits_are_those_of_a_fresh_start(
    kind: str, make_target: Callable[..., Any]
) -> None:
    """Chunks, accepted and rejected rows, rewinds, saved and lost states leave what one chunk of the tokens leaves.

    The native kernels promise it; the torch reference sums a prompt's recurrence in another order than single rows.
    """
    if "native" not in tiny.kernels_available():
        pytest.skip("the native kernels do not compile on this machine")
    target = make_target("qwen3_5", kernels="native", max_positions=CAPACITY)
    subject: Any = as_subject(Subject.DRAFTER, SPECS[kind], HeadConfig(model="random"))
    subject = attrs.evolve(subject, needs=subject.prepare(target).around.needs)
    strict = target
    seen: dict[str, int] = dict.fromkeys(("accepted", "drafted", "rewind", "restore"), 0)

    @examples(30)
    @example(prompt=[1, 2, 3, 4, 5], chunk=2, story=WHOLE_LIFE)
    @given(
        prompt=st.lists(st.integers(0, 276), min_size=2, max_size=20),
        chunk=st.integers(1, 9),
        story=st.lists(steps, min_size=1, max_size=6),
    )
    def check(prompt: list[int], chunk: int, story: list[tuple[str, Any, Any, Any]]) -> None:
        played = ScriptedSession.start(subject, model=strict, sealed=True)
        played.feed(prompt, chunk)
        for what, first, second, third in story:
            if what == "cycle":
                draft = played.cycle(first, second, third)
                seen["drafted"] += len(draft.tokens)
                seen["accepted"] += min(second, len(draft.tokens))
            elif what == "feed":
                played.feed(first, second)
            elif what == "rewind" and len(played.tokens) > 2:
                played.rewind(max(2, int(first * len(played.tokens))))
                played.feed([5, 6])
                seen["rewind"] += 1
            elif what == "restore":
                kept = played.keep()
                played = played.restored(kept, kept.drafter if first else None)
                seen["restore"] += 1
        fresh = played.fresh()
        assert drafts_equal(played.propose(6), fresh.propose(6))
        one, other = (strict.snapshot(session.state) for session in (played, fresh))
        assert one.arrays.keys() == other.arrays.keys()
        for name, array in one.arrays.items():
            assert np.array_equal(array.float().numpy(), other.arrays[name].float().numpy(), equal_nan=True), name

    check()
    assert all(seen.values()), seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.sample] * (kind == "eagle3")) for kind in KINDS]
)
@examples(12)
@given(
    story=st.lists(operations, min_size=3, max_size=8),
    sampling=st.sampled_from([{}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.1, "top_k": 9, "seed": 4}]),
)
def test_any_story_gives_the_tokens_of_plain_decoding_and_a_restored_head_drafts_as_before(
    base: Any,
    with_head: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    story: list[tuple[str, Any]],
    sampling: dict[str, Any],
) -> None:
    file = tmp_path_factory.getbasetemp() / f"{kind}.session"
    lm = with_head(kind)
    restored, unbroken, truth = (
        Told(one, stops=stops, file=file, sampling=sampling) for one, stops in ((lm, True), (lm, False), (base, False))
    )
    for operation, argument in [("feed", [50, 51, 52]), *story, ("feed", [60, 61]), ("generate", 6)]:
        length = len(truth.session.tokens)
        if (length > 150 and operation != "rewind") or (operation == "generate" and length == 0):
            continue
        told = [one.do(operation, argument) for one in (restored, unbroken, truth)]
        assert told[0] == told[1] == told[2], operation
        assert restored.session.stats == unbroken.session.stats
    assert restored.session.stats.offered
    event(f"accepted something: {any(restored.session.stats.accepted)}")


def test_a_head_that_reads_other_states_builds_its_state_again(with_head: Callable[..., Any], tmp_path: Any) -> None:
    """Keys of the boundaries of one convention are of no use to the other."""
    for written, read, same in (("auto", "auto", True), ("auto", "boundary", True), ("boundary", "layer", False)):
        session = with_head("dflash", layer_ids=written).session()
        session.generate([50, 51, 52, 53], max_new_tokens=4, ignore_eos=True)
        session.save(tmp_path / "session")
        other = with_head("dflash", layer_ids=read).session()
        other.load(tmp_path / "session")
        report = other.generate(max_new_tokens=4, ignore_eos=True).stats.draft
        assert ("rebuilt" in report, bool(report.get("replayed"))) == (not same, not same)
        if not same:
            assert "saved with another states" in report["rebuilt"]


# --- adaptive depth, accept, bench: costs are given, no clock is read -------------------------------------------------


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock of a cycle finds one microsecond more."""
    count = itertools.count()
    monkeypatch.setattr(cycle_module, "perf_counter", lambda: next(count) * 1e-6)


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize(("costs", "drafts"), [(CHEAP, True), (DEAR, False)], ids=["cheap", "dear"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adaptive_depth_follows_the_costs_and_the_output_is_that_of_plain_decoding(
    kind: str, costs: CostTable, drafts: bool, base: Any, with_head: Callable[..., Any]
) -> None:
    spec = specdec_depth_policies()[0]
    adaptive = DepthPart(spec=spec, config=AdaptiveConfig(), shared=Learnt(costs))
    lm = attrs.evolve(with_head(kind), depth=adaptive)
    got = lm.generate([50, 51, 52, 53], max_new_tokens=40, ignore_eos=True)
    assert got.tokens == base.generate([50, 51, 52, 53], max_new_tokens=40, ignore_eos=True).tokens
    drafted = got.stats.draft_lengths
    assert (drafted.get(0, 0) < 30) == drafts, drafted  # the adaptive policy tries a depth now and then
    assert not got.stats.faults


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("kind", KINDS)
def test_accept_and_bench_count_a_heads_drafts(
    kind: str, with_head: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "measure_costs", lambda lm: CHEAP)
    lm = with_head(kind)
    report = measure_acceptance(lm, prompts("one"), depth=4, costs=CHEAP, max_new_tokens=12)
    offered = [position.offered for position in report.classes[0].positions]
    assert offered == sorted(offered, reverse=True)
    assert offered[0] > 0
    bench = compare(lm, prompts("one"), max_new_tokens=12)
    assert bench.equal
    assert not bench.broken_promise
    assert bench.classes[0].offered[0] > 0


def test_the_trained_head_of_the_embedded_model_is_accepted_often() -> None:
    """``drafter.name = "eagle3"`` runs at once, and its first drafts are right more often than not."""
    lm = specdec.load("demo", drafter="eagle3", depth=4)
    report = measure_acceptance(lm, prompts("one"), depth=4, costs=CHEAP, max_new_tokens=48)
    first = report.classes[0].positions[0]
    assert first.accepted > 0.3 * first.offered

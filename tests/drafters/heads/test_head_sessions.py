"""A head's state in a session's life: any history leaves the bits of a fresh start, and every measure works with it."""

import functools

import attrs
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import specdec
from specdec.drafters.heads import drafter
from specdec.drafters.heads.drafter import HeadConfig
from specdec.drafters.heads.plugin import specdec_drafters
from specdec.testing import Subject, as_subject
from specdec.testing.scripted_session import CAPACITY, ScriptedSession, drafts_equal
from tests import tiny
from tests.drafters.composed import composed, load_base, write_folders
from tests.selection import cases, examples

SPECS = {spec.name: spec for spec in specdec_drafters()}
KINDS = tuple(name for name in SPECS if name != "head")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Qwen3.5 with recurrent layers, without a drafter."""
    return load_base(write_folders(tmp_path_factory.mktemp("heads")))


@pytest.fixture(scope="module")
def with_head(base):
    return functools.cache(
        lambda kind, **options: composed(base, {"name": kind, "model": "random", **options}, (3, 0, 5))
    )


steps = st.one_of(
    st.tuples(st.just("cycle"), st.integers(0, 8), st.integers(0, 8), st.integers(0, 276)),
    st.tuples(st.just("cycle"), st.integers(1, 8), st.integers(1, 8), st.integers(0, 276)),
    st.tuples(st.just("pause"), st.integers(1, 12), st.just(0), st.integers(0, 276)),
    st.tuples(st.just("rewind"), st.floats(0.2, 1.0), st.just(0), st.just(0)),
    st.tuples(st.just("feed"), st.lists(st.integers(0, 276), min_size=1, max_size=12), st.integers(1, 5), st.just(0)),
    st.tuples(st.just("restore"), st.booleans(), st.just(0), st.just(0)),
)


WHOLE_LIFE = [
    ("cycle", 8, 5, 9),
    ("cycle", 6, 0, 9),
    ("pause", 12, 0, 9),
    ("restore", True, 0, 0),
    ("cycle", 4, 4, 9),
    ("rewind", 0.6, 0, 0),
    ("cycle", 3, 2, 9),
    ("restore", False, 0, 0),
    ("cycle", 3, 2, 9),
    ("feed", [7, 8, 9], 2, 0),
    ("cycle", 5, 1, 9),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", cases(KINDS, sample=["eagle3"]))
def test_after_any_history_the_drafts_and_the_targets_bits_are_those_of_a_fresh_start(kind, make_target, monkeypatch):
    """Chunks, accepted and rejected rows, pauses, rewinds, saved and lost states leave what one chunk of tokens leaves.

    The native kernels promise it; the torch reference sums a prompt's recurrence in another order than single rows.
    """
    if "native" not in tiny.kernels_available():
        pytest.skip("the native kernels do not compile on this machine")
    for limit, rows in {"IDLE_ROWS": 10, "WAITING_ROWS": 4, "FEED_ROWS": 3}.items():
        monkeypatch.setattr(drafter, limit, rows)
    target = make_target("qwen3_5", kernels="native", max_positions=CAPACITY)
    subject = as_subject(Subject.DRAFTER, SPECS[kind], HeadConfig(model="random"))
    subject = attrs.evolve(subject, needs=subject.prepare(target).around.needs)
    seen = dict.fromkeys(("accepted", "drafted", "rewind", "restore"), 0)

    @examples(30)
    @example(prompt=[1, 2, 3, 4, 5], chunk=2, story=WHOLE_LIFE)
    @given(
        prompt=st.lists(st.integers(0, 276), min_size=2, max_size=20),
        chunk=st.integers(1, 9),
        story=st.lists(steps, min_size=1, max_size=6),
    )
    def check(prompt, chunk, story):
        played = ScriptedSession.start(subject, model=target)
        played.feed(prompt, chunk)
        for what, first, second, third in story:
            if what == "pause":  # shorter and longer than what may wait
                for _ in range(first):
                    played.cycle(0, 0, third)
            elif what == "cycle":
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
        one, other = (target.snapshot(session.state) for session in (played, fresh))
        assert one.arrays.keys() == other.arrays.keys()
        for name, array in one.arrays.items():
            assert np.array_equal(array.float().numpy(), other.arrays[name].float().numpy(), equal_nan=True), name

    check()
    assert all(seen.values()), seen


def test_a_head_that_reads_other_states_builds_its_state_again(with_head, tmp_path):
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


def test_the_trained_head_of_the_embedded_model_is_accepted_often():
    """``drafter.name = "eagle3"`` runs at once, and its first drafts are right more often than not."""
    lm = specdec.load("demo", drafter="eagle3", depth=4)
    stats = lm.generate("def mean(values):", max_new_tokens=48).stats
    assert stats.accepted[0] > 0.3 * stats.offered[0]

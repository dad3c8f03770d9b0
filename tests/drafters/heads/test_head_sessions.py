"""What a head keeps in a session's file, and the trained head of the embedded model."""

import functools

import pytest

import specdec
from tests.drafters.composed import composed, load_base, write_folders


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Qwen3.5 with recurrent layers, without a drafter."""
    return load_base(write_folders(tmp_path_factory.mktemp("heads")))


def test_a_head_that_reads_other_states_builds_its_state_again(base, tmp_path):
    """Keys of the boundaries of one convention are of no use to the other."""
    reading = functools.cache(
        lambda ids: composed(base, {"name": "dflash", "model": "random", "layer_ids": ids}, (3, 0, 5))
    )
    for written, read, same in (("auto", "auto", True), ("auto", "boundary", True), ("boundary", "layer", False)):
        session = reading(written).session()
        session.generate([50, 51, 52, 53], max_new_tokens=4, ignore_eos=True)
        session.save(tmp_path / "session")
        other = reading(read).session()
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


@pytest.mark.parametrize("saved", [False, True])
def test_a_restored_head_goes_on_drafting(tmp_path, saved):
    """Its states come from a file or a fork, those of the next prompt, of more rows than a cycle has, from passes."""
    lm = specdec.load("demo", drafter="eagle3", depth=3)
    session = lm.session()
    session.generate([5, 6, 7], max_new_tokens=5, ignore_eos=True)
    other = session.fork()
    if saved:
        session.save(tmp_path / "session")
        other = lm.session()
        other.load(tmp_path / "session")
    ours, theirs = (one.generate(range(20, 60), max_new_tokens=12, ignore_eos=True).stats for one in (other, session))
    assert ours.speculation()["active"]
    assert (ours.offered, ours.accepted) == (theirs.offered, theirs.accepted)


@pytest.mark.parametrize("kept", [None, 10])
def test_a_head_that_was_off_drafts_as_if_it_had_not_been(kept):
    """Also where a rewind falls among the states that it has not read yet."""
    lm = specdec.load("demo", drafter="eagle3", depth=3)
    later = []
    for depth in (0, 3):
        session = lm.session()
        session.generate(range(20, 30), max_new_tokens=100, ignore_eos=True, depth=depth)
        if kept is not None:
            session.rewind(kept)
            session.generate(range(60, 65), max_new_tokens=3, ignore_eos=True, depth=depth)
        stats = session.generate([70], max_new_tokens=20, ignore_eos=True).stats
        later.append((stats.offered, stats.accepted))
    assert later[0] == later[1]

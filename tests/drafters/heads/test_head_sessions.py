"""What a head keeps in a session's file, and the trained head of the embedded model."""

import functools

import pytest

import specdec
from specdec.drafters.heads.plugin import specdec_drafters
from tests.drafters.composed import composed, load_base, write_folders

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

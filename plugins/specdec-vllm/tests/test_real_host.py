"""The same with vLLM itself: plain output, the engine's drafts, and no fault of a drafter that ends it.

One vLLM of each kind is loaded in this process, and the speculating one gets another ``Proposer`` for each test.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
from faulty import FAULTS
from specdec.checkpoints import locate
from specdec.hosting import read_trace, recorded_drafter, replay
from specdec.registry import registry

from specdec_vllm import Proposer

pytest.importorskip("vllm", reason="vLLM is not installed (the extra `host`, or `cpu`)", exc_type=ImportError)

pytestmark = pytest.mark.slow

VOCAB = 4096  # of the embedded model, which drafts here
DEPTH = 6
LENGTH = 256  # tokens of a text, at most
SEEDS = 16  # random batches per fault: over 200 with the 13 faults
DRAFTERS = {
    "ngram": "{ name = 'ngram', min_order = 1 }",
    "suffix": "suffix",
    "first_of": "{ name = 'first_of', drafters = [{ name = 'suffix', min_match = 4 }, { name = 'ngram' }] }",
    "echo": "{ name = 'echo', period = 2 }",
    "draft_model": "{ name = 'draft_model', model = 'demo' }",
}


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    """The installed version, not that of the other tests."""
    for name in ("SPECDEC_DRAFTER", "SPECDEC_CONFIG", "SPECDEC_TRACE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _tutorial(_drafters, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    registry().register(__import__("first_drafter"))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr("specdec.hosting.drafting.LOOK_EVERY", 10**9)  # whether drafting pays is a matter of time


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama with random weights and the embedded model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,  # its texts come to repeat themselves
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((locate("demo") / name).read_bytes())
    return str(folder)


def loaded(model: str, speculation: dict[str, object] | None):
    from vllm import LLM

    return LLM(
        model,
        speculative_config=speculation,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=LENGTH,
        max_num_seqs=4,
        max_num_batched_tokens=64,  # longer prompts are read in chunks
        num_gpu_blocks_override=20,  # too few for four long texts: some are preempted
        block_size=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
    )


@pytest.fixture(scope="module")
def hosts(model):
    """vLLM plain and speculating, both in this process."""
    named = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "SPECDEC_DRAFTER": "ngram",
    }
    with pytest.MonkeyPatch.context() as patched:
        for name, value in named.items():
            patched.setenv(name, value)
        speculation = {"method": "custom_class", "model": "specdec_vllm.Proposer", "num_speculative_tokens": DEPTH}
        yield loaded(model, None), loaded(model, speculation)
    gc.collect()


def with_drafter(llm, drafter: str, monkeypatch, trace: Path | None = None) -> Proposer:
    """Give a speculating vLLM another proposer."""
    monkeypatch.setenv("SPECDEC_DRAFTER", drafter)
    if trace is not None:
        monkeypatch.setenv("SPECDEC_TRACE", str(trace))
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert isinstance(runner.drafter, Proposer)
    runner.drafter = Proposer(runner.vllm_config)
    return runner.drafter


def texts(llm, prompts: list[list[int]], count: int) -> list[list[int]]:
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": one} for one in prompts], settings, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in answers]


def random_prompts(seed: int) -> list[list[int]]:
    """Prompts that repeat themselves or do not, short and in several chunks; some are equal."""
    rng = random.Random(seed)
    made = []
    for _ in range(rng.randrange(1, 7)):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))]
        made.append((own * 9)[: rng.randrange(1, 150)])
    return [*made, made[0]]


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_output_is_plain_and_drafts_are_those_of_the_engine(hosts, tmp_path, monkeypatch, name):
    plain, speculating = hosts
    made = with_drafter(speculating, DRAFTERS[name], monkeypatch, tmp_path / "trace")
    for seed in range(4):
        prompts = random_prompts(seed)
        assert texts(speculating, prompts, 64) == texts(plain, prompts, 64)
    made.hosted.close()
    report = made.hosted.report()
    assert (report["off"], report["failed"], report["faults"]) == ("", {}, {})
    assert report["drafts"] > 0
    requests = read_trace(tmp_path / "trace").requests
    tokenizer = None
    if name == "draft_model":
        import specdec

        tokenizer = specdec.load("demo").tokenizer
    for request in requests:
        assert replay(request, recorded_drafter(request.drafter, request.vocab_size, tokenizer)) == []


def test_drafts_of_repeating_text_are_accepted(hosts, monkeypatch):
    made = with_drafter(hosts[1], "suffix", monkeypatch)
    texts(hosts[1], [[5, 60, 61, 62] * 4], 200)
    assert sum(made.hosted.report()["accepted"]) > 10


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_a_drafter_reaches_the_host(hosts, monkeypatch, fault):
    plain, speculating = hosts
    for seed in range(SEEDS):
        with_drafter(speculating, f"'{fault}'", monkeypatch)
        prompts = random_prompts(1000 + seed)
        assert texts(speculating, prompts, 24) == texts(plain, prompts, 24)


def test_a_cancelled_request_leaves_the_others_alone(hosts, monkeypatch):
    from vllm import SamplingParams

    plain, speculating = hosts
    with_drafter(speculating, "suffix", monkeypatch)
    prompts = [[5, 60, 61, 62] * 20, list(range(100, 200)), [9, 8] * 40]
    expected = texts(plain, prompts, 60)
    engine, got = speculating.llm_engine, {}
    settings = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"request {number}", {"prompt_token_ids": prompt}, settings)
    aborted = False
    while engine.has_unfinished_requests():
        for output in engine.step():
            got[output.request_id] = list(output.outputs[0].token_ids)
        if not aborted and len(got.get("request 1", ())) >= 5:
            engine.abort_request(["request 1"])
            aborted = True
    assert (got["request 0"], got["request 2"]) == (expected[0], expected[2])
    assert 5 <= len(got["request 1"]) < 60
    assert got["request 1"] == expected[1][: len(got["request 1"])]

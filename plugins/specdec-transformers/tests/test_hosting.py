"""specdec's drafters in transformers, both ways: the output is the plain one, and drafts are those of the engine."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from specdec.contract import Context, Draft, Drafter, DrafterSpec, Needs
from specdec.errors import ConfigError, SpecdecError, UnsupportedError
from specdec.hookspecs import hookimpl
from specdec.hosting import read_trace, replay
from specdec.registry import registry
from transformers import AutoModelForCausalLM, GenerationConfig

from specdec_transformers import candidates, generate

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
NGRAM = {"name": "ngram", "min_order": 1}
CHAIN = {"name": "first_of", "drafters": [{"name": "ngram", "min_order": 3}, {"name": "follows hidden states"}]}


class FollowsHiddenStates(Drafter):
    """Drafts from a hash of the hidden states, and keeps them: by position, at boundary 1 and after the final norm."""

    made: list[FollowsHiddenStates] = []

    def __init__(self, config, env) -> None:
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []
        self.made.append(self)

    def _take(self, output, rows) -> None:
        inner, final = output.boundaries[1].rows(), output.hidden.rows()
        assert len(inner) == len(final) == output.rows
        self.rows += list(zip(inner[:rows], final[:rows], strict=True))

    def prefill(self, context, output) -> None:
        self._take(output, output.rows)
        assert len(self.rows) == len(context)

    def observe(self, verdict, output, context) -> None:
        self._take(output, verdict.accepted + 1)
        assert len(self.rows) == len(context) - 1

    def rewind(self, length: int) -> None:
        del self.rows[length:]

    def propose(self, context: Context, depth: int) -> Draft:
        assert len(self.rows) == len(context) - 1
        return Draft((context[-1], int(abs(self.rows[-1][1].sum()) * 10) % 61)[:depth])


class Raises(Drafter):
    def __init__(self, config, env) -> None:
        pass

    def propose(self, context: Context, depth: int) -> Draft:
        raise RuntimeError("the table is empty")


class OutOfRange(Raises):
    def propose(self, context: Context, depth: int) -> Draft:
        return Draft((context[-1], 61, -1, *range(20)))


class Plugin:
    @hookimpl
    def specdec_drafters(self):
        needs = Needs(boundaries=(1,), final_hidden=True)
        return [
            DrafterSpec(name="follows hidden states", factory=FollowsHiddenStates, needs=needs),
            DrafterSpec(name="last layer", factory=FollowsHiddenStates, needs=Needs(boundaries=(3,))),
            DrafterSpec(name="raises", factory=Raises),
            DrafterSpec(name="out of range", factory=OutOfRange),
        ]


@pytest.fixture(scope="module", autouse=True)
def _drafters():
    if not any(entry.spec.name == "raises" for entry in registry().entries()):
        registry().register(Plugin(), "hosted drafters")


@pytest.fixture(scope="module")
def model(checkpoint):
    known = {}

    def made(name: str):
        if name not in known:
            known[name] = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32).eval()
        return known[name]

    return made


def settings(**other):
    return {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2} | other


def plain(network, prompt=PROMPT, **other):
    return network.generate(torch.tensor([prompt]), **settings(**other))[0].tolist()


DRAFTERS = [NGRAM, CHAIN, {"name": "follows hidden states"}, {"name": "raises"}, {"name": "out of range"}]
HIDDEN = DRAFTERS[1:3]
WITHOUT_LAYERS = ["gpt2"]
CUT = ["llama", "gpt2", "mistral", "gemma3_text", "deepseek_v3"]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda one: one["name"])
@pytest.mark.parametrize("name", CUT)
def test_assisted_generation_gives_the_plain_output(model, name, drafter):
    network = model(name)
    with candidates(drafter, depth=4).on(network) as assisted:
        for prompt in (PROMPT, [9], PROMPT[:3]):
            ids = torch.tensor([prompt])
            assert network.generate(ids, **settings())[0].tolist() == plain_of(network, prompt)
    report = assisted.report()
    assert (drafter["name"] == "raises") == bool(report["failed"])
    assert (drafter["name"] == "out of range") == bool(report["faults"])
    assert "_get_candidate_generator" not in network.__dict__
    assert network.generation_config.prompt_lookup_num_tokens is None


def plain_of(network, prompt):
    before = network.__dict__.pop("_get_candidate_generator")
    asked, network.generation_config.prompt_lookup_num_tokens = (
        network.generation_config.prompt_lookup_num_tokens,
        None,
    )
    try:
        return plain(network, prompt)
    finally:
        network.__dict__["_get_candidate_generator"] = before
        network.generation_config.prompt_lookup_num_tokens = asked


def test_a_drafter_gets_the_hidden_states_of_every_committed_row(model):
    network = model("llama")
    FollowsHiddenStates.made.clear()
    with candidates("follows hidden states", depth=3).on(network):
        tokens = network.generate(torch.tensor([PROMPT]), **settings())[0]
    rows = max((one.rows for one in FollowsHiddenStates.made), key=len)
    with torch.no_grad():
        states = network(tokens[None], output_hidden_states=True).hidden_states
    assert len(rows) >= len(tokens) - 6  # the last pass is not reported
    for position, (inner, final) in enumerate(rows):
        np.testing.assert_allclose(inner, states[1][0, position], atol=2e-4)
        np.testing.assert_allclose(final, states[-1][0, position], atol=2e-4)


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda one: one["name"])
@pytest.mark.parametrize("name", [*CUT, "qwen3_next", "mamba"])
def test_our_loop_gives_the_plain_output(model, name, drafter):
    network = model(name)
    if name in WITHOUT_LAYERS and drafter in HIDDEN:
        pytest.skip("specdec's target for this model gives no hidden states between layers")
    for prompt in (PROMPT, [9]):
        report = {}
        ids = torch.tensor([prompt])
        out = network.generate(
            ids, custom_generate=generate, drafter=drafter, verifier="strict", depth=3, report=report, **settings()
        )
        assert out[0].tolist() == plain(network, prompt)
        assert report["tokens"] == out.shape[1] - len(prompt)
        assert report["guarantee"] == "exact"
        assert (drafter["name"] == "raises") == ("the table is empty" in report["speculation"]["reason"])


def test_drafts_in_transformers_are_those_of_the_engine(model, tmp_path):
    network = model("llama")
    with candidates("ngram", min_order=1, depth=4, trace=tmp_path / "assisted.jsonl").on(network):
        for prompt in (PROMPT, [*PROMPT, 3]):
            network.generate(torch.tensor([prompt]), **settings())
    network.generate(
        torch.tensor([PROMPT]), custom_generate=generate, drafter=NGRAM, trace=tmp_path / "own.jsonl", **settings()
    )
    for name, requests in (("assisted", 2), ("own", 1)):
        trace = read_trace(tmp_path / f"{name}.jsonl")
        assert len(trace.requests) == requests
        for request in trace.requests:
            assert sum(len(one.drafted) for one in request.rounds) > 0
            assert replay(request) == []


def test_processors_and_stopping_criteria_are_those_of_transformers(model):
    network = model("llama")
    other = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "eos_token_id": [2, 11, 12, 13, 14, 15]}
    expected = plain(network, **other)
    ids = torch.tensor([PROMPT])
    assert network.generate(ids, custom_generate=generate, drafter=NGRAM, **settings(**other))[0].tolist() == expected
    full = network.generate(
        ids, custom_generate=generate, drafter=NGRAM, return_dict_in_generate=True, **settings(**other)
    )
    assert full.sequences[0].tolist() == expected


def test_sampling_repeats_under_a_seed_and_does_not_depend_on_drafts(model):
    network = model("llama")
    ids = torch.tensor([PROMPT])
    found = []
    for drafter, depth in ((NGRAM, 4), (NGRAM, 2), ("none", 0)):
        torch.manual_seed(5)
        out = network.generate(
            ids, custom_generate=generate, drafter=drafter, depth=depth, **settings(do_sample=True, top_k=20)
        )
        found.append(out[0].tolist())
    assert found[0] == found[1] == found[2]
    other = network.generate(ids, custom_generate=generate, drafter="none", **settings(do_sample=True, top_k=20))
    assert other[0].tolist() != found[0]


# --- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "batch": (lambda m: {"ids": [PROMPT, PROMPT]}, "takes a batch of 1, got 2 rows"),
    "padding": (lambda m: {"attention_mask": torch.tensor([[0] + [1] * 9])}, "the prompt is padded"),
    "depth": (lambda m: {"depth": -1}, "depth is how many tokens to draft"),
    "unknown": (lambda m: {"drafter": "suffiks"}, "no drafter is called 'suffiks'"),
    "options": (lambda m: {"drafter": {"name": "ngram", "ordr": 2}}, "drafter.ordr"),
    "mtp": (lambda m: {"drafter": "mtp"}, "needs an MTP head"),
    "beams": (lambda m: {"num_beams": 2}, "no beams"),
    "scores": (lambda m: {"return_dict_in_generate": True, "output_scores": True}, "does not give output_scores"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_our_loop_cannot_do_is_refused_in_a_sentence(model, case):
    make, said = REFUSED[case]
    network = model("llama")
    given = make(network)
    ids = torch.tensor(given.pop("ids", [PROMPT]))
    with pytest.raises(SpecdecError, match=re.escape(said)):
        network.generate(ids, custom_generate=generate, **settings(**given))


def test_what_assisted_generation_cannot_do_is_refused_in_a_sentence(model):
    with pytest.raises(UnsupportedError, match="keeps a recurrent state"), candidates("ngram").on(model("mamba")):
        pass
    with (
        pytest.raises(UnsupportedError, match="cannot run in transformers: it needs an MTP head"),
        candidates("mtp").on(model("llama")),
    ):
        pass
    with (
        pytest.raises(UnsupportedError, match="layer boundary 3, and this target has boundaries 0 to 2"),
        candidates("last layer").on(model("llama")),
    ):
        pass
    with pytest.raises(ConfigError, match="ordr"), candidates("ngram", ordr=3).on(model("llama")):
        pass


def test_another_version_of_transformers_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")
    with pytest.raises(UnsupportedError, match=r"transformers 4.57.1 is not supported"):
        candidates("ngram")


def test_a_drafter_that_generate_did_not_use_is_logged(model, caplog):
    with candidates("ngram").on(model("llama")):
        pass
    assert any("drafter_unused" in record.getMessage() for record in caplog.records)


def test_settings_of_ones_own_still_select_assisted_generation(model):
    network = model("llama")
    with candidates("ngram", min_order=1).on(network) as assisted:
        network.generate(torch.tensor([PROMPT]), generation_config=GenerationConfig(**settings()))
    assert assisted.report()["drafts"]

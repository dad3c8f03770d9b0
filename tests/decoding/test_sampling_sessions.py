"""Sampling through sessions: the settings and the seed decide the tokens, and nothing else does.

Also what hangs on each token: its log-probabilities come from the row that decided it, and an end inside an accepted
block cuts them with the tokens, the text and the state.
"""

from unittest import mock

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from specdec.config import Choice
from specdec.contract import DrafterSpec
from specdec.decoding import sequence
from specdec.registry.parts import DepthPart, DrafterPart
from specdec.testing.engine_run import ScriptedDrafter
from tests import tiny
from tests.decoding.test_sessions import CODE, load, variant
from tests.selection import cases

__all__ = ["load"]  # a fixture

VOCAB = 277
PROMPT = [40, 50, 60, 70, 40, 50, 60]


def knowing(lm, tokens, depth, wrong_every=10**9):
    """``lm`` with a drafter that knows ``tokens``, prompt included, and is wrong every ``wrong_every`` positions."""
    known = [token if at % wrong_every else (token + 1) % VOCAB for at, token in enumerate(tokens, 1)] + [0] * 99
    drafter = ScriptedDrafter(lambda history, number: known[len(history)])
    spec = DrafterSpec(name="known", factory=lambda config, env: drafter)
    return attrs.evolve(lm, drafter=DrafterPart(spec=spec), depth=DepthPart.of(Choice("fixed", {"depth": depth})))


# --- the same output -------------------------------------------------------------------------------------------------

ids = st.integers(0, VOCAB - 1)
samplings = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]), "seed": st.integers(0, 2**63 - 1)},
    optional={
        "top_k": st.sampled_from([1, 2, 20]),
        "top_p": st.sampled_from([0.1, 0.9]),
        "min_p": st.sampled_from([0.05, 0.5]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.4]),
        "logit_bias": st.dictionaries(ids, st.floats(-20, 20), max_size=3),
        "banned": st.lists(ids, max_size=5, unique=True).map(tuple),
        "min_new_tokens": st.integers(0, 9),
        "ignore_eos": st.booleans(),
    },
)
drafters = st.sampled_from(["mtp", "ngram", "known", "nearly known"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(
    sampling=samplings,
    drafter=drafters,
    depth=st.integers(0, 7),
    chunk=st.sampled_from([1, 3, 5, 17, 512]),
    restored=st.booleans(),
    lengths=st.tuples(st.integers(1, 10), st.integers(1, 14)),
)
def test_strict_output_depends_on_target_prompt_settings_and_seed_alone(
    dtype, load, tmp_path_factory, sampling, drafter, depth, chunk, restored, lengths
):
    """Not on drafter, depth, chunks of the prompt, or a save and restore in the middle."""
    base = load("qwen3_5", dtype)
    sampling |= {"min_new_tokens": min(sampling.get("min_new_tokens", 0), *lengths)}
    prompts = [40 + i % 13 for i in range(30)], PROMPT
    plain = variant(base).session()
    truth = [plain.generate(p, max_new_tokens=n, **sampling) for p, n in zip(prompts, lengths, strict=True)]
    lm = variant(base, drafter if "known" not in drafter else "none", depth)
    if "known" in drafter:
        lm = knowing(lm, list(plain.tokens), depth, 4 if drafter == "nearly known" else 10**9)
    session = lm.session()
    with mock.patch.object(sequence, "PREFILL_CHUNK", chunk):
        first = session.generate(prompts[0], max_new_tokens=lengths[0], **sampling)
        if restored:
            file = tmp_path_factory.getbasetemp() / "sampling.session"
            session.save(file)
            session = lm.session()
            session.load(file)
        second = session.generate(prompts[1], max_new_tokens=lengths[1], **sampling)
    for ours, theirs in zip((first, second), truth, strict=True):
        assert (ours.tokens, ours.text, ours.finish_reason) == (theirs.tokens, theirs.text, theirs.finish_reason)
        assert (ours.guarantee, ours.deviation.count) == ("exact", 0)
    assert session.tokens == plain.tokens
    event(f"accepted something: {any(session.stats.accepted)}")


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
@given(temperature=st.sampled_from([0.0, 1.2]), top=st.integers(0, 5), depth=st.integers(1, 6), bias=st.booleans())
def test_logprobs_are_those_of_the_row_that_decided_the_token(family, load, temperature, top, depth, bias):
    base = load(family)
    settings = {"temperature": temperature, "logprobs": top, "ignore_eos": True, "max_new_tokens": 20, "seed": 5}
    if bias:
        settings |= {"logit_bias": {44: 6.0}, "repetition_penalty": 1.2}
    plain = variant(base).generate(PROMPT, **settings)
    run = knowing(variant(base), [*PROMPT, *plain.tokens], depth, wrong_every=5).generate(PROMPT, **settings)
    assert any(run.stats.accepted)
    assert run.logprobs == plain.logprobs
    assert run.logprobs is not None

    state = base.target.new_state(64)
    base.target.prefill(state, PROMPT[:-1])
    for before, entry in zip([PROMPT[-1], *run.tokens], run.logprobs, strict=False):
        row = base.target.decode(state, [before]).need_logits().rows()[0].astype(np.float64)
        base.target.commit(state, 1)
        logs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = sorted(range(len(row)), key=lambda token: (-row[token], token))[:top]
        assert [token for token, _ in entry.top] == best
        np.testing.assert_allclose([value for _, value in entry.top], logs[best], rtol=0, atol=1e-12)
        np.testing.assert_allclose(entry.logprob, logs[entry.token], rtol=0, atol=1e-12)
        assert temperature > 0 or bias or not top or entry.token == entry.top[0][0]


# --- an end inside a block -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["token", "token beside a string", "string", "short string", "length"])
@pytest.mark.parametrize("drafter", ["known", "mtp"])
@pytest.mark.parametrize("offset", cases(range(14), sample={"0", "6", "13"}, mark="slow"))
def test_an_end_at_any_offset_of_an_accepted_block_cuts_all_there(
    offset, drafter, kind, temperature, load, monkeypatch
):
    """Tokens, text, log-probabilities, counters and the state's bits; and what follows is a plain run's.

    A string ends the text before it, and the tokens with the one that completed it.
    """
    plain = variant(load("qwen3_5"))
    sampling = {"temperature": temperature, "seed": 11, "logprobs": 2}
    monkeypatch.setattr(plain.tokenizer, "eos_ids", frozenset[int]())
    full = plain.generate(PROMPT, max_new_tokens=30, **sampling)
    ending = {"max_new_tokens": offset + 1 if kind == "length" else 30}
    if kind == "token beside a string":  # tokens are then taken one by one
        ending["stop"] = "no such text"
    if kind.startswith("token"):
        monkeypatch.setattr(plain.tokenizer, "eos_ids", frozenset({full.tokens[offset]}))
    elif kind != "length":
        ending["stop"] = plain.tokenizer.decode(full.tokens[offset : offset + (1 if kind == "short string" else 2)])
        assert ending["stop"].isprintable()
    lm = variant(plain, "mtp", 6) if drafter == "mtp" else knowing(plain, [*PROMPT, *full.tokens], depth=6)
    session, wanted = lm.session(), plain.session()
    stream = session.stream(PROMPT, **sampling, **ending)
    pieces = list(stream)
    run, theirs = stream.result, wanted.generate(PROMPT, **sampling, **ending)
    reason = "stop" if kind.startswith("token") else "length" if kind == "length" else "stop_string"
    assert run.finish_reason == theirs.finish_reason == reason
    assert run.tokens == theirs.tokens == full.tokens[: len(run.tokens)]
    assert len(run.tokens) <= offset + 2
    assert run.text == theirs.text == "".join(pieces)
    shown = run.tokens[:-1] if reason == "stop" else run.tokens
    assert run.text == plain.tokenizer.decode(shown).partition(ending.get("stop", "\0"))[0]
    assert run.logprobs == theirs.logprobs
    assert run.logprobs is not None
    assert len(run.logprobs) == len(run.tokens) == run.stats.tokens
    assert run.stats.cycles <= 3 or drafter == "mtp"
    monkeypatch.setattr(plain.tokenizer, "eos_ids", frozenset[int]())
    assert session.sequence.state.length == len(session.tokens) - 1
    ours, held = (tiny.state_arrays(lm.target, one.sequence.state) for one in (session, wanted))
    tiny.assert_same_bits({name: ours[name] for name in held}, held)
    again = [one.generate([45], max_new_tokens=9, **sampling) for one in (session, wanted)]
    assert again[0].tokens == again[1].tokens
    assert again[0].logprobs == again[1].logprobs
    assert session.tokens == wanted.tokens


def test_a_stop_string_across_turns_is_none(load):
    """A match must lie in the text of one generation: what the user fed is not the model's."""
    lm = variant(load("demo", "bfloat16"), "mtp")
    session = lm.session()
    first = session.generate(CODE, max_new_tokens=12, ignore_eos=True)
    end = first.text[-3:]
    second = session.generate(max_new_tokens=12, ignore_eos=True, stop=end + "\0never")
    assert second.finish_reason == "length"
    assert second.text == lm.session().generate([*first.prompt, *first.tokens], max_new_tokens=12, ignore_eos=True).text


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_the_distribution_verifier_goes_on_after_a_restore_as_if_it_had_never_stopped(drafter, load, tmp_path):
    """Its noise is keyed by the cycle too: the count must survive."""
    lm = variant(load("demo", "bfloat16"), drafter, 3, verifier="rejection")
    settings = {"temperature": 0.8, "seed": 3, "max_new_tokens": 15, "ignore_eos": True}
    session = lm.session()
    session.generate(CODE, **settings)
    session.save(tmp_path / "s")
    restored = lm.session()
    restored.load(tmp_path / "s")
    assert restored.generate(**settings).tokens == session.generate(**settings).tokens
    assert restored.stats == session.stats

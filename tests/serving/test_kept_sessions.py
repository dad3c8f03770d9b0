"""What a server keeps of earlier requests: within its bounds, and only where a kept state changes no output."""

import types

import pytest
from serving import serving

from specdec.contract import Guarantee, Parity
from specdec.drafters.prediction import Answers
from specdec.errors import ConfigError
from specdec.serving import sessions
from specdec.serving.engine import Engine
from specdec.serving.metrics import Metrics
from specdec.serving.sessions import Sessions
from tests.selection import cases

PROMPTS = [[number, *range(10, 30)] for number in range(6)]


def run(kept, prompt):
    session = kept.take(prompt)
    session.set_prompt(prompt)
    result = session.generate(max_new_tokens=4)
    kept.keep(session, len(prompt))
    return result


def test_the_oldest_go_when_there_are_too_many(lm, monkeypatch):
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 3)
    by_number = Sessions(lm, 2**40)
    for prompt in PROMPTS:
        run(by_number, prompt)
    assert len(by_number) == 3
    assert by_number.take(PROMPTS[0]).tokens == ()
    assert by_number.take(PROMPTS[-1]).tokens[:1] == (5,)
    size = by_number.size // 2
    by_bytes = Sessions(lm, 2 * size + size // 2)
    for prompt in PROMPTS:
        run(by_bytes, prompt)
        assert by_bytes.size <= 2 * size + size // 2
    assert len(by_bytes) == 2


@pytest.mark.parametrize(
    ("guarantee", "parity", "count"),
    [
        (Guarantee.EXACT, Parity.BITWISE, 1),
        (Guarantee.DISTRIBUTION, Parity.BITWISE, 0),
        (Guarantee.BOUNDED, Parity.BITWISE, 0),
        (Guarantee.EXACT, Parity.NUMERIC, 0),
    ],
)
def test_nothing_is_kept_where_it_could_change_the_output(lm, guarantee, parity, count):
    verifier, info = types.SimpleNamespace(guarantee=guarantee), types.SimpleNamespace(parity=parity)
    kept = Sessions(types.SimpleNamespace(verifier=verifier, info=info), 2**30)
    session = lm.session()
    session.feed(PROMPTS[0])
    kept.keep(session, len(PROMPTS[0]))
    assert len(kept) == count
    assert (kept.size > 0) == (count > 0)


def test_drafts_from_answers_are_refused_where_they_could_change_the_output():
    verifier, info = types.SimpleNamespace(guarantee=Guarantee.BOUNDED), types.SimpleNamespace(parity=Parity.BITWISE)
    inexact = types.SimpleNamespace(verifier=verifier, info=info)
    with pytest.raises(ConfigError, match="need an exact verifier"):
        Engine(inexact, Metrics(), most_waiting=1, parallel=1, kept_bytes=0, answer_tokens=100)


def test_answers_are_remembered_within_their_bound():
    answers = Answers(40)
    for start in range(0, 200, 10):
        answers.add(range(start, start + 10))
        assert len(answers.index) <= 40
    assert answers.index.tokens[-10:] == [*range(190, 200)]
    assert [answers.index.tokens[at] for at in answers.index.starts([0, *range(182, 188)])[1]] == [188]
    assert not answers.index.starts(range(60, 68))[1]
    answers.add(range(200, 300))  # the end of one that is too long
    assert answers.index.tokens[-20:] == [*range(280, 300)]
    assert len(answers.index) == 40


@pytest.mark.parametrize("tokens", cases([0, 1000], sample=["1000"], mark="slow"))
def test_an_equal_request_is_drafted_from_the_first_ones_answer_if_asked_for(tokens):
    ask = {"prompt": "def add(a, b):", "max_tokens": 48, "temperature": 0.9, "seed": 5}
    with serving("--drafter", "none", "--keep", 0, "--answers", tokens) as server:
        first, again = (server.post("/v1/completions", ask)[2] for _ in range(2))
    assert again["choices"] == first["choices"]
    assert first["specdec"]["cycles"] == 48
    assert (again["specdec"]["cycles"] < 24) == (tokens > 0)
    assert again["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0  # it brought none

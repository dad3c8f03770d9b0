"""A host gets usable drafts whatever the drafter does, and the drafts are those of specdec's own engine."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import Choice
from specdec.errors import SpecdecError
from specdec.hosting import HostedDrafter, TraceWriter, host_info, read_trace, replay
from specdec.hosting.drafting import LOOK_EVERY, PAUSE
from tests.hosting.faulty import FAULTS, Plugin
from tests.hosting.simulated import VOCAB, plain, random_prompts, serve
from tests.selection import examples

INFO = host_info("a host", VOCAB, 4096)
TOKENS_ONLY = {
    "ngram": {},
    "first_of": {"drafters": [{"name": "ngram", "min_order": 4}, {"name": "ngram", "max_order": 3}]},
    "none": {},
}


@pytest.fixture(autouse=True)
def _registry(install):
    install(Plugin())


def hosted(name, **options):
    own = {key: options.pop(key) for key in ("trace", "sessions", "pausing", "clock") if key in options}
    return HostedDrafter(Choice(name, options), INFO, **{"pausing": False} | own)


def check_served(drafter, seed, depth=4):
    rng = random.Random(seed)
    prompts, count = random_prompts(rng), rng.randrange(1, 40)
    texts = serve(prompts, count, lambda histories: drafter.draft(histories, depth), depth, rng)
    drafter.close()
    assert texts == [plain(prompt, len(text) - len(prompt)) for prompt, text in zip(prompts, texts, strict=True)]


@pytest.mark.parametrize("name", TOKENS_ONLY)
@examples(60)
@given(seed=st.integers(0, 2**32), sessions=st.sampled_from([1, 3, 256]))
def test_drafts_in_a_host_are_those_of_the_engine(tmp_path_factory, name, seed, sessions):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    choice = Choice(name, TOKENS_ONLY[name])
    trace = TraceWriter(path, host="a host", drafter=choice, vocab_size=VOCAB)
    drafter = hosted(name, **TOKENS_ONLY[name], trace=trace, sessions=sessions)
    check_served(drafter, seed)
    assert not drafter.off
    assert not drafter.report()["failed"]
    for request in read_trace(path).requests:
        assert request.drafter == choice
        assert replay(request) == []


@pytest.mark.parametrize("fault", FAULTS)
@examples(120)
@given(seed=st.integers(0, 2**32))
def test_no_fault_of_a_drafter_reaches_the_host(fault, seed):
    drafter = hosted(fault)
    check_served(drafter, seed)
    report = drafter.report()
    assert drafter.off or sum(report["failed"].values()) <= report["sessions"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raises", "failed in propose: RuntimeError: the table is empty"),
        ("no draft", "failed in propose: ContractError: propose returned [1, 2]"),
        ("target", "a drafter cannot run passes of the target"),
    ],
)
def test_a_drafter_that_fails_everywhere_is_switched_off_with_its_reason(fault, said, caplog):
    drafter = hosted(fault)
    for number in range(200):
        drafter.one([number % VOCAB, 1, 2, 1, 2, number % 7, 1, 2], 4)
    assert said in drafter.off
    assert "it failed in 3 of 3 requests" in drafter.off
    assert any("speculation_switched_off" in record.getMessage() for record in caplog.records)
    assert drafter.one([1, 2, 1, 2], 4) == []


@pytest.mark.parametrize(
    ("fault", "counted"),
    [("too long", "draft longer than asked for"), ("out of range", "draft token outside the vocabulary")],
)
def test_what_is_cut_is_counted_and_logged_once(fault, counted, caplog):
    drafter = hosted(fault)
    history = [1, 2, 3]
    for _ in range(30):
        history.append(1)
        assert len(drafter.one(history, 2)) <= 2
    assert drafter.report()["faults"][counted] > 1
    assert sum(counted in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reads layers", "cannot run in a host: it needs hidden states between layers"),
        ("reads states", "cannot run in a host: it needs hidden states after the final norm"),
        ("mtp", "cannot run in a host: it needs an MTP head, which no host gives to a drafter"),
        ("eagle3", "a head reads the target's hidden states, and a host gives them to no drafter"),
        ("never starts", "failed in factory: RuntimeError: no such file"),
        ("nobody", "no drafter is called 'nobody'"),
    ],
)
def test_a_drafter_that_cannot_run_in_a_host_is_refused_with_the_reason(name, said):
    with pytest.raises(SpecdecError, match=said):
        hosted(name)


@pytest.mark.parametrize(("drafting", "pass_seconds", "pauses"), [(0.1, 0.01, True), (0.001, 0.01, False)])
def test_drafting_pauses_while_it_takes_longer_than_it_can_save(monkeypatch, drafting, pass_seconds, pauses):
    """Every draft of this loop is right: a call saves a pass for each accepted token."""
    now = 0.0
    drafter = hosted("ngram", pausing=True, clock=lambda: now)
    inside = drafter._propose

    def slowly(*arguments):
        nonlocal now
        now += drafting
        return inside(*arguments)

    monkeypatch.setattr(drafter, "_propose", slowly)
    history = [1, 2, 3, 4] * 3
    drafts = 0
    for _ in range(3 * LOOK_EVERY):
        draft = drafter.one(history, 2)
        drafts += bool(draft)
        history += [history[-4 + at % 4] for at in range(len(draft) + 1)]
        now += pass_seconds
    assert bool(drafter.pauses) == pauses
    assert (drafts == 3 * LOOK_EVERY) != pauses
    for _ in range(PAUSE):  # what passes meanwhile is not saved by the last draft before
        drafter.one(history, 2)
        history.append(history[-4])
        now += pass_seconds
    assert drafter.pauses == 2 * pauses

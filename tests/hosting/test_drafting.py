"""A host gets usable drafts whatever the drafter does, and the drafts are those of specdec's own engine."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import Choice
from specdec.errors import ConfigError, SpecdecError, UnsupportedError
from specdec.hosting import HostedDrafter, chosen_drafter, host_info, read_trace, replay
from specdec.hosting.drafting import LOOK_EVERY, PAUSE
from tests.hosting.faulty import FAULTS, registered
from tests.hosting.simulated import VOCAB, plain, random_requests, serve
from tests.selection import examples

INFO = host_info("a host", VOCAB, 4096)
TOKENS_ONLY = {
    "ngram": {},
    "first_of": {"drafters": [{"name": "ngram", "min_order": 4}, {"name": "ngram", "max_order": 3}]},
    "none": {},
}


@pytest.fixture(autouse=True)
def _registry():
    yield from registered()


def hosted(name, **options):
    own = {key: options.pop(key) for key in ("trace", "sessions", "pausing", "clock") if key in options}
    return HostedDrafter(Choice(name, options), INFO, **{"pausing": False} | own)


def served(drafter, seed, depth=4):
    rng = random.Random(seed)
    requests = random_requests(rng)
    serve(
        requests,
        lambda new, histories, lengths, buffer: drafter.draft(
            [buffer[row, : lengths[row]] if step else None for row, step in enumerate(new)], depth
        ),
        depth,
        rng,
    )
    drafter.close()
    for one in requests:
        assert one.tokens == plain(one.prompt, one.count)[: len(one.tokens)]
        assert one.cancelled or len(one.tokens) == one.count
    return requests


@pytest.mark.parametrize("name", TOKENS_ONLY)
@examples(60)
@given(seed=st.integers(0, 2**32), sessions=st.sampled_from([1, 3, 256]))
def test_drafts_in_a_host_are_those_of_the_engine(tmp_path_factory, name, seed, sessions):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    choice = Choice(name, TOKENS_ONLY[name])
    drafter = hosted(name, **TOKENS_ONLY[name], trace=path, sessions=sessions)
    served(drafter, seed)
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
    served(drafter, seed)
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
    [
        ("too long", "draft longer than asked for"),
        ("out of range", "draft token outside the vocabulary"),
        ("negative", "draft token outside the vocabulary"),
    ],
)
def test_what_is_cut_is_counted_and_logged_once(fault, counted, caplog):
    drafter = hosted(fault)
    history = [1, 2, 3]
    for _ in range(30):
        history.append(1)
        assert len(drafter.one(history, 2)) <= 2
    assert drafter.report()["faults"][counted] > 1
    assert sum(counted in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("name", ["reads layers", "reads states", "mtp", "eagle3", "never starts", "nobody"])
def test_a_drafter_that_cannot_run_in_a_host_is_refused_with_the_reason(name):
    with pytest.raises(SpecdecError) as caught:
        hosted(name)
    said = {
        "reads layers": "cannot run in a host: it needs hidden states between layers",
        "reads states": "cannot run in a host: it needs hidden states after the final norm",
        "mtp": "cannot run in a host: it needs an MTP head, which no host gives to a drafter",
        "eagle3": "a head reads the target's hidden states, and a host gives them to no drafter",
        "never starts": "failed in factory: RuntimeError: no such file",
        "nobody": "no drafter is called 'nobody'",
    }
    assert said[name] in str(caught.value)
    assert isinstance(caught.value, UnsupportedError) == (name in ("reads layers", "reads states", "mtp", "eagle3"))


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("drafting", "pass_seconds", "pauses"), [(0.1, 0.01, True), (0.001, 0.01, False)])
def test_drafting_pauses_while_it_takes_longer_than_it_can_save(monkeypatch, drafting, pass_seconds, pauses):
    """Every draft of this loop is right: a call saves a pass for each accepted token."""
    clock = Clock()
    drafter = hosted("ngram", pausing=True, clock=clock)
    inside = drafter._propose

    def slowly(*arguments):
        clock.now += drafting
        return inside(*arguments)

    monkeypatch.setattr(drafter, "_propose", slowly)
    history = [1, 2, 3, 4] * 3
    drafts = 0
    for _ in range(3 * LOOK_EVERY):
        draft = drafter.one(history, 2)
        drafts += bool(draft)
        history += [history[-4 + at % 4] for at in range(len(draft) + 1)]
        clock.now += pass_seconds
    assert bool(drafter.pauses) == pauses
    assert (drafts == 3 * LOOK_EVERY) != pauses
    for _ in range(PAUSE):  # what passes meanwhile is not saved by the last draft before
        drafter.one(history, 2)
        history.append(history[-4])
        clock.now += pass_seconds
    assert drafter.pauses == 2 * pauses


# --- which drafter the environment names ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "choice"),
    [("suffix", Choice("suffix")), ('{ name = "suffix", min_match = 2 }', Choice("suffix", {"min_match": 2}))],
)
def test_a_name_or_a_table(named, choice, monkeypatch):
    monkeypatch.setenv("SPECDEC_DRAFTER", named)
    assert chosen_drafter() == choice


@pytest.mark.parametrize("named", ["{", " ", '{"name": "ngram"}', "[1", '"suffix'])
def test_another_text_is_refused_with_the_variable(named, monkeypatch):
    monkeypatch.setenv("SPECDEC_DRAFTER", named)
    with pytest.raises(ConfigError, match="SPECDEC_DRAFTER is a name or a TOML table") as refused:
        chosen_drafter()
    assert "-s" not in str(refused.value).split()


@pytest.mark.parametrize("named", ["", "auto"])
def test_no_drafter_is_named(named, monkeypatch):
    monkeypatch.setenv("SPECDEC_DRAFTER", named)
    with pytest.raises(ConfigError, match="no drafter is named for this host"):
        chosen_drafter()

"""Drafters in a row: the first with an opinion drafts, all of them follow, and a result tells who did what."""

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import specdec
from specdec.config import Choice
from specdec.contract import EMPTY_DRAFT, Draft, Drafter, DrafterSnapshot, DrafterSpec, Needs, PrepareEnv
from specdec.drafters.first_of import FirstOfConfig, specdec_drafters
from specdec.errors import SpecdecError
from specdec.testing import PluginSubject, Subject
from specdec.testing.scripted_session import ScriptedSession
from tests.plugin_objects import plugin_of

SPEC = specdec_drafters()[0]


class Noted(Drafter):
    """Drafts ``number`` where the context's length is a multiple of ``every``; notes every call."""

    def __init__(self, config, env):
        self.config, self.env = config, env
        self.calls = []
        made.append(self)

    def propose(self, context, depth):
        self.calls.append(("propose", len(context), depth))
        return Draft((self.config.number,) * depth) if len(context) % self.config.every == 0 else EMPTY_DRAFT

    def prefill(self, context, output):
        self.calls.append(("prefill", list(context), len(output.hidden)))

    def observe(self, verdict, output, context):
        self.calls.append(("observe", verdict, list(context), len(output.hidden)))

    def rewind(self, length):
        self.calls.append(("rewind", length))

    def snapshot(self, context):
        self.calls.append(("snapshot", list(context)))
        if self.config.every == 3:
            return None
        return DrafterSnapshot({"a/b": np.array([self.config.number])}, {"number": self.config.number, "name": "x"})

    def report(self):
        return {"number": self.config.number}


@attrs.frozen(kw_only=True)
class NotedConfig:
    number: int = 0
    every: int = 1


made = []


@pytest.fixture(autouse=True)
def _registry(install):
    spec = DrafterSpec(name="noted", factory=Noted, config=NotedConfig, needs=Needs(final_hidden=True))
    install(plugin_of(specdec_drafters=lambda self: [spec]))
    made.clear()


def subject(*choices):
    config = FirstOfConfig(drafters=choices)
    assert SPEC.prepare is not None
    prepare = SPEC.prepare
    return PluginSubject(
        kind=Subject.DRAFTER,
        make=lambda env: SPEC.factory(config, env),
        needs=Needs(mtp=True, final_hidden=True),
        prepare=lambda target: prepare(config, PrepareEnv(target=target)),
    )


# --- who drafts ------------------------------------------------------------------------------------------------------


@given(
    everys=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    cycles=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=8),
)
def test_the_first_with_an_opinion_drafts_and_all_see_everything(everys, cycles):
    """Any opinions, any outcomes, drafts that the engine cuts: the same calls reach every child, counts are right."""
    made.clear()
    choices = [Choice("noted", {"number": number, "every": every}) for number, every in enumerate(everys)]
    played = ScriptedSession(subject(*choices))
    played.feed([1, 2, 3])
    expected = {number: [0, 0, 0] for number in range(len(everys))}
    for depth, accepted, next_token, cut in cycles:
        before = len(played.tokens)
        draft = played.cycle(depth, accepted, next_token, cut=cut)
        first = next((n for n, every in enumerate(everys) if before % every == 0), None) if depth else None
        if first is not None:
            assert set(draft) <= {first}
            expected[first][0] += 1
            expected[first][1] += len(draft)
            expected[first][2] += min(accepted, len(draft))
        else:
            assert draft == ()
    played.drafter.snapshot(played.context)
    played.replace(2, [])
    told = played.drafter.report()["drafters"]
    labels = ["noted", *(f"noted#{number}" for number in range(2, len(everys) + 1))]
    assert list(told) == labels
    for number, label in enumerate(labels):
        names = ("drafts", "offered", "accepted")
        assert told[label] == {**dict(zip(names, expected[number], strict=True)), "number": number}
    shared = [[call for call in child.calls if call[0] != "propose"] for child in made]
    assert all(calls == shared[0] for calls in shared)
    assert [call[0] for call in shared[0]] == ["prefill"] + ["observe"] * len(cycles) + ["snapshot", "rewind"]
    event(f"{sum(any(counts) for counts in expected.values())} of the drafters drafted")


def test_each_is_asked_for_its_own_depth_and_names_its_draft():
    played = ScriptedSession(subject(*(Choice("noted", {"number": number}) for number in range(3))))
    played.feed([1, 2, 3])
    context, limits = played.context, {"noted": 0, "noted#2": 2, "noted#3": 4}
    assert played.drafter.propose(context, 3).drafter == "noted"
    context.depth_of = lambda drafter, depth: min(limits[drafter], depth)
    draft = played.drafter.propose(context, 3)
    assert (draft.tokens, draft.drafter) == ((1, 1), "noted#2")
    assert [[call[2] for call in child.calls if call[0] == "propose"] for child in made] == [[3], [2], []]


def test_a_model_to_draft_with_follows_a_look_up():
    text, settings = "a b c d e f a b c d e f a b", {"max_new_tokens": 40}
    plain = specdec.load(drafter="none").generate(text, **settings)
    result = specdec.load(drafter={"model": "demo"}).generate(text, **settings)
    assert result.tokens == plain.tokens
    assert sum(one["drafts"] for one in result.stats.draft["drafters"].values())
    assert list(result.stats.draft["drafters"]) == ["ngram", "draft_model"]


def test_a_member_with_a_malformed_draft_is_left_out_alone(monkeypatch):
    """The others go on drafting, and the report names the member."""
    made.clear()
    played = ScriptedSession(subject(Choice("noted", {"number": 0}), Choice("noted", {"number": 1})))
    monkeypatch.setattr(made[0], "propose", lambda context, depth: [1])
    played.feed([1, 2, 3])
    assert played.cycle(2, 0, 4) == (1, 1)
    told = played.drafter.report()["drafters"]
    assert "propose" in told["noted"]["failed"]
    assert "failed" not in told["noted#2"]


# --- what cannot be used ---------------------------------------------------------------------------------------------

BAD = {
    "nothing": (None, ["drafter.drafters", "required and missing"]),
    "an empty list": ([], ["drafter.drafters takes one drafter or more", "[] (list)", "try", '{ name = "mtp" }']),
    "words": (["ngram"], ["drafter.drafters[0] takes a table", 'name = "ngram"']),
    "an unknown name": (
        [{"name": "ngram"}, {"name": "mpt"}],
        ["no drafter is called 'mpt'. Did you mean 'mtp'?", "drafter.drafters[1].name"],
    ),
    "a wrong option": (
        [{"name": "none"}, {"name": "ngram", "min_order": 99}],
        ["drafter.drafters[1].min_order takes 1 to 16, got 99"],
    ),
    "a missing folder, deeper": (
        [{"name": "first_of", "drafters": [{"name": "draft_model", "model": "./nowhere"}]}],
        ["there is no folder './nowhere'", "drafter.drafters[0].drafters[0].model = './nowhere'"],
    ),
    "a head that is not there": (
        [{"name": "ngram"}, {"name": "mtp"}],
        ["'mtp' needs an MTP head, and this llama checkpoint has none", "drafter.drafters[1]", "the list without"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_list_that_cannot_be_used_is_refused_with_the_place_in_it(folders, case, monkeypatch):
    monkeypatch.setenv("SPECDEC_CPU_KERNELS", "torch")
    drafters, words = BAD[case]
    model = folders.llama if case == "a head that is not there" else folders.target
    options = {"name": "first_of"} | ({} if drafters is None else {"drafters": drafters})
    with pytest.raises(SpecdecError) as caught:
        specdec.load(model, drafter=options, depth=2)
    for word in words:
        assert word in str(caught.value)

"""An interruption at any step of any call of a session leaves a session that goes on as if nothing had been.

Every trial interrupts a call, repeatedly, looks at what is left, and repeats the call until it succeeds. A copy that
was saved right after the interruptions must go on equally. What an uninterrupted session has in the end (tokens,
counters, the bits of the state) is the truth.
"""

import functools
import pathlib
import random
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import specdec
from specdec.contract import Draft, Drafter, DrafterSnapshot, DrafterSpec, Needs
from specdec.decoding.conversation import Conversation
from specdec.registry.parts import DrafterPart
from tests import tiny
from tests.decoding.interrupting import Step, interrupted, steps_of
from tests.drafters.composed import composed, load_base, scripted, write_folders
from tests.selection import examples

PROMPT = [40, 41, 42, 43] * 5 + [50]
MORE = [60, 61, 62, 40, 41, 42]
FIRST, COUNT, AFTER = 6, 10, 5  # tokens generated before the call, by the call, and after it
SEED = 20261122


class Seeing(Drafter):
    """Drafts what the last hidden state says, and keeps all that it was shown; a gap or a repetition shows."""

    def __init__(self, env):
        self.seen = [] if env.saved is None else list(np.asarray(env.saved.arrays["seen"]))
        assert len(self.seen) == env.state.length

    def _see(self, output, rows, end):
        shown = np.concatenate([output.need_hidden().rows()[:rows], output.boundaries[1].rows()[:rows]], axis=1)
        self.seen += list(shown)
        assert len(self.seen) == end

    def prefill(self, context, output):
        self._see(output, output.rows, len(context))

    def observe(self, verdict, output, context):
        self._see(output, verdict.accepted + 1, len(context) - 1)

    def propose(self, context, depth):
        assert len(self.seen) == len(context) - 1
        return Draft(tuple(int(abs(x) * 1000) % 94 for x in self.seen[-1][:depth])) if self.seen else Draft(())

    def rewind(self, length):
        del self.seen[length:]

    def snapshot(self, context):
        return DrafterSnapshot({"seen": np.array(self.seen)}) if self.seen else None


def seeing(base):
    spec = DrafterSpec(
        name="seeing", factory=lambda config, env: Seeing(env), needs=Needs(final_hidden=True, boundaries=(1,))
    )
    return attrs.evolve(base, drafter=DrafterPart(spec=spec), depth=scripted([3]))


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """``make("hybrid-mtp")``: a model with recurrent layers and an MTP head or with attention only, and a drafter."""
    folders = write_folders(tmp_path_factory.mktemp("models"))
    bases = {
        "hybrid": load_base(folders),
        "llama": specdec.load(folders.llama, drafter="none", depth=0, dtype="float32"),
    }
    second = {"name": "draft_model", "model": folders.blurred}
    tables = {
        "none": {"name": "none"},
        "mtp": {"name": "mtp"},
        "ngram": {"name": "ngram"},
        "draft_model": second,
        "first_of": {"name": "first_of", "drafters": [{"name": "ngram", "min_order": 4}, second]},
    }

    @functools.cache
    def get(name):
        family, drafter = name.split("-")
        base = bases[family]
        return seeing(base) if drafter == "seeing" else composed(base, tables[drafter], depths=(3,))

    return get


SUBJECTS = [*("hybrid-mtp", "hybrid-first_of", "hybrid-seeing"), *("llama-ngram", "llama-draft_model", "llama-seeing")]


# --- calls -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Trial:
    """A session in the middle of things, and what may be asked of it. ``settings`` are those of generations."""

    lm: Any
    session: Any
    folder: pathlib.Path
    settings: dict[str, Any]

    def generate(self, total, **settings):
        """Generate until the session has ``total`` tokens."""
        left = total - len(self.session.tokens)
        if left:
            self.session.generate(max_new_tokens=left, ignore_eos=True, **self.settings, **settings)

    def leave(self):
        """Generate, but leave the stream after its first text."""
        if len(self.session.tokens) == len(PROMPT) + FIRST:
            with self.session.stream(max_new_tokens=COUNT, ignore_eos=True, **self.settings) as stream:
                next(stream)

    def feed(self):
        if len(self.session.tokens) == len(PROMPT) + FIRST:
            self.session.feed(MORE)

    def stream(self):
        """A prompt and a generation in one call."""
        begin = len(PROMPT) + FIRST
        if len(self.session.tokens) == begin:
            self.session.generate(MORE, max_new_tokens=COUNT, ignore_eos=True, **self.settings)
        self.generate(begin + len(MORE) + COUNT)


CALLS = {
    "generate": lambda trial: trial.generate(len(PROMPT) + FIRST + COUNT),
    "stop strings": lambda trial: trial.generate(len(PROMPT) + FIRST + COUNT, stop=("no such text",)),
    "stream": Trial.stream,
    "leave": Trial.leave,
    "feed": Trial.feed,
    "rewind": lambda trial: trial.session.rewind(min(len(PROMPT) + 2, len(trial.session.tokens))),
    "rewind far": lambda trial: trial.session.rewind(min(9, len(trial.session.tokens))),
    "set_prompt": lambda trial: trial.session.set_prompt([*PROMPT[:17], *MORE]),
    "fork": lambda trial: trial.session.fork(),
    "save": lambda trial: trial.session.save(trial.folder / "saved"),
    "load": lambda trial: trial.session.load(trial.folder / "other"),
}


def begun(lm, folder, settings):
    session = lm.session()
    session.feed(PROMPT)
    session.generate(max_new_tokens=FIRST, ignore_eos=True, **settings)
    session.extra["note"] = "kept"
    return Trial(lm, session, folder, settings)


def ended(trial, total=None):
    """Let the session go on, and return everything that it is."""
    session = trial.session
    trial.generate((len(session.tokens) if total is None else total) + AFTER)
    target, state = session.sequence.target, session.sequence.state
    return session.tokens, session.stats, session.extra, state.length, target.snapshot(state).arrays


def check_equal(got, wanted):
    assert got[:-1] == wanted[:-1]
    assert got[-1].keys() == wanted[-1].keys()
    tiny.assert_same_bits(got[-1], wanted[-1])


@attrs.frozen
class Truth:
    """What an uninterrupted session does."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    end: tuple[Any, ...]
    steps: list[Step]


def truth_of(lm, call, folder, settings, *, instructions):
    other = lm.session()
    other.generate([70, 71, 72, 70, 71], max_new_tokens=4, ignore_eos=True, **settings)
    other.save(folder / "other")
    CALLS[call](begun(lm, folder, settings))  # whatever is done only once
    trial = begun(lm, folder, settings)
    before = trial.session.tokens
    steps = steps_of(lambda: CALLS[call](trial), instructions=instructions)
    after = trial.session.tokens
    return Truth(before, after, ended(trial), steps)


def check(lm, call, folder, settings, truth, steps, *, instructions=False):
    """Interrupt the call at these steps, one attempt after the other; returns how many interruptions there were."""
    trial = begun(lm, folder, settings)
    count = 0
    for step in steps:
        if not interrupted(lambda: CALLS[call](trial), step, instructions=instructions):
            break
        count += 1
        tokens = trial.session.tokens
        between = call in ("generate", "stop strings", "stream", "leave")
        whole = tokens in (truth.before, truth.after)
        assert whole or (between and tokens == truth.after[: len(tokens)] and len(tokens) > len(truth.before))
    # one that was saved now, by a call that is not interrupted, goes on equally
    saved = attrs.evolve(trial, session=lm.session())
    trial.session.save(folder / "interrupted")
    saved.session.load(folder / "interrupted")
    for one in (trial, saved):
        CALLS[call](one)
        if call != "leave":  # where it stops depends on where it was interrupted
            assert one.session.tokens == truth.after
            check_equal(ended(one), truth.end)
        else:
            got = ended(one, len(PROMPT) + FIRST + COUNT)
            wanted = CALLS["generate"], begun(lm, folder, settings)
            wanted[0](wanted[1])
            assert got[0] == ended(wanted[1])[0]
    return count


SETTINGS = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 7}}
TRUTHS = {}


@given(
    subject=st.sampled_from(SUBJECTS),
    call=st.sampled_from(list(CALLS)),
    name=st.sampled_from(list(SETTINGS)),
    instructions=st.booleans(),
    shares=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6),
)
@examples(90)
def test_interruptions_of_a_call_and_of_its_repair(make, tmp_path_factory, subject, call, name, instructions, shares):
    """Every attempt begins with the repair of what the attempt before has left, and is interrupted itself.

    Between two lines, or within one: a line that changes two things can be split.
    """
    lm, folder, settings = make(subject), tmp_path_factory.getbasetemp(), SETTINGS[name]
    key = subject, call, name, instructions
    if key not in TRUTHS:
        TRUTHS[key] = truth_of(lm, call, folder, settings, instructions=instructions)
    truth = TRUTHS[key]
    steps = [truth.steps[int(share**2 * len(truth.steps))] for share in shares]  # early ones fall into the repair
    count = check(lm, call, folder, settings, truth, steps, instructions=instructions)
    event(f"{count} interruptions")


# --- conversations ---------------------------------------------------------------------------------------------------

TALKS = {
    "ask": lambda talk, folder: talk.ask("the inn", max_new_tokens=8).result,
    "leave": lambda talk, folder: talk.ask("the inn", max_new_tokens=40, ignore_eos=True).close(),
    "rewind": lambda talk, folder: talk.rewind(1),
    "save": lambda talk, folder: talk.save(folder / "saved"),
    "load": lambda talk, folder: talk.load(folder / "other"),
}


def talking(lm):
    talk = Conversation(lm, system="be the inn")
    for text in ("in the", "the other"):
        list(talk.ask(text, max_new_tokens=7))
    return talk


def check_talk(lm, call, folder, step):
    """The conversation is the one from before or after (with a part of the answer), can be saved, and goes on."""
    talk, after = talking(lm), talking(lm)
    before = talk.messages
    TALKS[call](after, folder)
    count = interrupted(lambda: TALKS[call](talk, folder), step)
    talk.save(folder / "interrupted")
    messages, loaded = talk.messages, Conversation(lm)
    loaded.load(folder / "interrupted")
    assert loaded.messages == messages
    assert loaded.tokens == talk.tokens
    if messages not in (before, after.messages):
        assert call in ("ask", "leave")
        assert messages[:-1] == [*before, {"role": "user", "content": "the inn"}]
    results = [one.ask("there", max_new_tokens=6, ignore_eos=True).result for one in (talk, loaded)]
    assert results[0].tokens == results[1].tokens
    plain = lm.session().generate(results[0].prompt, max_new_tokens=6, ignore_eos=True)
    assert plain.tokens == results[0].tokens
    return count


@pytest.mark.parametrize("call", TALKS)
def test_an_interrupted_conversation(call, make, tmp_path):
    lm = make("hybrid-mtp")
    other = Conversation(lm)
    list(other.ask("another", max_new_tokens=5))
    other.save(tmp_path / "other")
    talk, first = talking(lm), talking(lm)
    TALKS[call](first, tmp_path)  # whatever is done only once
    steps = steps_of(lambda: TALKS[call](talk, tmp_path))
    for step in random.Random(f"{SEED} {call}").sample(steps, 8):
        check_talk(lm, call, tmp_path, step)

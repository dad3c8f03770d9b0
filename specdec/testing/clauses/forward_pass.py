"""Checks of targets, except hidden states, MTP heads and executors: clauses F1 to F8, F10 to F12, F14 to F16.

The reference is the target itself in plain decoding: a fresh state, one row per pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st

from specdec.contract import Drafter, DrafterEnv, Parity, Sampling, State
from specdec.errors import PromptError, ShapeError, StateError
from specdec.testing.checks import Run, check, expect, expect_equal, expect_error, not_applicable
from specdec.testing.engine_run import ScriptedDrafter, plain_decoding, run_engine
from specdec.testing.logits_checks import check_logits
from specdec.testing.strategies import Call, calls
from specdec.testing.subjects import ForwardPassSubject
from specdec.testing.target_under_test import TargetUnderTest
from specdec.verifiers.strict import StrictVerifier

_numbers = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@check("F1")
def cached_is_uncached(subject: ForwardPassSubject, run: Run) -> None:
    """Logits after cached tokens are those of a fresh state that took in all tokens at once."""
    target = TargetUnderTest(subject)

    def body(prompt: list[int], rest: list[int]) -> None:
        tokens = target.tokens(prompt)
        state = target.prefilled(tokens)
        for number in rest:
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
        tokens = target.tokens(prompt)
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
        state, tokens = target.state(), []
        for i, part in enumerate(parts):
            chunk = target.tokens(part)
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
    """``restore(snapshot)`` gives the state at the snapshot, whatever happened to the original or to copies since."""
    target = TargetUnderTest(subject)

    def body(prompt: list[int], rest: list[int], other: list[int]) -> None:
        tokens, later, more = target.tokens([*prompt, *rest]), target.tokens(other), target.tokens([7, 8])
        state = target.prefilled(tokens[: len(prompt)])
        target.append(state, tokens[len(prompt) :])
        taken = target.model.snapshot(state)
        expect_equal(taken.length, len(tokens), "the snapshot has the wrong length")
        target.append(state, later)
        for _ in range(2):
            copy = target.model.restore(taken)
            expect_equal(copy.capacity, state.capacity, "the restored state has the wrong capacity")
            target.expect_plain(copy, tokens, "a restored state differs")
            target.append(copy, more)
            target.expect_plain(copy, [*tokens, *more], "a restored state continues differently")
        target.expect_plain(state, [*tokens, *later], "taking or restoring a snapshot changed the original")

    run.explore(body, examples=8, prompt=_numbers, rest=_numbers, other=_numbers)


@check("F5")
def row_invariance(subject: ForwardPassSubject, run: Run) -> None:
    """BITWISE: the bits of a row do not depend on the number of rows of its pass. NUMERIC: they are close."""
    target = TargetUnderTest(subject)
    prompt = target.tokens(range(5))
    rows = target.tokens(range(20, 20 + target.info.max_rows))
    for count in range(1, target.info.max_rows + 1):
        logits = target.model.decode(target.prefilled(prompt), rows[:count]).need_logits().rows()
        for row in range(count):
            alone = target.logits_after([*prompt, *rows[: row + 1]])
            target.expect_close(logits[row], alone, f"row {row} of {count} differs from a pass of one row", rows=count)


@check("F6")
def any_chunking(subject: ForwardPassSubject, run: Run) -> None:
    """Any chunking of a prompt leaves the same state: bit-equal with BITWISE parity."""
    target = TargetUnderTest(subject)
    longest = min(target.room - 2, 2 * target.info.max_rows + 9)
    tokens = target.tokens(range(longest))

    def body(cuts: list[int], length: int) -> None:
        state, at = target.state(), 0
        for end in sorted({min(cut, length) for cut in cuts} | {length}):
            if end > at:
                target.model.prefill(state, tokens[at:end])
                at = end
        target.expect_plain(state, tokens[:length], "a prompt in these chunks leaves a different state")

    body([], longest)
    run.explore(body, examples=15, cuts=st.lists(st.integers(1, longest), max_size=3), length=st.integers(2, longest))


def _misuses(target: TargetUnderTest) -> list[tuple[str, Callable[[State], object], type[Exception]]]:
    model, info, token = target.model, target.info, target.token(1)
    return [
        ("commit without a decode", lambda s: model.commit(s, 1), StateError),
        ("commit of more rows than decoded", lambda s: (model.decode(s, [token]), model.commit(s, 2)), StateError),
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
    prompt = target.tokens(range(4))
    for what, misuse, wanted in _misuses(target):
        state = target.prefilled(prompt, capacity=12)
        expect_error(wanted, partial(misuse, state), what)
        target.expect_plain(state, prompt, f"{what} changed the state")
    if target.info.max_rows >= 3:
        full = target.prefilled(target.tokens(range(10)), capacity=12)
        expect_error(
            StateError, lambda: target.model.decode(full, target.tokens([1, 2, 3])), "decode over the capacity"
        )


@check("F8")
def logits_methods(subject: ForwardPassSubject, run: Run) -> None:
    """``argmax``, ``topk``, ``gather`` and ``logsumexp`` agree with ``rows``, ``[T, V]`` float32; ties go to the lowest
    id."""
    target = TargetUnderTest(subject)
    drafted = target.tokens(range(30, 30 + min(3, target.info.max_rows)))
    logits = target.model.decode(target.prefilled(target.tokens(range(3))), drafted).need_logits()
    check_logits(logits, len(drafted), target.info.vocab_size, drafted)


@check("F10")
def lengths(subject: ForwardPassSubject, run: Run) -> None:
    """A state counts its committed tokens, has the requested capacity, and can be filled completely."""
    target = TargetUnderTest(subject)
    capacity = 9
    state, tokens = target.state(capacity), target.tokens(range(capacity))
    expect_equal(state.length, 0, "an empty state does not have length 0")
    expect_equal(state.capacity, capacity, "the capacity is not the requested one")
    expect(type(state.nbytes()) is int and state.nbytes() >= 0, "nbytes is not a number of bytes", got=state.nbytes())
    target.model.prefill(state, tokens[:4])
    expect_equal(state.length, 4, "prefill does not commit its tokens")
    target.model.decode(state, tokens[4:6][: target.info.max_rows])
    expect_equal(state.length, 4, "decode commits rows")
    target.model.commit(state, 1)
    expect_equal(state.length, 5, "commit does not keep its rows")
    target.append(state, tokens[5:-1])
    logits = target.next_logits(state, tokens[-1])
    target.append(state, tokens[-1:])
    expect_equal(state.length, capacity, "a state cannot be filled")
    target.expect_close(logits, target.logits_after(tokens), "the last position of a state is not usable")


@check("F11")
def no_trace(subject: ForwardPassSubject, run: Run) -> None:
    """Uncommitted rows leave no trace."""
    target = TargetUnderTest(subject)
    prompt = target.tokens(range(3))
    junk = target.tokens(range(40, 40 + target.info.max_rows))
    for kept in range(min(3, target.info.max_rows)):
        state = target.prefilled(prompt)
        for _ in range(2):
            target.model.decode(state, junk)
            target.model.commit(state, kept)
        tokens = [*prompt, *junk[:kept], *junk[:kept]]
        target.expect_plain(state, tokens, f"{len(junk)} rows of which {kept} were kept left a trace")


@check("F12")
def states_apart(subject: ForwardPassSubject, run: Run) -> None:
    """States of one target do not influence each other."""
    target = TargetUnderTest(subject)
    texts = [target.tokens(range(5)), target.tokens(range(50, 57))]
    states = [target.prefilled(text) for text in texts]
    for i in range(4):
        rows = target.tokens([i, i + 1][: target.info.max_rows])
        for state in states:  # both decode before either commits
            target.model.decode(state, rows)
        for state, text in zip(states, texts, strict=True):
            target.model.commit(state, 1)
            text.append(rows[0])
    for state, text in zip(states, texts, strict=True):
        target.expect_plain(state, text, "another state changed this one")


@check("F14")
def causal(subject: ForwardPassSubject, run: Run) -> None:
    """The logits of a row do not depend on the rows after it."""
    target = TargetUnderTest(subject)
    if target.info.max_rows < 2:
        not_applicable("passes have one row")
    count = min(4, target.info.max_rows)
    seen = []
    for change in (0, 5, 9):
        rows = [target.token(11), *target.tokens(range(20 + change, 19 + change + count))]
        state = target.prefilled(target.tokens(range(3)))
        seen.append(target.model.decode(state, rows).need_logits().rows()[0].copy())
    for other in seen[1:]:
        target.expect_close(other, seen[0], "row 0 changes with the rows after it")


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


@check("F16")
def info_filled_in(subject: ForwardPassSubject, run: Run) -> None:
    """``info`` is filled in: sizes are positive, ``max_rows`` is at least 2, and it does not change."""
    model = subject.make()
    info = model.info
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
    expect_equal(model.info, info, "info changes")

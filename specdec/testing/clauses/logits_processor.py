"""Checks of logits processors: clauses L1 to L7."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import Context, LogitsProcessor, ProcessorEnv
from specdec.errors import SpecdecError
from specdec.testing.byte_tokenizer import byte_tokenizer
from specdec.testing.checks import Run, check, expect, expect_equal, not_applicable, own_generators
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import LogitsProcessorSubject

if TYPE_CHECKING:
    from specdec.contract import Float32

LONG = 700  # tokens of a long history
ROWS = 120  # rows asked for in one walk


@attrs.frozen
class _Row:
    """One question: the logits of a row, its history, and drafted tokens after it."""

    logits: Float32
    history: list[int]
    draft: tuple[int, ...]


def _rows(seed: int, env: ProcessorEnv, count: int, longest: int) -> list[_Row]:
    """Rows as a generation asks for them: histories grow, drafts are rejected, and now and then much is taken back."""
    rng = np.random.default_rng([seed, 3])
    vocab = env.vocab_size
    rows: list[_Row] = []
    history = [int(token) for token in rng.integers(0, vocab, env.generated_from)]
    while len(rows) < count:
        if rng.random() < 0.1:
            back = int(2 ** rng.uniform(0, 9))
            del history[max(env.generated_from, len(history) - back) :]
        steps = 1 if rng.random() < 0.8 else int(2 ** rng.uniform(0, 7))
        for _ in range(min(steps, longest - len(history))):
            again = history and rng.random() < 0.4
            history.append(
                history[-int(rng.integers(1, min(len(history), 9) + 1))] if again else int(rng.integers(vocab))
            )
        draft = tuple(int(token) for token in rng.integers(0, vocab, int(rng.choice([*range(9), 11, 15]))))
        if history and rng.random() < 0.5:
            draft = (*draft[:2], *history[-3:])[: int(rng.integers(0, 6))]
        logits = rng.normal(0, 3, vocab).astype(np.float32)
        if rng.random() < 0.2:
            logits[int(rng.integers(vocab))] = 40.0
        rows.append(_Row(logits, list(history), draft))
        if len(history) >= longest:
            del history[env.generated_from + 1 :]
    return rows


ENVIRONMENTS = ((257, 3, LONG), (40, 1, 60), (257, 60, 200), (5, 9, 30), (1, 2, 20), (257, 300, LONG))
"""Vocabulary, where generation starts, and the most tokens after that."""


def _drawn(
    subject: LogitsProcessorSubject, run: Run, body: Callable[[ProcessorEnv, list[_Row]], None], examples: int = 10
) -> None:
    """Call ``body`` with environments that the processor takes, and rows that shrink by their number."""
    environments, refusal = [], ""
    for vocab, start, longest in ENVIRONMENTS:
        ends = (vocab - 1,) if vocab > 1 else ()
        env = ProcessorEnv(tokenizer=byte_tokenizer(vocab), vocab_size=vocab, end_tokens=ends, generated_from=start)
        try:
            subject.make(env).process(np.zeros(vocab, np.float32), [0] * start)
        except SpecdecError as error:
            refusal = error.message
        else:
            environments.append((env, start + longest))
    if not environments:
        not_applicable(f"it takes no environment of the kit: {refusal}")

    def cases(number: int, seed: int, rows: int) -> None:
        env, longest = environments[number]
        body(env, _rows(seed, env, rows, longest))

    numbers = st.integers(0, len(environments) - 1)
    run.explore(cases, examples=examples, number=numbers, seed=seeds, rows=lengths(ROWS))


def _ask(processor: LogitsProcessor, row: _Row) -> tuple[Float32, int]:
    """Both answers, to copies of the arguments; the engine asks ``legal`` with its context."""
    answer = processor.process(row.logits.copy(), list(row.history))
    return np.array(answer, copy=True), processor.legal(row.draft, Context(list(row.history)))


@check("L1")
def new_logits(subject: LogitsProcessorSubject, run: Run) -> None:
    """``process`` returns float32 ``[V]`` without NaN or infinity above, also for logits with ``-inf`` in them."""

    def body(env: ProcessorEnv, rows: list[_Row]) -> None:
        processor = subject.make(env)
        for number, row in enumerate(rows):
            masked = row.logits.copy()
            masked[number % env.vocab_size] = -np.inf
            for logits in (row.logits, masked) if env.vocab_size > 1 else (row.logits,):
                history: Sequence[int] = row.history.copy()
                if number % 3:  # the engine has other sequences too
                    history = tuple(history) if number % 3 == 1 else Context(row.history.copy())
                answer: object = processor.process(logits.copy(), history)
                case: dict[str, object] = {"history": row.history, "masked": logits is masked}
                expect(isinstance(answer, np.ndarray), "process returns no array", got=answer, **case)
                assert isinstance(answer, np.ndarray)
                expect_equal(answer.shape, (env.vocab_size,), "process returns another shape", **case)
                expect_equal(answer.dtype, np.dtype(np.float32), "process returns another dtype", **case)
                expect(bool((answer < np.inf).all()), "a logit is NaN or infinite", got=answer, **case)

    _drawn(subject, run, body)


@check("L2", early=True)
def arguments_alone(subject: LogitsProcessorSubject, run: Run) -> None:
    """An answer depends on the arguments alone: on no earlier call, other sequence or random generator."""

    def body(env: ProcessorEnv, rows: list[_Row]) -> None:
        walked = subject.make(env)
        other_env = attrs.evolve(env, generated_from=env.generated_from + 2)
        other = subject.make(other_env)
        others = _rows(len(rows), other_env, 20, env.generated_from + LONG)
        for number, row in enumerate(rows):
            _ask(other, others[number % len(others)])
            case: dict[str, object] = {"history": row.history, "row": number}
            with contextlib.nullcontext() if number % 16 else own_generators(number):
                got, legal = _ask(walked, row)
            fresh, fresh_legal = _ask(subject.make(env), row)
            what = "the answer is not that of a new processor that is asked for this row alone"
            expect_equal(got, fresh, what, **case)
            expect_equal(legal, fresh_legal, f"{what}: legal", **case)
            again, again_legal = _ask(walked, row)
            expect_equal(again, fresh, "asked again, it answers differently", **case)
            expect_equal(again_legal, fresh_legal, "asked again, legal answers differently", **case)

    _drawn(subject, run, body)


@check("L3")
def arguments_unchanged(subject: LogitsProcessorSubject, run: Run) -> None:
    """A processor changes neither the logits nor the history and the draft that it is given, and prints nothing."""

    def body(env: ProcessorEnv, rows: list[_Row]) -> None:
        processor = subject.make(env)
        for row in rows:
            for legal in (False, True):
                logits, history, draft = row.logits.copy(), list(row.history), list(row.draft)
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                    if legal:
                        processor.legal(tuple(draft), history)
                    else:
                        processor.process(logits, history)
                expect_equal(logits, row.logits, "the logits were changed", history=row.history)
                expect_equal(history, row.history, "the history was changed", history=row.history, draft=row.draft)
                expect(not printed.getvalue(), "something was printed", got=printed.getvalue())

    _drawn(subject, run, body)


@check("L4")
def something_allowed(subject: LogitsProcessorSubject, run: Run) -> None:
    """At least one token stays allowed, after every history that its own masks allow."""

    def body(env: ProcessorEnv, rows: list[_Row]) -> None:
        processor = subject.make(env)
        history = rows[0].history[: env.generated_from]
        for row in [*rows, *rows]:
            answer = processor.process(row.logits.copy(), list(history))
            allowed = np.flatnonzero(np.asarray(answer) > -np.inf)
            expect(len(allowed), "every token is forbidden", history=history)
            further = np.setdiff1d(allowed, env.end_tokens)
            if not len(further):
                break
            history.append(int(further[int(row.logits[0] * 1000) % len(further)]))

    _drawn(subject, run, body)


@check("L5")
def legal_counts(subject: LogitsProcessorSubject, run: Run) -> None:
    """``legal`` returns a plain int, at most the draft's length, and cuts only what ``process`` forbids."""

    def body(env: ProcessorEnv, rows: list[_Row]) -> None:
        processor = subject.make(env)
        for row in rows:
            count: object = processor.legal(row.draft, Context(list(row.history)))
            case = {"history": row.history, "draft": row.draft}
            kind = f"{count!r} of type {type(count).__name__}"
            expect(type(count) is int, "legal does not return a plain int", got=kind, **case)
            assert isinstance(count, int)
            expect(0 <= count <= len(row.draft), "legal is outside the draft", got=count, **case)
            if count < len(row.draft):
                answer = processor.process(row.logits.copy(), [*row.history, *row.draft[:count]])
                token = row.draft[count]
                expect(answer[token] == -np.inf, f"legal cuts token {token}, which process allows", got=count, **case)

    _drawn(subject, run, body)


@check("L6")
def answers_stay(subject: LogitsProcessorSubject, run: Run) -> None:
    """An answer belongs to its receiver: later calls leave it as it was."""

    def body(env: ProcessorEnv, rows: list[_Row]) -> None:
        processor = subject.make(env)
        answers: list[tuple[Float32, Float32, _Row]] = []
        for row in rows:
            answer = processor.process(row.logits.copy(), list(row.history))
            answers = [*answers[-3:], (answer, np.array(answer, copy=True), row)]
            for former, copy, asked in answers[:-1]:
                what = "a later call changed an answer that was handed over"
                expect_equal(former, copy, what, history=asked.history, later=row.history)

    _drawn(subject, run, body)


@check("L7")
def forced_spelling(subject: LogitsProcessorSubject, run: Run) -> None:
    """``forced`` gives ids of the vocabulary, the same again, and ``process`` allows each after those before it."""

    def body(env: ProcessorEnv, rows: list[_Row]) -> None:
        processor = subject.make(env)
        history = rows[0].history[: env.generated_from]
        for row in rows:
            given: object = processor.forced(list(history))
            expect(isinstance(given, list | tuple), "forced returns no list of tokens", got=given, history=history)
            assert isinstance(given, list | tuple)
            again = processor.forced(list(history))
            expect_equal(list(again), list(given), "forced gives other tokens when asked again", history=history)
            for count, token in enumerate(given):
                case = {"history": history, "forced": list(given), "token": token}
                expect(type(token) is int, "forced gives a token that is no plain int", **case)
                expect(0 <= token < env.vocab_size, "forced gives a token outside the vocabulary", **case)
                answer = processor.process(np.zeros(env.vocab_size, np.float32), [*history, *given[:count]])
                expect(bool(answer[token] > -np.inf), "forced gives a token that process forbids there", **case)
            answer = processor.process(row.logits.copy(), list(history))
            allowed = np.flatnonzero(np.asarray(answer) > -np.inf)
            token = int(allowed[int(row.logits[0] * 1000) % len(allowed)]) if len(allowed) else -1
            if token < 0 or token in env.end_tokens:  # L4 says whether a token must be left
                break
            history.append(token)

    _drawn(subject, run, body)

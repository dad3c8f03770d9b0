"""Checks of logits processors: clauses L1 to L7.

One driver asks a processor for rows as a generation does, and compares its answers with those of a new processor.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import Context, ProcessorEnv
from specdec.errors import SpecdecError
from specdec.testing.byte_tokenizer import byte_tokenizer
from specdec.testing.checks import Faults, Run, checks_of, not_applicable, own_generators
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


def _environments(subject: LogitsProcessorSubject) -> list[tuple[ProcessorEnv, int]]:
    """The environments that the processor takes, and the longest history of each."""
    taken, refusal = [], ""
    for vocab, start, longest in ENVIRONMENTS:
        ends = (vocab - 1,) if vocab > 1 else ()
        env = ProcessorEnv(tokenizer=byte_tokenizer(vocab), vocab_size=vocab, end_tokens=ends, generated_from=start)
        try:
            subject.make(env).process(np.zeros(vocab, np.float32), [0] * start)
        except SpecdecError as error:
            refusal = error.message
        else:
            taken.append((env, start + longest))
    if not taken:
        not_applicable(f"it takes no environment of the kit: {refusal}")
    return taken


class _Asked:
    """Asks a processor, and looks at what it answers and whether it leaves alone what it is given."""

    def __init__(self, subject: LogitsProcessorSubject, env: ProcessorEnv, faults: Faults) -> None:
        self.processor, self.env, self.faults = subject.make(env), env, faults
        self.latest: list[tuple[Any, Float32, list[int]]] = []  # answers, copies of them, and their histories

    def process(self, logits: Float32, history: Sequence[int]) -> Float32:
        tokens, before, note = list(history), logits.copy(), self.faults.note
        answer: Any = self.processor.process(logits, history)
        self.faults.note_equal("L3", logits, before, "the logits were changed", history=tokens)
        self.faults.note_equal("L3", list(history), tokens, "the history was changed", history=tokens)
        note("L1", isinstance(answer, np.ndarray), "process returns no array", got=answer, history=tokens)
        answer = np.asarray(answer)
        form, expected = (answer.shape, str(answer.dtype)), ((self.env.vocab_size,), "float32")
        note("L1", form == expected, "process returns another shape or dtype", got=form, expected=expected)
        note("L1", bool((answer < np.inf).all()), "a logit is NaN or infinite", got=answer, history=tokens)
        for former, copied, where in self.latest:
            same = np.array_equal(former, copied)
            note("L6", same, "a later call changed an answer that was handed over", history=where, later=tokens)
        self.latest = [*self.latest[-2:], (answer, np.array(answer, copy=True), tokens)]
        return self.latest[-1][1]

    def legal(self, row: _Row) -> int:
        history, note, draft = list(row.history), self.faults.note, row.draft
        count: Any = self.processor.legal(draft, history)
        case = {"history": row.history, "draft": draft}
        note("L3", history == row.history, "legal changed the history", **case)
        kind = f"{count!r} of type {type(count).__name__}"
        note("L5", type(count) is int, "legal does not return a plain int", got=kind, **case)
        note("L5", 0 <= count <= len(draft), "legal is outside the draft", got=count, **case)
        if 0 <= count < len(draft):
            answer = self.processor.process(row.logits.copy(), [*row.history, *draft[:count]])
            what = f"legal cuts token {draft[count]}, which process allows"
            note("L5", answer[draft[count]] == -np.inf, what, got=count, **case)
        return int(count)

    def forced(self, history: list[int]) -> None:
        given, again = self.processor.forced(list(history)), self.processor.forced(list(history))
        note, case = self.faults.note, {"history": history, "forced": given}
        note("L7", isinstance(given, list | tuple), "forced returns no list of tokens", **case)
        note("L7", list(again) == list(given), "forced gives other tokens when asked again", got=again, **case)
        for count, token in enumerate(given):
            inside = type(token) is int and 0 <= token < self.env.vocab_size
            note("L7", inside, "forced gives what is no plain int inside the vocabulary", got=token, **case)
            if inside:
                zeros = np.zeros(self.env.vocab_size, np.float32)
                allowed = self.processor.process(zeros, [*history, *given[:count]])[token] > -np.inf
                note("L7", bool(allowed), "forced gives a token that process forbids there", got=token, **case)


def _processors(subject: LogitsProcessorSubject, number: int, seed: int, rows: int) -> Faults:
    """Drive a processor through the rows of a generation, beside another sequence."""
    env, longest = (taken := _environments(subject))[number % len(taken)]
    faults, drawn = Faults(), _rows(seed, env, rows, longest)
    other_env = attrs.evolve(env, generated_from=env.generated_from + 2)
    walked, other = _Asked(subject, env, faults), _Asked(subject, other_env, Faults())
    others = _rows(len(drawn), other_env, 20, env.generated_from + LONG)
    chosen: list[int] | None = drawn[0].history[: env.generated_from]  # a text that its own masks allow
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for place, row in enumerate(drawn):
            other.process(others[place % len(others)].logits.copy(), others[place % len(others)].history.copy())
            masked = row.logits.copy()
            masked[place % env.vocab_size] = -np.inf
            history: Sequence[int] = row.history.copy()
            if place % 3:  # the engine has other sequences too
                history = tuple(history) if place % 3 == 1 else Context(row.history.copy())
            fresh, what = _Asked(subject, env, faults), "the answer is not that of a new processor for this row alone"
            expected, legal = fresh.process(row.logits.copy(), list(row.history)), fresh.legal(row)
            with faults.of("L2"), own_generators(place) if place % 16 == 0 else contextlib.nullcontext():
                for logits in (row.logits, masked, row.logits) if env.vocab_size > 1 else (row.logits, row.logits):
                    got = walked.process(logits.copy(), history)
                    if logits is row.logits:
                        faults.note_equal("L2", got, expected, what, history=row.history, row=place)
                    faults.note_equal("L2", walked.legal(row), legal, f"{what}: legal", history=row.history, row=place)
            if chosen is not None:
                walked.forced(chosen)
                allowed = np.flatnonzero(walked.process(row.logits.copy(), list(chosen)) > -np.inf)
                faults.note("L4", len(allowed), "every token is forbidden", history=chosen)
                further = np.setdiff1d(allowed, env.end_tokens)
                token = [int(further[int(abs(row.logits[0]) * 1000) % len(further)])] if len(further) else None
                chosen = None if token is None else [*chosen, *token]
            if "L1" in faults:
                break
    faults.note("L3", not printed.getvalue(), "something was printed", got=printed.getvalue())
    return faults


def _drive(subject: LogitsProcessorSubject, run: Run, clause: str) -> None:
    numbers = st.integers(0, len(ENVIRONMENTS) - 1)
    run.drive(subject, clause, _processors, examples=16, number=numbers, seed=seeds, rows=lengths(ROWS))


checks_of(
    _drive,
    {
        "L1": "``process`` returns float32 ``[V]`` without NaN or infinity above, also for logits with ``-inf`` in "
        "them.",
        "L2": "An answer depends on the arguments alone: on no earlier call, other sequence or random generator.",
        "L3": "A processor changes neither the logits nor the history and the draft that it is given, and prints "
        "nothing.",
        "L4": "At least one token stays allowed, after every history that its own masks allow.",
        "L5": "``legal`` returns a plain int, at most the draft's length, and cuts only what ``process`` forbids.",
        "L6": "An answer belongs to its receiver: later calls leave it as it was.",
        "L7": "``forced`` gives ids of the vocabulary, the same again, and ``process`` allows each after those before "
        "it.",
    },
)

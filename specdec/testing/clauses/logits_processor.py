"""Checks of logits processors: clauses L1 to L7.

One driver asks a processor for rows as a generation does, and compares its answers with those of a new processor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import Context, ProcessorEnv
from specdec.errors import SpecdecError
from specdec.testing.checks import Faults, driven, not_applicable, own_generators
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import PluginSubject, byte_tokenizer

if TYPE_CHECKING:
    from specdec.contract import Float32

ROWS = 120  # rows asked for in one run
ENVIRONMENTS = ((257, 3, 700), (40, 1, 60), (257, 60, 200), (5, 9, 30), (1, 2, 20), (257, 300, 700))
"""Vocabulary, where generation starts, and the most tokens after that."""

Row = tuple["Float32", list[int], tuple[int, ...]]
"""The logits of a row, its history, and drafted tokens after it."""


def _rows(seed: int, env: ProcessorEnv, count: int, longest: int) -> list[Row]:
    """Rows as a generation asks for them: histories grow, drafts are rejected, and now and then much is taken back."""
    rng, vocab, start = np.random.default_rng([seed, 3]), env.vocab_size, env.generated_from
    rows: list[Row] = []
    history = rng.integers(0, vocab, start).tolist()
    while len(rows) < count:
        if rng.random() < 0.1 or len(history) >= longest:
            del history[max(start, len(history) - int(2 ** rng.uniform(0, 9))) :]
        steps = 1 if rng.random() < 0.8 else int(2 ** rng.uniform(0, 7))
        for _ in range(min(steps, longest - len(history))):  # some tokens come again
            again = rng.random() < 0.4
            history.append(int(rng.choice(history[-9:])) if again and history else int(rng.integers(vocab)))
        draft = rng.integers(0, vocab, int(rng.choice([*range(9), 11, 15]))).tolist()
        if rng.random() < 0.5:
            draft = [*draft[:2], *history[-3:]][: int(rng.integers(0, 6))]
        logits = rng.normal(0, 3, vocab).astype(np.float32)
        if rng.random() < 0.2:
            logits[int(rng.integers(vocab))] = 40.0
        rows.append((logits, list(history), tuple(draft)))
    return rows


def _environments(subject: PluginSubject) -> list[tuple[ProcessorEnv, int]]:
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
    """Asks a processor, and looks at what it answers and whether it leaves logits alone."""

    def __init__(self, subject: PluginSubject, env: ProcessorEnv, faults: Faults) -> None:
        self.processor, self.vocab, self.faults = subject.make(env), env.vocab_size, faults
        self.latest: tuple[Any, Float32] | None = None  # an answer, and a copy of it

    def process(self, logits: Float32, history: Sequence[int]) -> Float32:
        tokens, before, note = list(history), logits.copy(), self.faults.note
        answer: Any = self.processor.process(logits, history)
        self.faults.note_equal("L3", logits, before, "the logits were changed", history=tokens)
        note("L1", isinstance(answer, np.ndarray), "process returns no array", got=answer, history=tokens)
        answer = np.asarray(answer)
        form, expected = (answer.shape, str(answer.dtype)), ((self.vocab,), "float32")
        note("L1", form == expected, "process returns another shape or dtype", got=form, expected=expected)
        note("L1", bool((answer < np.inf).all()), "a logit is NaN or infinite", got=answer, history=tokens)
        if self.latest is not None:
            what = "a later call changed an answer that was handed over"
            self.faults.note_equal("L6", *self.latest, what, later=tokens)
        self.latest = answer, answer.copy()
        return self.latest[1]

    def legal(self, row: Row) -> int:
        logits, history, draft = row
        note, case = self.faults.note, {"history": history, "draft": draft}
        count: Any = self.processor.legal(draft, list(history))
        inside = type(count) is int and 0 <= count <= len(draft)
        note("L5", inside, "legal is no plain int of 0 to the draft's length", got=repr(count), **case)
        if inside and count < len(draft):
            answer = self.processor.process(logits.copy(), [*history, *draft[:count]])
            what = f"legal cuts token {draft[count]}, which process allows"
            note("L5", answer[draft[count]] == -np.inf, what, got=count, **case)
        return int(count)

    def forced(self, history: list[int]) -> None:
        given, again = self.processor.forced(list(history)), self.processor.forced(list(history))
        note, case = self.faults.note, {"history": history, "forced": given}
        note("L7", isinstance(given, list | tuple), "forced returns no list of tokens", **case)
        note("L7", list(again) == list(given), "forced gives other tokens when asked again", got=again, **case)
        for count, token in enumerate(given):
            inside = type(token) is int and 0 <= token < self.vocab
            note("L7", inside, "forced gives what is no plain int inside the vocabulary", got=token, **case)
            if inside:
                zeros = np.zeros(self.vocab, np.float32)
                allowed = self.processor.process(zeros, [*history, *given[:count]])[token] > -np.inf
                note("L7", bool(allowed), "forced gives a token that process forbids there", got=token, **case)


def _processors(subject: PluginSubject, number: int, seed: int, rows: int) -> Faults:
    """Drive a processor through the rows of a generation, beside another sequence."""
    env, longest = (taken := _environments(subject))[number % len(taken)]
    faults, other_env = Faults(), attrs.evolve(env, generated_from=env.generated_from + 2)
    driven, other = _Asked(subject, env, faults), _Asked(subject, other_env, Faults())
    drawn, others = _rows(seed, env, rows, longest), _rows(rows, other_env, 20, other_env.generated_from + 700)
    chosen = drawn[0][1][: env.generated_from]  # a text that its own masks allow
    going = True
    for place, row in enumerate(drawn):
        logits, tokens, _ = row
        aside, past, _ = others[place % len(others)]
        other.process(aside.copy(), list(past))
        masked = logits.copy()
        masked[place % env.vocab_size] = -np.inf if env.vocab_size > 1 else 0
        history = (list, tuple, Context)[place % 3](list(tokens))  # all of them are sequences
        fresh, what = _Asked(subject, env, faults), "the answer is not that of a new processor for this row alone"
        expected, legal = fresh.process(logits.copy(), list(tokens)), fresh.legal(row)
        with faults.of("L2"), own_generators(place) if place % 16 == 0 else contextlib.nullcontext():
            for values in (logits, masked, logits):
                got = driven.process(values.copy(), history)
                if values is logits:
                    faults.note_equal("L2", got, expected, what, history=tokens, row=place)
                faults.note_equal("L2", driven.legal(row), legal, f"{what}: legal", history=tokens, row=place)
        if "L1" in faults:
            break
        if going:
            driven.forced(chosen)
            allowed = np.flatnonzero(driven.process(logits.copy(), list(chosen)) > -np.inf)
            faults.note("L4", len(allowed), "every token is forbidden", history=chosen)
            further = np.setdiff1d(allowed, env.end_tokens).tolist()
            chosen += further[place % max(len(further), 1) :][:1]
            going = bool(further)
    return faults


driven(
    _processors,
    {
        "L1": "``process`` returns float32 ``[V]`` without NaN or infinity above, also for logits with ``-inf`` in "
        "them.",
        "L2": "An answer depends on the arguments alone: on no earlier call, other sequence or random generator.",
        "L3": "A processor leaves the logits that it is given as they are.",
        "L4": "At least one token stays allowed, after every history that its own masks allow.",
        "L5": "``legal`` returns a plain int, at most the draft's length, and cuts only what ``process`` forbids.",
        "L6": "An answer belongs to its receiver: later calls leave it as it was.",
        "L7": "``forced`` gives ids of the vocabulary, the same again, and ``process`` allows each after those before "
        "it.",
    },
    examples=16,
    number=st.integers(0, len(ENVIRONMENTS) - 1),
    seed=seeds,
    rows=lengths(ROWS),
)

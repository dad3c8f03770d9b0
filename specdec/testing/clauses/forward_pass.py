"""Checks of targets: clauses F2 to F10, F12, F15, F16 and F25 to F28.

The reference is the target itself in plain decoding: a fresh state, one row per pass.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np

from specdec.backends.arrays import HostLogits
from specdec.contract import NO_NEEDS, Choosing, Context, Drafter, DrafterEnv, Logits, Needs, Parity, Sampling, State
from specdec.errors import PromptError, ShapeError, StateError
from specdec.sampling import Rows
from specdec.testing.checks import Run, check, expect, expect_equal, expect_error, not_applicable, own_generators
from specdec.testing.clauses.hidden_states import hidden_by_name
from specdec.testing.engine_run import ScriptedDrafter, plain_decoding, run_engine
from specdec.testing.memory import MOST_KEPT, alive
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import ForwardPassSubject
from specdec.testing.target_under_test import Play, TargetUnderTest, spoil
from specdec.verifiers.strict import StrictVerifier

if TYPE_CHECKING:
    from numpy.typing import NDArray


def play(
    subject: ForwardPassSubject, run: Run, what: str, *kinds: str, hostile: bool = False, examples: int = 8
) -> None:
    """Take a long text in by drawn steps of these kinds, with and without hidden states."""
    target = TargetUnderTest(subject)

    def body(length: int, seed: int, hidden: bool, left_out: int) -> None:
        needs = target.offered(0, target.info.layers) if hidden else NO_NEEDS
        Play(target, what, needs=needs, hostile=hostile).run(kinds[left_out:], seed, length)

    run.explore(
        body,
        examples=examples,
        first=[{"length": 60, "seed": seed, "hidden": seed > 1, "left_out": seed % 2} for seed in (1, 2)],
        length=lengths(60),
        seed=seeds,
        hidden=st.booleans(),
        left_out=st.integers(0, 1),  # some faults need a session without chunks
    )


@check("F2")
def any_interleaving(subject: ForwardPassSubject, run: Run) -> None:
    """After any interleaving of prefill, decode and commit, every row has the logits of plain decoding."""
    play(subject, run, "a row differs from plain decoding", "prefill", "decode", "twice", "decode", examples=12)


@check("F3")
def rewind_reaches(subject: ForwardPassSubject, run: Run) -> None:
    """``rewind(length)`` returns the length reached, at most ``length``; the state is then a plainly decoded one."""
    what = "after rewinds a row differs from plain decoding"
    play(subject, run, what, "prefill", "rewind", "decode", examples=12)
    target = TargetUnderTest(subject)
    most = target.info.max_rows if target.chunks_differ else 300
    for length in (1, 5, 40, 150):
        if length < target.length:
            steps = [("prefill", min(most, length - at)) for at in range(0, length, most)]
            Play(target, what).take(*steps, ("rewind", 0), ("rewind", length), *steps, ("decode", 1))


@check("F4")
def snapshots(subject: ForwardPassSubject, run: Run) -> None:
    """``restore(snapshot)`` gives the state at the snapshot, made for the needs that are asked for, whatever happened
    to the original or to copies since; rows that are not committed are not in it."""
    if subject.make().info.max_positions < 4:
        not_applicable("a state holds too few tokens")
    play(subject, run, "a restored state differs from plain decoding", "prefill", "restore", "decode", "restore")


@check("F5")
def row_invariance(subject: ForwardPassSubject, run: Run) -> None:
    """BITWISE: the bits of a row do not depend on the rows of its pass. NUMERIC: they are close."""
    target = TargetUnderTest(subject)
    for number, held in enumerate((5, 300)):
        held = min(held, target.length // 2)
        prompt = target.text[:held]
        most = min(target.info.max_rows, target.info.max_positions - held)
        for count in (*range(1, min(most, 33)), *range(33, most, 29), most) if number == 0 else (most, 2):
            state = target.prefilled(prompt, capacity=held + most)
            logits = target.model.decode(state, target.text[held : held + count]).need_logits().rows()
            for row in range(len(logits)):
                what = f"row {row} of {count} differs from a pass of one row"
                target.expect_close(logits[row], target.plain(held + row), what, tokens_before=held)


@check("F6")
def any_chunking(subject: ForwardPassSubject, run: Run) -> None:
    """Any chunking of a prompt leaves the same state: bit-equal with BITWISE parity, except that ``parity_reason`` may
    say that chunks of more than ``max_rows`` tokens have other bits."""
    target = TargetUnderTest(subject)
    most, longest = target.info.max_rows, min(300, target.length - 1)

    def body(length: int, chunk: int) -> None:
        state = target.state(min(longest + 8, target.info.max_positions))
        for at in range(0, length, chunk):
            target.model.prefill(state, target.text[at : min(at + chunk, length)])
        got, what = target.next_logits(state, target.text[length]), "a prompt in these chunks leaves a different state"
        exact = chunk <= most or not target.chunks_differ
        target.expect_close(got, target.plain(length), what, exact=exact, prompt_tokens=length)

    chunks = [chunk for chunk in (longest, 1, most + 1, 65, most, 7, 129) if chunk <= longest]
    first = [{"length": min(2 * chunk + 3, longest), "chunk": chunk} for chunk in chunks]
    run.explore(body, examples=8, first=first, length=lengths(longest), chunk=lengths(longest))


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


CLOSE = 1e-3  # nats between logsumexp and the float64 sum: probabilities are right to a thousandth
CHOICES = (
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.7, seed=6, top_p=0.8),
    Sampling(temperature=1.3, seed=2**62, top_k=3, repetition_penalty=1.5),
    Sampling(temperature=0.9, seed=7, min_p=0.1, frequency_penalty=0.5, presence_penalty=-0.5),
    Sampling(logit_bias={0: 2.5}, banned=(1,)),
    Sampling(frequency_penalty=-50.0),  # negative: what came most often, in the draft too, is best
    Sampling(temperature=0.5, seed=8, presence_penalty=-50.0, min_new_tokens=4, end_tokens=(1,)),
)
"""Settings to compare choices under."""


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


def check_logits(logits: Logits, count: int, vocab: int, picked: Sequence[int]) -> NDArray[np.float32]:
    """Check that every method agrees with ``rows``, and return those: ``[count, vocab]``.

    Args:
        picked: tokens to gather, one for each of the first rows; the best token of row 0 is gathered too.
    Raises: Broken.
    """
    rows = logits.rows()
    expect_equal(rows.shape, (count, vocab), "rows() has the wrong shape")
    expect_equal(rows.dtype, np.dtype(np.float32), "rows() is not float32")
    expect_equal(len(logits), count, "len() is not the number of rows")
    expect(not np.isnan(rows).any(), "a logit is NaN")
    best = rows.argmax(axis=1).tolist()
    _expect_ids(logits.argmax(), best, "argmax()")
    for k in (1, 2, 3, vocab):
        ids, values = logits.topk(k)
        for row in range(count):
            order = np.lexsort((np.arange(vocab), -rows[row]))[:k].tolist()
            _expect_ids(ids[row], order, f"topk({k}) of row {row}")
            expect_equal(np.asarray(values[row], np.float32), rows[row][order], f"topk({k}) gives different logits")
    for chosen in (list(picked), [best[0], *picked[1:]]):
        truth = [float(rows[row, token]) for row, token in enumerate(chosen)]
        expect_equal(list(logits.gather(chosen)), truth, "gather() differs from rows()")
        expect_equal(list(logits.gather(chosen[:1])), truth[:1], "gather() of fewer tokens than rows is wrong")
    wide = rows.astype(np.float64)
    sums = wide.max(axis=1) + np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1))
    got = np.asarray(logits.logsumexp(), np.float64)
    close = got.shape == sums.shape and bool((np.abs(got - sums) <= CLOSE).all())
    expect(close, "logsumexp() differs from rows()", got=got, expected=sums)
    drafted = [number // 2 % vocab for number in range(count - 1)]
    for sampling in CHOICES if vocab > 2 and np.isfinite(rows).any(axis=1).all() else ():
        context = Context([0, vocab - 1, 0], sampling, generated_from=1)
        reference = Rows(HostLogits(rows), drafted, context)
        for row, token in enumerate(logits.choose(Choosing(drafted, context))):
            expected = reference.choose(row)
            what = "choose() differs from the reference"
            expect(token in (None, expected), what, got=token, expected=expected, row=row, sampling=sampling)
    return rows


def _expect_ids(got: Sequence[int], expected: list[int], what: str) -> None:
    expect_equal(list(got), expected, f"{what} differs from rows()")
    types = {type(token).__name__ for token in got}
    expect(types <= {"int"}, f"an id of {what} is not a plain int", got=sorted(types))


@check("F9")
def outputs(subject: ForwardPassSubject, run: Run) -> None:
    """A pass returns exactly what its state was made for: hidden states, and from decode the logits of every row."""
    target = TargetUnderTest(subject)
    rows = min(2, target.info.max_rows)
    hidden_needs = target.offered(0, 1)
    every = (NO_NEEDS, hidden_needs, Needs(mtp=True)) if target.info.mtp_layers else (NO_NEEDS, hidden_needs)
    for needs in every:
        state = target.state(needs=needs)
        tokens = target.tokens(range(5 + rows))
        passes = target.model.prefill(state, tokens[:5]), target.model.decode(state, tokens[5:])
        expect(passes[0].logits is None, "prefill gives logits", got=passes[0].logits)
        expect_equal(len(passes[1].need_logits()), rows, "decode does not give a row of logits per token")
        for output, count in zip(passes, (5, rows), strict=True):
            expect_equal(output.rows, count, "a pass reports the wrong number of rows", needs=needs)
            expect_equal(output.hidden is not None, needs.final_hidden, "the final state breaks needs", needs=needs)
            expect_equal(tuple(output.boundaries), needs.boundaries, "boundaries break needs", needs=needs)
            for name, hidden in hidden_by_name(output).items():
                slices = (hidden, hidden[-1:], hidden[:0], hidden[:1].join([hidden, hidden[1:]]))
                expected = [count, 1, 0, 2 * count]
                expect_equal([*map(len, slices)], expected, f"{name} or a part of it has the wrong number of rows")
        expect_equal(state.pairs is not None, needs.mtp, "the ledger of MTP pairs breaks needs", needs=needs)


@check("F10")
def counts_tokens(subject: ForwardPassSubject, run: Run) -> None:
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


@check("F12")
def states_apart(subject: ForwardPassSubject, run: Run) -> None:
    """States of one target do not influence each other, and logits stay valid while another sequence has a pass."""
    play(subject, run, "a pass of another sequence changed this one", "beside", "prefill", "beside", examples=6)
    target = TargetUnderTest(subject)
    states = [target.prefilled(target.text[:held]) for held in (1, min(5, target.room // 2))]
    for state in states:  # both passes before either commits
        target.model.decode(state, target.text[state.length : state.length + target.most_rows(state.length, 2)])
    for state in states:
        at = state.length
        target.model.commit(state, 1)
        what = "another state's pass changed this one"
        target.expect_close(target.next_logits(state, target.text[at + 1]), target.plain(at + 1), what)


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


@check("F25")
def through_files(subject: ForwardPassSubject, run: Run) -> None:
    """A state that was copied, or saved to a session's file and loaded, continues with the bits of the original."""
    what = "after a copy or a file a row differs from plain decoding"
    play(subject, run, what, "file", "prefill", "decode", "restore", "decode", examples=5)


@check("F26")
def hostile_hands(subject: ForwardPassSubject, run: Run) -> None:
    """What a target hands over may be written into, and what it was given is the caller's again: neither changes what
    the target answers later, and a target leaves its arguments as they are."""
    what = "a caller wrote into what it was handed, and a later row differs from plain decoding"
    play(subject, run, what, "decode", "prefill", "restore", "beside", "decode", hostile=True, examples=5)
    target = TargetUnderTest(subject)
    prompt = target.tokens(range(min(4, target.room // 2)))
    rows = target.tokens(range(20, 20 + target.most_rows(len(prompt), 3)))
    truth = target.model.decode(target.prefilled(prompt), rows).need_logits().rows().copy()
    for _ in range(3):  # the same question again
        got = target.model.decode(target.prefilled(prompt), rows).need_logits().rows()
        target.expect_close(got, truth, what)
        spoil(got)


@check("F27")
def no_chance(subject: ForwardPassSubject, run: Run) -> None:
    """A target reads and moves no global random generator, and answers the same however often it is asked."""
    target = TargetUnderTest(subject)
    prompt = target.tokens(range(min(6, target.room // 2)))

    def answers(seed: int) -> list[NDArray[np.float32]]:
        model, rows = subject.make(), []
        with own_generators(seed):
            state = model.new_state(target.room, target.offered(0))
            model.prefill(state, prompt)
            for count in (1, 2, target.most_rows(len(prompt))):
                rows.append(model.decode(state, target.tokens(range(20, 20 + count))).need_logits().rows().copy())
                model.commit(state, 0)
            copy = model.restore(model.snapshot(state))
            rows.append(model.decode(copy, prompt[:1]).need_logits().rows().copy())
            model.rewind(copy, copy.length // 2)
        return rows

    first = answers(1)
    for seed in (2, 3):
        for got, truth in zip(answers(seed), first, strict=True):
            expect_equal(got, truth, "the same calls give other logits when they are repeated")


@check("F28")
def states_are_freed(subject: ForwardPassSubject, run: Run) -> None:
    """A state is freed with its sequence: a target keeps neither states nor what it handed over."""
    target = TargetUnderTest(subject)
    prompt = target.tokens(range(min(4, target.room // 2)))
    references: dict[str, list[weakref.ref[Any]]] = {}
    for _ in range(3 * MOST_KEPT):
        state = target.prefilled(prompt)
        logits = target.model.decode(state, prompt[:1]).need_logits()
        logits.argmax()
        target.model.commit(state, 1)
        copy = target.model.restore(target.model.snapshot(state))
        target.next_logits(copy, prompt[0])
        for part in (state, copy, logits):
            with contextlib.suppress(TypeError):  # a class without weak references
                references.setdefault(type(part).__name__, []).append(weakref.ref(part))
    for kind, dead in references.items():
        kept = alive(dead)
        expect(kept <= MOST_KEPT, f"{kind} stays in memory after its sequence", got=kept, expected=MOST_KEPT)

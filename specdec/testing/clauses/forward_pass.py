"""Checks of targets: clauses F2 to F10, F12, F13, F15 to F19, F21, F22 and F25 to F30.

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
from specdec.contract import (
    Choosing,
    Context,
    Drafter,
    DrafterEnv,
    Logits,
    Needs,
    Parity,
    Sampling,
    SharedWeights,
    State,
)
from specdec.errors import PromptError, ShapeError, StateError, UnsupportedError
from specdec.sampling import Rows
from specdec.testing.checks import (
    Broken,
    Run,
    check,
    expect,
    expect_equal,
    expect_error,
    not_applicable,
    own_generators,
)
from specdec.testing.engine_run import ScriptedDrafter, plain_decoding, run_engine
from specdec.testing.memory import MOST_KEPT, alive
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import ForwardPassSubject
from specdec.testing.target_under_test import MTP, Play, TargetUnderTest, hidden_by_name, under_test
from specdec.verifiers.strict import StrictVerifier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]


def play(
    subject: ForwardPassSubject,
    run: Run,
    what: str,
    *kinds: str,
    needs: Callable[[Needs], object] = lambda needs: True,
    length: int = 60,
    examples: int = 6,
    **how: bool,
) -> None:
    """Take a long text in by drawn steps of these kinds, with states made for all that the target gives.

    Args:
        needs: which states; the clause does not apply to a target that gives none of them.
        length: at most so many steps.
        how: ``hostile`` and ``at_once`` of ``Play``.
    """
    target = under_test(subject)
    choices = list(filter(needs, target.needs()))
    if not choices:
        not_applicable("this target gives no hidden states between passes, or has no MTP head")

    def body(length: int, seed: int, made_for: int, left_out: int) -> None:
        Play(target, what, needs=choices[made_for % len(choices)], **how).run(kinds[left_out:], seed, length)

    run.explore(
        body,
        examples=examples,
        first=[{"length": length, "seed": seed, "made_for": seed - 1, "left_out": seed % 2} for seed in (1, 2)],
        length=lengths(length),
        seed=seeds,
        made_for=st.integers(0, len(choices) - 1),
        left_out=st.integers(0, 1),  # some faults need a session without chunks
    )


@check("F2")
def any_interleaving(subject: ForwardPassSubject, run: Run) -> None:
    """After any interleaving of prefill, decode and commit, every row has the logits of plain decoding."""
    play(subject, run, "a row differs from plain decoding", "prefill", "decode", "twice", "decode", examples=8)


@check("F3")
def rewind_reaches(subject: ForwardPassSubject, run: Run) -> None:
    """``rewind(length)`` returns the length reached, at most ``length``; the state is then a plainly decoded one."""
    what = "after rewinds a row differs from plain decoding"
    play(subject, run, what, "prefill", "rewind", "decode", examples=8)
    target = under_test(subject)
    for length in (1, 5, 40, 150):
        if length < target.length:
            steps = [("prefill", min(target.chunk, length - at)) for at in range(0, length, target.chunk)]
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
    target = under_test(subject)
    for number, before in enumerate((5, 300)):
        before = min(before, target.length // 2)
        most = min(target.info.max_rows, target.length - before)
        for count in (*range(1, min(most, 33)), *range(33, most, 29), most) if number == 0 else (most, 2):
            play = Play(target, f"in a pass of {count} rows, one differs from a pass of its own")
            target.prefill(play.state, before)
            play.at = before
            play.take(("decode", min(count, most)))


@check("F6")
def any_chunking(subject: ForwardPassSubject, run: Run) -> None:
    """Any chunking of a prompt leaves the same state: bit-equal with BITWISE parity, except that ``parity_reason`` may
    say that chunks of more than ``max_rows`` tokens have other bits."""
    target = under_test(subject)
    most, longest = target.info.max_rows, min(300, target.length - 1)

    def body(length: int, chunk: int) -> None:
        exact = chunk <= most or not target.chunks_differ
        steps = [("prefill", min(chunk, length - at)) for at in range(0, length, chunk)]
        what = "after a prompt in these chunks a row differs from plain decoding"
        Play(target, what, exact=exact).take(*steps, ("decode", 1))

    chunks = [chunk for chunk in (longest, 1, most + 1, 65, most, 7, 129) if chunk <= longest]
    first = [{"length": min(2 * chunk + 3, longest), "chunk": chunk} for chunk in chunks]
    run.explore(body, examples=8, first=first, length=lengths(longest), chunk=lengths(longest))


def _misuses(target: TargetUnderTest) -> list[tuple[str, Callable[[State], object], type[Exception]]]:
    model, info, token = target.model, target.info, target.text[1]
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
    target = under_test(subject)
    capacity = min(12, target.info.max_positions)
    length = min(4, capacity - 1)
    for what, misuse, error in _misuses(target):
        state = target.prefilled(length, capacity)
        expect_error(error, partial(misuse, state), what)
        expect_equal(state.length, length, f"{what} changed the length")
        target.expect_next(state, f"{what} changed the state")
    state = target.prefilled(length, capacity)
    target.model.decode(state, target.text[:1])
    target.model.rewind(state, length)
    expect_error(StateError, lambda: target.model.commit(state, 1), "commit of rows that were decoded before a rewind")
    if target.info.max_rows >= 3 and capacity > 2:
        full = target.prefilled(capacity - 2, capacity)
        expect_error(StateError, lambda: target.model.decode(full, target.text[:3]), "decode over the capacity")


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
    target = under_test(subject)
    vocab = target.info.vocab_size
    for number in run.repeat(12, least=3):
        before = min(number + 3, target.length // 2)
        rows = min((3, 1, 16)[number % 3], target.info.max_rows, target.length - before)
        drafted = target.text[before : before + rows]
        logits = target.model.decode(target.prefilled(before), drafted).need_logits()
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
    target = under_test(subject)
    rows = min(2, target.info.max_rows)
    for needs in target.needs():
        before = min(5, target.length - rows)
        Play(target, "a row differs from plain decoding", needs=needs).take(("prefill", before), ("decode", rows))


@check("F10")
def counts_tokens(subject: ForwardPassSubject, run: Run) -> None:
    """A state counts its committed tokens and its bytes, has the requested capacity, and can be filled completely by
    passes of any number of rows."""
    target = under_test(subject)
    capacity = min(9, target.info.max_positions)
    for rows in range(1, min(target.info.max_rows, capacity - 1) + 1):
        play = Play(target, "the last positions of a state are not usable", capacity=capacity)
        expect_equal((play.state.length, play.state.capacity), (0, capacity), "an empty state has another size")
        first = min(capacity // 2, capacity - rows)
        play.take(("prefill", first), *[("decode", 1)] * (capacity - rows - first), ("decode", rows))
        taken = play.state.nbytes()
        expect(type(taken) is int and taken > 0, "nbytes is not the number of bytes of its tokens", got=taken)


@check("F12")
def states_apart(subject: ForwardPassSubject, run: Run) -> None:
    """States of one target do not influence each other, and logits stay valid while another sequence has a pass."""
    play(subject, run, "a pass of another sequence changed this one", "beside", "prefill", "beside", examples=6)


@check("F13")
def mtp_drafts(subject: ForwardPassSubject, run: Run) -> None:
    """Without a head, MTP drafts are refused; with one, true pairs stay, provisional ones go, chunks have no effect."""
    target = under_test(subject)
    error = StateError if target.info.mtp_layers else UnsupportedError
    what = "a draft from a state that was made without Needs.mtp"
    expect_error(error, lambda: target.model.draft_mtp(target.prefilled(2), target.text[2], 1), what)
    if not target.info.mtp_layers:
        expect_error(UnsupportedError, lambda: target.state(needs=MTP), "a state for MTP drafts, without a head")
        return
    play(subject, run, "MTP drafts depend on chunks or on earlier drafts", "prefill", "draft", "draft", **_HEAD)


_HEAD: dict[str, Any] = {"needs": lambda needs: needs.mtp, "length": 30}
_HIDDEN: dict[str, Any] = {"needs": lambda needs: needs.hidden, "examples": 4}


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
    target = under_test(subject)
    info = target.info
    sizes = {"vocab_size": 1, "hidden_size": 1, "max_positions": 1, "max_rows": 2, "mtp_layers": 0}
    for name, least in sizes.items():
        value = getattr(info, name)
        expect(type(value) is int and value >= least, f"{name} is not an int of {least} or more", got=value)
    expect(isinstance(info.parity, Parity), "parity is not declared", got=info.parity)
    Play(target, "a row differs from plain decoding").take(("prefill", 1), ("decode", 1), ("restore", 0))
    expect_equal(target.model.info, info, "passes change info")


@check("F17")
def hidden_states_keep(subject: ForwardPassSubject, run: Run) -> None:
    """Hidden states stay valid whatever passes run later: a drafter may hold them for many cycles."""
    play(subject, run, "a row differs from plain decoding", "prefill", "decode", "decode", **_HIDDEN)


@check("F21")
def any_passes(subject: ForwardPassSubject, run: Run) -> None:
    """Hidden states do not depend on chunks, rows per pass or other needs: bit-equal if BITWISE, close if NUMERIC."""
    play(subject, run, "a row differs from plain decoding", "prefill", "twice", "rewind", "prefill", **_HIDDEN)
    target = under_test(subject)
    for needs in target.needs():
        for count in (17, 65, 300) if needs.hidden else ():
            if count < target.length:
                exact = count <= target.info.max_rows or not target.chunks_differ
                Play(target, "a long prompt", needs=needs, exact=exact).take(("prefill", count))


@check("F18")
def drafts_in_one_call(subject: ForwardPassSubject, run: Run) -> None:
    """A greedy draft in one call gives the same tokens and the same state as single steps."""
    what = "a draft in one call differs from single steps"
    play(subject, run, what, "decode", "draft", "prefill", "draft", at_once=True, **_HEAD)


@check("F22")
def ledger(subject: ForwardPassSubject, run: Run) -> None:
    """``state.pairs`` accounts for every committed token, fed or waiting, after any calls, and drafts do not change:
    bit-equal with BITWISE parity, except that more than ``max_rows`` waiting pairs are a chunk as in F6."""
    kinds = ("prefill", "decode", "draft", "decode", "draft", "rewind", "restore")
    play(subject, run, "a draft differs from that of a fresh state", *kinds, examples=8, **_HEAD)


@check("F19")
def draft_heads(subject: ForwardPassSubject, run: Run) -> None:
    """A draft head gives the MTP head's logits at its ids and -inf elsewhere; ``extended`` adds ids to a new head."""
    target = under_test(subject)
    model, vocab, length = target.model, target.info.vocab_size, min(5, target.length - 1)
    ids = sorted({*target.text[:3], vocab - 1})[: max(1, vocab - 2)]
    rest = [token for token in range(vocab) if token not in ids] or ids
    first, second = rest[0], rest[-1]
    try:
        head = model.draft_head(ids[::-1])
    except UnsupportedError as error:
        not_applicable(f"it makes no draft heads: {error.args[0] if error.args else error}")
    both = head.extended([second, ids[0], first])
    alone, other = head.extended([first]), head.extended([second])  # two extensions of one head
    heads = [
        (head, ids),
        (both, sorted({*ids, first, second})),
        (alone, sorted({*ids, first})),
        (other, sorted({*ids, second})),
        (alone.extended([second]), sorted({*ids, first, second})),
        (head.extended([]), ids),
    ]

    def steps(head: Any = None) -> list[Float32]:
        state = target.prefilled(length, needs=MTP)
        return target.draft(state, target.text[length], 2, head=head, forced=target.text[7:9])[1]

    full = steps()
    for pruned, expected in heads:
        expect_equal(list(pruned.tokens), expected, "a head's ids or their order differ from the request")
        for name, logits, plain in zip(("true pairs", "a chained pair"), steps(pruned), full, strict=True):
            beyond = np.setdiff1d(np.flatnonzero(logits > -np.inf), expected)
            expect(not len(beyond), f"over {name}, an id outside the head has a logit", got=beyond, expected=expected)
            what = f"over {name}, the logits differ from those of the whole head"
            target.expect_close(logits[expected], plain[expected], what, exact=False, ids=expected)
    target.expect_close(steps()[0], full[0], "draft heads change the logits of the whole head")
    for outside in (vocab, -1):
        for name, make in (("draft_head", model.draft_head), ("extended", head.extended)):
            what = f"{name} with an id outside the vocabulary"
            expect_error(PromptError, partial(make, [ids[0], outside]), what, id=outside)


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
    target = under_test(subject)
    if target.info.mtp_layers:
        play(subject, run, "after a caller used its list of tokens again", "decode", "draft", hostile=True, **_HEAD)
    rows = min(3, target.info.max_rows, target.length)
    for _ in range(3):  # the same question again
        play_again = Play(target, what, hostile=True)
        play_again.take(("decode", rows))


@check("F27")
def no_chance(subject: ForwardPassSubject, run: Run) -> None:
    """A target reads and moves no global random generator, and answers the same however often it is asked."""
    for seed in (1, 2, 3):
        target = TargetUnderTest(subject)
        with own_generators(seed):
            for needs in target.needs():
                player = Play(target, "the same calls give other logits when they are repeated", needs=needs)
                rows = min(target.info.max_rows, target.length - 3)
                player.take(("prefill", 2), ("draft", 2), ("decode", rows), ("restore", 0), ("rewind", 1))


@check("F28")
def states_are_freed(subject: ForwardPassSubject, run: Run) -> None:
    """A state is freed with its sequence: a target keeps neither states nor what it handed over."""
    target = under_test(subject)
    references: dict[str, list[weakref.ref[Any]]] = {}
    for _ in range(3 * MOST_KEPT):
        state = target.prefilled(min(4, target.length - 1))
        logits = target.model.decode(state, target.text[:1]).need_logits()
        logits.argmax()
        target.model.commit(state, 1)
        copy = target.model.restore(target.model.snapshot(state))
        target.model.decode(copy, target.text[:1])
        for part in (state, copy, logits):
            with contextlib.suppress(TypeError):  # a class without weak references
                references.setdefault(type(part).__name__, []).append(weakref.ref(part))
    for kind, dead in references.items():
        kept = alive(dead)
        expect(kept <= MOST_KEPT, f"{kind} stays in memory after its sequence", got=kept, expected=MOST_KEPT)


@check("F29")
def shared_weights(subject: ForwardPassSubject, run: Run) -> None:
    """``shared_weights`` gives finite matrices ``[V, H]`` and a scale above 0, the same at every call, or raises
    UnsupportedError."""
    target = under_test(subject)
    try:
        shared = target.model.shared_weights()
    except UnsupportedError as error:
        not_applicable(f"this target hands out no weights: {error.message}")
    before = _readings(shared, target)
    Play(target, "a row differs from plain decoding").take(("prefill", 1), ("decode", 1))
    for again in (shared, target.model.shared_weights()):
        expect_equal(again.embed_scale, shared.embed_scale, "the scale of embeddings changed")
        for what, array in _readings(again, target).items():
            expect_equal(array, before[what], f"{what} changed between two calls, or in a pass")


def _readings(shared: SharedWeights, target: TargetUnderTest) -> dict[str, Float32]:
    """What a head reads of both matrices: themselves, or through their ops embedded tokens and the logits of these."""
    vocab, size = target.info.vocab_size, target.info.hidden_size
    scale: object = shared.embed_scale
    known = isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < float("inf")
    expect(known, "the scale of embeddings is no number above 0", got=scale)
    if shared.ops is None:
        matrices = {"embed_tokens": shared.embed_tokens, "lm_head": shared.lm_head}
        values = {name: _floats(matrix) for name, matrix in matrices.items()}
        shapes = {"embed_tokens": (vocab, size), "lm_head": (vocab, size)}
    else:
        ops, tokens = shared.ops, [0, vocab - 1, vocab // 2, 0]
        rows = ops.embed(shared.embed_tokens, tokens)
        values = {"embed_tokens": ops.to_host(rows).float().numpy(), "lm_head": ops.head(rows, shared.lm_head).rows()}
        shapes = {"embed_tokens": (len(tokens), size), "lm_head": (len(tokens), vocab)}
    for what, array in values.items():
        expect_equal(array.shape, shapes[what], f"{what} gives values of another shape")
        expect(bool(np.isfinite(array).all()), f"{what} gives values that are not finite", got=array)
    return values


def _floats(array: Any) -> Float32:
    """An array in host memory as float32, copied. Raises: Broken if torch does not take it."""
    import torch

    try:
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"shared weights without ops are none that torch takes: {error}"
        raise Broken(what, got=type(array).__name__) from error
    copied: Float32 = tensor.detach().float().numpy().copy()
    return copied


@check("F30")
def batches(subject: ForwardPassSubject, run: Run) -> None:
    """``decode_batch`` gives every state the output of its own ``decode``, whatever the others hold, and each commits
    on its own."""
    target = under_test(subject)
    what = "a row of a batch differs from plain decoding"
    for number in run.repeat(8, least=3):
        rng = np.random.default_rng([run.seed, number])
        needs = target.needs()[number % len(target.needs())]
        states = [target.prefilled(int(rng.integers(target.length // 2)), needs=needs) for _ in range(2 + number % 4)]
        for _ in range(3):
            places = [state.length for state in states]
            if max(places) >= target.length:
                break
            rows = [int(rng.integers(1, 1 + min(target.info.max_rows, target.length - at))) for at in places]
            texts = [target.text[at : at + count] for at, count in zip(places, rows, strict=True)]
            outputs = target.model.decode_batch(list(zip(states, texts, strict=True)))
            expect_equal([output.rows for output in outputs], rows, "the outputs are not those of the states in order")
            for state, at, count, output in zip(states, places, rows, outputs, strict=True):
                target.expect_plain(output.need_logits().rows(), at, what)
                for name, hidden in hidden_by_name(output).items():
                    target.expect_plain(hidden.rows(), at, what, name=name)
                target.model.commit(state, int(rng.integers(count + 1)))
        for state in states:
            target.expect_next(state, "after batches a row differs from plain decoding")

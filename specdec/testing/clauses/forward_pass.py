"""Checks of targets: clauses F2 to F10, F12, F13, F15, F16, F19, F21, F22 and F27 to F31.

The reference is the target itself in plain decoding: a fresh state, one row per pass. Most clauses are plays: a long
text is taken in by drawn steps of some kinds, with states made for all that the target gives.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np
import torch

from specdec.backends.arrays import HostLogits
from specdec.contract import Choosing, Context, Logits, MtpDraft, Parity, Sampling, SharedWeights, State
from specdec.errors import PromptError, ShapeError, StateError, UnsupportedError
from specdec.sampling import CoupledDraft, Rows
from specdec.testing.checks import (
    Run,
    check,
    checks_of,
    expect,
    expect_equal,
    expect_error,
    not_applicable,
    own_generators,
)
from specdec.testing.engine_run import expect_plain_output
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import PluginSubject
from specdec.testing.target_under_test import DIFFERS, MTP, Play, TargetUnderTest, hidden_by_name, under_test
from specdec.verifiers.strict import StrictVerifier

if TYPE_CHECKING:
    from specdec.exchange import Float32

_KINDS: Mapping[str, Sequence[str]] = {
    "F2": ("prefill", "decode", "twice", "decode"),
    "F3": ("prefill", "rewind", "decode"),
    "F4": ("prefill", "restore", "decode", "restore"),
    "F9": ("decode", "prefill"),
    "F12": ("beside", "prefill", "beside"),
    "F13": ("prefill", "draft", "draft", "decode"),
    "F21": ("prefill", "twice", "rewind", "decode", "prefill"),
    "F22": ("prefill", "decode", "draft", "decode", "draft", "rewind", "restore"),
    "F27": ("prefill", "decode", "restore", "rewind", "draft"),
}
"""The steps of each play; some faults need a session without the first kind."""


def _play(subject: PluginSubject, run: Run, clause: str) -> None:
    target, head = under_test(subject), clause in ("F13", "F22")
    choices = [needs for needs in target.needs() if needs.mtp >= head and bool(needs.hidden) >= (clause == "F21")]
    if not choices or (clause == "F4" and target.info.max_positions < 4):
        not_applicable("this target has no MTP head, gives no hidden states between passes, or holds too few tokens")

    def body(length: int, seed: int, made_for: int, left_out: int) -> None:
        with own_generators(seed):
            Play(target, needs=choices[made_for % len(choices)]).run(_KINDS[clause][left_out:], seed, length)

    longest, states = 30 if head else 60, st.integers(0, len(choices) - 1)
    run.explore(
        body,
        examples=12 if head else 8,
        length=lengths(longest),
        seed=seeds,
        made_for=states,
        left_out=st.integers(0, 1),
    )


checks_of(
    _play,
    {
        "F2": "After any interleaving of prefill, decode and commit, every row has the logits of plain decoding.",
        "F3": "``rewind(length)`` returns the length reached, at most ``length``; the state is then a plainly decoded "
        "one.",
        "F4": "``restore(snapshot)`` gives the state at the snapshot, made for the needs that are asked for, whatever "
        "happened to the original or to copies since, also by way of a session's file; rows that are not committed are "
        "not in it.",
        "F9": "A pass returns exactly what its state was made for: hidden states, and from decode the logits of every "
        "row.",
        "F12": "States of one target do not influence each other, and logits stay valid while another sequence has a "
        "pass.",
        "F21": "Hidden states do not depend on chunks, rows per pass or other needs, and stay valid whatever passes "
        "run later: bit-equal if BITWISE, close if NUMERIC.",
        "F22": "``state.pairs`` accounts for every committed token, fed or waiting, after any calls, and drafts do not "
        "change: bit-equal with BITWISE parity, except that more than ``max_rows`` waiting pairs are a chunk as in F6.",
        "F27": "A target reads and moves no global random generator.",
    },
)


@check("F5")
def row_invariance(subject: PluginSubject, run: Run) -> None:
    """BITWISE: the bits of a row do not depend on the rows of its pass. NUMERIC: they are close."""
    target = under_test(subject)
    for before in (5, 300):
        before = min(before, target.length // 2)
        most = min(target.info.max_rows, target.length - before)
        for count in (*range(1, min(most, 33)), *range(33, most, 29), most) if before <= 5 else (most, 2):
            play = Play(target)
            target.prefill(play.state, before)
            play.at = before
            play.take(("decode", min(count, most)))


@check("F6")
def any_chunking(subject: PluginSubject, run: Run) -> None:
    """Any chunking of a prompt leaves the same state: bit-equal with BITWISE parity, except that ``parity_reason`` may
    say that chunks of more than ``max_rows`` tokens have other bits."""
    target, rng = under_test(subject), np.random.default_rng(run.seed)
    most, longest = target.info.max_rows, min(300, target.length - 1)
    chunks = [longest, 1, most + 1, 65, most, 7, 129, *(2 ** rng.uniform(0, 8, run.count(6))).astype(int).tolist()]
    for chunk in (min(chunk, longest) for chunk in chunks):
        length, exact = min(2 * chunk + 3, longest), chunk <= most or not target.chunks_differ
        steps = [("prefill", min(chunk, length - at)) for at in range(0, length, chunk)]
        Play(target, needs=target.hidden, exact=exact).take(*steps, ("decode", 1))


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
def misuse_refused(subject: PluginSubject, run: Run) -> None:
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
def logits_methods(subject: PluginSubject, run: Run) -> None:
    """``argmax``, ``topk`` and ``logsumexp`` agree with ``rows``, ``[T, V]`` float32; ids are plain ints, and ties go
    to the lowest."""
    target = under_test(subject)
    vocab = target.info.vocab_size
    for number in run.repeat(12, least=3):
        before = min(number + 3, target.length // 2)
        rows = min((3, 1, 16)[number % 3], target.info.max_rows, target.length - before)
        drafted = target.text[before : before + rows]
        logits = target.model.decode(target.prefilled(before), drafted).need_logits()
        check_logits(logits, rows, vocab)


def check_logits(logits: Logits, count: int, vocab: int) -> Float32:
    """Check that every method agrees with ``rows``, and return those: ``[count, vocab]``. Raises: Broken."""
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


@check("F10")
def counts_tokens(subject: PluginSubject, run: Run) -> None:
    """A state counts its committed tokens and its bytes, has the requested capacity, and can be filled completely by
    passes of any number of rows."""
    target = under_test(subject)
    capacity = min(9, target.info.max_positions)
    for rows in range(1, min(target.info.max_rows, capacity - 1) + 1):
        play = Play(target, capacity=capacity)
        expect_equal((play.state.length, play.state.capacity), (0, capacity), "an empty state has another size")
        first = min(capacity // 2, capacity - rows)
        play.take(("prefill", first), *[("decode", 1)] * (capacity - rows - first), ("decode", rows))
        taken = play.state.nbytes()
        expect(type(taken) is int and taken > 0, "nbytes is not the number of bytes of its tokens", got=taken)


@check("F13")
def mtp_drafts(subject: PluginSubject, run: Run) -> None:
    """Without a head, MTP drafts are refused; with one, true pairs stay, provisional ones go, chunks have no effect,
    and a greedy draft in one call is that of single steps."""
    target = under_test(subject)
    error = StateError if target.info.mtp_layers else UnsupportedError
    what = "a draft from a state that was made without Needs.mtp"
    expect_error(error, lambda: target.model.draft_mtp(target.prefilled(2), target.text[2], 1), what)
    if target.info.mtp_layers:
        _play(subject, run, "F13")
    else:
        expect_error(UnsupportedError, lambda: target.state(needs=MTP), "a state for MTP drafts, without a head")


@check("F15")
def target_in_the_engine(subject: PluginSubject, run: Run) -> None:
    """In the engine with the strict verifier, right, wrong and mixed drafts give the tokens of plain decoding."""
    model, verifier = under_test(subject).model, StrictVerifier()
    vocab, capacity = model.info.vocab_size, min(64, model.info.max_positions)
    prompt = [(7 * i + 3) % vocab for i in range(5)]
    count = min(16, capacity - len(prompt))
    for number in range(8):
        wrong, sampling = [number > 1, *[False] * (number // 2 - 1)], Sampling(temperature=number % 2, seed=17)
        expect_plain_output(model, verifier, wrong, prompt, count, [1, 4, 2, 0], sampling, capacity)


@check("F16")
def info_filled_in(subject: PluginSubject, run: Run) -> None:
    """``info`` is filled in: sizes are positive, ``max_rows`` is at least 2, and it does not change."""
    target = under_test(subject)
    info = target.info
    sizes = {"vocab_size": 1, "hidden_size": 1, "max_positions": 1, "max_rows": 2, "mtp_layers": 0}
    for name, least in sizes.items():
        value = getattr(info, name)
        expect(type(value) is int and value >= least, f"{name} is not an int of {least} or more", got=value)
    expect(isinstance(info.parity, Parity), "parity is not declared", got=info.parity)
    Play(target).take(("prefill", 1), ("decode", 1), ("restore", 0))
    expect_equal(target.model.info, info, "passes change info")


@check("F19")
def draft_heads(subject: PluginSubject, run: Run) -> None:
    """A draft head gives the MTP head's logits at its ids and -inf elsewhere; ``extended`` adds ids to a new head."""
    target = under_test(subject)
    model, vocab, length = target.model, target.info.vocab_size, min(5, target.length - 1)
    ids = sorted({*target.text[:3], vocab - 1})[: max(1, vocab - 2)]
    first, *_, second = [token for token in range(vocab) if token not in ids] * 2 or ids * 2
    try:
        head = model.draft_head(ids[::-1])
    except UnsupportedError as error:
        not_applicable(f"it makes no draft heads: {error.args[0] if error.args else error}")
    alone, both = head.extended([first]), head.extended([second, ids[0], first])  # two extensions of one head
    heads = [(alone.extended([second]), {first, second}), (both, {first, second}), (alone, {first}), (head, set())]

    def steps(head: Any = None) -> list[Float32]:
        state = target.prefilled(length, needs=MTP)
        return target.draft(state, target.text[length], 2, head=head, forced=target.text[7:9])[1]

    full = steps()
    for pruned, added in heads:
        expected = sorted({*ids, *added})
        expect_equal(list(pruned.tokens), expected, "a head's ids or their order differ from the request")
        for logits, plain in zip(steps(pruned), full, strict=True):  # of true pairs, and of a chained one
            beyond = np.setdiff1d(np.flatnonzero(logits > -np.inf), expected)
            expect(not len(beyond), "an id outside the head has a logit", got=beyond, expected=expected)
            what = "the logits differ from those of the whole head"
            target.expect_close(logits[expected], plain[expected], what, exact=False, ids=expected)
    target.expect_close(steps()[0], full[0], "draft heads change the logits of the whole head")
    for outside in (vocab, -1):
        for name, make in (("draft_head", model.draft_head), ("extended", head.extended)):
            what = f"{name} with an id outside the vocabulary"
            expect_error(PromptError, partial(make, [ids[0], outside]), what, id=outside)


@check("F28")
def states_are_freed(subject: PluginSubject, run: Run) -> None:
    """A state is freed with its sequence: a target keeps neither states nor what it handed over."""
    target = under_test(subject)
    references: dict[str, list[weakref.ref[Any]]] = {}
    for _ in range(12):
        state = target.prefilled(min(4, target.length - 1))
        logits = target.model.decode(state, target.text[:1]).need_logits()
        logits.argmax()
        target.model.commit(state, 1)
        copy = target.model.restore(target.model.snapshot(state))
        target.model.decode(copy, target.text[:1])
        for part in (state, copy, logits):
            with contextlib.suppress(TypeError):  # a class without weak references
                references.setdefault(type(part).__name__, []).append(weakref.ref(part))
        del state, copy, logits, part
    gc.collect()
    for kind, dead in references.items():
        kept = sum(reference() is not None for reference in dead)
        expect(kept <= 4, f"{kind} stays in memory after its sequence", got=f"{kept} of {len(dead)}")


@check("F29")
def shared_weights(subject: PluginSubject, run: Run) -> None:
    """``shared_weights`` gives finite matrices ``[V, H]`` and a scale above 0, the same at every call, or raises
    UnsupportedError."""
    target = under_test(subject)
    try:
        before = _readings(target.model.shared_weights(), target)
    except UnsupportedError as error:
        not_applicable(f"this target hands out no weights: {error.message}")
    Play(target).take(("prefill", 1), ("decode", 1))
    for one, other in zip(_readings(target.model.shared_weights(), target), before, strict=True):
        expect_equal(one, other, "the shared weights changed between two calls, or in a pass")


def _readings(shared: SharedWeights, target: TargetUnderTest) -> list[Any]:
    """What a head reads: both matrices, or through their ops embedded tokens and the logits of these, and the scale."""
    vocab, size, ops = target.info.vocab_size, target.info.hidden_size, shared.ops
    tokens = [0, vocab - 1, vocab // 2, 0]
    if ops is None:
        values = [np.array(torch.as_tensor(one).float()) for one in (shared.embed_tokens, shared.lm_head)]
        shapes = [(vocab, size), (vocab, size)]
    else:
        rows = ops.embed(shared.embed_tokens, tokens)
        values = [ops.to_host(rows).float().numpy(), ops.head(rows, shared.lm_head).rows()]
        shapes = [(len(tokens), size), (len(tokens), vocab)]
    expect_equal([array.shape for array in values], shapes, "embed_tokens or lm_head gives values of another shape")
    for array in values:
        expect(bool(np.isfinite(array).all()), "embed_tokens or lm_head gives values that are not finite", got=array)
    expect(0 < shared.embed_scale < np.inf, "the scale of embeddings is no number above 0", got=shared.embed_scale)
    return [*values, shared.embed_scale]


@check("F30")
def batches(subject: PluginSubject, run: Run) -> None:
    """``decode_batch`` gives every state the output of its own ``decode``, whatever the others hold, and each commits
    on its own."""
    target = under_test(subject)
    for number in run.repeat(8, least=3):
        rng = np.random.default_rng([run.seed, number])
        needs = target.needs()[number % len(target.needs())]
        states = [target.prefilled(int(rng.integers(target.length // 2)), needs=needs) for _ in range(2 + number % 4)]
        for _ in range(12 if number % 2 else 3):
            places = [state.length for state in states]
            if max(places) + 2 > target.length:
                break
            rows = [int(rng.integers(1, 1 + min(target.info.max_rows, target.length - at))) for at in places]
            if number % 2:  # a backend may record the rows that come again and again
                rows = [1 + which % min(2, target.info.max_rows) for which in range(len(states))]
            texts = [target.text[at : at + count] for at, count in zip(places, rows, strict=True)]
            outputs = target.model.decode_batch(list(zip(states, texts, strict=True)))
            expect_equal([output.rows for output in outputs], rows, "the outputs are not those of the states in order")
            for state, at, count, output in zip(states, places, rows, outputs, strict=True):
                target.expect_plain(output.need_logits().rows(), at, DIFFERS)
                for name, hidden in hidden_by_name(output).items():
                    target.expect_plain(hidden.rows(), at, DIFFERS, name=name)
                target.model.commit(state, int(rng.integers(count + 1)))
        for state in states:
            target.expect_next(state, "after batches a row differs from plain decoding")


@check("F31")
def draft_batches(subject: PluginSubject, run: Run) -> None:
    """``draft_mtp_batch`` gives every state the draft of its own ``draft_mtp``, or what that raises, whatever the
    others hold and ask for, and leaves each as that does."""
    target, heads = under_test(subject), list[Any]([None])
    if not target.info.mtp_layers:
        not_applicable("this target has no MTP head")
    with contextlib.suppress(UnsupportedError):
        heads += [head := target.model.draft_head(target.text[:1]), head.extended(target.text[1:9])]

    def draft(state: State, which: int, depth: int) -> tuple[MtpDraft, list[Float32]]:
        """A draft, and where the logits of its steps go."""
        seen: list[Float32] = []

        def choose(logits: Logits, drafted: Sequence[int]) -> int | None:
            seen.append(logits.rows()[0].copy())
            return logits.argmax()[0] if len(drafted) < 2 else None if which % 2 else 1 // 0

        how: Any = {"head": heads[which % len(heads)], "depth": min(depth, state.capacity - state.length - 1)}
        choices = [None, CoupledDraft(Context([0], CHOICES[0])), choose, choose]
        return MtpDraft(target.model, state, [target.text[state.length]], choose=choices[which % 4], **how), seen

    for number in run.repeat(8, least=3):
        rng = np.random.default_rng([run.seed, number])
        plays = [Play(target, needs=MTP).take(("prefill", 1)) for _ in range(3 + number % 3)]
        while (most := target.length - max(play.at for play in plays)) and len(plays[0].taken) < 5:
            asked = [rng.integers([12, 7]).tolist() for _ in plays]
            together = [draft(play.state, *how) for play, how in zip(plays, asked, strict=True)]
            alone = [draft(target.prefilled(play.at, needs=MTP), *how) for play, how in zip(plays, asked, strict=True)]
            got, expected = target.model.draft_mtp_batch([one for one, _ in together]), [one.run() for one, _ in alone]
            expect_equal([*map(repr, got)], [*map(repr, expected)], "drafts of several states differ from those alone")
            for (_, ours), (_, theirs) in zip(together, alone, strict=True):
                for logits, truth in zip(ours, theirs, strict=True):
                    target.expect_close(logits, truth, "a draft beside others has other logits than alone")
            for play in plays:
                play.take(("decode", int(rng.integers(min(target.info.max_rows, most))) + 1))
        for play in plays:
            play.take(("draft", 3))

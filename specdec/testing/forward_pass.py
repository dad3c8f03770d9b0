"""Checks of targets: clauses F1 to F14 and F16 to F20. F15 stands in ``end_to_end``.

The reference is the target itself, run plainly: a fresh state, one row per pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import (
    NO_NEEDS,
    Context,
    DeviceDraft,
    DrafterEnv,
    Executor,
    Logits,
    MtpPairs,
    Needs,
    NoConfig,
    Outcome,
    Parity,
    State,
)
from specdec.decoding.cycle import HostExecutor, LiveSequence
from specdec.decoding.statistics import RunStats
from specdec.drafters.mtp import MtpConfig, MtpDrafter
from specdec.drafters.none import NoDrafter
from specdec.errors import PromptError, ShapeError, StateError, UnsupportedError
from specdec.testing.registry import Broken, ForwardPassSubject, Run, check, expect, not_applicable
from specdec.testing.strategies import Call, calls
from specdec.testing.views import check_views
from specdec.verifiers.strict import StrictVerifier

if TYPE_CHECKING:
    from numpy.typing import NDArray

MTP = Needs(mtp=True)
ROOM = 96  # tokens per sequence
SLACK = 0.02  # NUMERIC parity: share of the logits' spread by which rows may differ


class _Target:
    """A target under test, with what every check needs."""

    def __init__(self, subject: ForwardPassSubject) -> None:
        self.model = subject.make()
        info = self.model.info
        self.info = info
        self.exact = info.parity is Parity.BITWISE
        self.room = min(ROOM, info.max_positions)
        self._known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def state(self, capacity: int | None = None, needs: Needs = NO_NEEDS) -> State:
        return self.model.new_state(capacity or self.room, needs)

    def pairs(self, state: State) -> MtpPairs:
        """The ledger of a state made for MTP drafts, checked against the state."""
        pairs = state.pairs
        if pairs is None:
            raise Broken("a state made with Needs.mtp has no ledger of pairs", expected="MtpPairs")
        expect(pairs.length == state.length, "fed and waiting positions are those of the state", got=pairs.length)
        return pairs

    def draft(self, state: State, pending: int, depth: int) -> tuple[tuple[int, ...], list[NDArray[np.float32]]]:
        """A greedy draft step by step, and the logits ``[V]`` of each step."""
        seen: list[NDArray[np.float32]] = []

        def choose(logits: Logits, drafted: Sequence[int]) -> int:
            seen.append(logits.rows()[0].copy())
            return logits.argmax()[0]

        return self.model.draft_mtp(state, pending, depth, choose=choose), seen

    def token(self, number: int) -> int:
        """Any int as a token id, spread over the vocabulary."""
        return (number * 2654435761 + 1) % self.info.vocab_size

    def tokens(self, numbers: Sequence[int]) -> list[int]:
        return [self.token(number) for number in numbers]

    def push(self, state: State, tokens: Sequence[int]) -> None:
        """Plain decoding of given tokens: a row per pass."""
        for token in tokens:
            self.model.decode(state, [token])
            self.model.commit(state, 1)

    def after(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The logits ``[V]`` after ``tokens``, by plain decoding in a fresh state."""
        key = tuple(tokens)
        if key not in self._known:
            state = self.state()
            for i, token in enumerate(tokens):
                logits = self.model.decode(state, [token]).need_logits().rows()[0].copy()
                self.model.commit(state, 1)
                self._known[key[: i + 1]] = logits
        return self._known[key]

    def same(self, got: NDArray[np.float32], tokens: Sequence[int], what: str) -> None:
        """``got`` are the logits after ``tokens``: to the bit with BITWISE parity."""
        self.equal(got, self.after(tokens), what, tokens=list(tokens))

    def equal(self, got: NDArray[np.float32], wanted: NDArray[np.float32], what: str, **case: object) -> None:
        if not (np.array_equal(got, wanted) if self.exact else _close(got, wanted)):
            with np.errstate(invalid="ignore"):
                off = float(np.nanmax(np.abs(got.astype(np.float64) - wanted)))
            raise Broken(what, got=got[:6], expected=wanted[:6], largest_difference=f"{off:.3g}", **case)

    def next(self, state: State, token: int) -> NDArray[np.float32]:
        """Logits after one more token, which is not kept."""
        logits: NDArray[np.float32] = self.model.decode(state, [token]).need_logits().rows()[0].copy()
        self.model.commit(state, 0)
        return logits


def _close(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    """Equal up to a share of the logits' spread, and -inf in the same places."""
    finite = np.isfinite(wanted)
    spread = float(np.ptp(wanted[finite])) if finite.any() else 0.0
    return bool((np.isfinite(got) == finite).all()) and bool(
        (np.abs(got[finite] - wanted[finite]) <= SLACK * spread + 1e-5).all()
    )


_numbers = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@check("F1")
def cached_is_uncached(subject: ForwardPassSubject, run: Run) -> None:
    """Logits after cached tokens are those of a fresh state which took in all tokens at once."""
    target = _Target(subject)

    def body(prompt: list[int], rest: list[int]) -> None:
        state, tokens = target.state(), target.tokens(prompt)
        target.model.prefill(state, tokens)
        for number in rest:
            tokens.append(target.token(number))
            got = target.model.decode(state, tokens[-1:]).need_logits().rows()[0].copy()
            target.model.commit(state, 1)
            fresh = target.state()
            target.model.prefill(fresh, tokens[:-1])
            wanted = target.next(fresh, tokens[-1])
            target.equal(got, wanted, "cached and uncached logits differ", tokens=list(tokens))

    run.explore(body, examples=12, prompt=_numbers, rest=_numbers)


@check("F2")
def any_interleaving(subject: ForwardPassSubject, run: Run) -> None:
    """After any interleaving of prefill, decode and commit, the next logits are those of plain decoding."""
    target = _Target(subject)
    rows = min(6, target.info.max_rows)

    def body(prompt: list[int], steps: list[Call]) -> None:
        state, tokens = target.state(), target.tokens(prompt)
        target.model.prefill(state, tokens)
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
        expect(state.length == len(tokens), "the state's length is another", got=state.length, expected=len(tokens))
        target.same(
            target.next(state, target.token(3)), [*tokens, target.token(3)], "the state differs from a plain one"
        )

    numbers = (st.integers(0, 9), st.integers(1, 6), st.integers(0, 6))
    run.explore(
        body,
        examples=25,
        prompt=_numbers,
        steps=calls(max_size=5, prefill=numbers, decode=numbers, decode_twice=numbers),
    )


@check("F3")
def rewind_reaches(subject: ForwardPassSubject, run: Run) -> None:
    """``rewind(length)`` returns the length reached, at most ``length``; run again from there, the state is plain."""
    target = _Target(subject)

    def body(parts: list[list[int]], back: int, again: int) -> None:
        state, tokens = target.state(), []
        for i, part in enumerate(parts):
            chunk = target.tokens(part)
            if i % 2:
                target.push(state, chunk)
            else:
                target.model.prefill(state, chunk)
            tokens += chunk
        for steps in (back, again):
            length = max(0, len(tokens) - steps)
            reached = target.model.rewind(state, length)
            expect(0 <= reached <= length, "rewind went to another place", got=reached, expected=f"0 to {length}")
            expect(
                state.length == reached,
                "the state's length is not what rewind returned",
                got=state.length,
                expected=reached,
            )
            if reached < length:
                target.model.prefill(state, tokens[reached:length])
            del tokens[length:]
        target.same(target.next(state, target.token(5)), [*tokens, target.token(5)], "a rewound state is not plain")

    run.explore(
        body,
        examples=25,
        parts=st.lists(_numbers, min_size=1, max_size=4),
        back=st.integers(0, 9),
        again=st.integers(0, 4),
    )


@check("F4")
def snapshots(subject: ForwardPassSubject, run: Run) -> None:
    """``restore(snapshot)`` gives the state of that moment, whatever happened to the original or to copies since."""
    target = _Target(subject)

    def body(prompt: list[int], rest: list[int], other: list[int]) -> None:
        state, tokens = target.state(), target.tokens(prompt)
        target.model.prefill(state, tokens)
        target.push(state, target.tokens(rest))
        tokens += target.tokens(rest)
        taken = target.model.snapshot(state)
        expect(taken.length == len(tokens), "the snapshot's length is another", got=taken.length, expected=len(tokens))
        target.push(state, target.tokens(other))
        for _ in range(2):
            copy = target.model.restore(taken)
            expect(copy.length == len(tokens), "the restored length is another", got=copy.length, expected=len(tokens))
            expect(copy.capacity == state.capacity, "the restored capacity is another", got=copy.capacity)
            target.same(target.next(copy, target.token(2)), [*tokens, target.token(2)], "a restored state differs")
            target.push(copy, target.tokens([7, 8]))
            after = [*tokens, *target.tokens([7, 8, 1])]
            target.same(target.next(copy, target.token(1)), after, "a restored state goes on differently")
        target.same(
            target.next(state, target.token(2)),
            [*tokens, *target.tokens(other), target.token(2)],
            "taking or restoring a snapshot changed the original",
        )

    run.explore(body, examples=8, prompt=_numbers, rest=_numbers, other=_numbers)


@check("F5")
def row_invariance(subject: ForwardPassSubject, run: Run) -> None:
    """BITWISE: the bits of a row do not depend on the number of rows of its pass. NUMERIC: they are close."""
    target = _Target(subject)
    prompt = target.tokens(range(5))
    rows = target.tokens(range(20, 20 + target.info.max_rows))
    for count in range(1, target.info.max_rows + 1):
        state = target.state()
        target.model.prefill(state, prompt)
        logits = target.model.decode(state, rows[:count]).need_logits().rows()
        for row in range(count):
            singly = target.after([*prompt, *rows[: row + 1]])
            target.equal(logits[row], singly, f"row {row} of {count} differs from a pass of one row", rows=count)


@check("F6")
def any_chunking(subject: ForwardPassSubject, run: Run) -> None:
    """Any chunking of a prompt leaves the same state: the same bits with BITWISE parity."""
    target = _Target(subject)
    longest = min(target.room - 2, 2 * target.info.max_rows + 9)
    tokens = target.tokens(range(longest))
    last = target.token(4)

    def body(cuts: list[int], length: int) -> None:
        prompt = tokens[:length]
        state, at = target.state(), 0
        for end in sorted({min(cut, length) for cut in cuts} | {length}):
            if end > at:
                target.model.prefill(state, prompt[at:end])
                at = end
        target.same(target.next(state, last), [*prompt, last], "a prompt in these chunks leaves another state")

    body([], longest)
    run.explore(body, examples=15, cuts=st.lists(st.integers(1, longest), max_size=3), length=st.integers(2, longest))


def _misuses(target: _Target) -> list[tuple[str, Callable[[State], object], type[Exception]]]:
    model, info = target.model, target.info
    token = target.token(1)
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
    """Misuse raises StateError, ShapeError or PromptError as documented, and the committed state is what it was."""
    target = _Target(subject)
    prompt = target.tokens(range(4))
    for what, misuse, wanted in _misuses(target):
        state = target.state(12)
        target.model.prefill(state, prompt)
        try:
            misuse(state)
        except wanted:
            pass
        except Exception as error:
            raise Broken(
                f"{what} raises another error", got=f"{type(error).__name__}: {error}", expected=wanted.__name__
            ) from error
        else:
            raise Broken(f"{what} was not refused", expected=wanted.__name__)
        expect(
            state.length == len(prompt), f"{what} changed the state's length", got=state.length, expected=len(prompt)
        )
        target.same(target.next(state, target.token(9)), [*prompt, target.token(9)], f"{what} changed the state")
    state = target.state(12)
    target.model.prefill(state, target.tokens(range(10)))
    if target.info.max_rows >= 3:
        try:
            target.model.decode(state, target.tokens([1, 2, 3]))
        except StateError:
            pass
        else:
            raise Broken("decode over the capacity was not refused", expected="StateError")


@check("F8")
def logits_views(subject: ForwardPassSubject, run: Run) -> None:
    """``argmax``, ``topk``, ``gather`` and ``logsumexp`` say what ``rows`` says, ``[T, V]`` float32; equals by id."""
    target = _Target(subject)
    state = target.state()
    target.model.prefill(state, target.tokens(range(3)))
    count = min(3, target.info.max_rows)
    drafted = target.tokens(range(30, 30 + count))
    logits = target.model.decode(state, drafted).need_logits()
    check_views(logits, count, target.info.vocab_size, drafted)


@check("F9")
def outputs(subject: ForwardPassSubject, run: Run) -> None:
    """A prefill gives hidden states and no logits, a decode both, one per row; hidden states can be cut and joined."""
    target = _Target(subject)
    state = target.state()
    output = target.model.prefill(state, target.tokens(range(5)))
    expect(output.logits is None, "prefill gives no logits", got=output.logits)
    decoded = target.model.decode(state, target.tokens([1, 2][: target.info.max_rows]))
    rows = min(2, target.info.max_rows)
    expect(
        len(decoded.need_logits()) == rows, "a row of logits per token", got=len(decoded.need_logits()), expected=rows
    )
    if output.hidden is None:
        expect(
            target.info.mtp_layers == 0 and decoded.hidden is None, "hidden states are given by every pass or by none"
        )
        return
    hidden, other = output.need_hidden(), decoded.need_hidden()
    expect(len(hidden) == 5, "hidden states of every prompt token", got=len(hidden), expected=5)
    expect(len(other) == rows, "hidden states of every row", got=len(other), expected=rows)
    expect(len(hidden[1:3]) == 2 and len(hidden[-1:]) == 1 and len(hidden[:0]) == 0, "slices have their rows")
    joined = hidden[:2].join([other, hidden[4:]])
    expect(len(joined) == 3 + rows, "join", got=len(joined), expected=3 + rows)


@check("F10")
def lengths(subject: ForwardPassSubject, run: Run) -> None:
    """A state counts its committed tokens, has the capacity asked for, and every one of its places is usable."""
    target = _Target(subject)
    capacity = 9
    state = target.state(capacity)
    expect(state.length == 0, "an empty state has length 0", got=state.length)
    expect(state.capacity == capacity, "the capacity is the one asked for", got=state.capacity, expected=capacity)
    expect(type(state.nbytes()) is int and state.nbytes() >= 0, "nbytes is a number of bytes", got=state.nbytes())
    tokens = target.tokens(range(capacity))
    target.model.prefill(state, tokens[:4])
    expect(state.length == 4, "prefill commits", got=state.length, expected=4)
    target.model.decode(state, tokens[4:6][: target.info.max_rows])
    expect(state.length == 4, "decode commits nothing", got=state.length, expected=4)
    target.model.commit(state, 1)
    expect(state.length == 5, "commit keeps its rows", got=state.length, expected=5)
    target.push(state, tokens[5:-1])
    logits = target.model.decode(state, tokens[-1:]).need_logits().rows()[0].copy()
    target.model.commit(state, 1)
    expect(state.length == capacity, "a state can be filled", got=state.length, expected=capacity)
    target.same(logits, tokens, "the last place of a state is not usable")


@check("F11")
def no_trace(subject: ForwardPassSubject, run: Run) -> None:
    """Rows that were not committed leave no trace."""
    target = _Target(subject)
    prompt = target.tokens(range(3))
    junk = target.tokens(range(40, 40 + target.info.max_rows))
    for kept in range(min(3, target.info.max_rows)):
        state, tokens = target.state(), list(prompt)
        target.model.prefill(state, prompt)
        for _ in range(2):
            target.model.decode(state, junk)
            target.model.commit(state, kept)
            tokens += junk[:kept]
        target.same(
            target.next(state, target.token(2)),
            [*tokens, target.token(2)],
            f"{len(junk)} rows of which {kept} were kept left a trace",
        )


@check("F12")
def states_apart(subject: ForwardPassSubject, run: Run) -> None:
    """States of one target do not influence each other."""
    target = _Target(subject)
    texts = [target.tokens(range(5)), target.tokens(range(50, 57))]
    states = [target.state(), target.state()]
    for state, text in zip(states, texts, strict=True):
        target.model.prefill(state, text)
    for i in range(4):
        pending = [target.model.decode(s, target.tokens([i, i + 1][: target.info.max_rows])) for s in states]
        expect(len(pending) == 2, "two passes in flight")
        for state, text in zip(states, texts, strict=True):
            target.model.commit(state, 1)
            text.append(target.token(i))
    for state, text in zip(states, texts, strict=True):
        target.same(target.next(state, target.token(3)), [*text, target.token(3)], "another state changed this one")


# --- the MTP head ----------------------------------------------------------------------------------------------------


@check("F13")
def mtp_head(subject: ForwardPassSubject, run: Run) -> None:
    """Without a head MTP drafts are refused; with one, true pairs stay, provisional ones go, chunks change nothing."""
    target = _Target(subject)
    model = target.model
    tokens = target.tokens(range(8))
    if target.info.mtp_layers == 0:
        state = target.state()
        model.prefill(state, tokens[:-1])
        try:
            model.draft_mtp(state, tokens[-1], 1)
        except UnsupportedError:
            return
        raise Broken("an MTP draft without a head was not refused", expected="UnsupportedError")

    def drafted(first: int, provisional: int) -> NDArray[np.float32]:
        """Logits of the first step after all tokens, taken in by two chunks, with a draft of another size between."""
        state = target.state(needs=MTP)
        model.prefill(state, tokens[:first])
        target.pairs(state)
        if provisional:
            target.draft(state, tokens[first], provisional)
            target.pairs(state)
        if first < len(tokens) - 1:
            model.prefill(state, tokens[first:-1])
        target.pairs(state)
        logits = target.draft(state, tokens[-1], 1)[1][0]
        pairs = target.pairs(state)
        expect(pairs.fed == len(tokens) - 1, "true pairs are counted", got=pairs.fed, expected=len(tokens) - 1)
        expect(state.length == len(tokens) - 1, "an MTP pass moves the target's state", got=state.length)
        return logits

    whole = drafted(len(tokens) - 1, 0)
    for first, provisional in ((1, 0), (4, 0), (3, 1), (2, 3)):
        target.equal(
            drafted(first, provisional),
            whole,
            "MTP logits depend on chunks or on provisional pairs",
            pairs_before=first,
            provisional=provisional,
        )


@check("F18")
def greedy_drafts(subject: ForwardPassSubject, run: Run) -> None:
    """A greedy draft in one call, and the state that it leaves, are those of the steps one by one."""
    target = _Target(subject)
    model = target.model
    if target.info.mtp_layers == 0:
        not_applicable("only an MTP head drafts, and this target has none")
    tokens = target.tokens(range(8))
    for waiting, depth in ((1, 1), (1, 4), (3, 2), (6, 3)):
        outcomes = []
        for at_once in (True, False):
            state = target.state(needs=MTP)
            model.prefill(state, tokens[:1])
            target.push(state, tokens[1:waiting])
            pending = tokens[waiting]
            draft = model.draft_mtp(state, pending, depth) if at_once else target.draft(state, pending, depth)[0]
            fed = target.pairs(state).fed
            expect(fed == waiting, "true pairs are counted", got=fed, expected=waiting)
            target.push(state, tokens[waiting:-1])
            outcomes.append((draft, target.draft(state, tokens[-1], 1)[1][0]))
        (draft, after), (wanted, truth) = outcomes
        expect(
            draft == wanted,
            "a draft in one call is that of the steps",
            got=draft,
            expected=wanted,
            pairs=waiting,
            depth=depth,
        )
        target.equal(after, truth, "a draft in one call leaves another state", pairs=waiting, depth=depth)


@check("F19")
def draft_heads(subject: ForwardPassSubject, run: Run) -> None:
    """A draft head gives the MTP head's logits at its ids and -inf elsewhere; ``extended`` adds ids to a new one."""
    target = _Target(subject)
    model, vocab = target.model, target.info.vocab_size
    ids = sorted(set(target.tokens([0, 2, 5])) | {vocab - 1})[: max(1, vocab - 2)]
    rest = [token for token in range(vocab) if token not in ids] or ids
    first, second = rest[0], rest[-1]
    try:
        head = model.draft_head(ids[::-1])
    except UnsupportedError as error:
        not_applicable(f"it makes no draft heads: {error.args[0] if error.args else error}")
    both = head.extended([second, ids[0], first])
    one, other = head.extended([first]), head.extended([second])  # two continuations of one head
    further = one.extended([second])
    heads = [
        (head, ids),
        (both, sorted({*ids, first, second})),
        (one, sorted({*ids, first})),
        (other, sorted({*ids, second})),
        (further, sorted({*ids, first, second})),
        (head.extended([]), ids),
    ]
    tokens, chained = target.tokens(range(6)), target.token(60)

    def passes(**options: Any) -> list[NDArray[np.float32]]:
        """Logits of a pass over true pairs, and of a chained one after it."""
        state = target.state()
        hidden = model.prefill(state, tokens[:-1]).need_hidden()
        step = model.decode_mtp(state, tokens[1:], hidden, **options)
        seen = [check_views(step.need_logits(), 1, vocab, [ids[0]]).copy()]
        step = model.decode_mtp(state, [chained], step.need_hidden()[-1:], provisional=True, **options)
        seen.append(check_views(step.need_logits(), 1, vocab, [vocab - 1]).copy())
        return [rows[0] for rows in seen]

    full = passes()
    for made, wanted in heads:
        got = list(made.tokens)
        expect(got == wanted, "a head has other ids than were asked for, or in another order", got=got, expected=wanted)
        left_out = np.ones(vocab, dtype=bool)
        left_out[wanted] = False
        for pass_, (logits, plain) in enumerate(zip(passes(head=made), full, strict=True)):
            what = "a chained pass" if pass_ else "a pass over true pairs"
            expect(
                bool((logits[left_out] == -np.inf).all()),
                f"{what}: an id outside the head has a logit",
                got=np.flatnonzero(logits > -np.inf),
                expected=wanted,
            )
            expect(
                _close(logits[wanted], plain[wanted]),
                f"{what}: other logits than those of the whole head",
                got=logits[wanted],
                expected=plain[wanted],
                ids=wanted,
            )
    target.equal(passes()[0], full[0], "draft heads change the logits of the whole head")
    for outside in (vocab, -1):
        makers: tuple[tuple[str, Callable[[Sequence[int]], object]], ...] = (
            ("draft_head", model.draft_head),
            ("extended", head.extended),
        )
        for name, make in makers:
            try:
                make([ids[0], outside])
            except PromptError:
                continue
            except Exception as error:
                raise Broken(
                    f"{name} with an id outside the vocabulary raises another error",
                    got=f"{type(error).__name__}: {error}",
                    expected="PromptError",
                    id=outside,
                ) from error
            raise Broken(f"{name} took an id outside the vocabulary", expected="PromptError", id=outside)


@check("F17")
def hidden_states_keep(subject: ForwardPassSubject, run: Run) -> None:
    """Hidden states stay what they were, whatever passes run later: a drafter may hold them for many cycles."""
    target = _Target(subject)
    if target.info.mtp_layers == 0:
        not_applicable("only an MTP head takes hidden states back, and this target has none")
    model, tokens = target.model, target.tokens(range(9))

    state = target.state()
    passes = [(model.prefill(state, tokens[:3]).need_hidden(), 3)]
    for token in tokens[3:8]:
        rows = [token, target.token(77)][: target.info.max_rows]
        passes.append((model.decode(state, rows).need_hidden(), 1))
        model.commit(state, 1)
    kept = [hidden[:rows] for hidden, rows in passes]  # cut late: a cut may copy
    held = model.decode_mtp(state, tokens[1:], kept[0].join(kept[1:])).need_logits().rows()[0].copy()
    fresh = target.state()
    seen = model.prefill(fresh, tokens[:8]).need_hidden()
    at_once = model.decode_mtp(fresh, tokens[1:], seen).need_logits().rows()[0]
    target.equal(held, at_once, "hidden states that were held for some passes are not what they were")


@check("F14")
def causal(subject: ForwardPassSubject, run: Run) -> None:
    """The logits of a row do not depend on the rows after it."""
    target = _Target(subject)
    if target.info.max_rows < 2:
        not_applicable("passes have one row")
    count = min(4, target.info.max_rows)
    prompt, first = target.tokens(range(3)), target.tokens([11, 12, 13, 14])[:count]
    seen = []
    for change in (0, 5, 9):
        later = [first[0], *target.tokens(range(20 + change, 19 + change + count))]
        state = target.state()
        target.model.prefill(state, prompt)
        seen.append(target.model.decode(state, later).need_logits().rows()[0].copy())
    for other in seen[1:]:
        target.equal(other, seen[0], "row 0 changes with the rows after it")


@check("F16")
def info_sane(subject: ForwardPassSubject, run: Run) -> None:
    """``info`` is filled in: sizes are positive, ``max_rows`` is at least 2, and it does not change."""
    model = subject.make()
    info = model.info
    for name in ("vocab_size", "hidden_size", "max_positions"):
        expect(
            type(getattr(info, name)) is int and getattr(info, name) > 0, f"{name} is positive", got=getattr(info, name)
        )
    expect(type(info.max_rows) is int and info.max_rows >= 2, "a pass takes a draft token too", got=info.max_rows)
    expect(type(info.mtp_layers) is int and info.mtp_layers >= 0, "mtp_layers is 0 or more", got=info.mtp_layers)
    expect(isinstance(info.parity, Parity), "parity is declared", got=info.parity)
    expect(model.info == info, "info changes", got=model.info, expected=info)


@check("F20")
def device_cycles(subject: ForwardPassSubject, run: Run) -> None:
    """Cycles that the device runs draft, emit and leave behind what cycles of the host do."""
    target = _Target(subject)
    tokens = target.tokens(range(6))
    drafts = [DeviceDraft(mtp=False)] + ([DeviceDraft()] if target.info.mtp_layers else [])
    offered = [draft for draft in drafts if _cycles(target, tokens, draft, [1], stop=(), limit=40) is not None]
    if not offered:
        not_applicable("device_executor is not offered")
    for draft in offered:
        free = _cycles(target, tokens, draft, [2] * 4, stop=(), limit=40)
        assert free is not None
        emitted = [token for outcome in free[0] for token in outcome.emitted]
        ends = [emitted[len(emitted) // 2]]
        for depths, stop, limit, keep in (
            ([1], (), 40, 0),
            ([2, 3, 1, 2], (), 40, 0),
            ([0, 0, 3, 0, 1], (), 40, 0),
            ([3, 3], (), 40, 1),
            ([2] * 4, ends, 40, 0),
            ([2] * 4, (), 3, 0),
            ([1, 2], (), 1, 0),
        ):
            case = {"mtp": draft.mtp, "depths": depths, "stop": stop, "limit": limit, "keep": keep}
            got = _cycles(target, tokens, draft, depths, stop, limit, keep)
            wanted = _cycles(target, tokens, draft, depths, stop, limit, keep, host=True)
            assert got is not None
            assert wanted is not None
            shown = [(outcome.drafted, outcome.accepted, outcome.emitted) for outcome in got[0] if outcome.emitted]
            truth = [(outcome.drafted, outcome.accepted, outcome.emitted) for outcome in wanted[0] if outcome.emitted]
            expect(shown == truth, "cycles of the device are those of the host", got=shown, expected=truth, **case)
            expect(got[1] == wanted[1], "the same tokens and pairs are held", got=got[1], expected=wanted[1], **case)
            for ours, theirs in zip(got[2], wanted[2], strict=True):
                target.equal(ours, theirs, "cycles of the device leave another state", **case)


def _cycles(
    target: _Target,
    tokens: list[int],
    draft: DeviceDraft,
    depths: Sequence[int],
    stop: Sequence[int],
    limit: int,
    keep: int = 0,
    *,
    host: bool = False,
) -> tuple[list[Outcome], tuple[int, int], list[NDArray[np.float32]]] | None:
    """Cycles of these depths, on a device one in flight behind the other unless ``keep`` > 0 cuts the last one.

    Their outcomes; tokens that the state holds and pairs that are fed or wait; logits of the target and, where the
    head drafts, of its first step after them.
    """
    model, state = target.model, target.state(needs=MTP if draft.mtp else NO_NEEDS)
    held = list(tokens)
    model.prefill(state, tokens[:-1])
    env = DrafterEnv(target=model, state=state)
    sequence = LiveSequence(
        target=model,
        state=state,
        drafter=MtpDrafter(MtpConfig(), env) if draft.mtp else NoDrafter(NoConfig(), env),
        verifier=StrictVerifier(),
        tokens=held,
        context=Context(held),
    )
    executor: Executor | None
    if host:
        executor = HostExecutor(sequence, RunStats())
    else:
        executor = model.device_executor(state, sequence.context, draft, stop_tokens=tuple(stop), limit=limit)
    if executor is None:
        return None
    done: list[Outcome] = []
    left = limit

    def collect(last: bool) -> None:
        nonlocal left
        outcome = executor.collect()
        emitted = outcome.emitted
        ends = [i for i, token in enumerate(emitted, start=1) if token in stop]
        kept = min([left, len(emitted), *ends])
        done.append(attrs.evolve(outcome, emitted=emitted[:kept]))
        if last and keep:
            kept = min(kept, keep)
        left -= kept
        held.extend(emitted[:kept])
        if kept:
            executor.keep(kept)

    ahead = not host and not keep
    for i, depth in enumerate(depths):
        if host and (left == 0 or (done and done[-1].emitted[-1] in stop)):  # the host does not go on behind the end
            break
        executor.submit(depth)
        if not ahead:
            collect(i == len(depths) - 1)
        elif i:
            collect(False)
    if ahead:
        collect(True)
    executor.close()
    pairs = target.pairs(state).length if draft.mtp else 0
    logits = [target.next(state, held[-1])]
    if draft.mtp:
        logits.append(target.draft(state, held[-1], 1)[1][0])
    return done, (state.length, pairs), logits

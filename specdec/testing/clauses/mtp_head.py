"""Checks of a target's MTP head and of the ledger that feeds it: clauses F13, F18, F19 and F22."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np

from specdec.contract import Needs
from specdec.errors import PromptError, StateError, UnsupportedError
from specdec.testing.checks import Run, check, expect, expect_equal, expect_error, not_applicable
from specdec.testing.strategies import Call, calls
from specdec.testing.subjects import ForwardPassSubject
from specdec.testing.target_under_test import TargetUnderTest

MTP = Needs(mtp=True)


def _with_head(subject: ForwardPassSubject) -> TargetUnderTest:
    target = TargetUnderTest(subject)
    if target.info.mtp_layers == 0:
        not_applicable("this target has no MTP head")
    return target


@check("F13")
def mtp_drafts(subject: ForwardPassSubject, run: Run) -> None:
    """Without a head, MTP drafts are refused; with one, true pairs stay, provisional ones go, chunks have no effect."""
    target = TargetUnderTest(subject)
    model, tokens = target.model, target.tokens(range(8))
    plain, pairs = target.prefilled(tokens[:-1]), len(tokens) - 1
    if target.info.mtp_layers == 0:
        what = "a draft without an MTP head"
        expect_error(UnsupportedError, lambda: model.draft_mtp(plain, tokens[-1], 1), what)
        expect_error(UnsupportedError, lambda: target.state(needs=MTP), "a state for MTP drafts, without a head")
        return
    what = "a draft from a state that was made without Needs.mtp"
    expect_error(StateError, lambda: model.draft_mtp(plain, tokens[-1], 1), what)

    def first_step(first: int, depth: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Logits of the first step after all tokens, prefilled in two chunks with a draft between them."""
        state = target.prefilled(tokens[:first], needs=MTP)
        if depth:
            target.draft(state, tokens[first], depth)
        if first < pairs:
            model.prefill(state, tokens[first:-1])
        _, [logits] = target.draft(state, tokens[-1], 1)
        expect_equal(target.pairs(state).fed, pairs, "the pairs fed are not all true pairs")
        expect_equal(state.length, pairs, "a draft changes the length of the target's state")
        return logits

    whole = first_step(pairs, 0)
    for first, depth in ((1, 0), (4, 0), (3, 1), (2, 3), (1, 7), (5, 13)):
        what = "MTP logits depend on chunks or on provisional pairs"
        target.expect_close(first_step(first, depth), whole, what, first_chunk=first, drafted_between=depth)


@check("F18")
def drafts_in_one_call(subject: ForwardPassSubject, run: Run) -> None:
    """A greedy draft in one call gives the same tokens and the same state as single steps."""
    target = _with_head(subject)
    for number in run.repeat(6):
        tokens = target.tokens(range(9 * number, 9 * number + min(8, target.room - 1)))
        for waiting, depth in ((1, 1), (1, 4), (3, 2), (6, 3), (2, 7), (5, 13)):
            if waiting >= len(tokens):
                continue
            outcomes = []
            for at_once in (True, False):
                state, pending = target.prefilled(tokens[:1], needs=MTP), tokens[waiting]
                target.append(state, tokens[1:waiting])
                draft = (
                    target.model.draft_mtp(state, pending, depth) if at_once else target.draft(state, pending, depth)[0]
                )
                expect_equal(target.pairs(state).fed, waiting, "a draft does not feed the waiting pairs")
                target.append(state, tokens[waiting:-1])
                outcomes.append((draft, target.draft(state, tokens[-1], 1)[1][0]))
            (draft, after), (wanted, truth) = outcomes
            case: dict[str, Any] = {"pairs": waiting, "depth": depth}
            expect_equal(draft, wanted, "a draft in one call differs from single steps", **case)
            target.expect_close(after, truth, "a draft in one call leaves a different state", **case)


@check("F22")
def ledger(subject: ForwardPassSubject, run: Run) -> None:
    """``state.pairs`` accounts for every committed token, fed or waiting, after any calls, and drafts do not change:
    bit-equal with BITWISE parity, except that more than ``max_rows`` waiting pairs are a chunk as in F6."""
    target = _with_head(subject)
    model, rows = target.model, min(4, target.info.max_rows)

    def body(prompt: list[int], steps: list[Call]) -> None:
        tokens, pending = target.tokens(prompt), target.token(len(prompt))
        state = target.prefilled(tokens, needs=MTP)
        for step in steps:
            first, count, kept = step.numbers
            if len(tokens) + 8 > target.room:
                break
            new, before = [pending, *target.tokens(range(first, first + count - 1))][:rows], len(tokens)
            if step.name == "prefill":
                model.prefill(state, new)
                tokens += new
            elif step.name == "decode":
                model.decode(state, new)
                model.commit(state, min(kept, len(new)))
                tokens += new[:kept]
            elif step.name == "draft":
                target.draft(state, pending, count)
            elif step.name == "rewind":
                length = max(0, len(tokens) - kept)
                reached = model.rewind(state, length)
                target.pairs(state)
                if reached < length:
                    model.prefill(state, tokens[reached:length])
                del tokens[length:]
            else:
                state = model.restore(model.snapshot(state), MTP)
            target.pairs(state)
            if len(tokens) != before:
                pending = target.token(first + len(tokens))
        target.append(state, [pending])  # a draft's pairs are not left waiting for a second draft
        tokens.append(pending)
        exact = target.pairs(state).waiting <= target.info.max_rows or not target.chunks_differ
        _, [got] = target.draft(state, target.token(5), 1)
        _, [wanted] = target.draft(target.prefilled(tokens, needs=MTP), target.token(5), 1)
        what = "the next draft differs from that of a fresh state"
        target.expect_close(got, wanted, what, exact=exact, tokens=tokens)

    def cycles(depths: Sequence[int]) -> None:
        """Drafts of all depths one after the other, each after a few more tokens."""
        tokens, pending = target.tokens(range(4)), target.token(4)
        state = target.prefilled(tokens, needs=MTP)
        for number, depth in enumerate(depths):
            fresh = target.prefilled(tokens, needs=MTP)
            (drafted, got), (wanted, truth) = (target.draft(one, pending, depth) for one in (state, fresh))
            case: dict[str, Any] = {"depths": depths[: number + 1]}
            expect_equal(drafted, wanted, "a draft differs from that of a fresh state", **case)
            for ours, theirs in zip(got, truth, strict=True):
                target.expect_close(ours, theirs, "the logits of a draft differ from those of a fresh state", **case)
            kept = [pending, *drafted][: 1 + number % rows]
            if len(tokens) + len(kept) + 1 >= target.room:
                break
            model.decode(state, [pending, *drafted][:rows])
            model.commit(state, len(kept))
            tokens += kept
            pending = target.token(50 + number)

    for number in run.repeat(4):
        depths = np.random.default_rng([run.seed, number]).choice([1, 2, 3, 5, 7, 8, 13, 15], 30)
        run.halve(cycles, depths.tolist())
    numbers = (st.integers(0, 9), st.integers(1, 4), st.integers(0, 4))
    deep = (numbers[0], st.one_of(numbers[1], st.sampled_from([7, 13])), numbers[2])
    steps = calls(max_size=6, prefill=numbers, decode=numbers, draft=deep, rewind=numbers, snapshot_and_restore=numbers)
    run.explore(body, examples=30, prompt=st.lists(st.integers(0, 9), min_size=1, max_size=6), steps=steps)


@check("F19")
def draft_heads(subject: ForwardPassSubject, run: Run) -> None:
    """A draft head gives the MTP head's logits at its ids and -inf elsewhere; ``extended`` adds ids to a new head."""
    target = TargetUnderTest(subject)
    model, vocab = target.model, target.info.vocab_size
    ids = sorted(set(target.tokens([0, 2, 5])) | {vocab - 1})[: max(1, vocab - 2)]
    rest = [token for token in range(vocab) if token not in ids] or ids
    first, second = rest[0], rest[-1]
    try:
        head = model.draft_head(ids[::-1])
    except UnsupportedError as error:
        not_applicable(f"it makes no draft heads: {error.args[0] if error.args else error}")
    both = head.extended([second, ids[0], first])
    one, other = head.extended([first]), head.extended([second])  # two extensions of one head
    heads = [
        (head, ids),
        (both, sorted({*ids, first, second})),
        (one, sorted({*ids, first})),
        (other, sorted({*ids, second})),
        (one.extended([second]), sorted({*ids, first, second})),
        (head.extended([]), ids),
    ]
    tokens, chained = target.tokens(range(6)), [target.token(60)] * 2
    steps = partial(target.draft, pending=tokens[-1], depth=2, forced=chained)
    _, full = steps(target.prefilled(tokens[:-1], needs=MTP))
    for made, wanted in heads:
        expect_equal(list(made.tokens), wanted, "a head's ids or their order differ from the request")
        _, seen = steps(target.prefilled(tokens[:-1], needs=MTP), head=made)
        for name, logits, plain in zip(("true pairs", "a chained pair"), seen, full, strict=True):
            beyond = np.setdiff1d(np.flatnonzero(logits > -np.inf), wanted)
            expect(not len(beyond), f"over {name}, an id outside the head has a logit", got=beyond, expected=wanted)
            what = f"over {name}, the logits differ from those of the whole head"
            target.expect_close(logits[wanted], plain[wanted], what, exact=False, ids=wanted)
    _, again = steps(target.prefilled(tokens[:-1], needs=MTP))
    target.expect_close(again[0], full[0], "draft heads change the logits of the whole head")
    for outside in (vocab, -1):
        for name, make in (("draft_head", model.draft_head), ("extended", head.extended)):
            what = f"{name} with an id outside the vocabulary"
            expect_error(PromptError, partial(make, [ids[0], outside]), what, id=outside)

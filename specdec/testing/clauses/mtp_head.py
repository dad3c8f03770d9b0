"""Checks of a target's MTP head: clauses F13 and F17 to F20."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.contract import ForwardOutput, GreedyCycle, GreedyStart
from specdec.decoding.stepwise import StepwiseCycles
from specdec.errors import PromptError, ShapeError, UnsupportedError
from specdec.testing.checks import Run, check, expect, expect_equal, expect_error, not_applicable
from specdec.testing.logits_checks import check_logits
from specdec.testing.subjects import ForwardPassSubject
from specdec.testing.target_under_test import TargetUnderTest

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _with_head(subject: ForwardPassSubject) -> TargetUnderTest:
    target = TargetUnderTest(subject)
    if target.info.mtp_layers == 0:
        not_applicable("this target has no MTP head")
    return target


def _logits(target: TargetUnderTest, output: ForwardOutput, rows: int) -> NDArray[np.float32]:
    logits = output.need_logits().rows()
    expect_equal(logits.shape, (1, target.info.vocab_size), "an MTP pass does not give logits of its last row alone")
    expect_equal(len(output.need_hidden()), rows, "an MTP pass does not give hidden states of every row")
    last: NDArray[np.float32] = logits[0].copy()
    return last


@check("F13")
def mtp_passes(subject: ForwardPassSubject, run: Run) -> None:
    """Without a head MTP passes are refused; with one, true pairs stay, provisional ones go, chunks change nothing."""
    target = TargetUnderTest(subject)
    model, tokens, state = target.model, target.tokens(range(8)), target.state()
    pairs = len(tokens) - 1
    output = model.prefill(state, tokens[:-1])
    if target.info.mtp_layers == 0:
        if output.hidden is not None:
            hidden = output.hidden
            model.prefill_mtp(state, tokens[1:], hidden)
            refused = "an MTP pass without a head"
            expect_error(UnsupportedError, lambda: model.decode_mtp(state, tokens[-1:], hidden[-1:]), refused)
        expect_equal(state.mtp_length, 0, "a model without a head holds pairs")
        return
    hidden = output.need_hidden()
    whole = _logits(target, model.decode_mtp(state, tokens[1:], hidden), pairs)
    expect_equal(state.mtp_length, pairs, "true pairs are miscounted")
    expect_equal(state.length, pairs, "an MTP pass changes the length of the target's state")

    for first, provisional in ((1, 0), (4, 0), (3, 1), (2, 3)):
        fresh = target.state()
        seen = model.prefill(fresh, tokens[:-1]).need_hidden()
        model.prefill_mtp(fresh, tokens[1 : first + 1], seen[:first])
        expect_equal(fresh.mtp_length, first, "prefill_mtp miscounts true pairs")
        at = first
        if provisional:
            step = model.decode_mtp(fresh, tokens[at + 1 : at + 2], seen[at : at + 1])
            at += 1
            for i in range(provisional):
                step = model.decode_mtp(fresh, [target.token(60 + i)], step.need_hidden()[-1:], provisional=True)
                expect_equal(fresh.mtp_length, at, "provisional pairs are counted")
        got = _logits(target, model.decode_mtp(fresh, tokens[at + 1 :], seen[at:]), pairs - at)
        what = "MTP logits depend on chunks or on provisional pairs"
        target.expect_close(got, whole, what, pairs_before=first, provisional=provisional)
    expect_error(ShapeError, lambda: model.decode_mtp(state, tokens[:2], hidden[:1]), "two tokens, one hidden state")


@check("F17")
def hidden_states_keep(subject: ForwardPassSubject, run: Run) -> None:
    """Hidden states stay what they were, whatever passes run later: a drafter may hold them for many cycles."""
    target = _with_head(subject)
    model, tokens, state = target.model, target.tokens(range(9)), target.state()
    passes = [(model.prefill(state, tokens[:3]).need_hidden(), 3)]
    for token in tokens[3:8]:
        rows = [token, target.token(77)][: target.info.max_rows]
        passes.append((model.decode(state, rows).need_hidden(), 1))
        model.commit(state, 1)
    kept = [hidden[:rows] for hidden, rows in passes]  # cut late: a cut may copy
    held = _logits(target, model.decode_mtp(state, tokens[1:], kept[0].join(kept[1:])), 8)
    fresh = target.state()
    seen = model.prefill(fresh, tokens[:8]).need_hidden()
    at_once = _logits(target, model.decode_mtp(fresh, tokens[1:], seen), 8)
    target.expect_close(held, at_once, "hidden states that were held for some passes are not what they were")


@check("F18")
def greedy_drafts(subject: ForwardPassSubject, run: Run) -> None:
    """What ``draft_greedy`` drafts, and the state that it leaves, are those of ``decode_mtp`` step by step."""
    target = _with_head(subject)
    model, tokens = target.model, target.tokens(range(8))
    for fed, depth in ((1, 1), (1, 4), (3, 2), (6, 3)):
        outcomes = []
        for at_once in (True, False):
            state = target.state()
            hidden = model.prefill(state, tokens[:-1]).need_hidden()
            drafted = model.draft_greedy(state, tokens[1 : fed + 1], hidden[:fed], depth) if at_once else ()
            if drafted is None:
                not_applicable("draft_greedy is not offered")
            if not at_once:
                step = model.decode_mtp(state, tokens[1 : fed + 1], hidden[:fed])
                drafted = tuple(step.need_logits().argmax())
                while len(drafted) < depth:
                    step = model.decode_mtp(state, drafted[-1:], step.need_hidden()[-1:], provisional=True)
                    drafted += tuple(step.need_logits().argmax())
            expect_equal(state.mtp_length, fed, "true pairs are miscounted")
            rest = model.decode_mtp(state, tokens[fed + 1 :], hidden[fed:])
            outcomes.append((drafted, _logits(target, rest, len(tokens) - 1 - fed)))
        (drafted, after), (wanted, truth) = outcomes
        case: dict[str, Any] = {"pairs": fed, "depth": depth}
        expect_equal(drafted, wanted, "a draft in one call differs from that of single steps", **case)
        target.expect_close(after, truth, "a draft in one call leaves another state", **case)


@check("F19")
def draft_heads(subject: ForwardPassSubject, run: Run) -> None:
    """A draft head gives the MTP head's logits at its ids and -inf elsewhere; ``extended`` adds ids to a new one."""
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
    tokens, chained = target.tokens(range(6)), target.token(60)

    def passes(**options: Any) -> list[NDArray[np.float32]]:
        """Logits of a pass over true pairs, and of a chained one after it."""
        state = target.state()
        hidden = model.prefill(state, tokens[:-1]).need_hidden()
        step = model.decode_mtp(state, tokens[1:], hidden, **options)
        seen = [check_logits(step.need_logits(), 1, vocab, [ids[0]]).copy()]
        step = model.decode_mtp(state, [chained], step.need_hidden()[-1:], provisional=True, **options)
        seen.append(check_logits(step.need_logits(), 1, vocab, [vocab - 1]).copy())
        return [rows[0] for rows in seen]

    full = passes()
    for made, wanted in heads:
        expect_equal(list(made.tokens), wanted, "a head has other ids than were asked for, or in another order")
        for name, logits, plain in zip(("true pairs", "a chained pair"), passes(head=made), full, strict=True):
            beyond = np.setdiff1d(np.flatnonzero(logits > -np.inf), wanted)
            expect(not len(beyond), f"over {name}, an id outside the head has a logit", got=beyond, expected=wanted)
            what = f"over {name}, the logits differ from those of the whole head"
            target.expect_close(logits[wanted], plain[wanted], what, exact=False, ids=wanted)
    target.expect_close(passes()[0], full[0], "draft heads change the logits of the whole head")
    for outside in (vocab, -1):
        for name, make in (("draft_head", model.draft_head), ("extended", head.extended)):
            what = f"{name} with an id outside the vocabulary"
            expect_error(PromptError, partial(make, [ids[0], outside]), what, id=outside)


@check("F20")
def greedy_cycles(subject: ForwardPassSubject, run: Run) -> None:
    """What ``greedy_cycles`` drafts and emits, and the state that it leaves, are those of single passes."""
    target = _with_head(subject)
    tokens = target.tokens(range(6))
    free = _cycles(target, tokens, [2] * 4, stop=(), limit=40)
    if free is None:
        not_applicable("greedy_cycles is not offered")
    expect(target.model.runs_greedy_cycles, "a target that runs greedy cycles does not say so")
    emitted = [token for cycle in free[0] for token in cycle.emitted]
    ends = [emitted[len(emitted) // 2]]
    for depths, stop, limit, keep in (
        ([1], (), 40, 0),
        ([2, 3, 1, 2], (), 40, 0),
        ([3, 3], (), 40, 1),
        ([2] * 4, ends, 40, 0),
        ([2] * 4, (), 3, 0),
        ([1, 2], (), 1, 0),
    ):
        case: dict[str, Any] = {"depths": depths, "stop": stop, "limit": limit, "keep": keep}
        got = _cycles(target, tokens, depths, stop, limit, keep)
        wanted = _cycles(target, tokens, depths, stop, limit, keep, stepwise=True)
        assert got is not None
        assert wanted is not None
        shown = [(cycle.drafted, cycle.accepted, cycle.emitted) for cycle in got[0] if cycle.emitted]
        truth = [(cycle.drafted, cycle.accepted, cycle.emitted) for cycle in wanted[0] if cycle.emitted]
        expect_equal(shown, truth, "cycles of the target differ from those of single passes", **case)
        expect_equal(got[1], wanted[1], "another number of tokens and pairs is held", **case)
        for ours, theirs in zip(got[2], wanted[2], strict=True):
            target.expect_close(ours, theirs, "cycles of the target leave another state", **case)


def _cycles(
    target: TargetUnderTest,
    tokens: list[int],
    depths: Sequence[int],
    stop: Sequence[int],
    limit: int,
    keep: int = 0,
    *,
    stepwise: bool = False,
) -> tuple[list[GreedyCycle], tuple[int, int], list[NDArray[np.float32]]] | None:
    """Cycles of these depths, one in flight behind the other unless ``keep`` > 0 cuts the last one.

    What they did; tokens and true pairs that the state holds; logits of the target and of the head after them.
    """
    model, state = target.model, target.state()
    hidden = model.prefill(state, tokens[:-1]).need_hidden()
    model.prefill_mtp(state, tokens[1:-1], hidden[:-1])
    start = GreedyStart((tokens[-1],), hidden[-1:])
    options: dict[str, Any] = {"stop_tokens": tuple(stop), "limit": limit}
    made = StepwiseCycles(model, state, start, **options) if stepwise else model.greedy_cycles(state, start, **options)
    if made is None:
        return None
    done: list[GreedyCycle] = []
    for i, depth in enumerate(depths):
        made.submit(depth)
        if keep or i:
            done.append(made.collect())
    if not keep:
        done.append(made.collect())
    emitted = [token for cycle in done for token in cycle.emitted]
    if keep:
        made.keep(keep)
        emitted = emitted[: len(emitted) - len(done[-1].emitted) + keep]
    waiting = made.close()
    held = [*tokens, *emitted]
    size = (state.length, state.mtp_length)
    pairs = held[len(held) - len(waiting) :]
    after = model.decode_mtp(state, pairs, waiting).need_logits().rows()[0].copy()
    return done, size, [target.next_logits(state, held[-1]), after]

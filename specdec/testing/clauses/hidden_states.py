"""Checks of a target's hidden states, shared weights and MTP head: clauses F13, F17 to F19, F21, F22 and F29."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.contract import ForwardOutput, Hidden, Needs, SharedWeights
from specdec.errors import PromptError, StateError, UnsupportedError
from specdec.testing.checks import Broken, Run, check, expect, expect_equal, expect_error, not_applicable
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import ForwardPassSubject
from specdec.testing.target_under_test import TargetUnderTest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

MTP = Needs(mtp=True)


def _all_needs(target: TargetUnderTest) -> Needs:
    """All hidden states of this target: the final one, and the first, a middle and the last boundary."""
    layers = target.info.layers
    needs = target.offered(0, (layers + 1) // 2, layers)
    if not needs.hidden:
        not_applicable("this target gives no hidden states")
    return needs


def hidden_by_name(output: ForwardOutput) -> dict[str, Hidden]:
    """The hidden states of a pass, by name."""
    final = {} if output.hidden is None else {"final": output.hidden}
    return {**final, **{f"boundary {k}": hidden for k, hidden in output.boundaries.items()}}


@check("F17")
def hidden_states_keep(subject: ForwardPassSubject, run: Run) -> None:
    """Hidden states stay valid whatever passes run later: a drafter may hold them for many cycles."""
    target = TargetUnderTest(subject)
    model, tokens, needs = target.model, target.tokens(range(min(8, target.room - 1))), _all_needs(target)
    state = target.state(needs=needs)
    held = [(hidden_by_name(model.prefill(state, tokens[:3])), 3)]
    for token in tokens[3:]:
        rows = [token, target.token(77)][: target.info.max_rows]
        held.append((hidden_by_name(model.decode(state, rows)), 1))
        model.commit(state, 1)
    for name, truth in _rows_one_by_one(target, tokens, needs).items():
        parts = [given[name][:rows] for given, rows in held]  # slice late: slicing may copy
        got = parts[0].join(parts[1:]).rows()
        target.expect_close(got, truth, f"{name}: hidden states changed while they were held")


def _rows_one_by_one(target: TargetUnderTest, tokens: Sequence[int], needs: Needs) -> dict[str, Float32]:
    """Hidden states of all tokens, ``[T, H]`` by name, from single-row passes, read at once."""
    state = target.state(max(target.room, len(tokens)), needs)
    seen: list[dict[str, Float32]] = []
    for token in tokens:
        output = target.model.decode(state, [token])
        seen.append({name: hidden.rows().copy() for name, hidden in hidden_by_name(output).items()})
        target.model.commit(state, 1)
    return {name: np.concatenate([one[name] for one in seen]) for name in seen[0]}


@check("F21")
def any_passes(subject: ForwardPassSubject, run: Run) -> None:
    """Hidden states do not depend on chunks, rows per pass or other needs: bit-equal if BITWISE, close if NUMERIC."""
    target = TargetUnderTest(subject)
    tokens, everything = target.tokens(range(8)), _all_needs(target)
    most = min(len(tokens), target.info.max_rows)
    truth = _rows_one_by_one(target, tokens, everything)

    def expect_rows(output: ForwardOutput, rows: slice, what: str, *, exact: bool = True) -> None:
        for name, hidden in hidden_by_name(output).items():
            got, expected = hidden.rows(), truth[name][rows]
            expect_equal(got.shape, (len(expected), target.info.hidden_size), f"{name} has the wrong shape")
            told = f"{name}: {what} gives different hidden states"
            target.expect_close(got, expected, told, exact=exact, rows=rows)

    singles = [Needs(boundaries=(k,)) for k in everything.boundaries]
    for needs in (everything, *singles, Needs(final_hidden=everything.final_hidden)):
        for chunk in (most, 3):
            state = target.state(needs=needs)
            for at in range(0, len(tokens), chunk):
                part = slice(at, min(at + chunk, len(tokens)))
                expect_rows(target.model.prefill(state, tokens[part]), part, f"prefill in chunks of {chunk}")
        for kept in (most, 1):
            state = target.state(needs=needs)
            target.model.decode(state, target.tokens([50, 51][:most]))
            expect_rows(target.model.decode(state, tokens[:most]), slice(0, most), f"decode of {most} rows")
            target.model.commit(state, kept)
            after = slice(kept, min(kept + min(2, most), len(tokens)))
            if tokens[after]:
                expect_rows(target.model.decode(state, tokens[after]), after, f"decode after {kept} committed rows")
        last = Needs(final_hidden=needs.final_hidden, boundaries=needs.boundaries, prompt_rows="last")
        output = target.model.prefill(target.state(needs=last), tokens[:most])
        expect_rows(output, slice(most - 1, most), "prefill with prompt_rows = 'last'")
    longest = min(run.count(_LONG[-1]), target.info.max_positions - 1)
    tokens = target.tokens(range(longest))
    truth = _rows_one_by_one(target, tokens, everything)
    for needs in (everything, attrs.evolve(everything, prompt_rows="last")):
        for count in _LONG:
            if count <= longest:
                output = target.model.prefill(target.state(longest, needs), tokens[:count])
                exact = count <= target.info.max_rows or not target.chunks_differ
                rows = slice(count - 1 if needs.prompt_rows == "last" else 0, count)
                what = f"a chunk of {count} tokens with prompt_rows = {needs.prompt_rows!r}"
                expect_rows(output, rows, what, exact=exact)


_LONG = (17, 40, 65, 129, 300)  # tokens of prompts that are taken in at once


@check("F29")
def shared_weights(subject: ForwardPassSubject, run: Run) -> None:
    """``shared_weights`` gives finite matrices ``[V, H]`` and a scale above 0, the same at every call, or raises
    UnsupportedError."""
    target = TargetUnderTest(subject)
    try:
        shared = target.model.shared_weights()
    except UnsupportedError as error:
        not_applicable(f"this target hands out no weights: {error.message}")
    before = _readings(shared, target)
    model, state = target.model, target.state()
    model.prefill(state, target.tokens(range(3)))
    model.decode(state, target.tokens([7]))
    for again in (shared, model.shared_weights()):
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
        found = {"embed_tokens": _floats(shared.embed_tokens), "lm_head": _floats(shared.lm_head)}
        truth = {"embed_tokens": (vocab, size), "lm_head": (vocab, size)}
    else:
        ops, tokens = shared.ops, [0, vocab - 1, vocab // 2, 0]
        rows = ops.embed(shared.embed_tokens, tokens)
        found = {"embed_tokens": ops.to_host(rows).float().numpy(), "lm_head": ops.head(rows, shared.lm_head).rows()}
        truth = {"embed_tokens": (len(tokens), size), "lm_head": (len(tokens), vocab)}
    for what, array in found.items():
        expect_equal(array.shape, truth[what], f"{what} gives values of another shape")
        expect(bool(np.isfinite(array).all()), f"{what} gives values that are not finite", got=array)
    return found


def _floats(array: Any) -> Float32:
    """An array in host memory as float32, copied. Raises: Broken if torch does not take it."""
    import torch

    try:
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Broken(
            f"shared weights without ops are none that torch takes: {error}", got=type(array).__name__
        ) from error
    made: Float32 = tensor.detach().float().numpy().copy()
    return made


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

    def body(length: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        tokens, pending = target.tokens(range(3)), target.token(4)
        state = target.prefilled(tokens, needs=MTP)
        for number in range(length):
            kind, count, depth = rng.integers(8), int(rng.integers(1, 5)), int(rng.choice([1, 2, 3, 5, 8, 13]))
            if len(tokens) + rows + 2 >= target.room:
                break
            if kind < 5:  # a cycle, mostly with a draft
                drafted: tuple[int, ...] = ()
                if kind < 4:
                    fresh = target.prefilled(tokens, needs=MTP)
                    (drafted, got), (expected, truth) = (target.draft(one, pending, depth) for one in (state, fresh))
                    expect_equal(drafted, expected, "a draft differs from that of a fresh state", tokens=tokens)
                    exact = len(tokens) <= target.info.max_rows or not target.chunks_differ
                    for ours, theirs in zip(got, truth, strict=True):
                        what = "the logits of a draft differ from those of a fresh state"
                        target.expect_close(ours, theirs, what, exact=exact)
                decoded = [pending, *drafted, *target.tokens(range(number, number + 3))][:rows]
                kept = min(count, len(decoded))
                model.decode(state, decoded)
                model.commit(state, kept)
                tokens += decoded[:kept]
            elif kind == 5:
                model.prefill(state, [pending])
                tokens.append(pending)
            elif kind == 6:
                length = max(1, len(tokens) - count)
                reached = model.rewind(state, length)
                target.pairs(state)
                if reached < length:
                    model.prefill(state, tokens[reached:length])
                del tokens[length:]
            else:
                state = model.restore(model.snapshot(state), MTP)
            target.pairs(state)
            pending = target.token(50 + number)

    run.explore(body, examples=12, first=[{"length": 30, "seed": 1}], length=lengths(30), seed=seeds)


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

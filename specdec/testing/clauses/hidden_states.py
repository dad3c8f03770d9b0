"""Checks of the hidden states that a target gives: clauses F9, F17, F21 and F29."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from specdec.contract import NO_NEEDS, ForwardOutput, Hidden, Needs, SharedWeights
from specdec.errors import UnsupportedError
from specdec.testing.checks import Broken, Run, check, expect, expect_equal, not_applicable
from specdec.testing.subjects import ForwardPassSubject
from specdec.testing.target_under_test import TargetUnderTest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]


def offered(target: TargetUnderTest, *boundaries: int) -> Needs:
    """The final hidden states and these boundaries, as far as this target gives them."""
    known = tuple(k for k in boundaries if target.info.layers and k <= target.info.layers)
    return Needs(final_hidden=target.info.gives_hidden, boundaries=known)


def _all_needs(target: TargetUnderTest) -> Needs:
    """All hidden states of this target: the final one, and the first, a middle and the last boundary."""
    layers = target.info.layers
    needs = offered(target, 0, (layers + 1) // 2, layers)
    if not needs.hidden:
        not_applicable("this target gives no hidden states")
    return needs


def _given(output: ForwardOutput) -> dict[str, Hidden]:
    """The hidden states of a pass, by name."""
    final = {} if output.hidden is None else {"final": output.hidden}
    return {**final, **{f"boundary {k}": hidden for k, hidden in output.boundaries.items()}}


@check("F9")
def outputs(subject: ForwardPassSubject, run: Run) -> None:
    """A pass returns exactly what its state was made for: hidden states, and from decode the logits of every row."""
    target = TargetUnderTest(subject)
    rows = min(2, target.info.max_rows)
    asked = offered(target, 0, 1)
    for needs in (NO_NEEDS, asked, Needs(mtp=True)) if target.info.mtp_layers else (NO_NEEDS, asked):
        state = target.state(needs=needs)
        tokens = target.tokens(range(5 + rows))
        outputs = target.model.prefill(state, tokens[:5]), target.model.decode(state, tokens[5:])
        expect(outputs[0].logits is None, "prefill gives logits", got=outputs[0].logits)
        expect_equal(len(outputs[1].need_logits()), rows, "decode does not give a row of logits per token")
        for output, count in zip(outputs, (5, rows), strict=True):
            expect_equal(output.rows, count, "a pass reports the wrong number of rows", needs=needs)
            expect_equal(output.hidden is not None, needs.final_hidden, "the final state breaks needs", needs=needs)
            expect_equal(tuple(output.boundaries), needs.boundaries, "boundaries break needs", needs=needs)
            for name, hidden in _given(output).items():
                parts = [len(one) for one in (hidden, hidden[-1:], hidden[:0], hidden[:1].join([hidden, hidden[1:]]))]
                expect_equal(parts, [count, 1, 0, 2 * count], f"{name} or a part of it has the wrong number of rows")
        expect_equal(state.pairs is not None, needs.mtp, "the ledger of MTP pairs breaks needs", needs=needs)


@check("F17")
def hidden_states_keep(subject: ForwardPassSubject, run: Run) -> None:
    """Hidden states stay valid whatever passes run later: a drafter may hold them for many cycles."""
    target = TargetUnderTest(subject)
    model, tokens, needs = target.model, target.tokens(range(min(8, target.room - 1))), _all_needs(target)
    state = target.state(needs=needs)
    held = [(_given(model.prefill(state, tokens[:3])), 3)]
    for token in tokens[3:]:
        rows = [token, target.token(77)][: target.info.max_rows]
        held.append((_given(model.decode(state, rows)), 1))
        model.commit(state, 1)
    for name, wanted in _rows_one_by_one(target, tokens, needs).items():
        parts = [given[name][:rows] for given, rows in held]  # slice late: slicing may copy
        got = parts[0].join(parts[1:]).rows()
        target.expect_close(got, wanted, f"{name}: hidden states changed while they were held")


def _rows_one_by_one(target: TargetUnderTest, tokens: Sequence[int], needs: Needs) -> dict[str, Float32]:
    """Hidden states of all tokens, ``[T, H]`` by name, from single-row passes, read at once."""
    state = target.state(max(target.room, len(tokens)), needs)
    seen: list[dict[str, Float32]] = []
    for token in tokens:
        output = target.model.decode(state, [token])
        seen.append({name: hidden.rows().copy() for name, hidden in _given(output).items()})
        target.model.commit(state, 1)
    return {name: np.concatenate([one[name] for one in seen]) for name in seen[0]}


@check("F21")
def any_passes(subject: ForwardPassSubject, run: Run) -> None:
    """Hidden states do not depend on chunks, rows per pass or other needs: bit-equal if BITWISE, close if NUMERIC."""
    target = TargetUnderTest(subject)
    tokens, everything = target.tokens(range(8)), _all_needs(target)
    most = min(len(tokens), target.info.max_rows)
    wanted = _rows_one_by_one(target, tokens, everything)

    def expect_rows(output: ForwardOutput, rows: slice, what: str, *, exact: bool = True) -> None:
        for name, hidden in _given(output).items():
            got, truth = hidden.rows(), wanted[name][rows]
            expect_equal(got.shape, (len(truth), target.info.hidden_size), f"{name} has the wrong shape")
            told = f"{name}: {what} gives different hidden states"
            target.expect_close(got, truth, told, exact=exact, rows=rows)

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
    wanted = _rows_one_by_one(target, tokens, everything)
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
        wanted = {"embed_tokens": (vocab, size), "lm_head": (vocab, size)}
    else:
        ops, tokens = shared.ops, [0, vocab - 1, vocab // 2, 0]
        rows = ops.embed(shared.embed_tokens, tokens)
        found = {"embed_tokens": ops.to_host(rows).float().numpy(), "lm_head": ops.head(rows, shared.lm_head).rows()}
        wanted = {"embed_tokens": (len(tokens), size), "lm_head": (len(tokens), vocab)}
    for what, array in found.items():
        expect_equal(array.shape, wanted[what], f"{what} gives values of another shape")
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

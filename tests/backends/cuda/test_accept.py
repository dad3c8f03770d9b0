"""Acceptance and commit on the device: the text of plain decoding, whatever is drafted, cut where it has to be."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.backends.cuda.kernels import accept
from specdec.backends.cuda.kernels.accept import FAULT, KEPT, LIMIT, ROWS, RUNNING, STATES, STOP, WAITING, Decision
from specdec.errors import ShapeError
from tests.backends.cuda.tables import mutated

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS = st.integers(0, 3)

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("device")]  # which is PLACE


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=PLACE)


def plain(table: list[list[int]], pending: int, limit: int, stops: list[int]) -> list[int]:
    """Greedy decoding of a target whose next token hangs on the last one and the position, until it has to end."""
    text: list[int] = []
    while len(text) < limit and (not text or text[-1] not in stops):
        pending = table[len(text) % len(table)][pending]
        text.append(pending)
    return text


def decoded(
    module: Any, table: list[list[int]], pending: int, limit: int, stops: list[int], drafts: list[list[int]]
) -> tuple[list[int], Decision]:
    """The same target and limits in cycles, three of them behind the end; position counts from 10."""
    depth = max(map(len, drafts))
    control = accept.new_control(remaining=limit, pending=pending, position=10, depth=depth, device=PLACE)
    text: list[int] = []
    over = 0
    for cycle in range(4 * limit + 4):
        draft = drafts[cycle % len(drafts)]
        before = Decision.of(control.tolist())
        rows, last = [], before.pending
        for at, token in enumerate([last, *draft]):
            rows.append(table[(len(text) + at) % len(table)][token])
        module.accept(ints(draft), ints(rows), ints(stops), control)
        after = Decision.of(control.tolist())
        text += after.emitted
        assert after.position == 10 + len(text)
        assert after.remaining == limit - len(text)
        assert after.pending == (text[-1] if text else pending)
        if before.halted:
            assert after == before if before.kept == 0 else after.kept == 0
            over += 1
            if over == 3:
                break
    return text, Decision.of(control.tolist())


@settings(max_examples=25, deadline=None)
@given(
    table=st.lists(st.lists(TOKENS, min_size=4, max_size=4), min_size=1, max_size=5),
    pending=TOKENS,
    limit=st.integers(1, 9),
    stops=st.lists(TOKENS, max_size=2),
    drafts=st.lists(st.lists(TOKENS, max_size=5), min_size=1, max_size=4),
)
def test_the_text_is_that_of_plain_decoding(
    table: list[list[int]], pending: int, limit: int, stops: list[int], drafts: list[list[int]]
) -> None:
    text, last = decoded(accept, table, pending, limit, stops, drafts)
    assert text == plain(table, pending, limit, stops)
    assert last.halted == (STOP.value if text[-1] in stops else LIMIT.value)


@settings(max_examples=60, deadline=None)
@given(
    best=st.lists(st.integers(-1, 3), min_size=1, max_size=7),
    agreed=st.integers(0, 7),
    stops=st.lists(TOKENS, max_size=3),
    remaining=st.integers(0, 8),
    halted=st.sampled_from([RUNNING, RUNNING, RUNNING, STOP, FAULT]),
    fed=st.booleans(),
    data=st.data(),
)
def test_accept_is_its_reference(
    best: list[int], agreed: int, stops: list[int], remaining: int, halted: Any, fed: bool, data: st.DataObject
) -> None:
    """Every field of the block, also where logits were not finite, nothing is left, or the sequence is over."""
    draft = best[: min(agreed, len(best) - 1)]
    rest = len(best) - 1 - len(draft)
    draft += data.draw(st.lists(st.integers(-1, 3), min_size=rest, max_size=rest))
    control = accept.new_control(remaining=remaining, pending=9, position=5, depth=len(draft) + 1, device=PLACE)
    control[0], control[KEPT.value], control[WAITING.value] = halted.value, 2, 5
    expected = control.clone().cpu()
    accept.accept(ints(draft), ints(best), ints(stops), control, fed=fed)
    accept.accept_reference(ints(draft).cpu(), ints(best).cpu(), ints(stops).cpu(), expected, fed=fed)
    assert control.tolist() == expected.tolist()


@pytest.mark.sample
def test_logits_that_are_not_finite_keep_nothing() -> None:
    """Neither where they decide, nor where a draft of such logits seems to agree with them."""
    for draft, best, fault in (([1, 2], [1, -1, 5], True), ([1, -1], [1, -1, 5], True), ([1, 2], [1, 3, -1], False)):
        control = accept.new_control(remaining=9, pending=7, position=4, depth=2, device=PLACE)
        accept.accept(ints(draft), ints(best), ints([]), control)
        decision = Decision.of(control.tolist())
        assert (decision.halted == FAULT.value) == fault
        assert decision.kept == (0 if fault else 2)
        assert (decision.pending, decision.position) == ((7, 4) if fault else (3, 6))


def test_shapes_are_checked() -> None:
    control = accept.new_control(remaining=9, pending=7, position=4, depth=2, device=PLACE)
    with pytest.raises(ShapeError, match="3 drafted tokens"):
        accept.accept(ints([1, 2, 3]), ints([1, 2, 3, 4]), ints([]), control)
    with pytest.raises(ShapeError, match="int32"):
        accept.accept(ints([1]).long(), ints([1, 2]), ints([]), control)
    with pytest.raises(ShapeError, match="address table"):
        accept.commit_rows(torch.zeros(3, 4, dtype=torch.int64, device=PLACE), ints([0, 0, 0]), 1)
    with pytest.raises(ShapeError, match="kinds of 3 caches"):
        accept.commit_rows(torch.zeros(3, 8, dtype=torch.int64, device=PLACE), ints([0, 0]), 1)


# --- commit -----------------------------------------------------------------------------------------------------------


def table_of(kinds: list[int]) -> Tensor:
    """Rows with marked values in every column."""
    table = torch.arange(8 * len(kinds), dtype=torch.int64).view(-1, 8) + 2**40
    table[:, 0], table[:, 3] = torch.arange(len(kinds)) + 50, 5
    table[:, 4] = torch.tensor([c % 5 * kind for c, kind in enumerate(kinds)])
    return table.to(PLACE)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kept", [-4, -1, 0, 1, 4])
def test_commit_rows(kept: int, whole: bool) -> None:
    """130 caches, more than a program takes; the count from the device or from the host."""
    kinds = [ROWS, STATES, STATES, ROWS, STATES] * 26
    expected, from_host, from_device = table_of(kinds).cpu(), table_of(kinds), table_of(kinds)
    accept.commit_rows_reference(expected, ints(kinds), kept, whole=whole)
    accept.commit_rows(from_host, ints(kinds), kept, whole=whole)
    assert torch.equal(from_host.cpu(), expected)
    control = ints([99] * 13)
    control[KEPT.value] = kept
    accept.commit_rows(from_device, ints(kinds), control[KEPT.value : KEPT.value + 1], whole=whole)
    assert torch.equal(from_device, from_host)


@pytest.mark.sample
def test_rows_can_be_taken_back() -> None:
    """What the host cuts later: LENGTH and SLOT are what they would have been."""
    kinds = ints([ROWS, STATES, STATES])
    cut, direct = table_of([ROWS, STATES, STATES]), table_of([ROWS, STATES, STATES])
    accept.commit_rows(cut, kinds, 4)
    accept.commit_rows(cut, kinds, -3)
    accept.commit_rows(direct, kinds, 1)
    assert torch.equal(cut, direct)


# --- mutants ----------------------------------------------------------------------------------------------------------


def _kill_by_text(module: Any) -> None:
    """Drafts that agree behind a disagreement, drafts that are right, and none."""
    table = [[1, 2, 3, 0], [2, 3, 3, 1]]
    for limit in (1, 4, 7):
        for stops in ([], [3]):
            for drafts in ([[3, 1]], [[1, 3], [0, 1], [], [3]], [plain(table, 0, 6, []), [0]]):
                text, _ = decoded(module, table, 0, limit, stops, drafts)
                assert text == plain(table, 0, limit, stops)


MUTANTS = {
    "the stop id is dropped": ("(accepted - open_end, stopped_at) + 1", "(accepted - open_end + 1, stopped_at)"),
    "the limit is forgotten": ("stopped_at) + 1, remaining)", "stopped_at) + 1, remaining + 1)"),
    "any agreement is accepted": (
        "accepted = tl.min(tl.where(confirmed, BLOCK_K, i), 0)",
        "accepted = tl.sum(confirmed.to(tl.int32), 0)",
    ),
    "one more row": ("decided = i <= accepted", "decided = i <= accepted + 1"),
    "halted cycles go on": ("tl.where(running & (fault == 0), kept, 0)", "tl.where(fault == 0, accepted + 1, 0)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name: str, tmp_path: pathlib.Path) -> None:
    copy = mutated(accept, tmp_path, MUTANTS[name])
    with pytest.raises(AssertionError):
        _kill_by_text(copy)

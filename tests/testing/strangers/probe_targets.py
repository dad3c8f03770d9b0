"""For each broken target, a few calls that show its fault, and nothing where a right target is asked."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specdec import Context, Needs, Sampling
from specdec.contract import Choosing, Hidden
from specdec.errors import PromptError, StateError
from specdec.sampling import Purpose, gumbel, processed

from .toy import Toy, loaded

VOCAB = 97


def text(count: int, symbols: int = 9, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, 1 + symbols, count)]


def held(target: Toy, tokens: Sequence[int], needs: Needs | None = None, capacity: int = 1024) -> Any:
    """A state that took these tokens in one by one, as plain decoding does."""
    state = target.new_state(capacity, needs or Needs())
    for token in tokens:
        target.decode(state, [token])
        target.commit(state, 1)
    return state


def after(target: Toy, state: Any, token: int = 3) -> Any:
    """The logits of the next row."""
    rows = target.decode(state, [token]).need_logits().rows().copy()
    target.commit(state, 0)
    return rows


def unlike(target: Toy, state: Any, tokens: Sequence[int]) -> bool:
    """Whether the state differs from a plainly decoded one in the next three rows, bit by bit."""
    plain = held(target, tokens)
    for token in (3, 5, 3):
        if not np.array_equal(after(target, state, token), after(target, plain, token)):
            return True
        for one in (state, plain):
            target.decode(one, [token])
            target.commit(one, 1)
    return False


def wrong_rows(kind: Any, length: int, rows: int, known: Sequence[int] = ()) -> bool:
    """Whether a pass of several rows gives other bits than passes of one row."""
    target, known = kind(), list(known) or text(length + rows)
    state = held(target, known[:length])
    together = target.decode(state, known[length:]).need_logits().rows().copy()
    state = held(target, known[:length])
    for at, token in enumerate(known[length:]):
        if not np.array_equal(target.decode(state, [token]).need_logits().rows()[0], together[at]):
            return True
        target.commit(state, 1)
    return False


def wrong_commit(kind: Any, length: int, rows: int, keep: int) -> bool:
    target, known = kind(), text(length)
    state = held(target, known)
    target.decode(state, [2, 4, 6, 2, 4, 6, 2, 4][:rows])
    target.commit(state, keep)
    return unlike(target, state, [*known, *[2, 4, 6, 2, 4, 6, 2, 4][:keep]])


def wrong_chunks(kind: Any, count: int) -> bool:
    target, known = kind(), text(count)
    state = target.new_state(1024)
    target.prefill(state, known)
    return unlike(target, state, known)


def wrong_rewind(kind: Any, count: int, length: int) -> bool:
    target, known = kind(), text(count)
    state = held(target, known)
    return target.rewind(state, length) != length or unlike(target, state, known[:length])


def raises(call: Callable[[], Any], wanted: type[Exception] = Exception) -> bool:
    try:
        call()
    except wanted:
        return True
    return False


def one_call_differs(kind: Any) -> bool:
    heads = []
    for choose in (None, lambda logits, drafted: logits.argmax()[-1]):
        target = kind(mtp=True)
        state = held(target, text(30), Needs(mtp=True))
        target.draft_mtp(state, 5, 9, choose=choose)
        heads.append(state.head[:40].copy())
    return not np.array_equal(*heads)


def cannot_be_filled(kind: Any) -> bool:
    target = kind()
    state = held(target, text(5), capacity=8)
    return raises(lambda: target.decode(state, [1, 2, 3]), StateError)


def logits_of(kind: Any, count: int = 8) -> Any:
    target = kind()
    state = held(target, text(20))
    return target.decode(state, text(count, symbols=90, seed=3)).need_logits()


def wrong_argmax(kind: Any) -> bool:
    logits = logits_of(kind)
    return logits.argmax() != [int(row.argmax()) for row in logits.rows()]


def wrong_topk(kind: Any) -> bool:
    logits = logits_of(kind)
    right = [list(np.argsort(-row, kind="stable")[:VOCAB]) for row in logits.rows()]
    return raises(lambda: logits.topk(VOCAB)) or logits.topk(VOCAB)[0] != right


def wrong_sum(kind: Any) -> bool:
    logits = logits_of(kind, 16)
    rows = logits.rows().astype(np.float64)
    best = rows.max(-1, keepdims=True)
    right = np.log(np.exp(rows - best).sum(-1)) + best[:, 0]
    return not np.allclose(logits.logsumexp(), right, rtol=1e-5)


def wrong_noise(kind: Any, scale: float, seed: int) -> bool:
    logits = logits_of(kind)
    for row, values in enumerate(logits.rows().astype(np.float64)):
        right = (scale * values + gumbel(seed, 30, np.arange(VOCAB), Purpose.TOKEN)).argmax()
        if logits.noisy_argmax(row, scale, seed, 30) not in (None, right):
            return True
    return False


def rewound_to_nothing(kind: Any) -> bool:
    target = kind()
    state = held(target, text(12))
    target.rewind(state, 0)
    target.prefill(state, text(6, seed=2))
    return unlike(target, state, text(6, seed=2))


def half_taken(kind: Any) -> bool:
    target = kind()
    state = held(target, text(5))
    raises(lambda: target.prefill(state, [1, 2, VOCAB]), PromptError)
    return state.length != 5


def second_commit(kind: Any) -> bool:
    target = kind()
    state = held(target, text(5))
    return not raises(lambda: target.commit(state, 0), StateError)


def larger_commit(kind: Any) -> bool:
    target = kind()
    state = held(target, text(5))
    target.decode(state, [1, 2])
    return not raises(lambda: target.commit(state, 3), StateError)


def hidden_changes(kind: Any) -> bool:
    target = kind()
    state = target.new_state(64, Needs(final_hidden=True))
    kept: Hidden = target.prefill(state, text(6)).need_hidden()
    before = kept.rows().copy()
    target.decode(state, [5, 6, 7, 8, 5, 6])
    return not np.array_equal(before, kept.rows())


def logits_change(kind: Any) -> bool:
    target = kind()
    first, second = held(target, text(6)), held(target, text(9))
    kept = target.decode(first, [1, 2]).need_logits()
    before = kept.rows().copy()
    target.decode(second, [7, 8])
    return not np.array_equal(before, kept.rows())


def spoiled_by_writing(kind: Any) -> bool:
    target = kind()
    before = after(target, held(target, text(6)))
    rows = target.decode(held(target, text(6)), [3]).need_logits().rows()
    if rows.flags.writeable:
        rows[:] = 0
    return not np.array_equal(before, after(target, held(target, text(6))))


def changes_the_list(kind: Any) -> bool:
    target, tokens = kind(), text(20)
    target.prefill(target.new_state(64), tokens)
    return tokens != text(20)


def reads_the_list_later(kind: Any) -> bool:
    target, known = kind(), text(6)
    state, tokens = held(target, known), [3, 5]
    target.decode(state, tokens)
    tokens[:] = [7, 7]
    target.commit(state, 2)
    return unlike(target, state, [*known, 3, 5])


def snapshot_changes(kind: Any) -> bool:
    target, known = kind(), text(20)
    state = held(target, known)
    saved = target.snapshot(state)
    target.rewind(state, 4)
    target.prefill(state, text(16, seed=7))
    return unlike(target, target.restore(saved), known)


def restored_differs(kind: Any, *, file: bool = False, waiting: int = 0) -> bool:
    target, known = kind(), text(20)
    state = held(target, known)
    if waiting:
        target.decode(state, text(waiting))
    saved = target.snapshot(state)
    return unlike(target, target.restore(loaded(saved, target) if file else saved), known)


def head_differs(kind: Any) -> bool:
    target = kind(mtp=True)
    state = held(target, text(40), Needs(mtp=True))
    restored = target.restore(target.snapshot(state), Needs(mtp=True))
    if restored.pairs.length != state.pairs.length:
        return True
    for one in (state, restored):
        target.draft_mtp(one, 5, 3)
    return not np.array_equal(state.head[:44], restored.head[:44])


def odd_meta(kind: Any) -> bool:
    target = kind()
    return any(type(value) is not int for value in target.snapshot(held(target, text(5))).meta.values())


def restored_without_hidden(kind: Any) -> bool:
    target, needs = kind(), Needs(final_hidden=True, boundaries=(1,))
    restored = target.restore(target.snapshot(held(target, text(5), needs)), needs)
    return target.decode(restored, [1]).hidden is None


def moves_torch(kind: Any) -> bool:
    target = kind()
    before = torch.get_rng_state()
    target.new_state(8)
    return not torch.equal(before, torch.get_rng_state())


def keeps_state(kind: Any) -> bool:
    target = kind()
    alive = weakref.ref(target.new_state(8))
    gc.collect()
    return alive() is not None


def one_disturbs_the_other(kind: Any) -> bool:
    target = kind()
    first, second = held(target, text(6)), held(target, text(9))
    target.decode(first, [2, 3])
    target.decode(second, [7, 8])
    target.commit(first, 2)
    return unlike(target, first, [*text(6), 2, 3])


def leaves_a_trace(kind: Any) -> bool:
    target, known = kind(), [1, 2, 4]
    state = held(target, known)
    target.decode(state, [9, 9, 8, 9, 8, 3, 5, 3, 5, 3, 5])
    target.commit(state, 0)
    return unlike(target, state, known)


def sees_later(kind: Any) -> bool:
    target, known = kind(), text(6)
    state = held(target, known)
    passes = [
        target.decode(state, [3, 8, 2, 7, 1, 9, 4, 5, 6, *end]).need_logits().rows() for end in ([3, 60], [7, 50])
    ]
    return not np.array_equal(passes[0][:9], passes[1][:9])


def continues(kind: Any) -> bool:
    target, known = kind(), text(6)
    state = held(target, known)
    target.decode(state, [8, 2])
    again = target.decode(state, [3]).need_logits().rows().copy()
    return not np.array_equal(again, after(target, held(target, known)))


def boundaries_differ(kind: Any, few: tuple[int, ...]) -> bool:
    """Whether a boundary depends on what else is asked for, or on the kind of pass."""
    target, seen = kind(), []
    for boundaries in (few, (0, 1, 2)):
        state = target.new_state(64, Needs(boundaries=boundaries))
        seen.append(target.prefill(state, text(5)).boundaries[2].rows())
    state = target.new_state(64, Needs(boundaries=(0, 1, 2)))
    decoded = target.decode(state, text(5)).boundaries[2].rows()
    return not np.array_equal(seen[0], seen[1]) or not np.array_equal(seen[1], decoded)


def info_changes(kind: Any) -> bool:
    target = kind()
    before = target.info
    held(target, text(3))
    return bool(target.info != before)


def chained_stay(kind: Any) -> bool:
    caches = []
    for depth in (1, 7):
        target = kind(mtp=True)
        state = held(target, text(30), Needs(mtp=True))
        target.draft_mtp(state, 3, depth)
        for token in (3, 4, 5):
            target.decode(state, [token])
            target.commit(state, 1)
            target.draft_mtp(state, token + 1, depth)
        caches.append(state.head[:33].copy())
    return not np.array_equal(*caches)


def wrong_choice(kind: Any) -> bool:
    target, known = kind(), text(20)
    state, drafted = held(target, known[:-1]), [40, 40, 40]
    context = Context(known, Sampling(frequency_penalty=-90.0), generated_from=19)
    logits = target.decode(state, [known[-1], *drafted]).need_logits()
    chosen = logits.choose(Choosing(drafted, context))
    right = [int(processed(row, [*known, *drafted[:at]], context).argmax()) for at, row in enumerate(logits.rows())]
    return any(token not in (None, wanted) for token, wanted in zip(chosen, right, strict=False))


def siblings_share(kind: Any) -> bool:
    target, known = kind(), text(20)
    saved = target.snapshot(held(target, known))
    first, second = target.restore(saved), target.restore(saved)
    for state, token in ((first, 2), (second, 7)):
        target.decode(state, [token])
        target.commit(state, 1)
    return unlike(target, first, [*known, 2])


def wrong_last_row(kind: Any) -> bool:
    target, known = kind(), text(60)
    last, whole = (
        target.prefill(target.new_state(100, Needs(final_hidden=True, prompt_rows=rows)), known).need_hidden().rows()
        for rows in ("last", "all")
    )
    return not np.array_equal(last, whole[-1:])


def wrong_pairs(kind: Any) -> bool:
    target = kind(mtp=True)
    states = [target.new_state(100, Needs(mtp=True)) for _ in range(2)]
    for state, passes in zip(states, ([[3, 5, 7], [5, 6]], [[3], [5]]), strict=True):
        for tokens in passes:
            target.decode(state, tokens)
            target.commit(state, 1)
    heads = []
    for state in states:
        target.draft_mtp(state, 9, 2)
        heads.append(state.head[:2])
    return not np.array_equal(*heads)


def takes_too_much(kind: Any) -> bool:
    target = kind()
    state = target.new_state(10)
    target.prefill(state, text(9))
    return not raises(lambda: target.decode(state, [1, 2]), StateError)


PROBES: dict[str, Callable[[Any], bool]] = {
    "BytePositions": lambda kind: wrong_rows(kind, 260, 3),
    "SevenRowMask": lambda kind: wrong_rows(kind, 30, 10),
    "LongChunks": lambda kind: wrong_chunks(kind, 80),
    "WindowByPass": lambda kind: wrong_rows(kind, 292, 14, [95, 44, *text(290), 95, *text(13)]),
    "KeepsAllRows": lambda kind: wrong_commit(kind, 610, 5, 2),
    "ShortHistory": lambda kind: wrong_rewind(kind, 60, 20),
    "LongDrafts": one_call_differs,
    "LastPlace": cannot_be_filled,
    "HighestTie": wrong_argmax,
    "TopOfAll": wrong_topk,
    "Overflowing": wrong_sum,
    "RewindsToHere": lambda kind: wrong_rewind(kind, 20, 20),
    "RewindsToNothing": rewound_to_nothing,
    "EmptyStates": lambda kind: not raises(lambda: kind().new_state(0), PromptError),
    "ChecksOnTheWay": half_taken,
    "CommitsTwice": second_commit,
    "CutsCommits": larger_commit,
    "ViewsOfHidden": hidden_changes,
    "ViewsOfLogits": logits_change,
    "SharesAnswers": spoiled_by_writing,
    "ConsumesTokens": changes_the_list,
    "KeepsTheList": reads_the_list_later,
    "SharedArrays": snapshot_changes,
    "HalfMemory": restored_differs,
    "WithoutPairs": head_differs,
    "SavesProvisional": lambda kind: restored_differs(kind, waiting=3),
    "MetaObjects": odd_meta,
    "TensorsReturn": lambda kind: raises(lambda: restored_differs(kind, file=True)),
    "ForgetsNeeds": restored_without_hidden,
    "SmallSeedNoise": lambda kind: wrong_noise(kind, 0.3, 2**32 + 7),
    "Jitters": lambda kind: wrong_rows(kind, 20, 9),
    "SeedsTorch": moves_torch,
    "NoBytes": lambda kind: kind().new_state(64).nbytes() < 64 * 8,
    "KeepsStates": keeps_state,
    "SharedScratch": one_disturbs_the_other,
    "SeesStaleRows": leaves_a_trace,
    "SeesLaterRows": sees_later,
    "Continues": continues,
    "NumbersByOrder": lambda kind: boundaries_differ(kind, (1, 2)),
    "BoundaryAfterNorm": lambda kind: boundaries_differ(kind, (0, 2)),
    "InfoChanges": info_changes,
    "ChainedStay": chained_stay,
    "AnotherOrder": lambda kind: wrong_rows(kind, 20, 9),
    "ChoosesByCommitted": wrong_choice,
    "SiblingsShare": siblings_share,
    "LastOfFirstBlock": wrong_last_row,
    "PairsFromTheEnd": wrong_pairs,
    "GrowsWhenFull": takes_too_much,
}

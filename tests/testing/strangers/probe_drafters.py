"""For each broken drafter, a few calls that show its fault, and nothing where a right drafter is asked."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from specdec import Context, Draft, DrafterEnv, ForwardOutput, PrepareEnv, Sampling, Verdict
from specdec.backends.arrays import HostLogits
from specdec.contract import DraftNoise
from specdec.sampling import Purpose, draw, uniforms

from .toy import Toy

VOCAB = 97


def text(count: int, symbols: int = 6, seed: int = 1) -> list[int]:
    """Tokens that repeat often enough for a look-up."""
    return [int(token) for token in np.random.default_rng(seed).integers(1, 1 + symbols, count)]


def environment(kind: Any, vocab: int = VOCAB, saved: Any = None) -> DrafterEnv:
    target = Toy(vocab, mtp=True)
    shared = None if kind.prepare is None else kind.prepare(None, PrepareEnv(target=target))
    return DrafterEnv(target=target, state=target.new_state(1024, kind.needs), shared=shared, saved=saved)


def make(kind: Any, **how: Any) -> Any:
    return kind(None, environment(kind, **how))


def ratio(tokens: Sequence[int], seed: int = 0, cycle: int = 3, **settings: Any) -> Context:
    """A context whose verifier wants independent noise."""
    sampling = Sampling(**{"temperature": 1.0, "seed": seed, **settings})
    return Context(list(tokens), sampling, generated_from=1, cycle=cycle, draft_noise=DraftNoise.INDEPENDENT)


def output(rows: int = 1) -> ForwardOutput:
    return ForwardOutput(rows=rows, logits=HostLogits(np.ones((rows, VOCAB), np.float32)), boundaries={})


def fresh(kind: Any, tokens: Sequence[int], depth: int = 4, **how: Any) -> Draft:
    return make(kind).propose(Context(list(tokens), **how), depth)


def grow(drafter: Any, known: list[int], more: Iterable[int], *, depth: int = 4, cycle: int = 0) -> None:
    """Cycles in which every draft is rejected and the next token is given."""
    for number, token in enumerate(more, cycle):
        context = Context(list(known), cycle=number)
        draft = drafter.propose(context, depth) if depth else Draft()
        known.append(token)
        drafter.observe(Verdict(0, token), output(len(draft.tokens) + 1), Context(list(known), cycle=number))


def same(a: Draft, b: Draft) -> bool:
    probs = (a.probs is None) == (b.probs is None) and (a.probs is None or np.array_equal(a.probs, b.probs))
    return a.tokens == b.tokens and probs


def forgets(kind: Any, tokens: Sequence[int], *, step: int = 7, after: int = 0, cycle: int = 0) -> bool:
    """Whether somewhere along the text it drafts otherwise than a fresh drafter."""
    drafter, known = make(kind), list(tokens[:2])
    for at in range(2, len(tokens), step):
        grow(drafter, known, tokens[at : at + step], cycle=cycle + at)
        if at >= after and not same(drafter.propose(Context(known), 4), fresh(kind, known)):
            return True
    return False


def remembers(kind: Any, count: int, back: int, more: Sequence[int], *, saved: bool = False) -> bool:
    """Whether after a rewind it drafts otherwise than a fresh drafter, while another text grows."""
    known = text(count)
    drafter = make(kind)
    grow(drafter, [], []), drafter.propose(Context(list(known)), 4)
    if saved:
        drafter = make(kind, saved=drafter.snapshot(Context(list(known))))
        drafter.propose(Context(list(known)), 4)
    drafter.rewind(count - back)
    del known[count - back :]
    for token in more:
        grow(drafter, known, [token])
        if not same(drafter.propose(Context(list(known)), 4), fresh(kind, known)):
            return True
    return False


def miscalibrated(kind: Any, tokens: Sequence[int], *, depth: int = 4, seeds: int = 400, **settings: Any) -> bool:
    """Whether drawn tokens and their distributions disagree by more than seven standard deviations anywhere."""
    surplus: dict[tuple[int, int], Any] = {}
    variance: dict[tuple[int, int], Any] = {}
    drafter = make(kind)
    for seed in range(seeds):
        draft = drafter.propose(ratio(tokens, seed, **settings), depth)
        for at, token in enumerate(draft.tokens):
            probs = draft.probs[at].astype(np.float64)
            key = at, draft.tokens[at - 1] if at else -1
            surplus.setdefault(key, np.zeros(VOCAB))[token] += 1
            surplus[key] -= probs
            variance[key] = variance.get(key, 0.5) + probs * (1 - probs)
    return any((abs(surplus[key]) / np.sqrt(variance[key])).max() > 7 for key in surplus)


def raises(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 - whatever it raises is the fault
        return True
    return False


def sums(kind: Any, tokens: Sequence[int], **settings: Any) -> Any:
    draft = make(kind).propose(ratio(tokens, **settings), 4)
    return draft.probs.astype(np.float64).sum(-1)


def not_json(report: Any) -> bool:
    return raises(lambda: json.dumps(report, allow_nan=False)) or json.loads(json.dumps(report)) != report


def asked_in_chunks(kind: Any) -> bool:
    known = text(300)
    drafter = make(kind)
    for end in (100, 200, 299):
        drafter.prefill(Context(known[:end]), output(100))
    return not same(drafter.propose(ratio(known), 4), make(kind).propose(ratio(known), 4))


def row_of_another(kind: Any) -> bool:
    drafter = make(kind)
    for seed in range(10):
        context = ratio(text(80), seed)
        draft = drafter.propose(context, 10)
        rows = [drafter.distribution(list(draft.tokens[:at]), context) for at in range(10)]
        if not np.allclose(np.stack(rows), draft.probs):
            return True
    return False


def rewound_to_its_length(kind: Any) -> bool:
    drafter, known = make(kind), text(60)
    drafter.prefill(Context(known[:-1]), output(59))
    drafter.rewind(59)
    return not same(drafter.propose(Context(known), 4), fresh(kind, known))


def wide_vocabulary(kind: Any) -> bool:
    tokens = [70_000, 3, 70_000, 3]
    return raises(lambda: make(kind, vocab=100_000).propose(Context(tokens), 4))


def rewound_to_nothing(kind: Any) -> bool:
    drafter = make(kind)
    drafter.propose(Context(text(9)), 4)
    drafter.rewind(0)
    return raises(lambda: drafter.propose(Context([5]), 4))


def overwritten(kind: Any) -> bool:
    drafter = make(kind)
    draft = drafter.propose(ratio(text(50)), 4)
    before = draft.probs.copy()
    drafter.propose(ratio([*text(50), 1, 2, 3]), 4)
    return not np.array_equal(before, draft.probs)


def writes_logits(kind: Any) -> bool:
    array = np.random.default_rng(1).standard_normal((3, VOCAB)).astype(np.float32)
    before, drafter, known = array.copy(), make(kind), text(20)
    drafter.observe(
        Verdict(0, known[-1]), ForwardOutput(rows=3, logits=HostLogits(array), boundaries={}), Context(known)
    )
    return not np.array_equal(array, before)


def reports_change(kind: Any) -> bool:
    drafter, known = make(kind), text(40)
    drafter.propose(Context(known), 4)
    report = drafter.report()
    before = copy.deepcopy(report)
    drafter.propose(Context(known), 3)
    return report != before


def report_of_accepted(kind: Any) -> bool:
    drafter, known = make(kind), text(40)
    drafter.observe(Verdict(2, known[-1]), output(4), Context(known))
    return not_json(drafter.report())


def snapshot_changes(kind: Any) -> bool:
    drafter, known = make(kind), text(40)
    drafter.propose(Context(known), 4)
    saved = drafter.snapshot(Context(known))
    before = np.array(saved.arrays["tokens"])
    drafter.rewind(10)
    drafter.propose(Context([*known[:10], *text(30, seed=5)]), 4)
    return not np.array_equal(before, saved.arrays["tokens"])


def restored_differs(kind: Any, tokens: list[int], vocab: int = VOCAB, *, file: bool = False) -> bool:
    drafter = make(kind, vocab=vocab)
    drafter.propose(Context(list(tokens)), 4)
    saved = drafter.snapshot(Context(list(tokens)))
    if file:
        saved = type(saved)({name: torch.as_tensor(array) for name, array in saved.arrays.items()}, saved.meta)
    again = make(kind, vocab=vocab, saved=saved)
    known = list(tokens)
    for token in tokens[-20:]:
        known.append(token)
        if not same(drafter.propose(Context(list(known)), 4), again.propose(Context(list(known)), 4)):
            return True
    return False


def plain_meta(kind: Any) -> bool:
    drafter = make(kind)
    drafter.propose(Context(text(9)), 4)
    return any(type(value) not in (int, str) for value in drafter.snapshot(Context(text(9))).meta.values())


def changed_by_saving(kind: Any) -> bool:
    known, drafter = text(60, symbols=12), make(kind)
    grow(drafter, known, text(4, symbols=12, seed=3))
    drafter.snapshot(Context(list(known)))
    for token in text(40, symbols=12, seed=9):
        grow(drafter, known, [token])
        if not same(drafter.propose(Context(list(known)), 4), fresh(kind, known)):
            return True
    return False


def edits_settings(kind: Any) -> bool:
    sampling = Sampling(logit_bias={3: 1.0})
    make(kind).propose(Context(text(9), sampling), 4)
    return dict(sampling.logit_bias) != {3: 1.0}


def noise_is_the_tests(kind: Any) -> bool:
    tokens, drafter = text(40), make(kind)
    for seed in range(40):
        draft = drafter.propose(ratio(tokens, seed), 1)
        u = uniforms(seed, len(tokens), Purpose.ACCEPT, np.zeros(1, np.int64), 3)[0]
        if draft.tokens[0] != draw(draft.probs[0].astype(np.float64), float(u)):
            return False
    return True


def by_generator(kind: Any) -> bool:
    known, drafter, drafts = text(60, symbols=3), make(kind), set()
    for seed in range(20):
        random.seed(seed)
        drafts.add(drafter.propose(Context(known), 4).tokens)
    return len(drafts) > 1


def by_clock(kind: Any) -> bool:
    with mock.patch("time.perf_counter", side_effect=itertools.count().__next__):
        slow = make(kind).propose(Context(text(60)), 4)
    with mock.patch("time.perf_counter", side_effect=itertools.repeat(1.0).__next__):
        return not same(slow, make(kind).propose(Context(text(60)), 4))


def moves_numpy(kind: Any) -> bool:
    np.random.seed(77)
    make(kind)
    expected = np.random.RandomState(77).random_sample()
    return bool(np.random.random_sample() != expected)


def moves_torch(kind: Any) -> bool:
    before = torch.get_rng_state()
    make(kind).propose(ratio(text(20)), 2)
    return not torch.equal(before, torch.get_rng_state())


def keeps_output(kind: Any) -> bool:
    drafter, seen = make(kind), output()
    alive = weakref.ref(seen.logits)
    drafter.observe(Verdict(0, 1), seen, Context([1, 2, 1]))
    del seen
    gc.collect()
    return alive() is not None


def keeps_state(kind: Any) -> bool:
    env = environment(kind)
    alive = weakref.ref(env.state)
    kind(None, env)
    del env
    gc.collect()
    return alive() is not None


def sees_others(kind: Any) -> bool:
    known = text(30, symbols=90, seed=4)
    if hasattr(kind, "common"):
        kind.common.clear()
    alone = fresh(kind, known)
    other = make(kind)
    grow(other, text(41), [*known[-3:], 7, 8])
    return not same(alone, fresh(kind, known))


def runs_the_target(kind: Any) -> bool:
    env, known = environment(kind), list(range(1, 20))
    env.target.prefill(env.state, known[:-1])
    kind(None, env).propose(Context(known), 4)
    return env.state.drafted is not None


def needs_more(kind: Any) -> bool:
    env, known = environment(kind), [*range(1, 40), *range(50, 90)]
    env.target.prefill(env.state, known[:-1])
    drafter = kind(None, env)
    drafter.propose(Context(known), 4)
    rest = env.target.decode(env.state, known[-1:] * 7)
    return raises(lambda: drafter.observe(Verdict(6, 5), rest, Context(known)))


def follows_itself(kind: Any) -> bool:
    drafter, known = make(kind), text(40, symbols=3)
    drafter.propose(Context(list(known)), 4)
    known += [8, 9, 3]  # drafted by another
    drafter.observe(Verdict(2, 3), output(4), Context(list(known)))
    known += [4, 8, 9]
    return not same(drafter.propose(Context(list(known)), 4), fresh(kind, known))


def rewound_between_calls(kind: Any) -> bool:
    known, drafter = text(40, symbols=3), make(kind)
    drafter.propose(Context(list(known)), 4)
    drafter.rewind(20)
    known[20:] = text(30, symbols=3, seed=8)
    return not same(drafter.propose(Context(list(known)), 4), fresh(kind, known))


def one_snapshot_for_two(kind: Any) -> bool:
    known = text(40)
    drafter = make(kind)
    drafter.propose(Context(list(known)), 4)
    saved = drafter.snapshot(Context(list(known)))
    if saved is None:
        return False
    first, second, other = make(kind, saved=saved), make(kind, saved=saved), list(known)
    for seed, drafter, one in ((3, first, known), (4, second, other)):
        grow(drafter, one, text(15, symbols=3, seed=seed))
    return not same(first.propose(Context(known), 9), fresh(kind, known, 9))


def rewinds_the_state(kind: Any) -> bool:
    env, known = environment(kind), text(20)
    drafter = kind(None, env)
    env.target.prefill(env.state, known)
    drafter.propose(Context(list(known)), 4)
    drafter.rewind(12)
    return bool(env.state.length != 20)


def leaves_threads(kind: Any) -> bool:
    before = threading.active_count()
    make(kind)
    gc.collect()
    return threading.active_count() > before


def drafts_for_another_text(kind: Any) -> bool:
    """After a rewind and other tokens, as many of them and the same last one."""
    drafter, one, other = make(kind), [1, 2, 3, 1, 2], [1, 2, 4, 1, 2]
    drafter.propose(Context(list(one)), 4)
    drafter.rewind(2)
    return not same(drafter.propose(Context(list(other)), 4), fresh(kind, other))


def drawn_elsewhere(kind: Any, **settings: Any) -> bool:
    """Whether the mean probability of what is drawn is far from that of the stated distributions."""
    drawn, wanted = [], []
    for seed in range(300):
        draft = make(kind, vocab=9).propose(ratio([*[1] * 7, 2, *[1] * 5], seed, **settings), 1)
        drawn.append(float(draft.probs[0, draft.tokens[0]]))
        wanted.append(float((draft.probs[0] ** 2).sum()))
    return bool(np.mean(drawn) > 1.15 * np.mean(wanted))


def never_repeats(kind: Any) -> bool:
    """Whether no draft of three tokens ends with its first one."""
    drafts = [make(kind, vocab=9).propose(ratio(text(40), seed), 3).tokens for seed in range(200)]
    return not any(tokens[0] == tokens[2] for tokens in drafts if len(tokens) == 3)


PROBES: dict[str, Callable[[Any], bool]] = {
    "PrunesWhenAsked": lambda kind: forgets(kind, text(900, symbols=14), after=600),
    "ShortUndo": lambda kind: remembers(kind, 200, 60, text(60, seed=2)),
    "DraftsInSevens": lambda kind: len(fresh(kind, text(60), 13).tokens) > 13,
    "SearchesInNumpy": lambda kind: any(type(token) is not int for token in fresh(kind, text(400)).tokens),
    "IndexesInBatches": lambda kind: forgets(kind, text(180)),
    "SmallCounters": lambda kind: not np.isfinite(sums(kind, [1, 2] * 256 + [1])).all(),
    "RefreshesItself": lambda kind: forgets(kind, text(60), cycle=970),
    "ShortModel": lambda kind: raises(lambda: fresh(kind, text(310))),
    "CountsChunks": asked_in_chunks,
    "CopiesRowSeven": row_of_another,
    "CountsUp": lambda kind: any(token >= VOCAB for token in fresh(kind, [1, VOCAB - 2, VOCAB - 1]).tokens),
    "RewindsNothing": rewound_to_its_length,
    "SixteenBits": wide_vocabulary,
    "PositionsInBytes": lambda kind: remembers(kind, 300, 80, text(60, seed=2)),
    "DefaultDepth": lambda kind: bool(fresh(kind, text(60), 0).tokens),
    "TwoTokensNeeded": rewound_to_nothing,
    "EmptySnapshot": lambda kind: raises(lambda: make(kind).snapshot(Context([]))),
    "NaNReport": lambda kind: not_json(make(kind).report()),
    "GivesLists": lambda kind: type(fresh(kind, text(60), 9).tokens) is not tuple,
    "OneBuffer": overwritten,
    "ScalesLogits": writes_logits,
    "LiveReport": reports_change,
    "NumpyReport": report_of_accepted,
    "SharedSnapshot": snapshot_changes,
    "HalfSnapshot": lambda kind: restored_differs(kind, [token + 2048 for token in text(60)], 4096),
    "NumpyOnly": lambda kind: raises(lambda: restored_differs(kind, text(60), file=True)),
    "ObjectsInMeta": plain_meta,
    "SnapshotCompacts": changed_by_saving,
    "CountsPending": lambda kind: restored_differs(kind, text(40, symbols=8)),
    "SmallSeeds": lambda kind: raises(lambda: make(kind).propose(ratio(text(20), 2**32 + 5), 2)),
    "Overflows": lambda kind: not np.isfinite(sums(kind, text(400), temperature=0.005)).all(),
    "CutTail": lambda kind: abs(sums(kind, text(60), temperature=0.5) - 1).max() > 1e-4,
    "AnotherTemperature": lambda kind: miscalibrated(kind, text(60), temperature=0.5),
    "RawUnderBias": lambda kind: miscalibrated(kind, text(60), logit_bias={1: 2.0, 2: -1.0}),
    "EditsBias": edits_settings,
    "GreedyWithSoftmax": lambda kind: miscalibrated(kind, [1, 2, 1, 2, 1, 2, 1, 3, 1, 2, 1]),
    "GreedyLater": lambda kind: miscalibrated(kind, text(60)),
    "NoiseOfTheTest": noise_is_the_tests,
    "OneNumber": lambda kind: miscalibrated(kind, text(60)),
    "DropsUnlikely": lambda kind: miscalibrated(kind, text(20)),
    "DrawsAgain": lambda kind: miscalibrated(kind, [1, 1, 1, 2, 1, 1, 2, 1]),
    "RandomTies": by_generator,
    "ByTheClock": by_clock,
    "SeedsTheWorld": moves_numpy,
    "TorchNoise": moves_torch,
    "CountsQuestions": lambda kind: forgets(kind, text(60), step=1),
    "KeepsOutputs": keeps_output,
    "KeepsStates": keeps_state,
    "SharedIndex": sees_others,
    "AsksTheTarget": runs_the_target,
    "UndeclaredHead": lambda kind: raises(lambda: fresh(kind, [*range(1, 40), *range(50, 90)])),
    "UndeclaredHidden": needs_more,
    "TrustsItsDraft": follows_itself,
    "NotOnTheDevice": lambda kind: make(kind).device_draft(Context([1, 2])) is not None,
    "RewindsByLength": rewound_between_calls,
    "GivesUp": lambda kind: forgets(kind, text(60), step=1),
    "GrowsInTheSnapshot": one_snapshot_for_two,
    "ReportsBeforeFilters": lambda kind: miscalibrated(kind, text(60), top_k=2),
    "RewindsTheState": rewinds_the_state,
    "IndexesBeside": leaves_threads,
    "LengthMemo": drafts_for_another_text,
    "LimitedHeat": lambda kind: drawn_elsewhere(kind, temperature=3.0),
    "LeavesRepeatsOut": never_repeats,
}

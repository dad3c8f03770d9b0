"""Checks of drafters: clauses D1, D3 to D11, D13 to D15, D17 to D19 and D22.

One driver takes drafters through texts by several routes and compares their drafts with those of a drafter that saw
one token at a time.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import Context, Drafter, DrafterEnv, DraftNoise, Sampling
from specdec.hosting.engines import HostState, HostTarget, host_info
from specdec.testing import strategies
from specdec.testing.checks import Faults, Run, check, driven, expect, expect_equal, not_applicable, own_generators
from specdec.testing.distributions import Places, goodness_of_fit
from specdec.testing.engine_run import plain_decoding, run_engine
from specdec.testing.scripted_session import ScriptedSession, drafts_equal, layers_for, target_for
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import PluginSubject
from specdec.testing.table_model import Memory, TableModel
from specdec.testing.walks import SETTINGS, VOCAB, Walk, note_difference, text
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier

if TYPE_CHECKING:
    from numpy.typing import NDArray

_memories = st.sampled_from(list(Memory))
DRAWN = 300  # most tokens of texts at temperatures above 0
_PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)  # repeats, so that an n-gram drafter finds something
_WAY = "the draft depends on the way by which the tokens came"
_ROUTES = {
    "mixed": ("D6", 1150, _WAY),
    "prompt": ("D6", 1150, _WAY),
    "rewound": ("D7", 500, "after detours that were rewound, the draft is another one"),
    "restored": ("D17", 300, "over a saved state, also from a file, the draft is another one"),
    "rebuilt": ("D8", 200, "over a restored state, the draft is another one"),
    "beside": ("D15", 150, "another sequence changed a draft"),
    "reported": ("D18", 100, "report() changed a draft"),
    "steps": ("D5", 150, "the same calls gave a different draft"),
}
"""By route: the clause that it tests, the most tokens, and what a difference means."""


def _drafters(subject: PluginSubject, length: int, seed: int, setting: str, memory: Memory) -> Faults:
    """Take drafters through a text, the first in single steps and the others by routes."""
    tokens = text(seed, length if setting == "greedy" else min(length, DRAWN))
    options: dict[str, Any] = {"subject": subject, "setting": setting, "seed": seed, "memory": memory}
    faults = Faults()
    plain = Walk(route="steps", faults=faults, **options)
    chosen = np.random.default_rng([seed, 6]).permutation(list(_ROUTES))[:4].tolist()
    for number, route in enumerate(["", *chosen]):
        with faults.of("D5"), own_generators(number):
            if not route:
                plain.through(tokens)
                if setting == "greedy":  # so that every case has drafts with ``probs``
                    Walk(route="steps", faults=faults, **options | {"setting": "independent"}).through(tokens[:60])
                continue
            clause, most, what = _ROUTES[route]
            walk = Walk(route=route, faults=faults, **options)
            if SETTINGS[setting][1] is DraftNoise.COUPLED:
                walk.cycle = 37  # noise of a position, whatever the cycle is
            note_difference(clause, walk.through(tokens[:most]), plain, what)
    return faults


driven(
    _drafters,
    {
        "D1": "A draft has at most ``depth`` tokens, each a plain int inside the vocabulary.",
        "D3": "One token of context is enough, with no prefill before it.",
        "D4": "Depth 0 gives the empty draft.",
        "D5": "The same calls give the same drafts, and no global random generator is read or moved.",
        "D6": "After any cycles and prompts, the next draft is that of a fresh drafter that saw the same tokens.",
        "D7": "After a rewind to any length, the next draft is that of a fresh drafter.",
        "D8": "A drafter built over a restored state proposes the same drafts as the original.",
        "D9": "``probs`` is ``[K, V]`` float32; rows are finite, non-negative, sum to 1, and allow the drafted token.",
        "D11": "``needs`` names everything that a drafter uses of its target: hidden states and the MTP head.",
        "D15": "Sequences are independent: drafts do not depend on what other sequences did before or in between.",
        "D17": "``snapshot`` is a copy: a drafter built with or without it proposes the same drafts as the original.",
        "D18": "``report`` returns plain JSON data without NaN, as a copy, and calling it changes nothing.",
        "D19": "A draft belongs to its receiver: it is never written again.",
    },
    examples=14,
    length=lengths(1150),
    seed=seeds,
    setting=st.one_of(st.just("greedy"), st.sampled_from(list(SETTINGS))),
    memory=_memories,
)


# --- distributions ---------------------------------------------------------------------------------------------------


def _see(places: Places, tokens: tuple[int, ...], stated: NDArray[np.float64], last_token: int) -> None:
    """Add the tokens of a draft after ``last_token``, and their stated distributions ``[K, V]``."""
    ids, after = np.arange(LETTERS, dtype=np.float64), list[str]()
    for row, (token, probs) in enumerate(zip(tokens, stated, strict=True)):
        last = ["the last row"] if row == DEEP - 1 else []  # a drafter may end a draft early, by what it has drawn
        groups = ["all rows", "the first rows" if row < 2 else "rows 2 to 6" if row < 7 else "rows from 7", *last]
        groups.append(f"after {tokens[:row]}")
        places.add(groups, token, probs, -probs)
        again = ids + LETTERS * (ids == [last_token, *tokens][row]) - LETTERS * (row > 0) * (ids == tokens[0])
        places.add(["the token before and the first one"], token, probs, again)
        after = [f"after a place in quarter {int(4 * places.add(after, token, probs, ids))}"]


_DRAWN = ("independent", "flat", "filtered", "biased", "sharp")  # the settings under which noise is independent
DEEP, LETTERS = 9, 8  # tokens of a draft, and of the vocabulary


@check("D10")
def distributions_are_honest(subject: PluginSubject, run: Run) -> None:
    """Each row of ``probs`` is the distribution that its token was drawn from, given what was known before the draw."""
    model, drafted, what = target_for(subject, vocab=LETTERS), False, "drafted tokens do not follow their probs"
    shared = subject.prepare(model)
    for number, setting in enumerate(_DRAWN):
        places, prompt = Places(run.seed), [*_PROMPT, number + 1]
        known: dict[tuple[int, ...], NDArray[np.float64]] = {}  # by what was drafted before
        for draw in run.repeat(200, least=60):
            sampling = attrs.evolve(SETTINGS[setting][0], seed=draw * 7919 + run.seed % 2**40)
            context = Context([], sampling, draft_noise=DraftNoise.INDEPENDENT)
            session = ScriptedSession(subject, model, context, shared=shared)
            session.feed(prompt)
            draft = session.propose(DEEP)
            for fault in session.faults.values():  # of a draft that cannot be verified
                raise fault
            if not draft.tokens:
                continue
            stated = np.asarray(np.eye(LETTERS)[list(draft.tokens)] if draft.probs is None else draft.probs, np.float64)
            _see(places, draft.tokens, stated, prompt[-1])
            for row in range(len(draft.tokens)):
                before = draft.tokens[:row]
                expected, case = known.setdefault(before, stated[row]), {"context": [*prompt, *before]}
                other = "one context has two distributions: they depend on the draw"
                expect(np.allclose(stated[row], expected, atol=1e-6), other, got=stated[row], expected=expected, **case)
        drafted = drafted or bool(known)
        places.judge(what, setting=setting, context=prompt)
        if setting == "independent" and all(rows.max() >= 1 for rows in known.values()):
            break  # nothing is drawn
    if not drafted:
        not_applicable("it drafts nothing here")


# --- other engines, and this one -------------------------------------------------------------------------------------


@check("D22")
def drafts_in_hosts(subject: PluginSubject, run: Run) -> None:
    """Without needs, a draft is a function of tokens and configuration, so that it is the same in every engine."""
    if not subject.needs.tokens_only:
        not_applicable("it needs more of its target than tokens")

    def body(seed: int, length: int) -> None:
        tokens = text(seed, length)
        plain = Walk(subject=subject, setting="greedy", route="steps", seed=seed).through(tokens)
        capacity, shown = 2 * len(tokens) + 9, list[int]()

        def drafter() -> Drafter:
            target, shared = HostTarget(host_info("a host", VOCAB, capacity)), plain.session.shared
            made: Drafter = subject.make(DrafterEnv(target=target, state=HostState(shown, capacity), shared=shared))
            return made

        hosted = drafter()
        for position, expected in plain.drafts.items():
            depth = plain.depths[position]
            if position % 7 == 0:  # a detour that is taken back
                shown[:] = [*tokens[: position + 1], 1, 2]
                hosted.propose(Context(shown), depth)
                shown[:] = tokens[:position]
                hosted.rewind(position - 1)
            shown[:] = tokens[:position]
            if position % (seed % 4 + 1):  # engines may ask now and then only
                continue
            for other, how in ((hosted, "in a host"), (hosted, "asked for again"), (drafter(), "of another copy")):
                got = other.propose(Context(list(shown)), depth)
                what = f"the draft {how}, where only propose and rewind are called, is not the engine's"
                expect(drafts_equal(got, expected), what, got=got, expected=expected, tokens=tokens[:position])

    run.explore(body, examples=6, seed=seeds, length=lengths(100))


@check("D13")
def tokens_of_plain_decoding(subject: PluginSubject, run: Run) -> None:
    """In the engine with the strict verifier, the output is that of plain decoding, for every depth and sampling."""

    def body(prompt: list[int], memory: Memory, depths: list[int], sampling: Sampling) -> None:
        model, verifier = target_for(subject, memory, vocab=VOCAB), StrictVerifier()
        options: dict[str, Any] = {"needs": subject.needs, "shared": subject.prepare(model)}
        got, stats = run_engine(model, verifier, subject.make, prompt, 12, depths, sampling, **options)
        expected = plain_decoding(model, verifier, prompt, 12, sampling)
        expect_equal(got, expected, "the output is not that of plain decoding")
        expect(not stats.inactive_reason, "the engine switched the drafter off", got=stats.inactive_reason)
        expect(not stats.faults, "the engine had to cut drafts", got=stats.faults)

    generations: dict[str, Any] = strategies.generations(VOCAB)
    run.explore(body, examples=20, memory=_memories, **generations)


@check("D14")
def distribution_of_the_target(subject: PluginSubject, run: Run) -> None:
    """In the engine with a ratio test, the output follows the target's joint distribution: no noise is reused."""
    walks = [
        Walk(subject=subject, setting="independent", seed=1, cycle=cycle).through(text(1, 120)) for cycle in (0, 5)
    ]
    first, second = ({at: draft.tokens for at, draft in walk.drafts.items()} for walk in walks)
    drawn = [draft.probs for draft in walks[0].drafts.values() if draft.probs is not None]
    surprise = sum(-float(np.log(np.maximum(rows.max(axis=1), 1e-9)).sum()) for rows in drawn)
    what = "positions that are drafted again in another cycle get the same noise"
    expect(surprise < 20 or first != second, what, got=f"the same {len(first)} drafts in both cycles")
    table = np.array([[0.6, 0.3, 0.1], [0.15, 0.25, 0.6], [0.5, 0.45, 0.05]])
    head = np.array([[0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.25, 0.35, 0.4]])
    model = TableModel(table, mtp_table=head if subject.needs.mtp else None, layers=layers_for(subject))
    prompt, tally = [0, 1, 0, 1, 2, 0, 1], dict.fromkeys(itertools.product(range(3), repeat=3), 0)
    verifier, shared = RejectionVerifier(RejectionConfig()), subject.prepare(model)
    for number in run.repeat(700, least=50):
        sampling = Sampling(temperature=1.0, seed=(run.seed << 32) % 2**63 + number)
        options: dict[str, Any] = {"needs": subject.needs, "shared": shared, "capacity": 16}
        tokens, _ = run_engine(model, verifier, subject.make, prompt, 3, [2], sampling, **options)
        tally[tuple(tokens)] += 1
    law = [math.prod(model.distribution([*prompt, *one[:i]])[one[i]] for i in range(3)) for one in tally]
    counts = list(tally.values())
    fit = goodness_of_fit(counts, law)
    what = f"with the verifier 'rejection' the output does not follow the target's distribution: p = {fit:.0e}"
    expect(fit >= 1e-7, what, got=counts, expected=np.round(np.multiply(law, sum(counts)), 1))

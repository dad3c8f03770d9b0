"""Checks of drafters: clauses D1 to D20 and D22.

One driver takes drafters through texts by several routes and compares their drafts with those of a drafter that saw
one token at a time.
"""

from __future__ import annotations

import contextlib
import io
import weakref
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np

from specdec.contract import Context, Draft, Drafter, DrafterEnv, DraftNoise, Sampling
from specdec.hosting.engines import HostState, HostTarget, host_info
from specdec.sampling import Purpose, uniforms
from specdec.testing import strategies
from specdec.testing.checks import Faults, Run, check, checks_of, expect, expect_equal, not_applicable, own_generators
from specdec.testing.engine_run import plain_decoding, run_engine
from specdec.testing.memory import MOST_KEPT, alive
from specdec.testing.numerics import goodness_of_fit
from specdec.testing.reference_sampling import Surplus, joint_distribution, reference_distribution
from specdec.testing.scripted_session import ScriptedSession, drafts_equal, target_for, usable
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import DrafterSubject
from specdec.testing.table_model import WIDE, Memory, TableModel
from specdec.testing.walks import SETTINGS, VOCAB, Walk, note_difference, text
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier

if TYPE_CHECKING:
    from numpy.typing import NDArray

_settings = st.one_of(st.just("greedy"), st.sampled_from(list(SETTINGS)))
_memories = st.sampled_from(list(Memory))
DRAWN, SHORT = 300, 30  # most tokens of texts at temperatures above 0, and of those in a large vocabulary
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


def _drafters(subject: DrafterSubject, length: int, seed: int, setting: str, memory: Memory, wide: bool) -> Faults:
    """Take drafters through a text, the first in single steps and the others by routes."""
    wide = wide and setting == "greedy" and not subject.needs.mtp and subject.layers == 1
    vocab = WIDE if wide else VOCAB
    tokens = text(seed, min(length, SHORT if wide else DRAWN if setting != "greedy" else length), vocab)
    options: dict[str, Any] = {"subject": subject, "setting": setting, "seed": seed, "vocab": vocab, "memory": memory}
    faults, printed = Faults(), io.StringIO()
    plain = Walk(route="steps", faults=faults, **options)
    chosen = np.random.default_rng([seed, 6]).permutation(list(_ROUTES))[:4].tolist()
    for number, route in enumerate(["", *chosen]):
        with faults.of("D5"), own_generators(number):
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                if not route:
                    plain.through(tokens)
                    continue
                clause, most, what = _ROUTES[route]
                walk = Walk(route=route, faults=faults, **options)
                if SETTINGS[setting][1] is DraftNoise.COUPLED:
                    walk.cycle = 37  # noise of a position, whatever the cycle is
                note_difference(clause, walk.through(tokens[:most]), plain, what)
    faults.note("D16", not printed.getvalue(), "something was printed", got=printed.getvalue())
    return faults


def _drive(subject: DrafterSubject, run: Run, clause: str) -> None:
    drawn: dict[str, Any] = {"setting": _settings, "memory": _memories, "wide": st.sampled_from([False] * 7 + [True])}
    run.drive(subject, clause, _drafters, examples=15, length=lengths(1150), seed=seeds, **drawn)


checks_of(
    _drive,
    {
        "D1": "A draft has at most ``depth`` tokens, each a plain int inside the vocabulary.",
        "D2": "The context is never changed: neither its tokens nor its settings.",
        "D3": "One token of context is enough, with no prefill before it.",
        "D4": "Depth 0 gives the empty draft.",
        "D5": "The same calls give the same drafts, and no global random generator is read or moved.",
        "D7": "After a rewind to any length, the next draft is that of a fresh drafter.",
        "D8": "A drafter built over a restored state proposes the same drafts as the original.",
        "D9": "``probs`` is ``[K, V]`` float32; rows are finite, non-negative, sum to 1, and allow the drafted token.",
        "D11": "``needs`` names everything that a drafter uses of its target: hidden states and the MTP head.",
        "D12": "The committed state of a sequence belongs to the engine: a drafter only runs MTP drafts on it.",
        "D15": "Sequences are independent: drafts do not depend on what other sequences did before or in between.",
        "D16": "A drafter prints nothing: standard output belongs to the calling program.",
        "D19": "Arrays belong to their receiver: those of a pass stay unchanged, and a draft is never written again.",
    },
)


@check("D6")
def state_follows_the_tokens(subject: DrafterSubject, run: Run) -> None:
    """After any cycles and prompts, the next draft is that of a fresh drafter that saw the same tokens."""

    def streak(length: int, right: bool) -> None:
        """All drafts are right, or all wrong."""
        session = ScriptedSession.start(subject)
        session.feed([1, 2, 1])
        for number in range(length):
            draft = usable(session.propose(4), 4, 5)
            session.finish(draft, len(draft.tokens) * right, (draft.tokens[0] + 1 if draft.tokens else number) % 5)
        got, expected = session.propose(4), session.fresh().propose(4)
        what = "the draft differs from that of a fresh drafter that saw the same tokens"
        expect(drafts_equal(got, expected), what, got=got, expected=expected, tokens=session.tokens)

    run.explore(streak, examples=8, length=lengths(64), right=st.booleans())
    _drive(subject, run, "D6")


@check("D17")
def snapshots_are_copies(subject: DrafterSubject, run: Run) -> None:
    """``snapshot`` is a copy: a drafter built with or without it proposes the same drafts as the original."""
    session = ScriptedSession.start(subject)
    session.feed(_PROMPT)
    saved = session.keep().drafter
    _drive(subject, run, "D17")
    if saved is None:
        not_applicable("snapshot() returns None: the drafter saves nothing of its own")


@check("D18")
def reports_change_nothing(subject: DrafterSubject, run: Run) -> None:
    """``report`` returns plain JSON data without NaN, as a copy, and calling it changes nothing."""
    session = ScriptedSession.start(subject)
    reports = []
    for number in range(20):
        reports.append((session.drafter.report(), session.report()))
        if number == 0:
            session.feed(_PROMPT)
        session.cycle(3, number % 4, number % 5)
    for report, before in reports:
        session.drafter.report = lambda report=report: report  # type: ignore[method-assign,misc]
        what = "an earlier report was changed later, or asking twice gives two answers"
        session.faults.note_equal("D18", session.report(), before, what)
    if "D18" in session.faults:
        raise session.faults["D18"]
    _drive(subject, run, "D18")


# --- distributions ---------------------------------------------------------------------------------------------------

_FUNCTIONS = (
    "the most probable token",
    "the logarithm of the probability",
    "improbable tokens",
    "the token before",
    "the first drafted token",
    "half of the tokens",
    "the noise of acceptance tests",
    "the noise of chosen tokens",
    "the place of the token before",
)
"""Chosen so that usual mistakes move one of them."""


def _see(surplus: Surplus, session: ScriptedSession, draft: Draft, depth: int) -> None:
    """Add the tokens of a draft that has distributions."""
    if draft.probs is None:
        return
    history, before, sampling = list(session.tokens), 0.0, session.sampling
    ids = np.arange(draft.probs.shape[1])
    for row, token in enumerate(draft.tokens):
        probs = np.asarray(draft.probs[row], np.float64)
        probs = probs / probs.sum()
        middle = np.cumsum(probs) - probs / 2  # of the token's part of the unit interval
        noise = [0.0, 0.0]
        if row == 0:  # the numbers that later decisions draw with are costly to compute
            keys = [(sampling.seed, len(history), purpose) for purpose in (Purpose.ACCEPT, Purpose.TOKEN)]
            noise = [2 * float(uniforms(*key, ids[:1], session.cycles)[0]) - 1 for key in keys]
        values = np.stack(
            [
                ids == probs.argmax(),
                np.log(np.maximum(probs, 1e-9)) / 20,
                probs < 0.03,
                ids == history[-1],
                np.isin(ids, draft.tokens[: min(row, 1)]),
                (ids * 7 + history[-1]) % 5 < 2,
                middle * noise[0],
                middle * noise[1],
                middle * before,
            ]
        )
        place = "the first rows" if row < 2 else "rows 2 to 6" if row < 7 else "rows from 7"
        last = ["the last row"] if row == depth - 1 else []  # a drafter may end a draft early, by what it has drawn
        surplus.add(["all rows", place, *last], token, probs, values)
        before = 2 * float(middle[token]) - 1
        history.append(token)


@check("D10")
def distributions_are_honest(subject: DrafterSubject, run: Run) -> None:
    """Each row of ``probs`` is the distribution that its token was drawn from, given what was known before the draw."""
    drafted = _honest_in_one_context(subject, run)
    for setting in ("independent", "flat", "filtered", "biased", "sharp"):
        surplus, length = Surplus(_FUNCTIONS), 400 if setting == "independent" else 150
        walk = Walk(subject=subject, setting=setting, seed=run.seed % 2**32 | 1)
        walk.look = lambda session, draft, depth, surplus=surplus: _see(surplus, session, draft, depth)
        walk.through(text(run.seed % 2**32 | 1, max(60, min(int(length * run.effort.factor), 2 * length))))
        surplus.judge("drafted tokens do not follow their probs", setting=setting)
        drafted = drafted or any(draft.tokens for draft in walk.drafts.values())
    if not drafted:
        not_applicable("it drafts nothing here")


def _honest_in_one_context(subject: DrafterSubject, run: Run) -> bool:
    """Compare many draws in one context with the distribution that all of them must state; whether there were any."""
    model, shared, pooled = target_for(subject), None, Surplus(_FUNCTIONS)
    probs: dict[tuple[int, ...], Any] = {}
    counts: dict[tuple[int, ...], NDArray[np.int64]] = {}
    for number in run.repeat(200, least=60):
        if number == 60 and not any(np.max(row) < 1 for row in probs.values()):
            break  # nothing is drawn
        sampling = Sampling(temperature=1.0, seed=number * 7919 + run.seed % 2**40)
        session = ScriptedSession.start(
            subject, model=model, sampling=sampling, noise=DraftNoise.INDEPENDENT, shared=shared
        )
        shared = session.shared
        session.feed(_PROMPT)
        draft = usable(session.propose(4), 4, 5)
        _see(pooled, session, draft, 4)
        for row, token in enumerate(draft.tokens):
            before = draft.tokens[:row]
            stated = np.eye(5)[token] if draft.probs is None else draft.probs[row]
            known = probs.setdefault(before, stated)
            case = {"context": [*_PROMPT, *before], "seed": sampling.seed}
            what = "one context has two distributions: they depend on the draw"
            expect(np.allclose(stated, known, atol=1e-6), what, got=stated, expected=known, **case)
            counts.setdefault(before, np.zeros(5, np.int64))[token] += 1
    for before, counted in counts.items():
        draws = int(counted.sum())
        fit = goodness_of_fit(counted, probs[before])
        case = {"context": [*_PROMPT, *before], "draws": draws}
        what = f"drafted tokens do not follow their probs: {fit}"
        expect(draws < 50 or fit.passes(1e-6), what, got=counted, expected=probs[before] * draws, **case)
    pooled.judge("drafted tokens do not follow their probs", context=_PROMPT)
    return bool(probs)


# --- the rest of the process, and other engines -----------------------------------------------------------------------


@check("D20")
def nothing_kept(subject: DrafterSubject, run: Run) -> None:
    """A drafter keeps of a pass only what its drafts need, and when a sequence ends nothing of it is kept."""
    walk = Walk(subject=subject, setting="greedy", seed=1).through(text(1, 300))
    outputs, kept = len(walk.session.outputs), alive(walk.session.outputs)
    expect(kept <= max(outputs // 3, MOST_KEPT), "the outputs of passes are kept", got=f"{kept} of {outputs}")
    ended, model, shared = [], target_for(subject), None
    for number in range(4):
        session = ScriptedSession.start(subject, model=model, shared=shared)
        shared = session.shared
        session.feed([number, *_PROMPT])
        session.cycle(3, 1, 2)
        ended.append(weakref.ref(session.state))
        del session
    kept = alive(ended)
    expect(kept <= 1, "the states of sequences that ended are kept", got=f"{kept} of {len(ended)}")


@check("D22")
def drafts_in_hosts(subject: DrafterSubject, run: Run) -> None:
    """Without needs, a draft is a function of tokens and configuration, so that it is the same in every engine."""
    if not subject.needs.tokens_only:
        not_applicable("it needs more of its target than tokens")

    def body(seed: int, length: int, skipped: int) -> None:
        tokens = text(seed, length)
        plain = Walk(subject=subject, setting="greedy", route="steps", seed=seed).through(tokens)
        capacity, shown = 2 * len(tokens) + 9, list[int]()

        def drafter() -> Drafter:
            target = HostTarget(host_info("a host", VOCAB, capacity))
            shared = plain.session.shared
            return subject.make(DrafterEnv(target=target, state=HostState(shown, capacity), shared=shared))

        hosted = drafter()
        for position, expected in plain.drafts.items():
            if position % (skipped + 1):
                continue
            depth = plain.depths[position]
            if position % 7 == 0:  # a detour that is taken back
                shown[:] = [*tokens[: position + 1], 1, 2]
                hosted.propose(Context(shown), depth)
                shown[:] = tokens[:position]
                hosted.rewind(position - 1)
            shown[:] = tokens[:position]
            for other, how in ((hosted, "in a host"), (hosted, "asked for again"), (drafter(), "of another copy")):
                got = other.propose(Context(list(shown)), depth)
                what = f"the draft {how}, where only propose and rewind are called, is not the engine's"
                expect(drafts_equal(got, expected), what, got=got, expected=expected, tokens=tokens[:position])

    run.explore(body, examples=6, seed=seeds, length=lengths(100), skipped=st.integers(0, 3))


# --- in the engine ---------------------------------------------------------------------------------------------------


@check("D13")
def tokens_of_plain_decoding(subject: DrafterSubject, run: Run) -> None:
    """In the engine with the strict verifier, the output is that of plain decoding, for every depth and sampling."""
    settings: dict[str, Any] = {"mtp": subject.needs.mtp, "layers": subject.layers}
    models = {
        memory: TableModel.random(VOCAB, memory=memory, seed=5, tilt=0.5, peak=0.4, **settings) for memory in Memory
    }

    def body(prompt: list[int], depths: list[int], sampling: Sampling, memory: Memory) -> None:
        target, verifier = models[memory], StrictVerifier()
        options: dict[str, Any] = {"needs": subject.needs, "shared": subject.prepare(target)}
        got, stats = run_engine(target, verifier, subject.make, prompt, 12, depths, sampling, **options)
        expect(not stats.inactive_reason, "the engine switched the drafter off", got=stats.inactive_reason)
        expect(not stats.faults, "the engine had to cut drafts", got=stats.faults)
        expected = plain_decoding(target, verifier, prompt, 12, sampling)
        expect_equal(got, expected, "the output is not that of plain decoding")

    generations: dict[str, Any] = strategies.generations(VOCAB)
    run.explore(body, examples=20, memory=_memories, **generations)


@check("D14")
def distribution_of_the_target(subject: DrafterSubject, run: Run) -> None:
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
    model = TableModel(table, mtp_table=head if subject.needs.mtp else None, layers=subject.layers)
    prompt, plain = [0, 1, 0, 1, 2, 0, 1], Sampling(temperature=1.0)
    expected = joint_distribution(
        lambda later: reference_distribution(model.logits([*prompt, *later]).tolist(), later, plain), 3, 3
    )
    for block, count in ((False, 600), (True, 150)):
        verifier = RejectionVerifier(RejectionConfig(block=block))
        options: dict[str, Any] = {"needs": subject.needs, "shared": subject.prepare(model), "capacity": 16}
        tally = np.zeros((3, 3, 3), np.int64)
        for number in run.repeat(count, least=50):
            sampling = Sampling(temperature=1.0, seed=(run.seed << 32) % 2**63 + number)
            tokens, _ = run_engine(model, verifier, subject.make, prompt, 3, [2], sampling, **options)
            tally[tuple(tokens)] += 1
        draws = int(tally.sum())
        fit = goodness_of_fit(tally, expected)
        what = f"with the verifier 'rejection' the output does not follow the target's distribution: {fit}"
        case = {"block": block, "draws": draws}
        expect(fit.passes(1e-7), what, got=tally.ravel(), expected=np.round(expected * draws, 1), **case)

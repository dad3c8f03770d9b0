"""Checks of drafters: clauses D1 to D20 and D22."""

from __future__ import annotations

import contextlib
import io
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np

from specdec.contract import Context, Draft, Drafter, DrafterEnv, DraftNoise, Sampling
from specdec.hosting.engines import HostState, HostTarget, host_info
from specdec.sampling import Purpose, uniforms
from specdec.testing import strategies
from specdec.testing.checks import Broken, Run, check, expect, expect_equal, not_applicable, own_generators
from specdec.testing.engine_run import plain_decoding, run_engine
from specdec.testing.memory import MOST_KEPT, alive, open_things
from specdec.testing.numerics import goodness_of_fit
from specdec.testing.reference_sampling import joint_distribution, reference_distribution
from specdec.testing.scripted_session import ScriptedSession, drafts_equal, target_for, usable
from specdec.testing.strategies import lengths, seeds
from specdec.testing.subjects import DrafterSubject
from specdec.testing.table_model import WIDE, Memory, TableModel
from specdec.testing.walks import SETTINGS, Walk, expect_same, model_for, text
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

_ROUTES = ("mixed", "cycles", "prompt")
_settings = st.sampled_from(list(SETTINGS))
_memories = st.sampled_from(list(Memory))
DRAWN = 250  # tokens of texts at temperatures above 0, which take longest
_PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)  # repeats, so that an n-gram drafter finds something


def _walks(
    subject: DrafterSubject,
    run: Run,
    clause: str,
    most: int,
    *,
    examples: int = 6,
    setting: st.SearchStrategy[str] = _settings,
    routes: Sequence[str] = _ROUTES,
) -> None:
    """Walk through drawn texts, and raise what was noted under this clause."""

    def body(length: int, seed: int, setting: str, route: str, memory: Memory) -> None:
        walk = Walk(subject=subject, setting=setting, route=route, seed=seed, memory=memory)
        walk.through(text(seed, length if setting == "greedy" else min(length, DRAWN))).session.raise_fault(clause)

    run.explore(
        body,
        examples=examples,
        first=[_long(most, route) for route in routes[:1]],
        length=lengths(most),
        seed=seeds,
        setting=setting,
        route=st.sampled_from(routes),
        memory=_memories,
    )


def _long(length: int, route: str) -> dict[str, Any]:
    """A case of the greatest length."""
    return {"length": length, "seed": 1, "setting": "greedy", "route": route, "memory": Memory.ATTENTION}


def _same_by(
    subject: DrafterSubject, run: Run, what: str, most: int, *routes: str, clause: str = "", examples: int = 8
) -> None:
    """Compare walks by ``routes`` with one in cycles."""

    def body(length: int, seed: int, setting: str, route: str, memory: Memory) -> None:
        tokens = text(seed, length if setting == "greedy" else min(length, DRAWN))
        walk = Walk(subject=subject, setting=setting, route=route, seed=seed, memory=memory)
        plain = Walk(subject=subject, setting=setting, route="steps", seed=seed, memory=memory).through(tokens)
        if SETTINGS[setting][1] is DraftNoise.COUPLED:
            walk.cycle = 37  # noise of a position, whatever the cycle is
        expect_same(walk.through(tokens), plain, what)
        walk.session.raise_fault(clause)

    run.explore(
        body,
        examples=examples,
        first=[_long(most, route) for route in routes],
        length=lengths(most // 3),
        seed=seeds,
        setting=st.one_of(st.just("greedy"), _settings),
        route=st.sampled_from(routes),
        memory=_memories,
    )


@check("D1")
def short_and_inside(subject: DrafterSubject, run: Run) -> None:
    """A draft has at most ``depth`` tokens, each a plain int inside the vocabulary."""

    def one_token(length: int) -> None:
        walk = Walk(subject=subject, setting="greedy", route="prompt")
        walk.through([2, *[1] * length]).session.raise_fault("D1")

    _walks(subject, run, "D1", 450, examples=9)
    run.explore(one_token, examples=3, first=[{"length": 1500}], length=lengths(1500))
    if not subject.needs.mtp and subject.layers == 1:
        wide = Walk(subject=subject, setting="greedy", route="mixed", vocab=WIDE)
        wide.through(text(run.seed, 60, WIDE)).session.raise_fault("D1")


@check("D2")
def context_unchanged(subject: DrafterSubject, run: Run) -> None:
    """The context is never changed: neither its tokens nor its settings."""
    _walks(subject, run, "D2", 100, setting=st.one_of(st.just("biased"), _settings))


@check("D3")
def one_token(subject: DrafterSubject, run: Run) -> None:
    """One token of context is enough, with no prefill before it."""
    for memory in Memory:
        for depth in (1, 3):
            session = ScriptedSession.start(subject, memory=memory)
            session.feed([3])
            for accepted in (0, 4):
                session.cycle(depth, accepted, 1)


@check("D4")
def depth_zero(subject: DrafterSubject, run: Run) -> None:
    """Depth 0 gives the empty draft."""
    _walks(subject, run, "D4", 200, routes=("mixed",))


@check("D5")
def same_calls_same_drafts(subject: DrafterSubject, run: Run) -> None:
    """The same calls give the same drafts, and no global random generator is read or moved."""

    def body(length: int, seed: int, setting: str, route: str) -> None:
        walks = []
        for number in (1, 2):
            with own_generators(number):
                walk = Walk(subject=subject, setting=setting, route=route, seed=seed)
                walks.append(walk.through(text(seed, length)))
        expect_same(walks[1], walks[0], "the same calls gave a different draft")

    routes = st.sampled_from(("cycles", "mixed"))
    run.explore(body, examples=6, length=lengths(150), seed=seeds, setting=_settings, route=routes)


# --- state -----------------------------------------------------------------------------------------------------------


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

    what = "the draft depends on the way by which the tokens came"
    run.explore(streak, examples=10, length=lengths(64), right=st.booleans())
    _same_by(subject, run, what, 1150, "mixed", "prompt", examples=10)


@check("D7")
def rewind_forgets(subject: DrafterSubject, run: Run) -> None:
    """After a rewind to any length, the next draft is that of a fresh drafter."""
    _same_by(subject, run, "after detours that were rewound, the draft is another one", 500, "rewound", examples=12)


@check("D8")
def restored_states(subject: DrafterSubject, run: Run) -> None:
    """A drafter built over a restored state proposes the same drafts as the original."""

    def body(length: int, seed: int, setting: str, memory: Memory, depth: int) -> None:
        walk = Walk(subject=subject, setting=setting, route="mixed", seed=seed, memory=memory)
        session = walk.through(text(seed, length)).session
        restored = session.restored(session.keep())
        for _ in range(2):
            got, expected = restored.propose(depth), session.propose(depth)
            what = "the draft after a restore differs from the original drafter's"
            expect(drafts_equal(got, expected), what, got=got, expected=expected, tokens=session.tokens)
            for sequence in (restored, session):
                sequence.finish(usable(got, depth, walk.vocab), 1, 2)

    drawn: dict[str, Any] = {"setting": _settings, "memory": _memories, "depth": st.sampled_from((1, 2, 4, 8))}
    run.explore(body, examples=15, length=lengths(120), seed=seeds, **drawn)


@check("D17")
def snapshots_are_copies(subject: DrafterSubject, run: Run) -> None:
    """``snapshot`` is a copy: a drafter built with or without it proposes the same drafts as the original."""
    what = "over a saved state, also from a file, the draft is another one"
    start = ScriptedSession.start(subject)
    start.feed(_PROMPT)
    kept = start.keep().drafter
    saves = kept is not None
    if kept is not None:
        import torch

        before = {name: torch.as_tensor(array).clone() for name, array in kept.arrays.items()}
        start.rewind(len(_PROMPT) // 2)
        start.feed([(token + 1) % ENGINE_VOCAB for token in _PROMPT])
        changed = [name for name, array in before.items() if not torch.equal(torch.as_tensor(kept.arrays[name]), array)]
        expect(not changed, "arrays of a snapshot changed when the text went on", got=changed)
    _same_by(subject, run, what, 300, "restored", clause="D17", examples=8 if saves else 4)
    if not saves:
        not_applicable("snapshot() returns None: the drafter saves nothing of its own")
    if not subject.needs.mtp and subject.layers == 1:
        tokens = text(run.seed, 80, WIDE)
        plain, restored = (
            Walk(subject=subject, setting="greedy", route=route, vocab=WIDE).through(tokens)
            for route in ("cycles", "restored")
        )
        expect_same(restored, plain, what)


@check("D15")
def sequences_apart(subject: DrafterSubject, run: Run) -> None:
    """Sequences are independent: drafts do not depend on what other sequences did before or in between."""
    _same_by(subject, run, "another sequence changed a draft", 150, "beside", examples=6)


# --- distributions ---------------------------------------------------------------------------------------------------


@check("D9")
def distributions_are_distributions(subject: DrafterSubject, run: Run) -> None:
    """``probs`` is ``[K, V]`` float32; rows are finite, non-negative, sum to 1, and allow the drafted token."""

    def one_token(length: int) -> None:
        walk = Walk(subject=subject, setting="independent", route="steps")
        walk.through([2, *[1] * length]).session.raise_fault("D9")

    drawing = st.sampled_from([name for name, (_, noise) in SETTINGS.items() if noise is DraftNoise.INDEPENDENT])
    run.explore(one_token, examples=3, first=[{"length": 280}], length=lengths(280))
    _walks(subject, run, "D9", 250, setting=drawing, examples=12)


FAR = 6.5  # standard deviations: 8e-11, for each of some hundred sums
ENOUGH = 12.0  # the variance from which a sum of bounded terms is taken for normal


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


class Draws:
    """Sums of differences between what was drawn and what was to be expected.

    Each term is ``f(token) - E f`` under the distribution that the draft states, so it has mean 0 given all that came
    before, whatever the contexts are, and the sums are normal (a martingale central limit theorem: Hall and Heyde
    1980). The functions are chosen so that usual mistakes move one of them.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Float64] = {}  # by part of the draft: [F, 3] differences, variances, largest terms

    def see(self, session: ScriptedSession, draft: Draft, depth: int) -> None:
        """Add the tokens of a draft that has distributions."""
        if draft.probs is None:
            return
        history, before, sampling = list(session.tokens), 0.0, session.sampling
        ids = np.arange(draft.probs.shape[1])
        for row, token in enumerate(draft.tokens):
            probs: Float64 = np.asarray(draft.probs[row], np.float64)
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
            means = values @ probs
            away = values - means[:, None]
            terms = np.stack([away[:, token], away**2 @ probs, np.abs(away).max(axis=1)], axis=1)
            place = "the first rows" if row < 2 else "rows 2 to 6" if row < 7 else "rows from 7"
            for part in ("all rows", place, *(["the last row"] if row == depth - 1 else [])):
                sums = self._sums.setdefault(part, np.zeros_like(terms))
                sums[:, :2] += terms[:, :2]
                np.maximum(sums[:, 2], terms[:, 2], out=sums[:, 2])
            before = 2 * float(middle[token]) - 1
            history.append(token)

    def judge(self, **case: object) -> None:
        """Raises: Broken if a sum is too far from 0."""
        for part, sums in self._sums.items():
            for name, (total, variance, largest) in zip(_FUNCTIONS, sums.tolist(), strict=True):
                away = total / math.sqrt(max(variance, 1e-12))
                if variance > ENOUGH * largest**2 and abs(away) > FAR:
                    what = f"drafted tokens do not follow their probs, as to {name}"
                    raise Broken(what, got=f"{away:.1f} standard deviations", expected=FAR, rows=part, **case)


@check("D10")
def distributions_are_honest(subject: DrafterSubject, run: Run) -> None:
    """Each row of ``probs`` is the distribution that its token was drawn from, given what was known before the draw."""
    drafted = _honest_in_one_context(subject, run)
    for setting in ("independent", "flat", "filtered", "biased", "sharp"):
        draws, length = Draws(), 600 if setting == "independent" else 200
        walk = Walk(subject=subject, setting=setting, seed=run.seed % 2**32, look=draws.see)
        walk.through(text(run.seed, max(60, min(int(length * run.effort.factor), 2 * length))))
        draws.judge(setting=setting)
        drafted = drafted or any(draft.probs is not None for draft in walk.drafts.values())
    if not drafted:
        not_applicable("it drafts nothing here")


def _honest_in_one_context(subject: DrafterSubject, run: Run) -> bool:
    """Compare many draws in one context with the distribution that all of them must state; whether there were any."""
    model, shared, pooled = target_for(subject), None, Draws()
    probs: dict[tuple[int, ...], Any] = {}
    counts: dict[tuple[int, ...], NDArray[np.int64]] = {}
    for number in run.repeat(300, least=60):
        if number == 60 and not any(np.max(row) < 1 for row in probs.values()):
            break  # nothing is drawn
        sampling = Sampling(temperature=1.0, seed=number * 7919 + run.seed % 2**40)
        session = ScriptedSession.start(
            subject, model=model, sampling=sampling, noise=DraftNoise.INDEPENDENT, shared=shared
        )
        shared = session.shared
        session.feed(_PROMPT)
        draft = usable(session.propose(4), 4, 5)
        pooled.see(session, draft, 4)
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
    pooled.judge(context=_PROMPT)
    return bool(probs)


# --- the rest of the target and the process --------------------------------------------------------------------------


@check("D11")
def needs_declared(subject: DrafterSubject, run: Run) -> None:
    """``needs`` names everything that a drafter uses of its target: hidden states and the MTP head."""

    def body(length: int, seed: int, setting: str, route: str) -> None:
        walk = Walk(subject=subject, setting=setting, route=route, seed=seed, sealed=True)
        try:
            walk.through(text(seed, length))
        except Exception as error:
            walk.sealed, tokens = False, text(seed, length)
            walk.model = TableModel.random(walk.vocab, tilt=0.7, mtp=True, layers=subject.layers, max_positions=8192)
            with contextlib.suppress(Exception):  # what fails either way is another clause
                walk.through(tokens)
                raise_from = Broken.by(error, {}, "it fails only if the target gives nothing beyond needs")
                raise_from.__cause__ = error
                failures.append(raise_from)
            if failures:
                raise failures[-1] from error

    failures: list[Broken] = []
    routes = st.sampled_from(("mixed", "cycles", "rewound"))
    run.explore(body, examples=6, length=lengths(250), seed=seeds, setting=_settings, route=routes)


@check("D12")
def state_left_alone(subject: DrafterSubject, run: Run) -> None:
    """The committed state of a sequence belongs to the engine: a drafter only runs MTP drafts on it."""
    _walks(subject, run, "D12", 150, routes=("mixed", "rewound", "restored"))


@check("D18")
def reports_change_nothing(subject: DrafterSubject, run: Run) -> None:
    """``report`` returns plain JSON data without NaN, as a copy, and calling it changes nothing."""

    def body(length: int, seed: int) -> None:
        reports: list[tuple[Any, str]] = []

        def look(session: ScriptedSession, draft: Draft, depth: int) -> None:
            if len(reports) < 9:
                reports.append((dict(session.drafter.report()), session.report()))

        empty = ScriptedSession.start(subject)
        empty.report()
        empty.raise_fault("D18")
        tokens = text(seed, length)
        walk = Walk(subject=subject, setting="greedy", seed=seed, look=look).through(tokens)
        walk.session.raise_fault("D18")
        for report, before in reports:
            walk.session.drafter.report = lambda report=report: report  # type: ignore[method-assign,misc]
            what = "an earlier report was changed later, or asking twice gives two answers"
            expect_equal(walk.session.report(), before, what)
        plain = Walk(subject=subject, setting="greedy", seed=seed).through(tokens)
        expect_same(walk, plain, "report() changed a draft")

    run.explore(body, examples=5, length=lengths(120), seed=seeds)


@check("D16", kind="advice")
def says_nothing(subject: DrafterSubject, run: Run) -> None:
    """A drafter prints nothing: standard output belongs to the calling program."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        Walk(subject=subject, setting="greedy", route="mixed").through(text(run.seed, 60))
    expect(not printed.getvalue(), "something was printed", got=printed.getvalue())


@check("D19")
def handed_over(subject: DrafterSubject, run: Run) -> None:
    """Arrays belong to their receiver: those of a pass stay unchanged, and a draft is never written again."""
    _walks(subject, run, "D19", 100, setting=st.one_of(st.just("independent"), _settings))


@check("D20")
def nothing_kept(subject: DrafterSubject, run: Run) -> None:
    """A drafter keeps of a pass only what its drafts need, and when a sequence ends nothing of it is kept."""
    walk = Walk(subject=subject, setting="greedy", seed=run.seed % 2**32)
    outputs: list[weakref.ref[Any]] = []

    def look(session: ScriptedSession, draft: Draft, depth: int) -> None:
        session.outputs = session.outputs or []
        outputs.extend(weakref.ref(output) for output in session.outputs)
        session.outputs.clear()

    walk.look = look
    walk.through(text(run.seed, 300))
    kept = alive(outputs)
    expect(kept <= max(len(outputs) // 3, MOST_KEPT), "the outputs of passes are kept", got=f"{kept} of {len(outputs)}")
    ended, model, shared, things = [], target_for(subject), None, open_things()
    for number in range(4):
        session = ScriptedSession.start(subject, model=model, shared=shared)
        shared = session.shared
        session.feed([number, *_PROMPT])
        session.cycle(3, 1, 2)
        ended.append(weakref.ref(session.state))
        del session
    kept = alive(ended)
    expect(kept <= 1, "the states of sequences that ended are kept", got=f"{kept} of {len(ended)}")
    grown = open_things() - things
    expect(grown < len(ended), "threads or open files of sequences that ended are kept", got=f"{grown} more")


@check("D22")
def drafts_in_hosts(subject: DrafterSubject, run: Run) -> None:
    """Without needs, a draft is a function of tokens and configuration, so that it is the same in every engine."""
    if not subject.needs.tokens_only:
        not_applicable("it needs more of its target than tokens")

    def body(seed: int, length: int, depth: int, skipped: int) -> None:
        tokens, model = text(seed, length), model_for(subject)
        session = ScriptedSession.start(subject, model=model)
        held: list[int] = []

        def drafter() -> Drafter:
            target = HostTarget(host_info("a host", model.info.vocab_size, 2 * len(tokens) + 9))
            state = HostState(held, 2 * len(tokens) + 9)
            return subject.make(DrafterEnv(target=target, state=state, shared=session.shared))

        hosted = drafter()
        session.feed(tokens[:1])
        for position, token in enumerate(tokens[1:], start=1):
            expected = session.propose(depth)
            session.finish(Draft(), 0, token)
            if position % (skipped + 1):
                continue
            if position % 7 == 0:  # a detour that is taken back
                held[:] = [*tokens[:position], token, 1, 2]
                hosted.propose(Context(held), depth)
                held[:] = tokens[:position]
                hosted.rewind(position - 1)
            held[:] = tokens[:position]
            for other, how in ((hosted, "in a host"), (hosted, "asked for again"), (drafter(), "of another copy")):
                got = other.propose(Context(list(held)), depth)
                what = f"the draft {how}, where only propose and rewind are called, is not the engine's"
                expect(drafts_equal(got, expected), what, got=got, expected=expected, tokens=tokens[:position])

    depths = st.sampled_from((1, 2, 4))
    run.explore(body, examples=6, seed=seeds, length=lengths(100), depth=depths, skipped=st.integers(0, 3))


# --- in the engine ---------------------------------------------------------------------------------------------------

ENGINE_VOCAB = 6


@check("D13")
def tokens_of_plain_decoding(subject: DrafterSubject, run: Run) -> None:
    """In the engine with the strict verifier, the output is that of plain decoding, for every depth and sampling."""
    settings: dict[str, Any] = {"mtp": subject.needs.mtp, "layers": subject.layers}
    models = {
        memory: TableModel.random(ENGINE_VOCAB, memory=memory, seed=5, tilt=0.5, peak=0.4, **settings)
        for memory in Memory
    }

    def body(prompt: list[int], depths: list[int], sampling: Sampling, memory: Memory) -> None:
        target, verifier = models[memory], StrictVerifier()
        options: dict[str, Any] = {"needs": subject.needs, "shared": subject.prepare(target)}
        got, stats = run_engine(target, verifier, subject.make, prompt, 12, depths, sampling, **options)
        expect(not stats.inactive_reason, "the engine switched the drafter off", got=stats.inactive_reason)
        expect(not stats.faults, "the engine had to cut drafts", got=stats.faults)
        expected = plain_decoding(target, verifier, prompt, 12, sampling)
        expect_equal(got, expected, "the output is not that of plain decoding")

    generations: dict[str, Any] = strategies.generations(ENGINE_VOCAB)
    run.explore(body, examples=20, memory=_memories, **generations)


@check("D14")
def distribution_of_the_target(subject: DrafterSubject, run: Run) -> None:
    """In the engine with a ratio test, the output follows the target's joint distribution: no noise is reused."""
    table = np.array([[0.6, 0.3, 0.1], [0.15, 0.25, 0.6], [0.5, 0.45, 0.05]])
    head = np.array([[0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.25, 0.35, 0.4]])
    model = TableModel(table, mtp_table=head if subject.needs.mtp else None, layers=subject.layers)
    prompt, plain = [0, 1, 0, 1, 2, 0, 1], Sampling(temperature=1.0)
    expected = joint_distribution(
        lambda later: reference_distribution(model.logits([*prompt, *later]).tolist(), later, plain), 3, 3
    )
    for block, count in ((False, 700), (True, 200)):
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

"""Checks of drafters: clauses D1 to D22."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np

from specdec.contract import Context, Draft, Drafter, DrafterEnv, DrafterSnapshot, DraftNoise, Sampling
from specdec.hosting.engines import HostState, HostTarget, host_info
from specdec.sampling import CoupledDraft
from specdec.testing import strategies
from specdec.testing.checks import Broken, Run, check, expect, expect_equal, not_applicable
from specdec.testing.draws import Draws
from specdec.testing.engine_run import plain_decoding, run_engine
from specdec.testing.memory import open_things
from specdec.testing.numerics import goodness_of_fit
from specdec.testing.reference_sampling import joint_distribution, reference_distribution
from specdec.testing.scripted_session import ScriptedSession, drafts_equal, target_for, usable
from specdec.testing.strategies import Call, calls
from specdec.testing.strict_pass import StrictForwardPass
from specdec.testing.subjects import DrafterSubject
from specdec.testing.surroundings import generator_states, other_hashes, seeded_generators, strange_clock
from specdec.testing.table_model import WIDE, Memory, TableModel
from specdec.testing.walks import SETTINGS, Route, Walk, expect_same, model_for, text
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier

VOCAB = 5
PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)  # repeats, so that an n-gram drafter finds something
STREAK = 64  # drafts in a row that are all right, or all wrong
DEPTHS = st.integers(1, 4)
_SETTINGS: dict[str, tuple[Sampling, DraftNoise]] = {
    "greedy": (Sampling(), DraftNoise.COUPLED),
    "coupled": (Sampling(temperature=1.0, seed=11), DraftNoise.COUPLED),
    "independent": (Sampling(temperature=1.0, seed=12), DraftNoise.INDEPENDENT),
    "filtered": (Sampling(temperature=0.8, top_k=3, presence_penalty=0.5, seed=13), DraftNoise.INDEPENDENT),
}
_settings = st.sampled_from(sorted(_SETTINGS))
_memories = st.sampled_from(list(Memory))
_prompts = st.one_of(strategies.tokens(VOCAB, min_size=1), st.just(list(PROMPT)))
_token = st.integers(0, VOCAB - 1)
_cycle = (st.integers(0, 4), st.integers(0, 4), _token, st.integers(0, 4))
_idle = (st.integers(1, 10),)


def _start(subject: DrafterSubject, setting: str, memory: Memory = Memory.ATTENTION, **options: Any) -> ScriptedSession:
    sampling, noise = _SETTINGS[setting]
    return ScriptedSession.start(subject, memory=memory, sampling=sampling, noise=noise, **options)


@check("D1", share=2)
def short_and_inside(subject: DrafterSubject, run: Run) -> None:
    """A draft has at most ``depth`` tokens, each a plain int inside the vocabulary."""

    def body(prompt: list[int], depth: int, setting: str) -> None:
        session = _start(subject, setting)
        session.feed(prompt)
        for _ in range(2):
            draft = session.propose(depth)
            _expect_short(session, draft, depth)
            session.finish(usable(draft, depth, VOCAB), 1, 1)

    def walks(own: Run) -> None:
        for setting, tokens, walk in _walks(subject, own, {"greedy": 500, "independent": 200, "coupled": 60}):
            own.halve(walk(look=_expect_short).through, tokens, setting=setting)

    plain = partial(Walk, subject=subject, setting="greedy", seed=run.seed, look=_expect_short)

    def one_token(own: Run) -> None:
        own.halve(plain(route=Route.PROMPT, run=own).through, [2, *[1] * 1500], text="one token 1500 times")

    def wide(own: Run) -> None:
        if not subject.needs.mtp and subject.layers == 1:
            own.halve(plain(route=Route.MIXED, run=own, vocab=WIDE).through, text(run.seed, 60, WIDE), vocabulary=WIDE)

    def drawn(own: Run) -> None:
        own.explore(body, prompt=_prompts, depth=DEPTHS, setting=_settings)

    run.parts(drawn, walks, one_token, wide)  # the first one shows the smallest case


def _expect_short(session: ScriptedSession, draft: Draft, depth: int) -> None:
    vocab = session.model.info.vocab_size
    expect(isinstance(draft, Draft), "propose does not return a Draft", got=draft)
    expect(isinstance(draft.tokens, tuple), "the draft tokens are not a tuple", got=draft.tokens)
    expect(len(draft.tokens) <= depth, "the draft is too long", got=draft.tokens, expected=f"at most {depth}")
    for token in draft.tokens:
        kind = f"{token!r} of type {type(token).__name__}"
        expect(type(token) is int, "a token is not a plain int", got=kind)
        expect(0 <= token < vocab, "a token is outside the vocabulary", got=token, expected=f"0 to {vocab - 1}")


def _walks(
    subject: DrafterSubject, run: Run, lengths: Mapping[str, int]
) -> Iterator[tuple[str, list[int], Callable[..., Walk]]]:
    """For each setting a text of that length, and what makes a walk through it; more of them at full effort."""
    for number in run.repeat(1):
        seed = (run.seed * 1000 + number) % 2**63
        for place, ((setting, length), own) in enumerate(run.shares(list(lengths.items()))):
            if run.spent and number:
                return
            memory = list(Memory)[(number + place) % len(Memory)]
            made = partial(
                Walk, subject=subject, setting=setting, route=Route.CYCLES, seed=seed, run=own, memory=memory
            )
            yield setting, text(seed + place, max(8, int(length * min(run.effort.factor, 2.0)))), made


def _expect_routes(
    subject: DrafterSubject, run: Run, lengths: Mapping[str, int], what: str, *routes: Route, **options: Any
) -> None:
    """Compare walks by ``routes`` with one in cycles."""
    for setting, tokens, walk in _walks(subject, run, lengths):
        away = 0 if SETTINGS[setting][1] is DraftNoise.INDEPENDENT else 1  # of the cycle's number

        def body(some: Sequence[int], walk: Callable[..., Walk] = walk, away: int = away) -> None:
            plain = walk().through(some)
            for route in routes:
                expect_same(walk(route=route, cycle=37 * away, **options).through(some), plain, what)

        run.halve(body, tokens, setting=setting)


@check("D2", share=0.3)
def context_unchanged(subject: DrafterSubject, run: Run) -> None:
    """The context is never changed: neither its tokens nor its settings."""
    session = _start(subject, "greedy")
    session.contexts = []
    session.feed(PROMPT, chunk=3)
    for accepted in (0, 1, 4):
        session.cycle(3, accepted, 2)
    session.drafter.snapshot(session.context())
    for context, tokens, settings in session.contexts:
        expect_equal(list(context), tokens, "the tokens were changed")
        for name, value in settings.items():
            expect_equal(getattr(context, name), value, f"{name} was changed")


@check("D3", share=0.3)
def one_token(subject: DrafterSubject, run: Run) -> None:
    """One token of context is enough, with no prefill before it."""
    for memory in Memory:
        for depth in (1, 3):
            session = _start(subject, "greedy", memory)
            session.feed([3])
            for accepted in (0, 4):
                session.cycle(depth, accepted, 1)


@check("D4")
def depth_zero(subject: DrafterSubject, run: Run) -> None:
    """Depth 0 gives the empty draft."""

    def body(prompt: list[int], setting: str) -> None:
        session = _start(subject, setting)
        session.feed(prompt)
        expect_equal(tuple(session.propose(0).tokens), (), "the draft has tokens at depth 0")

    run.explore(body, examples=10, prompt=_prompts, setting=_settings)


@check("D5")
def same_calls_same_drafts(subject: DrafterSubject, run: Run) -> None:
    """The same calls give the same drafts, whatever clocks, generators and hashes of text say; no generator moves."""

    def body(prompt: list[int], setting: str, depths: list[int]) -> None:
        drafts: list[list[Draft]] = []
        for seed in (1, 2, 3):
            with seeded_generators(seed), other_hashes(seed):
                session = _start(subject, setting)
                before = generator_states()
                session.feed(prompt)
                drafts.append([session.cycle(depth, 1, depth) for depth in depths])
                expect(generator_states() == before, "a global generator was advanced")
        for other in drafts[1:]:
            for got, expected in zip(other, drafts[0], strict=True):
                _expect_draft(got, expected, "the same calls gave a different draft")

    def under_clocks(some: Sequence[int], walk: Callable[..., Walk]) -> None:
        walked = []
        for number, seconds in enumerate((1e-9, 10.0, 0.0001)):
            with seeded_generators(number), other_hashes(number), strange_clock(seconds):
                before = generator_states()
                walked.append(walk().through(some))
                expect(generator_states() == before, "a global generator was advanced")
        for other in walked[1:]:
            expect_same(other, walked[0], "under another clock, generator and hash it drafts something else")

    def walks(own: Run) -> None:
        for setting, tokens, walk in _walks(subject, own, {"greedy": 300, "independent": 150, "coupled": 100}):
            own.halve(partial(under_clocks, walk=walk), tokens, setting=setting)

    def drawn(own: Run) -> None:
        depths = st.lists(DEPTHS, min_size=1, max_size=3)
        own.explore(body, examples=15, prompt=_prompts, setting=_settings, depths=depths)

    run.parts(drawn, walks)


def _expect_draft(got: Draft, expected: Draft, what: str, **case: object) -> None:
    expect(drafts_equal(got, expected), what, got=got, expected=expected, **case)


# --- state -----------------------------------------------------------------------------------------------------------


def _play(session: ScriptedSession, steps: list[Call], prompt: list[int]) -> None:
    session.feed(prompt, chunk=3)
    for step in steps:
        if step.name == "feed":
            session.feed(list(step.numbers), chunk=2)
            session.generated_from = len(session.tokens)
        elif step.name.startswith("rewind"):
            back, *new = step.numbers
            session.rewind(max(0, len(session.tokens) - back))
            session.feed(new)
        else:
            session.feed([] if session.tokens else [0])
            for _ in range(step.numbers[0] if step.name == "idle" else 1):
                session.cycle(*(step.numbers if step.name == "cycle" else (0, 0, 1)))
    session.feed([] if session.tokens else [0])


def _expect_fresh(session: ScriptedSession, depth: int) -> None:
    fresh = session.fresh()
    _expect_draft(
        session.propose(depth),
        fresh.propose(depth),
        "the draft differs from that of a fresh drafter that saw the same tokens",
        tokens=session.tokens,
    )


@check("D6", share=4)
def state_follows_the_tokens(subject: DrafterSubject, run: Run) -> None:
    """After any cycles and prompts, the next draft is that of a fresh drafter that saw the same tokens."""

    def body(prompt: list[int], steps: list[Call], depth: int, setting: str, memory: Memory) -> None:
        session = _start(subject, setting, memory)
        _play(session, steps, prompt)
        _expect_fresh(session, depth)

    def streak(cycles: Sequence[int], right: bool) -> None:
        session = _start(subject, "greedy")
        session.feed([1, 2, 1])
        for number in cycles:
            draft = usable(session.propose(4), 4, VOCAB)
            wrong = (draft.tokens[0] + 1 + number % 3) % VOCAB if draft.tokens else number % VOCAB
            session.finish(draft, len(draft.tokens) * right, wrong)
            if number % 8 == 7 or number + 1 == len(cycles):
                _expect_fresh(session, 4)

    for right in (False, True):
        run.halve(partial(streak, right=right), range(run.count(STREAK)), right=right)
    steps = calls(cycle=_cycle, idle=_idle, feed=(_token, _token))
    what = "the draft depends on the way by which the tokens came"
    lengths = {"greedy": 1100, "independent": 300, "biased": 60, "coupled": 60}
    drawn: dict[str, Any] = {"prompt": _prompts, "depth": DEPTHS, "setting": _settings, "memory": _memories}
    run.parts(
        lambda own: own.explore(body, examples=40, steps=steps, **drawn),
        lambda own: _expect_routes(subject, own, lengths, what, Route.PROMPT, Route.MIXED),
    )


@check("D7", share=3)
def rewind_forgets(subject: DrafterSubject, run: Run) -> None:
    """After a rewind to any length, the next draft is that of a fresh drafter."""

    def body(prompt: list[int], steps: list[Call], back: int, depth: int, setting: str, memory: Memory) -> None:
        session = _start(subject, setting, memory)
        _play(session, [*steps, Call("rewind", (back,))], prompt)
        _expect_fresh(session, depth)

    steps = calls(cycle=_cycle, idle=_idle, rewind=(st.integers(0, 12),), rewind_and_feed=(st.integers(0, 12), _token))
    back = st.integers(0, 6)
    what = "after detours that were rewound, the draft is another one"
    lengths = {"greedy": 600, "independent": 300, "coupled": 60}
    drawn: dict[str, Any] = {"prompt": _prompts, "depth": DEPTHS, "setting": _settings, "memory": _memories}
    run.parts(
        lambda own: _expect_routes(subject, own, lengths, what, Route.REWOUND),
        lambda own: own.explore(body, examples=60, steps=steps, back=back, **drawn),
    )


@check("D8")
def restored_states(subject: DrafterSubject, run: Run) -> None:
    """A drafter built over a restored state proposes the same drafts as the original."""

    def body(prompt: list[int], steps: list[Call], depth: int, setting: str, memory: Memory) -> None:
        session = _start(subject, setting, memory)
        _play(session, steps, prompt)
        restored = session.restored(session.keep())
        for number in range(2):
            got, expected = restored.propose(depth), session.propose(depth)
            what = f"draft {number} after a restore differs from the original drafter's"
            _expect_draft(got, expected, what, tokens=session.tokens)
            kept = usable(got, depth, VOCAB)
            restored.finish(kept, 1, 2)
            session.finish(kept, 1, 2)

    steps = calls(cycle=_cycle, idle=_idle)
    run.explore(body, examples=30, prompt=_prompts, steps=steps, depth=DEPTHS, setting=_settings, memory=_memories)


@check("D17", share=3)
def snapshots_are_copies(subject: DrafterSubject, run: Run) -> None:
    """``snapshot`` is a copy: a drafter built with or without it proposes the same drafts as the original."""
    given: list[DrafterSnapshot] = []

    def body(prompt: list[int], steps: list[Call], later: list[Call], depth: int, setting: str, memory: Memory) -> None:
        session = _start(subject, setting, memory)
        _play(session, steps, prompt)
        kept = session.keep()
        if kept.drafter is None:
            return
        given.append(kept.drafter)
        _expect_well_formed(kept.drafter)
        wanted = []
        for _ in range(2):
            wanted.append(usable(session.propose(depth), depth, VOCAB))
            session.finish(wanted[-1], 1, 2)
        _play(session, later, [])  # the original continues, then rewinds
        for saved, how in ((kept.drafter, "with"), (None, "without")):
            restored = session.restored(kept, saved)
            for number, expected in enumerate(wanted):
                got = usable(restored.propose(depth), depth, VOCAB)
                what = f"draft {number} of a drafter built {how} the snapshot differs from the original's"
                _expect_draft(got, expected, what, tokens=kept.tokens)
                restored.finish(got, 1, 2)

    def drawn(own: Run) -> None:
        own.explore(
            body,
            examples=30,
            prompt=_prompts,
            steps=calls(cycle=_cycle, idle=_idle),
            later=calls(max_size=3, cycle=_cycle, rewind_and_feed=(st.integers(0, 8), _token)),
            depth=DEPTHS,
            setting=_settings,
            memory=_memories,
        )

    what = "over a saved state, also from a file, the draft is another one"

    def routes(own: Run) -> None:
        lengths = {"greedy": 400, "independent": 150, "coupled": 60}
        _expect_routes(subject, own, lengths, what, Route.RESTORED, ask=True, hostile=True)

    def wide(own: Run) -> None:
        made = partial(Walk, subject=subject, setting="greedy", seed=run.seed, vocab=WIDE)

        def ids(tokens: Sequence[int]) -> None:
            plain, other = (
                made(route=route, run=part).through(tokens)
                for route, part in own.shares((Route.CYCLES, Route.RESTORED))
            )
            expect_same(other, plain, what)

        if not subject.needs.mtp and subject.layers == 1:
            own.halve(ids, text(run.seed, 80, WIDE), vocabulary=WIDE)

    run.parts(drawn, routes, wide)
    if not given:
        not_applicable("snapshot() returns None: the drafter saves nothing of its own")


def _expect_well_formed(snapshot: Any) -> None:
    """Arrays by name, and metadata that a file's header can hold."""
    expect(isinstance(snapshot, DrafterSnapshot), "snapshot returns neither a DrafterSnapshot nor None", got=snapshot)
    for name in [*snapshot.arrays, *snapshot.meta]:
        expect(type(name) is str, "a name in the snapshot is not a str", got=name)
    for name, value in snapshot.meta.items():
        expect(type(value) in (int, str), "metadata is neither a plain int nor a str", got=f"{name} = {value!r}")


@check("D15")
def sequences_apart(subject: DrafterSubject, run: Run) -> None:
    """Sequences are independent: drafts do not depend on what other sequences did before or in between."""

    def body(prompt: list[int], other_prompt: list[int], steps: list[Call], setting: str) -> None:
        alone = _start(subject, setting)
        alone.feed(prompt)
        expected = [alone.cycle(*step.numbers) for step in steps]
        session = _start(subject, setting)
        other = _start(subject, setting, model=session.model, shared=session.shared)
        other.feed(other_prompt)
        session.feed(prompt)
        for step, wanted in zip(steps, expected, strict=True):
            other.cycle(3, 1, step.numbers[2])
            _expect_draft(session.cycle(*step.numbers), wanted, "another sequence changed a draft")

    steps = calls(max_size=4, cycle=_cycle)
    run.explore(body, examples=20, prompt=_prompts, other_prompt=_prompts, steps=steps, setting=_settings)


# --- distributions ---------------------------------------------------------------------------------------------------


@check("D9", share=3)
def distributions_are_distributions(subject: DrafterSubject, run: Run) -> None:
    """``probs`` is ``[K, V]`` float32; rows are finite, non-negative, sum to 1, and allow the drafted token."""

    def body(prompt: list[int], depth: int, setting: str, seed: int) -> None:
        sampling, noise = _SETTINGS[setting]
        sampling = Sampling(temperature=sampling.temperature, top_k=sampling.top_k, seed=seed)
        session = ScriptedSession.start(subject, sampling=sampling, noise=noise)
        session.feed(prompt)
        _expect_distributions(session, session.propose(depth), depth)

    def one_token(own: Run) -> None:
        many = Walk(subject=subject, setting="independent", route=Route.STEPS, seed=run.seed, run=own)
        many.look = _expect_distributions
        own.halve(many.through, [2, *[1] * 300], text="one token 300 times")

    def walks(own: Run) -> None:
        lengths = {"independent": 500, "sharp": 200, "flat": 100, "biased": 100}
        for setting, tokens, walk in _walks(subject, own, lengths):
            own.halve(walk(look=_expect_distributions).through, tokens, setting=setting)

    def drawn(own: Run) -> None:
        seeds = st.integers(0, 2**32)
        own.explore(body, examples=40, prompt=_prompts, depth=DEPTHS, setting=_settings, seed=seeds)

    run.parts(one_token, walks, drawn)


SUM = 2e-5  # float32 rows of these vocabularies sum to 1 more closely


def _expect_distributions(session: ScriptedSession, draft: Draft, depth: int) -> None:
    if draft.probs is None:
        return
    probs, vocab = np.asarray(draft.probs), session.model.info.vocab_size
    expect_equal(probs.shape, (len(draft.tokens), vocab), "probs has the wrong shape")
    expect_equal(probs.dtype, np.dtype(np.float32), "probs is not float32")
    expect(np.isfinite(probs).all() and (probs >= 0).all(), "a probability is negative or not finite", got=probs)
    sums = probs.sum(axis=1, dtype=np.float64)
    expect(np.allclose(sums, 1.0, atol=SUM), "a row of probs does not sum to 1", got=sums)
    for row, token in enumerate(usable(draft, depth, vocab).tokens):
        expect(probs[row, token] > 0, f"the drafted token {token} has probability 0 in its row", got=probs[row])


@check("D10", share=4)
def distributions_are_honest(subject: DrafterSubject, run: Run) -> None:
    """Each row of ``probs`` is the distribution that its token was drawn from, given what was known before the draw."""
    if not any([honest(subject, part) for honest, part in run.shares((_honest_in_one_context, _honest_in_many))]):
        not_applicable("it drafts nothing here")


def _honest_in_one_context(subject: DrafterSubject, run: Run) -> bool:
    """Compare many draws in one context with the distribution that all of them must state; whether there were any."""
    model, shared = target_for(subject), None
    probs: dict[tuple[int, ...], Any] = {}
    counts: dict[tuple[int, ...], np.ndarray[Any, np.dtype[np.int64]]] = {}
    pooled = Draws(run.seed)
    for draw in run.repeat(600, least=60):
        sampling = Sampling(temperature=1.0, seed=draw * 7919 + run.seed)
        noise = DraftNoise.INDEPENDENT
        session = ScriptedSession.start(subject, model=model, sampling=sampling, noise=noise, shared=shared)
        shared = session.shared
        session.feed(PROMPT)
        draft = usable(session.propose(4), 4, VOCAB)
        pooled.see(session, draft, 4)
        for row, token in enumerate(draft.tokens):
            before = draft.tokens[:row]
            drawn_from = np.eye(VOCAB)[token] if draft.probs is None else draft.probs[row]
            known = probs.setdefault(before, drawn_from)
            case = {"context": [*PROMPT, *before], "seed": sampling.seed}
            what = "one context has two distributions: they depend on the draw"
            expect(np.allclose(drawn_from, known, atol=1e-6), what, got=drawn_from, expected=known, **case)
            counts.setdefault(before, np.zeros(VOCAB, np.int64))[token] += 1
    for before, counted in counts.items():
        draws = int(counted.sum())
        if draws < 50:
            continue
        fit = goodness_of_fit(counted, probs[before])
        what = f"drafted tokens do not follow their probs: {fit}"
        case = {"context": [*PROMPT, *before], "draws": draws}
        expect(fit.passes(1e-6), what, got=counted, expected=probs[before] * draws, **case)
    pooled.judge("one context")
    return bool(probs)


def _honest_in_many(subject: DrafterSubject, run: Run) -> bool:
    """Pool the draws of long walks; whether there were any."""
    seen = 0
    for number in run.repeat(2):
        pooled = Draws(run.seed + number)
        for setting, own in run.shares(("independent", "flat", "filtered", "biased", "sharp")):
            walk = Walk(subject=subject, setting=setting, route=Route.CYCLES, seed=run.seed + number, run=own)
            walk.look = pooled.see
            walk.through(text(run.seed + number, 600))
            pooled.judge(setting)
        seen += pooled.seen
    return seen > 0


# --- the rest of the target and the process --------------------------------------------------------------------------


@check("D11")
def needs_declared(subject: DrafterSubject, run: Run) -> None:
    """``needs`` names everything that a drafter uses of its target: hidden states and the MTP head."""
    error = _failure_when_sealed(subject, run)
    if error is None or _STATE in str(error):
        return
    if "needs does not declare" in str(error):
        raise Broken(str(error).split("\n")[0]) from error
    try:
        _play_all(subject, Run(), sealed=False)
    except Exception:  # noqa: BLE001  (another clause reports this failure)
        return
    raise Broken.by(error, {}, "it fails only if the target gives nothing beyond needs") from error


@check("D12")
def state_left_alone(subject: DrafterSubject, run: Run) -> None:
    """The committed state of a sequence belongs to the engine: a drafter only runs MTP drafts on it."""
    error = _failure_when_sealed(subject, run)
    if error is not None and _STATE in str(error):
        raise Broken(str(error).split("\n")[0]) from error


_STATE = "which is the engine's"  # in a sealed session's error when a drafter touches the state


def _failure_when_sealed(subject: DrafterSubject, run: Run) -> Exception | None:
    try:
        _play_all(subject, run, sealed=True)
    except Exception as error:  # noqa: BLE001  (the caller decides which clause is broken)
        return error
    return None


def _play_all(subject: DrafterSubject, run: Run, *, sealed: bool) -> None:
    for setting in sorted(_SETTINGS):
        session = _start(subject, setting, sealed=sealed)
        session.feed(PROMPT, chunk=3)
        for accepted in (0, 1, 4, 2):
            session.cycle(3, accepted, 2)
        for _ in range(12):  # at depth 0 pairs pile up
            session.cycle(0, 0, 1)
        session.rewind(9)
        session.feed([2, 3])
        session.cycle(3, 2, 1)
        session.restored(session.keep()).cycle(2, 1, 1)
    for (setting, route), own in run.shares(
        list(itertools.product(("greedy", "independent"), (Route.CYCLES, Route.REWOUND)))
    ):
        Walk(subject=subject, setting=setting, route=route, seed=3, run=own, sealed=sealed).through(text(3, 250))


@check("D18")
def reports_change_nothing(subject: DrafterSubject, run: Run) -> None:
    """``report`` returns plain JSON data without NaN, as a copy, and calling it changes nothing."""

    def body(prompt: list[int], steps: list[Call], setting: str) -> None:
        asked, silent = (_start(subject, setting) for _ in range(2))
        reports = [_report(asked)]
        for session in (asked, silent):
            session.feed(prompt)
        for step in steps:
            reports.append(_report(asked))
            _expect_draft(asked.cycle(*step.numbers), silent.cycle(*step.numbers), "report() changed a draft")
        for report, former in reports:
            expect_equal(_as_json(report), former, "an earlier report was changed later")

    def reported(session: ScriptedSession, draft: Draft, depth: int) -> None:
        if len(session.tokens) % 5 == 0:
            _report(session)

    def walks(own: Run) -> None:
        for setting, tokens, walk in _walks(subject, own, {"greedy": 200}):
            own.halve(walk(look=reported).through, tokens, setting=setting)

    steps = calls(max_size=4, cycle=_cycle)
    run.parts(lambda own: own.explore(body, examples=15, prompt=_prompts, steps=steps, setting=_settings), walks)


def _report(session: ScriptedSession) -> tuple[dict[str, Any], str]:
    """The value of ``report``, as a result takes it over, and as JSON."""
    before = generator_states()
    given: object = session.drafter.report()
    if not isinstance(given, Mapping):
        raise Broken("report does not return a mapping", got=given)
    report = dict(given)
    text = _as_json(report)
    # a report may contain elapsed time, so floats may differ
    one, two = (
        json.loads(one, parse_float=lambda number: None) for one in (_as_json(dict(session.drafter.report())), text)
    )
    expect_equal(one, two, "calling report() twice gives two answers")
    expect(generator_states() == before, "a global generator was advanced")
    return report, text


def _expect_names(value: object) -> None:
    """JSON makes a str of every name, and a report that was saved would be another one."""
    if isinstance(value, Mapping):
        for name in value:
            expect(type(name) is str, "a name in the report is not a str", got=name)
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        _expect_names(one)


def _as_json(report: dict[str, Any]) -> str:
    _expect_names(report)
    try:
        return json.dumps(report, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Broken(f"the report is not plain JSON data: {error}", got=report) from error


@check("D16", kind="advice", share=0.3)
def says_nothing(subject: DrafterSubject, run: Run) -> None:
    """A drafter prints nothing: standard output belongs to the calling program."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        session = _start(subject, "greedy")
        session.feed(PROMPT)
        for accepted in (0, 1, 4):
            session.cycle(3, accepted, 2)
    expect(not printed.getvalue(), "something was printed", got=printed.getvalue())


# --- what is handed over and kept ---------------------------------------------------------------------------------


@check("D19", share=2)
def handed_over(subject: DrafterSubject, run: Run) -> None:
    """Arrays belong to their receiver: those of a pass stay unchanged, and a draft is never written again."""
    for setting, tokens, walk in _walks(subject, run, {"independent": 150, "biased": 60, "greedy": 60}):

        def body(some: Sequence[int], walk: Callable[..., Walk] = walk) -> None:
            calm = walk().through(some)
            for draft, copy in calm.handed:
                expect(drafts_equal(draft, copy), "an earlier draft was changed later", got=draft, expected=copy)
            hostile = walk(hostile=True).through(some)
            expect_same(hostile, calm, "writing into a draft that was handed over changed later ones")

        run.halve(body, tokens, setting=setting)


@check("D20")
def nothing_kept(subject: DrafterSubject, run: Run) -> None:
    """A drafter keeps of a pass only what its drafts need, and when a sequence ends nothing of it is kept."""
    outputs: list[Any] = []
    walk = Walk(subject=subject, setting="greedy", route=Route.CYCLES, seed=run.seed, run=run, outputs=outputs)
    alive: list[int] = []

    def count(session: ScriptedSession, draft: Draft, depth: int) -> None:
        if len(outputs) % 100 == 99:
            gc.collect()
            alive.append(sum(output() is not None for output in outputs))

    walk.look = count
    walk.through(text(run.seed, 900))
    what = "the outputs of passes are kept, more with every cycle"
    expect(not alive or alive[-1] < len(outputs) // 3, what, got=f"{alive} of each 100 more", passes=len(outputs))
    ended = []
    model, shared, things = target_for(subject), None, open_things()
    for number in range(4):
        session = _start(subject, "greedy", model=model, shared=shared)
        shared = session.shared
        session.feed([number, *PROMPT])
        session.cycle(3, 1, 2)
        ended += [weakref.ref(session.state)]
        del session
    gc.collect()
    kept = sum(state() is not None for state in ended)
    expect(kept <= 1, "the states of sequences that ended are kept", got=f"{kept} of {len(ended)}")
    what = "threads or open files of sequences that ended are kept"
    expect(open_things() - things < len(ended), what, got=f"{open_things() - things} more", sequences=len(ended))


@check("D21")
def device_drafts(subject: DrafterSubject, run: Run) -> None:
    """``device_draft`` describes what ``propose`` would draft: nothing, or what the declared MTP head drafts."""
    given: list[Any] = []

    def body(prompt: list[int], depth: int, setting: str, memory: Memory) -> None:
        session = _start(subject, setting, memory)
        session.feed(prompt, chunk=3)
        for _ in range(3):
            device = session.drafter.device_draft(session.context())
            twin = session.fresh()
            draft = session.propose(depth)
            if device is not None:
                given.append(device)
                if not device.mtp:
                    expect_equal(tuple(draft.tokens), (), "a device is to draft nothing, and propose drafts")
                else:
                    what = "a device is to draft with the MTP head, which needs does not declare"
                    expect(subject.needs.mtp, what)
                    context = twin.context()
                    choose = CoupledDraft(context) if context.sampling.temperature > 0 else None
                    pending = twin.tokens[-1]
                    drafted = twin.model.draft_mtp(twin.state, pending, depth, head=device.head, choose=choose)
                    what = "propose drafts something else than the MTP head that a device is to draft with"
                    expect_equal(tuple(draft.tokens), tuple(drafted), what, tokens=session.tokens)
            session.finish(usable(draft, depth, VOCAB), 1, 2)

    run.explore(body, examples=15, prompt=_prompts, depth=DEPTHS, setting=_settings, memory=_memories)
    if not given:
        not_applicable("device_draft() returns None: every draft comes from propose")


@check("D22")
def drafts_in_hosts(subject: DrafterSubject, run: Run) -> None:
    """Without needs, a draft is a function of tokens and configuration, so that it is the same in every engine."""
    if not subject.needs.tokens_only:
        not_applicable("it needs more of its target than tokens")

    def body(seed: int, depth: int, skipped: int) -> None:
        tokens = text(seed, 120)
        model = model_for(subject)
        session = _start(subject, "greedy", model=model)
        held: list[int] = []

        def made() -> Drafter:
            target = HostTarget(host_info("a host", model.info.vocab_size, 2 * len(tokens)))
            state = HostState(held, 2 * len(tokens))
            return subject.make(DrafterEnv(target=target, state=state, shared=session.shared))

        hosted = made()
        session.feed(tokens[:1])
        for position, token in enumerate(tokens[1:], start=1):
            wanted = session.propose(depth)
            session.finish(Draft(), 0, token)
            if position % (skipped + 1):
                continue
            if position % 7 == 0:  # a detour that is taken back
                held[:] = [*tokens[:position], token, 1, 2]
                hosted.propose(Context(held), depth)
                held[:] = tokens[:position]
                hosted.rewind(position - 1)
            held[:] = tokens[:position]
            for drafter, how in ((hosted, "in a host"), (hosted, "asked for again"), (made(), "of another copy")):
                got = drafter.propose(Context(list(held)), depth)
                what = f"the draft {how}, where only propose and rewind are called, is not the engine's"
                _expect_draft(got, wanted, what, tokens=tokens[:position])

    run.explore(body, examples=10, seed=st.integers(0, 2**32), depth=DEPTHS, skipped=st.integers(0, 3))


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
        target, verifier = StrictForwardPass(models[memory]), StrictVerifier()
        options: dict[str, Any] = {"needs": subject.needs, "shared": subject.prepare(target)}
        got, stats = run_engine(target, verifier, subject.make, prompt, 12, depths, sampling, **options)
        expect(not stats.inactive_reason, "the engine switched the drafter off", got=stats.inactive_reason)
        expect(not stats.faults, "the engine had to cut drafts", got=stats.faults)
        expected = plain_decoding(models[memory], verifier, prompt, 12, sampling)
        expect_equal(got, expected, "the output is not that of plain decoding")

    run.explore(body, examples=40, memory=_memories, **strategies.generations(ENGINE_VOCAB))


@check("D14", share=2)
def distribution_of_the_target(subject: DrafterSubject, run: Run) -> None:
    """In the engine with a ratio test, the output follows the target's joint distribution: no noise is reused."""
    table = np.array([[0.6, 0.3, 0.1], [0.15, 0.25, 0.6], [0.5, 0.45, 0.05]])
    head = np.array([[0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.25, 0.35, 0.4]])
    model = TableModel(table, mtp_table=head if subject.needs.mtp else None, layers=subject.layers)
    prompt, plain = [0, 1, 0, 1, 2, 0, 1], Sampling(temperature=1.0)
    expected = joint_distribution(
        lambda later: reference_distribution(model.logits([*prompt, *later]).tolist(), later, plain), 3, 3
    )
    for block, own in run.shares((False, True)):
        verifier = RejectionVerifier(RejectionConfig(block=block))
        options: dict[str, Any] = {"needs": subject.needs, "shared": subject.prepare(model), "capacity": 16}
        tally = np.zeros((3, 3, 3), np.int64)
        for number in own.repeat(1000, least=50):
            sampling = Sampling(temperature=1.0, seed=(run.seed << 32) % 2**63 + number)
            made, _ = run_engine(model, verifier, subject.make, prompt, 3, [2], sampling, **options)
            tally[tuple(made)] += 1
        draws = int(tally.sum())
        fit = goodness_of_fit(tally, expected)
        what = f"with the verifier 'rejection' the output does not follow the target's distribution: {fit}"
        case = {"block": block, "draws": draws}
        expect(fit.passes(1e-7), what, got=tally.ravel(), expected=np.round(expected * draws, 1), **case)

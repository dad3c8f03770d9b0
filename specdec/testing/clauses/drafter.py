"""Checks of drafters: clauses D1 to D18."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import numpy as np

from specdec.contract import Draft, DrafterSnapshot, DraftNoise, Sampling
from specdec.testing import strategies
from specdec.testing.checks import Broken, Run, check, expect, expect_equal, not_applicable
from specdec.testing.engine_run import plain_decoding, run_engine
from specdec.testing.global_generators import generator_states, seeded_generators
from specdec.testing.numerics import goodness_of_fit
from specdec.testing.reference_sampling import joint_distribution, reference_distribution
from specdec.testing.scripted_session import ScriptedSession, drafts_equal, target_for, usable
from specdec.testing.strategies import Call, calls
from specdec.testing.strict_pass import StrictForwardPass
from specdec.testing.subjects import DrafterSubject
from specdec.testing.table_model import Memory, TableModel
from specdec.verifiers.rejection import RejectionConfig, RejectionVerifier
from specdec.verifiers.strict import StrictVerifier

VOCAB = 5
PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)  # repeats, so that an n-gram drafter finds something
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


@check("D1")
def short_and_inside(subject: DrafterSubject, run: Run) -> None:
    """A draft has at most ``depth`` tokens, each a plain int inside the vocabulary."""

    def body(prompt: list[int], depth: int, setting: str) -> None:
        session = _start(subject, setting)
        session.feed(prompt)
        for _ in range(2):
            draft = session.propose(depth)
            expect(isinstance(draft, Draft), "propose does not return a Draft", got=draft)
            expect(isinstance(draft.tokens, tuple), "the draft tokens are not a tuple", got=draft.tokens)
            expect(len(draft.tokens) <= depth, "the draft is too long", got=draft.tokens, expected=f"at most {depth}")
            for token in draft.tokens:
                kind = f"{token!r} of type {type(token).__name__}"
                expect(type(token) is int, "a token is not a plain int", got=kind)
                expect(0 <= token < VOCAB, "a token is outside the vocabulary", got=token, expected=f"0 to {VOCAB - 1}")
            session.finish(usable(draft, depth, VOCAB), 1, 1)

    run.explore(body, prompt=_prompts, depth=DEPTHS, setting=_settings)


@check("D2")
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


@check("D3")
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
    """The same calls give the same drafts, and no global generator is read or advanced."""

    def body(prompt: list[int], setting: str, depths: list[int]) -> None:
        drafts: list[list[Draft]] = []
        for seed in (1, 2, 3):
            with seeded_generators(seed):
                session = _start(subject, setting)
                before = generator_states()
                session.feed(prompt)
                drafts.append([session.cycle(depth, 1, depth) for depth in depths])
                expect(generator_states() == before, "a global generator was advanced")
        for other in drafts[1:]:
            for got, expected in zip(other, drafts[0], strict=True):
                _expect_draft(got, expected, "the same calls gave a different draft")

    run.explore(body, examples=15, prompt=_prompts, setting=_settings, depths=st.lists(DEPTHS, min_size=1, max_size=3))


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


@check("D6")
def state_follows_the_tokens(subject: DrafterSubject, run: Run) -> None:
    """After any cycles and prompts, the next draft is that of a fresh drafter that saw the same tokens."""

    def body(prompt: list[int], steps: list[Call], depth: int, setting: str, memory: Memory) -> None:
        session = _start(subject, setting, memory)
        _play(session, steps, prompt)
        _expect_fresh(session, depth)

    steps = calls(cycle=_cycle, idle=_idle, feed=(_token, _token))
    run.explore(body, examples=40, prompt=_prompts, steps=steps, depth=DEPTHS, setting=_settings, memory=_memories)


@check("D7")
def rewind_forgets(subject: DrafterSubject, run: Run) -> None:
    """After a rewind to any length, the next draft is that of a fresh drafter."""

    def body(prompt: list[int], steps: list[Call], back: int, depth: int, setting: str, memory: Memory) -> None:
        session = _start(subject, setting, memory)
        _play(session, [*steps, Call("rewind", (back,))], prompt)
        _expect_fresh(session, depth)

    steps = calls(cycle=_cycle, idle=_idle, rewind=(st.integers(0, 12),), rewind_and_feed=(st.integers(0, 12), _token))
    back = st.integers(0, 6)
    run.explore(
        body, examples=80, prompt=_prompts, steps=steps, back=back, depth=DEPTHS, setting=_settings, memory=_memories
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


@check("D17")
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

    run.explore(
        body,
        examples=30,
        prompt=_prompts,
        steps=calls(cycle=_cycle, idle=_idle),
        later=calls(max_size=3, cycle=_cycle, rewind_and_feed=(st.integers(0, 8), _token)),
        depth=DEPTHS,
        setting=_settings,
        memory=_memories,
    )
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


@check("D9")
def distributions_are_distributions(subject: DrafterSubject, run: Run) -> None:
    """``probs`` is ``[K, V]`` float32; rows are finite, non-negative, sum to 1, and allow the drafted token."""

    def body(prompt: list[int], depth: int, setting: str, seed: int) -> None:
        sampling, noise = _SETTINGS[setting]
        sampling = Sampling(temperature=sampling.temperature, top_k=sampling.top_k, seed=seed)
        session = ScriptedSession.start(subject, sampling=sampling, noise=noise)
        session.feed(prompt)
        draft = session.propose(depth)
        if draft.probs is None:
            return
        probs = np.asarray(draft.probs)
        expect_equal(probs.shape, (len(draft.tokens), VOCAB), "probs has the wrong shape")
        expect_equal(probs.dtype, np.dtype(np.float32), "probs is not float32")
        expect(np.isfinite(probs).all() and (probs >= 0).all(), "a probability is negative or not finite", got=probs)
        sums = probs.sum(axis=1, dtype=np.float64)
        expect(np.allclose(sums, 1.0, atol=1e-4), "a row of probs does not sum to 1", got=sums)
        for row, token in enumerate(usable(draft, depth, VOCAB).tokens):
            expect(probs[row, token] > 0, f"the drafted token {token} has probability 0 in its row", got=probs[row])

    run.explore(body, examples=40, prompt=_prompts, depth=DEPTHS, setting=_settings, seed=st.integers(0, 2**32))


@check("D10")
def distributions_are_honest(subject: DrafterSubject, run: Run) -> None:
    """Each row of ``probs`` is the distribution that its token was drawn from, given what was known before the draw."""
    model, shared = target_for(subject), None
    probs: dict[tuple[int, ...], Any] = {}
    counts: dict[tuple[int, ...], np.ndarray[Any, np.dtype[np.int64]]] = {}
    for number in range(run.count(400)):
        sampling = Sampling(temperature=1.0, seed=number * 7919 + run.seed)
        noise = DraftNoise.INDEPENDENT
        session = ScriptedSession.start(subject, model=model, sampling=sampling, noise=noise, shared=shared)
        shared = session.shared
        session.feed(PROMPT)
        draft = usable(session.propose(2), 2, VOCAB)
        for row, token in enumerate(draft.tokens):
            before = draft.tokens[:row]
            drawn_from = np.eye(VOCAB)[token] if draft.probs is None else draft.probs[row]
            known = probs.setdefault(before, drawn_from)
            case = {"context": [*PROMPT, *before], "seed": sampling.seed}
            what = "one context has two distributions: they depend on the draw"
            expect(np.allclose(drawn_from, known, atol=1e-6), what, got=drawn_from, expected=known, **case)
            counts.setdefault(before, np.zeros(VOCAB, np.int64))[token] += 1
    if not probs:
        not_applicable("it drafts nothing here")
    for before, counted in counts.items():
        draws = int(counted.sum())
        if draws < 50:
            continue
        fit = goodness_of_fit(counted, probs[before])
        what = f"drafted tokens do not follow their probs: {fit}"
        case = {"context": [*PROMPT, *before], "draws": draws}
        expect(fit.passes(1e-6), what, got=counted, expected=probs[before] * draws, **case)


# --- the rest of the target and the process --------------------------------------------------------------------------


@check("D11")
def needs_declared(subject: DrafterSubject, run: Run) -> None:
    """``needs`` names everything that a drafter uses of its target: hidden states and the MTP head."""
    error = _failure_when_sealed(subject)
    if error is None or _STATE in str(error):
        return
    if "needs does not declare" in str(error):
        raise Broken(str(error).split("\n")[0]) from error
    try:
        _play_all(subject, sealed=False)
    except Exception:  # noqa: BLE001  (another clause reports this failure)
        return
    raise Broken.by(error, {}, "it fails only if the target gives nothing beyond needs") from error


@check("D12")
def state_left_alone(subject: DrafterSubject, run: Run) -> None:
    """The committed state of a sequence belongs to the engine: a drafter only runs MTP drafts on it."""
    error = _failure_when_sealed(subject)
    if error is not None and _STATE in str(error):
        raise Broken(str(error).split("\n")[0]) from error


_STATE = "which is the engine's"  # in a sealed session's error when a drafter touches the state


def _failure_when_sealed(subject: DrafterSubject) -> Exception | None:
    try:
        _play_all(subject, sealed=True)
    except Exception as error:  # noqa: BLE001  (the caller decides which clause is broken)
        return error
    return None


def _play_all(subject: DrafterSubject, *, sealed: bool) -> None:
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
        for report, text in reports:
            expect_equal(_as_json(report), text, "an earlier report was changed later")

    run.explore(body, examples=15, prompt=_prompts, steps=calls(max_size=4, cycle=_cycle), setting=_settings)


def _report(session: ScriptedSession) -> tuple[dict[str, Any], str]:
    """The value of ``report``, as a result takes it over, and as JSON."""
    before = generator_states()
    given: object = session.drafter.report()
    if not isinstance(given, Mapping):
        raise Broken("report does not return a mapping", got=given)
    for name in given:
        expect(type(name) is str, "a name in the report is not a str", got=name)
    report = dict(given)
    text = _as_json(report)
    # a report may contain elapsed time, so floats may differ
    one, two = (
        json.loads(one, parse_float=lambda number: None) for one in (_as_json(dict(session.drafter.report())), text)
    )
    expect_equal(one, two, "calling report() twice gives two answers")
    expect(generator_states() == before, "a global generator was advanced")
    return report, text


def _as_json(report: dict[str, Any]) -> str:
    try:
        return json.dumps(report, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Broken(f"the report is not plain JSON data: {error}", got=report) from error


@check("D16", kind="advice")
def says_nothing(subject: DrafterSubject, run: Run) -> None:
    """A drafter prints nothing: standard output belongs to the calling program."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        session = _start(subject, "greedy")
        session.feed(PROMPT)
        for accepted in (0, 1, 4):
            session.cycle(3, accepted, 2)
    expect(not printed.getvalue(), "something was printed", got=printed.getvalue())


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


@check("D14")
def distribution_of_the_target(subject: DrafterSubject, run: Run) -> None:
    """In the engine with a ratio test, the output follows the target's joint distribution: no noise is reused."""
    table = np.array([[0.6, 0.3, 0.1], [0.15, 0.25, 0.6], [0.5, 0.45, 0.05]])
    head = np.array([[0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.25, 0.35, 0.4]])
    model = TableModel(table, mtp_table=head if subject.needs.mtp else None, layers=subject.layers)
    prompt, draws, plain = [0, 1, 0, 1, 2, 0, 1], run.count(1000), Sampling(temperature=1.0)
    expected = joint_distribution(
        lambda later: reference_distribution(model.logits([*prompt, *later]).tolist(), later, plain), 3, 3
    )
    for block in (False, True):
        verifier = RejectionVerifier(RejectionConfig(block=block))
        options: dict[str, Any] = {"needs": subject.needs, "shared": subject.prepare(model), "capacity": 16}
        tally = np.zeros((3, 3, 3), np.int64)
        for number in range(draws):
            sampling = Sampling(temperature=1.0, seed=(run.seed << 32) + number)
            made, _ = run_engine(model, verifier, subject.make, prompt, 3, [2], sampling, **options)
            tally[tuple(made)] += 1
        fit = goodness_of_fit(tally, expected)
        what = f"with the verifier 'rejection' the output does not follow the target's distribution: {fit}"
        case = {"block": block, "draws": draws}
        expect(fit.passes(1e-7), what, got=tally.ravel(), expected=np.round(expected * draws, 1), **case)

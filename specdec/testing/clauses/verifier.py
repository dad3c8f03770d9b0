"""Checks of verifiers: clauses V1 to V14 and V16."""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import Context, Draft, DraftNoise, Guarantee, Sampling, Verdict, Verifier
from specdec.errors import ShapeError, UnsupportedError
from specdec.sampling import draft_token
from specdec.testing import strategies
from specdec.testing.checks import Run, check, expect, expect_equal, expect_error, not_applicable, own_generators
from specdec.testing.engine_run import ScriptedDrafter, plain_decoding, run_engine
from specdec.testing.memory import MOST_KEPT, alive, growth
from specdec.testing.numerics import goodness_of_fit
from specdec.testing.subjects import VerifierSubject
from specdec.testing.table_model import Memory, TableLogits, TableModel
from specdec.testing.verifier_cases import (
    CHAINS,
    JOINT,
    JOINT_VOCAB,
    NEXT_TO_ONE,
    VOCAB,
    Case,
    Scenario,
    cases,
    decide,
    emitted,
    histories,
    near_ties,
    tally_chain,
    tally_joint,
    target_and_draft,
    target_joint,
    target_rows,
    with_accepted_draft,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

P_VALUE = 1e-7  # one false alarm in ten million joint distributions


def _verdict(verifier: Verifier, case: Case) -> Verdict | None:
    """As ``decide``, but None also for a malformed verdict, which V1 finds."""
    verdict = decide(verifier, case)
    if verdict is None:
        return None
    well_formed = 0 <= verdict.accepted <= len(case.draft.tokens) and 0 <= verdict.next_token < case.vocab
    return verdict if well_formed else None


@check("V1")
def well_formed(subject: VerifierSubject, run: Run) -> None:
    """A verdict accepts 0 to K draft tokens and chooses a token inside the vocabulary, both plain ints."""

    def body(case: Case) -> None:
        verdict = decide(subject.make(), case)
        if verdict is None:
            return
        expect(isinstance(verdict, Verdict), "verify does not return a Verdict", got=verdict)
        for name, most in (("accepted", len(case.draft.tokens)), ("next_token", case.vocab - 1)):
            value = getattr(verdict, name)
            expect(type(value) is int, f"{name} is not a plain int", got=type(value).__name__)
            expect(0 <= value <= most, f"{name} is out of range", got=value, expected=f"0 to {most}")

    run.explore(body, examples=60, case=cases())


@check("V2")
def one_row_too_few(subject: VerifierSubject, run: Run) -> None:
    """K draft tokens come with K + 1 rows; any other number raises ShapeError."""
    verifier = subject.make()
    sampled = decide(verifier, Case(np.zeros((1, VOCAB), np.float32), [1], Draft(), Sampling(temperature=1.0)))
    for depth, rows in ((1, 1), (3, 3), (2, 4), (0, 2), (7, 7), (7, 9), (13, 13), (0, 14), (13, 1)):
        for temperature in (0.0,) if sampled is None else (0.0, 1.0):
            settings = Sampling(temperature=temperature)
            case = Case(np.zeros((rows, VOCAB), np.float32), [1], Draft((0,) * depth), settings)
            what = f"verify of {depth} tokens, {rows} rows"
            expect_error(ShapeError, partial(decide, verifier, case), what, temperature=temperature)


@check("V3")
def identical_models(subject: VerifierSubject, run: Run) -> None:
    """The target's own drafts, drawn with the noise that the verifier asks for, are accepted in full; only a verifier
    that never accepts a token accepts less."""
    model = TableModel.random(VOCAB, seed=3)
    accepted: set[int] = set()

    def body(history: list[int], depth: int, temperature: float, seed: int, cycle: int) -> None:
        verifier, sampling = subject.make(), Sampling(temperature=temperature, seed=seed)
        context = Context(list(history), sampling, cycle=cycle, draft_noise=verifier.draft_noise)
        drafted: list[int] = []
        probs = []
        for _ in range(depth):
            token, row = draft_token(TableLogits(model.logits([*history, *drafted])[None]), drafted, context)
            drafted.append(token)
            if row is not None:
                probs.append(row)
        draft = Draft(tuple(drafted), np.stack(probs) if probs else None)
        verdict = decide(verifier, Case(target_rows(model, history, drafted), history, draft, sampling, cycle=cycle))
        if verdict is not None:
            accepted.add(verdict.accepted)
            what = "a draft of the target itself was not accepted whole"
            expect(not strictly or verdict.accepted == depth, what, got=verdict.accepted, expected=depth, draft=drafted)

    strictly = False
    for seed in range(8):
        body([1], 3, seed % 2, seed, 1)
    if accepted <= {0}:
        not_applicable("it never accepts a token")
    strictly = True

    run.explore(
        body,
        examples=40,
        history=histories,
        depth=st.sampled_from([3, 1, 7, 13]),
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        seed=st.integers(0, 2**63 - 1),
        cycle=st.integers(1, 99),
    )
    for seed in NEXT_TO_ONE:  # the uniform number of a ratio test, which 16 bits round to 1
        body([1], 1, 1.0, seed, 1)


@check("V4")
def impossible_tokens(subject: VerifierSubject, run: Run) -> None:
    """A token with target probability 0 is neither accepted nor chosen."""

    def body(case: Case) -> None:
        case = attrs.evolve(case, sampling=Sampling(temperature=case.sampling.temperature, seed=case.sampling.seed))
        verdict = _verdict(subject.make(), case)
        for row, token in enumerate(emitted(case, verdict) if verdict else []):
            expect(case.rows[row, token] > -np.inf, f"token {token} of row {row} has probability 0", got=verdict)

    run.explore(body, examples=100, case=cases())


# --- what the guarantees promise -------------------------------------------------------------------------------------

_PENALTIES = Sampling(temperature=1.0, presence_penalty=1.5, repetition_penalty=1.3, logit_bias={0: 0.5})
_SCENARIOS = (
    Scenario("drafts with probs", 1000, with_probs=True),
    Scenario("drafts from part of the vocabulary", 600, with_probs=True, pruned=True),
    Scenario("drafts without probs", 800, with_probs=False),
    Scenario("penalties and a bias", 600, with_probs=True, sampling=_PENALTIES),
    Scenario("filters", 400, with_probs=True, sampling=Sampling(temperature=1.0, top_k=2, min_p=0.45)),
    Scenario("several cycles", 600, with_probs=True, cycles=JOINT, sampling=Sampling(temperature=0.8)),
)


@check("V5")
def target_distribution(subject: VerifierSubject, run: Run) -> None:
    """EXACT and DISTRIBUTION: the emitted tokens follow the target's joint distribution, whatever was drafted."""
    verifier = subject.make()
    if verifier.guarantee not in (Guarantee.EXACT, Guarantee.DISTRIBUTION):
        not_applicable(f"a {verifier.guarantee.value} verifier promises no distribution")
    target, draft = target_and_draft()
    for first, *drafted in itertools.product(range(JOINT_VOCAB), repeat=3):  # temperature 0: each row's best token
        case = Case(target_rows(target, [first], drafted), [first], Draft(tuple(drafted)), Sampling())
        verdict = decide(verifier, case)
        for row, token in enumerate(emitted(case, verdict) if verdict else []):
            what = "at temperature 0 a token is not the best of its row"
            expect_equal(token, int(case.rows[row].argmax()), what, history=case.history_of(row), draft=drafted)
    for part in _SCENARIOS:
        tally = tally_joint(verifier, target, draft, part, run.repeat(part.draws, least=200), run.seed)
        if tally is None:
            not_applicable("it refuses temperatures above 0; at temperature 0 it chooses the best token of every row")
        expected = target_joint(target, part.sampling)
        what = f"the joint distribution of {JOINT} tokens is not the target's"
        _expect_fit(tally, expected, what, run, scenario=part.name)
    for chain in CHAINS:
        tallies = tally_chain(verifier, chain, run.repeat(250, least=100), run.seed)
        for position, counts in enumerate([] if tallies is None else tallies):
            what = f"the distribution of the tokens at positions {position} and {position + 1} is not the target's"
            _expect_fit(counts.ravel(), chain.expected(position).ravel(), what, run, scenario=chain.name)


def _expect_fit(tally: NDArray[np.int64], expected: NDArray[np.float64], what: str, run: Run, **case: object) -> None:
    fit, draws = goodness_of_fit(tally, expected), int(tally.sum())
    case |= {"draws": draws, "run_seed": run.seed}
    expect(fit.passes(P_VALUE), f"{what}: {fit}", got=tally, expected=np.round(expected * draws, 1), **case)


@check("V6")
def same_as_plain(subject: VerifierSubject, run: Run) -> None:
    """EXACT: every committed token is the one that plain decoding chooses there, for any draft, cycle and settings."""
    verifier = subject.make()
    if verifier.guarantee is not Guarantee.EXACT:
        not_applicable("only EXACT promises the tokens of plain decoding")
    coupled = verifier.draft_noise is DraftNoise.COUPLED

    def body(case: Case, cycle: int) -> None:
        verifier = subject.make()
        verdict = _verdict(verifier, case)
        for row, token in enumerate(emitted(case, verdict) if verdict else []):
            rows, history = case.rows[row : row + 1], case.history_of(row)
            plain = _verdict(verifier, attrs.evolve(case, rows=rows, history=history, draft=Draft(), cycle=cycle))
            if plain is not None:
                what = f"row {row} commits a different token than plain decoding"
                expect_equal(token, plain.next_token, what, verdict=verdict)
            if case.sampling.temperature == 0 or coupled:  # the noise is that of coupled drafts
                what, choices = f"row {row} does not commit the token of its distribution and noise", case.choices(row)
                expect(token in choices, what, got=token, expected=choices, verdict=verdict)

    run.explore(body, examples=350, case=cases(), cycle=st.integers(1, 1000))


@check("V7")
def bound_kept(subject: VerifierSubject, run: Run) -> None:
    """BOUNDED: the verifier declares a ``bound`` in nats; no committed token is further below the best than that."""
    stated = subject.make()
    if stated.guarantee is not Guarantee.BOUNDED:
        not_applicable("only BOUNDED has a bound")
    bound = subject.bound if subject.bound is not None else stated.bound
    expected = "an attribute 'bound': nats between the best logit and the worst one committed"
    if not isinstance(bound, int | float) or not 0 <= bound < math.inf:
        expect(False, "it declares no bound", got=bound, expected=expected)
        return

    def body(case: Case) -> None:
        verdict = _verdict(subject.make(), case)
        for row, token in enumerate(emitted(case, verdict) if verdict else []):
            values = case.processed(row)
            gap = max(values) - values[token]
            what, limit = f"token {token} of row {row} is too far from the best", f"at most {bound:g}"
            expect(gap <= bound + 1e-5 * (1 + bound), what, got=f"{gap:g} nats", expected=limit, verdict=verdict)

    run.explore(body, examples=250, case=near_ties(bound))


# --- one call --------------------------------------------------------------------------------------------------------


@check("V8")
def pure(subject: VerifierSubject, run: Run) -> None:
    """The verdict depends only on the arguments, which it leaves unchanged: no memory and no global generator."""

    def body(case: Case, others: list[Case]) -> None:
        probs, bias = None if case.draft.probs is None else case.draft.probs.copy(), dict(case.sampling.logit_bias)
        verifier, expected = subject.make(), decide(subject.make(), case)
        changed = attrs.evolve(case, rows=case.rows[:, ::-1].copy())
        if np.isfinite(changed.rows[:, -1]).all():
            others = [*others, changed]  # what another sequence may have at the same place
        for other in others:
            decide(verifier, other)
        expect_equal(decide(verifier, case), expected, "the verdict depends on calls before it", before=others)
        logits, context = TableLogits(case.rows.copy()), case.context(verifier.draft_noise)
        for seed in (1, 2):
            with own_generators(seed), contextlib.suppress(UnsupportedError):
                verdict = verifier.verify(case.draft, logits, context)
                expect_equal(
                    verdict, expected, "the verdict depends on a global generator, or on how often it is asked"
                )
        expect_equal(logits.rows(), case.rows, "the logits were changed")
        expect_equal(list(context), case.history, "the context was changed")
        expect_equal(dict(context.sampling.logit_bias), bias, "the settings were changed")
        expect_equal(case.draft.probs, probs, "the draft's probs were changed")
        frozen = case.rows.copy()
        frozen.flags.writeable = False
        expect_equal(decide(verifier, case, TableLogits(frozen)), expected, "read-only logits give another verdict")

    run.explore(body, examples=60, case=cases(), others=st.lists(cases(), max_size=2))


@check("V9")
def extreme_rows(subject: VerifierSubject, run: Run) -> None:
    """Zeros, one-hots, ties and widely spaced logits are decided without an error, and nothing is NaN."""

    def body(case: Case) -> None:
        verdict = _verdict(subject.make(), case)
        if verdict is not None:
            for _, gap in verdict.deviations:
                expect(math.isfinite(gap) and gap >= 0, "a gap is negative or not finite", got=gap)

    run.explore(body, examples=100, case=cases())
    one_hot = np.full((3, VOCAB), -np.inf, np.float32)
    one_hot[:, 2] = 0.0
    probs = np.zeros((2, VOCAB), np.float32)
    probs[:, 2] = 1.0
    for temperature in (0.0, 1.0):
        for rows in (one_hot, np.zeros((3, VOCAB), np.float32), np.float32(1e4) * np.eye(3, VOCAB, dtype=np.float32)):
            for draft in (Draft((2, 2), probs), Draft((2, 2))):
                body(Case(rows, [1], draft, Sampling(temperature=temperature, seed=5)))


@check("V10")
def deviation_reported(subject: VerifierSubject, run: Run) -> None:
    """At temperature 0 the deviations list each committed token that is not its row's best: position (from 0) and gap
    in nats, a plain int and a plain float."""
    bound = subject.make().bound if subject.bound is None else subject.bound

    def body(case: Case) -> None:
        verdict = _verdict(subject.make(), case)
        if verdict is None:
            return
        wanted = []
        for row, token in enumerate(emitted(case, verdict)):
            values = case.processed(row)
            if values.index(max(values)) != token:
                wanted.append((row, max(values) - values[token]))
        got = list(verdict.deviations)
        positions = [position for position, _ in got]
        expect_equal(positions, [row for row, _ in wanted], "the wrong positions are reported", verdict=verdict)
        for (position, gap), (_, largest) in zip(got, wanted, strict=True):
            types = type(position), type(gap)
            expect(types == (int, float), "a deviation is not a plain int and a plain float", got=types)
            close = gap == largest or abs(gap - largest) <= 1e-4 * (1 + abs(largest))
            what = f"the gap at position {position} is wrong"
            expect(close, what, got=gap, expected=largest, verdict=verdict)

    run.explore(body, examples=200, case=cases(greedy=True))
    run.explore(body, examples=100, case=near_ties(0.5 if bound is None else bound))


@check("V11")
def refuses_cleanly(subject: VerifierSubject, run: Run) -> None:
    """Settings that a verifier cannot handle raise UnsupportedError; a valid call raises nothing else."""

    def body(case: Case) -> None:
        decide(subject.make(), case)

    run.explore(body, examples=60, case=cases())


@check("V12")
def rows_have_their_own_history(subject: VerifierSubject, run: Run) -> None:
    """Penalties, bans, minimum length and filters apply to every row with its own history, drafted tokens included."""
    promises_distribution = subject.make().guarantee in (Guarantee.EXACT, Guarantee.DISTRIBUTION)

    def body(case: Case) -> None:
        verdict = _verdict(subject.make(), case)
        for row, token in enumerate(emitted(case, verdict) if verdict else []):
            history = case.history_of(row)
            allowed = case.processed(row)[token] > -math.inf
            expect(allowed, f"row {row} commits a forbidden token", got=token, history=history)
            if promises_distribution:
                probs = case.distribution(row)
                what = f"row {row} commits a token of probability 0"
                expect(probs[token] > 0, what, got=token, expected=probs, history=history)

    depths = st.one_of(st.integers(1, 3), st.sampled_from([7, 13]))
    run.explore(body, examples=200, case=cases(depths=depths))
    run.explore(body, examples=60, case=cases(depths=depths, greedy=True).map(with_accepted_draft))


@check("V14")
def all_of_the_noise(subject: VerifierSubject, run: Run) -> None:
    """At temperature above 0, every bit of the seed and every position gives other noise."""
    verifier, rng = subject.make(), np.random.default_rng(run.seed)
    rows = rng.standard_normal((8, 4, 40)).astype(np.float32)  # each at a position, and so with noise, of its own
    draft = Draft(tuple(range(3)), np.full((3, 40), 1 / 40, np.float32))

    def verdicts(seed: int, length: int) -> list[tuple[int, int]]:
        sampling = Sampling(temperature=1.0, seed=seed)
        made = [decide(verifier, Case(one, [1] * (length + row), draft, sampling)) for row, one in enumerate(rows)]
        return [(one.accepted, one.next_token) for one in made if one is not None]

    seed, length = int(rng.integers(0, 2**63 - 1)), 9
    usual = verdicts(seed, length)
    if all(verdicts(other, length) == usual for other in range(8)):
        not_applicable("it draws nothing")
    for bit in range(63):
        what = f"seeds that differ in bit {bit} alone give the same verdicts"
        expect(verdicts(seed ^ (1 << bit), length) != usual, what, seed=seed, other=seed ^ (1 << bit))
    for bit in range(12):
        what = f"positions that are {1 << bit} apart give the same verdicts"
        expect(verdicts(seed, length + (1 << bit)) != usual, what, seed=seed, position=length)


@check("V16")
def keeps_nothing(subject: VerifierSubject, run: Run) -> None:
    """A verifier keeps nothing that it was given, and does not grow with the number of calls."""
    verifier, rng = subject.make(), np.random.default_rng(run.seed)

    def call(number: int) -> weakref.ref[TableLogits]:
        logits = TableLogits(rng.standard_normal((3, VOCAB)).astype(np.float32))
        sampling = Sampling(seed=number, temperature=number % 2)
        context = Context([number % VOCAB] * (1 + number % 7), sampling, cycle=number)
        with contextlib.suppress(UnsupportedError):
            verifier.verify(Draft((number % VOCAB, 1)), logits, context)
        return weakref.ref(logits)

    kept = alive([call(number) for number in range(20)])
    expect(kept <= MOST_KEPT, "logits stay in memory after the call", got=kept, expected=f"at most {MOST_KEPT}")
    grown = growth(call, 300)
    expect(grown < 16, "memory grows with every call", got=f"{grown:.0f} bytes per call", calls=900)


# --- in the engine ---------------------------------------------------------------------------------------------------

ENGINE_VOCAB = 6


@check("V13")
def in_the_engine(subject: VerifierSubject, run: Run) -> None:
    """EXACT, in the engine: drafts, depths and cycle boundaries cannot change the output, over states of every kind."""
    if subject.make().guarantee is not Guarantee.EXACT:
        not_applicable("only EXACT promises the tokens of plain decoding")
    models = {memory: TableModel.random(ENGINE_VOCAB, memory=memory, seed=6, tilt=0.5, peak=0.4) for memory in Memory}

    def body(
        prompt: list[int], depths: list[int], sampling: Sampling, memory: Memory, wrong: list[bool], count: int = 12
    ) -> None:
        model = models[memory]

        def script(history: list[int], number: int) -> int:
            best = int(model.logits(history).argmax())
            return (best + wrong[(len(history) + number) % len(wrong)]) % ENGINE_VOCAB

        def make(env: object) -> ScriptedDrafter:
            return ScriptedDrafter(script)

        room = len(prompt) + count
        try:
            expected = plain_decoding(model, subject.make(), prompt, count, sampling, room)
            got, _ = run_engine(model, subject.make(), make, prompt, count, depths, sampling, capacity=room)
        except UnsupportedError:
            return
        expect_equal(got, expected, "the output is not that of plain decoding")

    for sampling in (Sampling(frequency_penalty=0.05), Sampling(temperature=0.9, seed=2**40 + 3, min_p=0.05)):
        body([1, 2, 3], [3, 7, 0, 13, 1], sampling, Memory.ATTENTION, [False] * 9 + [True], run.count(100))
    wrong = st.lists(st.booleans(), min_size=1, max_size=4)
    memories = st.sampled_from(Memory)
    generations: dict[str, Any] = strategies.generations(ENGINE_VOCAB)
    run.explore(body, examples=20, memory=memories, wrong=wrong, **generations)

"""Checks of verifiers: clauses V1 to V13."""

from __future__ import annotations

import itertools
import math
from functools import partial

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import Context, Draft, Guarantee, Sampling, Verdict, Verifier
from specdec.errors import ShapeError, UnsupportedError
from specdec.sampling import draft_token
from specdec.testing import strategies
from specdec.testing.checks import Run, check, expect, expect_equal, expect_error, not_applicable
from specdec.testing.engine_run import ScriptedDrafter, plain_decoding, run_engine
from specdec.testing.global_generators import generator_states, seeded_generators
from specdec.testing.numerics import goodness_of_fit
from specdec.testing.strict_pass import StrictForwardPass
from specdec.testing.subjects import VerifierSubject
from specdec.testing.table_model import Memory, TableLogits, TableModel
from specdec.testing.verifier_cases import (
    JOINT,
    JOINT_VOCAB,
    VOCAB,
    Case,
    Scenario,
    cases,
    decide,
    emitted,
    histories,
    tally_joint,
    target_and_draft,
    target_joint,
    target_rows,
    with_accepted_draft,
)

P_VALUE = 1e-7  # one false alarm in ten million joint distributions


def _verdict(verifier: Verifier, case: Case) -> Verdict | None:
    """As ``decide``, but None also for a malformed verdict, which V1 finds."""
    verdict = decide(verifier, case)
    if verdict is None:
        return None
    well_formed = 0 <= verdict.accepted <= len(case.draft.tokens) and 0 <= verdict.next_token < VOCAB
    return verdict if well_formed else None


@check("V1")
def well_formed(subject: VerifierSubject, run: Run) -> None:
    """A verdict accepts 0 to K draft tokens and chooses a token inside the vocabulary, both plain ints."""

    def body(case: Case) -> None:
        verdict = decide(subject.make(), case)
        if verdict is None:
            return
        expect(isinstance(verdict, Verdict), "verify does not return a Verdict", got=verdict)
        for name, most in (("accepted", len(case.draft.tokens)), ("next_token", VOCAB - 1)):
            value = getattr(verdict, name)
            expect(type(value) is int, f"{name} is not a plain int", got=type(value).__name__)
            expect(0 <= value <= most, f"{name} is out of range", got=value, expected=f"0 to {most}")

    run.explore(body, examples=60, case=cases())


@check("V2")
def one_row_too_few(subject: VerifierSubject, run: Run) -> None:
    """K draft tokens come with K + 1 rows; any other number raises ShapeError."""
    verifier = subject.make()
    for depth, rows in ((1, 1), (3, 3), (2, 4), (0, 2)):
        case = Case(np.zeros((rows, VOCAB), np.float32), [1], Draft((0,) * depth), Sampling())
        expect_error(ShapeError, partial(decide, verifier, case), f"verify of {depth} tokens, {rows} rows")


@check("V3")
def identical_models(subject: VerifierSubject, run: Run) -> None:
    """The target's own drafts, drawn with the noise that the verifier asks for, are accepted in full."""
    model = TableModel.random(VOCAB, seed=3)

    def body(history: list[int], temperature: float, seed: int, cycle: int) -> None:
        verifier, sampling = subject.make(), Sampling(temperature=temperature, seed=seed)
        context = Context(list(history), sampling, cycle=cycle, draft_noise=verifier.draft_noise)
        drafted: list[int] = []
        probs = []
        for _ in range(3):
            token, row = draft_token(TableLogits(model.logits([*history, *drafted])[None]), drafted, context)
            drafted.append(token)
            if row is not None:
                probs.append(row)
        draft = Draft(tuple(drafted), np.stack(probs) if probs else None)
        verdict = decide(verifier, Case(target_rows(model, history, drafted), history, draft, sampling, cycle=cycle))
        if verdict is not None:
            expect_equal(verdict.accepted, 3, "a draft of the target itself was not accepted whole", draft=drafted)

    run.explore(
        body,
        examples=40,
        history=histories,
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        seed=st.integers(0, 2**40),
        cycle=st.integers(1, 99),
    )


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

_PENALTIES = Sampling(temperature=0.8, presence_penalty=1.5, repetition_penalty=1.3, logit_bias={0: 0.5})
_SCENARIOS = (
    Scenario("drafts with probs", 2500, with_probs=True),
    Scenario("drafts from part of the vocabulary", 1500, with_probs=True, pruned=True),
    Scenario("drafts without probs", 2000, with_probs=False),
    Scenario("penalties and a bias", 1500, with_probs=True, sampling=_PENALTIES),
    Scenario("several cycles", 1500, with_probs=True, cycles=JOINT),
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
    for scenario in _SCENARIOS:
        draws = run.count(scenario.draws)
        tally = tally_joint(verifier, target, draft, scenario, draws, run.seed)
        if tally is None:
            not_applicable("it refuses temperatures above 0; at temperature 0 it chooses the best token of every row")
        wanted = target_joint(target, scenario.sampling)
        fit = goodness_of_fit(tally, wanted)
        expect(
            fit.passes(P_VALUE),
            f"the joint distribution of {JOINT} tokens is not the target's: {fit}",
            got=tally,
            expected=np.round(wanted * draws, 1),
            scenario=scenario.name,
            draws=draws,
            run_seed=run.seed,
        )


@check("V6")
def same_as_plain(subject: VerifierSubject, run: Run) -> None:
    """EXACT: every committed token is the one that plain decoding chooses there, for any draft, cycle and settings."""
    if subject.make().guarantee is not Guarantee.EXACT:
        not_applicable("only EXACT promises the tokens of plain decoding")

    def body(case: Case, cycle: int) -> None:
        verifier = subject.make()
        verdict = _verdict(verifier, case)
        for row, token in enumerate(emitted(case, verdict) if verdict else []):
            rows, history = case.rows[row : row + 1], case.history_of(row)
            plain = _verdict(verifier, attrs.evolve(case, rows=rows, history=history, draft=Draft(), cycle=cycle))
            if plain is not None:
                what = f"row {row} commits a different token than plain decoding"
                expect_equal(token, plain.next_token, what, verdict=verdict)

    run.explore(body, examples=120, case=cases(), cycle=st.integers(1, 1000))


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
    near = [0.0, -0.5 * bound, -0.98 * bound, -1.02 * bound - 0.01, -2 * bound - 1, -np.inf]

    def body(gaps: list[list[float]], drafted: list[int], history: list[int]) -> None:
        rows = np.array(gaps[: len(drafted) + 1], np.float32)
        rows[:, 0] = 0.0
        case = Case(rows, history, Draft(tuple(drafted)), Sampling())
        verdict = _verdict(subject.make(), case)
        for row, token in enumerate(emitted(case, verdict) if verdict else []):
            gap = max(case.processed(row)) - case.processed(row)[token]
            what, limit = f"token {token} of row {row} is too far from the best", f"at most {bound:g}"
            expect(gap <= bound + 1e-6, what, got=f"{gap:g} nats", expected=limit, verdict=verdict)

    row = st.lists(st.sampled_from(near), min_size=VOCAB, max_size=VOCAB)
    run.explore(
        body,
        examples=150,
        gaps=st.lists(row, min_size=4, max_size=4),
        drafted=strategies.tokens(VOCAB, max_size=3),
        history=histories,
    )


# --- one call --------------------------------------------------------------------------------------------------------


@check("V8")
def pure(subject: VerifierSubject, run: Run) -> None:
    """The verdict depends only on the arguments, which it leaves unchanged: no memory, no global generator."""

    def body(case: Case, other: Case) -> None:
        verifier, verdicts = subject.make(), []
        for seed, between in ((1, None), (2, None), (3, other)):
            with seeded_generators(seed):
                if between is not None:
                    decide(verifier, between)
                verdicts.append(decide(verifier, case))
        verdicts.append(decide(subject.make(), case))
        for verdict in verdicts[1:]:
            expect_equal(verdict, verdicts[0], "the same arguments gave a different verdict")
        logits, context = TableLogits(case.rows.copy()), case.context(verifier.draft_noise)
        before, probs = generator_states(), None if case.draft.probs is None else case.draft.probs.copy()
        try:
            verifier.verify(case.draft, logits, context)
        except UnsupportedError:
            return
        expect_equal(logits.rows(), case.rows, "the logits were changed")
        expect_equal(list(context), case.history, "the context was changed")
        expect_equal(case.draft.probs, probs, "the draft's probs were changed")
        expect(generator_states() == before, "a global generator was advanced")

    run.explore(body, examples=40, case=cases(), other=cases())


@check("V9")
def extreme_rows(subject: VerifierSubject, run: Run) -> None:
    """Zeros, one-hots, ties and widely spaced logits are decided without an error, and nothing is NaN."""

    def body(case: Case) -> None:
        verdict = _verdict(subject.make(), case)
        if verdict is not None:
            gap = verdict.deviation.largest_gap
            expect(math.isfinite(gap) and gap >= 0, "the largest gap is negative or not finite", got=gap)

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
    """At temperature 0 the deviation counts committed tokens that are not their row's best, and has the largest gap."""

    def body(case: Case) -> None:
        verdict = _verdict(subject.make(), case)
        if verdict is None:
            return
        gaps = []
        for row, token in enumerate(emitted(case, verdict)):
            values = case.processed(row)
            if values.index(max(values)) != token:
                gaps.append(max(values) - values[token])
        got, largest = verdict.deviation, max(gaps, default=0.0)
        expect_equal(got.count, len(gaps), "the number of deviating tokens is wrong", verdict=verdict)
        close = got.largest_gap == largest or abs(got.largest_gap - largest) <= 1e-4 * (1 + abs(largest))
        expect(close, "the largest gap is wrong", got=got.largest_gap, expected=largest, verdict=verdict)

    run.explore(body, examples=100, case=cases(greedy=True))


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

    run.explore(body, examples=200, case=cases(depths=st.integers(1, 3)))
    run.explore(body, examples=50, case=cases(depths=st.integers(1, 3), greedy=True).map(with_accepted_draft))


# --- in the engine ---------------------------------------------------------------------------------------------------

ENGINE_VOCAB = 6


@check("V13")
def in_the_engine(subject: VerifierSubject, run: Run) -> None:
    """EXACT, in the engine: drafts, depths and cycle boundaries cannot change the output, over states of every kind."""
    if subject.make().guarantee is not Guarantee.EXACT:
        not_applicable("only EXACT promises the tokens of plain decoding")
    models = {memory: TableModel.random(ENGINE_VOCAB, memory=memory, seed=6, tilt=0.5, peak=0.4) for memory in Memory}

    def body(prompt: list[int], depths: list[int], sampling: Sampling, memory: Memory, wrong: list[bool]) -> None:
        model = models[memory]

        def script(history: list[int], number: int) -> int:
            best = int(model.logits(history).argmax())
            return (best + wrong[(len(history) + number) % len(wrong)]) % ENGINE_VOCAB

        def make(env: object) -> ScriptedDrafter:
            return ScriptedDrafter(script)

        try:
            expected = plain_decoding(model, subject.make(), prompt, 12, sampling)
            got, _ = run_engine(StrictForwardPass(model), subject.make(), make, prompt, 12, depths, sampling)
        except UnsupportedError:
            return
        expect_equal(got, expected, "the output is not that of plain decoding")

    wrong = st.lists(st.booleans(), min_size=1, max_size=4)
    memories = st.sampled_from(Memory)
    run.explore(body, examples=40, memory=memories, wrong=wrong, **strategies.generations(ENGINE_VOCAB))

"""Checks of verifiers: clauses V1 to V12. V13 stands in ``end_to_end``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import Context, Draft, DraftNoise, Guarantee, Sampling, Verdict, Verifier
from specdec.errors import ShapeError, UnsupportedError
from specdec.sampling import draft_token
from specdec.testing import strategies
from specdec.testing.by_hand import law_by_hand, processed_by_hand
from specdec.testing.drafter import global_random_state, global_seeds
from specdec.testing.models import TableLogits, TableModel
from specdec.testing.numerics import goodness_of_fit
from specdec.testing.registry import Broken, Run, VerifierSubject, check, expect, not_applicable

if TYPE_CHECKING:
    from numpy.typing import NDArray

VOCAB = 5
JOINT = 3  # tokens whose joint law is tested
_settings = strategies.samplings(VOCAB)
_histories = strategies.tokens(VOCAB, min_size=1, max_size=6)


@attrs.frozen
class Case:
    """One call: the rows of a random model after a history and along a draft."""

    rows: NDArray[np.float32]
    history: list[int]
    draft: Draft
    sampling: Sampling
    generated_from: int = 0
    cycle: int = 1

    def context(self, noise: DraftNoise = DraftNoise.COUPLED) -> Context:
        return Context(
            list(self.history), self.sampling, generated_from=self.generated_from, cycle=self.cycle, draft_noise=noise
        )

    def history_of(self, row: int) -> list[int]:
        return [*self.history, *self.draft.tokens[:row]]

    def processed(self, row: int) -> list[float]:
        return processed_by_hand(self.rows[row].tolist(), self.history_of(row), self.sampling, self.generated_from)

    def law(self, row: int) -> NDArray[np.float64]:
        return law_by_hand(self.rows[row].tolist(), self.history_of(row), self.sampling, self.generated_from)


@st.composite
def _cases(draw: st.DrawFn, *, greedy: bool | None = None, depth: st.SearchStrategy[int] | None = None) -> Case:
    depth_ = draw(depth if depth is not None else st.integers(0, 3))
    history = draw(_histories)
    return Case(
        rows=draw(strategies.logits(depth_ + 1, VOCAB)),
        history=history,
        draft=draw(strategies.drafts(VOCAB, depth_, laws=draw(st.booleans()))),
        sampling=_allowing(draw(strategies.samplings(VOCAB, greedy=greedy))),
        generated_from=draw(st.integers(0, len(history))),
        cycle=draw(st.integers(1, 1000)),
    )


def _allowing(sampling: Sampling) -> Sampling:
    """The last token is never banned, so that with ``_case_possible`` something is always allowed."""
    last = VOCAB - 1
    return attrs.evolve(
        sampling,
        banned=tuple(token for token in sampling.banned if token != last),
        end_tokens=tuple(token for token in sampling.end_tokens if token != last),
    )


def _possible(case: Case) -> Case:
    rows = case.rows.copy()
    rows[np.isneginf(rows[:, -1]), -1] = -1.0
    return attrs.evolve(case, rows=rows)


def cases(**options: Any) -> st.SearchStrategy[Case]:
    """Calls in which every row leaves some token allowed."""
    return _cases(**options).map(_possible)


def decide(verifier: Verifier, case: Case) -> Verdict | None:
    """The verdict, or None where the verifier refuses what it was asked for."""
    try:
        return verifier.verify(case.draft, TableLogits(case.rows.copy()), case.context(verifier.draft_noise))
    except UnsupportedError:
        return None


def emitted(case: Case, verdict: Verdict) -> list[int]:
    """The tokens that a verdict commits."""
    return [*case.draft.tokens[: verdict.accepted], verdict.next_token]


def _verdict(verifier: Verifier, case: Case) -> Verdict | None:
    """As ``decide``, for clauses about the content: a malformed verdict is V1's business."""
    verdict = decide(verifier, case)
    if verdict is None:
        return None
    well = 0 <= verdict.accepted <= len(case.draft.tokens) and 0 <= verdict.next_token < VOCAB
    return verdict if well else None


@check("V1")
def well_formed(subject: VerifierSubject, run: Run) -> None:
    """A verdict accepts 0 to K draft tokens and chooses a token inside the vocabulary, both plain ints."""

    def body(case: Case) -> None:
        verdict = decide(subject.make(), case)
        if verdict is None:
            return
        expect(isinstance(verdict, Verdict), "verify returns a Verdict", got=verdict)
        expect(type(verdict.accepted) is int, "accepted is a plain int", got=type(verdict.accepted).__name__)
        expect(type(verdict.next_token) is int, "next_token is a plain int", got=type(verdict.next_token).__name__)
        count = len(case.draft.tokens)
        expect(
            0 <= verdict.accepted <= count, "accepted is out of range", got=verdict.accepted, expected=f"0 to {count}"
        )
        expect(0 <= verdict.next_token < VOCAB, "next_token is outside the vocabulary", got=verdict.next_token)

    run.explore(body, examples=60, case=cases())


@check("V2")
def one_row_too_few(subject: VerifierSubject, run: Run) -> None:
    """K draft tokens come with K + 1 rows; any other number raises ShapeError."""
    verifier = subject.make()
    for depth, rows in ((1, 1), (3, 3), (2, 4), (0, 2)):
        case = Case(np.zeros((rows, VOCAB), np.float32), [1], Draft((0,) * depth), Sampling())
        try:
            verdict = verifier.verify(case.draft, TableLogits(case.rows), case.context(verifier.draft_noise))
        except ShapeError:
            continue
        raise Broken(f"{depth} draft tokens and {rows} rows were taken", got=verdict, expected="ShapeError")


def _rows(model: TableModel, history: Sequence[int], drafted: Sequence[int]) -> NDArray[np.float32]:
    return np.stack([model.logits([*history, *drafted[:row]]) for row in range(len(drafted) + 1)])


@check("V3")
def identical_models(subject: VerifierSubject, run: Run) -> None:
    """Drafts of the target itself, drawn with the noise that the verifier asks for, are accepted whole."""
    model = TableModel.random(VOCAB, seed=3)

    def body(history: list[int], temperature: float, seed: int, cycle: int) -> None:
        verifier = subject.make()
        sampling = Sampling(temperature=temperature, seed=seed)
        context = Context(list(history), sampling, cycle=cycle, draft_noise=verifier.draft_noise)
        drafted: list[int] = []
        laws = []
        for _ in range(3):
            token, law = draft_token(TableLogits(model.logits([*history, *drafted])[None]), drafted, context)
            drafted.append(token)
            laws.append(law)
        probs = None if laws[0] is None else np.stack([law for law in laws if law is not None])
        case = Case(_rows(model, history, drafted), history, Draft(tuple(drafted), probs), sampling, cycle=cycle)
        verdict = decide(verifier, case)
        if verdict is not None:
            expect(
                verdict.accepted == 3,
                "a draft of the target itself was not accepted whole",
                got=verdict,
                expected="3 accepted",
                draft=drafted,
            )

    run.explore(
        body,
        examples=40,
        history=_histories,
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        seed=st.integers(0, 2**40),
        cycle=st.integers(1, 99),
    )


@check("V4")
def impossible_tokens(subject: VerifierSubject, run: Run) -> None:
    """A token that the target gives probability 0 is neither accepted nor chosen."""

    def body(case: Case) -> None:
        case = attrs.evolve(case, sampling=Sampling(temperature=case.sampling.temperature, seed=case.sampling.seed))
        verdict = _verdict(subject.make(), case)
        if verdict is None:
            return
        for row, token in enumerate(emitted(case, verdict)):
            expect(case.rows[row, token] > -np.inf, f"token {token} of row {row} has probability 0", got=verdict)

    run.explore(body, examples=100, case=cases())


# --- the law ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Scenario:
    """How drafts are made in one test of the law."""

    name: str
    draws: int
    laws: bool  # drafts drawn from a law that is handed over; otherwise point masses
    sampling: Sampling = Sampling(temperature=1.0)
    pruned: bool = False  # the drafter knows only part of the vocabulary
    cycles: int = 1  # cycles before the rest is completed from the target


_SCENARIOS = (
    _Scenario("drafts drawn from a law", 2500, laws=True),
    _Scenario("drafts from part of the vocabulary", 1500, laws=True, pruned=True),
    _Scenario("point masses", 2000, laws=False),
    _Scenario(
        "penalties and a bias",
        1500,
        laws=True,
        sampling=Sampling(temperature=0.8, presence_penalty=1.5, repetition_penalty=1.3, logit_bias={0: 0.5}),
    ),
    _Scenario("several cycles", 1500, laws=True, cycles=JOINT),
)
LAW_VOCAB = 3
LAW_P_VALUE = 1e-7


def target_and_draft() -> tuple[TableModel, TableModel]:
    """Two chains over 3 tokens that differ enough for every known mistake to show; the target forbids one pair."""
    target = np.array([[0.6, 0.3, 0.1], [0.15, 0.25, 0.6], [0.5, 0.5, 0.0]])
    draft = np.array([[0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.25, 0.35, 0.4]])
    return TableModel(target), TableModel(draft)


def target_joint(target: TableModel, sampling: Sampling) -> NDArray[np.float64]:
    """The joint law of the ``JOINT`` tokens after ``[1]``, written out by hand."""
    return joint_law(
        lambda later: law_by_hand(target.logits([1, *later]).tolist(), [1, *later], sampling, 1), JOINT, LAW_VOCAB
    )


def _draft_law(draft: TableModel, history: Sequence[int], scenario: _Scenario) -> NDArray[np.float32]:
    law = draft.law(history)
    if scenario.pruned:
        law[2] = 0.0
        law /= law.sum()
    return law.astype(np.float32)


def joint_law(law: Callable[[list[int]], NDArray[np.float64]], length: int, vocab: int) -> NDArray[np.float64]:
    """The law of the next ``length`` tokens, ``[vocab ** length]``, first token most significant."""
    joint = np.zeros((vocab,) * length)
    for outcome in itertools.product(range(vocab), repeat=length):
        probability = 1.0
        for i, token in enumerate(outcome):
            probability *= law(list(outcome[:i]))[token]
        joint[outcome] = probability
    return joint.ravel()


def _one_draft(
    draft: TableModel, history: list[int], scenario: _Scenario, context: Context, coupled: bool, depth: int
) -> Draft:
    drafted: list[int] = []
    laws: list[NDArray[np.float32]] = []
    for _ in range(depth):
        law = _draft_law(draft, [*history, *drafted], scenario)
        if not scenario.laws:
            drafted.append(int(law.argmax()))
            continue
        with np.errstate(divide="ignore"):
            token, drawn_from = draft_token(TableLogits(np.log(law)[None]), drafted, context)
        drafted.append(token)
        if not coupled and drawn_from is not None:
            laws.append(drawn_from)
    return Draft(tuple(drafted), np.stack(laws) if laws else None)


@check("V5")
def target_law(subject: VerifierSubject, run: Run) -> None:
    """EXACT and DISTRIBUTION: the emitted tokens follow the target's joint law, whatever was drafted."""
    verifier = subject.make()
    if verifier.guarantee not in (Guarantee.EXACT, Guarantee.DISTRIBUTION):
        not_applicable(f"a {verifier.guarantee.value} verifier promises no law")
    _greedy_law(verifier)
    target, draft = target_and_draft()
    for scenario in _SCENARIOS:
        draws = run.count(scenario.draws)
        tally = tally_joint(verifier, target, draft, scenario, draws, run.seed)
        if tally is None:
            not_applicable("it refuses temperatures above 0; at temperature 0 it chooses the best token of every row")
        wanted = target_joint(target, scenario.sampling)
        fit = goodness_of_fit(tally, wanted)
        expect(
            fit.passes(LAW_P_VALUE),
            f"the joint law of {JOINT} tokens is not the target's: {fit}",
            got=tally,
            expected=np.round(wanted * draws, 1),
            scenario=scenario.name,
            draws=draws,
            run_seed=run.seed,
        )


def tally_joint(
    verifier: Verifier, target: TableModel, draft: TableModel, scenario: _Scenario, draws: int, seed: int
) -> NDArray[np.int64] | None:
    """Counts of the first ``JOINT`` tokens after ``[1]``; None when the verifier refuses the sampling."""
    tally = np.zeros(LAW_VOCAB**JOINT, np.int64)
    rest = np.random.default_rng(seed)  # completes from the target what a cycle leaves open
    coupled = verifier.draft_noise is DraftNoise.COUPLED
    for number in range(draws):
        tokens = [1]
        sampling = attrs.evolve(scenario.sampling, seed=(seed << 32) + number)
        for cycle in range(scenario.cycles):
            if len(tokens) > JOINT:
                break
            context = Context(tokens, sampling, generated_from=1, cycle=cycle + 1, draft_noise=verifier.draft_noise)
            made = _one_draft(draft, tokens, scenario, context, coupled, depth=2)
            rows = _rows(target, tokens, made.tokens)
            try:
                verdict = verifier.verify(made, TableLogits(rows), context)
            except UnsupportedError:
                return None
            tokens = [*tokens, *made.tokens[: verdict.accepted], int(verdict.next_token)]
        while len(tokens) <= JOINT:
            law = law_by_hand(target.logits(tokens).tolist(), tokens, sampling, 1)
            tokens.append(int(rest.choice(LAW_VOCAB, p=law)))
        a, b, c = tokens[1 : JOINT + 1]
        tally[(a * LAW_VOCAB + b) * LAW_VOCAB + c] += 1
    return tally


def _greedy_law(verifier: Verifier) -> None:
    """At temperature 0 the law is the best token of every row."""
    target, draft = target_and_draft()
    for first in range(LAW_VOCAB):
        for drafted in itertools.product(range(LAW_VOCAB), repeat=2):
            case = Case(_rows(target, [first], drafted), [first], Draft(drafted), Sampling())
            verdict = decide(verifier, case)
            if verdict is None:
                continue
            for row, token in enumerate(emitted(case, verdict)):
                best = int(case.rows[row].argmax())
                expect(
                    token == best,
                    "at temperature 0 a token is not its row's best",
                    got=token,
                    expected=best,
                    history=case.history_of(row),
                    draft=drafted,
                )


@check("V6")
def same_as_plain(subject: VerifierSubject, run: Run) -> None:
    """EXACT: every committed token is the one that plain decoding chooses there, for any draft, cycle and settings."""
    if subject.make().guarantee is not Guarantee.EXACT:
        not_applicable("only EXACT promises the tokens of plain decoding")

    def body(case: Case, cycle: int) -> None:
        verifier = subject.make()
        verdict = _verdict(verifier, case)
        if verdict is None:
            return
        for row, token in enumerate(emitted(case, verdict)):
            alone = attrs.evolve(
                case, rows=case.rows[row : row + 1], history=case.history_of(row), draft=Draft(), cycle=cycle
            )
            plain = _verdict(verifier, alone)
            if plain is not None:
                expect(
                    token == plain.next_token,
                    f"row {row} commits another token than plain decoding",
                    got=token,
                    expected=plain.next_token,
                    verdict=verdict,
                )

    run.explore(body, examples=120, case=cases(), cycle=st.integers(1, 1000))


@check("V7")
def bound_kept(subject: VerifierSubject, run: Run) -> None:
    """BOUNDED: the verifier states a ``bound`` in nats, and no committed token is further from the best than that."""
    stated = subject.make()
    if stated.guarantee is not Guarantee.BOUNDED:
        not_applicable("only BOUNDED has a bound")
    bound = subject.bound if subject.bound is not None else getattr(stated, "bound", None)
    expect(
        isinstance(bound, int | float) and 0 <= bound < math.inf,
        "it states no bound",
        got=bound,
        expected="an attribute 'bound': nats between the best logit and the worst one committed",
    )
    assert isinstance(bound, int | float)
    near = [0.0, -0.5 * bound, -0.98 * bound, -1.02 * bound - 0.01, -2 * bound - 1, -np.inf]

    def body(gaps: list[list[float]], drafted: list[int], history: list[int]) -> None:
        rows = np.array(gaps[: len(drafted) + 1], np.float32)
        rows[:, 0] = 0.0
        case = Case(rows, history, Draft(tuple(drafted)), Sampling())
        verdict = _verdict(subject.make(), case)
        if verdict is None:
            return
        for row, token in enumerate(emitted(case, verdict)):
            values = case.processed(row)
            gap = max(values) - values[token]
            expect(
                gap <= bound + 1e-6,
                f"token {token} of row {row} is too far from the best",
                got=f"{gap:g} nats",
                expected=f"{bound:g} at most",
                verdict=verdict,
            )

    row = st.lists(st.sampled_from(near), min_size=VOCAB, max_size=VOCAB)
    run.explore(
        body,
        examples=150,
        gaps=st.lists(row, min_size=4, max_size=4),
        drafted=strategies.tokens(VOCAB, max_size=3),
        history=_histories,
    )


# --- manners ---------------------------------------------------------------------------------------------------------


@check("V8")
def pure(subject: VerifierSubject, run: Run) -> None:
    """The verdict depends on the arguments alone: no memory, no global generator; and the arguments are not changed."""

    def body(case: Case, other: Case) -> None:
        verifier, verdicts = subject.make(), []
        for seed, between in ((1, None), (2, None), (3, other)):
            with global_seeds(seed):
                if between is not None:
                    decide(verifier, between)
                verdicts.append(decide(verifier, case))
        verdicts.append(decide(subject.make(), case))
        for verdict in verdicts[1:]:
            expect(verdict == verdicts[0], "the same arguments gave another verdict", got=verdict, expected=verdicts[0])
        logits, context, before = (
            TableLogits(case.rows.copy()),
            case.context(verifier.draft_noise),
            global_random_state(),
        )
        probs = None if case.draft.probs is None else case.draft.probs.copy()
        try:
            verifier.verify(case.draft, logits, context)
        except UnsupportedError:
            return
        expect(np.array_equal(logits.rows(), case.rows), "the logits were changed", got=logits.rows())
        expect(list(context) == case.history, "the context was changed", got=list(context))
        kept = case.draft.probs
        expect(probs is None or kept is None or np.array_equal(probs, kept), "the draft's laws were changed")
        expect(global_random_state() == before, "a global generator was moved")

    run.explore(body, examples=40, case=cases(), other=cases())


@check("V9")
def extreme_rows(subject: VerifierSubject, run: Run) -> None:
    """Zeros, one-hots, ties and far-apart logits are decided without an error, and nothing is NaN."""

    def body(case: Case) -> None:
        verdict = _verdict(subject.make(), case)
        if verdict is not None:
            gap = verdict.deviation.largest_gap
            expect(math.isfinite(gap) and gap >= 0, "the largest gap is not a number", got=gap)

    run.explore(body, examples=100, case=cases())
    one_hot = np.full((3, VOCAB), -np.inf, np.float32)
    one_hot[:, 2] = 0.0
    law = np.zeros((2, VOCAB), np.float32)
    law[:, 2] = 1.0
    for temperature in (0.0, 1.0):
        for rows in (one_hot, np.zeros((3, VOCAB), np.float32), np.float32(1e4) * np.eye(3, VOCAB, dtype=np.float32)):
            for draft in (Draft((2, 2), law), Draft((2, 2))):
                body(Case(rows, [1], draft, Sampling(temperature=temperature, seed=5)))


@check("V10")
def deviation_told(subject: VerifierSubject, run: Run) -> None:
    """At temperature 0 the deviation counts the committed tokens that are not their row's best, and the largest gap."""

    def body(case: Case) -> None:
        verdict = _verdict(subject.make(), case)
        if verdict is None:
            return
        gaps = []
        for row, token in enumerate(emitted(case, verdict)):
            values = case.processed(row)
            if values.index(max(values)) != token:
                gaps.append(max(values) - values[token])
        told = verdict.deviation
        expect(
            told.count == len(gaps), "deviating tokens are miscounted", got=told, expected=len(gaps), verdict=verdict
        )
        largest = max(gaps, default=0.0)
        close = told.largest_gap == largest or abs(told.largest_gap - largest) <= 1e-4 * (1 + abs(largest))
        expect(close, "the largest gap is another one", got=told.largest_gap, expected=largest, verdict=verdict)

    run.explore(body, examples=100, case=cases(greedy=True))


@check("V11")
def refuses_cleanly(subject: VerifierSubject, run: Run) -> None:
    """What a verifier cannot do it refuses with UnsupportedError; nothing else is raised for a proper call."""

    def body(case: Case) -> None:
        decide(subject.make(), case)

    run.explore(body, examples=60, case=cases())


@check("V12")
def rows_have_their_own_history(subject: VerifierSubject, run: Run) -> None:
    """Penalties, bans, minimum length and filters hold for every row, with its own history: drafted tokens included."""
    guarantee = subject.make().guarantee

    def body(case: Case) -> None:
        verdict = _verdict(subject.make(), case)
        if verdict is None:
            return
        committed = emitted(case, verdict)
        for row, token in enumerate(committed):
            history = case.history_of(row)
            expect(
                case.processed(row)[token] > -math.inf,
                f"row {row} commits a forbidden token",
                got=token,
                history=history,
            )
            if guarantee in (Guarantee.EXACT, Guarantee.DISTRIBUTION):
                law = case.law(row)
                expect(
                    law[token] > 0,
                    f"row {row} commits a token of probability 0",
                    got=token,
                    expected=law,
                    history=history,
                )

    run.explore(body, examples=200, case=cases(depth=st.integers(1, 3)))

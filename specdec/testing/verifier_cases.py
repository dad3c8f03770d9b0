"""Single calls of a verifier, and counts of the three-token sequences that it emits over many calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import hypothesis.strategies as st
import numpy as np

from specdec.contract import Context, Draft, DraftNoise, Sampling, Verdict, Verifier
from specdec.errors import UnsupportedError
from specdec.sampling import draft_token
from specdec.testing import strategies
from specdec.testing.reference_sampling import joint_distribution, reference_distribution, reference_logits
from specdec.testing.table_model import TableLogits, TableModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

VOCAB = 5
histories = strategies.tokens(VOCAB, min_size=1, max_size=6)


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
        """The call's context."""
        where = {"generated_from": self.generated_from, "cycle": self.cycle}
        return Context(list(self.history), self.sampling, draft_noise=noise, **where)

    def history_of(self, row: int) -> list[int]:
        """The tokens before ``row``."""
        return [*self.history, *self.draft.tokens[:row]]

    def processed(self, row: int) -> list[float]:
        """The logits of ``row`` after bias, penalties and bans."""
        return reference_logits(self.rows[row].tolist(), self.history_of(row), self.sampling, self.generated_from)

    def distribution(self, row: int) -> NDArray[np.float64]:
        """The distribution of the token of ``row``, ``[V]``."""
        return reference_distribution(self.rows[row].tolist(), self.history_of(row), self.sampling, self.generated_from)


@st.composite
def cases(draw: st.DrawFn, *, greedy: bool | None = None, depths: st.SearchStrategy[int] | None = None) -> Case:
    """Calls in which every row leaves a token allowed: the last one, which is never banned or impossible."""
    depth, history, last = draw(depths if depths is not None else st.integers(0, 3)), draw(histories), VOCAB - 1
    rows = draw(strategies.logits(depth + 1, VOCAB))
    rows[np.isneginf(rows[:, last]), last] = -1.0
    draft = draw(strategies.drafts(VOCAB, depth, with_probs=draw(st.booleans())))
    sampling = draw(strategies.samplings(VOCAB, greedy=greedy))
    banned = tuple(token for token in sampling.banned if token != last)
    ends = tuple(token for token in sampling.end_tokens if token != last)
    sampling = attrs.evolve(sampling, banned=banned, end_tokens=ends)
    generated_from, cycle = draw(st.integers(0, len(history))), draw(st.integers(1, 1000))
    return Case(rows, history, draft, sampling, generated_from, cycle)


def with_accepted_draft(case: Case) -> Case:
    """The same call with penalties, and a draft whose every token is the best one after those before it."""
    case = attrs.evolve(case, sampling=attrs.evolve(case.sampling, presence_penalty=1.5, frequency_penalty=0.5))
    for row in range(len(case.draft.tokens)):
        best = int(case.distribution(row).argmax())
        case = attrs.evolve(case, draft=Draft((*case.draft.tokens[:row], best, *case.draft.tokens[row + 1 :])))
    return case


def decide(verifier: Verifier, case: Case) -> Verdict | None:
    """The verdict, or None if the verifier refuses the settings."""
    try:
        return verifier.verify(case.draft, TableLogits(case.rows.copy()), case.context(verifier.draft_noise))
    except UnsupportedError:
        return None


def emitted(case: Case, verdict: Verdict) -> list[int]:
    """The tokens that a verdict commits."""
    return [*case.draft.tokens[: verdict.accepted], verdict.next_token]


def target_rows(model: TableModel, history: Sequence[int], drafted: Sequence[int]) -> NDArray[np.float32]:
    """A target's logits ``[K+1, V]`` along a draft."""
    return np.stack([model.logits([*history, *drafted[:row]]) for row in range(len(drafted) + 1)])


# --- joint distributions ---------------------------------------------------------------------------------------------

JOINT = 3  # tokens whose joint distribution is tested
JOINT_VOCAB = 3


@attrs.frozen
class Scenario:
    """How one test of the joint distribution makes its drafts."""

    name: str
    draws: int
    with_probs: bool  # draw tokens from a distribution and pass it as probs; otherwise take the most probable tokens
    sampling: Sampling = Sampling(temperature=1.0)
    pruned: bool = False  # the drafter covers only part of the vocabulary
    cycles: int = 1  # cycles before completing the rest from the target


def target_and_draft() -> tuple[TableModel, TableModel]:
    """Two chains over 3 tokens, different enough for every known mistake to show; the target forbids one pair."""
    target = np.array([[0.6, 0.3, 0.1], [0.15, 0.25, 0.6], [0.5, 0.5, 0.0]])
    draft = np.array([[0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.25, 0.35, 0.4]])
    return TableModel(target), TableModel(draft)


def target_joint(target: TableModel, sampling: Sampling) -> NDArray[np.float64]:
    """The joint distribution of the ``JOINT`` tokens after ``[1]``, by the reference."""

    def next_token(later: list[int]) -> NDArray[np.float64]:
        return reference_distribution(target.logits([1, *later]).tolist(), [1, *later], sampling, 1)

    return joint_distribution(next_token, JOINT, JOINT_VOCAB)


def _draft(draft: TableModel, history: list[int], scenario: Scenario, context: Context) -> Draft:
    """Draft two tokens; with ``probs`` if the verifier asks for the drafter's own noise."""
    drafted: list[int] = []
    probs: list[NDArray[np.float32]] = []
    for _ in range(2):
        row = draft.distribution([*history, *drafted])
        if scenario.pruned:
            row[2] = 0.0
            row /= row.sum()
        if not scenario.with_probs:
            drafted.append(int(row.argmax()))
            continue
        with np.errstate(divide="ignore"):
            logits = np.log(row.astype(np.float32))
        token, drawn_from = draft_token(TableLogits(logits[None]), drafted, context)
        drafted.append(token)
        if context.draft_noise is DraftNoise.INDEPENDENT and drawn_from is not None:
            probs.append(drawn_from)
    return Draft(tuple(drafted), np.stack(probs) if probs else None)


def tally_joint(
    verifier: Verifier, target: TableModel, draft: TableModel, scenario: Scenario, draws: int, seed: int
) -> NDArray[np.int64] | None:
    """Counts of the first ``JOINT`` tokens after ``[1]``; None if the verifier refuses the sampling."""
    tally = np.zeros((JOINT_VOCAB,) * JOINT, np.int64)
    rest = np.random.default_rng(seed)  # completes the rest from the target
    for number in range(draws):
        tokens = [1]
        sampling = attrs.evolve(scenario.sampling, seed=(seed << 32) + number)
        for cycle in range(1, scenario.cycles + 1):
            if len(tokens) > JOINT:
                break
            context = Context(tokens, sampling, generated_from=1, cycle=cycle, draft_noise=verifier.draft_noise)
            made = _draft(draft, tokens, scenario, context)
            try:
                verdict = verifier.verify(made, TableLogits(target_rows(target, tokens, made.tokens)), context)
            except UnsupportedError:
                return None
            tokens = [*tokens, *made.tokens[: verdict.accepted], int(verdict.next_token)]
        while len(tokens) <= JOINT:
            probs = reference_distribution(target.logits(tokens).tolist(), tokens, sampling, 1)
            tokens.append(int(rest.choice(JOINT_VOCAB, p=probs)))
        tally[tuple(tokens[1 : JOINT + 1])] += 1
    return tally.ravel()

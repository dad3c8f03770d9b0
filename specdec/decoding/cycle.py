"""The cycle: draft, verify, decide, commit.

Invariant between cycles: n tokens are committed, every state holds tokens 0..n-2, and token n-1 is pending: it becomes
row 0 of the next verification pass. Depth 0 runs the same code and is plain decoding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from time import perf_counter

import attrs
import structlog

from specdec.contract import (
    EMPTY_DRAFT,
    Context,
    Draft,
    Drafter,
    Executor,
    ForwardOutput,
    ForwardPass,
    Outcome,
    State,
    Verdict,
    Verifier,
)
from specdec.decoding.result import TokenLogprobs
from specdec.decoding.statistics import RunStats
from specdec.errors import ContractError
from specdec.sampling import Rows

log = structlog.get_logger(__name__)


@attrs.define(kw_only=True)
class LiveSequence:
    """One sequence being decoded: its tokens, its state, its drafter and its verifier.

    Attributes:
        tokens: all committed tokens, the pending one last. Nothing else holds this list.
        context: a view of ``tokens``.
        logprobs: of the generated tokens, if requested.
        intact: False while a step changes the sequence. If an interruption leaves it False, the state must be rebuilt
            from the tokens.
        failure: why the drafter was switched off; empty while it works.
    """

    target: ForwardPass
    state: State
    drafter: Drafter
    verifier: Verifier
    tokens: list[int]
    context: Context
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    intact: bool = True
    failure: str = ""

    @property
    def speculating(self) -> bool:
        """Whether the drafter is still in use."""
        return not self.failure

    def guard(self, moment: str, call: Callable[[], None]) -> None:
        """Call the drafter. If it raises, speculation ends for this sequence and generation continues without it."""
        try:
            call()
        except Exception as error:  # noqa: BLE001  (any bug of a third party's drafter)
            self.give_up(f"the drafter failed in {moment}: {type(error).__name__}: {error}")

    def give_up(self, reason: str) -> None:
        """End speculation for this sequence."""
        self.failure = reason
        log.warning("drafter_failed", reason=reason)


class HostExecutor(Executor):
    """Runs one cycle at a time: ``submit`` drafts, verifies and decides, ``keep`` commits.

    A drafter that fails is switched off, and the cycle continues without a draft.
    """

    def __init__(self, sequence: LiveSequence, stats: RunStats) -> None:
        self._sequence = sequence
        self._stats = stats

    def submit(self, depth: int) -> None:
        sequence = self._sequence
        started = perf_counter()
        draft = self._draft(depth) if depth > 0 and sequence.speculating else EMPTY_DRAFT
        drafted = perf_counter()
        output = sequence.target.decode(sequence.state, [sequence.tokens[-1], *draft.tokens])
        verdict = sequence.verifier.verify(draft, output.need_logits(), sequence.context)
        _check(verdict, draft, sequence.target.info.vocab_size)
        self._cycle = draft, output, verdict
        self._seconds = drafted - started, perf_counter() - drafted

    def collect(self) -> Outcome:
        draft, _, verdict = self._cycle
        emitted = (*draft.tokens[: verdict.accepted], verdict.next_token)
        return Outcome(draft.tokens, verdict.accepted, emitted, verdict.deviations, *self._seconds)

    def keep(self, tokens: int) -> None:
        sequence, (draft, output, verdict) = self._sequence, self._cycle
        if tokens <= verdict.accepted:  # the cut falls within the accepted tokens: the last one becomes pending
            verdict = verdict.cut(tokens, draft.tokens[tokens - 1])
        if sequence.context.sampling.logprobs is not None:
            self._add_logprobs(draft, output, sequence.tokens[-tokens:])
        sequence.target.commit(sequence.state, tokens)
        if sequence.speculating:
            sequence.guard("observe", lambda: sequence.drafter.observe(verdict, output, sequence.context))

    def close(self) -> None:
        """Do nothing: no cycle is ever in flight."""

    def _draft(self, depth: int) -> Draft:
        """Ask the drafter, and cut what cannot be verified: excess tokens, ids outside the vocabulary."""
        sequence, stats, draft = self._sequence, self._stats, EMPTY_DRAFT
        held = sequence.state.length

        def propose() -> None:
            nonlocal draft
            proposed = sequence.drafter.propose(sequence.context, depth)
            draft = Draft(tuple(map(operator.index, proposed.tokens)), proposed.probs)  # rejects floats

        sequence.guard("propose", propose)
        if sequence.state.length != held:
            raise ContractError(
                f"the drafter {stats.drafter!r} changed the state of its sequence: it held {held} tokens, and now "
                f"{sequence.state.length}",
                takes="a state of its own (ForwardPass.new_state) for passes of its own",
            )
        usable = len(draft.tokens)
        if usable > depth:
            stats.fault("draft longer than asked for")
            usable = depth
        vocab = sequence.target.info.vocab_size
        for position, token in enumerate(draft.tokens[:usable]):
            if not 0 <= token < vocab:
                stats.fault("draft token outside the vocabulary")
                usable = position
                break
        for processor in sequence.context.sampling.processors:
            usable = processor.legal(draft.tokens[:usable], sequence.context)
        if usable < len(draft.tokens):
            draft = Draft(draft.tokens[:usable], None if draft.probs is None else draft.probs[:usable])
        return draft

    def _add_logprobs(self, draft: Draft, output: ForwardOutput, emitted: list[int]) -> None:
        rows = Rows(output.need_logits(), draft.tokens, self._sequence.context)
        for row, token in enumerate(emitted):
            logs, best = rows.logprobs(row)
            top = tuple((one, float(logs[one])) for one in best)
            self._sequence.logprobs.append(TokenLogprobs(token, float(logs[token]), top))


def _check(verdict: Verdict, draft: Draft, vocab_size: int) -> None:
    given: object = verdict  # verifiers may return anything
    if not isinstance(given, Verdict) or type(given.accepted) is not int or type(given.next_token) is not int:
        raise ContractError(f"the verifier returned {given!r:.120}", takes="a Verdict whose numbers are plain ints")
    if not 0 <= verdict.accepted <= len(draft.tokens):
        raise ContractError(f"the verifier accepted {verdict.accepted} of {len(draft.tokens)} draft tokens")
    if not 0 <= verdict.next_token < vocab_size:
        raise ContractError(f"the verifier chose token {verdict.next_token}, outside 0 to {vocab_size - 1}")

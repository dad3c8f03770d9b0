"""The cycle: draft, verify, decide, commit.

Invariant before and after: n tokens are committed, every state holds tokens 0..n-2, token n-1 is pending and rides as
row 0 of the next verification pass. Depth 0 runs the same code and is plain decoding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from time import perf_counter

import attrs
import structlog

from specdec.contract import EMPTY_DRAFT, Context, CycleRecord, Draft, Drafter, ForwardPass, State, Verdict, Verifier
from specdec.decoding.result import RunStats, TokenLogprobs
from specdec.errors import ContractError
from specdec.sampling import Rows

log = structlog.get_logger(__name__)

Cut = Callable[[tuple[int, ...]], int]
"""How many of the tokens that a cycle would emit may stay: at least 1, fewer than all where generation ends there."""


@attrs.define(kw_only=True)
class Sequence:
    """One sequence in the engine's hands: tokens, the states that hold them, and who drafts and decides."""

    target: ForwardPass
    state: State
    drafter: Drafter
    verifier: Verifier
    tokens: list[int]
    context: Context  # a view of ``tokens``
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)  # of the generated tokens, when asked for
    intact: bool = True  # False during a cycle; an interruption leaves it so, and the states must be built again
    speculating: bool = True  # False once the drafter failed


def run_cycle(sequence: Sequence, depth: int, cut: Cut, stats: RunStats) -> CycleRecord:
    """Run one cycle of at most ``depth`` draft tokens; appends what it emits to ``sequence.tokens``.

    Raises: ContractError when the verifier breaks its contract. A drafter that fails is switched off, with the reason
    in ``stats``, and the cycle goes on without a draft.
    """
    target, state, tokens = sequence.target, sequence.state, sequence.tokens
    position = len(tokens)
    sequence.context.cycle += 1
    sequence.intact = False  # an interruption from here on leaves states that disagree

    started = perf_counter()
    draft = _draft(sequence, depth, stats) if depth > 0 and sequence.speculating else EMPTY_DRAFT
    drafted = perf_counter()

    output = target.decode(state, [tokens[-1], *draft.tokens])
    verdict = sequence.verifier.verify(draft, output.need_logits(), sequence.context)
    _check(verdict, draft, target.info.vocab_size)
    emitted = (*draft.tokens[: verdict.accepted], verdict.next_token)
    kept = cut(emitted)
    verified = perf_counter()

    if kept < len(emitted):
        emitted = emitted[:kept]
        # cut off accepted draft tokens were still decided by the target: the last kept one becomes the pending token
        final = verdict.cut(kept, emitted[-1])
    else:
        final = verdict
    if sequence.context.sampling.logprobs is not None:
        rows = Rows(output.need_logits(), draft.tokens, sequence.context)
        sequence.logprobs += [_logprobs(rows, row, token) for row, token in enumerate(emitted)]
    target.commit(state, final.accepted + 1)
    tokens.extend(emitted)
    if sequence.speculating:
        guarded(sequence, stats, "observe", lambda: sequence.drafter.observe(final, output, sequence.context))
    sequence.intact = True
    committed = perf_counter()

    record = CycleRecord(
        position=position,
        depth=depth,
        offered=len(draft.tokens),
        accepted=verdict.accepted,
        emitted=emitted,
        draft_seconds=drafted - started,
        verify_seconds=verified - drafted,
        commit_seconds=committed - verified,
        drafted=draft.tokens,
    )
    stats.add(record, final.deviation)
    return record


def _logprobs(rows: Rows, row: int, token: int) -> TokenLogprobs:
    logs, top = rows.logprobs(row)
    return TokenLogprobs(token, float(logs[token]), tuple((best, float(logs[best])) for best in top))


def _draft(sequence: Sequence, depth: int, stats: RunStats) -> Draft:
    """Ask the drafter, and cut what cannot be verified: too many tokens, ids outside the vocabulary."""
    draft = EMPTY_DRAFT

    def propose() -> None:
        nonlocal draft
        proposed = sequence.drafter.propose(sequence.context, depth)
        draft = Draft(tuple(map(operator.index, proposed.tokens)), proposed.probs)  # a float would become a token

    guarded(sequence, stats, "propose", propose)
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


def guarded(sequence: Sequence, stats: RunStats, moment: str, call: Callable[[], None]) -> None:
    """Run a drafter's method; a failure ends speculation for this sequence, with its reason, not the generation."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  (any bug of a third party's drafter)
        sequence.speculating = False
        stats.inactive_reason = f"the drafter failed in {moment}: {type(error).__name__}: {error}"
        log.warning("drafter_failed", moment=moment, error=repr(error))


def _check(verdict: Verdict, draft: Draft, vocab_size: int) -> None:
    if not 0 <= verdict.accepted <= len(draft.tokens):
        raise ContractError(f"the verifier accepted {verdict.accepted} of {len(draft.tokens)} draft tokens")
    if not 0 <= verdict.next_token < vocab_size:
        raise ContractError(f"the verifier chose token {verdict.next_token}, outside 0 to {vocab_size - 1}")

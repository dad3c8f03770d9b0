"""The cycle: draft, verify, decide, commit.

Invariant between cycles: n tokens are committed, every state holds tokens 0..n-2, and token n-1 is pending: it becomes
row 0 of the next verification pass. Depth 0 runs the same code and is plain decoding.

``cycle`` stops where a model runs, so that several sequences can share a pass (``specdec.decoding.batch``).
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from specdec.contract import EMPTY_DRAFT, CycleRecord, Draft, ForwardOutput, Passes, PassRequest, Verdict, run_passes
from specdec.decoding.result import RunStats, TokenLogprobs
from specdec.decoding.sequence import LiveSequence
from specdec.errors import ContractError, shown
from specdec.registry import Kind, calling, checked_draft, checked_verdict
from specdec.sampling import Rows

Cut = Callable[[tuple[int, ...]], int]
"""How many of a cycle's emitted tokens to keep: at least 1, and not all of them if generation ends within them."""


def run_cycle(sequence: LiveSequence, depth: int, cut: Cut, stats: RunStats) -> CycleRecord:
    """Run one ``cycle`` with passes of its own; its arguments and errors are the same."""
    return run_passes(cycle(sequence, depth, cut, stats))


def cycle(
    sequence: LiveSequence, depth: int, cut: Cut, stats: RunStats, predicted: tuple[int, ...] = ()
) -> Passes[CycleRecord]:
    """One cycle of at most ``depth`` draft tokens; there must be room for ``depth + 1`` tokens.

    Args:
        cut: called once, with the tokens that the cycle emits.
        stats: counters of this generation.
        predicted: a draft; the drafter is not asked.

    Raises: PluginError when target or verifier fails; ContractError when one breaks its contract.
    """
    with sequence.changing():
        position = len(sequence.tokens)
        sequence.context.cycle = sequence.stats.cycles + 1
        draft, seconds = (Draft(predicted), 0.0) if predicted else (yield from _drafted(sequence, depth, stats))
        started = perf_counter()
        draft = _allowed(sequence, draft, stats)
        drafted = perf_counter()
        with sequence.running("decode"):
            request = PassRequest(sequence.target, sequence.state, [sequence.tokens[-1], *draft.tokens])
            output = yield from request
            resumed = perf_counter()
            logits = output.need_logits()
        with calling((Kind.VERIFIER, sequence.verifier_name), "verify"):
            verdict = sequence.verifier.verify(draft, logits, sequence.context)
            verdict = checked_verdict(verdict, len(draft.tokens), sequence.target.info.vocab_size)
        verified = perf_counter()
        emitted = (*draft.tokens[: verdict.accepted], verdict.next_token)
        kept = cut(emitted)
        sequence.extend(emitted[:kept], offered=len(draft.tokens), accepted=verdict.accepted)
        _commit(sequence, draft, output, verdict, kept)
        record = CycleRecord(
            position=position,
            depth=depth,
            offered=len(draft.tokens),
            accepted=verdict.accepted,
            emitted=emitted[:kept],
            draft_seconds=seconds + drafted - started,
            verify_seconds=request.seconds + verified - resumed,
            commit_seconds=perf_counter() - verified,
            drafted=draft.tokens,
            drafter=draft.drafter,
        )
    stats.add(record, [gap for at, gap in verdict.deviations if at < kept])
    return record


def _drafted(sequence: LiveSequence, depth: int, stats: RunStats) -> Passes[tuple[Draft, float]]:
    """Ask the drafter; also gives the seconds that it took. One that fails is switched off."""
    if depth < 1 or sequence.failure:
        return EMPTY_DRAFT, 0.0
    context, seconds, started, output = sequence.context, 0.0, perf_counter(), None
    try:
        work = sequence.drafter.drafting(context, depth)
        try:
            while True:
                request = work.send(output)
                if not isinstance(request, PassRequest):
                    raise ContractError(f"a draft yielded {shown(request)}", takes="PassRequest")
                seconds += perf_counter() - started
                output = yield request  # other sequences may run meanwhile
                seconds, started = seconds + request.seconds, perf_counter()
        except StopIteration as end:
            draft, fault = checked_draft(end.value, depth, sequence.target.info.vocab_size, context)
    except Exception as error:  # noqa: BLE001 - drafting is optional, whatever a plugin raises
        sequence.switch_off("propose", error)
        return EMPTY_DRAFT, seconds
    if fault:
        stats.fault(fault)
    return draft, seconds + perf_counter() - started


def _allowed(sequence: LiveSequence, draft: Draft, stats: RunStats) -> Draft:
    """The beginning of a draft that the logits processors allow."""
    usable = len(draft.tokens)
    for processor in sequence.context.sampling.processors if usable else ():
        usable = processor.legal(draft.tokens[:usable], sequence.context)
    stats.forbidden += len(draft.tokens) - usable
    return Draft(draft.tokens[:usable], None if draft.probs is None else draft.probs[:usable], draft.drafter)


def _commit(sequence: LiveSequence, draft: Draft, output: ForwardOutput, verdict: Verdict, kept: int) -> None:
    """Move the target's state over the ``kept`` tokens, which the sequence has already, and tell the drafter."""
    if kept <= verdict.accepted:  # the cut falls within the accepted tokens: the last one becomes pending
        verdict = verdict.cut(kept, draft.tokens[kept - 1])
    with sequence.running("decode"):
        if sequence.context.sampling.logprobs is not None:
            emitted = sequence.tokens[-kept:]
            rows = Rows(output.need_logits(), draft.tokens, sequence.context)
            for token, (logprob, top) in zip(emitted, rows.reported(emitted), strict=True):
                sequence.logprobs.append(TokenLogprobs(token, logprob, tuple(top)))
    with sequence.running("commit"):
        sequence.target.commit(sequence.state, kept)
    sequence.ask("observe", verdict, output, sequence.context)

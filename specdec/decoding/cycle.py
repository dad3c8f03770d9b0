"""The cycle: draft, verify, decide, commit.

Invariant between cycles: n tokens are committed, every state holds tokens 0..n-2, and token n-1 is pending: it becomes
row 0 of the next verification pass. Depth 0 runs the same code and is plain decoding.

``cycle`` stops where the target runs, so that several sequences can share a pass (``specdec.decoding.batch``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from time import perf_counter

import attrs

from specdec.contract import EMPTY_DRAFT, CycleRecord, Draft, ForwardOutput, Verdict
from specdec.decoding.result import RunStats, TokenLogprobs
from specdec.decoding.sequence import LiveSequence
from specdec.registry import Kind, calling, checked_draft, checked_verdict
from specdec.sampling import Rows

Cut = Callable[[tuple[int, ...]], int]
"""How many of a cycle's emitted tokens to keep: at least 1, and not all of them if generation ends within them."""


@attrs.define
class PassRequest:
    """What a cycle wants its target to run: the pending token and a draft.

    Attributes:
        seconds: that the pass took, or this sequence's share of it; whoever runs it says so.
    """

    sequence: LiveSequence
    tokens: list[int]
    seconds: float = 0.0

    def run(self) -> ForwardOutput | BaseException:
        """Run it in a pass of its own; returns the output, or what was raised."""
        started = perf_counter()
        try:
            return self.sequence.target.decode(self.sequence.state, self.tokens)
        except BaseException as error:  # noqa: BLE001 - the cycle raises it
            return error
        finally:
            self.seconds = perf_counter() - started


def run_cycle(sequence: LiveSequence, depth: int, cut: Cut, stats: RunStats) -> CycleRecord:
    """Run one ``cycle`` with a pass of its own; takes the same arguments and raises the same errors."""
    running = cycle(sequence, depth, cut, stats)
    output = next(running).run()
    try:
        running.throw(output) if isinstance(output, BaseException) else running.send(output)
    except StopIteration as end:
        record: CycleRecord = end.value
    return record


def cycle(
    sequence: LiveSequence, depth: int, cut: Cut, stats: RunStats, predicted: tuple[int, ...] = ()
) -> Generator[PassRequest, ForwardOutput | None, CycleRecord]:
    """One cycle of at most ``depth`` draft tokens; there must be room for ``depth + 1`` tokens.

    Yields a request for a pass until it gets the output; an error of the pass is thrown in.

    Args:
        cut: called once, with the tokens that the cycle emits.
        stats: counters of this generation.
        predicted: a draft; the drafter is not asked.

    Raises: PluginError when target or verifier fails; ContractError when one breaks its contract.
    """
    with sequence.changing():
        position, started = len(sequence.tokens), perf_counter()
        sequence.context.cycle = sequence.stats.cycles + 1
        draft = _allowed(sequence, Draft(predicted) if predicted else _drafted(sequence, depth, stats), stats)
        drafted = perf_counter()
        with sequence.running("decode"):
            request, output = PassRequest(sequence, [sequence.tokens[-1], *draft.tokens]), None
            while output is None:
                output = yield request
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
            draft_seconds=drafted - started,
            verify_seconds=request.seconds + verified - resumed,
            commit_seconds=perf_counter() - verified,
            drafted=draft.tokens,
            drafter=draft.drafter,
        )
    stats.add(record, [gap for at, gap in verdict.deviations if at < kept])
    return record


def _drafted(sequence: LiveSequence, depth: int, stats: RunStats) -> Draft:
    """Ask the drafter. One that fails is switched off."""
    if depth < 1 or sequence.failure:
        return EMPTY_DRAFT
    context = sequence.context
    try:
        draft = sequence.drafter.propose(context, depth)
        draft, fault = checked_draft(draft, depth, sequence.target.info.vocab_size, context)
    except Exception as error:  # noqa: BLE001 - drafting is optional, whatever a plugin raises
        sequence.switch_off("propose", error)
        return EMPTY_DRAFT
    if fault:
        stats.fault(fault)
    return draft


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

"""The cycle: draft, verify, decide, commit.

Invariant between cycles: n tokens are committed, every state holds tokens 0..n-2, and token n-1 is pending: it becomes
row 0 of the next verification pass. Depth 0 runs the same code and is plain decoding.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import attrs

from specdec.contract import (
    EMPTY_DRAFT,
    Context,
    Draft,
    Drafter,
    DraftNoise,
    Executor,
    ForwardOutput,
    ForwardPass,
    Logits,
    Outcome,
    State,
    Stats,
    Verdict,
    Verifier,
)
from specdec.decoding.parts import target_guard
from specdec.decoding.result import TokenLogprobs
from specdec.decoding.statistics import RunStats
from specdec.errors import ContractError, SpecdecError
from specdec.registry import Check, Guard, Kind, Switch, answers, registry
from specdec.sampling import Rows


@attrs.frozen(kw_only=True)
class Counts:
    """What was counted for the committed tokens.

    Attributes:
        cycle: the number of the last committed cycle; noise keys must not repeat, so it never falls.
        stats: acceptance counters.
    """

    cycle: int = 0
    stats: Stats = attrs.field(factory=Stats)


@attrs.define(kw_only=True)
class LiveSequence:
    """One sequence being decoded: its tokens, its state, its drafter and its verifier.

    ``tokens`` are the only truth. State and drafter follow from them and are built again after an interruption, which
    may fall between any two steps of Python. So every change of either happens within ``changing``.

    Attributes:
        tokens: all committed tokens, the pending one last. Nothing else holds this list.
        context: a view of ``tokens``.
        logprobs: of the generated tokens, if requested.
        intact: whether state and drafter are those of ``tokens``; if not, they must be built again.
        drafting: the switch of the drafter; its first failure ends speculation for this sequence.
        verifying: the guard of the verifier.
        running: the guard of the target.
    """

    target: ForwardPass
    state: State
    drafter: Drafter
    verifier: Verifier
    tokens: list[int]
    context: Context
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    intact: bool = True
    drafting: Switch = attrs.field(init=False)
    verifying: Guard = attrs.field(init=False)
    running: Guard = attrs.field(init=False)
    _counts: Counts = attrs.field(factory=Counts, alias="counts")
    _next: tuple[int, Counts] | None = None  # while a cycle is committed: how many tokens it leaves, and its counts

    def __attrs_post_init__(self) -> None:
        known = registry()
        self.drafting = Switch(known.guard_of(Kind.DRAFTER, self.drafter))
        self.verifying = known.guard_of(Kind.VERIFIER, self.verifier)
        self.running = target_guard(self.target)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the sequence from the first change to the last; the mark stays if an exception leaves the block."""
        before, self.intact = self.intact, False
        yield
        self.intact = before  # False within an outer change, and after an interrupted one

    def extend(self, tokens: Sequence[int], *, offered: int, accepted: int) -> None:
        """Append the tokens of a cycle and count it. An interruption leaves both done or neither."""
        held, stats = self.counts, self.counts.stats
        stats = Stats(
            cycles=stats.cycles + 1,
            tokens=stats.tokens + len(tokens),
            offered=[*stats.offered],
            reached=[*stats.reached],
            accepted=[*stats.accepted],
        )
        stats.count(offered, accepted)
        counts = Counts(cycle=held.cycle + 1, stats=stats)
        self._next = len(self.tokens) + len(tokens), counts
        self.tokens.extend(tokens)  # one step, which decides on which side of the cycle an interruption fell
        self._counts = counts
        self._next = None

    @property
    def counts(self) -> Counts:
        """What was counted for ``tokens``."""
        return self._next[1] if self._next is not None and self._next[0] == len(self.tokens) else self._counts

    @property
    def failure(self) -> str:
        """Why the drafter was switched off; empty while it works."""
        return self.drafting.failure

    def ask(self, method: str, *arguments: Any, check: Check | None = None, otherwise: Any = None) -> Any:
        """Call the drafter; ``otherwise`` if it has failed, now or before.

        Raises: ContractError when it changed the sequence's tokens or state.
        """
        if self.drafting.failure:
            return otherwise
        count, held = len(self.tokens), self.state.length
        answer = self.drafting.call(self.drafter, method, *arguments, check=check, otherwise=otherwise)
        if len(self.tokens) != count or self.state.length != held:
            raise self.changed(self.drafting.guard, method, count, held)
        return answer

    def changed(self, guard: Guard, method: str, count: int, held: int) -> ContractError:
        """The error for a plugin that changed the tokens or the state; tokens that it added are removed.

        Args: how many of both there were before.
        """
        now = self.state.length
        del self.tokens[count:]
        what = (
            "tokens of its sequence" if now == held else f"state of its sequence: it held {held} tokens, and now {now}"
        )
        error = ContractError(
            f"{guard} changed the {what}, in {method}",
            plugin=guard.label,
            takes="a state of its own (ForwardPass.new_state) for passes of its own" if now != held else None,
        )
        error.plugin = guard.kind, guard.name
        return error


class HostExecutor(Executor):
    """Runs one cycle at a time: ``submit`` drafts, verifies and decides, ``keep`` commits.

    A drafter that fails is switched off, and the cycle continues without a draft.
    """

    def __init__(self, sequence: LiveSequence, stats: RunStats) -> None:
        self._sequence = sequence
        self._stats = stats
        self._vocab = sequence.target.info.vocab_size
        drafting, running = sequence.drafting, sequence.running
        self._propose = drafting.bind("propose", self._proposed, EMPTY_DRAFT)
        self._observe = None if _keeps_default_observe(sequence.drafter) else drafting.bind("observe", self._observed)
        self._decode = running.bind("decode", self._decoded)
        self._commit = running.bind("commit", self._committed)
        self._add_logprobs = running.bind("decode", self._logprobs_added)
        self._verify = sequence.verifying.bind("verify", self._verified)

    def submit(self, depth: int) -> None:
        sequence = self._sequence
        tokens = sequence.tokens
        count = len(tokens)
        started = perf_counter()
        draft = self._draft(depth) if depth > 0 and not sequence.drafting.failure else EMPTY_DRAFT
        drafted = perf_counter()
        output, logits = self._decode(sequence.state, [tokens[-1], *draft.tokens])
        try:
            verdict = self._verify(draft, logits, sequence.context)
        except SpecdecError as error:
            if error.plugin == (sequence.verifying.kind, sequence.verifying.name):
                self._blame_target(error, logits, len(draft.tokens) + 1)
            raise
        if len(tokens) != count:
            raise sequence.changed(sequence.verifying, "verify", count, sequence.state.length)
        self._cycle = draft, output, verdict
        self._seconds = drafted - started, perf_counter() - drafted

    def _decoded(self, state: State, rows: list[int]) -> tuple[ForwardOutput, Logits]:
        output: Any = self._sequence.target.decode(state, rows)
        if type(output) is not ForwardOutput or output.rows != len(rows) or output.logits is None:
            output = answers.output(output, len(rows))
        return output, output.logits

    def _committed(self, state: State, tokens: int) -> None:
        self._sequence.target.commit(state, tokens)
        if state.length != len(self._sequence.tokens) - 1:
            answers.length(state.length, len(self._sequence.tokens) - 1)

    def _verified(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        return answers.verdict(self._sequence.verifier.verify(draft, logits, context), draft.tokens, self._vocab)

    def _blame_target(self, error: SpecdecError, logits: Logits, rows: int) -> None:
        """Raises: the error that names the target, if its logits failed under the verifier or misled it."""
        running = self._sequence.running
        raised = error.__cause__ or error
        for frame, _ in traceback.walk_tb(raised.__traceback__):
            if frame.f_code is getattr(getattr(type(logits), frame.f_code.co_name, None), "__code__", None):
                error.plugin = None
                error.facts.pop("plugin", None)
                named = running.named(f"{frame.f_code.co_name} of the logits", raised)
                raise named from (raised if named is not raised else raised.__cause__)
        running.bind("decode", answers.logits)(logits, rows, self._vocab)

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
        self._commit(sequence.state, tokens)
        if self._observe is None:
            return
        count = len(sequence.tokens)
        self._observe(verdict, output)
        if len(sequence.tokens) != count or sequence.state.length != count - 1:
            raise sequence.changed(sequence.drafting.guard, "observe", count, count - 1)

    def close(self) -> None:
        """Do nothing: no cycle is ever in flight."""

    def _draft(self, depth: int) -> Draft:
        """Ask the drafter, and cut what cannot be verified: excess tokens, ids outside the vocabulary."""
        sequence, stats, context, vocab = self._sequence, self._stats, self._sequence.context, self._vocab
        count = len(sequence.tokens)
        draft: Draft = self._propose(context, depth)
        if len(sequence.tokens) != count or sequence.state.length != count - 1:
            raise sequence.changed(sequence.drafting.guard, "propose", count, count - 1)
        usable = len(draft.tokens)
        if usable > depth:
            stats.fault("draft longer than asked for")
            usable = depth
        for position, token in enumerate(draft.tokens[:usable]):
            if not 0 <= token < vocab:
                stats.fault("draft token outside the vocabulary")
                usable = position
                break
        valid = usable
        for processor in context.sampling.processors:
            usable = processor.legal(draft.tokens[:usable], context)
        stats.forbidden += valid - usable
        if usable < len(draft.tokens):
            draft = Draft(draft.tokens[:usable], None if draft.probs is None else draft.probs[:usable])
        return draft

    def _proposed(self, context: Context, depth: int) -> Draft:
        honest = context.draft_noise is DraftNoise.INDEPENDENT and context.sampling.temperature > 0
        return answers.draft(self._sequence.drafter.propose(context, depth), depth, self._vocab, honest=honest)

    def _observed(self, verdict: Verdict, output: ForwardOutput) -> None:
        self._sequence.drafter.observe(verdict, output, self._sequence.context)

    def _logprobs_added(self, draft: Draft, output: ForwardOutput, emitted: list[int]) -> None:
        rows = Rows(output.need_logits(), draft.tokens, self._sequence.context)
        for token, (logprob, top) in zip(emitted, rows.reported(emitted), strict=True):
            self._sequence.logprobs.append(TokenLogprobs(token, logprob, tuple(top)))


def _keeps_default_observe(drafter: Drafter) -> bool:
    """Whether ``drafter.observe`` certainly is the method that does nothing."""
    kind = type(drafter)
    usual = kind.__getattribute__ is object.__getattribute__ and "observe" not in getattr(drafter, "__dict__", ())
    return usual and kind.observe is Drafter.observe

"""A device for tests: the cycles of any target, run by its passes as a device runs them.

It runs ahead of the host, ends by itself at stop tokens and where no token is left, and commits a cycle when the next
one begins or when it is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from specdec.contract import Context, DeviceDraft, Draft, Drafter, DrafterEnv, Executor, Needs, Outcome
from specdec.decoding.cycle import HostExecutor, LiveSequence
from specdec.decoding.statistics import RunStats
from specdec.errors import StateError
from specdec.sampling import CoupledDraft
from specdec.verifiers.strict import StrictVerifier


class FakeExecutor(Executor):
    """Every cycle runs when it is submitted."""

    def __init__(
        self, target: Any, state: Any, context: Context, draft: DeviceDraft, *, stop_tokens: Sequence[int], limit: int
    ) -> None:
        self.target, self.state = target, state
        self.draft = draft
        self.pending = context[-1]
        self.stop, self.left = frozenset(stop_tokens), limit
        self.over = False
        self.emitted: tuple[int, ...] = ()  # by the newest cycle, which is not committed
        self.in_flight: list[Outcome] = []
        self.most = 0  # that were in flight at once

    def submit(self, depth: int) -> None:
        self.settle()
        self.in_flight.append(Outcome((), 0, ()) if self.over else self._cycle(depth))
        self.most = max(self.most, len(self.in_flight))

    def _cycle(self, depth: int) -> Outcome:
        target, state, head = self.target, self.state, self.draft.head
        drafted = target.draft_mtp(state, self.pending, depth, head=head) if self.draft.mtp else ()
        best = target.decode(state, [self.pending, *drafted]).need_logits().argmax()
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == best[accepted]:
            accepted += 1
        ends = [i for i, token in enumerate(best[: accepted + 1], start=1) if token in self.stop]
        kept = min([self.left, accepted + 1, *ends])
        self.left -= kept
        self.over = self.left == 0 or kept in ends
        self.emitted = tuple(best[:kept])
        return Outcome(tuple(drafted), accepted, self.emitted)

    def settle(self) -> None:
        """Commit the newest cycle."""
        if self.emitted:
            self.target.commit(self.state, len(self.emitted))
            self.pending, self.emitted = self.emitted[-1], ()

    def collect(self) -> Outcome:
        return self.in_flight.pop(0)

    def keep(self, tokens: int) -> None:
        if tokens < len(self.emitted) and not self.in_flight:
            self.left += len(self.emitted) - tokens
            self.emitted = self.emitted[:tokens]
            self.over = False

    def close(self) -> None:
        if self.in_flight:
            raise StateError("an executor is closed while a cycle is in flight")
        self.settle()


class OnDevice:
    """A target that runs cycles by itself; keeps the executors that it gave."""

    def __init__(self, target: Any, made: type[FakeExecutor] = FakeExecutor) -> None:
        self._target = target
        self._made = made
        self.opened: list[FakeExecutor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def device_executor(self, *arguments: Any, **options: Any) -> Executor:
        self.opened.append(self._made(self._target, *arguments, **options))
        return self.opened[-1]


# --- executors without a session around them --------------------------------------------------------------------------


class HeadDrafter(Drafter):
    """Drafts with the target's MTP head, or rows of it: greedily, or with the noise that decides the position."""

    def __init__(self, env: DrafterEnv, draft: DeviceDraft) -> None:
        self._env = env
        self._draft = draft

    def propose(self, context: Context, depth: int) -> Draft:
        if not self._draft.mtp:
            return Draft(())
        choose = CoupledDraft(context) if context.sampling.temperature > 0 else None
        draft_mtp = self._env.target.draft_mtp
        return Draft(draft_mtp(self._env.state, context[-1], depth, head=self._draft.head, choose=choose))


def prefilled(target: Any, tokens: Sequence[int], draft: DeviceDraft, capacity: int = 100) -> LiveSequence:
    """A sequence of these tokens, the last one pending."""
    state, held = target.new_state(capacity, Needs(mtp=draft.mtp)), list(tokens)
    target.prefill(state, held[:-1])
    drafter = HeadDrafter(DrafterEnv(target=target, state=state), draft)
    verifier = StrictVerifier(None)
    return LiveSequence(
        target=target, state=state, drafter=drafter, verifier=verifier, tokens=held, context=Context(held)
    )


def on_host(sequence: LiveSequence) -> Executor:
    return HostExecutor(sequence, RunStats())


def on_device(sequence: LiveSequence, draft: DeviceDraft, stop: Sequence[int] = (), limit: int = 60) -> Any:
    """None where the target offers nothing."""
    target: Any = sequence.target
    return target.device_executor(sequence.state, sequence.context, draft, stop_tokens=tuple(stop), limit=limit)


def run(sequence: LiveSequence, executor: Executor, depths: Sequence[int], *, ahead: bool = False) -> list[Outcome]:
    """Cycles of these depths, all kept; ``ahead``: one more is in flight than the host has collected."""
    done: list[Outcome] = []

    def collect() -> None:
        outcome = executor.collect()
        sequence.tokens.extend(outcome.emitted)
        if outcome.emitted:
            executor.keep(len(outcome.emitted))
        done.append(attrs.evolve(outcome, draft_seconds=0.0, verify_seconds=0.0))

    for i, depth in enumerate(depths):
        executor.submit(depth)
        if i or not ahead:
            collect()
    if ahead:
        collect()
    return done


def left_behind(sequence: LiveSequence) -> tuple[int, int | None, list[list[float]]]:
    """Tokens that the state holds, pairs that it knows, and logits: after the last token, and of the head's draft."""
    target, state, found = sequence.target, sequence.state, []
    pairs = None if state.pairs is None else state.pairs.length
    found.append(target.decode(state, sequence.tokens[-1:]).need_logits().rows()[0].tolist())
    if pairs == state.length:

        def choose(logits: Any, drafted: Sequence[int]) -> int:
            found.append(logits.rows()[0].tolist())
            return int(logits.argmax()[0])

        target.draft_mtp(state, sequence.tokens[-1], 2, choose=choose)
    return state.length, pairs, found

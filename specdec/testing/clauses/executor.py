"""The check of a device's executor against the host, cycle by cycle: clause F20."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from specdec.contract import NO_NEEDS, Context, DeviceDraft, DrafterEnv, Executor, Needs, NoConfig, Outcome
from specdec.decoding.cycle import HostExecutor, LiveSequence
from specdec.decoding.statistics import RunStats
from specdec.drafters.mtp import MtpConfig, MtpDrafter
from specdec.drafters.none import NoDrafter
from specdec.testing.checks import Run, check, expect_equal, not_applicable
from specdec.testing.subjects import ForwardPassSubject
from specdec.testing.target_under_test import TargetUnderTest
from specdec.verifiers.strict import StrictVerifier

if TYPE_CHECKING:
    from numpy.typing import NDArray


@attrs.frozen
class _Plan:
    """The depths of some cycles, and how generation ends; ``keep`` > 0 drops part of the last cycle."""

    depths: tuple[int, ...]
    stop: tuple[int, ...] = ()
    limit: int = 40
    keep: int = 0


@attrs.define
class _Generation:
    """The result of a plan's cycles: outcomes, the state's contents after them, and the next logits."""

    target: TargetUnderTest
    draft: DeviceDraft
    plan: _Plan
    outcomes: list[Outcome] = attrs.field(factory=list)
    held: tuple[int, int] = (0, 0)  # tokens, and pairs fed or waiting
    logits: list[NDArray[np.float32]] = attrs.field(factory=list)  # the target's, and the head's if it drafts

    def run(self, *, on_device: bool) -> bool:
        """Run the cycles; on a device, one cycle ahead if none is rolled back. False: not offered."""
        target, plan, mtp = self.target, self.plan, self.draft.mtp
        model, tokens = target.model, target.tokens(range(6))
        state = target.prefilled(tokens[:-1], needs=Needs(mtp=True) if mtp else NO_NEEDS)
        env = DrafterEnv(target=model, state=state)
        sequence = LiveSequence(
            target=model,
            state=state,
            drafter=MtpDrafter(MtpConfig(), env) if mtp else NoDrafter(NoConfig(), env),
            verifier=StrictVerifier(),
            tokens=tokens,
            context=Context(tokens),
        )
        executor: Executor | None = HostExecutor(sequence, RunStats())
        if on_device:
            executor = model.device_executor(
                state, sequence.context, self.draft, stop_tokens=plan.stop, limit=plan.limit
            )
        if executor is None:
            return False
        ahead = on_device and not plan.keep
        for number, depth in enumerate(plan.depths):
            if not on_device and self._ended():
                break
            executor.submit(depth)
            if not ahead or number:
                self._collect(executor, tokens, plan.keep if number == len(plan.depths) - 1 else 0)
        if ahead:
            self._collect(executor, tokens)
        executor.close()
        self.held = state.length, target.pairs(state).length if mtp else 0
        self.logits = [target.next_logits(state, tokens[-1])]
        if mtp:
            self.logits += target.draft(state, tokens[-1], 1)[1]
        return True

    def _emitted(self) -> list[int]:
        return [token for outcome in self.outcomes for token in outcome.emitted]

    def _ended(self) -> bool:
        emitted = self._emitted()
        return len(emitted) == self.plan.limit or bool(emitted) and emitted[-1] in self.plan.stop

    def _collect(self, executor: Executor, tokens: list[int], keep: int = 0) -> None:
        """Collect a cycle, cut it where generation ends (a device has already done so), and keep it."""
        outcome = executor.collect()
        ends = [number for number, token in enumerate(outcome.emitted, start=1) if token in self.plan.stop]
        count = min([self.plan.limit - len(self._emitted()), len(outcome.emitted), *ends])
        outcome = attrs.evolve(outcome, emitted=outcome.emitted[:count])
        if outcome.emitted:
            self.outcomes.append(outcome)
            kept = outcome.emitted[: keep or count]
            tokens += kept
            executor.keep(len(kept))


@check("F20")
def device_cycles(subject: ForwardPassSubject, run: Run) -> None:
    """Cycles on the device draft, emit and leave the same state as cycles on the host, at every depth."""
    target = TargetUnderTest(subject)
    drafts = [DeviceDraft(mtp=False), *([DeviceDraft()] if target.info.mtp_layers else [])]
    offered = 0
    for draft in drafts:
        free = _Generation(target, draft, _Plan((2,) * 4))
        if not free.run(on_device=True):
            continue
        offered += 1
        emitted = free._emitted()
        for plan in (
            _Plan((1,)),
            _Plan((2, 3, 1, 2)),
            _Plan((0, 0, 3, 0, 1)),
            _Plan((3, 3), keep=1),
            _Plan((2,) * 4, stop=(emitted[len(emitted) // 2],)),
            _Plan((2,) * 4, limit=3),
            _Plan((1, 2), limit=1),
        ):
            got, wanted = _Generation(target, draft, plan), _Generation(target, draft, plan)
            wanted.run(on_device=False)
            got.run(on_device=True)
            case = {"mtp": draft.mtp, "plan": plan}
            shown, truth = (
                [(one.drafted, one.accepted, one.emitted) for one in both.outcomes] for both in (got, wanted)
            )
            expect_equal(shown, truth, "cycles of the device differ from those of the host", **case)
            expect_equal(got.held, wanted.held, "the number of held tokens and pairs differs", **case)
            for ours, theirs in zip(got.logits, wanted.logits, strict=True):
                what = "cycles of the device leave another state"
                target.expect_close(ours, theirs, what, mtp=draft.mtp, plan=plan)
    if not offered:
        not_applicable("device_executor is not offered")

"""How speeds change with the length of the context: prefill and generation at each frontier.

One session per arm grows from frontier to frontier. At each, its state is saved and a restored copy generates, so
that what is generated never lengthens the context of the next frontier.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import attrs

from specdec.decoding.prefill import prefill
from specdec.decoding.result import RunStats

if TYPE_CHECKING:
    from specdec.decoding.session import Session
    from specdec.measuring.arms import Arm, ArmRun


@attrs.frozen(kw_only=True)
class FrontierReport:
    """Speeds at one length of the context; tokens per second."""

    context: int  # tokens before the generated ones
    prefill_plain: float  # over the tokens since the frontier before
    prefill_speculative: float  # with the drafter's own prefill
    plain: float
    speculative: float
    speedup: float
    tokens_per_cycle: float
    state_bytes: int  # of the speculative arm's target
    save_seconds: float  # to copy the state and restore it, speculative arm
    equal: bool  # both arms generated the same tokens


def measure_frontiers(
    plain: Arm,
    speculative: Arm,
    contexts: Sequence[int],
    text: Sequence[int],
    *,
    compare: bool = True,
    stopping: Callable[[], bool] = lambda: False,
    advance: Callable[[], None] = lambda: None,
    **settings: Any,
) -> Iterator[FrontierReport]:
    """Measure at every length of ``contexts`` (ascending order is made), A B B A.

    Args:
        text: token ids, at least as many as the longest context.
        compare: whether both arms must generate the same tokens.
        stopping: asked before every generation; True ends the measurement, and the length under way is left out.
        advance: called after every generation.
        **settings: of the generations, as for ``Session.stream``.
    """
    arms = (plain, speculative)
    sessions: dict[Arm, Session] = {arm: arm.lm.session() for arm in arms}
    for context in sorted(set(contexts)):
        prefill = {arm: _grow(sessions[arm], text[:context]) for arm in arms}
        runs: dict[Arm, list[ArmRun]] = {arm: [] for arm in arms}
        saving: list[float] = []
        for arm in (plain, speculative, speculative, plain):
            if stopping():
                return
            started = perf_counter()
            copy = sessions[arm].fork()
            if arm is speculative:
                saving.append(perf_counter() - started)
            runs[arm].append(arm.go_on(copy, **settings))
            advance()
        rates = {arm: sum(len(r.tokens) for r in runs[arm]) / sum(r.seconds for r in runs[arm]) for arm in arms}
        outputs = {run.tokens for arm in arms for run in runs[arm]}
        yield FrontierReport(
            context=context,
            prefill_plain=prefill[plain],
            prefill_speculative=prefill[speculative],
            plain=rates[plain],
            speculative=rates[speculative],
            speedup=rates[speculative] / rates[plain],
            tokens_per_cycle=statistics.fmean(len(run.tokens) / len(run.cycles) for run in runs[speculative]),
            state_bytes=sessions[speculative].sequence.state.nbytes(),
            save_seconds=min(saving),
            equal=len(outputs) == 1 or not compare,
        )


def _grow(session: Session, tokens: Sequence[int]) -> float:
    """Feed what ``tokens`` has beyond the session, run it, and return tokens per second."""
    added = tokens[len(session.tokens) :]
    session.feed(added)
    started = perf_counter()
    prefill(session.sequence, RunStats())
    return len(added) / (perf_counter() - started)

"""Run a generation through the engine's own cycles, with a chosen target, verifier and drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specdec.contract import NO_NEEDS, Context, Draft, Drafter, DrafterEnv, ForwardPass, Needs, Sampling, Verifier
from specdec.decoding.cycle import run_cycle
from specdec.decoding.result import RunStats
from specdec.decoding.sequence import LiveSequence, prefill
from specdec.testing.checks import expect_equal

CAPACITY = 256  # tokens of a state
MakeDrafter = Callable[[DrafterEnv], Drafter]


class ScriptedDrafter(Drafter):
    """Drafts tokens from a function of the history and the token's index in the draft."""

    def __init__(self, script: Callable[[list[int], int], int]) -> None:
        self._script = script

    def propose(self, context: Context, depth: int) -> Draft:
        history = list(context)
        for number in range(depth):
            history.append(self._script(history, number))
        return Draft(tuple(history[len(context) :]))


def run_engine(
    target: ForwardPass,
    verifier: Verifier,
    make: MakeDrafter | None,
    prompt: Sequence[int],
    count: int,
    depths: Sequence[int],
    sampling: Sampling,
    *,
    needs: Needs = NO_NEEDS,
    shared: Any = None,
    capacity: int = CAPACITY,
) -> tuple[list[int], RunStats]:
    """Generate ``count`` tokens after ``prompt``, cycling through ``depths``. Without a drafter: plain decoding."""
    state = target.new_state(min(capacity, target.info.max_positions), needs)
    env = DrafterEnv(target=target, state=state, shared=shared)
    drafter = ScriptedDrafter(lambda history, number: 0) if make is None else make(env)
    tokens = list(prompt)
    context = Context(tokens, sampling, generated_from=len(prompt), draft_noise=verifier.draft_noise)
    sequence = LiveSequence(
        target=target, state=state, drafter=drafter, verifier=verifier, tokens=tokens, context=context
    )
    stats = RunStats()
    prefill(sequence, stats)
    while room := len(prompt) + count - len(tokens):
        depth = min(depths[stats.cycles % len(depths)], room - 1, target.info.max_rows - 1)
        run_cycle(sequence, depth, len, stats)
    stats.inactive_reason = sequence.failure
    return tokens[len(prompt) :], stats


def plain_decoding(
    target: ForwardPass,
    verifier: Verifier,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    capacity: int = CAPACITY,
) -> list[int]:
    """Generate ``count`` tokens after ``prompt`` without drafts, as the reference for speculation."""
    return run_engine(target, verifier, None, prompt, count, [0], sampling, capacity=capacity)[0]


def expect_plain_output(
    target: ForwardPass,
    verifier: Verifier,
    wrong: Sequence[bool],
    prompt: Sequence[int],
    count: int,
    depths: Sequence[int],
    sampling: Sampling,
    capacity: int,
) -> None:
    """Draft the tokens of plain decoding, and others where ``wrong``, taken cyclically, says so.

    Raises: Broken unless the output is that of plain decoding.
    """
    text = [*prompt, *plain_decoding(target, verifier, prompt, count, sampling, capacity)]

    def script(history: list[int], row: int) -> int:
        right = text[len(history)] if len(history) < len(text) else 0
        return (right + wrong[(len(history) + row) % len(wrong)]) % target.info.vocab_size

    drafter = ScriptedDrafter(script)
    got, _ = run_engine(target, verifier, lambda env: drafter, prompt, count, depths, sampling, capacity=capacity)
    expect_equal(got, text[len(prompt) :], "the output is not that of plain decoding")

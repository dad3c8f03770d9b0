"""Prefill: run the prompt through target and drafter before the first cycle."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from specdec.contract import Context, ForwardOutput, State
from specdec.decoding.cycle import LiveSequence
from specdec.decoding.statistics import RunStats
from specdec.registry import answers

PREFILL_CHUNK = 512  # prompt tokens between two checks of the stop flag
PREFILL_TAIL = 8  # the last tokens of a prompt run as a separate chunk
"""A recurrent state can only rewind to the end of a prefill chunk. The next prompt of a conversation often differs from
this one in its last few tokens (the template changes the start of the answer), so a chunk ends before them."""

_OUTPUT = answers.an(ForwardOutput)


def prefill(sequence: LiveSequence, stats: RunStats, stopping: Callable[[], bool] = lambda: False) -> None:
    """Run every token but the last through the target and the drafter; end early once ``stopping()`` is true."""
    started = perf_counter()
    tokens, end = sequence.tokens, len(sequence.tokens) - 1

    def prefilled(state: State, chunk: list[int]) -> ForwardOutput:
        before = state.length
        output: ForwardOutput = _OUTPUT(sequence.target.prefill(state, chunk))
        answers.length(state.length, before + len(chunk))
        return output

    run = sequence.running.bind("prefill", prefilled)
    with sequence.changing():
        while sequence.state.length < end and not stopping():
            at = sequence.state.length
            chunk = tokens[at : min(at + PREFILL_CHUNK, end)]
            if at + len(chunk) == end and len(chunk) > 2 * PREFILL_TAIL:
                del chunk[-PREFILL_TAIL:]
            output = run(sequence.state, chunk)
            seen = Context(tokens[: at + len(chunk)], sequence.context.sampling)
            sequence.ask("prefill", seen, output)
            stats.prefilled += len(chunk)
    stats.seconds["prefill"] += perf_counter() - started

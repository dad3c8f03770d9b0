"""Replay recorded traffic with any drafter: drafts that agree with the recorded tokens would have been accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from specdec.config import Choice
from specdec.errors import UnsupportedError
from specdec.hosting.drafting import HostedDrafter
from specdec.hosting.engines import host_info
from specdec.hosting.traces import TracedRequest
from specdec.text.tokenizer import common_prefix


@attrs.frozen
class Difference:
    """A recorded draft that is not what the drafter drafts here."""

    position: int  # committed tokens before
    recorded: tuple[int, ...]
    drafted: tuple[int, ...]


def recorded_drafter(choice: Choice | None, vocab_size: int, tokenizer: object = None) -> HostedDrafter:
    """A drafter for recorded traffic.

    Raises: UnsupportedError if it needs more than tokens, or ``choice`` is None because the trace names none; and as
        ``HostedDrafter``.
    """
    if choice is None:
        raise UnsupportedError("the trace names no drafter")
    info = host_info("recorded traffic", vocab_size, 2**31 - 1)
    return HostedDrafter(choice, info, tokenizer=tokenizer, sessions=1, pausing=False)


def replay(request: TracedRequest, drafter: HostedDrafter | None = None) -> list[Difference]:
    """Where the drafter drafts something else than was recorded; empty if all drafts are the same.

    Args:
        drafter: the one that the trace names if None. It is asked as in the recording: at the same positions, for the
            same depths.
    """
    drafter = recorded_drafter(request.drafter, request.vocab_size) if drafter is None else drafter
    drafter.forget()
    tokens = (*request.prompt, *request.tokens)
    differing = []
    for drafting in request.rounds:
        if drafting.depth and drafting.position:
            drafted = tuple(drafter.one(tokens[: drafting.position], drafting.depth))
            if drafted != drafting.drafted:
                differing.append(Difference(drafting.position, drafting.drafted, drafted))
    return differing


def replayed_cycles(
    drafter: HostedDrafter, prompt: Sequence[int], tokens: Sequence[int], depth: int
) -> Iterator[tuple[int, int]]:
    """Generate ``tokens`` in cycles of at most ``depth`` draft tokens; gives offered and accepted, cycle by cycle."""
    drafter.forget()
    history, left = list(prompt), list(tokens)
    while left:
        draft = drafter.one(history, min(depth, len(left) - 1))
        accepted = common_prefix(draft, left)
        history += left[: accepted + 1]
        del left[: accepted + 1]
        yield len(draft), accepted

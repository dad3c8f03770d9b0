"""A host in a few lines: decodes several requests together over a made-up target, and ends at the first bad draft.

Requests wait, come in chunks, change rows, are preempted and cancelled at random; calls to the drafter are skipped. The
target chooses a token from the history alone, so that plain decoding is known.
"""

import random
import zlib
from collections.abc import Callable, Sequence

import attrs
import numpy as np

VOCAB = 50


class HostDied(Exception):
    """What a real host would not have survived."""


def chosen(history: Sequence[int]) -> int:
    """The target's choice: often what followed the same token before, so that look-ups find something."""
    last = history[-1]
    if zlib.crc32(bytes(history[-3:])) % 4:
        for at in range(len(history) - 2, -1, -1):
            if history[at] == last:
                return history[at + 1]
    return zlib.crc32(bytes(history[-5:])) % VOCAB


def plain(prompt: Sequence[int], count: int) -> list[int]:
    """Plain decoding."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(chosen(tokens))
    return tokens[len(prompt) :]


@attrs.define(eq=False)
class Request:
    """One request: its prompt, and how many tokens it wants."""

    prompt: list[int]
    count: int
    tokens: list[int] = attrs.field(factory=list)
    chunks: int = 0  # of the prompt that are still to come
    cancelled: bool = False
    draft: list[int] = attrs.field(factory=list)

    @property
    def done(self) -> bool:
        return self.cancelled or len(self.tokens) >= self.count


Propose = Callable[[list[list[int]], list[list[int]], np.ndarray, np.ndarray], list[list[int]]]


def serve(requests: Sequence[Request], propose: Propose, depth: int, rng: random.Random, rows: int = 4) -> None:
    """Decode all requests.

    ``propose(new tokens by row, histories, lengths, buffer)`` gives the drafts. The buffer is the host's own: rows are
    written again, and what is behind a row's length is of other requests.
    """
    waiting, running = list(requests), []
    width = max(len(one.prompt) + one.count for one in requests) + depth + 2
    buffer = np.full((rows, width), 7, np.int32)
    while waiting or running:
        while waiting and len(running) < rows:
            one = waiting.pop(rng.randrange(len(waiting)))
            one.chunks = rng.randrange(3)
            running.insert(rng.randrange(len(running) + 1), one)
        if len(running) > 1 and rng.random() < 0.1:
            preempted = running.pop(rng.randrange(len(running)))
            preempted.draft = []
            waiting.append(preempted)
        if rng.random() < 0.1:
            rng.shuffle(running)
        if rng.random() < 0.03:
            rng.choice(running).cancelled = True
        new: list[list[int]] = []
        for one in running:
            if one.chunks:
                one.chunks -= 1
                new.append([])
                continue
            step: list[int] = []
            for token in [*one.draft, None]:
                right = chosen([*one.prompt, *one.tokens, *step])
                step.append(right)
                if token != right:
                    break
            step = step[: one.count - len(one.tokens)]
            one.tokens += step
            one.draft = []
            new.append(step)
        alive = [(one, step) for one, step in zip(running, new, strict=True) if not one.done]
        running = [one for one, _ in alive]
        if not running:
            continue
        lengths = np.zeros(rows, np.int32)
        histories = []
        for row, one in enumerate(running):
            history = [*one.prompt, *one.tokens]
            histories.append(history)
            lengths[row] = len(history)
            buffer[row, : len(history)] = history
        if rng.random() < 0.1:
            continue  # a skipped call
        drafts = propose([step for _, step in alive], histories, lengths, buffer)
        if len(drafts) != len(running):
            raise HostDied(f"{len(drafts)} drafts for {len(running)} rows")
        for one, draft in zip(running, drafts, strict=True):
            if type(draft) is not list or len(draft) > depth or any(not 0 <= token < VOCAB for token in draft):
                raise HostDied(f"a draft of {draft}")
            one.draft = list(draft)


def random_requests(rng: random.Random, most: int = 10) -> list[Request]:
    """Requests that share beginnings, some of them equal."""
    start = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
    made = []
    for _ in range(rng.randrange(1, most)):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 6))]
        made.append(Request((start if rng.random() < 0.7 else []) + own or [3], rng.randrange(1, 40)))
    return made

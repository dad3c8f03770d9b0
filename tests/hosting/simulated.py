"""A host in a few lines: decodes several requests together over a made-up target, and fails at the first bad draft.

Requests wait, come in chunks and change rows at random; calls to the drafter are skipped. The target chooses a token
from the history alone, so that plain decoding is known.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence

import numpy as np

VOCAB = 50
ROWS = 4


def chosen(history: Sequence[int]) -> int:
    """The target's choice: often what followed the same token before, so that look-ups find something."""
    last = history[-1]
    if zlib.crc32(bytes(history[-3:])) % 4:
        for at in range(len(history) - 2, -1, -1):
            if history[at] == last:
                return history[at + 1]
    return zlib.crc32(bytes(history[-5:])) % VOCAB


def plain(prompt: Sequence[int], count: int) -> list[int]:
    """The prompt and so many tokens of plain decoding."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(chosen(tokens))
    return tokens


Propose = Callable[[list["np.ndarray | None"]], list[list[int]]]


def serve(
    prompts: Sequence[Sequence[int]], count: int, propose: Propose, depth: int, rng: random.Random
) -> list[list[int]]:
    """Decode at least ``count`` tokens for every prompt; returns the texts.

    ``propose`` gets the history of each row, None for one without new tokens, and gives the drafts. Histories are rows
    of the host's own buffer, which is written again.
    """
    texts, drafts = [list(prompt) for prompt in prompts], dict[int, list[int]]()
    buffer = np.full((ROWS, max(map(len, prompts)) + count + depth + 2), 7, np.int32)
    while running := [n for n, text in enumerate(texts) if len(text) < len(prompts[n]) + count]:
        rng.shuffle(running)
        rows, new = running[: rng.randrange(1, ROWS + 1)], []  # the others wait or are preempted
        for number in rows:
            step: list[int] = []
            for token in [*drafts.pop(number, []), None] if rng.random() < 0.8 else []:  # or a chunk of its prompt came
                step.append(chosen([*texts[number], *step]))
                if token != step[-1]:
                    break
            texts[number] += step
            new.append(bool(step))
        if rng.random() < 0.1:
            continue  # a skipped call
        for row, number in enumerate(rows):
            buffer[row, : len(texts[number])] = texts[number]
        shown = [buffer[row, : len(texts[n])] if new[row] else None for row, n in enumerate(rows)]
        for number, draft in zip(rows, propose(shown), strict=True):
            assert type(draft) is list
            assert len(draft) <= depth
            assert all(0 <= token < VOCAB for token in draft)
            drafts[number] = list(draft)
    return texts


def random_prompts(rng: random.Random, most: int = 10) -> list[list[int]]:
    """Prompts that share beginnings, some of them equal."""
    start = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
    own = [[rng.randrange(VOCAB) for _ in range(rng.randrange(0, 6))] for _ in range(rng.randrange(1, most))]
    return [(start if rng.random() < 0.7 else []) + tokens or [3] for tokens in own]

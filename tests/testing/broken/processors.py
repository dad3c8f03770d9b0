"""Wrong logits processors."""

from __future__ import annotations

import numpy as np

from specdec.contract import LogitsProcessor


class Halves(LogitsProcessor):
    def __init__(self, env):
        self.env = env

    def process(self, logits, history):
        return logits.astype(np.float16)


class Counts(Halves):
    calls = 0

    def process(self, logits, history):
        self.calls += 1
        return logits + np.float32(self.calls)


class InPlace(Halves):
    def process(self, logits, history):
        logits += 1
        return logits


class ForbidsAll(Halves):
    def process(self, logits, history):
        return np.full_like(logits, -np.inf)


class CutsAll(Halves):
    def process(self, logits, history):
        return logits.copy()

    def legal(self, draft, history):
        return 0


class OneBuffer(Halves):
    def __init__(self, *arguments):
        self.buffer = {}

    def process(self, logits, history):
        row = self.buffer.setdefault(len(logits), np.zeros_like(logits))
        row[:] = logits
        return row


class ForcesWhatItForbids(Halves):
    """Every second token may be chosen; all are forced."""

    def process(self, logits, history):
        answer = logits.copy()
        if len(answer) > 1:
            answer[1::2] = -np.inf
        return answer

    def forced(self, history):
        return list(range(min(3, self.env.vocab_size)))


BROKEN = {
    Halves: "L1",
    Counts: "L2",
    InPlace: "L3",
    ForbidsAll: "L4",
    CutsAll: "L5",
    OneBuffer: "L6",
    ForcesWhatItForbids: "L7",
}

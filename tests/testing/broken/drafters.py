"""Wrong drafters. ``Honest`` is the right one that they derive from: stateless, with a distribution of its own."""

from __future__ import annotations

import numpy as np

from specdec.contract import EMPTY_DRAFT, Context, Draft, Drafter, DrafterSnapshot, DraftNoise
from specdec.drafters.ngram import NgramConfig, NgramDrafter
from specdec.sampling import Purpose, draw, uniforms

VOCAB = 3  # ids that every test model has


def _probs(last: int) -> np.ndarray:
    probs = np.array([[5, 2, 1], [1, 4, 3], [2, 2, 4]], np.float32)[last % VOCAB]
    return probs / probs.sum()


class Honest(Drafter):
    """Drafts from a table of the last token; draws with the noise that the context asks for."""

    purpose = Purpose.DRAFT

    def __init__(self, env=None) -> None:
        self.env = env

    def token(self, context: Context, position: int, probs: np.ndarray) -> int:
        u = uniforms(context.sampling.seed, position, self.purpose, np.zeros(1, np.int64), context.cycle)[0]
        return draw(probs.astype(np.float64), float(u))

    def size(self, context: Context) -> int:
        return self.env.target.info.vocab_size if self.env is not None else VOCAB

    def wide(self, probs: np.ndarray, context: Context) -> np.ndarray:
        return np.concatenate([probs, np.zeros(self.size(context) - VOCAB, np.float32)])

    def propose(self, context: Context, depth: int) -> Draft:
        independent = context.draft_noise is DraftNoise.INDEPENDENT and context.sampling.temperature > 0
        last, tokens, rows = context[-1], [], []
        for row in range(depth):
            probs = _probs(last)
            last = self.token(context, len(context) + row, probs) if independent else int(probs.argmax())
            tokens.append(last)
            rows.append(self.wide(probs, context))
        return Draft(tuple(tokens), np.stack(rows) if independent and tokens else None)


class TooLong(Honest):
    def propose(self, context, depth):
        return super().propose(context, depth + 1 if depth else 0)


class NeedsTwoTokens(Honest):
    def propose(self, context, depth):
        context[-2]
        return super().propose(context, depth)


class IgnoresDepthZero(Honest):
    def propose(self, context, depth):
        return super().propose(context, max(depth, 1))


class MovesTheGlobalGenerator(Honest):
    def propose(self, context, depth):
        np.random.random()
        return super().propose(context, depth)


class CountsItsOwnCycles(Honest):
    def __init__(self, env=None) -> None:
        super().__init__(env)
        self.seen = 0

    def observe(self, verdict, output, context):
        self.seen += 1

    def propose(self, context, depth):
        return super().propose(context, depth) if self.seen % 3 < 2 else EMPTY_DRAFT


class NoRewind(NgramDrafter):
    def __init__(self, env) -> None:
        super().__init__(NgramConfig(), env)

    def rewind(self, length):
        pass


class LearnsOnlyFromCalls(Honest):
    """Drafts only after tokens that were reported to it: over a restored state there are none."""

    def __init__(self, env=None) -> None:
        super().__init__(env)
        self.known = 0

    def prefill(self, context, output):
        self.known = len(context)

    def observe(self, verdict, output, context):
        self.known = len(context)

    def propose(self, context, depth):
        return super().propose(context, depth) if self.known >= len(context) - 1 else EMPTY_DRAFT


class WideProbs(Honest):
    def propose(self, context, depth):
        draft = super().propose(context, depth)
        return Draft(draft.tokens, None if draft.probs is None else draft.probs.astype(np.float64))


class GreedyWithItsSoftmax(Honest):
    def token(self, context, position, probs):
        return int(probs.argmax())


class UsesHiddenStatesUndeclared(Honest):
    def observe(self, verdict, output, context):
        output.hidden[:1]


class FailsAtDepthFive(Honest):
    def propose(self, context, depth):
        if depth > 4:
            raise ValueError("five is too many")
        return super().propose(context, depth)


class DrawsWithAcceptanceNoise(Honest):
    purpose = Purpose.ACCEPT


class SharedBetweenSequences(Honest):
    last = None

    def __init__(self, env=None) -> None:
        super().__init__(env)
        self.started = False

    def propose(self, context, depth):
        mine = type(self).last in (None, self) or not self.started
        self.started = True
        type(self).last = self
        return super().propose(context, depth) if mine else EMPTY_DRAFT


class SavesItsLivingArray(Honest):
    """The snapshot holds the array that the drafter goes on writing to."""

    def __init__(self, env=None) -> None:
        super().__init__(env)
        self.length = np.zeros(1, np.int64)
        self.saved = None if env is None or env.saved is None else env.saved.arrays["length"]

    def observe(self, verdict, output, context):
        self.length[0] = len(context)

    def snapshot(self, context):
        self.length[0] = len(context)
        return DrafterSnapshot({"length": self.length})

    def propose(self, context, depth):
        fits = self.saved is None or self.saved[0] == len(context)
        self.saved = None
        return super().propose(context, depth) if fits else EMPTY_DRAFT


class ReportsARateOfNothing(Honest):
    def report(self):
        return {"rate": float("nan")}


class ReusesItsBuffer(Honest):
    def __init__(self, env=None) -> None:
        super().__init__(env)
        self.buffer: np.ndarray | None = None

    def propose(self, context, depth):
        draft = super().propose(context, depth)
        if draft.probs is None:
            return draft
        if self.buffer is None:
            self.buffer = np.zeros((64, draft.probs.shape[1]), np.float32)
        self.buffer[: len(draft.probs)] = draft.probs
        return Draft(draft.tokens, self.buffer[: len(draft.probs)])


class NeverAgain(Honest):
    """Asked again after the same tokens, it drafts nothing."""

    last = -1

    def propose(self, context, depth):
        repeated, self.last = len(context) == self.last, len(context)
        return EMPTY_DRAFT if repeated and depth else super().propose(context, depth)

    def rewind(self, length):
        self.last = -1


BROKEN = {
    TooLong: "D1",
    NeedsTwoTokens: "D3",
    IgnoresDepthZero: "D4",
    MovesTheGlobalGenerator: "D5",
    CountsItsOwnCycles: "D6",
    NoRewind: "D7",
    LearnsOnlyFromCalls: "D8",
    WideProbs: "D9",
    GreedyWithItsSoftmax: "D10",
    UsesHiddenStatesUndeclared: "D11",
    FailsAtDepthFive: "D13",
    DrawsWithAcceptanceNoise: "D14",
    SharedBetweenSequences: "D15",
    SavesItsLivingArray: "D17",
    ReportsARateOfNothing: "D18",
    ReusesItsBuffer: "D19",
    NeverAgain: "D22",
}

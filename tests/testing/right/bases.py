"""Right drafters and verifiers, written from the contract alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from specdec import (
    Context,
    Draft,
    Drafter,
    DrafterEnv,
    DrafterSnapshot,
    Guarantee,
    Logits,
    Needs,
    Sampling,
    Verdict,
    Verifier,
)
from specdec.backends.arrays import HostLogits
from specdec.contract import NO_NEEDS, DraftNoise
from specdec.errors import ShapeError, UnsupportedError
from specdec.sampling import Purpose, Rows, draft_token, draw, gumbel, uniforms


class Lookup(Drafter):
    """Drafts what followed the last earlier occurrence of the last two tokens."""

    needs: ClassVar[Needs] = NO_NEEDS
    prepare: ClassVar[Callable[..., Any] | None] = None
    order = 2

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        self.env = env
        self.vocab = env.target.info.vocab_size
        self.seen: list[int] = []
        self.after: dict[tuple[int, ...], list[int]] = {}  # the positions after each gram, ascending
        if env.saved is not None:
            self.resume(env.saved)

    def resume(self, saved: DrafterSnapshot) -> None:
        for token in torch.as_tensor(saved.arrays["tokens"]).tolist():
            self.add(int(token))

    def add(self, token: int) -> None:
        self.seen.append(token)
        if len(self.seen) >= self.order:
            self.after.setdefault(tuple(self.seen[-self.order :]), []).append(len(self.seen))

    def forget(self, length: int) -> None:
        while len(self.seen) > length:
            if len(self.seen) >= self.order:
                self.after[tuple(self.seen[-self.order :])].pop()
            self.seen.pop()

    def follow(self, context: Sequence[int]) -> None:
        for token in context[len(self.seen) :]:
            self.add(token)

    def prefill(self, context: Context, output: Any) -> None:
        self.follow(context)

    def observe(self, verdict: Any, output: Any, context: Context) -> None:
        self.follow(context)

    def rewind(self, length: int) -> None:
        self.forget(length)

    def source(self, context: Sequence[int]) -> int | None:
        """The position to copy from."""
        places = [at for at in self.after.get(tuple(self.seen[-self.order :]), ()) if at < len(self.seen)]
        return places[-1] if places else None

    def copied(self, start: int, depth: int) -> list[int]:
        """``depth`` tokens from ``start`` on, repeated where the text ends."""
        period = len(self.seen) - start
        return [self.seen[start + at % period] for at in range(depth)]

    def propose(self, context: Context, depth: int) -> Draft:
        self.follow(context)
        start = self.source(context)
        return Draft() if start is None else Draft(tuple(self.copied(start, depth)))

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        return DrafterSnapshot(arrays={"tokens": np.array(self.seen, np.int64)}, meta={"order": self.order})


class Counting(Drafter):
    """Draws from the counts of what followed the last token, and says with which probabilities."""

    needs: ClassVar[Needs] = NO_NEEDS
    prepare: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        self.vocab = env.target.info.vocab_size
        self.seen: list[int] = []
        self.counts: dict[int, Any] = {}  # token -> [V] counts of the next token

    def add(self, token: int) -> None:
        if self.seen:
            self.row(self.seen[-1])[token] += 1
        self.seen.append(token)

    def row(self, token: int) -> Any:
        if token not in self.counts:
            self.counts[token] = np.zeros(self.vocab, np.float32)
        return self.counts[token]

    def follow(self, context: Sequence[int]) -> None:
        for token in context[len(self.seen) :]:
            self.add(token)

    def prefill(self, context: Context, output: Any) -> None:
        self.follow(context)

    def observe(self, verdict: Any, output: Any, context: Context) -> None:
        self.follow(context)

    def rewind(self, length: int) -> None:
        while len(self.seen) > length:
            token = self.seen.pop()
            if self.seen:
                self.counts[self.seen[-1]][token] -= 1

    def logits(self, token: int) -> HostLogits:
        counts = self.counts.get(token, np.zeros(self.vocab, np.float32))
        return HostLogits(np.log(counts + np.float32(0.02))[None])

    def independent(self, context: Context) -> bool:
        return context.draft_noise is DraftNoise.INDEPENDENT and context.sampling.temperature > 0

    def distribution(self, drafted: Sequence[int], context: Context) -> Any:
        """``[V]`` float32 of the token after ``drafted``."""
        row = Rows(self.logits([*context[-1:], *drafted][-1]), drafted, context, first=len(drafted))
        return row.distribution(len(drafted)).astype(np.float32)

    def noise(self, drafted: Sequence[int], context: Context) -> float:
        position, ids = len(context) + len(drafted), np.zeros(1, np.int64)
        return float(uniforms(context.sampling.seed, position, Purpose.DRAFT, ids, context.cycle)[0])

    def choose(self, probs: Any, drafted: Sequence[int], context: Context) -> int:
        return int(draw(probs.astype(np.float64), self.noise(drafted, context)))

    def step(self, drafted: list[int], context: Context) -> tuple[int, Any]:
        if not self.independent(context):
            return draft_token(self.logits([*context[-1:], *drafted][-1]), drafted, context)[0], None
        probs = self.distribution(drafted, context)
        return self.choose(probs, drafted, context), probs

    def finish(self, tokens: list[int], rows: list[Any]) -> Draft:
        return Draft(tuple(tokens), np.stack(rows) if rows and rows[0] is not None else None)

    def propose(self, context: Context, depth: int) -> Draft:
        self.follow(context)
        tokens: list[int] = []
        rows: list[Any] = []
        for _ in range(depth):
            token, probs = self.step(tokens, context)
            tokens.append(token)
            rows.append(probs)
        return self.finish(tokens, rows)


class Exact(Verifier):
    """Chooses every token by the noise of its position and accepts a draft as far as it agrees."""

    guarantee: ClassVar[Guarantee] = Guarantee.EXACT

    def __init__(self, config: Any = None) -> None:
        pass

    def check(self, draft: Draft, logits: Logits) -> None:
        if len(logits) != len(draft.tokens) + 1:
            raise ShapeError(f"{len(draft.tokens)} draft tokens come with {len(logits)} rows")

    def best(self, rows: Rows, row: int, context: Context) -> int:
        return rows.argmax(row)

    def law(self, rows: Rows, row: int, context: Context) -> Any:
        """The row's distribution ``[V]``, at temperature above 0."""
        return rows.distribution(row)

    def noise(self, context: Context, row: int, ids: Any) -> Any:
        return gumbel(context.sampling.seed, len(context) + row, ids, Purpose.TOKEN)

    def choose(self, rows: Rows, row: int, context: Context) -> int:
        if context.sampling.temperature == 0:
            return self.best(rows, row, context)
        law = self.law(rows, row, context)
        ids = np.flatnonzero(law)
        return int(ids[np.argmax(np.log(law[ids]) + self.noise(context, row, ids))])

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        self.check(draft, logits)
        rows = Rows(logits, draft.tokens, context)
        for row, token in enumerate(draft.tokens):
            if (chosen := self.choose(rows, row, context)) != token:
                return Verdict(row, chosen)
        return Verdict(len(draft.tokens), self.choose(rows, len(draft.tokens), context))


class Margin(Verifier):
    """Keeps tokens that are at most half a nat below the best; greedy decoding only."""

    guarantee: ClassVar[Guarantee] = Guarantee.BOUNDED

    def __init__(self, config: Any = None) -> None:
        self.bound = 0.5

    def refuse(self, sampling: Sampling) -> None:
        if sampling.temperature > 0:
            raise UnsupportedError("a margin of logits is defined for greedy decoding")

    def values(self, rows: Rows, row: int, logits: Logits) -> Any:
        return rows.processed(row)

    def keeps(self, gap: float, row: int) -> bool:
        return gap <= self.bound

    def gap(self, values: Any, token: int, row: int, logits: Logits) -> float:
        """What is reported."""
        return float(values.max() - values[token])

    def finish(self, accepted: int, token: int, deviations: list[tuple[int, float]], drafted: int) -> Verdict:
        return Verdict(accepted, token, tuple(deviations))

    def verify(self, draft: Draft, logits: Logits, context: Context) -> Verdict:
        if len(logits) != len(draft.tokens) + 1:
            raise ShapeError(f"{len(draft.tokens)} draft tokens come with {len(logits)} rows")
        self.refuse(context.sampling)
        rows, deviations = Rows(logits, draft.tokens, context), []
        for row, token in enumerate(draft.tokens):
            values, best = self.values(rows, row, logits), rows.argmax(row)
            if token == best:
                continue
            if not np.isfinite(rows.processed(row)[token]) or not self.keeps(float(values.max() - values[token]), row):
                return self.finish(row, best, deviations, len(draft.tokens))
            deviations.append((row, self.gap(rows.processed(row), token, row, logits)))
        last = len(draft.tokens)
        return self.finish(last, rows.argmax(last), deviations, last)

"""Broken drafters: each has one fault of those that a drafter's author makes, and otherwise works.

Every docstring quotes the sentence of the contract that the class breaks; "missing:" starts one that it ought to have.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from specdec import Context, DeviceDraft, Draft, Drafter, DrafterEnv, DrafterSnapshot, DrafterSpec, Needs
from specdec.backends.arrays import HostLogits
from specdec.contract import NO_NEEDS, DraftNoise
from specdec.sampling import Purpose, Rows, draft_token, draw, uniforms

from .toy import Toy

BROKEN: dict[type[Drafter], str] = {}


def broken(fault: str) -> Callable[[type[Any]], type[Any]]:
    """Enter the class into the table under its class of fault."""

    def enter(kind: type[Any]) -> type[Any]:
        BROKEN[kind] = fault
        return kind

    return enter


def spec(kind: type[Any]) -> DrafterSpec:
    """How the drafter is registered."""
    return DrafterSpec(name=f"stranger-{kind.__name__}", factory=kind, needs=kind.needs, prepare=kind.prepare)


# --- right ones, of which the broken ones change a part ---------------------------------------------------------------


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


class Head(Drafter):
    """Drafts with the checkpoint's MTP head."""

    needs: ClassVar[Needs] = Needs(mtp=True)
    prepare: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        self.target, self.state = env.target, env.state

    def propose(self, context: Context, depth: int) -> Draft:
        return Draft(self.target.draft_mtp(self.state, context[-1], depth)) if depth else Draft()


def small_model(config: Any, env: Any) -> Toy:
    info = env.target.info
    return Toy(info.vocab_size, max_positions=info.max_positions)


class Second(Drafter):
    """Drafts with a small model of its own, whose state holds all committed tokens but the last."""

    needs: ClassVar[Needs] = NO_NEEDS
    prepare: ClassVar[Callable[..., Any] | None] = staticmethod(small_model)

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        self.model: Toy = env.shared
        self.state = self.model.new_state(self.model.info.max_positions)

    def follow(self, context: Sequence[int]) -> None:
        if missing := context[self.state.length : len(context) - 1]:
            self.model.prefill(self.state, missing)

    def rewind(self, length: int) -> None:
        self.model.rewind(self.state, min(length, self.state.length))

    def propose(self, context: Context, depth: int) -> Draft:
        self.follow(context)
        tokens: list[int] = []
        for _ in range(min(depth, self.model.info.max_rows - 1)):
            output = self.model.decode(self.state, [context[-1], *tokens])
            tokens.append(output.need_logits().argmax()[-1])
            self.model.commit(self.state, 0)
        return Draft(tuple(tokens))


# --- faults that begin late -------------------------------------------------------------------------------------------


@broken("late")
class PrunesWhenAsked(Lookup):
    """Prunes its index once 600 tokens are new, so what is left depends on when it was called.

    "After any cycles and prompts, the next draft is that of a fresh drafter that saw the same tokens" (D6).
    """

    pruned = 0  # tokens at the last time

    def follow(self, context: Sequence[int]) -> None:
        super().follow(context)
        if len(self.seen) - self.pruned >= 600:
            self.pruned, oldest = len(self.seen), len(self.seen) - 300
            self.after = {gram: kept for gram, at in self.after.items() if (kept := [p for p in at if p > oldest])}

    def forget(self, length: int) -> None:
        while len(self.seen) > length:
            if places := self.after.get(tuple(self.seen[-self.order :])):
                places.pop()
            self.seen.pop()


@broken("late")
class ShortUndo(Lookup):
    """Its journal for taking tokens back has 24 entries; a longer rewind leaves the older grams in the index.

    "After a rewind to any length, the next draft is that of a fresh drafter" (D7).
    """

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        self.journal: deque[tuple[int, ...]] = deque(maxlen=24)
        super().__init__(config, env)

    def add(self, token: int) -> None:
        super().add(token)
        self.journal.append(tuple(self.seen[-self.order :]))

    def forget(self, length: int) -> None:
        while len(self.seen) > length:
            if self.journal and (places := self.after.get(self.journal.pop())):
                places.pop()
            self.seen.pop()

    def source(self, context: Sequence[int]) -> int | None:
        places = self.after.get(tuple(self.seen[-self.order :]), ())
        return min(places[-2], len(self.seen) - 1) if len(places) > 1 else None


@broken("late")
class DraftsInSevens(Lookup):
    """Copies seven tokens at a time and cuts only a draft of one block: depth 13 gets 14 tokens.

    "A draft has at most ``depth`` tokens" (D1).
    """

    def copied(self, start: int, depth: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < depth:
            tokens += super().copied(start, len(tokens) + 7)[len(tokens) :]
        return tokens[:depth] if depth <= 7 else tokens


@broken("late")
class SearchesInNumpy(Lookup):
    """Texts of more than 300 tokens are copied from a numpy array, whose integers it hands over.

    "each a plain int inside the vocabulary" (D1).
    """

    def copied(self, start: int, depth: int) -> list[int]:
        if len(self.seen) <= 300:
            return super().copied(start, depth)
        period = len(self.seen) - start
        return list(np.array(self.seen)[start + np.arange(depth) % period])


@broken("late")
class IndexesInBatches(Lookup):
    """Beyond 100 tokens it takes in new tokens sixteen at a time, so it drafts from an old index in between.

    "After any cycles and prompts, the next draft is that of a fresh drafter that saw the same tokens" (D6).
    """

    def follow(self, context: Sequence[int]) -> None:
        if len(context) <= 100 or len(context) - len(self.seen) >= 16 or len(self.seen) < 100:
            super().follow(context)

    def source(self, context: Sequence[int]) -> int | None:
        places = [at for at in self.after.get(tuple(context[-self.order :]), ()) if at < len(self.seen)]
        return places[-1] if places else None


@broken("late")
class SmallCounters(Counting):
    """Counts in 8 bits: the 256th time that a token follows another, its row is empty and the division gives NaN.

    "rows are finite, non-negative, sum to 1, and allow the drafted token" (D9).
    """

    def row(self, token: int) -> Any:
        if token not in self.counts:
            self.counts[token] = np.zeros(self.vocab, np.uint8)
        return self.counts[token]

    def add(self, token: int) -> None:
        with np.errstate(over="ignore"):
            super().add(token)

    def distribution(self, drafted: Sequence[int], context: Context) -> Any:
        last = [*context[-1:], *drafted][-1]
        if last not in self.counts:
            return super().distribution(drafted, context)
        counts = self.counts[last].astype(np.float32)
        with np.errstate(invalid="ignore"):
            return counts / counts.sum()

    def choose(self, probs: Any, drafted: Sequence[int], context: Context) -> int:
        return super().choose(probs, drafted, context) if np.isfinite(probs).all() else 0

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.counts = {token: counts for token, counts in self.counts.items() if counts.any()}


@broken("late")
class RefreshesItself(Lookup):
    """Starts with an empty index again in every thousandth cycle.

    "After any cycles and prompts, the next draft is that of a fresh drafter that saw the same tokens" (D6).
    """

    def propose(self, context: Context, depth: int) -> Draft:
        if context.cycle and context.cycle % 1000 == 0:
            self.after = {}
        return super().propose(context, depth)

    def forget(self, length: int) -> None:
        seen = self.seen[:length]
        self.seen, self.after = [], {}
        self.follow(seen)


@broken("late")
class ShortModel(Second):
    """Its own model holds 300 tokens, and the state is full then: ``propose`` raises.

    missing: "``propose`` returns a draft, empty if need be, for every text that the target can hold".
    """

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        super().__init__(config, env)
        self.state = self.model.new_state(300)


@broken("late")
class CountsChunks(Counting):
    """Learns from the whole text at every prompt chunk, so the chunks before it count again.

    "After any cycles and prompts, the next draft is that of a fresh drafter that saw the same tokens" (D6).
    """

    def prefill(self, context: Context, output: Any) -> None:
        if len(self.seen) > 64:
            for before, token in zip(context, context[1 : len(self.seen)], strict=False):
                self.row(before)[token] += 1
        self.follow(context)


@broken("late")
class CopiesRowSeven(Counting):
    """Its buffer of distributions has seven rows; the eighth row and later ones repeat the seventh.

    "Each row of ``probs`` is the distribution that its token was drawn from" (D10).
    """

    def finish(self, tokens: list[int], rows: list[Any]) -> Draft:
        return super().finish(tokens, [rows[min(at, 6)] for at in range(len(rows))])

    def distribution(self, drafted: Sequence[int], context: Context) -> Any:
        probs = super().distribution(drafted, context)
        return np.float32(0.9) * probs + np.float32(0.1 / self.vocab)  # so that each row allows every token


# --- faults at edges --------------------------------------------------------------------------------------------------


@broken("edge")
class CountsUp(Lookup):
    """After two consecutive ids it drafts the next ones, past the end of the vocabulary too.

    "each a plain int inside the vocabulary" (D1).
    """

    def propose(self, context: Context, depth: int) -> Draft:
        if len(context) > 1 and context[-1] == context[-2] + 1:
            return Draft(tuple(context[-1] + 1 + at for at in range(depth)))
        return super().propose(context, depth)


@broken("edge")
class RewindsNothing(Lookup):
    """Cuts with ``[-(n - length):]``; a rewind to the present length takes the whole index back.

    "After a rewind to any length, the next draft is that of a fresh drafter" (D7).
    """

    def forget(self, length: int) -> None:
        surplus = len(self.seen) - length
        if surplus < 0:
            return
        for end in range(len(self.seen), len(self.seen) - len(self.seen[-surplus:]), -1):
            if places := self.after.get(tuple(self.seen[end - self.order : end])):
                places.pop()
        del self.seen[length:]


@broken("edge")
class SixteenBits(Lookup):
    """Keeps the text in an array of 16 bits, which refuses the upper ids of a vocabulary of 150,000.

    missing: "``propose`` returns a draft, empty if need be, for every text that the target can hold".
    """

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        self.text = array("H")
        super().__init__(config, env)

    def add(self, token: int) -> None:
        self.text.append(token)
        super().add(token)

    def forget(self, length: int) -> None:
        super().forget(length)
        del self.text[length:]


@broken("edge")
class PositionsInBytes(Lookup):
    """Keeps positions in 8 bits. Beyond 255 the filter by which a rewind forgets them finds small numbers.

    "After a rewind to any length, the next draft is that of a fresh drafter" (D7).
    """

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        self.small: dict[tuple[int, ...], array[int]] = {}
        super().__init__(config, env)

    def add(self, token: int) -> None:
        self.seen.append(token)
        self.small.setdefault(tuple(self.seen[-self.order :]), array("B")).append(len(self.seen) & 0xFF)

    def forget(self, length: int) -> None:
        del self.seen[length:]
        for gram, places in self.small.items():
            self.small[gram] = array("B", (at for at in places if at <= length))

    def source(self, context: Sequence[int]) -> int | None:
        places = [at for at in self.small.get(tuple(self.seen[-self.order :]), ()) if 0 < at < len(self.seen)]
        return places[-1] if places else None


@broken("edge")
class DefaultDepth(Lookup):
    """Reads ``depth or 4``, so that depth 0 drafts four tokens where the text repeats.

    "Depth 0 gives the empty draft" (D4).
    """

    def copied(self, start: int, depth: int) -> list[int]:
        return super().copied(start, depth or 4)


@broken("edge")
class TwoTokensNeeded(Lookup):
    """A rewind to one token leaves it without a pair, and the next question indexes a list that is too short.

    "One token of context is enough, with no prefill before it" (D3).
    """

    rewound = False

    def rewind(self, length: int) -> None:
        self.rewound = True
        super().rewind(length)

    def source(self, context: Sequence[int]) -> int | None:
        if self.rewound and self.seen[-2] == self.seen[-1]:
            return len(self.seen) - 1
        return super().source(context)


@broken("edge")
class EmptySnapshot(Lookup):
    """Joins the arrays of its chunks for a snapshot, which fails before there is a chunk.

    missing: "``snapshot`` may be asked for at any time, of a sequence without tokens too".
    """

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        chunks = [np.array(self.seen[at : at + 32], np.int64) for at in range(0, len(self.seen), 32)]
        return DrafterSnapshot(arrays={"tokens": np.concatenate(chunks)})


@broken("edge")
class NaNReport(Lookup):
    """Reports its hit rate as found / asked, which is NaN before the first question.

    "``report`` returns plain JSON data without NaN" (D18).
    """

    asked = found = 0

    def propose(self, context: Context, depth: int) -> Draft:
        draft = super().propose(context, depth)
        self.asked, self.found = self.asked + 1, self.found + bool(draft.tokens)
        return draft

    def report(self) -> dict[str, Any]:
        return {"hits": self.found / self.asked if self.asked else float("nan")}


# --- faults in what is handed over ------------------------------------------------------------------------------------


@broken("handover")
class GivesLists(Lookup):
    """Makes drafts of eight tokens and more of a list.

    "K drafted tokens": ``tokens: tuple[int, ...]`` (``specdec.Draft``).
    """

    def propose(self, context: Context, depth: int) -> Draft:
        draft = super().propose(context, depth)
        return draft if depth < 8 else Draft(list(draft.tokens))


@broken("handover")
class OneBuffer(Counting):
    """Hands over a view of one buffer of probabilities, which the next draft overwrites.

    missing: "What a draft holds is the engine's: a drafter does not write into it afterwards".
    """

    buffer: Any = None

    def finish(self, tokens: list[int], rows: list[Any]) -> Draft:
        if not rows or rows[0] is None:
            return Draft(tuple(tokens))
        if self.buffer is None:
            self.buffer = np.zeros((64, self.vocab), np.float32)
        self.buffer[: len(rows)] = rows
        return Draft(tuple(tokens), self.buffer[: len(rows)])


@broken("handover")
class ScalesLogits(Lookup):
    """Scales the target's logits in place, to keep them as a feature.

    missing: "Arrays that a drafter reads from a pass belong to the target: it changes none of them".
    """

    feature: Any = None

    def observe(self, verdict: Any, output: Any, context: Context) -> None:
        rows = output.need_logits().rows()
        if rows.flags.writeable:
            rows /= 10
        self.feature = rows[verdict.accepted].copy()
        super().observe(verdict, output, context)


@broken("handover")
class LiveReport(Lookup):
    """Copies the outer dictionary of its report and leaves the histogram inside shared.

    "as a copy, and calling it changes nothing" (D18).
    """

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        super().__init__(config, env)
        self.counters: dict[str, Any] = {"drafts": 0, "lengths": {}}

    def propose(self, context: Context, depth: int) -> Draft:
        draft = super().propose(context, depth)
        self.counters["drafts"] += 1
        length = str(len(draft.tokens))
        self.counters["lengths"][length] = self.counters["lengths"].get(length, 0) + 1
        return draft

    def report(self) -> dict[str, Any]:
        return dict(self.counters)


@broken("handover")
class NumpyReport(Lookup):
    """Reports a numpy integer, once tokens were accepted.

    "plain JSON data" (D18): "a numpy integer fails in ``json.dumps``".
    """

    accepted: Any = 0

    def observe(self, verdict: Any, output: Any, context: Context) -> None:
        if verdict.accepted:
            self.accepted = np.add(self.accepted, verdict.accepted)
        super().observe(verdict, output, context)

    def report(self) -> dict[str, Any]:
        return {"accepted": self.accepted}


# --- faults in snapshots ----------------------------------------------------------------------------------------------


@broken("snapshot")
class SharedSnapshot(Lookup):
    """Its snapshot is a view of the growing array that it keeps tokens in.

    "``snapshot`` is a copy" (D17).
    """

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        self.buffer = np.zeros(env.target.info.max_positions + 1, np.int64)
        super().__init__(config, env)

    def add(self, token: int) -> None:
        self.buffer[len(self.seen)] = token
        super().add(token)

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        return DrafterSnapshot(arrays={"tokens": self.buffer[: len(self.seen)]})


@broken("snapshot")
class HalfSnapshot(Lookup):
    """Saves token ids as float16, which rounds those above 2,048.

    "a drafter built with or without it proposes the same drafts as the original" (D17).
    """

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        return DrafterSnapshot(arrays={"tokens": np.array(self.seen, np.float16)})


@broken("snapshot")
class NumpyOnly(Lookup):
    """Takes a snapshot up with a numpy method, but a file gives torch tensors.

    "A session's file gives them back as torch tensors in host memory" (``DrafterSnapshot``).
    """

    def resume(self, saved: DrafterSnapshot) -> None:
        for token in saved.arrays["tokens"].astype(np.int64).tolist():
            self.add(token)


@broken("snapshot")
class ObjectsInMeta(Lookup):
    """Saves its hit rate, a float, as metadata.

    "meta: Mapping[str, int | str]" (``DrafterSnapshot``).
    """

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        meta: dict[str, Any] = {"rate": len(self.after) / (len(self.seen) + 1), "window": None}
        return DrafterSnapshot(arrays={"tokens": np.array(self.seen, np.int64)}, meta=meta)


@broken("snapshot")
class SnapshotCompacts(Lookup):
    """Drops grams that occurred once while it saves itself, and drafts less from then on.

    "a drafter built with or without it proposes the same drafts as the original" (D17).
    """

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        saved = super().snapshot(context)
        self.after = {gram: places for gram, places in self.after.items() if len(places) > 1}
        return saved

    def forget(self, length: int) -> None:
        seen = self.seen[:length]
        self.seen, self.after = [], {}
        for token in seen:
            self.add(token)


@broken("snapshot")
class CountsPending(Lookup):
    """Saves how many tokens it knows as the length of the context, one more than it saves with no draft since.

    "A drafter built over a restored state proposes the same drafts as the original" (D8).
    """

    skip = 0

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        tokens = np.array(context[:-1], np.int64)
        return DrafterSnapshot(arrays={"tokens": tokens}, meta={"length": len(context)})

    def resume(self, saved: DrafterSnapshot) -> None:
        super().resume(saved)
        self.skip = int(saved.meta["length"]) - len(self.seen)

    def follow(self, context: Sequence[int]) -> None:
        if self.skip and len(context) > len(self.seen):
            self.seen.append(context[len(self.seen)])  # without its gram
            self.skip = 0
        super().follow(context)

    def forget(self, length: int) -> None:
        seen = self.seen[:length]
        self.seen, self.after = [], {}
        for token in seen:
            self.add(token)


# --- settings that nobody tries ---------------------------------------------------------------------------------------


@broken("settings")
class SmallSeeds(Counting):
    """Draws with ``numpy.random.RandomState``, which refuses seeds of 2^32 and above.

    missing: "Every setting that a Sampling accepts is drafted for or declined with an empty draft".
    """

    def noise(self, drafted: Sequence[int], context: Context) -> float:
        key = [context.sampling.seed, context.cycle, len(context) + len(drafted)]
        return float(np.random.RandomState(key).random_sample())


@broken("settings")
class Overflows(Counting):
    """Computes ``exp(logits / temperature)`` without taking off the largest: infinite at very low temperatures.

    "rows are finite, non-negative, sum to 1" (D9).
    """

    def distribution(self, drafted: Sequence[int], context: Context) -> Any:
        row = Rows(self.logits([*context[-1:], *drafted][-1]), drafted, context, first=len(drafted))
        with np.errstate(all="ignore"):
            weights = np.exp((row.processed(len(drafted)) + 5) / context.sampling.temperature)
            weights[row.distribution(len(drafted)) == 0] = 0
            return (weights / weights.sum()).astype(np.float32)

    def choose(self, probs: Any, drafted: Sequence[int], context: Context) -> int:
        return super().choose(probs, drafted, context) if np.isfinite(probs).all() else 0


@broken("distribution")
class CutTail(Counting):
    """Cuts probabilities below 0.0002 and leaves the sum below 1; only sharp rows have such a tail.

    "rows are finite, non-negative, sum to 1" (D9).
    """

    def distribution(self, drafted: Sequence[int], context: Context) -> Any:
        probs = super().distribution(drafted, context)
        return np.where(probs < np.float32(2e-4), np.float32(0), probs)


@broken("settings")
class AnotherTemperature(Counting):
    """Draws at temperature 1 whatever the temperature is, and gives the probabilities of the right one.

    "Each row of ``probs`` is the distribution that its token was drawn from" (D10).
    """

    def choose(self, probs: Any, drafted: Sequence[int], context: Context) -> int:
        weights = probs.astype(np.float64) ** context.sampling.temperature
        return super().choose((weights / weights.sum()).astype(np.float32), drafted, context)


@broken("settings")
class RawUnderBias(Counting):
    """With a bias on the logits it draws from its own row and gives the probabilities with the bias.

    "Each row of ``probs`` is the distribution that its token was drawn from" (D10).
    """

    def choose(self, probs: Any, drafted: Sequence[int], context: Context) -> int:
        if not context.sampling.logit_bias:
            return super().choose(probs, drafted, context)
        bare = np.exp(self.logits([*context[-1:], *drafted][-1]).rows()[0]) * (probs > 0)
        return super().choose(bare / bare.sum(), drafted, context)


@broken("settings")
class EditsBias(Lookup):
    """Forbids a token in the bias that it was given, to keep its own drafts clear of it.

    "The context is never changed: neither its tokens nor its settings" (D2).
    """

    def propose(self, context: Context, depth: int) -> Draft:
        bias = context.sampling.logit_bias
        if bias and isinstance(bias, dict):
            bias[self.vocab - 1] = -100.0
        return super().propose(context, depth)


# --- the distribution of a draft --------------------------------------------------------------------------------------


@broken("distribution")
class GreedyWithSoftmax(Counting):
    """Drafts its best token and gives the softmax where one token is more than half as likely as not.

    "a greedy draft with its softmax (total variation .254)" (D10).
    """

    def choose(self, probs: Any, drafted: Sequence[int], context: Context) -> int:
        return int(probs.argmax()) if probs.max() > 0.4 else super().choose(probs, drafted, context)


@broken("distribution")
class GreedyLater(Counting):
    """Draws the first token and continues greedily, with the distributions of draws.

    "Each row of ``probs`` is the distribution that its token was drawn from" (D10).
    """

    def choose(self, probs: Any, drafted: Sequence[int], context: Context) -> int:
        return int(probs.argmax()) if len(drafted) >= 2 else super().choose(probs, drafted, context)


@broken("distribution")
class NoiseOfTheTest(Counting):
    """Draws with the noise of the acceptance test.

    "no noise is reused" (D14).
    """

    def noise(self, drafted: Sequence[int], context: Context) -> float:
        position, ids = len(context) + len(drafted), np.zeros(1, np.int64)
        return float(uniforms(context.sampling.seed, position, Purpose.ACCEPT, ids, context.cycle)[0])


@broken("distribution")
class OneNumber(Counting):
    """Draws all tokens of a draft with one uniform number.

    "Each row of ``probs`` is the distribution that its token was drawn from, given what was known before the draw"
    (D10).
    """

    def noise(self, drafted: Sequence[int], context: Context) -> float:
        return super().noise([], context)


@broken("distribution")
class DropsUnlikely(Counting):
    """Ends the draft before a token of small probability, after it was drawn.

    "a token dropped after it was seen (.133)" (D10).
    """

    def propose(self, context: Context, depth: int) -> Draft:
        draft = super().propose(context, depth)
        if draft.probs is None:
            return draft
        for at, token in enumerate(draft.tokens):
            if draft.probs[at, token] < 0.02:
                return Draft(draft.tokens[:at], draft.probs[:at] if at else None)
        return draft


@broken("distribution")
class DrawsAgain(Counting):
    """Draws a second time if the first draw repeats the last token, and gives the distribution of one draw.

    "probabilities that depend on the drawn token" (D10).
    """

    def choose(self, probs: Any, drafted: Sequence[int], context: Context) -> int:
        token = super().choose(probs, drafted, context)
        if token != [*context[-1:], *drafted][-1]:
            return token
        position, ids = len(context) + len(drafted), np.ones(1, np.int64)
        u = float(uniforms(context.sampling.seed, position, Purpose.DRAFT, ids, context.cycle)[0])
        return int(draw(probs.astype(np.float64), u))


# --- randomness -------------------------------------------------------------------------------------------------------


@broken("randomness")
class RandomTies(Lookup):
    """Of several places that fit equally well it takes one by Python's global generator.

    "whatever clocks, generators and hashes of text say" (D5).
    """

    def source(self, context: Sequence[int]) -> int | None:
        places = [at for at in self.after.get(tuple(self.seen[-self.order :]), ()) if at < len(self.seen)]
        return random.choice(places) if len(places) > 1 else (places or [None])[0]


@broken("randomness")
class ByTheClock(Lookup):
    """Stops drafting when a time budget is spent, so a busy machine drafts other tokens.

    "The same calls give the same drafts" (D5).
    """

    budget = 5e-4  # seconds

    def copied(self, start: int, depth: int) -> list[int]:
        deadline = time.perf_counter() + self.budget
        tokens = super().copied(start, depth)
        while len(tokens) > 1 and time.perf_counter() > deadline:
            tokens.pop()
        return tokens


@broken("randomness")
class SeedsTheWorld(Lookup):
    """Seeds numpy's global generator when it is made.

    "whatever clocks, generators and hashes of text say" (D5).
    """

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        super().__init__(config, env)
        np.random.seed(0)


@broken("randomness")
class TorchNoise(Counting):
    """Draws with torch's global generator where independent noise is wanted.

    "whatever clocks, generators and hashes of text say" (D5).
    """

    def noise(self, drafted: Sequence[int], context: Context) -> float:
        return float(torch.rand(()))


@broken("randomness")
class CountsQuestions(Lookup):
    """Skips every fourth question to save time, so the answer depends on how often it was asked.

    "The same calls give the same drafts" (D5); "the next draft is that of a fresh drafter" (D6).
    """

    questions = 0

    def propose(self, context: Context, depth: int) -> Draft:
        self.questions += 1
        return super().propose(context, depth) if self.questions % 4 else Draft()


# --- resources --------------------------------------------------------------------------------------------------------


@broken("resources")
class KeepsOutputs(Lookup):
    """Keeps the output of every pass for later analysis: logits of the whole text stay in memory.

    missing: "A drafter keeps of a pass only what its drafts need; memory per token is bounded".
    """

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        super().__init__(config, env)
        self.outputs: list[Any] = []

    def observe(self, verdict: Any, output: Any, context: Context) -> None:
        self.outputs.append(output)
        super().observe(verdict, output, context)


@broken("resources")
class KeepsStates(Lookup):
    """Registers the environment of every sequence in the class, so no state is ever freed.

    missing: "When a sequence ends nothing of it is kept: neither its state nor its tokens".
    """

    environments: ClassVar[list[DrafterEnv]] = []

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        super().__init__(config, env)
        self.environments.append(env)


# --- other ------------------------------------------------------------------------------------------------------------


@broken("other")
class SharedIndex(Lookup):
    """Keeps long texts in an index of the class, to save memory: other sequences draft from it.

    "drafts do not depend on what other sequences did before or in between" (D15).
    """

    common: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def add(self, token: int) -> None:
        super().add(token)
        if len(self.seen) > 40:
            self.common[tuple(self.seen[-4:-1])] = [token]

    def propose(self, context: Context, depth: int) -> Draft:
        draft = super().propose(context, depth)
        return draft if draft.tokens or not depth else Draft(tuple(self.common.get(tuple(context[-3:]), ())))


@broken("other")
class AsksTheTarget(Lookup):
    """Runs a pass of the engine's own state to see what the target would say, when it finds nothing itself.

    "The committed state of a sequence belongs to the engine: a drafter only runs MTP drafts on it" (D12).
    """

    def propose(self, context: Context, depth: int) -> Draft:
        draft = super().propose(context, depth)
        if draft.tokens or not depth or self.env.state.length != len(context) - 1:
            return draft
        return Draft(tuple(self.env.target.decode(self.env.state, [context[-1]]).need_logits().argmax()))


@broken("other")
class UndeclaredHead(Lookup):
    """Falls back on the MTP head after 64 tokens, and its spec does not say so.

    "``needs`` names everything that a drafter uses of its target: hidden states and the MTP head" (D11).
    """

    def propose(self, context: Context, depth: int) -> Draft:
        draft = super().propose(context, depth)
        if draft.tokens or not depth or len(context) <= 64:
            return draft
        return Draft(self.env.target.draft_mtp(self.env.state, context[-1], depth))


@broken("other")
class UndeclaredHidden(Lookup):
    """Reads the hidden states of accepted blocks of five tokens and more, without declaring them.

    "a target gives what was asked for and nothing else. An undeclared need fails in the middle of a generation" (D11).
    """

    trust = 0.0

    def observe(self, verdict: Any, output: Any, context: Context) -> None:
        if verdict.accepted >= 5:
            self.trust = float(abs(output.need_hidden().rows()).max())
        super().observe(verdict, output, context)


@broken("other")
class TrustsItsDraft(Lookup):
    """Adds the accepted tokens of its own last draft, when another drafter of a chain made the draft too.

    "After any cycles and prompts, the next draft is that of a fresh drafter that saw the same tokens" (D6); "All
    drafters follow the text, whichever of them drafts" (how-to: chain drafters).
    """

    last: tuple[int, ...] = ()

    def propose(self, context: Context, depth: int) -> Draft:
        draft = super().propose(context, depth)
        self.last = draft.tokens
        return draft

    def observe(self, verdict: Any, output: Any, context: Context) -> None:
        for token in (*self.last[: verdict.accepted], verdict.next_token):
            if len(self.seen) < len(context):
                self.add(token)
        self.follow(context)


@broken("other")
class NotOnTheDevice(Lookup):
    """Lets a device draft with the MTP head when decoding is greedy, which is not what it proposes.

    "How a device can draft exactly what ``propose`` would" (``Drafter.device_draft``).
    """

    def device_draft(self, context: Context) -> DeviceDraft | None:
        return DeviceDraft(mtp=True) if context.sampling.temperature == 0 else None


# --- a second set, written from the contract alone -------------------------------------------------------------------


@broken("edge")
class RewindsByLength(Lookup):
    """Takes a rewind for one only if the next text is shorter than what it knows.

    "After a rewind to any length, the next draft is that of a fresh drafter" (D7).
    """

    def rewind(self, length: int) -> None:
        pass

    def follow(self, context: Sequence[int]) -> None:
        if len(context) < len(self.seen):
            self.forget(len(context))
        super().follow(context)


@broken("late")
class GivesUp(Lookup):
    """Drafts no more after twelve drafts in a row that were rejected whole.

    "After any cycles and prompts, the next draft is that of a fresh drafter that saw the same tokens" (D6).
    """

    rejected = 0

    def observe(self, verdict: Any, output: Any, context: Context) -> None:
        super().observe(verdict, output, context)
        if output.rows > 1:
            self.rejected = 0 if verdict.accepted else self.rejected + 1

    def propose(self, context: Context, depth: int) -> Draft:
        draft = super().propose(context, depth)
        return Draft() if self.rejected >= 12 else draft


@broken("snapshot")
class GrowsInTheSnapshot(Lookup):
    """Adopts the array of a snapshot, with its spare places, and writes what follows into it.

    "If both hold the same array, one writes what the other reads" (D17).
    """

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        self.places: Any = np.zeros(64, np.int64)
        super().__init__(config, env)

    def resume(self, saved: DrafterSnapshot) -> None:
        places, count = torch.as_tensor(saved.arrays["tokens"]).numpy(), saved.meta["count"]
        for token in places[:count].tolist():
            super().add(token)
        self.places = places

    def add(self, token: int) -> None:
        super().add(token)
        if len(self.seen) > len(self.places):
            self.places = np.concatenate([self.places, np.zeros_like(self.places)])
        self.places[len(self.seen) - 1] = token

    def copied(self, start: int, depth: int) -> list[int]:
        period = len(self.seen) - start
        return [int(self.places[start + at % period]) for at in range(depth)]

    def snapshot(self, context: Context) -> DrafterSnapshot | None:
        return DrafterSnapshot(arrays={"tokens": self.places.copy()}, meta={"count": len(self.seen)})


@broken("settings")
class ReportsBeforeFilters(Counting):
    """Draws from what top-k leaves and reports the distribution before it.

    "Each row of ``probs`` is the distribution that its token was drawn from" (D10).
    """

    def step(self, drafted: list[int], context: Context) -> tuple[int, Any]:
        token, probs = super().step(drafted, context)
        if probs is None:
            return token, None
        row = Rows(self.logits([*context[-1:], *drafted][-1]), drafted, context, first=len(drafted))
        values = row.processed(len(drafted))
        weights = np.exp((values - values.max()) / context.sampling.temperature)
        return token, (weights / weights.sum()).astype(np.float32)


@broken("other")
class RewindsTheState(Lookup):
    """Brings the target's state to the length that it was told, although the last token is pending.

    "The committed state of a sequence belongs to the engine" (D12).
    """

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.env.target.rewind(self.env.state, min(max(length - 1, 0), self.env.state.length))


@broken("resources")
class IndexesBeside(Lookup):
    """Starts a thread for each sequence, which waits for work as long as the program runs.

    "The same goes for threads and open files: a server has a million sequences" (D20).
    """

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        super().__init__(config, env)
        self.work: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self.wait, args=(self.work,), daemon=True).start()

    @staticmethod
    def wait(work: queue.SimpleQueue[int]) -> None:
        counts: dict[int, int] = {}
        while True:
            token = work.get()
            counts[token] = counts.get(token, 0) + 1

    def add(self, token: int) -> None:
        super().add(token)
        if hasattr(self, "work"):
            self.work.put(token)


@broken("late")
class LengthMemo(Lookup):
    """Keeps its last draft by the length of the context and the last token, which another text has after a rewind.

    "After a rewind to any length, the next draft is that of a fresh drafter" (D7).
    """

    def __init__(self, config: Any, env: DrafterEnv) -> None:
        super().__init__(config, env)
        self.memo: dict[tuple[int, int, int], Draft] = {}

    def propose(self, context: Context, depth: int) -> Draft:
        key = len(context), context[-1], depth
        if key not in self.memo:
            self.memo = {key: super().propose(context, depth)}
        return self.memo[key]


@broken("distribution")
class LimitedHeat(Counting):
    """States the probabilities of the temperature and draws with the temperature limited to 1.

    "Each row of ``probs`` is the distribution that its token was drawn from" (D10).
    """

    def choose(self, probs: Any, drafted: Sequence[int], context: Context) -> int:
        if context.sampling.temperature > 1:
            probs = probs.astype(np.float64) ** context.sampling.temperature
            probs = probs / probs.sum()
        return super().choose(probs, drafted, context)


@broken("distribution")
class LeavesRepeatsOut(Counting):
    """Leaves the last token of three and more out if it is the first one again.

    "given what was known before the draw" (D10).
    """

    def finish(self, tokens: list[int], rows: list[Any]) -> Draft:
        if len(tokens) > 2 and tokens[-1] == tokens[0]:
            tokens, rows = tokens[:-1], rows[:-1]
        return super().finish(tokens, rows)

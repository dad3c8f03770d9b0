"""Broken logits processors: each has one fault of those that a processor's author makes, and otherwise works.

Every docstring quotes the sentence of the contract that the class breaks; "missing:" starts one that it ought to have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from specdec import LogitsProcessor, ProcessorEnv, ProcessorSpec

BROKEN: dict[type[LogitsProcessor], str] = {}


def broken(fault: str) -> Callable[[type[Any]], type[Any]]:
    """Enter the class into the table under its class of fault."""

    def enter(kind: type[Any]) -> type[Any]:
        BROKEN[kind] = fault
        return kind

    return enter


def spec(kind: type[Any]) -> ProcessorSpec:
    """How the processor is registered."""
    return ProcessorSpec(name=f"stranger-{kind.__name__}", factory=kind)


# --- right ones, of which the broken ones change a part ---------------------------------------------------------------


class NoRepeat(LogitsProcessor):
    """Never the same token twice in a row."""

    def __init__(self, config: Any, env: ProcessorEnv) -> None:
        self.env = env

    def forbidden(self, history: Sequence[int]) -> list[int]:
        return [history[-1]] if self.env.vocab_size > 1 else []

    def process(self, logits: Any, history: Sequence[int]) -> Any:
        logits = logits.copy()
        logits[self.forbidden(history)] = -np.inf
        return logits

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        for at, token in enumerate(draft):
            if token in self.forbidden([*history, *draft[:at]]):
                return at
        return len(draft)


class Sparse(NoRepeat):
    """None of the last eight tokens that were generated."""

    def forbidden(self, history: Sequence[int]) -> list[int]:
        return self.last(history[self.env.generated_from :])

    def last(self, generated: Sequence[int]) -> list[int]:
        return list(set(generated[max(len(generated) - min(8, self.env.vocab_size // 2), 0) :]))


class Late(NoRepeat):
    """The last token is 2 nats less likely, and every third token as it is."""

    def process(self, logits: Any, history: Sequence[int]) -> Any:
        logits = logits.copy()
        if self.places(history) % 3:
            logits[history[-1]] -= 2
        return logits

    def places(self, history: Sequence[int]) -> int:
        return len(history) - self.env.generated_from

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        return len(draft)


# --- broken ones ------------------------------------------------------------------------------------------------------


@broken("late")
class ShortUndo(Sparse):
    """Keeps the last tokens along and takes back at most 24 of them when a history is shorter.

    "after a rejection the histories get shorter again" (``LogitsProcessor``); "The result may depend on the arguments
    only".
    """

    def __init__(self, config: Any, env: ProcessorEnv) -> None:
        super().__init__(config, env)
        self.known: list[int] = []

    def forbidden(self, history: Sequence[int]) -> list[int]:
        undone = 0
        while undone < 24 and self.known != list(history[: len(self.known)]):
            self.known.pop()
            undone += 1
        self.known += history[len(self.known) :]
        return super().forbidden(self.known)


@broken("late")
class EightBitLength(Late):
    """Keeps the length of the history in eight bits, which a numpy integer refuses beyond 255.

    missing: "``process`` answers for a history of any length up to the capacity of a state".
    """

    def places(self, history: Sequence[int]) -> int:
        return int(np.uint8(len(history))) - self.env.generated_from


@broken("late")
class ForbidsAll(NoRepeat):
    """Its list of steps ends after 100 generated tokens, and nothing is allowed then.

    missing: "At least one token stays allowed" (``sampling.survivors``: "ConfigError when every token is forbidden").
    """

    def process(self, logits: Any, history: Sequence[int]) -> Any:
        if len(history) - self.env.generated_from >= 100:
            return np.full_like(logits, -np.inf)
        return super().process(logits, history)


@broken("edge")
class LegalByFirst(NoRepeat):
    """``legal`` compares every draft token with the last committed one, and cuts what is allowed.

    "The number of leading draft tokens that could be chosen at all" (``LogitsProcessor.legal``).
    """

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        for at, token in enumerate(draft):
            if token == history[-1]:
                return at
        return len(draft)


@broken("edge")
class ScalesMasked(Late):
    """Spreads logits between the lowest and the highest; a token that another step forbade makes all NaN.

    "``-inf`` forbids a token" (``LogitsProcessor.process``), in what it is given too.
    """

    def process(self, logits: Any, history: Sequence[int]) -> Any:
        with np.errstate(invalid="ignore"):
            low = logits.min()
            return super().process((logits - low) * np.float32(0.9) + low, history)


@broken("handover")
class WritesLogits(NoRepeat):
    """Writes into the logits that it was given.

    "New logits ``[V]`` for the token after ``history``" (``LogitsProcessor.process``).
    """

    def process(self, logits: Any, history: Sequence[int]) -> Any:
        logits[self.forbidden(history)] = -np.inf
        return logits


@broken("handover")
class WritesHistory(NoRepeat):
    """Appends the draft to the history while it looks at it.

    missing: "A processor leaves its arguments unchanged".
    """

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        if not isinstance(history, list):
            return super().legal(draft, history)
        for at, token in enumerate(draft):
            if token in self.forbidden(history):
                return at
            history.append(token)
        return len(draft)


@broken("handover")
class HalfLogits(NoRepeat):
    """Returns half precision beyond 64 tokens, in which neighbouring logits become equal.

    "process(self, logits: Float32, history) -> Float32" (``LogitsProcessor``).
    """

    def process(self, logits: Any, history: Sequence[int]) -> Any:
        return super().process(logits, history).astype(np.float16 if len(history) > 64 else np.float32)


@broken("handover")
class LegalMask(NoRepeat):
    """``legal`` returns whether the whole draft is legal, True or False, for drafts of more than four tokens.

    "The number of leading draft tokens that could be chosen at all" (``LogitsProcessor.legal``).
    """

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        legal = super().legal(draft, history)
        return legal if len(draft) <= 4 else legal == len(draft)


@broken("randomness")
class Shakes(Late):
    """Adds a little noise of numpy's global generator against loops.

    "The result may depend on the arguments only" (``LogitsProcessor``).
    """

    def process(self, logits: Any, history: Sequence[int]) -> Any:
        noise = np.random.standard_normal(len(logits)).astype(np.float32) * np.float32(1e-4)
        return super().process(logits, history) + noise


@broken("other")
class CountsCalls(Late):
    """Counts its calls for the number of generated tokens, but every row of a pass is a call.

    "It is called for every row ..., in any order" (``LogitsProcessor``).
    """

    calls = 0

    def places(self, history: Sequence[int]) -> int:
        self.calls += 1
        return self.calls - 1


@broken("other")
class FirstHistory(Sparse):
    """Takes the first history that it sees for the prompt; the first row asked for may be a later one.

    "in any order" (``LogitsProcessor``); where generation starts is in ``ProcessorEnv.generated_from``.
    """

    start: int | None = None

    def forbidden(self, history: Sequence[int]) -> list[int]:
        if self.start is None:
            self.start = len(history)
        return self.last(history[self.start :])


@broken("other")
class CommonMemory(Sparse):
    """Keeps masks by the length of the history in the class: another sequence gets the mask of this one.

    "One object per sequence"; "The result may depend on the arguments only" (``LogitsProcessor``).
    """

    masks: ClassVar[dict[int, list[int]]] = {}

    def forbidden(self, history: Sequence[int]) -> list[int]:
        if len(history) < 64:
            return super().forbidden(history)
        return self.masks.setdefault(len(history), super().forbidden(history))


# --- a second set, written from the contract alone -------------------------------------------------------------------


@broken("other")
class CachesByEnd(Sparse):
    """Keeps its masks by the length and the last token of the history, which do not name it.

    "An answer depends on the arguments alone: on no earlier call" (L2).
    """

    def __init__(self, config: Any, env: ProcessorEnv) -> None:
        super().__init__(config, env)
        self.masks: dict[tuple[int, int], list[int]] = {}

    def forbidden(self, history: Sequence[int]) -> list[int]:
        key = len(history), history[-1]
        if key not in self.masks:
            self.masks[key] = super().forbidden(history)
        return self.masks[key]


@broken("handover")
class OneRow(NoRepeat):
    """Writes every answer into one row of its own, so the next answer replaces the last.

    missing: "an answer is its receiver's: later calls do not change it".
    """

    def __init__(self, config: Any, env: ProcessorEnv) -> None:
        super().__init__(config, env)
        self.row = np.zeros(env.vocab_size, np.float32)

    def process(self, logits: Any, history: Sequence[int]) -> Any:
        self.row[:] = super().process(logits, history)
        return self.row


@broken("late")
class LegalEight(NoRepeat):
    """``legal`` looks at eight draft tokens at most and cuts the others.

    "``legal`` ... cuts only what ``process`` forbids" (L5).
    """

    def legal(self, draft: Sequence[int], history: Sequence[int]) -> int:
        return super().legal(draft[:8], history)

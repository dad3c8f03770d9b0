"""For each broken logits processor, a few calls that show its fault, and nothing where a right one is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from specdec import ProcessorEnv

VOCAB = 30


def make(kind: Any, start: int = 5) -> Any:
    return kind(None, ProcessorEnv(tokenizer=None, vocab_size=VOCAB, end_tokens=(0,), generated_from=start))


def logits(seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * 3).astype(np.float32)


def text(count: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]


def raises(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 - whatever it raises is the fault
        return True
    return False


def by_order(kind: Any, *histories: list[int]) -> bool:
    """Whether the answers depend on what was asked before."""
    used = make(kind)
    answers = [used.process(logits(), list(history)) for history in histories]
    alone = [make(kind).process(logits(), list(history)) for history in histories]
    return not all(np.array_equal(a, b) for a, b in zip(answers, alone, strict=True))


def masked_is_nan(kind: Any) -> bool:
    row = logits()
    row[3] = -np.inf
    with np.errstate(all="ignore"):
        return bool(np.isnan(make(kind).process(row, text(6))).any())


def writes(kind: Any) -> bool:
    row = logits()
    make(kind).process(row, text(6))
    return not np.array_equal(row, logits())


def writes_history(kind: Any) -> bool:
    history = text(6)
    make(kind).legal([1, 2, 3], history)
    return history != text(6)


def counts_wrong(kind: Any, draft: list[int]) -> bool:
    """Whether ``legal`` is not the number of leading tokens that ``process`` allows."""
    history, processor, right = [*text(6), 9], make(kind), 0
    for at, token in enumerate(draft):
        if processor.process(logits(), [*history, *draft[:at]])[token] == -np.inf:
            break
        right += 1
    got = processor.legal(draft, list(history))
    return bool(type(got) is not int or got != right)


def by_generator(kind: Any) -> bool:
    processor = make(kind)
    return not np.array_equal(processor.process(logits(), text(6)), processor.process(logits(), text(6)))


def others_masks(kind: Any) -> bool:
    before = make(kind).process(logits(), text(80, seed=2))
    if hasattr(kind, "masks"):
        kind.masks.clear()
    make(kind).process(logits(), text(80, seed=3))
    return not np.array_equal(before, make(kind).process(logits(), text(80, seed=2)))


def overwritten(kind: Any) -> bool:
    processor, history = make(kind), text(9)
    answer = processor.process(logits(), history)
    kept = answer.copy()
    processor.process(logits(3), history[:-1])
    return not np.array_equal(answer, kept)


PROBES: dict[str, Callable[[Any], bool]] = {
    "ShortUndo": lambda kind: by_order(kind, text(80), [*text(30), *text(10, seed=5)]),
    "EightBitLength": lambda kind: raises(lambda: make(kind).process(logits(), text(300))),
    "ForbidsAll": lambda kind: bool(np.isinf(make(kind).process(logits(), text(106))).all()),
    "LegalByFirst": lambda kind: counts_wrong(kind, [1, 9, 2]),
    "ScalesMasked": masked_is_nan,
    "WritesLogits": writes,
    "WritesHistory": writes_history,
    "HalfLogits": lambda kind: make(kind).process(logits(), text(70)).dtype != np.float32,
    "LegalMask": lambda kind: counts_wrong(kind, [1, 2, 3, 1, 2]),
    "Shakes": by_generator,
    "CountsCalls": lambda kind: by_order(kind, text(8), text(8), text(8)),
    "FirstHistory": lambda kind: by_order(kind, text(9), text(12)),
    "CommonMemory": others_masks,
    "CachesByEnd": lambda kind: by_order(kind, [*text(8), 3, 9], [*text(8), 4, 9]),
    "OneRow": overwritten,
    "LegalEight": lambda kind: make(kind).legal(tuple(range(12)), [20]) < 12,
}

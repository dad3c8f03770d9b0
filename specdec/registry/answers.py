"""Checks of what plugins return, each against its method's contract. Whole numbers of any type become plain ints."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.contract import (
    DeviceDraft,
    Draft,
    DrafterSnapshot,
    DraftNoise,
    Executor,
    ForwardOutput,
    Guarantee,
    Logits,
    ModelInfo,
    Snapshot,
    State,
    Verdict,
    Verifier,
)
from specdec.errors import shown, typed

if TYPE_CHECKING:
    from specdec.contract import Float32

MOST_ENTRIES = 10_000  # of a snapshot or a report
SUM_TOLERANCE = 1e-4  # of a draft distribution


class Refused(Exception):
    """An answer that the contract forbids: what came back, what the method returns, and perhaps what would help."""

    def __init__(self, got: str, takes: str, remedy: str | None = None) -> None:
        super().__init__(got)
        self.got, self.takes, self.remedy = got, takes, remedy


def an(kind: type, takes: str = "") -> Callable[[Any], Any]:
    """A check that an answer is an instance of ``kind``."""

    def check(answer: Any) -> Any:
        if not isinstance(answer, kind):
            raise Refused(typed(answer), takes or f"a specdec.{kind.__name__}")
        return answer

    return check


def _whole(value: object, low: float, high: float, takes: str) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise Refused(typed(value), takes) from None
    if isinstance(value, bool) or not low <= number <= high:
        raise Refused(typed(value), takes)
    return number


def depth(answer: Any) -> int:
    """``DepthPolicy.next_depth``."""
    if type(answer) is int and answer >= 0:
        return answer
    return _whole(answer, 0, math.inf, "a whole number of 0 or more")


def preference(answer: Any) -> int | None:
    """``BackendSpec.preference``."""
    return None if answer is None else _whole(answer, -math.inf, math.inf, "a whole number or None")


def text(answer: Any) -> str:
    """A sentence, such as ``DepthPolicy.reason``."""
    if not isinstance(answer, str):
        raise Refused(typed(answer), "a string")
    return answer


def sentences(answer: Any) -> tuple[str, ...]:
    """``notices`` of a backend, of a target or of ``PrepareEnv``."""
    if not isinstance(answer, list | tuple) or not all(isinstance(one, str) for one in answer):
        raise Refused(typed(answer), "a list of strings")
    return tuple(answer)


def flag(answer: Any) -> bool:
    """``Verifier.is_argmax`` and ``ForwardPass.device_samples``."""
    if not isinstance(answer, bool):
        raise Refused(typed(answer), "True or False")
    return answer


def length(answer: Any, expected: int) -> None:
    """``State.length`` after a call that should leave ``expected`` tokens in it."""
    if answer != expected:
        raise Refused(f"a state of {shown(answer)} tokens", f"a state of {expected}")


def state(answer: Any, expected: int) -> State:
    """``ForwardPass.new_state`` and ``restore``: a state of ``expected`` tokens."""
    if not isinstance(answer, State):
        raise Refused(typed(answer), "a specdec.State")
    length(answer.length, expected)
    return answer


def taken(answer: Any, state: State) -> Snapshot:
    """``ForwardPass.snapshot`` of ``state``."""
    if not isinstance(answer, Snapshot):
        raise Refused(typed(answer), "a specdec.Snapshot")
    if answer.length != state.length:
        raise Refused(f"a Snapshot of {shown(answer.length)} tokens", f"one of the {state.length} in the state")
    return answer


def rewound(answer: Any, asked: int, state: State) -> int:
    """``ForwardPass.rewind`` of ``state`` to ``asked`` tokens or fewer."""
    reached = _whole(answer, 0, asked, f"how many tokens are left, 0 to {asked}")
    length(state.length, reached)
    return reached


def draft(answer: Any, asked: int, vocab_size: int, *, honest: bool) -> Draft:
    """``Drafter.propose``: at most one token more than asked for is read, so that an endless draft ends.

    Args:
        honest: whether ``probs`` decide what stays; their values are then checked too.
    """
    if not isinstance(answer, Draft):
        raise Refused(typed(answer), "a specdec.Draft", "specdec.Draft(tuple_of_ids)")
    if answer.probs is None and type(answer.tokens) is tuple and len(answer.tokens) <= asked:
        for token in answer.tokens:
            if type(token) is not int:
                break
        else:
            return answer  # nothing to convert
    try:
        tokens = tuple(map(operator.index, itertools.islice(answer.tokens, asked + 1)))
    except TypeError:
        raise Refused(f"a Draft of {typed(answer.tokens)}", "a Draft whose tokens are whole numbers") from None
    probs: Any = answer.probs
    if probs is not None:
        _check_probs(probs, tokens, vocab_size, honest=honest)
    return Draft(tokens, probs)


def _check_probs(probs: Any, tokens: Sequence[int], vocab_size: int, *, honest: bool) -> None:
    import numpy as np

    takes = f"probs of shape [K, {vocab_size}] and dtype float32, or None"
    if not isinstance(probs, np.ndarray) or probs.dtype != np.float32:
        raise Refused(f"a Draft whose probs are {typed(probs)}", takes)
    count = len(tokens)
    if probs.ndim != 2 or len(probs) < count or probs.shape[1] != vocab_size:
        raise Refused(f"a Draft of {count} tokens whose probs have the shape {list(probs.shape)}", takes)
    if honest and not (np.all(probs >= 0) and np.all(np.abs(probs.sum(axis=1, dtype=np.float64) - 1) <= SUM_TOLERANCE)):
        raise Refused("a Draft whose probs are no distributions", "rows of probs that are not negative and sum to 1")
    if honest and not all(probs[row, token] > 0 for row, token in enumerate(tokens) if 0 <= token < vocab_size):
        raise Refused("a Draft with a token of probability 0", "the distributions that the tokens were drawn from")


def device_draft(answer: Any) -> DeviceDraft | None:
    """``Drafter.device_draft``."""
    if answer is not None and not isinstance(answer, DeviceDraft):
        raise Refused(typed(answer), "a specdec.DeviceDraft or None")
    return answer


def executor(answer: Any) -> Executor | None:
    """``ForwardPass.device_executor``."""
    if answer is not None and not isinstance(answer, Executor):
        raise Refused(typed(answer), "a specdec.Executor or None")
    return answer


def room(answer: Any) -> int | None:
    """``ForwardPass.most_tokens``."""
    if answer is not None and (type(answer) is not int or answer < 0):
        raise Refused(shown(answer), "a number of tokens, or None")
    return answer


def snapshot(answer: Any) -> DrafterSnapshot | None:
    """``Drafter.snapshot``: a copy, with names that are strings and values that can be saved."""
    if answer is None:
        return None
    if not isinstance(answer, DrafterSnapshot):
        raise Refused(typed(answer), "a specdec.DrafterSnapshot or None")
    arrays = _entries(answer.arrays, "arrays")
    meta = _entries(answer.meta, "meta")
    for name, array in arrays.items():
        if not hasattr(array, "shape") or str(getattr(array, "dtype", "object")) == "object":
            raise Refused(f"a snapshot whose array {name!r} is {typed(array)}", "arrays of numbers")
    for name, value in meta.items():
        if type(value) not in (int, str):
            raise Refused(f"a snapshot whose meta {name!r} is {typed(value)}", "ints and strings in meta")
    return DrafterSnapshot(arrays, meta)


def _entries(mapping: Any, field: str) -> dict[str, Any]:
    if not isinstance(mapping, Mapping):
        raise Refused(f"a snapshot whose {field} are {typed(mapping)}", f"a mapping for {field}")
    names = list(itertools.islice(mapping, MOST_ENTRIES + 1))
    if len(names) > MOST_ENTRIES or not all(type(name) is str for name in names):
        raise Refused(f"a snapshot with other {field}", f"at most {MOST_ENTRIES} {field}, named by strings")
    return {name: mapping[name] for name in names}


def report(answer: Any) -> dict[str, Any]:
    """``Drafter.report``: a copy of its JSON data."""
    takes = "a mapping of strings to plain JSON data"
    if not isinstance(answer, Mapping) or len(names := list(itertools.islice(answer, MOST_ENTRIES + 1))) > MOST_ENTRIES:
        raise Refused(typed(answer), takes)
    try:
        copy: dict[str, Any] = json.loads(json.dumps({name: answer[name] for name in names}, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"{typed(answer)}, which is not JSON ({error})", takes) from None
    return copy


def verifier(made: Any) -> Verifier:
    """What a verifier's factory returns, and the attributes of its class that say what it promises."""
    if not isinstance(made, Verifier):
        raise Refused(typed(made), "a specdec.Verifier")
    found: Any = getattr(made, "guarantee", None)
    wrong: list[str] = []
    if not isinstance(found, Guarantee):
        wrong.append("no guarantee" if found is None else f"the guarantee {typed(found)}")
    if not isinstance(made.draft_noise, DraftNoise):
        wrong.append(f"the draft_noise {typed(made.draft_noise)}")
    bound: Any = made.bound
    if bound is not None and (type(bound) not in (int, float) or not bound >= 0):
        wrong.append(f"the bound {typed(bound)}")
    if wrong:
        raise Refused(
            f"a {type(made).__name__} with {' and '.join(wrong)}",
            "a Verifier with guarantee (specdec.Guarantee), bound (nats or None) and draft_noise (specdec.DraftNoise)",
            "guarantee = specdec.Guarantee.HEURISTIC in its class" if not isinstance(found, Guarantee) else None,
        )
    return made


def verdict(answer: Any, tokens: Sequence[int], vocab_size: int) -> Verdict:
    """``Verifier.verify`` of these draft tokens."""
    if not isinstance(answer, Verdict):
        raise Refused(typed(answer), "a specdec.Verdict")
    accepted: Any = answer.accepted
    token: Any = answer.next_token
    if type(accepted) is int and type(token) is int and not answer.deviations:  # nothing to convert
        if 0 <= accepted <= len(tokens) and 0 <= token < vocab_size:
            return answer
    takes = f"a Verdict with 0 to {len(tokens)} accepted tokens and a next_token of 0 to {vocab_size - 1}"
    try:
        accepted, token = _whole(accepted, 0, len(tokens), takes), _whole(token, 0, vocab_size - 1, takes)
    except Refused:
        raise Refused(typed(answer, 120), takes) from None
    try:
        deviations = tuple((_whole(at, 0, accepted - 1, takes), float(gap)) for at, gap in answer.deviations)
    except (TypeError, ValueError, Refused):
        deviations = ((0, -1.0),)
    if any(not 0 <= gap for _, gap in deviations):
        raise Refused(
            typed(answer, 120), "deviations that are pairs: the position of an accepted token, and a gap of 0 or more"
        )
    return Verdict(accepted, token, deviations)


def legal(answer: Any, count: int) -> int:
    """``LogitsProcessor.legal`` of a draft of ``count`` tokens."""
    return _whole(answer, 0, count, f"how many of {count} draft tokens are legal, a whole number")


def forced(answer: Any) -> tuple[int, ...]:
    """``LogitsProcessor.forced``: token ids."""
    if not isinstance(answer, list | tuple) or any(type(token) is not int or token < 0 for token in answer):
        raise Refused(shown(answer), "a list of token ids", "[]")
    return tuple(answer)


def row(answer: Any, given: Float32) -> Float32:
    """``LogitsProcessor.process`` of ``given`` ``[V]``."""
    import numpy as np

    takes = f"an array of shape [{len(given)}] and dtype float32"
    if not isinstance(answer, np.ndarray):
        raise Refused(typed(answer), takes)
    if answer.shape != given.shape or answer.dtype != given.dtype:
        raise Refused(
            f"an array of shape {list(answer.shape)} and dtype {answer.dtype}", takes, "result.astype(np.float32)"
        )
    best = answer.max()  # NaN if one is among them
    if not best < np.inf:
        raise Refused(f"logits with {'NaN' if best != best else 'an infinite one'}", f"{takes}, finite or -inf")
    return answer


def output(answer: Any, rows: int) -> ForwardOutput:
    """``ForwardPass.decode`` of ``rows`` tokens."""
    if not isinstance(answer, ForwardOutput):
        raise Refused(typed(answer), "a specdec.ForwardOutput")
    if answer.rows != rows or answer.logits is None:
        got = f"a ForwardOutput of {typed(answer.rows)} rows{'' if answer.logits is not None else ' without logits'}"
        raise Refused(got, f"{rows} rows with their logits")
    return answer


def logits(given: Logits, count: int, vocab_size: int) -> None:
    """The logits of a pass of ``count`` rows, read completely: only to find out who is to blame for a failure."""
    import numpy as np

    tokens: Any = given.argmax()
    takes = f"logits of {count} rows over {vocab_size} tokens"
    if len(given) != count:
        raise Refused(f"logits of {len(given)} rows", takes)
    if not isinstance(tokens, list) or any(type(token) is not int or not 0 <= token < vocab_size for token in tokens):
        raise Refused(f"logits whose argmax is {typed(tokens)}", f"{takes}, whose argmax is a list of plain ints")
    rows: Any = given.rows()
    if not isinstance(rows, np.ndarray) or rows.shape != (count, vocab_size) or rows.dtype != np.float32:
        raise Refused(f"logits whose rows are {typed(rows)}", f"{takes} as float32")
    if not np.all(rows < np.inf):
        raise Refused("logits that are not finite", f"{takes}, finite or -inf")


def model(made: Any) -> Any:
    """A target of another engine, from ``specdec_forward_pass``: its ``info`` is complete, its notices are text."""
    info: Any = getattr(made, "info", None)
    if not isinstance(info, ModelInfo):
        raise Refused(f"a {type(made).__name__} whose info is {typed(info)}", "a ForwardPass with a specdec.ModelInfo")
    sentences(list(made.notices))
    return made

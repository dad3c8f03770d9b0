"""Raises KeyboardInterrupt at a chosen step of specdec's own code. Nothing here is a test."""

from __future__ import annotations

import contextlib
import dis
import functools
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import specdec
from specdec.locks import fork_safe

OURS = str(pathlib.Path(specdec.__file__).parent)
Place = tuple[CodeType, int]  # code, and its line or (negative) its instruction


@functools.cache
def closing(code: CodeType) -> frozenset[int]:
    """The instructions between the end of a ``with`` block and the call of its ``__exit__``.

    Python looks for signals after calls, in loops and where functions start, hence not there. A tracer could raise
    there, and the block would stay open.
    """
    steps, found = list(dis.get_instructions(code)), set[int]()
    for n, step in enumerate(steps):
        if step.opname == "WITH_EXCEPT_START":
            found |= {steps[n - 1].offset, step.offset}
        nones = [s.opname == "LOAD_CONST" and s.argval is None for s in steps[n : n + 3]]
        call = steps[n + 3] if n + 3 < len(steps) else step
        if all(nones) and call.opname in {"PRECALL", "CALL"} and call.arg == 2:  # __exit__(None, None, None)
            found |= {s.offset for s in steps[n : n + 5]}
            if steps[n - 1].opname in {"SWAP", "NOP"}:  # a value to return lies below
                found.add(steps[n - 1].offset)
    return frozenset(found)


def nothing_is_locked() -> bool:
    """Whether another thread finds every lock of specdec free."""
    held = []

    def look() -> None:
        for lock in fork_safe._all:
            if lock.held.acquire(blocking=False):
                lock.held.release()
            else:
                held.append(lock)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return not held


class Tracer:
    """Counts the steps of a call: lines, or instructions. Raises at step ``at``; records all places if it is None."""

    def __init__(self, at: int | None, *, instructions: bool = False) -> None:
        self.at, self.instructions = at, instructions
        self.steps = 0
        self.places: list[Place] = []

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.instructions, not self.instructions
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == ("opcode" if self.instructions else "line") and frame.f_lasti not in closing(frame.f_code):
            if self.at is None:
                self.places.append((frame.f_code, -frame.f_lasti if self.instructions else frame.f_lineno))
            elif self.steps == self.at:
                self.steps += 1
                raise KeyboardInterrupt  # Python then stops tracing
            self.steps += 1
        return self._step

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        former = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(former)


def interrupted(call: Callable[[], Any], at: int, *, instructions: bool = False) -> bool:
    """Run ``call`` with an interruption at step ``at``; False if it ended before that.

    Python swallows what a weak reference's callback raises, and shows it to ``sys.unraisablehook``. The call then ends
    as if nothing had been, and True is returned too.
    """
    tracer, swallowed, former = Tracer(at, instructions=instructions), list[Any](), sys.unraisablehook
    sys.unraisablehook = swallowed.append
    try:
        with tracer():
            call()
    except KeyboardInterrupt:
        assert nothing_is_locked()
        return True
    finally:
        sys.unraisablehook = former
    assert tracer.steps <= at or swallowed, "the interruption was turned into something else"
    return bool(swallowed)


def steps_of(call: Callable[[], Any], *, instructions: bool = False) -> list[int]:
    """The steps of a call at which to interrupt it: for every place, the first time it is reached and the last."""
    tracer = Tracer(None, instructions=instructions)
    with tracer():
        call()
    return first_and_last(tracer.places)


def first_and_last(places: Sequence[Place]) -> list[int]:
    first: dict[Place, int] = {}
    last: dict[Place, int] = {}
    for step, place in enumerate(places):
        first.setdefault(place, step)
        last[place] = step
    return sorted({*first.values(), *last.values()})

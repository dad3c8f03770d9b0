"""Raises KeyboardInterrupt at a chosen step of specdec's own code. Nothing here is a test."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import specdec

OURS = str(pathlib.Path(specdec.__file__).parent)
Place = tuple[CodeType, int]  # code, and its line or (negative) its instruction


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
        if event == ("opcode" if self.instructions else "line"):
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

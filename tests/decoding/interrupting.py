"""Raises KeyboardInterrupt at a chosen step of specdec's own code. Nothing here is a test."""

import contextlib
import dis
import functools
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import specdec

OURS = str(pathlib.Path(specdec.__file__).parent)


class Step(NamedTuple):
    """A line, or an instruction (then its offset is given, negative), and how often it was reached before.

    Steps are not counted from the beginning of a call: what the garbage collector runs would move them.
    """

    code: CodeType
    place: int
    before: int


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


class Tracer:
    """Raises at one step of a call; records all steps if ``at`` is None."""

    def __init__(self, at: Step | None, *, instructions: bool = False) -> None:
        self.at, self.instructions = at, instructions
        self.left = 0 if at is None else at.before
        self.raised = False
        self.places: list[tuple[CodeType, int]] = []

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.instructions, not self.instructions
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == ("opcode" if self.instructions else "line") and frame.f_lasti not in closing(frame.f_code):
            place = -frame.f_lasti if self.instructions else frame.f_lineno
            if self.at is None:
                self.places.append((frame.f_code, place))
            elif frame.f_code is self.at.code and place == self.at.place and not self.raised:
                if self.left == 0:
                    self.raised = True
                    raise KeyboardInterrupt  # Python then stops tracing
                self.left -= 1
        return self._step

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        former = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(former)


def interrupted(call: Callable[[], Any], at: Step, *, instructions: bool = False) -> bool:
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
    assert not tracer.raised or swallowed, "the interruption was turned into something else"
    return bool(swallowed)


def steps_of(call: Callable[[], Any], *, instructions: bool = False) -> list[Step]:
    """The steps of a call at which to interrupt it, in their order: for every place, the first time and the last."""
    tracer = Tracer(None, instructions=instructions)
    with tracer():
        call()
    times: dict[tuple[int, int], list[int]] = {}  # by identity: equal code of two functions is two places
    for at, (code, place) in enumerate(tracer.places):
        times.setdefault((id(code), place), []).append(at)
    chosen = {at: before for one in times.values() for before, at in ((0, one[0]), (len(one) - 1, one[-1]))}
    return [Step(*tracer.places[at], before) for at, before in sorted(chosen.items())]

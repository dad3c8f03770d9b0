"""Record a pass of the native kernels once, and replay it for any rows of one or several sequences with one call.

During recording, the model code and the ops run as usual, but kernel calls are stored instead of made and outputs are
memory that is never filled. Each argument is either constant (a stride, the address of a weight) or read from a *slot*
that is filled before each replay: lengths, threads, and addresses of the sequence's caches, of results, and of two
blocks of memory. *Work* memory is used only during the pass; it belongs to the ops, so passes of one model take turns.
*Kept* memory is also read by a commit; it belongs to the sequence.

The body runs over two numbers of rows, and an op that reads a cache over a few choices of a sequence's rows, which
shows how each argument depends on the rows of the pass, on those before the sequence's and on its own. The replay of a
pass over several sequences makes the calls that read a cache once per sequence. For a pass of one sequence, the
recording is first *bound* to the number of rows: its arguments are then constants and slots alone.

Every address must be in known memory: an output of this recording, a weight, a cache or an argument of the pass. A
length is a ``Slot``, which cannot be calculated with. Torch functions that do more than inspect or view a tensor are
refused. ``NotRecordable`` gives the reason; such passes run op by op.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specdec.backends.caches import Batched
from specdec.backends.cpu.arrays import CPU
from specdec.backends.cpu.caches import CpuDeltaCache, CpuKVCache, CpuLatentCache
from specdec.backends.cpu.pruned import GREEDY, HeadRows
from specdec.backends.passes import Body, EagerPass, EagerPasses, Pass, Passes, fitting
from specdec.backends.placeholders import PlaceholderInteger, PlaceholderTokens
from specdec.contract import Choosing
from specdec.errors import ContractError

if TYPE_CHECKING:
    from specdec.backends.cpu.library import Kernels
    from specdec.backends.cpu.threads import Threads
    from specdec.backends.ops import Array, Cache

R = TypeVar("R")

ALIGNMENT = 64  # bytes
RUNS = (4, 5)  # rows of the two runs of a body
# the rows of a sequence for which an op that reads a cache runs: the first, one row later, and with a row more
CHOICES = (slice(0, 2), slice(1, 3), slice(0, 3))
_TABLE = -1  # kernels/tape.cpp
_ENTRIES = 256  # kernels/tape.cpp: the first entry and the number of entries of a table share one integer

# Slots: fixed ones, then for each sequence its first row in the pass, its rows, and four per cache.
ZERO, WORK, KEPT, HIDDEN, TOKENS, OUT, THREADS, ROWS = range(8)
# Of a chain: the last row of a pass, its logits, the best token, how it is chosen, ids of the logits, their number, the
# size of the vocabulary; the head in one or two parts (address, stride, features), and the logits of the second part.
# Of a pass over several sequences: their number, the slots of each, and the rows of the pass (0 where the recording is
# bound).
ROW, LOGITS, BEST, CHOICE, IDS, FEATURES, VOCABULARY = range(8, 15)
PARTS = (15, 18)
SECOND_LOGITS, SEQUENCES, WIDTH, ALL_ROWS, FIRST_ROW, OWN_ROWS, _FIRST_CACHE = range(21, 28)
_PER_CACHE = 4  # length and up to three addresses
_INTEGER = 8  # bytes of a slot

# Torch functions that a recorded pass may call: queries and views of a tensor. A view that turns out to be a copy has
# an unknown address, so it is refused when a kernel reads it.
_HARMLESS = frozenset(
    "__get__ __getitem__ __len__ as_strided chunk data_ptr dim element_size empty expand flatten is_contiguous "
    "narrow ndimension numel permute reshape select size split squeeze storage_offset stride t tensor transpose "
    "unbind unflatten unsqueeze untyped_storage view".split()
)


class NotRecordable(Exception):
    """A pass does something that a replay cannot repeat; the message says what."""


class Slot(PlaceholderInteger):
    """Placeholder of an integer that the replay reads from a slot."""

    __slots__ = ("slot",)
    error = NotRecordable

    def __init__(self, slot: int) -> None:
        self.slot = slot


class RecordedTokens(PlaceholderTokens):
    """Placeholder of the token ids of a pass: only their number is known, and the slot of their address."""

    error = NotRecordable

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.pointer = Slot(TOKENS)


current: ContextVar[Tape | None] = ContextVar("recording", default=None)
"""The recording in progress. It is set in a context of its own, which no interruption can leave set."""


class Kernel:
    """A C function; ``signature`` has one letter per argument (see ``Kernels.function``).

    With ``threads``, the number of threads is appended to the arguments. While this thread records a pass, the call is
    recorded instead of made.
    """

    __slots__ = ("address", "function", "has_result", "name", "signature", "threads")

    def __init__(
        self, kernels: Kernels, name: str, signature: str, *, result: Any = None, threads: Threads | None = None
    ) -> None:
        self.name = name
        self.signature = signature
        self.has_result = result is not None
        self.threads = threads
        self.function = kernels.function(name, signature, result)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value or 0

    def __call__(self, *arguments: Any) -> Any:
        tape = current.get()
        if tape is not None:
            return tape.call(self, arguments)
        if self.threads is not None:
            return self.function(*arguments, self.threads.count())
        return self.function(*arguments)


class Runner:
    """The C functions that replay recordings."""

    def __init__(self, kernels: Kernels) -> None:
        self._caller = kernels.function("tape_caller", "pi", ctypes.c_void_p)
        self.run = kernels.function("tape_run", "pipp", ctypes.c_int64)
        self.chain = kernels.function("tape_chain", "ppiiiip", ctypes.c_int64)
        self.keep_window = Kernel(kernels, "keep_window", "ppiii")

    def caller(self, kernel: Kernel) -> int:
        """Return the C function that calls kernels of this signature."""
        text = kernel.signature.encode()
        found: int | None = self._caller(text, kernel.has_result)
        if found is None:
            raise NotRecordable(f"kernels/tape.cpp has no signature {kernel.signature!r} ({kernel.name})")
        return found


# --- stand-ins for caches during recording ----------------------------------------------------------------------------


class _KeptLength:
    def __init__(self, slot: int) -> None:
        self.length = Slot(slot)


class _RecordedKV(_KeptLength):
    def __init__(self, cache: Any, slot: int) -> None:
        super().__init__(slot)
        self.keys, self.values, self.window, self.sinks = cache.keys, cache.values, cache.window, cache.sinks

    def reserve(self, rows: int) -> tuple[Slot, Slot]:
        return self.length, self.length  # the end is not used; the replay checks that there is room


class _RecordedDelta(_KeptLength):
    def __init__(self, cache: Any, slot: int) -> None:
        super().__init__(slot)
        self.shape = cache.shape
        self.state, self.after, self.window = cache.state, cache.after, cache.window
        self.raw: Tensor | None = None
        self.replay: Any = None


@attrs.frozen(eq=False)
class _Sampled(Batched):
    """A cache during the recording of a pass over several sequences: an op over it runs for each choice of rows."""

    tape: Tape

    def each(self, run: Callable[[Any, slice], Any], join: Callable[[list[Any]], Any]) -> Any:
        return self.tape.sampled(run, self.parts, self.rows)


@attrs.frozen
class _Step:
    kernel: Kernel
    samples: Sequence[tuple[Any, ...]]  # the arguments, for each choice of rows
    longer: tuple[Any, ...] | None = None  # and for the first in a pass of another number of rows
    each: bool = False  # whether it runs once per sequence


@attrs.define
class _Buffer:
    """An output of the recording. Its tensor only reserves a unique range of addresses."""

    tensor: Tensor
    first_run: _Buffer | None = None  # the same output of the first run
    size: int = 0  # bytes, for every row of the pass if its number may vary
    slot: int = WORK
    offset: int = 0
    first: int = -1  # step that writes it
    last: int = -1  # last step that reads it


class Tape(TorchFunctionMode):
    """A recording: checks torch calls and records kernel calls."""

    def __init__(self, ops: Any, runner: Runner, caches: Sequence[Cache], hidden_size: int) -> None:
        """``ops`` is a ``NativeOps``; ``caches`` are those of any sequence."""
        super().__init__()
        self._ops = ops
        self._runner = runner
        self.steps: list[_Step] = []
        self._alive: list[Any] = []  # owners of memory that the recording points to
        self._buffers: list[_Buffer] = []
        self._starts: list[int] = []  # their addresses, once they are sorted
        self._known: dict[int, tuple[int, int, Tensor]] = {}  # start -> end, slot, owner
        self._hidden_size = hidden_size
        self._rows = RUNS[0]  # of the present run
        self._stand_ins = [[self._stand_in(cache, slot) for slot, cache in _slots_of(caches)] for _ in CHOICES]
        self._choice: slice | None = None  # of an op that runs once per sequence
        self._outputs: list[Tensor] = []  # of this op, for all sequences
        self._made = 0  # of them for this choice

    def _stand_in(self, cache: Any, slot: int) -> Any:
        if type(cache) not in (CpuKVCache, CpuLatentCache, CpuDeltaCache):  # a subclass may do what a replay does not
            raise NotRecordable(f"a cache of type {type(cache).__name__} cannot be recorded")
        for at, tensor in enumerate(_memory(cache), start=slot + 1):
            self._known.setdefault(tensor.data_ptr(), (tensor.data_ptr() + tensor.nbytes, at, tensor))
        return (_RecordedDelta if isinstance(cache, CpuDeltaCache) else _RecordedKV)(cache, slot)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in _HARMLESS and current.get() is self:  # else an interruption has left this mode on torch's stack
            raise NotRecordable(f"torch's {name} cannot be recorded")
        return func(*args, **(kwargs or {}))

    def record(self, run: Callable[[Tape], R]) -> R:
        """Return ``run(self)``, with kernel calls recorded and torch calls checked."""

        def recording() -> R:
            current.set(self)
            with self:
                return run(self)

        return copy_context().run(recording)

    # --- recording -------------------------------------------------------------------------------------------------

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory for an output."""
        if self._choice is None:
            tensor = torch.empty(*shape, dtype=dtype, device=CPU)
            self._buffers.append(_Buffer(tensor))
            return tensor
        (rows, *rest), first, own = shape, self._choice.start, self._choice.stop - self._choice.start
        each = rows - own + 1  # rows of the output for a row of the pass: a sequence never has fewer than it needs
        if self._made == len(self._outputs):
            choice, self._choice = self._choice, None
            self._outputs.append(self.empty(self._rows * each, *rest, dtype=dtype))
            self._choice = choice
        output = self._outputs[self._made]
        self._made += 1
        if output.shape != (self._rows * each, *rest):
            raise NotRecordable("the size of an output does not grow by a row with each row of the pass")
        return output[first * each : first * each + rows]

    def call(self, kernel: Kernel, arguments: tuple[Any, ...]) -> int | None:
        """Record a call; return the result of a successful one."""
        if kernel.threads is not None:
            arguments = (*arguments, Slot(THREADS))
        self._alive.append(arguments)
        self.steps.append(_Step(kernel, [arguments]))
        return -1 if kernel.has_result else None

    def sampled(self, run: Callable[[Any, slice], Any], caches: Sequence[Any], choices: Sequence[slice]) -> Any:
        """Record an op that runs once per sequence; ``run`` runs it over a cache and rows. Returns all its rows."""
        self._outputs = []

        def chosen(cache: Any, choice: slice) -> Any:
            self._choice, self._made = choice, 0
            result = run(cache, choice)
            self._choice = None
            return result

        first, second, *_ = self._merged(chosen, caches, choices, each=True)
        if first is None:
            return None
        if second.data_ptr() - first.data_ptr() != first.stride(0) * first.element_size():
            raise NotRecordable("the rows of an output do not follow one another")
        return first.as_strided((self._rows, *first.shape[1:]), first.stride())

    def _merged(self, run: Callable[..., R], *choices: Sequence[Any], each: bool = False) -> list[R]:
        """Record the calls that ``run`` makes for each choice, always the same ones, as one; returns the results."""
        before, samples, results = self.steps, [], []
        for arguments in zip(*choices, strict=True):
            self.steps = []
            results.append(run(*arguments))
            samples.append(self.steps)
        self.steps = before
        for steps in zip(*samples, strict=True):
            if len({step.kernel for step in steps}) > 1:
                raise NotRecordable(f"{steps[0].kernel.name} is called for some numbers of rows only")
            self.steps.append(_Step(steps[0].kernel, [step.samples[0] for step in steps], each=each))
        return results

    def recording_of(self, body: Body) -> Recording:
        """Record a pass."""
        (programs, buffers, out), (longer, others, _) = (self._run(body, rows) for rows in RUNS)
        programs = [
            [self._with_longer(*steps) for steps in zip(*pair, strict=True)]
            for pair in zip(programs, longer, strict=True)
        ]
        for buffer, other in zip(buffers, others, strict=True):
            other.first_run, buffer.size = buffer, buffer.tensor.nbytes // RUNS[0]
            if buffer.tensor.nbytes != buffer.size * RUNS[0] or other.tensor.nbytes != buffer.size * RUNS[1]:
                raise NotRecordable("the size of an output is not a multiple of the rows of the pass")
        self._buffers.sort(key=lambda buffer: buffer.tensor.data_ptr())
        self._starts = [buffer.tensor.data_ptr() for buffer in self._buffers]
        self._find_weights()
        self._result(out)
        passed, replayed, windows = programs
        kept = self._lay_out(passed, [*replayed, *windows])
        return Recording(
            run=self._compiled(passed),
            replay=self._compiled(replayed),
            windows=self._compiled(windows),
            width=out.shape[1],
            work_bytes=max([b.offset + b.size for b in buffers if b.slot == WORK], default=0),
            kept_bytes=kept,
            alive=(self._alive, [owner for _, slot, owner in self._known.values() if slot == ZERO]),
        )

    def _run(self, body: Body, rows: int) -> tuple[list[list[_Step]], list[_Buffer], Tensor]:
        """The steps of a pass and of its commit, their outputs, and the result."""
        before, self._rows, hidden = len(self._buffers), rows, None
        if self._hidden_size:
            hidden = self.empty(rows, self._hidden_size, dtype=self._ops.dtype)
            self._buffers[-1].slot = HIDDEN
        caches = [_Sampled(layer, CHOICES, self) for layer in zip(*self._stand_ins, strict=True)]
        out = body(caches, RecordedTokens(rows), hidden)
        passed, self.steps = self.steps, []
        return [passed, *self._committed()], self._buffers[before:], out

    @staticmethod
    def _with_longer(step: _Step, longer: _Step) -> _Step:
        """A step, from the one of the first run and the one of the second."""
        if step.kernel is not longer.kernel:
            raise NotRecordable(f"{step.kernel.name} is called for some numbers of rows only")
        return attrs.evolve(step, longer=longer.samples[0])

    def _committed(self) -> tuple[list[_Step], list[_Step]]:
        """Record a commit of fewer rows: the steps that compute recurrent states again, and those for the windows."""
        layers = [layer for layer in zip(*self._stand_ins, strict=True) if getattr(layer[0], "raw", None) is not None]

        def replay(cache: Any) -> None:
            if cache.replay is None:
                raise NotRecordable("a convolution without the delta rule after it")
            cache.replay(Slot(ROWS))

        def keep(cache: Any) -> None:
            taps, row_bytes = cache.window.shape[0], cache.raw.stride(0) * cache.raw.element_size()
            self._runner.keep_window(cache.raw.data_ptr(), cache.window.data_ptr(), Slot(ROWS), row_bytes, taps)

        for layer in layers:
            self._merged(replay, layer)
        replayed, self.steps = self.steps, []
        for layer in layers:
            self._merged(keep, layer)
        windows, self.steps = self.steps, []
        return replayed, windows

    def best(self, length: int, parts: int) -> Program:
        """Compile the choice of a token, by slot CHOICE, from slot ROW, ``[length]``, by way of LOGITS, to BEST.

        The head has one or two parts.
        """
        for at, out in zip(PARTS[:parts], (LOGITS, SECOND_LOGITS), strict=False):
            self._ops._head(Slot(ROW), length, 1, length, Slot(at), Slot(at + 1), Slot(at + 2), Slot(out))
        ids, vocabulary = Slot(IDS), Slot(VOCABULARY)
        self._ops._choose_rows(Slot(LOGITS), 1, Slot(FEATURES), ids, vocabulary, Slot(CHOICE), Slot(BEST))
        self._find_weights()
        return self._compiled(self.steps)

    def _find_weights(self) -> None:
        for weight in self._ops.parameters():
            storage = weight.untyped_storage()
            self._known[storage.data_ptr()] = (storage.data_ptr() + storage.nbytes(), ZERO, weight)
        self._known_starts = sorted(self._known)

    def _result(self, tensor: Tensor) -> None:
        buffer = self._buffer_at(tensor.data_ptr())
        if buffer is None or buffer.slot != WORK or buffer.tensor.shape != tensor.shape or not tensor.is_contiguous():
            raise NotRecordable("a pass must return a whole output of an op")
        buffer.slot = OUT

    # --- from addresses to slots -----------------------------------------------------------------------------------

    def _buffer_at(self, address: int) -> _Buffer | None:
        i = bisect.bisect_right(self._starts, address) - 1
        inside = i >= 0 and address < self._starts[i] + max(self._buffers[i].tensor.nbytes, 1)
        return self._buffers[i] if inside else None

    def _addresses(self, step: _Step) -> Iterator[int]:
        for kind, argument in zip(step.kernel.signature, step.samples[0], strict=True):
            if kind == "p" and isinstance(argument, int):
                yield argument
            elif _is_pointers(argument):
                yield from (address or 0 for address in argument)

    def _lay_out(self, passed: Sequence[_Step], committed: Sequence[_Step]) -> int:
        """Assign offsets to buffers; those never in use at the same time share memory. Returns the kept bytes."""
        kept = 0
        for step in committed:
            for address in self._addresses(step):
                buffer = self._buffer_at(address)
                if buffer is None or buffer.slot == KEPT:
                    continue
                if buffer.slot != WORK:
                    raise NotRecordable("a commit reads what the pass returned")
                buffer.slot, buffer.offset = KEPT, kept
                kept += _aligned(buffer.size)
        moment, together = 0, False
        for step in passed:
            moment += not (step.each and together)  # a sequence may be through with such steps before another begins
            together = step.each
            for address in self._addresses(step):
                buffer = self._buffer_at(address)
                if buffer is not None:
                    buffer.first = moment if buffer.first < 0 else buffer.first
                    buffer.last = moment
        used = [buffer for buffer in self._buffers if buffer.slot == WORK and buffer.first >= 0]
        placed: list[_Buffer] = []
        for buffer in sorted(used, key=lambda buffer: buffer.first):
            placed = [other for other in placed if other.last >= buffer.first]
            for other in sorted(placed, key=lambda other: other.offset):  # the first gap that is wide enough
                if buffer.offset + buffer.size <= other.offset:
                    break
                buffer.offset = max(buffer.offset, other.offset + _aligned(other.size))
            placed.append(buffer)
        return kept

    def _pointer(self, address: int, kernel: Kernel) -> tuple[int, int, int]:
        """Slot of an address, offset from there, and what the rows of the pass are multiplied with."""
        if address == 0:
            return ZERO, 0, 0
        buffer = self._buffer_at(address)
        if buffer is not None:
            placed = buffer.first_run or buffer
            return placed.slot, address - buffer.tensor.data_ptr(), placed.offset
        i = bisect.bisect_right(self._known_starts, address) - 1
        if i >= 0:
            start = self._known_starts[i]
            end, slot, _ = self._known[start]
            if address < end:
                return (ZERO, address, 0) if slot == ZERO else (slot, address - start, 0)
        raise NotRecordable(f"{kernel.name} reads memory that is neither an output of an op, nor a weight, nor a cache")

    def _compiled(self, steps: Sequence[_Step]) -> Program:
        flat: list[int] = []  # caller, function, first argument, arguments, whether it runs once per sequence
        arguments: list[tuple[int, ...]] = []
        for step in steps:
            kernel = step.kernel
            values: list[tuple[int, ...]] = []
            tables: list[tuple[int, list[tuple[int, ...]]]] = []
            runs = [*step.samples, *([] if step.longer is None else [step.longer])]
            for kind, samples in zip(kernel.signature, zip(*runs, strict=True), strict=True):
                if _is_pointers(samples[0]):
                    entries = zip(*samples, strict=True)
                    tables.append((len(values), [self._fitted("p", entry, step) for entry in entries]))
                    values.append((ZERO, 0, 0, 0, 0))
                else:
                    values.append(self._fitted(kind, samples, step))
            first = len(arguments)
            behind = first + len(values)
            for at, entries_of in tables:
                values[at] = (_TABLE, _ENTRIES * behind + len(entries_of), 0, 0, 0)
                behind += len(entries_of)
            arguments += values
            for _, entries_of in tables:
                arguments += entries_of
            flat += [self._runner.caller(kernel), kernel.address, first, len(kernel.signature), step.each]
        return Program(
            names=[step.kernel.name for step in steps],
            steps=(ctypes.c_int64 * len(flat))(*flat),
            arguments=np.array(arguments, np.int64).reshape(-1, 5),
        )

    def _fitted(self, kind: str, samples: Sequence[Any], step: _Step) -> tuple[int, int, int, int, int]:
        """An argument for kernels/tape.cpp, from what it is for each choice of rows, and in a longer pass.

        A slot, a constant, and what each row of the pass, each before the sequence's and each of its own adds.
        """
        slot, start, by_rows = self._value(kind, samples[0], step.kernel)
        if len(samples) == 1:
            return slot, start, by_rows, 0, 0
        others = [self._value(kind, sample, step.kernel) for sample in samples[1:]]
        values = [value for _, value, _ in others]
        more = 0 if step.longer is None else values.pop() - start  # of a pass with one row more
        later, longer = (*[value - start for value in values], *[0] * (2 - len(values)))
        known = all(other[0] == slot and other[2] == by_rows for other in others)
        if not known or (longer or more if kind == "p" else later):
            raise NotRecordable(f"{step.kernel.name} depends on its rows in a way that cannot be recorded")
        return slot, start - CHOICES[0].stop * longer - RUNS[0] * more, by_rows + more, later, longer

    def _value(self, kind: str, argument: Any, kernel: Kernel) -> tuple[int, int, int]:
        """Slot and constant of an argument, and what the rows of the pass are multiplied with."""
        if isinstance(argument, Slot):
            return argument.slot, 0, 0
        if kind == "f":
            return ZERO, struct.unpack("<i", struct.pack("<f", argument))[0], 0
        if kind == "i":
            return ZERO, int(argument), 0
        if argument is None or isinstance(argument, int):
            return self._pointer(argument or 0, kernel)
        return ZERO, ctypes.addressof(argument), 0  # an array of sizes or strides, the same in every pass


def _slots_of(caches: Sequence[Any]) -> Iterable[tuple[int, Any]]:
    """The caches of a sequence with their first slots."""
    return zip(itertools.count(_FIRST_CACHE, _PER_CACHE), caches, strict=False)


def _memory(cache: Any) -> tuple[Tensor, ...]:
    """The tensors of a cache that kernels read and write, in the order of its slots."""
    if isinstance(cache, CpuDeltaCache):
        return cache.state, cache.after, cache.window
    return cache.keys, cache.values


def _is_pointers(argument: Any) -> bool:
    return isinstance(argument, ctypes.Array) and argument._type_ is ctypes.c_void_p


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@attrs.frozen(eq=False)
class Program:
    """Steps for kernels/tape.cpp."""

    names: list[str]  # kernel of each step
    steps: Any
    arguments: np.ndarray[Any, np.dtype[np.int64]]  # ``[n, 5]``, as ``Tape._fitted`` gives them

    def bound(self, rows: int) -> Program:
        """For passes of ``rows`` rows of one sequence."""
        arguments = self.arguments.copy()
        _, value, by_rows, _, longer = arguments.T
        value += rows * (by_rows + longer)
        return attrs.evolve(self, arguments=arguments)

    @functools.cached_property
    def addresses(self) -> tuple[int, int, int]:
        """The ``Program`` of kernels/tape.cpp."""
        return ctypes.addressof(self.steps), len(self.names), self.arguments.ctypes.data


@attrs.frozen(eq=False, kw_only=True)
class Recording:
    """The recorded pass of one or several sequences, and what a commit runs after it."""

    run: Program
    replay: Program  # recomputes recurrent states for fewer rows
    windows: Program  # updates convolution windows to the kept rows
    width: int  # of the result
    work_bytes: int  # these two for every row of the pass
    kept_bytes: int
    alive: Any  # owners of memory that the programs point to

    def bound(self, rows: int) -> Recording:
        """For passes of ``rows`` rows of one sequence."""
        programs = {name: getattr(self, name).bound(rows) for name in ("run", "replay", "windows")}
        return attrs.evolve(self, **programs)


class RecordedPasses:
    """Passes of one body. Raises: NotRecordable."""

    eager_reason = ""

    def __init__(self, ops: Any, runner: Runner, body: Body, caches: Sequence[Cache], hidden_size: int) -> None:
        """``ops`` is a ``NativeOps``; ``caches`` are those of any sequence."""
        self.ops = ops
        self.runner = runner
        self.body = body
        self.hidden_size = hidden_size
        tape = Tape(ops, runner, caches, hidden_size)
        try:
            self.recording = tape.record(lambda tape: tape.recording_of(body))
        except NotRecordable:
            raise
        except Exception as error:  # the stand-in of a cache may lack what the body uses; bugs fail again
            raise NotRecordable(f"recording failed with {type(error).__name__}: {error}") from error
        rows = range(1, ops.capabilities.max_rows + 1)
        self.bound = {count: self.recording.bound(count) for count in rows}  # for passes of one sequence, by rows
        self.best: dict[int, Program] = {}  # the choice of a token in chains: by parts of the head
        self._chains: dict[tuple[int, int], tuple[Any, int]] = {}  # and by rows of the first pass

    def bind(self, caches: Sequence[Cache]) -> RecordedPass:
        return RecordedPass(self, caches)

    def chain(self, rows: int, parts: int) -> tuple[Any, int]:
        """Return the programs of a chain that starts with ``rows`` rows, and the offset of its outputs in work.

        ``parts``: as for ``Tape.best``.
        """
        key = rows, parts
        if key not in self._chains:
            if (best := self.best.get(parts)) is None:
                tape = Tape(self.ops, self.runner, [], 0)
                best = self.best[parts] = tape.record(lambda tape: tape.best(self.hidden_size, parts))
            numbers = [*self.bound[rows].run.addresses, *self.bound[1].run.addresses, *best.addresses]
            programs = (ctypes.c_int64 * len(numbers))(*numbers)
            self._chains[key] = programs, _aligned(rows * self.recording.work_bytes)
        return self._chains[key]


class RecordedPass(Pass):
    """Recorded passes over the caches of one sequence."""

    def __init__(self, passes: RecordedPasses, caches: Sequence[Cache]) -> None:
        self._passes = passes
        self._ops = passes.ops
        self._caches: Sequence[Any] = caches
        self._eager = EagerPass(passes.body, caches)
        self._slots = (ctypes.c_int64 * (_FIRST_CACHE + _PER_CACHE * len(caches)))()
        self._growing: list[tuple[int, Any]] = []  # first slot, cache
        self._recurrent: list[tuple[int, Any, Any, int, int]] = []  # also one of its two matrices, addresses of both
        for slot, cache in _slots_of(caches):
            for at, tensor in enumerate(_memory(cache), start=slot + 1):
                self._slots[at] = tensor.data_ptr()
            if isinstance(cache, CpuDeltaCache):
                addresses = self._slots[slot + 1], self._slots[slot + 2]
                self._recurrent.append((slot, cache, cache.state, *addresses))
            else:
                self._growing.append((slot, cache))
        self._kept: Tensor | None = None
        self._last: tuple[Recording, Tensor | None] | None = None  # of the last run, and what it kept; None if eager

    def run(self, tokens: Sequence[int], hidden: Array | None = None) -> Array:
        rows, passes = len(tokens), self._passes
        self._last = None
        if rows > self._ops.capabilities.max_rows:
            return self._eager.run(tokens, hidden)
        recording = passes.bound[rows]
        self._fill(0, rows, 0)
        size = rows * recording.kept_bytes
        if size and (self._kept is None or self._kept.nbytes < size):
            self._kept = torch.empty(size, dtype=torch.uint8, device=CPU)
        out = self._replay(recording, self._slots, tokens, hidden, self._kept)
        self._last = recording, self._kept
        return out

    def run_batch(
        self, others: Sequence[RecordedPass], tokens: Sequence[Sequence[int]], hidden: Array | None = None
    ) -> Array:
        bound, joined = [self, *others], [token for own in tokens for token in own]
        recording = self._passes.recording
        for one in bound:
            one._last = None
        width, first = len(self._slots) - FIRST_ROW, 0
        slots = (ctypes.c_int64 * (FIRST_ROW + width * len(bound)))()
        slots[SEQUENCES], slots[WIDTH], slots[ALL_ROWS] = len(bound), width, len(joined)
        for number, (one, own) in enumerate(zip(bound, tokens, strict=True)):
            one._fill(first, len(own), len(joined))
            first += len(own)
            to = ctypes.addressof(slots) + _INTEGER * (FIRST_ROW + number * width)
            ctypes.memmove(to, ctypes.addressof(one._slots) + _INTEGER * FIRST_ROW, _INTEGER * width)
        size = len(joined) * recording.kept_bytes
        kept = torch.empty(size, dtype=torch.uint8, device=CPU) if size else None
        out = self._replay(recording, slots, joined, hidden, kept)
        for one in bound:
            one._last = recording, kept
        return out

    def _fill(self, first: int, rows: int, all_rows: int) -> None:
        """Fill the sequence's slots for ``rows`` rows from ``first`` on. Raises: StateError if a cache is full."""
        slots = self._slots
        slots[ALL_ROWS], slots[FIRST_ROW], slots[OWN_ROWS] = all_rows, first, rows
        for slot, cache in self._growing:
            slots[slot], _ = cache.reserve(rows)
        for slot, cache, matrix, at, other in self._recurrent:
            slots[slot] = cache.length
            slots[slot + 1], slots[slot + 2] = (at, other) if cache.state is matrix else (other, at)

    def _replay(
        self, recording: Recording, slots: Any, tokens: Sequence[int], hidden: Array | None, kept: Tensor | None
    ) -> Tensor:
        """Run a recorded pass, once the slots of its sequences are filled."""
        ops = self._ops
        if self._passes.hidden_size:
            hidden = self._checked(hidden, len(tokens))
            slots[HIDDEN] = hidden.data_ptr()
        ids = (ctypes.c_int64 * len(tokens))(*tokens)
        out = torch.empty(len(tokens), recording.width, dtype=ops.dtype, device=CPU)
        slots[TOKENS] = ctypes.addressof(ids)
        slots[OUT] = out.data_ptr()
        slots[KEPT] = 0 if kept is None else kept.data_ptr()
        slots[THREADS] = ops.threads.count()
        with ops.lock.held:
            slots[WORK] = ops.work(len(tokens) * recording.work_bytes)
            failed = self._play(recording.run, slots)
        if failed >= 0:
            raise ContractError(f"step {failed} of a recorded pass failed: a token id outside the vocabulary")
        return out

    def chain(
        self, tokens: Sequence[int], hidden: Array, depth: int, head: Array | HeadRows, choosing: Choosing | None = None
    ) -> tuple[int, ...] | None:
        rows, passes, ops = len(tokens), self._passes, self._ops
        end = rows + depth - 1
        if passes.recording.kept_bytes or rows > ops.capabilities.max_rows or not passes.hidden_size:
            return None
        slots = self._slots
        for slot, cache in self._growing:
            if cache.length + end > cache.keys.shape[0]:
                return None  # the pass that does not fit raises the error
            slots[slot] = cache.length
        hidden = self._checked(hidden, rows)
        ids = (ctypes.c_int64 * rows)(*tokens)
        found = (ctypes.c_int64 * depth)()
        row_bytes = passes.hidden_size * hidden.element_size()
        pruned = head if isinstance(head, HeadRows) else None
        parts: tuple[Any, ...] = (head,) if pruned is None else pruned.parts
        matrices = [ops._matrix(part, passes.hidden_size, "head") for part in parts]
        features = sum(matrix[2] for matrix in matrices)
        vocabulary = features if pruned is None else pruned.vocab_size
        self._last = None
        with ops.lock.held:
            programs, outputs = passes.chain(rows, len(parts))
            logits = outputs + _aligned(end * row_bytes)
            work = ops.work(logits + 4 * features)
            slots[WORK], slots[ALL_ROWS] = work, 0
            slots[HIDDEN] = hidden.data_ptr()
            slots[TOKENS] = ctypes.addressof(ids)
            slots[OUT] = work + outputs
            slots[LOGITS] = work + logits
            slots[SECOND_LOGITS] = work + logits + 4 * matrices[0][2]
            for at, matrix in zip(PARTS, matrices, strict=False):
                slots[at], slots[at + 1], slots[at + 2] = matrix
            slots[IDS] = 0 if pruned is None else pruned.ids.ctypes.data
            slots[FEATURES], slots[VOCABULARY] = features, vocabulary
            choice, alive = ops.choice(choosing or GREEDY, found)
            slots[CHOICE] = ctypes.addressof(choice)
            slots[THREADS] = ops.threads.count()
            drafted: int = passes.runner.chain(programs, slots, len(self._caches), rows, depth, row_bytes, found)
            del alive  # the kernels have read its addresses
            whole = drafted == depth
            refused = not whole and found[drafted] < 0
            if refused:
                wrong = (ctypes.c_float * features).from_address(work + logits)
                logits_of_step = torch.frombuffer(bytearray(wrong), dtype=torch.float32)
        ran = drafted + refused  # number of passes
        for cache in self._caches:
            cache.advance(rows + ran - 1 if ran else 0)
        if refused:
            ops.logits(logits_of_step[None]).argmax()  # raises if they are not finite
            return tuple(found[:drafted])  # else no token is allowed here
        if not whole:
            raise ContractError(f"pass {ran} of a draft chain failed: a token id outside the vocabulary")
        return tuple(found)

    def commit(self, rows: int) -> None:
        if self._last is None:
            self._eager.commit(rows)
            return
        (recording, kept), self._last = self._last, None
        if rows and kept is not None:
            slots = self._slots
            slots[ROWS], slots[KEPT] = rows, kept.data_ptr()
            slots[THREADS] = self._ops.threads.count()
            if rows < slots[OWN_ROWS]:
                self._play(recording.replay, slots)
            self._play(recording.windows, slots)
        for cache in self._caches:
            cache.advance(rows)

    def _checked(self, hidden: Array | None, rows: int) -> Tensor:
        shape = rows, self._passes.hidden_size
        checked: Tensor = fitting(hidden, shape, self._ops.dtype).contiguous()  # rows of a pass already are
        return checked

    def _play(self, program: Program, slots: Any) -> int:
        failed: int = self._passes.runner.run(*program.addresses, slots)
        return failed


def record(ops: Any, runner: Runner, body: Body, caches: Sequence[Cache], hidden_size: int) -> Passes:
    """Return recorded passes, or eager ones with the reason why recording failed."""
    try:
        return RecordedPasses(ops, runner, body, caches, hidden_size)
    except NotRecordable as refusal:
        return EagerPasses(body, str(refusal))

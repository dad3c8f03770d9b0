"""A device for tests: tensors on the host, kernels in Triton's interpreter, and graphs that are lists of launches.

It is stricter than a CUDA device. Under capture nothing may be read; torch may look at tensors and make new ones,
copies and the few computations that passes need are recorded as launches are, and everything else is refused. Before
every replay all memory that was made under capture is poisoned: a value that is not computed anew shows.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.backends.cuda.kernels import launch as launching
from specdec.backends.cuda.memory import out_of_memory

Step = Callable[[], None]

_VIEWS = frozenset(
    "alias as_strided detach expand permute select slice split split_with_sizes squeeze t transpose unbind unsqueeze "
    "view _unsafe_view _reshape_alias unfold diagonal lift_fresh".split()
)
_MAKES = frozenset("empty empty_strided empty_like new_empty new_empty_strided".split())
_COMPUTES = frozenset("abs amax amin arange bmm cat constant_pad_nd eq lt mm scalar_tensor where".split())
_READS = frozenset("tolist numpy item cpu to_list __bool__ __int__ __float__ __index__ __array__".split())


class CaptureRefused(Exception):
    """Something under capture that a replay on a device could not repeat."""


class _NoReading(TorchFunctionMode):
    """Refuses to hand values to the host; some ways there pass by the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in _READS:
            raise CaptureRefused(f"the host reads a tensor with {name} under capture")
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    """Launches and copies in the order of their coming, and the memory that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.made: list[Tensor] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.steps.append(lambda: launching.execute(kernel, grid, args, options))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _VIEWS:
            return func(*args, **(kwargs or {}))
        if name in _MAKES:
            return self._own(func(*args, **(kwargs or {})))
        if name == "clone":
            made = self._own(torch.empty_like(args[0], **(kwargs or {})))
            self.steps.append(lambda: _copy(made, args[0]))
            return made
        if name == "copy_":
            self.steps.append(lambda: _copy(args[0], args[1]))
            return args[0]
        if name in _COMPUTES:
            return self._computed(func, args, kwargs or {})
        raise CaptureRefused(f"torch computes {name} under capture")

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """The result's memory now, over poisoned inputs, and its values at every replay."""
        made = self._own(func(*args, **kwargs))
        self.steps.append(lambda: _copy(made, func(*args, **kwargs)))
        return made

    def _own(self, tensor: Tensor) -> Tensor:
        poison(tensor)
        self.made.append(tensor)
        return tensor


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def poison(tensor: Tensor) -> None:
    """Fill with what no kernel may use."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


class FakeGraph:
    """What was recorded."""

    def __init__(self, recording: _Recording) -> None:
        self._recording = recording
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for tensor in self._recording.made:
            poison(tensor)
        for step in self._recording.steps:
            step()

    @property
    def launches(self) -> int:
        """Kernels and copies of one replay."""
        return len(self._recording.steps)


class FakeDevice:
    """See ``specdec.backends.cuda.device.CudaDevice``. ``free`` bytes are left of ``total``, whatever is allocated."""

    def __init__(self, free: int = 2**40, total: int = 2**41) -> None:
        self.place = torch.device("cpu")
        self.name = "Triton's interpreter"
        self.free, self.total = free, total
        self.graphs: list[FakeGraph] = []

    def capture(self, body: Callable[[], None]) -> FakeGraph:
        body()
        recording = _Recording()
        with _NoReading(), recording, mock.patch.object(launching, "execute", recording.launch):
            body()
        graph = FakeGraph(recording)
        for tensor in recording.made:
            poison(tensor)
        self.graphs.append(graph)
        return graph

    def upload(self, values: Sequence[int], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        host = torch.tensor(values, dtype=dtype)
        return host if out is None else out.copy_(host)

    def memory(self) -> tuple[int, int]:
        return self.free, self.total

    @contextlib.contextmanager
    def guarded(self, what: str, nbytes: int | None, setting: str) -> Iterator[None]:
        if nbytes is not None and nbytes > self.free:
            raise out_of_memory(what, nbytes, self.free, self.total, setting)
        yield


def dot_row_by_row() -> None:
    """Give interpreted products the bits that rows of a matrix product have on a device, wherever they stand.

    numpy's product has other code, and other roundings, for the first rows of a matrix than for the last ones.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype, casting="same_kind")
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot

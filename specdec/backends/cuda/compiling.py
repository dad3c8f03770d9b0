"""Says that kernels are being compiled: the first use on a device takes a while in which nothing else is shown."""

from __future__ import annotations

from time import monotonic
from typing import Any

import attrs
import triton

from specdec.logs import get_logger

log = get_logger(__name__)

EVERY = 5.0  # seconds between two lines
OURS = __name__.split(".")[0] + "."  # modules


@attrs.define
class CompilationListener:
    """Triton's listener (``triton.knobs.compilation.listener``): a line for the first kernel, then how many are done.

    Kernels that triton finds in its cache, and those of other packages, are not mentioned.

    Args:
        earlier: the listener that was set before; it is still called.
    """

    earlier: Any = None
    _kernels: int = attrs.field(default=0, init=False)
    _seconds: float = attrs.field(default=0.0, init=False)
    _said: float = attrs.field(default=0.0, init=False)

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **what: Any) -> None:
        """Count a kernel that was compiled or found; ``times`` has microseconds."""
        if self.earlier is not None:
            self.earlier(src=src, times=times, cache_hit=cache_hit, **what)
        module = getattr(getattr(src, "fn", None), "__module__", None) or ""
        if cache_hit or not module.startswith(OURS):
            return
        self._kernels, self._seconds = self._kernels + 1, self._seconds + times.total / 1e6
        if self._kernels == 1:  # warnings, to be seen
            log.warning("compiling_kernels", backend="cuda", reason="first use: later starts load them from the cache")
        elif monotonic() - self._said >= EVERY:
            log.warning("compiling_kernels", backend="cuda", done=self._kernels, compile_s=round(self._seconds, 1))
        else:
            return
        self._said = monotonic()


def announce_compilation() -> None:
    """From now on, say when triton compiles; a second call changes nothing."""
    knobs = triton.knobs.compilation
    if not isinstance(knobs.listener, CompilationListener):
        knobs.listener = CompilationListener(knobs.listener)

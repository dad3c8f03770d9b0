"""Backends: where arrays live and which kernels run. ``ops.py`` is the protocol, each folder one implementation."""

from __future__ import annotations

from typing import Protocol

from specdec.backends.ops import Ops


class Backend(Protocol):
    """What a BackendSpec's factory returns."""

    name: str
    device: str  # for people: "cpu (AMD EPYC, 2 threads)"
    # ``notices``, where it has some: what a user should know about it here, one sentence each; results carry them

    def choose_dtype(self, requested: str, stored: str) -> tuple[str, str]:
        """The activation dtype for ``requested`` ("auto", "bfloat16", "float16", "float32") and the reason for it.

        ``stored`` is the dtype of most weights in the checkpoint. Raises: ConfigError for a dtype it cannot run.
        """

    def ops(self, dtype: str) -> Ops:
        """The operations in that dtype."""

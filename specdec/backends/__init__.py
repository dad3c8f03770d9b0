"""Backends: where arrays live and which kernels run. One folder per backend; ``ops.py`` defines the operations."""

from __future__ import annotations

import abc
import os

from specdec.backends.ops import Ops
from specdec.errors import ConfigError

EAGER = "SPECDEC_EAGER"  # when set, passes run op by op, for debugging


class Backend(abc.ABC):
    """A backend on this machine, as returned by a BackendSpec's factory.

    Attributes:
        name: the name of its spec.
        device: a readable description, such as "cpu (AMD EPYC, 2 threads)".
        dtypes: the supported activation dtypes, from "bfloat16", "float16" and "float32"; the first is the default.
        notices: what a user should know about it on this machine, one sentence each; included in results.
            ``ops`` may add to them.
    """

    name: str
    device: str
    dtypes: tuple[str, ...]
    notices: tuple[str, ...] = ()

    def choose_dtype(self, requested: str, stored: str) -> tuple[str, str]:
        """Return the activation dtype for ``target.dtype`` and the reason for it.

        ``stored`` is the dtype of most weights in the checkpoint. Raises: ConfigError for an unsupported dtype.
        """
        if requested in self.dtypes:
            return requested, "asked for"
        if requested != "auto":
            *others, last = ("auto", *self.dtypes)
            takes = f"{', '.join(others)} or {last}"
            raise ConfigError(f"target.dtype takes {takes} on the {self.name} backend, got {requested!r}")
        return self.auto_dtype(stored)

    def auto_dtype(self, stored: str) -> tuple[str, str]:
        """Return the dtype for "auto" and the reason: the stored dtype if supported, else the default."""
        return stored if stored in self.dtypes else self.dtypes[0], f"auto: the checkpoint is stored in {stored}"

    @abc.abstractmethod
    def ops(self, dtype: str) -> Ops:
        """Return the operations for one of ``dtypes``."""


def eager_reason() -> str:
    """Return why passes run op by op (the environment variable is set), or ""."""
    asked = os.environ.get(EAGER, "").strip().lower() not in ("", "0", "false", "no", "off")
    return f"{EAGER} is set" if asked else ""

"""Backends: where arrays live and which kernels run. Each folder is one; ``ops.py`` says what all of them compute."""

from __future__ import annotations

import abc
import os

from specdec.backends.ops import Ops
from specdec.errors import ConfigError

EAGER = "SPECDEC_EAGER"  # set: passes run op by op, for debugging


class Backend(abc.ABC):
    """What a BackendSpec's factory returns. The first of ``dtypes`` is the usual one.

    Attributes:
        name: the spec's.
        device: for people: "cpu (AMD EPYC, 2 threads)".
        dtypes: the activation dtypes that it runs, of "bfloat16", "float16" and "float32".
        notices: what a user should know about it here, one sentence each; results carry them.
    """

    name: str
    device: str
    dtypes: tuple[str, ...]
    notices: tuple[str, ...] = ()

    def choose_dtype(self, requested: str, stored: str) -> tuple[str, str]:
        """The activation dtype for ``target.dtype`` and the reason for it.

        ``stored`` is the dtype of most weights in the checkpoint. Raises: ConfigError for a dtype it cannot run.
        """
        if requested in self.dtypes:
            return requested, "asked for"
        if requested != "auto":
            *others, last = ("auto", *self.dtypes)
            takes = f"{', '.join(others)} or {last}"
            raise ConfigError(f"target.dtype takes {takes} on the {self.name} backend, got {requested!r}")
        return self.auto_dtype(stored)

    def auto_dtype(self, stored: str) -> tuple[str, str]:
        """The dtype of "auto" and the reason: by default as the weights are stored, else the usual one."""
        return stored if stored in self.dtypes else self.dtypes[0], f"auto: the checkpoint is stored in {stored}"

    @abc.abstractmethod
    def ops(self, dtype: str) -> Ops:
        """The operations in one of ``dtypes``."""


def eager_reason() -> str:
    """Why passes run op by op here: the user asked for it in the environment; "" otherwise."""
    asked = os.environ.get(EAGER, "").strip().lower() not in ("", "0", "false", "no", "off")
    return f"{EAGER} is set" if asked else ""

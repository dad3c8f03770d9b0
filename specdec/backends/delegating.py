"""Ops that delegate to other ops, to observe or change some of them."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable
from typing import Any

from specdec.backends.ops import Ops


class DelegatingOps(Ops):
    """Delegates every operation to ``inner``. A subclass overrides single operations, or ``call`` for all."""

    def __init__(self, inner: Ops) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.hidden_type = inner.hidden_type  # type: ignore[misc]  # a constant of each backend's class

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call the operation ``name`` of ``inner``."""
        return operator.methodcaller(name, *arguments, **named)(self.inner)


def _delegated(name: str) -> Callable[..., Any]:
    return lambda self, *arguments, **named: self.call(name, *arguments, **named)


for _name, _value in vars(Ops).items():
    if callable(_value) and not _name.startswith("_"):
        setattr(DelegatingOps, _name, _delegated(_name))
abc.update_abstractmethods(DelegatingOps)  # type: ignore[type-abstract]

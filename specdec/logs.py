"""Log events through the standard library's ``logging``, under the logger "specdec"; unconfigured, nothing is shown."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import structlog

logging.getLogger("specdec").addHandler(logging.NullHandler())  # else warnings of an unconfigured host go to stderr


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger for events with facts: ``log.info("prefilled", tokens=...)``.

    A record's message is the event with its facts; ``record.event`` and ``record.facts`` have them apart.
    """
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, _render],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return logger


def _render(_: object, __: str, facts: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    event, exc_info = str(facts.pop("event")), facts.pop("exc_info", None)
    message = " ".join([event, *(f"{name}={_short(value)}" for name, value in facts.items())])
    extra = {"event": event, "facts": dict(facts)}
    return (message,), {"extra": extra, "exc_info": exc_info, "stacklevel": 4}  # the caller's line


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)

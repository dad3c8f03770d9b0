"""The errors of specdec. Each says what was wrong, where it came from, what was got, and what would work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecdecError(Exception):
    """Base of every error that specdec raises on purpose.

    Args:
        message: one sentence that says what was wrong and what was got.
        **facts: further lines, printed after the message as ``label: value`` in the order given
            (underscores in a label become spaces); ``None`` values are omitted.
    """

    def __init__(self, message: str, **facts: object) -> None:
        self.message = message
        self.facts = {
            label.strip("_").replace("_", " "): str(value) for label, value in facts.items() if value is not None
        }
        super().__init__(message)

    def __str__(self) -> str:
        width = max((len(label) for label in self.facts), default=0) + 1
        lines = [f"  {label + ':':<{width}} {value}" for label, value in self.facts.items()]
        return "\n".join([self.message, *lines])


class ConfigError(SpecdecError):
    """A configuration key, value or file that cannot be used."""


class UnknownNameError(ConfigError):
    """A drafter, verifier, policy, backend or family that is not registered."""


class PluginError(SpecdecError):
    """A plugin that failed to import, to register or to build its part."""


class CheckpointError(SpecdecError):
    """A checkpoint folder, file, tensor or config that cannot be loaded as it is."""


class UnsupportedError(SpecdecError):
    """A capability that this model, backend or drafter does not have."""


class PromptError(SpecdecError):
    """A prompt or a generation limit that the model cannot take."""


class StateError(SpecdecError):
    """A call that the state of a sequence does not allow (commit before decode, rewind forwards, ...)."""


class SessionFileError(SpecdecError):
    """A saved session that cannot be used: truncated, foreign, newer, or of another model."""


class ShapeError(SpecdecError):
    """An array whose shape breaks the contract."""


class ContractError(SpecdecError):
    """A plugin returned something that its contract forbids (a token id outside the vocabulary, ...)."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None if nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest known name, or an empty string."""
    match = nearest(name, known)
    return f" Did you mean {match!r}?" if match else ""

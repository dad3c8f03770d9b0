"""The errors of specdec. Each says what was wrong, where it came from, what was got, and what would work."""

from __future__ import annotations

import difflib
import importlib
import itertools
from collections.abc import Iterable
from types import ModuleType

# Characters of an error with all its facts, whatever a file, a user or a plugin put into it. With the name of its
# class, which a traceback and the command line put before it, it has at most 2,000.
MESSAGE_LIMIT = 1900
_SHOWN = 200  # characters of a value
_COMPARED = 1000  # names, at most, that one is compared with


class SpecdecError(Exception):
    """Base of every error that specdec raises on purpose.

    ``str(error)`` has at most ``MESSAGE_LIMIT`` characters: of a longer one the longest parts lose their ends, and say
    how many characters. Control characters and lone surrogates are escaped.

    Args:
        message: one sentence that says what was wrong and what was got.
        **facts: further lines, printed after the message as ``label: value`` in the order given
            (underscores in a label become spaces); ``None`` values are omitted.

    Attributes:
        plugin: kind and name of the plugin that failed, such as ``("verifier", "strict")``; None if none did.
        tokens: the ids that a generation had produced when this error ended it; its session keeps them.
    """

    plugin: tuple[str, str] | None = None
    tokens: tuple[int, ...] = ()

    def __init__(self, message: str, **facts: object) -> None:
        given = {label.strip("_").replace("_", " "): value for label, value in facts.items() if value is not None}
        labels = len(given) * (max(map(len, given), default=0) + len("\n  : "))  # padded to the longest
        self.message, *values = _fitted([_text(message), *map(_text, given.values())], MESSAGE_LIMIT - labels)
        self.facts = dict(zip(given, values, strict=True))
        super().__init__(self.message)

    def __str__(self) -> str:
        width = max((len(label) for label in self.facts), default=0) + 1
        lines = [f"  {label + ':':<{width}} {value}" for label, value in self.facts.items()]
        return "\n".join([self.message, *lines])


def _text(value: object) -> str:
    """``str(value)`` that can be printed anywhere; a class that cannot be printed gives its name."""
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - another class's method, or an integer of thousands of digits
        text = f"<{type(value).__name__}>"
    return printable(text[: 2 * MESSAGE_LIMIT]) + text[2 * MESSAGE_LIMIT :]


def printable(text: str, kept: str = "\n\t") -> str:
    """``text`` with every character that cannot be printed escaped, except those in ``kept``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """``text`` that cannot pass for several lines: ``printable``, with tabs and the ends of lines escaped too."""
    return printable(text, kept="")


def _fitted(parts: list[str], room: int) -> list[str]:
    """The parts, the longest cut to one length if all together are longer than ``room`` characters."""
    longest, left = room, room
    for number, part in enumerate(sorted(parts, key=len)):
        share = left // (len(parts) - number)
        if len(part) > share:
            longest = share
            break
        left -= len(part)
    return [cut(part, longest) for part in parts]


def cut(text: str, length: int) -> str:
    """``text``, or its beginning and how many characters were left out; at most ``length`` characters in all."""
    if len(text) <= length:
        return text
    kept = max(length - len(f"... ({len(text):,} more characters)"), 0)
    return f"{text[:kept]}... ({len(text) - kept:,} more characters)"[: max(length, 0)]


def shown(value: object, length: int = _SHOWN) -> str:
    """``repr(value)`` on one line, cut to ``length`` characters. Never fails: some values have no repr."""
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:  # noqa: BLE001 - another class's method, an integer of thousands of digits, deep nesting
        return f"<{type(value).__name__}>"
    return cut(text, length)


def typed(value: object, length: int = _SHOWN) -> str:
    """``shown`` with the value's type: ``[1, 2] (list)``."""
    return "None" if value is None else f"{shown(value, length)} ({type(value).__name__})"


def described(error: BaseException) -> str:
    """An exception's type and text on one line. Never fails: some exceptions have no text."""
    return f"{type(error).__name__}: {' '.join(_text(error).split())}".rstrip(": ")


class ConfigError(SpecdecError):
    """A configuration key, value or file that cannot be used."""


class UnknownNameError(ConfigError):
    """A drafter, verifier, policy, backend or family that is not registered."""


class PluginError(SpecdecError):
    """A plugin that failed: to import, to register, to build its part, or in a later call."""


class ContractError(PluginError):
    """A plugin returned something that its contract forbids (a token id outside the vocabulary, ...)."""


class CheckpointError(SpecdecError):
    """A checkpoint folder, file, tensor or config that cannot be loaded as it is."""


class UnsupportedError(SpecdecError):
    """A capability that this model, backend or drafter does not have."""


class PromptError(SpecdecError):
    """A prompt or a generation limit that the model cannot take."""


class StateError(SpecdecError):
    """A call that the state of a sequence does not allow (commit before decode, rewind forwards, ...)."""


class NoMemoryError(StateError):
    """There is not enough memory, for weights or for the state of another sequence."""


class SessionFileError(SpecdecError):
    """A saved session that cannot be used: truncated, foreign, newer, or of another model."""


class ShapeError(SpecdecError):
    """An array whose shape breaks the contract."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None if nothing is close.

    Comparing takes the product of two lengths: the first thousand names of an ordinary length are compared.
    """
    if len(name) > _SHOWN:
        return None
    compared = list(itertools.islice((other for other in known if len(other) <= _SHOWN), _COMPARED))
    if name not in compared:
        for other in compared:
            if other.casefold() == name.casefold():
                return other
    matches = difflib.get_close_matches(name, compared, n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest known name, or an empty string."""
    match = nearest(name, known)
    return f" Did you mean {match!r}?" if match else ""


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module of one of specdec's extras. Raises: UnsupportedError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"this needs the package {module.partition('.')[0]}: {error}",
            try_=f"pip install 'specdec-framework[{extra}]'",
        ) from error

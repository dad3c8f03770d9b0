"""Finds stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.errors import PromptError


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, however it is split.

    The match that ends first wins; of several that end at the same character, the longest. Text before the match is
    emitted; the match and what follows are not.
    Raises: PromptError for an empty stop string.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        # longest first: of two that end at the same character, the one that starts earlier is found first
        self._stops = sorted(dict.fromkeys(stop_strings), key=len, reverse=True)
        if any(not stop for stop in self._stops):
            raise PromptError("a stop string is empty", try_="at least one character")
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the part that no match can include, and the stop string if one was found.

        Text that could be the start of a stop string is held back. After a match nothing is emitted.
        """
        if self._matched is not None or not self._stops:
            return ("" if self._matched is not None else text), self._matched
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._matched = min(found)
            self._held = ""
            return text[:at], self._matched
        keep = self._open_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Return the text held back; call it at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _open_length(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that is a prefix of a stop string."""
        for length in range(min(len(self._stops[0]) - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

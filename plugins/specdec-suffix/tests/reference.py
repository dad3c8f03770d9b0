"""A brute-force reference for the automaton: obviously correct, quadratic or worse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def longest_match(text: Sequence[int], query: Sequence[int]) -> int:
    """Tokens of the longest suffix of ``query`` that occurs in ``text``."""
    return next((n for n in range(len(query), 0, -1) if _ends(text, query[len(query) - n :])), 0)


def longest_repeat(text: Sequence[int]) -> int:
    """Tokens of the longest suffix of ``text`` that also occurs earlier."""
    return longest_match(text[:-1], text) if text else 0


def continuation(
    text: Sequence[int], context: Sequence[int], limit: int, *, min_match: int, max_match: int, min_share: float
) -> list[int]:
    """``SuffixAutomaton.follow``, with every count taken from the text."""
    path: list[int] = []
    context = list(context)
    while len(path) < limit:
        context = context[-max_match:]
        followed = [text[end] for end in _ends(text, context) if end < len(text) and text[end] >= 0]
        if not followed:  # skip to a suffix with more occurrences; one with the same occurrences adds nothing
            places = len(_ends(text, context))
            while context and len(_ends(text, context)) == places:
                context = context[1:]
            if len(context) < min_match:
                break
            continue
        latest = {token: at for at, token in enumerate(followed)}
        best, count = max(Counter(followed).items(), key=lambda item: (item[1], latest[item[0]]))
        if count < min_share * len(followed):
            break
        path.append(best)
        context.append(best)
    return path


def _ends(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """The positions where ``part`` ends in ``text``, ascending."""
    text, part = list(text), list(part)
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]

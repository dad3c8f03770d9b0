"""Tokens of Metal source. Joined again they are the text, so that lines keep their numbers."""

from __future__ import annotations

import re

import attrs

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/|\\\n)
  | (?P<directive>(?m:^)[ \t]*\#(?:[^\n\\]|\\.|\\\n)*)
  | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
  | (?P<number>(?:0[xX][0-9a-fA-F']+(?:\.[0-9a-fA-F]*)?(?:[pP][+-]?\d+)?|(?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\w*)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<mark>::|->|<<=|>>=|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|<<|.)
    """,
    re.VERBOSE | re.DOTALL,
)


@attrs.frozen
class Token:
    """A piece of text; ``kind`` is space, directive, string, number, name or mark."""

    kind: str
    text: str
    line: int

    def __eq__(self, other: object) -> bool:
        """A token equals its text, so that patterns read like the text."""
        return self.text == other if isinstance(other, str) else self is other

    __hash__ = object.__hash__


def tokens(text: str) -> list[Token]:
    found = []
    line = 1
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        assert kind is not None
        found.append(Token(kind, match.group(), line))
        line += match.group().count("\n")
    return found

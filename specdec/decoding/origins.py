"""How each token of a generation came to be: drafted, corrected, a bonus, or decoded plainly."""

from __future__ import annotations

from typing import Literal

import attrs

from specdec.contract import CycleRecord
from specdec.text import IncrementalDecoder, Tokenizer

Origin = Literal["drafted", "corrected", "bonus", "plain"]


@attrs.frozen(kw_only=True)
class TokenOrigin:
    """A token and its origin.

    Attributes:
        token: its id.
        text: what it added to the text; empty within a character, and for special tokens.
        origin: "drafted" and kept, "corrected" (the target's choice in place of a wrong draft token), "bonus" (after a
            draft that was right to its end), or "plain" (nothing was drafted).
        position: in its cycle; of a drafted token, the lookahead position.
        guess: the id that was drafted in its place, of a corrected token.
        guess_text: that token as text.
    """

    token: int
    text: str
    origin: Origin
    position: int
    guess: int | None = None
    guess_text: str = ""


class Origins:
    """Turns the records of cycles into tokens with their origins, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer)

    def add(self, record: CycleRecord) -> list[TokenOrigin]:
        """The tokens of a cycle. Their texts, joined over all cycles, are the text of the generation."""
        made = []
        for position, token in enumerate(record.emitted):
            origin: Origin = "drafted"
            guess = None
            if position >= record.accepted:
                origin = "plain" if not record.drafted else "bonus"
                if position < len(record.drafted):
                    origin, guess = "corrected", record.drafted[position]
            made.append(
                TokenOrigin(
                    token=token,
                    text=self._decoder.push([token]),
                    origin=origin,
                    position=position,
                    guess=guess,
                    guess_text="" if guess is None else self._tokenizer.decode([guess], skip_special=False),
                )
            )
        return made

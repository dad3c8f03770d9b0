"""The sessions of earlier requests, so that the next request of a conversation runs only what is new."""

from __future__ import annotations

import attrs

from specdec.contract import Guarantee, Parity
from specdec.decoding.parts import Parts
from specdec.decoding.session import Session
from specdec.text import common_prefix

MOST_SESSIONS = 16  # a drafter's own state is not counted in bytes


def keeps_texts(lm: Parts) -> bool:
    """Whether no text can depend on kept states or on drafts: an exact verifier, and rows of equal bits in any pass."""
    return lm.verifier.guarantee is Guarantee.EXACT and lm.info.parity is Parity.BITWISE


@attrs.frozen
class _Kept:
    session: Session
    prompt: int  # how many of its tokens were its last prompt
    size: int  # bytes


class Sessions:
    """Sessions in the order of their last use, the oldest first; bounded in number and bytes. For one thread.

    Nothing is kept unless ``keeps_texts``: the same request must give the same text whatever came before it.

    Attributes:
        size: bytes of all kept states.
    """

    def __init__(self, lm: Parts, most_bytes: int) -> None:
        self._lm = lm
        self._most_bytes = most_bytes if keeps_texts(lm) else 0
        self._kept: list[_Kept] = []
        self.size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, prompt: list[int]) -> Session:
        """A session that holds the beginning of ``prompt``, or an empty one. It is the caller's until ``keep``.

        A session is taken if at least half of its last prompt is used again: the rest is lost to its own
        conversation. Its answer does not count, because a template may drop the thinking in it.
        """
        best, shared = None, 0
        for kept in self._kept:
            common = common_prefix(kept.session.tokens, prompt)
            if common > shared and 2 * common >= kept.prompt:
                best, shared = kept, common
        if best is None:
            return Session(self._lm)
        self._drop(best)
        return best.session

    def keep(self, session: Session, prompt: int) -> None:
        """Keep a session with the length of its last prompt; the least recently used ones make room.

        One that is too large for the bound is dropped.
        """
        size = session.sequence.state.nbytes()
        if size > self._most_bytes:
            return
        while self._kept and (self.size + size > self._most_bytes or len(self._kept) >= MOST_SESSIONS):
            self._drop(self._kept[0])
        self._kept.append(_Kept(session, prompt, size))
        self.size += size

    def _drop(self, kept: _Kept) -> None:
        self._kept = [other for other in self._kept if other is not kept]
        self.size -= kept.size

"""Chooses the head of the next draft: pruned to a draft vocabulary, or full while the pruned one misses too much.

The choice is a function of the committed tokens, so a drafter rebuilt over the same tokens chooses the same head.

By default (``vocabulary = "auto"``) the tokenizer and the sizes of the weights give the vocabulary; nothing is
measured, so that no output depends on the machine. A draft step reads the head and the rest of the drafter's weights.
The head is pruned to as many rows as take as long as that rest; where more than half of them would be left it stays
whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from specdec.config import between
from specdec.drafters.draft_vocabulary import DraftVocabulary
from specdec.drafters.token_counts import lowest_ids
from specdec.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from specdec.contract import Context, DraftHead, PrepareEnv

AUTO, FULL = "auto", "full"
LEAST = 4096  # rows of an automatic vocabulary
TYPICAL_DEPTH = 3  # draft tokens of a cycle, for what the full head costs
MAX_MISS = 0.1  # for a vocabulary from a file
WINDOW = 64
"""Time constant, in tokens, of the exponential average of misses. It starts at 0, so seven misses in a row pass a limit
of 0.1."""


@attrs.frozen(kw_only=True)
class PrunedHeadConfig:
    """A cheaper head, and when to stop a draft early."""

    vocabulary: str = AUTO  # the ids to draft from: a file made by specdec vocab, "auto", or "full" for all
    max_miss: float | None = attrs.field(  # share of tokens outside; above: full head. By default 0.1, or what pays
        default=None, validator=attrs.validators.optional(between(0.0, 1.0))
    )
    max_extra: int = attrs.field(default=2048, validator=between(0, 65536))  # ids of a sequence added to the vocabulary
    min_confidence: float = attrs.field(default=0.0, validator=between(0.0, 1.0))  # least probability of the best token
    min_margin: float = attrs.field(default=0.0, validator=between(0.0, 1000.0))  # nats from the best to the second

    def __attrs_post_init__(self) -> None:
        """Raises: ConfigError for draft-vocabulary settings without a draft vocabulary."""
        fields = attrs.fields_dict(PrunedHeadConfig)
        idle = [name for name in ("max_miss", "max_extra") if getattr(self, name) != fields[name].default]
        if self.vocabulary == FULL and idle:
            raise ConfigError(
                f"drafter.{idle[0]} belongs to a draft vocabulary, and drafter.vocabulary is {FULL!r}",
                try_="specdec vocab MODEL makes one; or leave the setting out",
            )

    def prepare(
        self, env: PrepareEnv, head: Callable[[Sequence[int]], DraftHead], rest: int, width: int
    ) -> PreparedVocabulary | None:
        """Choose the draft vocabulary and gather its rows, once for all sequences; None for the full head.

        Args:
            head: gathers rows of the head.
            rest: weights that a draft step reads beside the head; 0 if unknown.
            width: weights of a row of the head.
        """
        if self.vocabulary == FULL:
            return None
        if self.vocabulary == AUTO:
            return _automatic(env, head, rest, width)
        vocabulary = DraftVocabulary.read(self.vocabulary)
        vocabulary.check(env.target.info, env.tokenizer, self.vocabulary)
        return PreparedVocabulary.of(head(vocabulary.tokens), env.target.info.vocab_size)


def _automatic(
    env: PrepareEnv, head: Callable[[Sequence[int]], DraftHead], rest: int, width: int
) -> PreparedVocabulary | None:
    """The vocabulary that the tokenizer gives; None where a pruned head saves little, or the target has none."""
    info = env.target.info
    size = max(LEAST, rest // width)
    if env.tokenizer is None or not rest or not info.pass_weights or 2 * size > info.vocab_size:
        return None
    try:
        pruned = head(lowest_ids(env.tokenizer, info.vocab_size, size))
    except UnsupportedError:  # a backend without pruned heads
        return None
    cycle = info.pass_weights + TYPICAL_DEPTH * (rest + size * width)
    saved = TYPICAL_DEPTH * (info.vocab_size - size) * width / cycle
    # A share m of misses costs about 1.2 m of the tokens per cycle at usual acceptance. A text that misses more than a
    # third of what would still pay is probably in a script that the pruned head does not have: leave early.
    return PreparedVocabulary.of(pruned, info.vocab_size, max_miss=math.log1p(saved) / 4)


@attrs.frozen(eq=False)
class PreparedVocabulary:
    """Shared by all sequences: the base head, one byte per token id, 1 if the head has it, and the limit of misses."""

    head: DraftHead
    inside: bytes
    max_miss: float

    @classmethod
    def of(cls, head: DraftHead, vocab_size: int, max_miss: float = MAX_MISS) -> PreparedVocabulary:
        inside = bytearray(vocab_size)
        for token in head.tokens:
            inside[token] = 1
        return cls(head, bytes(inside), max_miss)


class HeadChoice:
    """Follows one sequence: adds the ids it sees to the draft vocabulary, and counts misses.

    Ids of the prompt and the output that the vocabulary lacks are added for this sequence, at most ``max_extra`` of
    them; beyond that, the least recently seen quarter is dropped.

    A token is a **miss** if neither the vocabulary nor the ids added before it contained it: no draft of that position
    could have been right. Tokens of a prompt count too, since its text resembles the answer's. Once the decayed share
    of misses exceeds ``max_miss``, drafts use the full head until the share has fallen to half of that.
    """

    def __init__(self, prepared: PreparedVocabulary, config: PrunedHeadConfig) -> None:
        self._prepared = prepared
        self._max_miss = prepared.max_miss if config.max_miss is None else config.max_miss
        self._max_extra = config.max_extra
        self._drafts = {"pruned": 0, "full": 0}
        self.forget()

    def forget(self) -> None:
        """Start over, because the sequence no longer begins with the tokens seen so far."""
        self._read = 0  # tokens followed
        self._extra: dict[int, None] = {}  # ids added, most recently seen last
        self._head: DraftHead | None = self._prepared.head  # None: to be built from _extra
        self._new: list[int] = []  # ids in _extra that _head lacks
        self.share = 0.0
        self.full = False

    def follow(self, context: Context) -> DraftHead | None:
        """The head for the draft after ``context``, counted for the report; None for the full one."""
        inside, extra = self._prepared.inside, self._extra
        for token in context[self._read :]:
            missed = False
            if not inside[token]:
                missed = token not in extra
                self._add(token, new=missed)
            self.share += (missed - self.share) / WINDOW
            self.full = self.share > (self._max_miss / 2 if self.full else self._max_miss)
        self._read = len(context)
        self._drafts["full" if self.full else "pruned"] += 1
        return None if self.full else self._extended()

    def _add(self, token: int, *, new: bool) -> None:
        if self._max_extra == 0:
            return
        self._extra.pop(token, None)
        self._extra[token] = None
        if new:
            self._new.append(token)
        if len(self._extra) > self._max_extra:
            for oldest in list(self._extra)[: max(1, self._max_extra // 4)]:
                del self._extra[oldest]
            self._head = None

    def _extended(self) -> DraftHead:
        if self._head is None:
            self._head = self._prepared.head.extended(list(self._extra))
        elif self._new:
            self._head = self._head.extended(self._new)
        self._new = []
        return self._head

    def report(self) -> dict[str, Any]:
        """For ``Drafter.report``."""
        reason = ""
        if self.full:
            reason = (
                f"{self.share:.0%} of the last tokens were outside the draft vocabulary, more than "
                f"{'half of ' if self.share <= self._max_miss else ''}max_miss ({self._max_miss:g})"
            )
        return {
            "vocabulary": len(self._prepared.head.tokens),
            "extra": len(self._extra),
            "outside": round(self.share, 4),
            "head": "full" if self.full else "pruned",
            "reason": reason,
            "pruned_drafts": self._drafts["pruned"],
            "full_drafts": self._drafts["full"],
        }

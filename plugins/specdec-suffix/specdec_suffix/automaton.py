"""An online suffix automaton with occurrence counts and undo.

A state represents a set of substrings that end at the same positions; its edges give the tokens that follow them.
Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". Two additions:

- *Counts.* Every new token adds one occurrence of all suffixes of the text, that is, along a path of suffix links.
  Only suffixes that a draft can use are counted, those of ``min_match`` to ``max_match + 1`` tokens, so a token costs
  amortised O(1) for the structure and at most ``max_match + 1`` steps for counts (a handful on real text).
- *Undo.* Each token records what it changed, so ``pop`` removes the last one in the time it took to add. The result
  equals the automaton of the shorter text field by field.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ROOT = 0


class _Record(NamedTuple):
    """What one token changed."""

    token: int
    last: int  # the previous last state
    capped: int  # the previous state of the capped suffix
    added: list[int]  # states that got an edge to the new state
    redirected: list[int]  # states whose edge went from ``split`` to its clone
    split: int  # the state that was cloned, or -1
    recents: list[int]  # previous ``recent`` along the counted path


class SuffixAutomaton:
    """All substrings of a growing text, the tokens that followed them, and how often.

    Args:
        min_match: tokens of the shortest context that is counted.
        max_match: tokens of the longest.
        undo: keep what ``pop`` needs; without it the automaton only grows.
    """

    def __init__(self, min_match: int, max_match: int, *, undo: bool = True) -> None:
        self.min_match, self.max_match = min_match, max_match
        # one entry per state
        self.edges: list[dict[int, int]] = [{}]  # token -> state
        self.link: list[int] = [-1]  # the state of the longest suffix that also ends elsewhere
        self.length: list[int] = [0]  # tokens of the longest substring
        self.count: list[int] = [0]  # occurrences, of states that have a substring of countable length
        self.recent: list[int] = [0]  # tokens of the text when it last occurred
        self._last = ROOT  # the state of the whole text
        self._capped = ROOT  # the state of its suffix of at most max_match + 1 tokens
        self._size = 0
        self._journal: list[_Record] | None = [] if undo else None

    def __len__(self) -> int:
        """The number of tokens in the text."""
        return self._size

    @property
    def longest(self) -> int:
        """Tokens of the longest suffix of the text that also occurs earlier, however long."""
        return 0 if self._last == ROOT else self.length[self.link[self._last]]

    def match(self) -> tuple[int, int]:
        """The state of that suffix, cut to ``max_match`` tokens, and its length."""
        if self._last == ROOT:
            return ROOT, 0
        state = self.link[self._last] if self._capped == self._last else self._capped
        return self._cut(state), min(self.length[state], self.max_match)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Append one token to the text."""
        edges, link, length = self.edges, self.link, self.length
        new, state = len(edges), self._last
        self._append({}, length[state] + 1, ROOT, 0, 0)
        added: list[int] = []
        redirected: list[int] = []
        split = -1
        while state != -1 and token not in edges[state]:
            edges[state][token] = new
            added.append(state)
            state = link[state]
        if state != -1:
            target = edges[state][token]
            if length[target] == length[state] + 1:
                link[new] = target
            else:  # split ``target``: its shorter substrings now end at one more position
                split, clone = target, len(edges)
                self._append(dict(edges[split]), length[state] + 1, link[split], self.count[split], self.recent[split])
                while state != -1 and edges[state].get(token) == split:
                    edges[state][token] = clone
                    redirected.append(state)
                    state = link[state]
                link[split] = link[new] = clone
        former = self._last, self._capped
        self._last, self._size = new, self._size + 1
        self._capped = self._cut(edges[self._capped][token], self.max_match + 1)
        recents = []
        counted = self._capped
        while length[counted] >= self.min_match:
            self.count[counted] += 1
            recents.append(self.recent[counted])
            self.recent[counted] = self._size
            counted = link[counted]
        if self._journal is not None:
            self._journal.append(_Record(token, *former, added, redirected, split, recents))

    def pop(self) -> None:
        """Remove the last token."""
        if not self._journal:
            raise IndexError("there is no token to take back")
        record = self._journal.pop()
        edges, link = self.edges, self.link
        counted = self._capped
        for recent in record.recents:
            self.count[counted] -= 1
            self.recent[counted] = recent
            counted = link[counted]
        if record.split != -1:
            for state in record.redirected:
                edges[state][record.token] = record.split
            link[record.split] = link[-1]  # the clone is the newest state
            self._drop()
        for state in record.added:
            del edges[state][record.token]
        self._drop()
        self._last, self._capped = record.last, record.capped
        self._size -= 1

    def truncate(self, length: int) -> None:
        """Remove all tokens after the first ``length``."""
        while self._size > length:
            self.pop()

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Match another text against this one: the longest suffix that occurs here, after one more token.

        ``(state, matched)`` is the state of that suffix and its length, cut to ``max_match``; start with (ROOT, 0).
        The result depends only on the last ``max_match`` tokens of the other text.
        """
        while state != ROOT and token not in self.edges[state]:
            state = self.link[state]
            matched = self.length[state]
        if token not in self.edges[state]:
            return ROOT, 0
        matched = min(matched + 1, self.max_match)
        return self._cut(self.edges[state][token], matched), matched

    def follow(self, state: int, limit: int, min_share: float = 0.0) -> list[int]:
        """At most ``limit`` tokens after a context: at each step the token that followed most often (ties: the latest).

        Ends early when the best token has less than ``min_share`` of all followers. At the end of the text, continues
        from the longest shorter context that has a follower (so a repeating pattern continues past the end). Negative
        tokens separate documents and are never followed.
        """
        path: list[int] = []
        while len(path) < limit:
            total = best_count = best_recent = 0
            best = -1
            for token, target in self.edges[state].items():
                if token < 0:
                    continue
                count, recent = self.count[target], self.recent[target]
                total += count
                if (count, recent) > (best_count, best_recent):
                    best, best_count, best_recent = token, count, recent
            if best < 0:
                state = self.link[state]
                if state == -1 or self.length[state] < self.min_match:
                    break
                continue
            if best_count < min_share * total:
                break
            path.append(best)
            state = self._cut(self.edges[state][best])
        return path

    def _cut(self, state: int, limit: int | None = None) -> int:
        """The state of the suffix of at most ``limit`` tokens; fast, because callers exceed it by at most one token."""
        limit = self.max_match if limit is None else limit
        while state != ROOT and self.length[self.link[state]] >= limit:
            state = self.link[state]
        return state

    def _append(self, edges: dict[int, int], length: int, link: int, count: int, recent: int) -> None:
        self.edges.append(edges)
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.recent.append(recent)

    def _drop(self) -> None:
        for column in (self.edges, self.length, self.link, self.count, self.recent):
            column.pop()

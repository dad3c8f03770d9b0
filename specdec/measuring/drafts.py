"""Where a drafter goes wrong: each draft next to the output, mismatches, and acceptance by kind of token."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specdec.errors import UnsupportedError
from specdec.files.reading import why

if TYPE_CHECKING:
    from specdec.measuring.runs import Run
    from specdec.text import Tokenizer

CONTEXT_TOKENS = 16  # of context shown in a log row
COMMON_SHARE = 0.5


def _texts(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[str]:
    """Each token as text, including special tokens; partial characters become the replacement character."""
    return [tokenizer.decode([token], skip_special=False) for token in tokens]


# --- logs ------------------------------------------------------------------------------------------------------------


def log_rows(run: Run, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """One row per draft: the last tokens of the context, drafted and actual tokens, and where they first differ.

    ``actual`` holds the output tokens at the drafted positions, fewer if the generation ended. ``mismatch`` is the
    lookahead position of the first rejected token, null if all were accepted.
    """
    assert run.prompt is not None
    tokens = [*run.prompt_tokens, *run.tokens]
    for cycle in run.cycles:
        if not cycle.drafted:
            continue
        at = cycle.position
        actual = tokens[at : at + len(cycle.drafted)]
        yield {
            "class": run.prompt.kind,
            "prompt": run.prompt.source,
            "position": at - len(run.prompt_tokens),  # generated tokens before the draft
            "context": tokenizer.decode(tokens[max(0, at - CONTEXT_TOKENS) : at], skip_special=False),
            "drafted": list(cycle.drafted),
            "drafted_text": _texts(tokenizer, cycle.drafted),
            "actual": actual,
            "actual_text": _texts(tokenizer, actual),
            "accepted": cycle.accepted,
            "mismatch": cycle.accepted if cycle.accepted < len(cycle.drafted) else None,
        }


class DraftLog:
    """``log_rows`` of every run, as JSON lines; the first run replaces an existing file.

    So an interrupted measurement leaves a partial log, and one that cannot start leaves an older log alone. A file that
    cannot be written ends no measurement: ``failure`` says why, and the rest is left out.
    """

    def __init__(self, path: str | Path, tokenizer: Tokenizer) -> None:
        self.path, self._tokenizer, self._mode = path, tokenizer, "w"
        self.failure: UnsupportedError | None = None

    def add(self, run: Run) -> None:
        """Write the drafts of a run."""
        if self.failure is not None:
            return
        try:
            with open(self.path, self._mode, encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in log_rows(run, self._tokenizer))
        except OSError as error:
            message = f"the log cannot be written: {why(error)}"
            self.failure = UnsupportedError(message, file=self.path)
        self._mode = "a"


# --- summaries -------------------------------------------------------------------------------------------------------


@attrs.frozen
class Mismatch:
    """A rejected draft token, the actual output token, and their count; both as text."""

    drafted: str
    actual: str
    count: int
    share: float  # of all rejected tokens


def _reached(run: Run) -> Iterator[tuple[int, int, bool]]:
    """Every draft token that was reached, the token of the output in its place, and whether it was accepted."""
    start = len(run.prompt_tokens)
    for cycle in run.cycles:
        following = run.tokens[cycle.position - start :]  # the output may end before the draft
        for place, (drafted, actual) in enumerate(zip(cycle.drafted, following, strict=False)):
            if place <= cycle.accepted:
                yield drafted, actual, place < cycle.accepted


def commonest(runs: Iterable[Run], tokenizer: Tokenizer, limit: int) -> list[Mismatch]:
    """The most frequent first mismatches, most frequent first."""
    pairs = Counter((drafted, actual) for run in runs for drafted, actual, right in _reached(run) if not right)
    return [
        Mismatch(drafted=drafted, actual=actual, count=count, share=count / pairs.total())
        for pair, count in sorted(pairs.items(), key=lambda entry: (-entry[1], entry[0]))[:limit]
        for drafted, actual in [_texts(tokenizer, pair)]
    ]


@attrs.frozen(kw_only=True)
class KindReport:
    """Draft tokens by the kind of the token that the output has in their place.

    Counted are tokens whose predecessors in the draft were all right, so that each is a fair guess.
    """

    kind: str
    accepted: int
    rejected: int
    rate: float | None  # accepted / (accepted + rejected); None if there were none


def by_kind(runs: Sequence[Run], special_ids: Collection[int]) -> tuple[KindReport, ...]:
    """Count accepted and rejected draft tokens by kind.

    Special tokens are the tokenizer's. Of the others, the most frequent ones that make up half of all prompt and output
    tokens of ``runs`` are common; the rest is rare.
    """
    seen = Counter(token for run in runs for token in (*run.prompt_tokens, *run.tokens) if token not in special_ids)
    common: set[int] = set()
    covered = 0
    for token, count in sorted(seen.items(), key=lambda entry: (-entry[1], entry[0])):
        if covered >= COMMON_SHARE * seen.total():
            break
        common.add(token)
        covered += count
    counts = {kind: [0, 0] for kind in ("common", "rare", "special")}  # rejected, accepted
    for run in runs:
        for _, token, right in _reached(run):
            counts["special" if token in special_ids else "common" if token in common else "rare"][right] += 1
    return tuple(
        KindReport(kind=kind, accepted=right, rejected=wrong, rate=right / (right + wrong) if right + wrong else None)
        for kind, (wrong, right) in counts.items()
    )

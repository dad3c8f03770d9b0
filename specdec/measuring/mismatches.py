"""Show where a drafter goes wrong: every draft next to the actual output, and the commonest mismatches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specdec.errors import UnsupportedError

if TYPE_CHECKING:
    from specdec.measuring.runs import Run
    from specdec.text import Tokenizer

CONTEXT_TOKENS = 16  # of context shown in a log row


def _texts(tokenizer: Tokenizer, tokens: Iterable[int]) -> list[str]:
    """Each token as text, including special tokens; partial characters become the replacement character."""
    return [tokenizer.decode([token], skip_special=False) for token in tokens]


def log_rows(run: Run, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """One row per draft: the last tokens of the context, drafted and actual tokens, and where they first differ.

    ``actual`` holds the output tokens at the drafted positions, fewer if the generation ended. ``mismatch`` is the
    lookahead position of the first rejected token, null if all were accepted.
    """

    prompt = run.prompt
    assert prompt is not None
    tokens = [*run.prompt_tokens, *run.tokens]
    for cycle in run.cycles:
        if not cycle.drafted:
            continue
        at = cycle.position
        actual = tokens[at : at + len(cycle.drafted)]
        yield {
            "class": prompt.kind,
            "prompt": prompt.source,
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
    """A JSON-lines file of ``log_rows``, written run by run; the first run replaces an existing file.

    So an interrupted measurement leaves a partial log, and one that cannot start leaves an older log alone.
    """

    def __init__(self, path: str | Path, tokenizer: Tokenizer) -> None:
        self._path, self._tokenizer, self._mode = path, tokenizer, "w"

    def add(self, run: Run) -> None:
        """Write the drafts of a run. Raises: UnsupportedError if the file cannot be written."""
        try:
            with open(self._path, self._mode, encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in log_rows(run, self._tokenizer))
        except OSError as error:
            raise UnsupportedError(f"the log cannot be written: {error.strerror or error}", file=self._path) from error
        self._mode = "a"


@attrs.frozen
class Mismatch:
    """A rejected draft token, the actual output token, and their count; both as text."""

    drafted: str
    actual: str
    count: int
    share: float  # of all rejected tokens


def commonest(runs: Iterable[Run], tokenizer: Tokenizer, limit: int) -> list[Mismatch]:
    """The most frequent first mismatches, most frequent first."""
    pairs: Counter[tuple[int, int]] = Counter()
    for run in runs:
        start = len(run.prompt_tokens)
        for cycle in run.cycles:
            at = cycle.position - start + cycle.accepted
            if cycle.accepted < len(cycle.drafted) and at < len(run.tokens):  # no output past the end
                pairs[cycle.drafted[cycle.accepted], run.tokens[at]] += 1
    total = sum(pairs.values())
    return [
        Mismatch(drafted=drafted, actual=actual, count=count, share=count / total)
        for pair, count in sorted(pairs.items(), key=lambda entry: (-entry[1], entry[0]))[:limit]
        for drafted, actual in [_texts(tokenizer, pair)]
    ]

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
    from specdec.contract import CycleRecord
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

    So an interrupted measurement leaves a partial log, and one that cannot start leaves an older log alone. A log that
    cannot be written does not end the measurement: ``failure`` says why, and the rest is left out.
    """

    def __init__(self, path: str | Path, tokenizer: Tokenizer) -> None:
        self._path, self._tokenizer, self._mode = path, tokenizer, "w"
        self.failure: UnsupportedError | None = None

    def add(self, run: Run) -> None:
        """Write the drafts of a run."""
        if self.failure is None:
            self.failure = _written(self._path, self._mode, log_rows(run, self._tokenizer))
            self._mode = "a"


class MissedDrafts:
    """A JSON-lines file with the first wrong token of every rejected draft, written cycle by cycle.

    Positions count from the first token that the generation emits. A log that cannot be written later does not end the
    generation: ``failure`` says why, and the rest is left out.

    Raises: UnsupportedError if the file cannot be opened, before anything is generated.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._path, self._tokenizer, self._emitted = path, tokenizer, 0
        self.failure = _written(path, "w", ())
        if self.failure is not None:
            raise self.failure

    def add(self, cycle: CycleRecord) -> None:
        """Write a cycle's missed draft token, if the output has another one in its place."""
        at, emitted = cycle.accepted, cycle.emitted
        if self.failure is None and at < min(len(cycle.drafted), len(emitted)):
            drafted, chosen = cycle.drafted[at], emitted[at]
            texts = _texts(self._tokenizer, (drafted, chosen))
            row: dict[str, Any] = {
                "position": self._emitted + at,
                "lookahead": at,
                "drafted": drafted,
                "chosen": chosen,
            }
            row |= {"drafted_text": texts[0], "chosen_text": texts[1]}
            self.failure = _written(self._path, "a", [row])
        self._emitted += len(emitted)


def _written(path: str | Path, mode: str, rows: Iterable[dict[str, Any]]) -> UnsupportedError | None:
    """Write rows of JSON; returns why that failed, None if it did not."""
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as error:
        return UnsupportedError(f"the log cannot be written: {error.strerror or error}", file=path)
    return None


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

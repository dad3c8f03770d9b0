"""The trace format: what a host asked of a drafter, what it drafted, and what was committed, as JSON lines.

The first line of a section is its header; a file that several processes appended to, one after another, has several.
Every other line belongs to a request of its section:

    {"specdec": "trace", "version": 1, "host": "vllm", "drafter": {"name": "suffix"}, "vocab_size": 32000, ...}
    {"request": 0, "prompt": [1, 2, 3]}
    {"request": 0, "position": 3, "depth": 4, "draft": [4, 5]}
    {"request": 0, "commit": [4, 6]}
    {"request": 0, "rewind": 3}

``prompt`` is what was committed when the first draft was asked for; in some hosts that includes the first generated
token. ``position`` is how many tokens were committed when a draft was asked for. Unknown keys are ignored, so that a
later version may add some.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import attrs

from specdec._version import __version__
from specdec.config import Choice
from specdec.errors import PromptError, UnsupportedError, shown
from specdec.files.reading import parse_json, read_bytes, why
from specdec.logs import get_logger

if TYPE_CHECKING:
    from specdec.contract import CycleRecord

log = get_logger(__name__)

VERSION = 1
LARGEST = 2**30  # bytes of a file


@attrs.frozen
class Round:
    """A draft and what was committed after it. ``depth`` is 0 if none was asked for."""

    position: int  # committed tokens before
    depth: int
    drafted: tuple[int, ...]
    committed: tuple[int, ...] = ()


@attrs.define(kw_only=True)
class TracedRequest:
    """One request of a trace."""

    host: str
    drafter: Choice | None
    vocab_size: int
    prompt: tuple[int, ...]
    rounds: list[Round] = attrs.field(factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens committed after the prompt."""
        return tuple(token for drafting in self.rounds for token in drafting.committed)


@attrs.frozen
class Trace:
    """The requests of a file, in the order they began."""

    requests: tuple[TracedRequest, ...]
    cut: int = 0
    """The line, the last one, that is incomplete and left out; 0 if none is."""


class TraceWriter:
    """Appends a section to a file. A file that cannot be written later ends the recording, not the host.

    A last line that an ended process left incomplete is taken away first. A request with an id outside the vocabulary
    is recorded up to there. Two processes that write at the same time need a file each.

    Args:
        path: created if it does not exist.
        host: what runs the target: "specdec", "vllm", ...
        drafter: its name and options.
        facts: further entries of the header, such as ``model`` and ``depth``.

    Attributes:
        failure: why the recording ended early; None while it works.

    Raises: UnsupportedError if the file cannot be opened, or is there and no trace.
    """

    def __init__(self, path: str | Path, *, host: str, drafter: Choice, vocab_size: int, **facts: Any) -> None:
        self._path = path
        self._requests = 0
        self._vocab_size = vocab_size
        self._closed: set[int] = set()  # requests of which no more is recorded
        self.failure: UnsupportedError | None = None
        self._file: TextIO | None = None
        try:
            if os.path.isfile(path):
                _drop_cut_line(path)
            self._file = open(path, "a", encoding="utf-8")
        except OSError as error:
            raise self._cannot(error) from error
        about = {"specdec": "trace", "version": VERSION, "by": __version__}
        header = {**about, "host": host, "drafter": drafter.to_table()}
        self._write({**header, "vocab_size": vocab_size, **facts})
        if self.failure is not None:
            raise self.failure

    def begin(self, prompt: Sequence[int]) -> int:
        """A request begins; returns its number."""
        self._requests += 1
        self._record(self._requests - 1, "prompt", prompt)
        return self._requests - 1

    def draft(self, request: int, position: int, depth: int, tokens: Sequence[int]) -> None:
        """A draft of at most ``depth`` tokens was asked for after ``position`` tokens."""
        self._record(request, "draft", tokens, position=position, depth=depth)

    def commit(self, request: int, tokens: Sequence[int]) -> None:
        """Tokens were committed."""
        self._record(request, "commit", tokens)

    def cycle(self, request: int, record: CycleRecord) -> None:
        """A draft and the tokens committed after it."""
        self.draft(request, record.position, record.depth, record.drafted)
        self.commit(request, record.emitted)

    def rewind(self, request: int, length: int) -> None:
        """Only the first ``length`` tokens stay."""
        self._record(request, rewind=length)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _record(self, request: int, what: str = "", tokens: Sequence[int] = (), **line: Any) -> None:
        """Write a line of the request; none after tokens that the reader would refuse."""
        if not all(0 <= token < self._vocab_size for token in tokens):
            self._closed.add(request)
        if request not in self._closed:
            self._write({"request": request, **({what: list(tokens)} if what else {}), **line})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
            self._file.flush()
        except (OSError, TypeError, ValueError) as error:
            self.failure = self._cannot(error)
            log.warning("trace_ended", reason=self.failure.message)
            self._file = None

    def _cannot(self, error: Exception) -> UnsupportedError:
        return UnsupportedError(f"the trace cannot be written: {why(error)}", file=self._path)


def _drop_cut_line(path: str | Path) -> None:
    """Cut off an incomplete last line. Raises: UnsupportedError if the file has lines and is no trace."""
    with open(path, "rb+") as file:
        first = last = file.readline()
        header = _json(first) if first else {"specdec": "trace"}
        if not isinstance(header, dict) or header.get("specdec") != "trace":
            raise UnsupportedError(
                "a trace is not appended to a file of another kind", file=path, try_="the name of a new file"
            )
        for last in file:  # noqa: B007 - the last one is wanted
            pass
        if last and not last.endswith(b"\n"):
            if _json(last) is None:
                file.truncate(file.tell() - len(last))
            else:
                file.write(b"\n")


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


# --- reading ---------------------------------------------------------------------------------------------------------


def read_trace(path: str | Path) -> Trace:
    """Read a trace. Its last line may be incomplete, as a process that was ended leaves it (``Trace.cut``).

    Raises: PromptError that names the line.
    """
    try:
        content = read_bytes(path, LARGEST)
    except OSError as error:
        raise PromptError(f"the trace cannot be read: {why(error)}", file=path) from error
    lines = content.splitlines()
    reader: _Section | None = None
    requests: list[TracedRequest] = []
    for number, raw in enumerate(lines, start=1):
        try:
            line = parse_json(raw)
        except ValueError as error:
            if number == len(lines) > 1 and not content.endswith(b"\n"):
                return Trace(tuple(requests), cut=number)
            raise _wrong(path, number, f"is not JSON: {error}") from error
        if not isinstance(line, dict):
            raise _wrong(path, number, "is no JSON object")
        try:
            if "specdec" in line or reader is None:
                reader = _Section(line, requests)
            else:
                reader.take(line)
        except (KeyError, TypeError, ValueError) as error:
            raise _wrong(path, number, f"breaks the format: {error}") from error
    if reader is None:
        raise PromptError("the trace is empty", file=path, try_="specdec generate --trace FILE")
    return Trace(tuple(requests))


class _Section:
    """A header, and the requests whose lines follow it."""

    def __init__(self, header: Mapping[str, Any], requests: list[TracedRequest]) -> None:
        if header.get("specdec") != "trace":
            raise ValueError("it is no header of a trace")
        if header.get("version") != VERSION:
            raise ValueError(f"version {shown(header.get('version'))}, and this specdec reads {VERSION}")
        self._vocab_size = _count(header.get("vocab_size"), "vocab_size")
        named = header.get("drafter") or {}
        if not isinstance(named, dict) or not isinstance(named.get("name", ""), str):
            raise TypeError(f"drafter is an object with a name, got {shown(named, 60)}")
        options = {key: value for key, value in named.items() if key != "name"}
        self._drafter = Choice(named["name"], options) if named.get("name") else None
        self._host = str(header.get("host", ""))
        self._requests = requests
        self._open: dict[int, tuple[TracedRequest, list[int]]] = {}  # with all committed tokens, by number

    def take(self, line: Mapping[str, Any]) -> None:
        """Read a line of a request. Raises: KeyError, TypeError, ValueError."""
        key = _count(line["request"], "request")
        if "prompt" in line:
            if key in self._open:
                raise ValueError(f"request {key} begins twice")
            self._begin(key, self._tokens(line["prompt"]))
            return
        if key not in self._open:
            raise ValueError(f"request {key} has not begun")
        request, committed = self._open[key]
        if "draft" in line:
            position = _count(line["position"], "position")
            if position != len(committed):
                raise ValueError(f"a draft at position {position}, and {len(committed)} tokens are committed")
            drafted = tuple(self._tokens(line["draft"]))
            request.rounds.append(Round(position, _count(line["depth"], "depth"), drafted))
        elif "commit" in line:
            tokens = self._tokens(line["commit"])
            current = request.rounds.pop() if request.rounds else Round(len(committed), 0, ())
            request.rounds.append(attrs.evolve(current, committed=(*current.committed, *tokens)))
            committed += tokens
        elif "rewind" in line:  # what follows is another request that begins with these tokens
            length = _count(line["rewind"], "rewind")
            if length > len(committed):
                raise ValueError(f"a rewind to {length} of {len(committed)} tokens")
            self._begin(key, committed[:length])

    def _begin(self, key: int, prompt: list[int]) -> None:
        request = TracedRequest(
            host=self._host, drafter=self._drafter, vocab_size=self._vocab_size, prompt=tuple(prompt)
        )
        self._open[key] = request, prompt
        self._requests.append(request)

    def _tokens(self, value: object) -> list[int]:
        size = self._vocab_size
        if not isinstance(value, list) or any(type(token) is not int or not 0 <= token < size for token in value):
            raise TypeError(f"tokens are a list of ids from 0 to {size - 1}, got {shown(value, 60)}")
        return value


def _count(value: object, name: str) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{name} is a whole number from 0, got {shown(value)}")
    return value


def _wrong(path: object, line: int, what: str) -> PromptError:
    return PromptError(f"line {line} of the trace {what}", file=path, try_="specdec generate --trace FILE")

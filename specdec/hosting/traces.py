"""The trace format: what a host asked of a drafter, what it drafted, and what was committed, as JSON lines.

The first line of a section is its header; a file that several processes appended to, one after another, has several.
Every other line belongs to a request of its section:

    {"specdec": "trace", "version": 1, "host": "vllm", "drafter": {"name": "suffix"}, "vocab_size": 32000, ...}
    {"request": 0, "prompt": [1, 2, 3]}
    {"request": 0, "position": 3, "depth": 4, "draft": [4, 5]}
    {"request": 0, "commit": [4, 6]}
    {"request": 0, "rewind": 3}
    {"request": 0, "end": true}

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
from specdec.logs import get_logger

if TYPE_CHECKING:
    from specdec.contract import CycleRecord
    from specdec.decoding.parts import Parts
    from specdec.decoding.stream import Stream

log = get_logger(__name__)

VERSION = 1


@attrs.frozen
class Round:
    """A draft and what was committed after it. ``depth`` is 0 if none was asked for."""

    position: int  # committed tokens before
    depth: int
    drafted: tuple[int, ...]
    committed: tuple[int, ...]


@attrs.frozen(kw_only=True)
class TracedRequest:
    """One request of a trace."""

    host: str
    drafter: Choice | None
    vocab_size: int
    prompt: tuple[int, ...]
    rounds: tuple[Round, ...]
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    line: int = 0  # of the request's first line, from 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens committed after the prompt."""
        return tuple(token for one in self.rounds for token in one.committed)


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

    Raises: UnsupportedError if the file cannot be opened, or ``append`` finds one that is no trace.
    """

    def __init__(
        self, path: str | Path, *, host: str, drafter: Choice, vocab_size: int, append: bool = True, **facts: Any
    ) -> None:
        self._path = path
        self._requests = 0
        self._vocab_size = vocab_size
        self._closed: set[int] = set()  # requests of which no more is recorded
        self.failure: UnsupportedError | None = None
        self._file: TextIO | None = None
        try:
            if append and os.path.isfile(path):
                _whole_lines(path)
            self._file = open(path, "a" if append else "w", encoding="utf-8")
        except OSError as error:
            raise self._cannot(error) from error
        named = {"name": drafter.name, **drafter.options}
        header = {"specdec": "trace", "version": VERSION, "by": __version__, "host": host, "drafter": named}
        self._write({**header, "vocab_size": vocab_size, **facts})
        if self.failure is not None:
            raise self.failure

    def begin(self, prompt: Sequence[int], settings: Mapping[str, Any] | None = None) -> int:
        """A request begins; returns its number."""
        number = self._requests
        self._requests += 1
        extra = {"settings": dict(settings)} if settings else {}
        if self._known(number, prompt):
            self._write({"request": number, "prompt": list(prompt), **extra})
        return number

    def draft(self, request: int, position: int, depth: int, tokens: Sequence[int]) -> None:
        """A draft of at most ``depth`` tokens was asked for after ``position`` tokens."""
        if self._known(request, tokens):
            self._write({"request": request, "position": position, "depth": depth, "draft": list(tokens)})

    def commit(self, request: int, tokens: Sequence[int]) -> None:
        """Tokens were committed."""
        if self._known(request, tokens):
            self._write({"request": request, "commit": list(tokens)})

    def rewind(self, request: int, length: int) -> None:
        """Only the first ``length`` tokens stay."""
        if self._known(request):
            self._write({"request": request, "rewind": length})

    def end(self, request: int) -> None:
        """No more tokens will come."""
        if self._known(request):
            self._write({"request": request, "end": True})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self.failure = self.failure or self._cannot(error)
            self._file = None

    def _known(self, request: int, tokens: Sequence[int] = ()) -> bool:
        """Whether a line of the request is recorded; not after tokens that the reader would refuse."""
        if not all(0 <= token < self._vocab_size for token in tokens):
            self._closed.add(request)
        return request not in self._closed

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
        reason = getattr(error, "strerror", None) or error
        return UnsupportedError(f"the trace cannot be written: {reason}", file=self._path)


def _whole_lines(path: str | Path) -> None:
    """Cut off an incomplete last line, or end a complete one.

    Raises: UnsupportedError if the file has lines and is no trace.
    """
    with open(path, "rb+") as file:
        first = file.readline()
        if not first:
            return
        try:
            header = json.loads(first)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or header.get("specdec") != "trace":
            raise UnsupportedError(
                "a trace is not appended to a file of another kind", file=path, try_="the name of a new file"
            )
        file.seek(0)
        *_, last = file
        if last.endswith(b"\n"):
            return
        try:
            json.loads(last)
            file.write(b"\n")
        except ValueError:
            file.truncate(file.tell() - len(last))


class StreamTrace:
    """Records a generation of specdec's own engine: assign ``add`` to ``Stream.on_cycle``.

    Raises: UnsupportedError if the file cannot be opened.
    """

    def __init__(self, path: str | Path, lm: Parts, stream: Stream) -> None:
        named = lm.config.drafter
        drafter = named if named.name == lm.drafter.spec.name else Choice(lm.drafter.spec.name)
        model = lm.config.target.model
        self._writer = TraceWriter(
            path,
            host="specdec",
            drafter=drafter,
            vocab_size=lm.info.vocab_size,
            model=model,
            verifier=lm.config.verifier.name,
        )
        sampling = {name: getattr(stream.settings, name) for name in ("temperature", "seed")}
        self._request = self._writer.begin(stream.prompt, sampling)

    @property
    def failure(self) -> UnsupportedError | None:
        """Why the recording ended early; None if it did not."""
        return self._writer.failure

    def add(self, record: CycleRecord) -> None:
        """Record a cycle; a device may run some past the end, which emit nothing."""
        if record.emitted:
            self._writer.draft(self._request, record.position, record.depth, record.drafted)
            self._writer.commit(self._request, record.emitted)


# --- reading ---------------------------------------------------------------------------------------------------------


@attrs.define
class _Open:
    """A request while its lines are read."""

    line: int
    header: Mapping[str, Any]
    prompt: list[int]
    settings: Mapping[str, Any]
    tokens: list[int]
    drafts: list[tuple[int, int, tuple[int, ...]]] = attrs.field(factory=list)  # position, depth, tokens

    def finished(self) -> TracedRequest:
        ends = [*(position for position, _, _ in self.drafts), len(self.tokens)][1:]
        first = self.drafts[0][0] if self.drafts else len(self.tokens)
        begun = len(self.prompt)
        rounds = [Round(begun, 0, (), tuple(self.tokens[begun:first]))] if first > begun else []
        rounds += [
            Round(position, depth, tokens, tuple(self.tokens[position:end]))
            for (position, depth, tokens), end in zip(self.drafts, ends, strict=True)
        ]
        table = dict(self.header.get("drafter") or {})
        name = table.pop("name", None)
        return TracedRequest(
            host=str(self.header.get("host", "")),
            drafter=Choice(name, table) if isinstance(name, str) and name else None,
            vocab_size=self.header["vocab_size"],
            prompt=tuple(self.prompt),
            rounds=tuple(rounds),
            settings=self.settings,
            line=self.line,
        )


def read_trace(path: str | Path) -> Trace:
    """Read a trace. Its last line may be incomplete, as a process that was ended leaves it (``Trace.cut``).

    Raises: PromptError that names the line.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise PromptError(f"the trace cannot be read: {error.strerror or error}", file=path) from error
    lines = content.splitlines()
    whole = content.endswith(b"\n")
    header: Mapping[str, Any] | None = None
    current: dict[int, _Open] = {}
    opened: list[_Open] = []
    cut = 0
    for number, raw in enumerate(lines, start=1):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError) as error:
            if number == len(lines) > 1 and not whole:
                cut = number
                break
            raise _wrong(path, number, f"is not JSON: {error}") from error
        if not isinstance(line, dict):
            raise _wrong(path, number, "is no JSON object")
        if "specdec" in line or header is None:
            header, current = _header(line, path, number), {}
            continue
        try:
            _take(line, number, header, current, opened)
        except (KeyError, TypeError, ValueError) as error:
            raise _wrong(path, number, f"breaks the format: {error}") from error
    if header is None:
        raise PromptError("the trace is empty", file=path, try_="specdec generate --trace FILE")
    return Trace(tuple(one.finished() for one in opened), cut)


def _header(line: Mapping[str, Any], path: object, number: int) -> Mapping[str, Any]:
    if line.get("specdec") != "trace":
        raise _wrong(path, number, "is no header of a trace")
    version, vocab = line.get("version"), line.get("vocab_size")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise PromptError(
            f"the trace has version {shown(version)}, and this specdec reads 1 to {VERSION}",
            file=path,
            try_="a newer specdec",
        )
    if type(vocab) is not int or vocab < 1:
        raise _wrong(path, number, f"has no vocab_size of 1 or more, got {shown(vocab)}")
    return line


def _take(
    line: Mapping[str, Any], number: int, header: Mapping[str, Any], current: dict[int, _Open], opened: list[_Open]
) -> None:
    vocab: int = header["vocab_size"]
    key = _count(line["request"], "request")
    if "prompt" in line:
        if key in current:
            raise ValueError(f"request {key} begins twice")
        prompt, settings = _tokens(line["prompt"], vocab), line.get("settings", {})
        if not isinstance(settings, dict):
            raise TypeError("settings are a JSON object")
        current[key] = _Open(number, header, prompt, settings, list(prompt))
        opened.append(current[key])
        return
    if key not in current:
        raise ValueError(f"request {key} has not begun")
    request = current[key]
    if "draft" in line:
        position = _count(line["position"], "position")
        if position != len(request.tokens):
            raise ValueError(f"a draft at position {position}, and {len(request.tokens)} tokens are committed")
        request.drafts.append((position, _count(line["depth"], "depth"), tuple(_tokens(line["draft"], vocab))))
    elif "commit" in line:
        request.tokens += _tokens(line["commit"], vocab)
    elif "rewind" in line:  # what follows is another request that begins with these tokens
        length = _count(line["rewind"], "rewind")
        if length > len(request.tokens):
            raise ValueError(f"a rewind to {length} of {len(request.tokens)} tokens")
        current[key] = _Open(number, header, request.tokens[:length], request.settings, request.tokens[:length])
        opened.append(current[key])


def _count(value: object, name: str) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{name} is a whole number from 0, got {shown(value)}")
    return value


def _tokens(value: object, vocab: int) -> list[int]:
    if not isinstance(value, list) or any(type(token) is not int or not 0 <= token < vocab for token in value):
        raise TypeError(f"tokens are a list of ids from 0 to {vocab - 1}, got {shown(value, 60)}")
    return value


def _wrong(path: object, line: int, what: str) -> PromptError:
    return PromptError(f"line {line} of the trace {what}", file=path, try_="specdec generate --trace FILE")

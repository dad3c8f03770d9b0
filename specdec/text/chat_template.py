"""Chat templates: the Jinja sources of a checkpoint, and the process that renders them."""

from __future__ import annotations

import json
import marshal
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from specdec.checkpoints import read_json
from specdec.errors import CheckpointError, PromptError, shown
from specdec.files.reading import read_text
from specdec.locks import ForkSafeLock
from specdec.text import rendering


@attrs.frozen
class ChatTemplate:
    """A Jinja source and its file."""

    source: str
    file: Path

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a conversation.

        Raises: PromptError with the template's file and line when rendering fails or takes too much time or memory, or
        for a variable that is not made of text, numbers, lists and mappings.
        """
        try:
            request = marshal.dumps((self.source, {name: _plain(value) for name, value in variables.items()}))
        except (ValueError, RecursionError) as error:
            raise PromptError(f"the chat template cannot be given its variables: {error}") from error
        reply = _PROCESS.reply(request)
        text = reply.get("text")
        if isinstance(text, str):
            return text
        raise PromptError(f"the chat template failed: {reply.get('error')}", file=self.file, line=reply.get("line"))


def read_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Every chat template of a folder by name; a separate file wins over tokenizer_config.json."""
    templates: dict[str, ChatTemplate] = {}

    def take(value: Any, file: Path) -> None:
        """A template, or a list of ``{"name": ..., "template": ...}``."""
        entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
        for entry in entries:
            name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
            if not isinstance(name, str) or not isinstance(source, str):
                raise CheckpointError(
                    "a chat template is text, or a list of {name, template}", file=file, got=shown(entry)
                )
            templates[name] = ChatTemplate(source, file)

    if tokenizer_config.get("chat_template") is not None:
        take(tokenizer_config["chat_template"], folder / "tokenizer_config.json")
    file = folder / "chat_template.json"
    if os.path.lexists(file):
        take(read_json(file).get("chat_template"), file)
    for file in [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
        if os.path.lexists(file):
            try:
                source = read_text(file)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise CheckpointError(f"{file.name} cannot be read: {reason}", file=file) from error
            templates["default" if file.name == "chat_template.jinja" else file.stem] = ChatTemplate(source, file)
    return templates


def _plain(value: Any) -> Any:
    """A template variable as marshal takes it. Raises: ValueError for anything but text, numbers and containers."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(held) for key, held in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(map(_plain, value))
    raise ValueError(f"{type(value).__name__} is not text, a number, a list or a mapping")


class _Process:
    """The process of ``rendering``: started for the first template, and again after one that had to be ended."""

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def reply(self, request: bytes) -> Mapping[str, Any]:
        """What the process answers. Raises: PromptError if it cannot be started."""
        with self._lock.held:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(len(request).to_bytes(8, "little") + request)
                process.stdin.flush()
                length = int.from_bytes(process.stdout.read(8), "little")
                # at most six bytes a character, or the reason of an error
                most = 6 * (rendering.TEXT + rendering.TEXT_EACH * len(request)) + 100
                data = process.stdout.read(length) if length <= most else b""
            except BrokenPipeError:
                data = b""
            except BaseException:  # Ctrl-C: the answer would meet the next request
                self._end()
                raise
            if data:
                reply: Mapping[str, Any] = json.loads(data)
                return reply
            status = self._end()
            if status == -signal.SIGPROF:
                return {"error": f"it takes more than {rendering.SECONDS} seconds"}
            return {"error": f"the process that renders it ended with status {status}"}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and (self._owner != os.getpid() or self._process.poll() is not None):
            self._process = None  # of the process that we were forked from, or ended by another
        if self._process is None:
            import jinja2
            import markupsafe

            # isolated: nothing but Python's own library and Jinja
            folders = dict.fromkeys(str(Path(str(module.__file__)).parents[1]) for module in (jinja2, markupsafe))
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", rendering.__file__, *folders],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            except (OSError, ValueError) as error:
                raise PromptError(f"the process that renders chat templates cannot be started: {error}") from error
            self._owner = os.getpid()
        return self._process

    def _end(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        if process.poll() is None:
            # its pipes are closed when it ends by itself
            try:
                status = process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
        else:
            status = process.returncode
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return status


_PROCESS = _Process()

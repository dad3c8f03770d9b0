"""Chat templates: the Jinja sources of a checkpoint, at most of a stated size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from specdec.checkpoints import read_json
from specdec.errors import CheckpointError, PromptError, shown
from specdec.files.reading import read_text, why

OWN_VARIABLES = frozenset({"self", "messages", "add_generation_prompt"})  # of a conversation, whoever renders it
SOURCE_LIMIT = 2**18  # characters of a template; the longest of a released model has 20,000


@attrs.frozen
class ChatTemplate:
    """A Jinja source and its file."""

    source: str
    file: Path

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a conversation. Raises: PromptError with the template's file and line."""
        from specdec.text import rendering  # Jinja is imported for the first conversation

        try:
            return rendering.rendered(self.source, variables)
        except Exception as error:  # expressions in a template can raise anything
            reason, line = rendering.reason_and_line(error)
            raise PromptError(f"the chat template failed: {reason}", file=self.file, line=line) from error


def template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``given``, variables for a template. Raises: PromptError for one that the conversation itself sets."""
    if taken := sorted(OWN_VARIABLES & given.keys()):
        raise PromptError(f"the variable {taken[0]!r} of the chat template is the conversation's own")
    return dict(given)


def read_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """Every chat template of a folder by name; a separate file wins over tokenizer_config.json."""
    templates: dict[str, ChatTemplate] = {}

    def add(name: object, source: object, file: Path) -> None:
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError(
                "a chat template is text, or a list of {name, template}", file=file, got=shown([name, source])
            )
        if len(source) > SOURCE_LIMIT:
            raise CheckpointError(
                f"a chat template has at most {SOURCE_LIMIT:,} characters, got {len(source):,}", file=file
            )
        templates[name] = ChatTemplate(source, file)

    def add_all(value: object, file: Path) -> None:
        """A template, or a list of ``{"name": ..., "template": ...}``."""
        for entry in value if isinstance(value, list) else [{"name": "default", "template": value}]:
            table = entry if isinstance(entry, dict) else {}
            add(table.get("name"), table.get("template"), file)

    if tokenizer_config.get("chat_template") is not None:
        add_all(tokenizer_config["chat_template"], folder / "tokenizer_config.json")
    file = folder / "chat_template.json"
    if os.path.lexists(file):
        add_all(read_json(file).get("chat_template"), file)
    for file in [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
        if os.path.lexists(file):
            try:
                source = read_text(file)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file.name} cannot be read: {why(error)}", file=file) from error
            add("default" if file.name == "chat_template.jinja" else file.stem, source, file)
    return templates

"""Which drafter runs in a host, from the environment: worker processes of a server inherit nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.config import Choice, Override, load_config, structure_options
from specdec.errors import ConfigError, shown
from specdec.text import Tokenizer

CONFIG = "SPECDEC_CONFIG"
"""A TOML file whose table ``drafter`` names the drafter and its options."""
DRAFTER = "SPECDEC_DRAFTER"
"""A drafter's name, or a TOML table: ``{ name = "suffix", min_match = 2 }``."""
TRACE = "SPECDEC_TRACE"
"""The file that a trace is appended to."""
PAUSING = "SPECDEC_PAUSING"
"""``off`` keeps drafting where it takes longer than it can save."""


def chosen_drafter(given: str | Mapping[str, Any] | Choice | None = None) -> Choice:
    """The drafter that ``given`` names, else the one that the environment names.

    Args:
        given: a name, or a mapping with ``name`` and options.

    Raises: ConfigError if no drafter is named, or the value or the file cannot be used.
    """
    if isinstance(given, Choice):
        return given
    if given is not None:
        table = {"name": given} if isinstance(given, str) else given
        return structure_options(table, Choice, "drafter")
    named, file = os.environ.get(DRAFTER), os.environ.get(CONFIG)
    if named and file:
        raise ConfigError(f"both {DRAFTER} and {CONFIG} name a drafter", try_="one of them")
    if named:
        try:
            value = Override.parse(f"drafter={named}").value
        except ConfigError as error:
            raise ConfigError(
                f"{DRAFTER} is a name or a TOML table, got {shown(named)}",
                try_=f"{DRAFTER}='{{ name = \"suffix\", min_match = 2 }}'",
            ) from error
        table = {"name": value} if isinstance(value, str) else value
        choice = structure_options(table, Choice, "drafter", {"": DRAFTER})
    else:
        choice = load_config(file).drafter if file else Choice("auto")
    if choice.name == "auto":
        raise ConfigError(
            "no drafter is named for this host",
            asked_for_by=f"{DRAFTER}={named}" if named else f"{CONFIG}={file}" if file else None,
            try_=f"{DRAFTER}=suffix, or {CONFIG}=FILE with the table [drafter]",
        )
    return choice


def chosen_pausing() -> bool:
    """Whether drafting pauses while it does not pay. Raises: ConfigError for another value than on and off."""
    named = os.environ.get(PAUSING) or "on"
    if named not in ("on", "off"):
        raise ConfigError(f"{PAUSING} is on or off, got {shown(named)}", try_=f"{PAUSING}=off")
    return named == "on"


def chosen_tokenizer(given: Any) -> Any:
    """``given`` itself, or the tokenizer of a folder or GGUF file. Raises: CheckpointError that names the file."""
    return Tokenizer.from_checkpoint(Path(given)) if isinstance(given, str | Path) else given

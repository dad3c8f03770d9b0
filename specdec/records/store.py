"""Stores records about this machine as JSON files, each with the identity of what it was made for.

A record is used only if its identity equals the current one. A broken record, or one from another machine or
installation, is reported and made again. One that supports a guarantee counts only if no other user could write it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import attrs

from specdec._version import __version__
from specdec.contract import ModelInfo
from specdec.errors import UnsupportedError, cut, shown
from specdec.files.keeping import exposed, make_folder, replacing
from specdec.files.reading import leaves, parse_json, read_text
from specdec.records.machine import library_versions, processor

FORMAT = 1
_LARGEST = 2**20  # bytes of a record
_MOST = 2**53  # every JSON reader has integers up to here exactly
T = TypeVar("T")


def cache_folder() -> Path:
    """specdec's cache folder: $SPECDEC_CACHE_DIR, else ``specdec`` in the user's cache folder. It may not exist yet.

    Raises: UnsupportedError when the user's home is unknown, as in some containers.
    """
    if chosen := os.environ.get("SPECDEC_CACHE_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "specdec"
    try:
        return Path.home() / ".cache" / "specdec"
    except RuntimeError as error:
        raise UnsupportedError(
            "there is no folder for caches: HOME is not set, and the system does not know this user's home",
            try_="SPECDEC_CACHE_DIR=FOLDER",
        ) from error


@attrs.frozen(kw_only=True)
class Identity:
    """Everything known that a record depends on. Subclasses add fields."""

    NAMED_BY: ClassVar[tuple[str, ...]] = ("model", "backend", "device", "dtype")
    """The fields in a file's name: what was measured but not where, so that an outdated record is still found."""

    model: str  # ModelInfo.fingerprint
    backend: str
    device: str
    dtype: str
    kernels: str
    processor: str
    libraries: str  # installed versions of machine.LIBRARIES
    specdec: str

    @classmethod
    def of(cls, info: ModelInfo, **own: Any) -> Self:
        """The current identity of a loaded target; ``own`` are the subclass's fields."""
        return cls(
            model=info.fingerprint,
            backend=info.backend,
            device=info.device,
            dtype=info.dtype,
            kernels=info.kernels,
            processor=processor(),
            libraries=library_versions(),
            specdec=__version__,
            **own,
        )

    def key(self) -> str:
        """The file's name, without its suffix."""
        parts = [getattr(self, name) for name in self.NAMED_BY]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """``threads 2, here 1`` for every field that differs in ``other``."""
        ours = attrs.asdict(self)
        differing = ((name, other.get(name)) for name in ours if other.get(name) != ours[name])
        return [
            f"{name} {cut(theirs, 100) if isinstance(theirs, str) else shown(theirs, 100)}, here {ours[name]}"
            for name, theirs in differing
        ]


@attrs.frozen
class Store:
    """The files of one kind of record."""

    kind: str  # in messages
    subfolder: str  # of the cache folder
    switch: str  # environment variable: a folder, or "off" to keep none
    private: bool = False  # whether a record counts only if no other user could have written it

    def folder(self) -> Path | None:
        """Where records are kept: $switch, else the subfolder of the cache folder; None if they are not kept."""
        chosen = os.environ.get(self.switch)
        if chosen:
            return None if chosen == "off" else Path(chosen)
        try:
            return cache_folder() / self.subfolder
        except UnsupportedError:  # no home
            return None

    def unkept(self) -> str:
        """Why ``folder`` is None."""
        return (
            f"{self.switch}=off" if os.environ.get(self.switch) else f"no home for caches, and {self.switch} is not set"
        )

    def find(self, identity: Identity, parse: Callable[[dict[str, Any]], T]) -> T | str:
        """The record of exactly this identity, or the reason why there is none ("" if none was ever made).

        Args:
            parse: makes the record from its JSON data. Raises: ValueError.
        """
        folder = self.folder()
        if folder is None:
            return self.unkept()
        if not identity.model:
            return "the target has no fingerprint"
        path = folder / f"{identity.key()}.json"
        try:
            if self.private and (reason := exposed(path)):
                return f"the {self.kind} {path} does not count: {reason}"
            data = self.read(path)
            record = parse(data)
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.strerror:
                return f"the {self.kind} {path} cannot be read: {error.strerror}"
            return f"the {self.kind} {path} is broken ({cut(str(error), 500)})"
        differences = identity.differences(data["identity"])
        if differences:
            return f"the {self.kind} is from another machine or installation ({'; '.join(differences)})"
        return record

    def read(self, path: Path) -> dict[str, Any]:
        """The data of a record. Raises: OSError; ValueError when it is not a record of this format."""
        data = parse_json(read_text(path, _LARGEST))
        for value in leaves(data):
            if isinstance(value, int | float) and not abs(value) <= _MOST:  # NaN fails the comparison
                raise ValueError(f"the number {shown(value, 40)} is out of range")
        if isinstance(data, dict) and data.pop("format", None) == FORMAT and isinstance(data.get("identity"), dict):
            return data
        raise ValueError(f"not a {self.kind} of format {FORMAT}")

    def write(self, path: Path, identity: Identity, data: Mapping[str, Any]) -> None:
        """Write a record, replacing the file atomically. Raises: OSError."""
        text = json.dumps({"format": FORMAT, "identity": attrs.asdict(identity), **data}, indent=2, allow_nan=False)
        make_folder(path.parent)
        with replacing(path) as new:
            new.write_text(text + "\n", encoding="utf-8")

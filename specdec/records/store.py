"""Stores records about this machine as JSON files, each with the identity of what it was made for.

A record is used only if its identity equals the current one. A broken record, or one from another machine or
installation, is reported and made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import attrs

from specdec._version import __version__
from specdec.contract import ModelInfo
from specdec.errors import UnsupportedError
from specdec.records.machine import library_versions, processor

FORMAT = 1
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
        return [f"{name} {other.get(name)}, here {ours[name]}" for name in ours if other.get(name) != ours[name]]


@attrs.frozen
class Store:
    """The files of one kind of record."""

    kind: str  # in messages
    subfolder: str  # of the cache folder
    switch: str  # environment variable: a folder, or "off" to keep none

    def folder(self) -> Path | None:
        """Where records are kept: $switch, else the subfolder of the cache folder; None if they are not kept."""
        chosen = os.environ.get(self.switch)
        if chosen:
            return None if chosen == "off" else Path(chosen)
        return cache_folder() / self.subfolder

    def find(self, identity: Identity, parse: Callable[[dict[str, Any]], T]) -> T | str:
        """The record of exactly this identity, or the reason why there is none ("" if none was ever made).

        Args:
            parse: makes the record from its JSON data. Raises: ValueError.
        """
        folder = self.folder()
        if folder is None:
            return f"{self.switch}=off"
        if not identity.model:
            return "the target has no fingerprint"
        path = folder / f"{identity.key()}.json"
        try:
            data = self.read(path)
            record = parse(data)
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:
            return f"the {self.kind} {path} is broken ({error})"
        differences = identity.differences(data["identity"])
        if differences:
            return f"the {self.kind} is from another machine or installation ({'; '.join(differences)})"
        return record

    def read(self, path: Path) -> dict[str, Any]:
        """The data of a record. Raises: OSError; ValueError when it is not a record of this format."""
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and data.pop("format", None) == FORMAT and isinstance(data.get("identity"), dict):
            return data
        raise ValueError(f"not a {self.kind} of format {FORMAT}")

    def write(self, path: Path, identity: Identity, data: Mapping[str, Any]) -> None:
        """Write a record, replacing the file atomically. Raises: OSError."""
        text = json.dumps({"format": FORMAT, "identity": attrs.asdict(identity), **data}, indent=2, allow_nan=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            new.write_text(text + "\n", encoding="utf-8")
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

"""A saved session: one safetensors file whose header carries a JSON description.

The file is written beside its final place and renamed, so a crash leaves the old file or the new one, never half of
one. What is read is checked completely before anything of a running session changes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import safetensors
import torch
from safetensors.torch import save_file

from specdec.contract import ModelInfo, Snapshot, Stats
from specdec.errors import SessionFileError

FORMAT = 1
_KEY = "specdec.session"
_TOKENS = "tokens"


@attrs.frozen(kw_only=True)
class SavedSession:
    """Everything that a session needs to go on as if it had never stopped."""

    tokens: tuple[int, ...]
    cycle: int
    stats: Stats
    snapshot: Snapshot


def write_session(path: Path, saved: SavedSession, info: ModelInfo) -> None:
    """Write ``saved`` to ``path`` atomically. Raises: SessionFileError when the place cannot be written."""
    described = {
        "format": FORMAT,
        "model": _identity(info),
        "cycle": saved.cycle,
        "stats": attrs.asdict(saved.stats),
        "length": saved.snapshot.length,
        "capacity": saved.snapshot.capacity,
        "meta": dict(saved.snapshot.meta),
        "arrays": sorted(saved.snapshot.arrays),
    }
    tensors = {f"state.{name}": torch.as_tensor(array) for name, array in saved.snapshot.arrays.items()}
    tensors[_TOKENS] = torch.tensor(saved.tokens, dtype=torch.int64)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {_KEY: json.dumps(described)}
        )
        os.replace(temporary, path)
    except OSError as error:
        raise SessionFileError(f"the session could not be written: {error.strerror or error}", file=path) from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def read_session(path: Path, info: ModelInfo) -> SavedSession:
    """Read and check a saved session. Raises: SessionFileError that says what is wrong with the file."""
    if not path.is_file():
        raise SessionFileError("there is no such session file", file=path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            described = _described(file.metadata(), path)
            _check(described, info, path)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise SessionFileError(f"this is no complete session file: {error}", file=path) from error
    missing = [name for name in described["arrays"] if f"state.{name}" not in tensors]
    if missing or _TOKENS not in tensors:
        raise SessionFileError("the session file lacks parts of its state", file=path, missing=", ".join(missing))
    snapshot = Snapshot(
        described["length"],
        described["capacity"],
        {name: tensors[f"state.{name}"] for name in described["arrays"]},
        described["meta"],
    )
    tokens = tuple(tensors[_TOKENS].tolist())
    if not 0 <= snapshot.length <= len(tokens) or any(not 0 <= token < info.vocab_size for token in tokens):
        raise SessionFileError("the session file's tokens do not fit its state", file=path)
    return SavedSession(tokens=tokens, cycle=described["cycle"], stats=Stats(**described["stats"]), snapshot=snapshot)


def _described(metadata: Mapping[str, str] | None, path: Path) -> dict[str, Any]:
    if not metadata or _KEY not in metadata:
        raise SessionFileError("this safetensors file is no saved session", file=path)
    described: dict[str, Any] = json.loads(metadata[_KEY])
    version = described.get("format")
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        raise SessionFileError(
            f"the session file has format {version}, this version reads {FORMAT}",
            file=path,
            try_="a newer specdec" if newer else "saving the session again",
        )
    return described


def _identity(info: ModelInfo) -> dict[str, str]:
    return {"fingerprint": info.fingerprint, "family": info.family, "backend": info.backend, "dtype": info.dtype}


def _check(described: Mapping[str, Any], info: ModelInfo, path: Path) -> None:
    """Refuse a state of other weights, or one whose arrays another backend or dtype laid out."""
    for key, ours in _identity(info).items():
        theirs = described["model"].get(key)
        if theirs != ours:
            raise SessionFileError(
                f"the session was saved with another {'model' if key == 'fingerprint' else key}: "
                f"{theirs!r}, this one has {ours!r}",
                file=path,
            )

"""A saved session: one safetensors file whose header carries a JSON description.

A file is written under a temporary name and renamed, so a crash leaves the old file or the new one, never half of one.
A file is checked completely before anything in a running session changes.
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

from specdec.contract import DrafterSnapshot, ForwardPass, ModelInfo, Snapshot, Stats
from specdec.errors import SessionFileError

FORMAT = 1
_KEY = "specdec.session"
_TOKENS = "tokens"


@attrs.frozen(kw_only=True)
class SavedSession:
    """Everything that a session needs to continue as if it had never stopped."""

    tokens: tuple[int, ...]
    cycle: int
    stats: Stats
    snapshot: Snapshot
    drafter: str = ""  # the name of the drafter that ``drafter_snapshot`` belongs to
    drafter_snapshot: DrafterSnapshot | None = None
    extra: dict[str, Any] = attrs.field(factory=dict)  # ``Session.extra``


def write_session(path: Path, saved: SavedSession, target: ForwardPass) -> None:
    """Write ``saved``, a state of ``target``, to ``path`` atomically.

    Raises: SessionFileError when it cannot be written.
    """
    described = {
        "format": FORMAT,
        "model": _identity(target.info),
        "cycle": saved.cycle,
        "stats": attrs.asdict(saved.stats),
        "length": saved.snapshot.length,
        "capacity": saved.snapshot.capacity,
        "meta": dict(saved.snapshot.meta),
        "arrays": sorted(saved.snapshot.arrays),
        "extra": saved.extra,
    }
    own = saved.drafter_snapshot
    if own is not None:
        described["drafter"] = {"name": saved.drafter, "meta": dict(own.meta), "arrays": sorted(own.arrays)}
    tensors = {f"state.{name}": torch.as_tensor(target.to_host(array)) for name, array in saved.snapshot.arrays.items()}
    if own is not None:
        tensors |= {f"drafter.{name}": torch.as_tensor(array) for name, array in own.arrays.items()}
    tensors[_TOKENS] = torch.tensor(saved.tokens, dtype=torch.int64)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {_KEY: json.dumps(described)}
        )
        _flush(temporary)  # data must reach the disk before the rename: a power cut leaves the old file or the new one
        os.replace(temporary, path)
    except (OSError, safetensors.SafetensorError) as error:  # the latter for a full disk
        reason = error.strerror if isinstance(error, OSError) else None
        raise SessionFileError(f"the session could not be written: {reason or error}", file=path) from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def _flush(file: str) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_session(path: Path, target: ForwardPass) -> SavedSession:
    """Read and check a saved session. Raises: SessionFileError with the reason when the file cannot be used."""
    if not path.is_file():
        raise SessionFileError("there is no such session file", file=path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            described = _described(file.metadata(), path)
            _check(described, target.info, path)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise SessionFileError(f"this is not a complete session file: {error}", file=path) from error
    except RecursionError as error:
        raise SessionFileError("the session file's description is nested too deeply", file=path) from error
    try:
        saved = _assemble(described, tensors, target)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SessionFileError(
            f"the session file's description is broken: {type(error).__name__}: {error}", file=path
        ) from error
    # the state holds all tokens but the last, or fewer if some were fed and nothing was generated yet
    fits = 0 <= saved.snapshot.length <= max(len(saved.tokens) - 1, 0) and saved.cycle >= 0
    if not fits or any(not 0 <= token < target.info.vocab_size for token in saved.tokens):
        raise SessionFileError("the session file's tokens do not fit its state", file=path)
    return saved


def _assemble(described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: ForwardPass) -> SavedSession:
    """The session from a file's parts. Raises: KeyError, TypeError or ValueError when one is missing or malformed."""
    counters = described["stats"]
    stats = Stats(
        cycles=int(counters["cycles"]),
        tokens=int(counters["tokens"]),
        **{name: [int(value) for value in counters[name]] for name in ("offered", "reached", "accepted")},
    )
    snapshot = Snapshot(
        int(described["length"]),
        int(described["capacity"]),
        {name: target.from_host(tensors[f"state.{name}"]) for name in described["arrays"]},
        {name: int(value) for name, value in described["meta"].items()},
    )
    tokens = tensors[_TOKENS]
    if tokens.dtype != torch.int64 or tokens.dim() != 1:
        raise ValueError(f"the tokens are {tokens.dtype} of {tokens.dim()} dimensions")
    drafter, own = "", None
    if (held := described.get("drafter")) is not None:
        drafter = str(held["name"])
        meta = {name: value if isinstance(value, str) else int(value) for name, value in held["meta"].items()}
        own = DrafterSnapshot({name: tensors[f"drafter.{name}"] for name in held["arrays"]}, meta)
    return SavedSession(
        tokens=tuple(tokens.tolist()),
        cycle=int(described["cycle"]),
        stats=stats,
        snapshot=snapshot,
        drafter=drafter,
        drafter_snapshot=own,
        extra=dict(described.get("extra", {})),
    )


def _described(metadata: Mapping[str, str] | None, path: Path) -> dict[str, Any]:
    if not metadata or _KEY not in metadata:
        raise SessionFileError("this safetensors file is not a saved session", file=path)
    described = json.loads(metadata[_KEY])
    if not isinstance(described, dict) or not isinstance(described.get("format"), int):
        raise SessionFileError("the session file's description is broken: it has no format", file=path)
    version = described["format"]
    if version != FORMAT:
        raise SessionFileError(
            f"the session file has format {version}, this version reads {FORMAT}",
            file=path,
            try_="a newer specdec" if version > FORMAT else "saving the session again",
        )
    return described


def _identity(info: ModelInfo) -> dict[str, str]:
    return {"fingerprint": info.fingerprint, "family": info.family, "backend": info.backend, "dtype": info.dtype}


def _check(described: Mapping[str, Any], info: ModelInfo, path: Path) -> None:
    """Refuse a state of other weights, or one laid out by another backend or dtype."""
    model = described.get("model")
    for key, ours in _identity(info).items():
        theirs = model.get(key) if isinstance(model, Mapping) else None
        if theirs != ours:
            raise SessionFileError(
                f"the session was saved with another {'model' if key == 'fingerprint' else key}: "
                f"{theirs!r}, this one has {ours!r}",
                file=path,
            )

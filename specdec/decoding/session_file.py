"""A saved session: one safetensors file whose header carries a JSON description and a checksum.

A file is written under a temporary name and renamed, so a crash leaves the old file or the new one, never half of one.
A file is checked completely before anything in a running session changes. The checksum finds damage. What is left is
compared with what the model makes of it, so that an array of another name, shape or dtype is never adapted in silence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import safetensors
import torch
from safetensors.torch import save_file

from specdec.checking import between, each, rule
from specdec.config import structure_options
from specdec.contract import DrafterSnapshot, ForwardPass, ModelInfo, Needs, Snapshot, State, Stats
from specdec.errors import ConfigError, SessionFileError, SpecdecError, shown
from specdec.files.keeping import replacing
from specdec.files.reading import leaves, open_file, parse_json, why
from specdec.registry import calling

FORMAT = 2
_KEY, _CHECKSUM = "specdec.session", "specdec.checksum"
_TOKENS, _STATE, _DRAFTER = "tokens", "state.", "drafter."  # an array's name, and how those of a part begin
_MOST = 2**53  # of a counter: every JSON reader has these integers exactly

Tensors = Mapping[str, torch.Tensor]


@attrs.frozen(kw_only=True)
class SavedSession:
    """Everything that a session needs to continue as if it had never stopped."""

    tokens: tuple[int, ...]
    stats: Stats
    snapshot: Snapshot  # of the backend's arrays when it is written, of torch tensors in host memory when it was read
    drafter: str = ""  # the name of the drafter that ``drafter_snapshot`` belongs to
    drafter_snapshot: DrafterSnapshot | None = None
    extra: dict[str, Any] = attrs.field(factory=dict)  # ``Session.extra``


# --- the description -------------------------------------------------------------------------------------------------


_whole_numbers = each(rule(f"integers up to {_MOST}", lambda number: type(number) is str or abs(number) <= _MOST))


def _counters(owner: object, field: attrs.Attribute[Any], stats: Stats) -> None:
    rows = list(zip(stats.accepted, stats.reached, stats.offered, strict=False))
    even = len(rows) == max(map(len, (stats.accepted, stats.reached, stats.offered)))
    if not even or not all(0 <= accepted <= reached <= offered <= _MOST for accepted, reached, offered in rows):
        raise ConfigError("offered, reached and accepted do not belong together")
    if not (0 <= stats.cycles <= _MOST and 0 <= stats.tokens <= _MOST):
        raise ConfigError("its counters are out of range")


@attrs.frozen(kw_only=True)
class _Drafter:
    name: str
    meta: dict[str, int | str] = attrs.field(validator=_whole_numbers)


@attrs.frozen(kw_only=True)
class _Description:
    format: int
    model: dict[str, str]
    cycle: int = attrs.field(validator=between(0, _MOST))  # that of ``stats``
    length: int = attrs.field(validator=between(0, _MOST))
    stats: Stats = attrs.field(validator=_counters)
    meta: dict[str, int] = attrs.field(validator=_whole_numbers)
    extra: dict[str, Any]
    drafter: _Drafter | None = None


def _identity(info: ModelInfo) -> dict[str, str]:
    return {"fingerprint": info.fingerprint, "family": info.family, "backend": info.backend, "dtype": info.dtype}


def _checksum(described: str, tensors: Tensors) -> str:
    """Of the description and of every array with its name, dtype and shape. Source: FIPS 180-4 (SHA-256)."""
    digest = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(_bytes(tensor).numpy().data)
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():  # strides of nothing may be anything, which ``view`` refuses
        return torch.empty(0, dtype=torch.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_session(path: Path, saved: SavedSession, target: ForwardPass) -> None:
    """Write ``saved``, a state of ``target``, to ``path`` atomically, readable by this user alone.

    Raises: SessionFileError when it cannot be written, or ``saved.extra`` is not JSON data.
    """
    own = saved.drafter_snapshot
    described = {
        "format": FORMAT,
        "model": _identity(target.info),
        "cycle": saved.stats.cycles,
        "length": saved.snapshot.length,
        "stats": attrs.asdict(saved.stats),
        "meta": dict(saved.snapshot.meta),
        "extra": json_copy(saved.extra),
        **({} if own is None else {"drafter": {"name": saved.drafter, "meta": dict(own.meta)}}),
    }
    text = json.dumps(described)
    tensors = {_TOKENS: torch.tensor(saved.tokens, dtype=torch.int64)}
    tensors |= {f"{_STATE}{name}": array for name, array in _on_host(saved.snapshot.arrays, target).items()}
    if own is not None:
        tensors |= {f"{_DRAFTER}{name}": array for name, array in _on_host(own.arrays).items()}
    metadata = {_KEY: text, _CHECKSUM: _checksum(text, tensors)}
    try:
        if path.exists() and not path.is_file():
            raise OSError(f"{'a folder' if path.is_dir() else 'something that is not a file'} has this name")
        with replacing(path, mode=0o600) as new:
            save_file(tensors, new, metadata)
    except (OSError, ValueError, safetensors.SafetensorError) as error:  # the last for a full disk
        raise SessionFileError(f"the session could not be written: {why(error)}", file=path) from error


def json_copy(extra: object) -> dict[str, Any]:
    """What a file gives back for ``Session.extra``. Raises: SessionFileError if that is something else."""
    try:
        kept = _parsed(json.dumps({"extra": extra}))["extra"]
        if isinstance(kept, dict) and kept == extra:
            return kept
        reason = f"it would be read as {shown(kept)}"  # a tuple as a list, the key 1 as "1"
    except Exception as error:  # noqa: BLE001 - of a program's own objects
        reason = f"{type(error).__name__}: {error}"
    raise SessionFileError(
        f"the session's extra data is not JSON: {reason}",
        try_="a dict of strings, finite numbers, booleans, None, lists, and dicts with string keys",
    )


def _on_host(arrays: Mapping[str, Any], target: ForwardPass | None = None) -> dict[str, torch.Tensor]:
    return {
        name: torch.as_tensor(array if target is None else target.to_host(array)).contiguous()
        for name, array in arrays.items()
    }


def _parsed(text: str) -> Any:
    """``parse_json``, without the numbers that Python adds to JSON. Raises: ValueError."""
    value = parse_json(text)
    for one in leaves(value):
        if isinstance(one, float) and not math.isfinite(one):
            raise ValueError(f"{one} is not JSON")
    return value


# --- reading ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file to a SessionFileError."""
    try:
        yield
    except SessionFileError as error:
        raise SessionFileError(error.message, file=path, try_=error.facts.get("try")) from error.__cause__


def read_session(path: Path, target: ForwardPass) -> SavedSession:
    """Read and check a saved session. Raises: SessionFileError with the reason when the file cannot be used."""
    with _naming(path):
        try:
            open_file(path).close()  # the library would wait for a pipe's writer
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()} if _KEY in metadata else {}
        except OSError as error:
            raise SessionFileError(f"the session file cannot be read: {why(error)}") from error
        except (safetensors.SafetensorError, ValueError) as error:
            raise SessionFileError(f"this is not a complete session file: {error}") from error
        if _KEY not in metadata:
            raise SessionFileError("this safetensors file is not a saved session")
        described = _described(metadata, tensors)
        for key, ours in _identity(target.info).items():  # a state of these weights, as this backend lays it out
            if (theirs := described.model.get(key)) != ours:
                what = "model" if key == "fingerprint" else key
                raise SessionFileError(
                    f"the session was saved with another {what}: {theirs!r}, this one has {ours!r}",
                    try_="the model and the settings of [target] that it was saved with",
                )
        saved = _assembled(described, tensors)
        # the state holds all tokens but the last, or fewer if some were fed and nothing was generated yet
        held, total = saved.snapshot.length, len(saved.tokens)
        if held > max(total - 1, 0):
            raise SessionFileError(f"the session file's state holds {held} of {total} tokens: one must be left")
        if any(not 0 <= token < target.info.vocab_size for token in saved.tokens):
            raise SessionFileError("the session file has tokens outside the vocabulary")
        return saved


def _described(metadata: Mapping[str, str], tensors: Tensors) -> _Description:
    """The description of an undamaged file of this format."""
    text, checksum = metadata[_KEY], metadata.get(_CHECKSUM)
    try:
        if checksum is not None and checksum != _checksum(text, tensors):
            raise SessionFileError(
                "the session file is damaged: its contents do not have the checksum that was written with them"
            )
        described = _parsed(text)
        version = described.get("format") if isinstance(described, dict) else None
        if type(version) is not int:
            raise ValueError("it has no format")
        if version != FORMAT:
            raise SessionFileError(
                f"the session file has format {version}, this version reads {FORMAT}",
                try_="a newer specdec" if version > FORMAT else "saving the session again",
            )
        if checksum is None:
            raise SessionFileError("the session file is damaged: it has no checksum")
        return structure_options(described, _Description)
    except (ConfigError, ValueError) as error:
        reason = error.message if isinstance(error, ConfigError) else error
        raise SessionFileError(f"the session file's description is broken: {reason}") from None


def _assembled(described: _Description, tensors: Tensors) -> SavedSession:
    """The session from a file's parts, once each is of the right kind."""
    parts: dict[str, dict[str, torch.Tensor]] = {_STATE: {}, _DRAFTER: {}}
    for name, tensor in tensors.items():
        part = next((part for part in parts if name.startswith(part)), None)
        if part is not None:
            parts[part][name.removeprefix(part)] = tensor
        elif name != _TOKENS:
            raise SessionFileError(f"the session file has an array {name!r}, which belongs to nothing")
        if not _finite(tensor):
            raise SessionFileError(f"the session file's array {name!r} has values that are not finite")
    tokens = tensors.get(_TOKENS)
    if tokens is None or tokens.dtype != torch.int64 or tokens.dim() != 1:
        got = "there are none" if tokens is None else f"got {tokens.dtype} of {tokens.dim()} dimensions"
        raise SessionFileError(f"the session file's tokens are not a list of token ids: {got}")
    own = described.drafter
    if own is None and parts[_DRAFTER]:
        raise SessionFileError("the session file has arrays of a drafter and does not name it")
    return SavedSession(
        tokens=tuple(tokens.tolist()),
        stats=described.stats,
        snapshot=Snapshot(described.length, len(tokens) + 1, parts[_STATE], described.meta),
        drafter="" if own is None else own.name,
        drafter_snapshot=None if own is None else DrafterSnapshot(parts[_DRAFTER], own.meta),
        extra=described.extra,
    )


def _finite(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.float()  # narrow floats lack the operation
    return bool(tensor.isfinite().all())


# --- restoring -------------------------------------------------------------------------------------------------------


def restore_state(saved: SavedSession, target: ForwardPass, capacity: int, needs: Needs, path: Path) -> State | None:
    """The state of a session that was read, after checking that it is what the file holds, bit for bit.

    None if it is to be computed again from the tokens: a drafter without the MTP head saved it, and this one has it.

    Raises: SessionFileError when arrays are missing, or have another name, shape or dtype than the model's, or do not
    agree with the number of tokens; when the session is longer than ``capacity``.
    """
    held = saved.snapshot
    if len(saved.tokens) > capacity:
        raise SessionFileError(
            f"the saved session has {len(saved.tokens)} tokens, this one holds {capacity}", file=path
        )
    try:
        with calling(("target", target.info.family), "restore"):  # backends raise different errors for unusable arrays
            arrays = {name: target.from_host(array) for name, array in held.arrays.items()}
            state = target.restore(Snapshot(held.length, capacity, arrays, held.meta), needs)
            again = target.snapshot(state)
            reason = _difference(held.arrays, _on_host(again.arrays, target))
    except SpecdecError as error:
        raise SessionFileError(f"the saved state does not fit this model: {error.message}", file=path) from error
    unused = held.arrays.keys() - again.arrays.keys()
    if reason:
        pass
    elif (state.length, again.length) != (held.length, held.length):
        reason = f"it holds {state.length} tokens, and {held.length} belong to it"
    elif any(again.meta.get(name, number) != number for name, number in held.meta.items()):
        reason = f"its numbers are {dict(held.meta)}, and the model's {dict(again.meta)}"
    elif unused and (needs.mtp or not target.info.mtp_layers):  # a head's cache may be left out
        reason = f"it has an array {min(unused)!r}, which the model does not know"
    elif state.pairs is not None and state.pairs.length not in (0, state.length):
        reason = f"its MTP head knows {state.pairs.length} of {state.length} positions"
    if reason:
        raise SessionFileError(f"the saved state does not fit this model: {reason}", file=path)
    return state if state.pairs is None or state.pairs.length == state.length else None


def check_drafter(saved: DrafterSnapshot, again: DrafterSnapshot | None, name: str, path: Path) -> None:
    """Check that a drafter made from ``saved`` has taken each array as it is, or left it: it may build its state again.

    Args:
        again: what it saves now.
    Raises: SessionFileError when an array has another shape, dtype or contents.
    """
    if again is not None and (reason := _difference(_on_host(saved.arrays), _on_host(again.arrays))):
        raise SessionFileError(f"the saved state does not fit the drafter {name!r}: {reason}", file=path)


def _difference(saved: Tensors, restored: Tensors) -> str:
    """Why ``restored`` is not what was saved, or "". A part that was not saved starts empty."""
    for name, ours in restored.items():
        theirs = saved.get(name)
        if theirs is None:
            if ours.numel():
                return f"the array {name!r} is missing"
        elif (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
            return f"the array {name!r} is {_kind(theirs)}, and the model's {_kind(ours)}"
        elif not torch.equal(_bytes(theirs), _bytes(ours)):
            return f"the array {name!r} has other values after restoring it"
    return ""


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

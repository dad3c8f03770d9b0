"""The decoded cache: decode or quantise the weights of a checkpoint into a folder once, then memory-map them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from specdec.checkpoints.quantised.formats import TensorFormat, formats_of
from specdec.checkpoints.quantised.hints import QUANTISATION_KEYS
from specdec.checkpoints.quantised.parts import FLOATS
from specdec.checkpoints.quantised.rounding import BITS as ROUNDED_BITS
from specdec.checkpoints.quantised.rounding import GROUP as ROUNDED_GROUP
from specdec.checkpoints.quantised.rounding import rounded
from specdec.checkpoints.quantised.stored import row_slabs
from specdec.checkpoints.reader import DTYPES, SINGLE_FILE, Checkpoint, fingerprint, read_json
from specdec.checkpoints.writer import write_json
from specdec.errors import CheckpointError

MARKER = "decoded.json"
_VERSION = 1  # of files and decoders; other versions are rebuilt


def _states(folder: Path) -> dict[str, list[int] | None]:
    """Size and modification time in nanoseconds of an entry's files, None for a missing one."""
    found: dict[str, list[int] | None] = dict.fromkeys((SINGLE_FILE, "config.json", "generation_config.json"))
    for name in found:
        with contextlib.suppress(OSError):
            state = os.stat(folder / name)
            found[name] = [state.st_size, state.st_mtime_ns]
    return found


class DecodedCache:
    """The cache entry of one checkpoint.

    The entry is named after the checkpoint's folder and the dtype, or the integers. It holds an ordinary checkpoint
    with canonical names and a marker with the source's fingerprint (see ``fingerprint``) and the size and modification
    time of every file, its own too. Weights that were rounded are in compressed-tensors' packed layout.

    Args:
        folder: the cache; created on the first write.
        source: the open checkpoint.
        dtype: dtype of the decoded weights.
        weights: ``target.weights``.
        rounds: canonical names of the weights to round, if that is "int8" or "int4".
    """

    def __init__(
        self,
        folder: Path | str,
        source: Checkpoint,
        dtype: torch.dtype,
        *,
        weights: str = "auto",
        rounds: Collection[str] = (),
    ) -> None:
        self.folder = Path(os.path.expanduser(folder))
        self._source = source
        self._dtype = dtype
        self._bits = ROUNDED_BITS.get(weights, 0)
        self._rounds = frozenset(rounds)
        path = source.path.resolve()
        digest = hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()
        kind = weights if self._bits else str(dtype).removeprefix("torch.")
        self.path = self.folder / f"{path.name}-{digest}-{kind}"

    def find(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the cached checkpoint, or None if it must be written, and notices for the user."""
        if not os.path.exists(self.path):
            return None, []
        try:
            marker = read_json(self.path / MARKER)
            if marker.get("source") != self._stamp():
                reason = "the checkpoint has changed since it was written"
            elif marker["files"] != _states(self.path):
                reason = "its own files have changed since then"
            else:
                return Checkpoint.open(self.path), [*marker["notices"], f"weights taken from the cache {self.path}"]
        except (CheckpointError, KeyError, TypeError) as error:
            reason = error.message if isinstance(error, CheckpointError) else f"{MARKER} is not as it was written"
        return None, [f"the cache {self.path} is stale and is rewritten: {reason}"]

    def write(self, notices: Sequence[str] = ()) -> Checkpoint:
        """Decode or round every weight into the cache, a few megabytes at a time, and open it. The write is atomic.

        ``notices`` are kept for later loads. Raises: CheckpointError if the folder cannot be written or is too small.
        """
        if os.path.isfile(self.folder):
            raise CheckpointError(f"the decoded cache takes a folder, and {self.folder} is a file", try_=_ELSEWHERE)
        needed, partial = self._size(), None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                raise CheckpointError(
                    f"the decoded cache takes {needed:,} bytes, and {self.folder} has {free:,} left", try_=_ELSEWHERE
                )
            partial = Path(tempfile.mkdtemp(prefix=f".{self.path.name}-", dir=self.folder))
            os.chmod(partial, 0o755)  # mkdtemp allows only the owner
            with open(partial / SINGLE_FILE, "wb") as stream:
                self._write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            write_json(partial / "config.json", _plain_config(self._source.config) | self._quantisation())
            write_json(partial / "generation_config.json", self._source.generation_config)
            marker = {"source": self._stamp(), "files": _states(partial), "notices": list(notices)}
            write_json(partial / MARKER, marker)
            self._publish(partial)
        except (OSError, ValueError) as error:  # the latter for a name that no file can have
            raise CheckpointError(
                f"the decoded cache cannot be written: {getattr(error, 'strerror', None) or error}",
                folder=self.folder,
                needs=f"{needed:,} bytes",
                try_=_ELSEWHERE,
            ) from error
        finally:
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
        return Checkpoint.open(self.path)

    def _publish(self, partial: Path) -> None:
        """Move the finished folder into place, after moving a stale one or another process's out of the way."""
        aside = partial.with_name(partial.name + "-old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
        try:
            os.rename(partial, self.path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _quantisation(self) -> dict[str, Any]:
        """The section of config.json that describes rounded weights, as compressed-tensors writes it."""
        if not self._bits:
            return {}
        weights = {"num_bits": self._bits, "type": "int", "strategy": "group", "group_size": ROUNDED_GROUP}
        group = {"targets": ["Linear"], "weights": weights | {"symmetric": True}}
        method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        return {"quantization_config": {**method, "config_groups": {"group_0": group}}}

    def _tensors(self) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], Iterator[torch.Tensor]]]]:
        """Name, dtype as safetensors spells it, shape, and values in pieces, of every tensor to write."""
        spelt = {dtype: name for name, dtype in DTYPES.items()}
        for name, found in formats_of(self._source).items():
            if found.coding is not None:
                yield name, spelt[self._dtype], found.shape, functools.partial(self._pieces, found)
            elif found.error is None and self._source.tensors[found.tensors[0]].dtype in FLOATS:
                if name in self._rounds:
                    yield from self._rounded(name, found)
                else:
                    dtype = spelt[self._source.dtype(found.tensors[0])]
                    yield name, dtype, found.shape, functools.partial(self._pieces, found)

    def _rounded(
        self, name: str, found: TensorFormat
    ) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], Iterator[torch.Tensor]]]]:
        """The tensors of one rounded weight."""
        *lead, columns = found.shape
        stem = f"{name}_"  # X.weight_packed, or X_packed for a stack of experts
        scales: list[torch.Tensor] = []  # filled while the codes are written

        def codes() -> Iterator[torch.Tensor]:
            scales.clear()
            for start, stop in row_slabs(math.prod(lead), columns):
                rows = self._source.rows(found.tensors[0], start, stop, axes=len(lead))
                matrix = rounded(rows, self._bits, self._dtype)
                scales.append(matrix.parts["scale"])
                yield matrix.parts["codes"]

        words, groups = columns * self._bits // 32, -(-columns // ROUNDED_GROUP)
        yield f"{stem}packed", "I32", (*lead, words), codes
        yield f"{stem}scale", "BF16", (*lead, groups), lambda: iter(scales)
        yield f"{stem}shape", "I64", (len(found.shape),), lambda: iter([torch.tensor(found.shape)])

    def _size(self) -> int:
        return sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape, _ in self._tensors())

    def _write(self, stream: BinaryIO) -> None:
        """Write a safetensors file. Source: https://huggingface.co/docs/safetensors, section "Format"."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        tensors = list(self._tensors())
        for name, dtype, shape, _ in tensors:
            end = at + math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # align the values
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, _, _, pieces in tensors:
            for values in pieces():
                stream.write(values.contiguous().view(torch.uint8).numpy().data)

    def _pieces(self, found: TensorFormat) -> Iterator[torch.Tensor]:
        """Yield the values of a weight in order, in pieces."""
        if found.coding is not None:
            for _, _, values in found.coding.values():
                yield values.flatten().to(self._dtype)
            return
        for start, stop in row_slabs(math.prod(found.shape), 1):
            yield self._source.rows(found.tensors[0], start, stop, axes=len(found.shape)).flatten()

    def _stamp(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        kind = f"int{self._bits} {sorted(self._rounds)}" if self._bits else str(self._dtype)
        digest.update(f"{_VERSION} {fingerprint(self._source)} {kind}".encode())
        for file in sorted(self._source.files):
            state = file.stat()
            digest.update(f"{file.name} {state.st_size} {state.st_mtime_ns}".encode())
        return digest.hexdigest()


_ELSEWHERE = "another target.decoded_cache, or none"


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json without its quantisation section."""
    plain = {key: value for key, value in config.items() if key not in QUANTISATION_KEYS}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = {k: v for k, v in plain["text_config"].items() if k not in QUANTISATION_KEYS}
    return plain

"""Parse a GGUF file: its metadata, and where its tensors are.

Memory is reserved for what has been read, or for a size that was compared with the file's own.

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from specdec.checkpoints.gguf.blocks import BLOCKS
from specdec.checkpoints.reader import DTYPES, StoredTensor
from specdec.errors import CheckpointError, shown
from specdec.files.reading import open_file, why

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", None, None, "<Q", "<q", "<d")  # by type; 8 string, 9 array
_STRING, _ARRAY = 8, 9
_MOST_AXES = 4
_TEXT, _WHOLE = (str, "text"), (int, "a whole number")
_TAKES = {
    **dict.fromkeys(("general.architecture", "general.type", "tokenizer.ggml.model", "tokenizer.ggml.pre"), _TEXT),
    **dict.fromkeys(("general.alignment", "split.count", "split.no", "split.tensors.count"), _WHOLE),
}
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@attrs.frozen
class GgufTensor(StoredTensor):
    """One tensor of a GGUF file. ``dtype`` is the file's type, ``shape`` that of the stored data.

    The data of a block type are bytes: ``[..., rows, bytes of a row]``.

    Attributes:
        change: what undoes the converter's change of a tensor: called with the stored data. None for most.
    """

    change: Callable[[torch.Tensor], torch.Tensor] | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES.get(self.dtype, torch.uint8)

    def open(self) -> torch.Tensor:
        """All bytes of the file, mapped and private."""
        return torch.frombuffer(mapped(self.file), dtype=torch.uint8)

    def read(self, file: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor as stored, a view of the map unless it has a ``change``."""
        stored = file[self.start : self.stop].view(self.torch_dtype).view(self.shape)
        if self.change is None:
            return stored
        try:
            return self.change(stored)
        except RuntimeError as error:
            raise CheckpointError(
                f"{self.file.name} gives the tensor {name} the shape {list(self.shape)}, which its metadata contradict",
                file=self.file,
            ) from error

    def read_rows(self, file: torch.Tensor, name: str, start: int, stop: int, axes: int) -> torch.Tensor:
        if self.change is None:
            return super().read_rows(file, name, start, stop, axes)
        whole = self.read(file, name)
        return whole.reshape(math.prod(self.shape[:axes]), *self.shape[axes:])[start:stop].clone()


def mapped(path: Path) -> mmap.mmap:
    """The bytes of a file; writes to them do not reach it. Raises: CheckpointError if it cannot be read."""
    try:
        with open_file(path) as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {why(error)}", file=path) from error
    except ValueError as error:
        raise CheckpointError(f"{path.name} is empty", file=path, try_="download it again") from error


@attrs.frozen
class GgufFile:
    """The metadata and tensors of a GGUF file, or of all parts of a split one.

    Attributes:
        path: the file, the first part of a split one.
        metadata: by key; arrays of numbers are numpy arrays, arrays of strings lists.
        tensors: by the name in the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read a file, and the other parts if it is the first of several. Raises: CheckpointError naming the file."""
        metadata, tensors = _Parser(path).parse()
        count = metadata.get("split.count", 1)
        if count in (0, 1):
            return cls(path, metadata, tensors)
        part = _PART.fullmatch(path.name)
        if part is None or int(part["count"]) != count or metadata.get("split.no") != 0:
            raise CheckpointError(
                f"{path.name} is part {shown(metadata.get('split.no'))} (from 0) of {shown(count)}",
                file=path,
                try_="the first part, under its original name: NAME-00001-of-0000N.gguf",
            )
        for number in range(2, count + 1):
            other = path.with_name(f"{part['name']}-{number:05}-of-{count:05}.gguf")
            if not other.exists():
                raise CheckpointError(f"part {number} of {count} is missing: {other.name}", file=path)
            told, more = _Parser(other).parse()
            if told.get("split.no") != number - 1 or told.get("split.count") != count:
                raise CheckpointError(f"{other.name} says that it is another part", file=other)
            twice = next((name for name in more if name in tensors), None)
            if twice is not None:
                raise CheckpointError(f"two parts hold the tensor {twice}", file=other)
            tensors |= more
        expected = metadata.get("split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise CheckpointError(f"the {count} parts hold {len(tensors)} tensors of {shown(expected)}", file=path)
        return cls(path, metadata, tensors)


class _Parser:
    """Reads one file from front to back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = mapped(path)
        self.size = len(self.bytes)
        self.at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """The metadata and the tensors."""
        self._check_version()
        tensors, entries = self._scalar("<Q"), self._scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            if key in metadata:
                raise self._error(f"has the key {shown(key)} twice")
            metadata[key] = value = self._value(self._scalar("<I"), key)
            wanted, words = _TAKES.get(key, (object, ""))
            if not isinstance(value, wanted):
                raise self._error(f"has {shown(value)} under {key}, which takes {words}")
        alignment = metadata.get("general.alignment", 32)
        if not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self._error(f"has {alignment} under general.alignment, which takes a power of two from 8 to 2^20")
        headers = [self._tensor_header() for _ in range(tensors)]
        start = -(-self.at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in headers:
            if name in found:
                raise self._error(f"has the tensor {shown(name)} twice")
            found[name] = self._tensor(name, shape, kind, start, offset, alignment)
        self._check_places(found, start, alignment)
        return metadata, found

    def _check_version(self) -> None:
        if self.bytes[:4] != MAGIC:
            raise self._error(f"is not a GGUF file (it starts with {self.bytes[:4].hex(' ')})")
        self.at = 4
        version = self._scalar("<I")
        if version in _VERSIONS:
            return
        if version & 0xFFFF == 0:
            raise self._error("is a big-endian GGUF file, which is not read", try_="a little-endian copy")
        raise self._error(f"is GGUF version {version}; versions {' and '.join(map(str, _VERSIONS))} are read")

    def _tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with the contiguous axis last, type and offset."""
        name, axes = self._string(), self._scalar("<I")
        if not 1 <= axes <= _MOST_AXES:
            raise self._error(f"gives the tensor {shown(name)} {axes} axes; it takes 1 to {_MOST_AXES}")
        sizes = [self._scalar("<Q") for _ in range(axes)]
        return name, tuple(reversed(sizes)), self._scalar("<I"), self._scalar("<Q")

    def _tensor(
        self, name: str, shape: tuple[int, ...], kind: int, start: int, offset: int, alignment: int
    ) -> GgufTensor:
        """Check an entry against the file."""
        block = BLOCKS.get(kind)
        if block is None:
            raise self._error(
                f"stores the tensor {shown(name)} as type {kind}, which is not read",
                read=", ".join(one.name for one in BLOCKS.values()),
                try_="a file in one of these, such as Q4_K_M or Q8_0",
            )
        if 0 in shape or math.prod(shape) >= 2**63:
            raise self._error(f"gives the tensor {shown(name)} the shape {list(shape)}")
        if shape[-1] % block.values:
            raise self._error(
                f"gives the tensor {shown(name)} rows of {shape[-1]} values, and {block.name} stores {block.values} at "
                "a time"
            )
        if offset % alignment:
            raise self._error(f"puts the tensor {shown(name)} at {offset}, no multiple of its alignment {alignment}")
        size = math.prod(shape) // block.values * block.bytes
        if start + offset + size > self.size:
            raise self._error(
                f"is truncated: the tensor {shown(name)} ends at {start + offset + size}, the file at {self.size}",
                try_="download it again",
            )
        stored = (*shape[:-1], shape[-1] // block.values * block.bytes) if block.group else shape
        return GgufTensor(self.path, block.name, stored, start + offset, start + offset + size)

    def _check_places(self, tensors: Mapping[str, GgufTensor], start: int, alignment: int) -> None:
        """Refuse tensors that share bytes, or leave some out: they have another type or shape than the file says."""
        last, end = "", start
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            if tensor.start < end:
                raise self._error(f"puts the tensors {shown(last)} and {shown(name)} into the same bytes")
            if tensor.start - end >= alignment:
                raise self._error(f"leaves {tensor.start - end} bytes out between {shown(last)} and {shown(name)}")
            last, end = name, tensor.stop

    # --- values -----------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> int:
        """Move past ``count`` bytes; returns where they begin."""
        begin = self.at
        if count > self.size - begin:
            raise self._error(f"ends inside its header, at {self.size} bytes", try_="download it again")
        self.at = begin + count
        return begin

    def _scalar(self, layout: str) -> Any:
        return struct.unpack_from(layout, self.bytes, self._take(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        length = self._scalar("<Q")
        begin = self._take(length)
        try:
            return str(self.bytes[begin : begin + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"has text that is not UTF-8, at byte {begin}") from error

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        layout = _SCALARS[kind] if kind < len(_SCALARS) else None
        if layout is None:
            raise self._error(f"has a value of unknown type {kind} under {shown(key)}")
        value = self._scalar(layout)
        return _shortest(value) if layout == "<f" else value

    def _array(self, key: str) -> Any:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        layout = _SCALARS[kind] if kind < len(_SCALARS) else None
        if kind != _STRING and layout is None:
            raise self._error(f"has an array of type {kind} under {shown(key)}; arrays hold numbers or text")
        if layout is None:
            return self._strings(count)
        return np.frombuffer(self.bytes, np.dtype(layout), count, self._take(count * struct.calcsize(layout)))

    def _strings(self, count: int) -> list[str]:
        """As ``_string``, for hundreds of thousands: a vocabulary."""
        content, at, end, number = self.bytes, self.at, self.size, int.from_bytes
        found = []
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + number(content[at:begin], "little")
                if at > end:
                    raise self._error("ends inside its header", try_="download it again")
                found.append(content[begin:at].decode())
        except UnicodeDecodeError as error:
            raise self._error(f"has text that is not UTF-8, at byte {begin}") from error
        self.at = at
        return found

    def _error(self, message: str, **facts: Any) -> CheckpointError:
        return CheckpointError(f"{self.path.name} {message}", file=self.path, **facts)


@functools.lru_cache(256)
def _shortest(value: float) -> float:
    """The shortest decimal with the same float32 value: 1e-06 for what arrives as 9.999999974752427e-07."""
    return float(str(np.float32(value)))

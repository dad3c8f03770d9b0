"""Read a checkpoint folder: ``config.json`` and memory-mapped safetensors files.

Headers are parsed here, so that errors can name the file, the tensor and the sizes; safetensors does the mapping.
Source of the format: https://huggingface.co/docs/safetensors, section "Format".
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open

from specdec.checkpoints.locate import check_folder, entries, listed, what_else
from specdec.errors import CheckpointError, shown
from specdec.files.reading import DuplicateKeyError, open_file, parse_json, read_text, why

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")

DTYPES: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_PIECE = 2**22  # bytes
_SAMPLED = 256  # values from each end of a tensor, for a fingerprint
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_MAX_AXES = 64  # of a tensor; torch's own limit


@attrs.frozen
class StoredTensor:
    """One entry in a safetensors header.

    Attributes:
        columns: what brings columns of a quantised tensor's codes, scales or values ``[N, n]`` into order; None for
            most.
    """

    file: Path
    dtype: str  # as in the file: "BF16", "F8_E4M3", ..., also those that torch lacks ("F4")
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    stop: int
    columns: Callable[[torch.Tensor], torch.Tensor] | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype of what ``read`` returns; None if torch has none."""
        return DTYPES.get(self.dtype)

    def open(self) -> Any:
        """Its file, for ``read``. Raises: CheckpointError for a broken one."""
        try:
            return safe_open(self.file, framework="pt")
        except (SafetensorError, OSError, MemoryError) as error:
            raise _corrupt(self.file, f"{self.file.name} is not a valid safetensors file: {error}") from error

    def read(self, file: Any, name: str) -> torch.Tensor:
        """The tensor, mapped and private; ``file`` is what ``open`` returned."""
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def read_rows(self, file: Any, name: str, start: int, stop: int, axes: int) -> torch.Tensor:
        """As ``Checkpoint.rows``. Raises: CheckpointError if the file ends early."""
        entries = math.prod(self.shape[:axes])
        width = self.size // entries if entries else 0
        buffer = torch.empty((stop - start) * width, dtype=torch.uint8, device="cpu")
        try:
            with open_file(self.file) as stream:
                stream.seek(self.start + start * width)
                view, got = memoryview(buffer.numpy().data), 0
                while got < len(view):
                    count = stream.readinto(view[got:])
                    if not count:
                        raise _corrupt(self.file, f"{self.file.name} ends inside the tensor {name}")
                    got += count
        except OSError as error:
            raise _unreadable(self.file, error) from error
        dtype = self.torch_dtype
        assert dtype is not None  # the caller has looked
        return buffer.view(dtype).view(stop - start, *self.shape[axes:])

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """As ``Checkpoint.pieces``."""
        rows = math.prod(self.shape[:-1])
        step = max(1, _PIECE * rows // max(1, self.size))
        for start in range(0, rows, step):
            yield StoredTensor.read_rows(self, None, name, start, min(start + step, rows), max(0, len(self.shape) - 1))


@attrs.frozen
class HeadSource:
    """Where an MTP head lies.

    Attributes:
        path: the file or folder that it was taken from; None if it is among the weights.
        converted: whether mlx-lm converted the files of that head; None if unknown.
        residual: whether it reads the target's hidden states before the final norm.
    """

    path: Path | None = None
    converted: bool | None = None
    residual: bool = False


class Checkpoint:
    """An open checkpoint folder. Create one with ``Checkpoint.open``.

    Attributes:
        path: the folder.
        config: ``config.json``.
        generation_config: ``generation_config.json``, or an empty dict.
        notices: notices for the user, one sentence each.
        head: where the MTP head was taken from.
        tensors: headers by name in the files.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        tensors: Mapping[str, StoredTensor],
        notices: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config
        self.notices = notices
        self.head = HeadSource()
        self.derived: dict[str, Any] = {}  # from the headers: results by function name, and a parsed GGUF file
        self.tensors = tensors
        self._configs: dict[Path, Mapping[str, Any]] = {}  # of files that came with a config.json of their own
        first_in = {tensor.file: tensor for tensor in tensors.values()}
        self._files: dict[Path, Any] = {file: tensor.open() for file, tensor in first_in.items()}

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Read the configs and every header. Raises: CheckpointError naming file and tensor."""
        path = check_folder(Path(path))
        config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        generation_config = read_json(generation) if os.path.lexists(generation) else {}
        tensors, notices = read_tensors(path)
        return cls(path, config, generation_config, tensors, notices)

    def joined(
        self,
        head: Mapping[str, StoredTensor],
        *,
        without: Collection[str],
        config: Mapping[str, Any] | None,
        source: HeadSource,
        notices: Sequence[str],
    ) -> Checkpoint:
        """This checkpoint with the tensors of a head from elsewhere and ``without`` some of its own."""
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in without}
        joined = Checkpoint(self.path, self.config, self.generation_config, {**kept, **head}, (*self.notices, *notices))
        joined.head = source
        if config is not None:
            joined._configs = dict.fromkeys((tensor.file for tensor in head.values()), config)
        return joined

    @property
    def files(self) -> frozenset[Path]:
        """The files that the weights are in."""
        return frozenset(tensor.file for tensor in self.tensors.values())

    def config_of(self, name: str) -> Mapping[str, Any]:
        """The config.json that describes a tensor: a head from another checkpoint keeps its own."""
        return self._configs.get(self.tensors[name].file, self.config)

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype of a tensor. Raises: CheckpointError if torch has no such dtype."""
        tensor = self.tensors[name]
        dtype = tensor.torch_dtype
        if dtype is None:
            raise CheckpointError(
                f"the tensor {name} is stored as {tensor.dtype}, which is not read",
                file=tensor.file,
                try_="the checkpoint in bfloat16 that it was made from",
            )
        return dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    def load(self, name: str) -> torch.Tensor:
        """A tensor on the host in its stored dtype: memory-mapped and private, never copied.

        Pages are read on first access. Writes to the tensor do not reach the file. It stays valid after ``close``.
        Raises: CheckpointError for a dtype that torch lacks.
        """
        self.dtype(name)
        return self.tensors[name].read(self._file(name), name)

    def rows(self, name: str, start: int, stop: int, *, axes: int = 1) -> torch.Tensor:
        """Entries ``start`` to ``stop`` (exclusive) of a tensor whose first ``axes`` axes are flattened into one.

        Copies into new memory and maps nothing, so reading piece by piece needs only the memory of one piece. With
        ``axes`` 0 the whole tensor is one entry. Returns: ``[stop - start, *other axes]``.
        Raises: CheckpointError for a dtype that torch lacks, or a file that ends early.
        """
        self.dtype(name)
        return self.tensors[name].read_rows(self._file(name), name, start, stop, axes)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Copies of a tensor's rows as its file stores them, some at a time. As ``rows``, it maps nothing."""
        self.dtype(name)
        return self.tensors[name].pieces(name)

    def _file(self, name: str) -> Any:
        """The open file of a tensor."""
        file = self.tensors[name].file
        if file not in self._files:
            raise CheckpointError("this checkpoint was closed", file=file, try_="Checkpoint.open again")
        return self._files[file]

    def close(self) -> None:
        """Close the files and forget what was derived from them; loaded tensors stay valid."""
        self._files.clear()
        self.derived.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def fingerprint(checkpoint: Checkpoint) -> str:
    """Hash config.json, every tensor's name, shape and dtype, and the values at both ends of each tensor.

    Fine-tuning changes every tensor, so the ends are enough; a full hash would read gigabytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(checkpoint.config, sort_keys=True).encode())
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.load(name).flatten()
        digest.update(f"{name} {checkpoint.tensors[name].shape} {checkpoint.dtype(name)}".encode())
        for part in (tensor[:_SAMPLED], tensor[-_SAMPLED:]):
            digest.update(bytes(part.contiguous().view(torch.uint8).numpy()))
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises: CheckpointError, with the line, if it is not one."""
    try:
        value = parse_json(read_text(file))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file.name} is not valid JSON: {error.msg}", file=file, line=error.lineno) from error
    except DuplicateKeyError as error:
        raise CheckpointError(f"{file.name} names {shown(error.key)} twice", file=file) from error
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file.name} holds a {type(value).__name__}, not an object", file=file)
    return value


def _unreadable(file: Path, error: OSError | ValueError) -> CheckpointError:
    return CheckpointError(f"{file.name} cannot be read: {why(error)}", file=file)


# --- files ---------------------------------------------------------------------------------------------------------


def read_tensors(folder: Path) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Every tensor of a folder by its name in the files, and notices for the user."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if not os.path.lexists(index):
        if not os.path.lexists(single):
            raise _no_weights(folder)
        return read_header(single), ()
    weight_map = _read_index(index)
    # An index that does not name the single file is left over from a conversion; transformers prefers the file too
    if os.path.isfile(single) and SINGLE_FILE not in weight_map.values():
        return read_header(single), (
            f"{INDEX_FILE} was ignored: {SINGLE_FILE} is there and the index does not name it",
        )
    return _read_shards(index, weight_map), ()


def holds_weights(folder: Path) -> bool:
    """Whether a folder has weights in any format, readable or not."""
    return any(name.endswith(_WEIGHTS) or name == INDEX_FILE for name in entries(folder))


def _no_weights(folder: Path) -> CheckpointError:
    files = entries(folder)
    weights = [name for name in files if name.endswith(_WEIGHTS)]
    if any(name.endswith(".safetensors") and not name.startswith("adapter_") for name in weights):
        cure = f"{INDEX_FILE}, which says which tensor is in which file, from where the weights came"
    else:
        cure = what_else(files) or "download the weights too (with git: `git lfs pull`)"
    return CheckpointError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}", found=listed(weights or files), try_=cure
    )


def _read_index(index: Path) -> dict[str, str]:
    """``weight_map`` of an index: tensor name -> shard file name."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index.name} has no 'weight_map' (tensor name -> file)", file=index)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or PurePosixPath(shard).is_absolute() or ".." in Path(shard).parts:
            raise CheckpointError(
                f"{index.name} puts the tensor {name} into {shown(shard)}, which is not a file in this folder",
                file=index,
            )
    return weight_map


def _read_shards(index: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Every tensor of every shard. The headers decide; the index must not list tensors that they lack."""
    folder = index.parent
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not os.path.isfile(folder / shard)]
    if absent:
        raise CheckpointError(
            f"{index.name} names {len(shards)} files, of which {len(absent)} are absent: {listed(absent, 20)}",
            folder=folder,
            try_="complete the download",
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in read_header(folder / shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"the tensor {name} is in two files: {tensors[name].file.name} and {shard}",
                    folder=folder,
                    try_="remove files of another download from the folder",
                )
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file != folder / shard:
            held = f", which {tensors[name].file.name} holds" if name in tensors else ""
            raise CheckpointError(
                f"{index.name} puts the tensor {name} into {shard}, which lacks it{held}",
                file=folder / shard,
                try_="files of one and the same download",
            )
    return tensors


def _corrupt(file: Path, message: str) -> CheckpointError:
    return CheckpointError(message, file=file, try_="download it again")


# --- headers -------------------------------------------------------------------------------------------------------


def _bits(dtype: str) -> int | None:
    """Bits per element, including dtypes that torch lacks (F4, F6_E2M3, ...)."""
    if dtype in DTYPES:
        return DTYPES[dtype].itemsize * 8
    digits = dtype.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ").split("_")[0]
    return int(digits) if digits.isdecimal() and len(digits) < 4 else None


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. Raises: CheckpointError saying what is wrong with the file."""
    try:
        with open_file(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            head = stream.read(64)
            length = int.from_bytes(head[:8], "little")
            if size < 10 or not head[8:9] == b"{" or length > _MAX_HEADER:
                raise _foreign(file, size, head)
            if 8 + length > size:
                lengths = f"its header takes {8 + length} bytes, the file has {size}"
                raise _corrupt(file, f"{file.name} is truncated: {lengths}")
            stream.seek(8)
            header = parse_json(stream.read(length))
    except OSError as error:
        raise _unreadable(file, error) from error
    except DuplicateKeyError as error:
        raise _corrupt(file, f"the header of {file.name} has the tensor {error.key} twice") from error
    except ValueError as error:
        raise _corrupt(file, f"the header of {file.name} is not valid JSON: {error}") from error
    assert isinstance(header, dict)  # it starts with "{"
    header.pop("__metadata__", None)
    tensors = {name: _entry(file, 8 + length, name, header.pop(name)) for name in [*header]}  # one form of each
    last = max(tensors, key=lambda name: tensors[name].stop, default=None)
    end = 8 + length if last is None else tensors[last].stop
    if end != size:
        wrong = "is truncated" if end > size else "is longer than its header says"
        past = f"; the tensor {last} extends past its end" if end > size else ""
        raise _corrupt(file, f"{file.name} {wrong}: it should have {end} bytes and has {size}{past}")
    return tensors


def _entry(file: Path, begin: int, name: str, entry: Any) -> StoredTensor:
    """Validate one header entry; the data begin at ``begin``."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = isinstance(dtype, str) and len(shape) <= _MAX_AXES
        sound = sound and all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise _corrupt(file, f"the header of {file.name} has no valid entry for the tensor {name}: {shown(entry)}")
    bits = _bits(dtype)
    if start > stop or (bits is not None and math.prod(shape) * bits != (stop - start) * 8):
        sizes = f"the tensor {name} ({dtype} {list(shape)}) {stop - start} bytes"
        raise _corrupt(file, f"the header of {file.name} gives {sizes}")
    return StoredTensor(file, dtype, shape, begin + start, begin + stop)


def _foreign(file: Path, size: int, head: bytes) -> CheckpointError:
    """Say what a broken safetensors file really is."""
    cure = "download it again"
    if size == 0:
        what = "is empty"
    elif head.startswith(b"version https://git-lfs"):
        what, cure = "is a Git LFS pointer, not the weights", "`git lfs pull` in the folder"
    elif head.startswith(b"GGUF"):
        what, cure = "is a GGUF file", "its name with the ending .gguf, as the model"
    elif head.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        what, cure = "is a pickled PyTorch file, which is never opened", "a checkpoint in safetensors format"
    elif head.lstrip().startswith((b"<!", b"<html", b"<HTML")):
        what = "is a web page, not the weights"
    else:
        what = f"is not a safetensors file (it starts with {head[:16].hex(' ')})"
    return CheckpointError(f"{file.name} {what}", file=file, bytes=size, try_=cure)

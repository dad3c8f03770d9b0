"""Seeded mutations of files: of bytes, of JSON documents, of safetensors headers and of the arrays that these describe.

Every function takes a ``random.Random`` and returns a ``Mutant``, so a seed and a file's bytes give one mutated file.
"""

import copy
import json
import random
import struct
from collections.abc import Iterator
from typing import Any, Self

import attrs
import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # numpy has none; two bytes all the same
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "BOOL": np.dtype("?"),
}
DIGITS = 5_000  # of an integer that ``int`` refuses to read
NESTED = 5_000  # brackets in one another
_RAW = "\x00raw"  # stands in a JSON document for text that no value of Python's has


@attrs.frozen
class Mutant:
    """A mutated file and what was done to it."""

    what: str
    data: bytes


# --- bytes -----------------------------------------------------------------------------------------------------------


def mutate_bytes(rng: random.Random, data: bytes, other: bytes = b"") -> Mutant:
    """Flip, overwrite, cut, delete, insert or splice bytes of ``data``.

    Args:
        other: another file of the same kind, to splice with; ``data`` itself if empty.
    """
    other = other or data
    mutated = bytearray(data)
    end = len(data) if rng.random() < 0.5 else min(len(data), 256)  # headers lie at the beginning
    at, count = rng.randrange(end) if end else 0, rng.choice((1, 8, 64, 1024))
    what = rng.choice(("flipped", "flipped", "overwritten", "cut", "deleted", "inserted", "spliced"))
    if what == "flipped" and data:
        for _ in range(min(count, 64)):
            mutated[rng.randrange(at, min(at + 64, len(data)))] ^= 1 << rng.randrange(8)
    elif what == "cut":
        del mutated[rng.choice((0, 7, 8, 9, at, len(data) // 2)) :]
    elif what == "deleted":
        del mutated[at : at + count]
    elif what == "inserted":
        mutated[at:at] = rng.choice((rng.randbytes(count), mutated[at : at + count]))
    else:
        start = rng.randrange(len(other) or 1)
        fill = rng.choice((b"\x00", b"\xff", b"{")) * count if what == "overwritten" else other[start : start + count]
        mutated[at : at + count] = fill
    return Mutant(f"{count} bytes from {at} {what}", bytes(mutated))


# --- JSON ------------------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 7, -(2**31), 2**31, 2**32, 2**53 + 1, 2**63, 10**12, 10**30),
    *(0.5, 2.9, -0.0, 1e-320, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", "0", "1e9", "true", "\x00", "é\ud800", "../../etc/passwd", "a" * 300, "a" * 100_000),
    *([], [[]], [None], ["a"], [1, [2], {}], [1.5] * 3, [0] * 10_000, {}, {"": 0}, {"a": {"b": [1]}}),
)
_TEXTS = ("1" * DIGITS, "1e999", "[" * NESTED + "]" * NESTED, "[" * NESTED, '{"a": 1, "a": 2}')


def mutate_json(rng: random.Random, document: Any) -> Mutant:
    """One to three mutations of a JSON document's values, keys, order, types, nesting and numbers, as UTF-8 text."""
    document = json.loads(json.dumps(document))
    raws: list[str] = []
    done = [_mutate_document(rng, document, raws) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    text = json.dumps(document)
    for number, raw in enumerate(raws):
        text = text.replace(json.dumps(f"{_RAW}{number}"), raw)
    return Mutant("; ".join(done), text.encode())


def _holders(value: Any, path: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Every place of a document: the object or list that holds it, its key or index, and its path."""
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key, f"{path}.{key}"
            yield from _holders(item, f"{path}.{key}")


def _mutate_document(rng: random.Random, document: Any, raws: list[str]) -> str:
    places = list(_holders(document))
    if not places:
        return "an empty document"
    # by depth first, so that a long list does not hide the few keys above it
    depth = rng.choice(sorted({path.count(".") for _, _, path in places}))
    holder, key, path = rng.choice([place for place in places if place[2].count(".") == depth])
    value = holder[key]
    match rng.randrange(8):
        case 0:
            del holder[key]
            return f"{path[:100]}: dropped"
        case 1:
            new: Any = f"{_RAW}{len(raws)}"
            raws.append(rng.choice(_TEXTS))
        case 2:
            new = rng.choice(([value], {"value": value}, str(value), [value, copy.deepcopy(value)]))
        case 3:
            other, place, _ = rng.choice(places)
            new = json.loads(json.dumps(other.get(place) if isinstance(other, dict) else other[place]))
        case 4 if isinstance(holder, dict):
            new = holder.pop(key)
            key = rng.choice((f"{key}x", key[:-1], "", f"{key}\x00", rng.choice([*holder, "a"]), "a" * 300))
        case 5 | 6 if isinstance(value, int | float):
            new = rng.choice((value + 1, -value, value * 2, value + 10**12, float(value), value + 0.5, not value))
        case 5 | 6 if isinstance(value, list) and value:
            new = rng.choice((value[1:], value[::-1], [*value, copy.deepcopy(value[0])], [*value, rng.choice(VALUES)]))
        case _:
            new = copy.deepcopy(rng.choice(VALUES))  # a later mutation may change it
    holder[key] = new
    return f"{path[:100]}: {str(key)[:40]!r} = {str(new)[:60]!r}"


# --- GGUF ------------------------------------------------------------------------------------------------------------


def mutate_gguf(rng: random.Random, data: bytes) -> Mutant:
    """Mutate bytes of a GGUF file, or up to three of its header's counts, lengths, types, values and offsets."""
    if rng.random() < 0.4:
        return mutate_bytes(rng, data)
    mutated, done = bytearray(data), []
    for _ in range(rng.choice((1, 1, 2, 3))):
        size, end = rng.choice((1, 4, 4, 8)), min(len(data), rng.choice((64, 1024, 16_384)))
        at = rng.randrange(8, max(end - size, 9))
        new = rng.choice((0, 1, 7, 2**7, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, -1, rng.random()))
        old = int.from_bytes(mutated[at : at + size], "little")
        value = old + rng.choice((-1, 1)) if isinstance(new, float) else new
        mutated[at : at + size] = (value % 256**size).to_bytes(size, "little")
        done.append(f"{size} bytes at {at}: {old} to {value}")
    return Mutant("; ".join(done), bytes(mutated))


# --- safetensors -----------------------------------------------------------------------------------------------------


@attrs.define
class SafetensorsFile:
    """A safetensors file in two parts: the JSON header and the arrays' bytes, which its offsets point into."""

    header: dict[str, Any]
    content: bytearray

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The parts of an intact file."""
        (length,) = struct.unpack("<Q", data[:8])
        return cls(json.loads(data[8 : 8 + length]), bytearray(data[8 + length :]))

    def pack(self, header: bytes | None = None) -> bytes:
        """The file's bytes, with ``header`` instead of its own if there is one."""
        text = json.dumps(self.header).encode() if header is None else header
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + bytes(self.content)

    @property
    def names(self) -> list[str]:
        """Of the arrays."""
        return [name for name in self.header if name != "__metadata__"]

    def arrays(self) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
        """A copy of every array by name, with the header's word for its dtype; that of a BF16 tensor holds its bits."""
        arrays = {}
        for name in self.names:
            entry = self.header[name]
            start, end = entry["data_offsets"]
            array = np.frombuffer(self.content[start:end], DTYPES[entry["dtype"]])
            arrays[name] = entry["dtype"], array.reshape(entry["shape"]).copy()
        return arrays

    def replace(self, arrays: dict[str, tuple[str, np.ndarray[Any, Any]]]) -> None:
        """Lay out ``arrays`` in place of the present ones, with a header that describes them correctly."""
        metadata = self.header.get("__metadata__")
        self.header = {} if metadata is None else {"__metadata__": metadata}
        self.content = bytearray()
        for name, (dtype, array) in arrays.items():
            start = len(self.content)
            self.content += np.ascontiguousarray(array).tobytes()
            self.header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, len(self.content)]}


def mutate_safetensors(rng: random.Random, data: bytes, other: bytes = b"") -> Mutant:
    """Mutate a safetensors file: its bytes, its header, or its arrays under a header that stays correct."""
    match rng.randrange(4):
        case 0:
            return mutate_bytes(rng, data, other)
        case 1:
            return _mutate_header(rng, SafetensorsFile.parse(data))
        case _:
            return _mutate_array(rng, SafetensorsFile.parse(data))


def _mutate_header(rng: random.Random, file: SafetensorsFile) -> Mutant:
    """Names, shapes, dtypes and offsets that may no longer describe the content."""
    if not file.names or rng.random() < 0.4:
        mutated = mutate_json(rng, file.header)
        return Mutant(f"header {mutated.what}", file.pack(mutated.data))
    name = rng.choice(file.names)
    entry = file.header[name]
    start, end = entry["data_offsets"]
    shape = entry["shape"]
    key, value = rng.choice(
        (
            ("dtype", rng.choice([*DTYPES, "F8_E4M3", "F4", "", "f32"])),
            ("shape", rng.choice(([*shape, 1], shape[::-1], [*shape[1:], 2**62], [1] * len(shape), []))),
            ("data_offsets", rng.choice(([end, start], [start, end + 8], [start + 1, end], [0, 2**63], [-1], [0, 0]))),
            ("name", rng.choice((f"{name}x", "", rng.choice(file.names), "../x", "a" * 5_000))),
            ("again", name),
        )
    )
    if key == "name":
        file.header[value] = file.header.pop(name)
    elif key == "again":
        file.header[f"{name}.again"] = dict(entry)
    else:
        entry[key] = value
    return Mutant(f"header of {name}: {key} = {str(value)[:80]}", file.pack())


def _mutate_array(rng: random.Random, file: SafetensorsFile) -> Mutant:
    """One array under a correct header: contents, dtype, a shape that broadcasts, name, presence."""
    arrays = file.arrays()
    if not arrays:
        return Mutant("no arrays", file.pack())
    name = rng.choice(list(arrays))
    dtype, array = arrays.pop(name)
    flat, changed = array.reshape(-1), array
    what = rng.choice(
        ("dropped", "exchanged", "filled", "filled", "flipped", "flipped", "recast", "reshaped", "resized")
    )
    if what == "exchanged":
        other = rng.choice([*arrays, f"{name}.x"])
        if other in arrays:
            arrays[name] = arrays[other]
        name = other
    elif what == "filled" and flat.size:
        place = slice(None) if rng.random() < 0.3 else rng.randrange(flat.size)
        flat[place] = _special(rng, dtype, array.dtype)
    elif what == "flipped" and flat.size:
        bits = flat.view(np.uint8)
        bits[rng.randrange(bits.size)] ^= 1 << rng.randrange(8)
    elif what == "recast":
        dtype = rng.choice([other for other in DTYPES if other not in (dtype, "BF16")])
        with np.errstate(all="ignore"):
            changed = array.astype(DTYPES[dtype])
    elif what == "reshaped":
        changed = rng.choice(
            (array[None], array[..., None], flat, flat[:1], array.swapaxes(0, -1) if array.ndim else flat)
        )
    elif what == "resized" and array.ndim:
        changed = rng.choice(
            (np.concatenate([array, array]), array[:-1], array[..., :1], flat[::-1].reshape(array.shape))
        )
    if what != "dropped":
        arrays[name] = dtype, changed
    file.replace(arrays)
    return Mutant(f"array {name}: {what}, now {dtype} {changed.shape}", file.pack())


def _special(rng: random.Random, dtype: str, kind: np.dtype[Any]) -> Any:
    """NaN, an infinity, an extreme or a zero."""
    if dtype == "BF16":
        return rng.choice((0x7FC0, 0x7F80, 0xFF80, 0x7F7F, 0x0000, 0x0001))
    if kind.kind == "f":
        return rng.choice((np.nan, np.inf, -np.inf, np.finfo(kind).max, np.finfo(kind).smallest_subnormal, 0.0))
    if kind.kind == "b":
        return rng.random() < 0.5
    return rng.choice((0, 1, np.iinfo(kind).min, np.iinfo(kind).max))

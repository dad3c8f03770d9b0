"""Seeded mutations of files: of bytes, of JSON documents, of safetensors headers and of the arrays that these describe.

Every function takes a ``random.Random`` and returns a ``Mutant``, so a seed and a file's bytes give one mutated file.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
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
    """Flip, overwrite, cut, repeat, move or splice bytes of ``data``.

    Args:
        other: another file of the same kind, to splice with; ``data`` itself if empty.
    """
    mutate: Callable[[random.Random, bytearray, bytes], str] = rng.choice(
        (_flip, _flip, _flip, _overwrite, _truncate, _truncate, _delete, _repeat, _insert, _splice, _extend)
    )
    mutated = bytearray(data)
    what = mutate(rng, mutated, other or data)
    return Mutant(what, bytes(mutated))


def _place(rng: random.Random, data: bytearray) -> int:
    """A position; the beginning, where headers lie, as often as the rest."""
    end = len(data) if rng.random() < 0.5 else min(len(data), 256)
    return rng.randrange(end) if end else 0


def _flip(rng: random.Random, data: bytearray, other: bytes) -> str:
    count = rng.choice((1, 1, 1, 2, 8, 64))
    for _ in range(count if data else 0):
        data[_place(rng, data)] ^= 1 << rng.randrange(8)
    return f"{count} bits flipped"


def _overwrite(rng: random.Random, data: bytearray, _: bytes) -> str:
    at, count, fill = _place(rng, data), rng.choice((1, 8, 64, 4096)), rng.choice((b"\x00", b"\xff", b"\x7f", b"{"))
    count = min(count, len(data) - at)
    data[at : at + count] = fill * count
    return f"{count} bytes from {at} are {fill!r}"


def _truncate(rng: random.Random, data: bytearray, _: bytes) -> str:
    length = rng.choice((0, 1, 7, 8, 9, _place(rng, data), len(data) - 1, len(data) // 2))
    del data[max(length, 0) :]
    return f"cut to {length} bytes"


def _delete(rng: random.Random, data: bytearray, _: bytes) -> str:
    at, count = _place(rng, data), rng.choice((1, 4, 8, 256))
    del data[at : at + count]
    return f"{count} bytes from {at} deleted"


def _repeat(rng: random.Random, data: bytearray, _: bytes) -> str:
    at, count = _place(rng, data), rng.choice((1, 8, 256))
    data[at:at] = data[at : at + count]
    return f"{count} bytes from {at} repeated"


def _insert(rng: random.Random, data: bytearray, _: bytes) -> str:
    at, count = _place(rng, data), rng.choice((1, 8, 64))
    data[at:at] = rng.randbytes(count)
    return f"{count} random bytes inserted at {at}"


def _splice(rng: random.Random, data: bytearray, other: bytes) -> str:
    at, start, count = _place(rng, data), rng.randrange(len(other) or 1), rng.choice((8, 64, 1024))
    data[at : at + count] = other[start : start + count]
    return f"{count} bytes from {start} of another file at {at}"


def _extend(rng: random.Random, data: bytearray, other: bytes) -> str:
    more = rng.choice((b"\x00", rng.randbytes(64), other[:4096]))
    data.extend(more)
    return f"{len(more)} bytes appended"


# --- JSON ------------------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, -(2**31), 2**31, 2**32, 2**53 + 1, 2**63, -(2**63) - 1, 10**12, 10**30),
    *(0.5, 2.9, -0.0, 1e-320, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", "0", "1", "1e9", "true", "nan", "x", "\x00", "é\ud800", "../../etc/passwd", "a" * 300, "a" * 100_000),
    *([], [[]], [0], [None], ["a"], [1, [2], {}], [1.5] * 3, [0] * 10_000, {}, {"": 0}, {"a": {"b": [1]}}),
)
_TEXTS = {
    f"an integer of {DIGITS} digits": "1" * DIGITS,
    "1e999": "1e999",
    f"{NESTED} nested lists": "[" * NESTED + "]" * NESTED,
    f"{NESTED} nested objects": '{"a":' * NESTED + "0" + "}" * NESTED,
    f"{NESTED} brackets that are never closed": "[" * NESTED,
    "a repeated key": '{"a": 1, "a": 2}',
}


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
        for key, held in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key, f"{path}.{key}"
            yield from _holders(held, f"{path}.{key}")


def _mutate_document(rng: random.Random, document: Any, raws: list[str]) -> str:
    places = list(_holders(document))
    if not places:
        return "an empty document"
    # by depth first, so that a long list does not hide the few keys above it
    depth = rng.choice(sorted({path.count(".") for _, _, path in places}))
    holder, key, path = rng.choice([place for place in places if place[2].count(".") == depth])
    value = holder[key]
    options: list[Callable[[], str]] = [lambda: _replace(rng, holder, key), lambda: _text(rng, holder, key, raws)]
    options += [
        lambda: _drop(holder, key),
        lambda: _wrap(rng, holder, key),
        lambda: _exchange(rng, places, holder, key),
    ]
    if isinstance(value, bool | int | float):
        options += [lambda: _number(rng, holder, key)] * 3
    if isinstance(value, list):
        options += [lambda: _uneven(rng, value)] * 3
    if isinstance(holder, dict):
        options.append(lambda: _rename(rng, holder, key))
    return f"{path[:100]}: {rng.choice(options)()}"


def _replace(rng: random.Random, holder: Any, key: Any) -> str:
    holder[key] = copy.deepcopy(rng.choice(VALUES))  # a later mutation may change it
    return f"= {holder[key]!r}"[:80]


def _text(rng: random.Random, holder: Any, key: Any, raws: list[str]) -> str:
    what = rng.choice(list(_TEXTS))
    holder[key] = f"{_RAW}{len(raws)}"
    raws.append(_TEXTS[what])
    return what


def _drop(holder: Any, key: Any) -> str:
    del holder[key]
    return "dropped"


def _wrap(rng: random.Random, holder: Any, key: Any) -> str:
    value = holder[key]
    wrapped = rng.choice(([value], {"value": value}, str(value), [value, copy.deepcopy(value)]))
    holder[key] = wrapped
    return f"wrapped in {type(wrapped).__name__}"


def _exchange(rng: random.Random, places: list[tuple[Any, Any, str]], holder: Any, key: Any) -> str:
    other, place, path = rng.choice(places)
    if isinstance(other[place], dict | list) or isinstance(holder[key], dict | list):
        other[place] = json.loads(json.dumps(holder[key]))  # a copy: a holder within itself has no JSON
        return f"copied to {path[:80]}"
    holder[key], other[place] = other[place], holder[key]
    return f"exchanged with {path[:80]}"


def _number(rng: random.Random, holder: Any, key: Any) -> str:
    old = holder[key]
    holder[key] = rng.choice((old + 1, old - 1, -old, old * 2, old + 10**12, float(old), old + 0.5, str(old), not old))
    return f"{old} becomes {holder[key]}"


def _uneven(rng: random.Random, values: list[Any]) -> str:
    match rng.randrange(5):
        case 0:
            values.append(copy.deepcopy(rng.choice(values)) if values else 0)
        case 1 if values:
            values.pop(rng.randrange(len(values)))
        case 2:
            rng.shuffle(values)
        case 3:
            values.clear()
        case _:
            values.insert(rng.randrange(len(values) + 1), copy.deepcopy(rng.choice(VALUES)))
    return f"now {len(values)} long"


def _rename(rng: random.Random, holder: MutableMapping[str, Any], key: str) -> str:
    new = rng.choice((key + "x", key[:-1], key.upper(), "", f"{key}\x00", rng.choice(list(holder)), "a" * 300))
    holder[new] = holder.pop(key)
    return f"renamed to {new[:40]!r}"


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
        """The file's bytes, with ``header`` instead of its own if one is given."""
        text = json.dumps(self.header).encode() if header is None else header
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + bytes(self.content)

    @property
    def names(self) -> list[str]:
        """Of the arrays."""
        return [name for name in self.header if name != "__metadata__"]

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """A copy of one array; that of a BF16 tensor holds its bits."""
        entry = self.header[name]
        start, end = entry["data_offsets"]
        return np.frombuffer(self.content[start:end], DTYPES[entry["dtype"]]).reshape(entry["shape"]).copy()

    def arrays(self) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
        """Every array by name, with the header's word for its dtype."""
        return {name: (self.header[name]["dtype"], self.array(name)) for name in self.names}

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
            return mutate_header(rng, data)
        case _:
            return mutate_arrays(rng, data)


def mutate_header(rng: random.Random, data: bytes) -> Mutant:
    """Mutate names, shapes, dtypes and offsets in a header, so that they may no longer describe the content."""
    file = SafetensorsFile.parse(data)
    if not file.names or rng.random() < 0.4:
        mutated = mutate_json(rng, file.header)
        return Mutant(f"header {mutated.what}", file.pack(mutated.data))
    name = rng.choice(file.names)
    entry = file.header[name]
    start, end = entry["data_offsets"]
    what: Any
    match rng.randrange(6):
        case 0:
            entry["dtype"] = what = rng.choice([*DTYPES, "F8_E4M3", "F4", "", "f32"])
        case 1:
            entry["shape"] = what = _shape(rng, entry["shape"])
        case 2:
            entry["data_offsets"] = what = rng.choice(
                (
                    [end, start],
                    [start, end + 8],
                    [start + 1, end],
                    [0, 2**63],
                    [-1, end],
                    [start],
                    [0, 0],
                    [start, 2**65],
                )
            )
        case 3:
            new = rng.choice((f"{name}x", "", name[:-1], rng.choice(file.names), "../x", "a" * 5_000))
            file.header[new] = file.header.pop(name)
            what = f"renamed to {new[:80]!r}"
        case 4:
            del file.header[name]
            what = "dropped"
        case _:
            file.header[f"{name}.again"] = dict(entry)
            what = "listed twice"
    return Mutant(f"header of {name}: {what}", file.pack())


def _shape(rng: random.Random, shape: MutableSequence[int]) -> list[int]:
    new = list(shape)
    match rng.randrange(6):
        case 0:
            new.append(1)
        case 1:
            new.insert(0, 1)
        case 2 if new:
            new[rng.randrange(len(new))] = rng.choice((0, 1, 2**31, 2**62, 10**12))
        case 3:
            new.reverse()
        case 4:
            new = [1] * len(new)
        case _:
            new = []
    return new


def mutate_arrays(rng: random.Random, data: bytes) -> Mutant:
    """Change one array and describe it correctly: contents, dtype, a shape that broadcasts, name, presence.

    NaN, infinities, extremes, one changed bit, other dtypes of the same values, dimensions of length one.
    """
    file = SafetensorsFile.parse(data)
    arrays = file.arrays()
    if not arrays:
        return Mutant("no arrays", data)
    name = rng.choice(list(arrays))
    dtype, array = arrays[name]
    mutate: Callable[[random.Random, str, np.ndarray[Any, Any]], tuple[str, np.ndarray[Any, Any], str]]
    mutate = rng.choice((_fill, _fill, _bit, _bit, _recast, _recast, _reshape, _reshape, _resize, _permute))
    match rng.randrange(8):
        case 0:
            del arrays[name]
            what = "dropped"
        case 1:
            other = rng.choice([*arrays, f"{name}.x"])
            arrays[name], arrays[other] = arrays.get(other, arrays[name]), arrays[name]
            what = f"exchanged with {other}"
        case _:
            dtype, array, what = mutate(rng, dtype, array)
            arrays[name] = dtype, array
    file.replace(arrays)
    return Mutant(f"array {name}: {what}", file.pack())


_Mutated = tuple[str, np.ndarray[Any, Any], str]


def _fill(rng: random.Random, dtype: str, array: np.ndarray[Any, Any]) -> _Mutated:
    """A special value at one place or all of them."""
    if dtype == "BF16":
        value: Any = rng.choice((0x7FC0, 0x7F80, 0xFF80, 0x7F7F, 0x0000, 0x8000, 0x0001))
    elif array.dtype.kind == "f":
        limit = np.finfo(array.dtype)
        value = rng.choice((np.nan, np.inf, -np.inf, limit.max, limit.smallest_subnormal, -0.0, 0.0))
    elif array.dtype.kind == "b":
        value = rng.random() < 0.5
    else:
        whole = np.iinfo(array.dtype)
        value = rng.choice((0, whole.min, whole.max, 1))
    where = slice(None) if rng.random() < 0.3 else slice(*([rng.randrange(array.size or 1)] * 2))
    if where.start is not None:
        where = slice(where.start, where.start + 1)
    array.reshape(-1)[where] = value
    return dtype, array, f"{value} at {'every place' if where.start is None else where.start}"


def _bit(rng: random.Random, dtype: str, array: np.ndarray[Any, Any]) -> _Mutated:
    content = bytearray(array.tobytes())
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return dtype, np.frombuffer(bytes(content), array.dtype).reshape(array.shape), "one bit flipped"


def _recast(rng: random.Random, dtype: str, array: np.ndarray[Any, Any]) -> _Mutated:
    """The same values in another dtype, as far as it can hold them."""
    new = rng.choice([name for name in DTYPES if name not in (dtype, "BF16")])
    if dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        return new, array.astype(DTYPES[new]), f"{dtype} becomes {new}"


def _reshape(rng: random.Random, dtype: str, array: np.ndarray[Any, Any]) -> _Mutated:
    """The same elements in another shape, or fewer that broadcast to it."""
    before = array.shape
    match rng.randrange(5):
        case 0:
            array = array[None]
        case 1:
            array = array[..., None]
        case 2 if array.ndim:
            axis = rng.randrange(array.ndim)
            array = array.take([0] if array.shape[axis] else [], axis)
        case 3:
            array = array.reshape(-1)
        case _:
            array = array.reshape(-1)[:1].reshape([1] * array.ndim) if array.size else array
    return dtype, array, f"{before} becomes {array.shape}"


def _resize(rng: random.Random, dtype: str, array: np.ndarray[Any, Any]) -> _Mutated:
    before = array.shape
    if not array.ndim:
        return dtype, array[None], f"{before} becomes (1,)"
    axis = rng.randrange(array.ndim)
    array = rng.choice((np.concatenate([array, array], axis), array.take(range(array.shape[axis] - 1), axis)))
    return dtype, array, f"{before} becomes {array.shape}"


def _permute(rng: random.Random, dtype: str, array: np.ndarray[Any, Any]) -> _Mutated:
    before = array.shape
    if rng.random() < 0.5 or array.ndim < 2:
        flat = array.reshape(-1)
        return dtype, flat[rng.sample(range(flat.size), flat.size)].reshape(before), "elements in another order"
    array = np.ascontiguousarray(array.swapaxes(0, rng.randrange(1, array.ndim)))
    return dtype, array, f"{before} becomes {array.shape}"

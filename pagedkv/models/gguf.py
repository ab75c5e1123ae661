"""Reads the header of a GGUF file; tensor data stays in the file until it is asked for.

The file is untrusted. Nothing is allocated or sliced before its size was compared with what is left of the file, and
everything that does not fit raises `ModelError` with the offset. Layout (versions 2 and 3, little endian):

    magic | version u32 | tensor count u64 | key count u64 | keys | tensor infos | padding | tensor data

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.api.errors import ModelError
from pagedkv.ops.gguf_quants import TensorType, tensor_type

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 26
MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4

_STRING = 8
_ARRAY = 9
_BOOL = 7
_SCALARS: Mapping[int, tuple[str, str]] = {
    0: ("uint8", "<B"),
    1: ("int8", "<b"),
    2: ("uint16", "<H"),
    3: ("int16", "<h"),
    4: ("uint32", "<I"),
    5: ("int32", "<i"),
    6: ("float32", "<f"),
    _BOOL: ("bool", "<?"),
    10: ("uint64", "<Q"),
    11: ("int64", "<q"),
    12: ("float64", "<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies. `shape` is outermost first, as in torch; `offset` counts bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRef:
    """An array of the metadata that was skipped: `count` items of `item_type` from byte `offset` on."""

    item_type: int
    count: int
    offset: int


class _Cursor:
    """A position in the file; every read is checked against the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.end = len(data)
        self.at = 0

    def fail(self, what: str, at: int | None = None) -> ModelError:
        where = self.at if at is None else at
        return ModelError(f"{self.path}: {what} (at byte {where}). The file is damaged: download it again.")

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.end - self.at:
            raise self.fail(f"{what} needs {nbytes} bytes, but the file ends after {self.end - self.at}")

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def count(self, what: str, *, most: int, item_bytes: int) -> int:
        """A count of items that follow, each at least `item_bytes` long."""
        at = self.at
        value = self.u64(what)
        if value > most or value * item_bytes > self.end - self.at:
            raise self.fail(f"{what} is {value}, more than the file can hold or than the limit of {most}", at)
        return value

    def text(self, what: str, *, most: int) -> str:
        at = self.at
        nbytes = self.u64(f"the length of {what}")
        if nbytes > most:
            raise self.fail(f"{what} is {nbytes} bytes long, the limit is {most}", at)
        self.need(nbytes, what)
        raw = self.data[self.at : self.at + nbytes]
        self.at += nbytes
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not valid UTF-8", at) from error

    def scalar(self, value_type: int, what: str) -> Any:
        layout = _SCALARS[value_type][1]
        self.need(struct.calcsize(layout), what)
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value


class GgufFile:
    """An open GGUF file: its metadata and where its tensors are.

    Raises `ModelError` when the file is missing, damaged, of another version, or names something twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = _map(path)
        cursor = _Cursor(path, self._map)
        self.version = _version(cursor)
        tensor_count = cursor.count("the number of tensors", most=MAX_TENSORS, item_bytes=32)
        key_count = cursor.count("the number of metadata keys", most=MAX_KEYS, item_bytes=13)
        self.metadata: dict[str, Any] = _read_metadata(cursor, key_count)
        self.alignment = _alignment(path, self.metadata)
        self.tensors: dict[str, TensorInfo] = _read_tensors(cursor, tensor_count, self.alignment)

    def array(self, key: str) -> list[str] | npt.NDArray[Any]:
        """The array under `key`: strings as a list, numbers as a numpy array (a copy). Nested arrays are refused."""
        value = self.metadata.get(key)
        if not isinstance(value, ArrayRef):
            raise ModelError(f"{self.path}: metadata key {key!r} is not an array. Convert the model again.")
        cursor = _Cursor(self.path, self._data())
        cursor.at = value.offset
        if value.item_type == _STRING:
            return list(_strings(cursor, value.count, key))
        if value.item_type == _ARRAY:
            raise ModelError(f"{self.path}: metadata key {key!r} is an array of arrays, which nothing here reads.")
        dtype = np.dtype(_SCALARS[value.item_type][1].replace("<?", "|u1"))
        return np.frombuffer(self._data(), dtype, value.count, value.offset).copy()

    def raw(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The bytes of one tensor, still in the file: a read-only view."""
        return np.frombuffer(self._data(), np.uint8, info.nbytes, info.offset)

    def close(self) -> None:
        """Let go of the file; it is unmapped when the last view of it is gone. Idempotent."""
        self._map = None

    def _data(self) -> mmap.mmap:
        if self._map is None:
            raise ModelError(f"{self.path}: the file was closed; open the model again.")
        return self._map


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise ModelError(f"{path}: the file is empty. Download it again.") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened: {error.strerror}. Check the path and its permissions.") from error


def _version(cursor: _Cursor) -> int:
    if cursor.data[: len(MAGIC)] != MAGIC:
        raise ModelError(f"{cursor.path}: not a GGUF file (it does not begin with {MAGIC.decode()!r}).")
    cursor.at = len(MAGIC)
    version = cursor.u32("the version")
    if version in VERSIONS:
        return version
    if version & 0xFFFF == 0:
        raise ModelError(f"{cursor.path}: a big-endian GGUF file. Only little-endian files are read: convert it.")
    raise ModelError(f"{cursor.path}: GGUF version {version}; versions {VERSIONS} are read. Convert the model again.")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        at = cursor.at
        key = cursor.text("a metadata key", most=MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} stands there twice", at)
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Any:
    at = cursor.at
    value_type = cursor.u32(f"the type of {key!r}")
    if value_type == _STRING:
        return cursor.text(f"the value of {key!r}", most=MAX_STRING_BYTES)
    if value_type == _ARRAY:
        return _skip_array(cursor, key, depth=1)
    if value_type not in _SCALARS:
        raise cursor.fail(f"metadata key {key!r} has the unknown type {value_type}", at)
    return cursor.scalar(value_type, f"the value of {key!r}")


def _skip_array(cursor: _Cursor, key: str, depth: int) -> ArrayRef:
    if depth > MAX_ARRAY_DEPTH:
        raise cursor.fail(f"metadata key {key!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
    at = cursor.at
    item_type = cursor.u32(f"the item type of {key!r}")
    if item_type not in (_STRING, _ARRAY) and item_type not in _SCALARS:
        raise cursor.fail(f"metadata key {key!r} is an array of the unknown type {item_type}", at)
    item_bytes = {_STRING: 8, _ARRAY: 12}.get(item_type) or struct.calcsize(_SCALARS[item_type][1])
    count = cursor.count(f"the number of items of {key!r}", most=MAX_ARRAY_ITEMS, item_bytes=item_bytes)
    found = ArrayRef(item_type=item_type, count=count, offset=cursor.at)
    if item_type == _STRING:
        _skip_strings(cursor, count, key)
    elif item_type == _ARRAY:
        for _ in range(count):
            _skip_array(cursor, key, depth + 1)
    else:
        cursor.at += count * item_bytes
    return found


def _skip_strings(cursor: _Cursor, count: int, key: str) -> None:
    # The hot loop of opening a file (about 100,000 turns): one unpack and two comparisons a string.
    data, end, at, unpack = cursor.data, cursor.end, cursor.at, _U64.unpack_from
    for _ in range(count):
        if at + 8 > end:
            raise cursor.fail(f"an item of {key!r} lies past the end of the file", at)
        at += 8 + unpack(data, at)[0]
        if at > end:
            raise cursor.fail(f"an item of {key!r} is longer than the file", min(at, end))
    cursor.at = at


def _strings(cursor: _Cursor, count: int, key: str) -> Iterator[str]:
    # `_skip_strings` has walked the same bytes, so lengths and ends are known to be good.
    data, at, unpack = cursor.data, cursor.at, _U64.unpack_from
    for _ in range(count):
        start = at + 8
        at = start + unpack(data, at)[0]
        try:
            yield data[start:at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise cursor.fail(f"an item of {key!r} is not valid UTF-8", start) from error


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise ModelError(f"{path}: general.alignment is {value!r}, not a power of two up to {MAX_ALIGNMENT}.")
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for _ in range(count):
        at = cursor.at
        info = _read_tensor(cursor)
        if info.name in tensors:
            raise cursor.fail(f"tensor {info.name!r} stands there twice", at)
        tensors[info.name] = info
    start = -(-cursor.at // alignment) * alignment
    return {name: _placed(cursor, info, start, alignment) for name, info in tensors.items()}


def _read_tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.text("a tensor's name", most=MAX_NAME_BYTES)
    at = cursor.at
    num_dims = cursor.u32(f"the number of dimensions of {name!r}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions, 1 to {MAX_DIMS} are possible", at)
    dims = [cursor.u64(f"the dimensions of {name!r}") for _ in range(num_dims)]
    kind = tensor_type(cursor.u32(f"the type of {name!r}"))
    offset = cursor.u64(f"the offset of {name!r}")
    if 0 in dims or (kind.block_size and dims[0] % kind.block_size):
        raise cursor.fail(f"tensor {name!r} of type {kind.name} cannot have dimensions {dims}", at)
    nbytes = kind.nbytes(prod(dims))
    return TensorInfo(name=name, shape=tuple(reversed(dims)), type=kind, offset=offset, nbytes=nbytes)


def _placed(cursor: _Cursor, info: TensorInfo, start: int, alignment: int) -> TensorInfo:
    """The same tensor with its offset counted from the file's start, after checking that it lies inside."""
    begin = start + info.offset
    if info.offset % alignment:
        raise cursor.fail(f"tensor {info.name!r} is not aligned to {alignment} bytes", begin)
    if begin + info.nbytes > cursor.end:
        missing = begin + info.nbytes - cursor.end
        raise cursor.fail(f"the file ends {missing} bytes before the end of tensor {info.name!r}", cursor.end)
    return TensorInfo(name=info.name, shape=info.shape, type=info.type, offset=begin, nbytes=info.nbytes)

"""The GGUF header reader against files written by the `gguf` package, and against damaged ones."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.api.errors import ModelError
from pagedkv.models.checkpoint import GgufCheckpoint
from pagedkv.models.gguf import GgufFile
from tests.helpers.gguf_files import ARCHITECTURE_KEYS, byte_vocabulary, tiny_tensors, write_gguf

SCALARS = {"uint8": 200, "int8": -3, "uint16": 65535, "int16": -9, "uint32": 7, "int32": -7, "uint64": 1 << 40}


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def header(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def uint32_key(key: str, value: int) -> bytes:
    return string(key) + struct.pack("<II", 4, value)


def tensor_entry(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    keys = ARCHITECTURE_KEYS | {"block_count": 1} | byte_vocabulary(264)
    path = tmp_path_factory.mktemp("gguf") / "valid.gguf"
    return write_gguf(path, "llama", keys, tiny_tensors(layers=1, vocab=264)).read_bytes()


def test_every_scalar_type_and_array_is_read_as_the_gguf_package_wrote_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, value in SCALARS.items():
        getattr(writer, f"add_{name}")(f"x.{name}", value)
    writer.add_float32("x.f", 0.5)
    writer.add_float64("x.d", 0.1)
    writer.add_bool("x.b", True)
    writer.add_string("x.s", "š\n🙂")
    writer.add_array("x.strings", ["a", "", "čau"])
    writer.add_array("x.ints", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "a.gguf")
    assert {name: file.metadata[f"x.{name}"] for name in SCALARS} == SCALARS
    assert (file.metadata["x.f"], file.metadata["x.d"], file.metadata["x.b"]) == (0.5, 0.1, True)
    assert file.metadata["x.s"] == "š\n🙂"
    assert file.array("x.strings") == ["a", "", "čau"]
    assert np.asarray(file.array("x.ints")).tolist() == [1, -2, 3]
    assert file.tensors == {}


def test_tensors_lie_where_the_gguf_package_finds_them(tmp_path: Path, valid: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(valid)
    file = GgufFile(path)
    theirs = gguf.GGUFReader(path).tensors
    assert len(theirs) == len(file.tensors)
    for tensor in theirs:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert file.raw(info).tobytes() == tensor.data.tobytes()


def test_version_2_is_read(tmp_path: Path, valid: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(valid[:4] + struct.pack("<I", 2) + valid[8:])
    assert GgufFile(path).version == 2


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "no magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "magic only": (b"GGUF", "needs 4 bytes"),
    "version 1": (header(0, 0, 1), "version 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "too many keys": (header(0, 1 << 60), "metadata keys is"),
    "too many tensors": (header(1 << 63, 0), "tensors is"),
    "endless key": (header(0, 1) + struct.pack("<Q", 1 << 62) + bytes(16), "limit is 65535"),
    "key cut": (header(0, 1) + struct.pack("<Q", 40) + bytes(16), "file ends after 16"),
    "key not text": (header(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(8), "not valid UTF-8"),
    "key twice": (header(0, 2) + 2 * uint32_key("a", 1), "'a' stands there twice"),
    "type unknown": (header(0, 1) + string("a") + struct.pack("<II", 77, 0), "unknown type 77"),
    "endless string": (header(0, 1) + string("a") + struct.pack("<IQ", 8, 1 << 50), "limit is 16777216"),
    "endless array": (header(0, 1) + string("a") + struct.pack("<IIQ", 9, 4, 1 << 40), "items of 'a' is"),
    "array item cut": (header(0, 1) + string("a") + struct.pack("<IIQQ", 9, 8, 1, 99), "longer than the file"),
    "array of unknown": (header(0, 1) + string("a") + struct.pack("<IIQ", 9, 55, 0), "unknown type 55"),
    "deep arrays": (header(0, 1) + string("a") + struct.pack("<I", 9) + 9 * struct.pack("<IQ", 9, 1), "deep"),
    "alignment 24": (header(0, 1) + uint32_key("general.alignment", 24), "general.alignment is 24"),
    "alignment 0": (header(0, 1) + uint32_key("general.alignment", 0), "general.alignment is 0"),
    "tensor twice": (header(2, 0) + 2 * tensor_entry("t", (1,)) + bytes(64), "'t' stands there twice"),
    "no dimension": (header(1, 0) + tensor_entry("t", ()) + bytes(64), "0 dimensions"),
    "five dimensions": (header(1, 0) + tensor_entry("t", (1,) * 5) + bytes(64), "5 dimensions"),
    "empty tensor": (header(1, 0) + tensor_entry("t", (4, 0)) + bytes(64), "cannot have dimensions"),
    "half a block": (header(1, 0) + tensor_entry("t", (33,), kind=2) + bytes(64), "cannot have dimensions"),
    "huge product": (header(1, 0) + tensor_entry("t", (1 << 62,) * 4) + bytes(64), "before the end of tensor 't'"),
    "offset beyond": (header(1, 0) + tensor_entry("t", (1,), offset=1 << 40) + bytes(64), "before the end"),
    "offset odd": (header(1, 0) + tensor_entry("t", (1,), offset=7) + bytes(64), "not aligned to 32"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(tmp_path: Path, name: str) -> None:
    content, message = DAMAGED[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_closed_one_are_errors(tmp_path: Path, valid: bytes) -> None:
    with pytest.raises(ModelError, match="cannot be opened"):
        GgufFile(tmp_path / "none.gguf")
    path = tmp_path / "a.gguf"
    path.write_bytes(valid)
    file = GgufFile(path)
    file.close()
    file.close()
    with pytest.raises(ModelError, match="closed"):
        file.array("tokenizer.ggml.tokens")
    with pytest.raises(ModelError, match="not an array"):
        GgufFile(path).array("general.architecture")


Edit = Callable[[bytearray], None]
INTERESTING = (0, 1, 2, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[int, bytes]]:
    """(position, bytes to write there); most in the first 2,000 bytes, where the structure is densest."""
    place = st.integers(0, 2000) | st.integers(0, 10_000)
    word = st.sampled_from(INTERESTING).map(lambda value: struct.pack("<Q", value))
    what = st.binary(min_size=1, max_size=4) | word
    return draw(st.lists(st.tuples(place, what), min_size=0, max_size=4))


@settings(max_examples=250, deadline=5000)
@given(changes=edits(), cut=st.none() | st.integers(0, 12_000))
def test_a_mutated_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, valid: bytes, changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    content = bytearray(valid)
    for at, new in changes:
        content[at : at + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(content[:cut])
    tracemalloc.start()
    try:
        use_everything(path)
    except ModelError as error:
        assert str(path) in str(error) or "tensor" in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 * len(valid)


def use_everything(path: Path) -> None:
    checkpoint = GgufCheckpoint(path)
    for name in checkpoint.names():
        checkpoint.tensor(name, torch.float32)
    tokenizer = checkpoint.tokenizer()
    tokenizer.decode(tokenizer.encode("hello world <|im_end|>"))
    tokenizer.apply_chat_template([{"role": "user", "content": "x"}])

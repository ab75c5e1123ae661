"""Weights in one or several .safetensors files, mapped into memory and read tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedkv.api.errors import ModelError
from pagedkv.models.tokenizer import read_json

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPE_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""The tensor types that are plain weights; others (fp8, int4 in int32, ...) need a format that is not built yet."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD = re.compile(r".+-(\d{5})-of-(\d{5})\.safetensors")


class SafetensorsFiles:
    """All tensors of a folder. Opening reads the headers only.

    Raises `ModelError` naming file and tensor for a missing shard, a damaged file, or a tensor found twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self.where: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.weight_bytes = 0
        index = folder / INDEX
        placed = _read_index(index) if index.is_file() else None
        for name in sorted(set(placed.values())) if placed else _single_files(folder):
            self._open(name)
        if placed:
            self._check_index(placed)

    def _open(self, name: str) -> None:
        from safetensors import SafetensorError, safe_open

        path = self.folder / name
        if not path.is_file():
            raise ModelError(f"{path}: this part of the weights is missing. Download the model again.")
        try:
            file: Any = safe_open(str(path), framework="pt", device="cpu")
            keys = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: damaged or cut short: {error}. Download it again.") from error
        self._files[name] = file
        for key in keys:
            self._register(name, key, file.get_slice(key))

    def _register(self, file: str, key: str, entry: Any) -> None:
        if key in self.where:
            raise ModelError(
                f"{self.folder}: tensor {key!r} stands in {self.where[key]} and in {file}. Remove one file."
            )
        dtype = entry.get_dtype()
        if dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ModelError(f"{self.folder / file}: tensor {key!r} is {dtype}, which is not built yet ({known} are).")
        self.where[key] = file
        self.shapes[key] = tuple(entry.get_shape())
        self.weight_bytes += prod(self.shapes[key]) * DTYPE_BYTES[dtype]

    def _check_index(self, placed: Mapping[str, str]) -> None:
        for key, file in placed.items():
            if self.where.get(key) != file:
                found = self.where.get(key, "no file")
                raise ModelError(
                    f"{self.folder / file}: tensor {key!r} should be there according to {INDEX}, but {found} has it. "
                    "Download the model again."
                )

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in the type it is stored in, still backed by the file. Raises `ModelError`."""
        from safetensors import SafetensorError

        if name not in self.where:
            raise ModelError(f"{self.folder}: there is no tensor {name!r} in {', '.join(sorted(self._files))}.")
        file = self.where[name]
        if file not in self._files:
            raise ModelError(f"{self.folder}: the files were closed; open the model again.")
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self.folder / file}: tensor {name!r} cannot be read: {error}.") from error
        return tensor

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        self._files.clear()


def _read_index(path: Path) -> dict[str, str]:
    """Tensor -> file name; only plain names of .safetensors files beside the index are accepted."""
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelError(f"{path}: has no weight_map. Download it again.")
    for key, name in placed.items():
        plain = isinstance(name, str) and Path(name).name == name and "\\" not in name and ":" not in name
        if not plain or not name.endswith(".safetensors"):
            raise ModelError(
                f"{path}: tensor {key!r} is said to be in {name!r}, which is no .safetensors file beside it."
            )
    return placed


def _single_files(folder: Path) -> list[str]:
    """The weight files of a folder without an index."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE in names:
        return [SINGLE]
    if not names:
        raise ModelError(_no_weights(folder))
    for name in names:
        if (match := _SHARD.fullmatch(name)) and int(match[2]) != len(names):
            raise ModelError(
                f"{folder}: {match[2]} parts of the weights are needed, {len(names)} are there, no {INDEX}."
            )
    return names


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        return (
            f"{folder}: its weights are pickle files ({', '.join(pickles[:3])}), which can run any code when opened "
            "and are never read. Convert them to safetensors where you trust them: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    if list(folder.glob("*.gguf")):
        return f"{folder}: no *.safetensors file; it holds GGUF files. Pass the path of one of them."
    return f"{folder}: no *.safetensors file. Download the weights, or use load_format='dummy' for random ones."

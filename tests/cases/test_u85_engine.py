"""U85 in the engine: what the backend does not declare is refused before any weight is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors

import pagedkv.plugins
from pagedkv import LLM
from pagedkv.api import Capabilities, DeviceInfo, UnsupportedError
from pagedkv.errors import ConfigError
from pagedkv_cpu.descriptor import CpuDescriptor
from tests.helpers.engine_rig import SETTINGS, drained, folder, greedy, solo
from tests.helpers.tiny_models import tiny_model


class Narrow(CpuDescriptor):
    """A backend for heads of 64 and 128 (and the tiny model's 12), blocks of 16 and 128, float32 only."""

    def describe(self, device: DeviceInfo) -> Capabilities:
        return dataclasses.replace(
            super().describe(device),
            dtypes=("fp32",),
            kv_dtypes=("fp32",),
            block_sizes=(frozenset({16, 128}),),
            head_dims=(frozenset({12, 64, 128}),),
            preferred_block_size=128,
        )


class Files:
    """Weight files that were opened, and tensors that were read from them."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.read: list[str] = []


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    seen, original, select = Files(), safetensors.safe_open, pagedkv.plugins.select

    class Watched:
        def __init__(self, path: str, **names: Any) -> None:
            seen.opened.append(path)
            self._file = original(path, **names)

        def get_tensor(self, name: str) -> Any:
            seen.read.append(name)
            return self._file.get_tensor(name)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    monkeypatch.setattr(safetensors, "safe_open", Watched)
    monkeypatch.setattr(
        pagedkv.plugins, "select", lambda *a, **n: dataclasses.replace(select(*a, **n), descriptor=Narrow())
    )
    yield seen


def start(model: Path, **settings: Any) -> LLM:
    return LLM(model, **SETTINGS | {"block_size": None} | settings)


@pytest.mark.parametrize("size", [1, 3, 7, 8, 24])
def test_u85_a_block_size_is_refused_before_a_weight_file_is_opened(files: Files, size: int) -> None:
    with pytest.raises(UnsupportedError, match=f"backend cpu does not support block_size={size}; accepted: 16, 128"):
        start(folder(), block_size=size)
    assert files.opened == []


@pytest.mark.parametrize("size", [0, -1, 16.0, "16", True])
def test_u85_no_block_size_at_all(files: Files, size: Any) -> None:
    with pytest.raises(ConfigError, match=r"block_size=.* must be a whole number of tokens, at least 1"):
        start(folder(), block_size=size)
    assert files.opened == []


@pytest.mark.parametrize("names", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "float16"}])
def test_u85_so_are_dtypes(files: Files, names: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match="accepted: fp32"):
        start(folder(), **names)
    assert files.opened == []


def test_u85_a_head_size_is_refused_before_a_weight_is_read(files: Files, tmp_path: Path) -> None:
    model = tiny_model(tmp_path, head_dim=80)
    with pytest.raises(UnsupportedError, match="head_dim of layers 0-2=80; accepted: 12, 64, 128"):
        start(model)
    assert files.read == [], "at most the headers, for the names and shapes"


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """From the backend as it is, before `files` narrows it."""
    return solo([1, 2, 3], greedy(4))


@pytest.mark.parametrize("size", [16, 128])
def test_u85_a_declared_size_is_kept(expected: list[int], files: Files, size: int) -> None:
    with start(folder(), block_size=size) as llm:
        assert llm.engine.parts.choice.block_size == size
        assert llm.generate([1, 2, 3], greedy(4), use_tqdm=False)[0].outputs[0].token_ids == expected
        assert files.read
        drained(llm)

"""U85 and beyond: what is wrong with backend, version, option or environment is told before a weight file is opened.

The model's weight file is damaged: whoever opens it raises `ModelError`, as the first test shows.
"""

from __future__ import annotations

import shutil

import pytest

from pagedkv import LLM
from pagedkv.api.errors import (
    BackendLoadError,
    BackendNotFound,
    BackendUnavailable,
    BackendVersionError,
    ConfigError,
    ModelError,
    UnsupportedError,
)
from tests.helpers import broken_plugins
from tests.helpers.cpu_plugins import cpu_plugin
from tests.helpers.engine_rig import SETTINGS, folder


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A model whose weight file is no such file."""
    model = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(folder(), model)
    (model / "model.safetensors").write_bytes(b"\xff" * 64)
    return model


@pytest.fixture
def start(damaged, tmp_path, monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.syspath_prepend(str(broken_plugins.site()))
    narrow = {"dtypes": ("fp32",), "kv_dtypes": ("fp32",), "block_sizes": (frozenset({16, 128}),)}
    monkeypatch.syspath_prepend(str(cpu_plugin(tmp_path, "narrow", preferred_block_size=16, **narrow)))
    return lambda **settings: LLM(damaged, **SETTINGS | settings)


def test_the_weight_file_raises_when_it_is_opened(start):
    with pytest.raises(ModelError, match="safetensors"):
        start()


OPTION = "backend 'cpu': option 'threads'"


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        # options: unknown, ill-typed, given twice
        (
            {"backend_options": {"thread": 1}},
            ConfigError,
            "backend 'cpu' has no option 'thread'; did you mean 'threads'",
        ),
        ({"backend_options": {"threads": "1"}}, ConfigError, f"{OPTION} must be int, not '1'"),
        ({"backend_options": {"threads": True}}, ConfigError, f"{OPTION} must be int, not True"),
        ({"backend_options": {"threads": 1.0}}, ConfigError, f"{OPTION} must be int, not 1.0"),
        ({"backend_options": ["threads"]}, ConfigError, "backend_options=['threads'] must be a mapping"),
        ({"threads": 2}, ConfigError, "option threads of backend cpu is given twice"),
        (
            {"thread": 2},
            ConfigError,
            "neither a setting of the engine nor an option of backend cpu: did you mean threads",
        ),
        (
            {"backend": "v1-0", "backend_options": {"level": 3, "depth": 3}},
            ConfigError,
            "backend 'v1-0': option 'level' is given twice, also as 'depth'; give it once",
        ),
        # names, devices, versions
        ({"backend": "cpuu"}, BackendNotFound, "no installed backend is called 'cpuu'; did you mean 'cpu'?"),
        ({"device": 7}, BackendUnavailable, "there is no device 7; its devices: 0"),
        ({"device": -1}, ConfigError, "device=-1 must be a whole number of at least 0"),
        (
            {"backend": "v2-0"},
            BackendVersionError,
            "contract 2.0 and needs at least 2.0; this pagedkv speaks contract 1.1",
        ),
        # capabilities of a wrong type or value
        (
            {"backend": "describe-wrong", "backend_options": {}},
            BackendLoadError,
            "block_sizes is (16,), must be a tuple of frozensets of sizes",
        ),
        ({"backend": "options-wrong"}, BackendLoadError, "option 'level': default is '3', must be int or None"),
        # capabilities that do not cover what is asked
        ({"backend": "narrow", "block_size": 1}, UnsupportedError, "block_size=1; accepted: 16, 128"),
        ({"backend": "narrow", "block_size": 7}, UnsupportedError, "block_size=7; accepted: 16, 128"),
        ({"backend": "narrow", "block_size": 8}, UnsupportedError, "block_size=8; accepted: 16, 128"),
        (
            {"backend": "narrow", "block_size": 0},
            ConfigError,
            "block_size=0 must be a whole number of tokens, at least 1",
        ),
        ({"backend": "narrow", "block_size": -1}, ConfigError, "block_size=-1 must be a whole number of tokens"),
        (
            {"backend": "narrow", "block_size": 16, "dtype": "bfloat16"},
            UnsupportedError,
            "dtype='bf16'; accepted: fp32",
        ),
        (
            {"backend": "narrow", "block_size": 16, "kv_cache_dtype": "half"},
            UnsupportedError,
            "backend narrow does not support kv_dtype='fp16'; accepted: fp32",
        ),
        ({"dtype": "int8"}, ConfigError, "dtype='int8' is not one of auto, float32"),
        ({"kv_cache_dtype": 8}, ConfigError, "kv_cache_dtype=8 is not one of auto, float32"),
        (
            {"backend": "v1-0", "backend_options": {}},
            UnsupportedError,
            "backend v1-0 does not support feature='mixed_batch'",
        ),
    ],
)
def test_what_is_wrong_is_told_before_a_weight_file_is_opened(start, settings, error, said):
    with pytest.raises(error) as caught:
        start(**settings)
    assert said in str(caught.value)


def test_every_reason_comes_at_once(start):
    with pytest.raises(UnsupportedError) as caught:
        start(backend="narrow", block_size=7, dtype="bfloat16", kv_cache_dtype="half")
    assert len(caught.value.reasons) == 3


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        ("PAGEDKV_BACKEND", "nosuch", BackendNotFound, "'nosuch'"),
        ("PAGEDKV_BACKEND", "import-exit", BackendLoadError, "importing raised SystemExit: 3"),
        ("PAGEDKV_BACKEND", "v1-99", BackendVersionError, "needs at least 1.99; this pagedkv speaks contract 1.1"),
    ],
)
def test_so_is_a_value_of_the_environment(start, monkeypatch, name, value, error, said):
    monkeypatch.setenv(name, value)
    with pytest.raises(error) as caught:
        start(backend=None)
    assert said in str(caught.value)

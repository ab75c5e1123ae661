"""Which weights stay packed, from the setting to the answer: what is kept, refused, budgeted and said."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagedkv import LLM
from pagedkv.cli.machine import engine_facts
from pagedkv.errors import ConfigError, UnsupportedError
from pagedkv.models.native import NativeDecoder
from tests.helpers.engine_rig import SETTINGS, drained, greedy, some_prompts, token_ids
from tests.helpers.formats import BOTH, cpu_with_formats
from tests.helpers.gguf_files import quantized_file

PROMPTS = some_prompts([3, 9])
MIXED = {"": "Q4_0", "attn_v": "Q8_0", "ffn_down": "Q5_1"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_file(tmp_path_factory.mktemp("mixed") / "a.gguf", MIXED)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The lines that the user sees."""
    logger = logging.getLogger("pagedkv")
    logger.addHandler(caplog.handler)
    with caplog.at_level("INFO", "pagedkv"):
        yield caplog
    logger.removeHandler(caplog.handler)


@contextmanager
def started(model: Path, **settings: Any) -> Iterator[LLM]:
    with LLM(model, **SETTINGS | settings) as llm:
        yield llm
        drained(llm)


def told(said: pytest.LogCaptureFixture) -> str:
    """The one line on which weights are packed."""
    (line,) = {message for message in said.messages if message.startswith("quantization")}
    return line


def answers(llm: LLM) -> list[list[int]]:
    return token_ids(llm.generate(PROMPTS, greedy(5), use_tqdm=False))


def test_left_unset_what_the_backend_multiplies_stays_packed(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    with started(mixed, dtype="float32") as llm:
        expected, dense = answers(llm), llm.engine.parts.memory.weights
        assert llm.engine.parts.quantization == "none"
    said.clear()
    cpu_with_formats(monkeypatch, ["Q4_0", "Q8_0"])
    with started(mixed) as llm:
        assert answers(llm) == expected
        parts = llm.engine.parts
        assert parts.choice.dtype == "fp32" and "batch_invariant" in parts.choice.features
        assert parts.quantization == engine_facts(parts)["quantization"] == "gguf (Q4_0, Q8_0)"
        assert parts.memory.weights < 0.5 * dense
    line = told(said)
    assert "kept packed: Q4_0 (11 tensors" in line and "Q8_0 (2 tensors" in line
    assert "dequantized to fp32: Q5_1 (2 tensors" in line and "not among the backend's weight formats" in line
    assert "F32 (5 tensors" in line and "not quantized" in line
    assert line.endswith("the products with packed weights may round activations to 8 bits")
    assert "(quantization gguf (Q4_0, Q8_0))" in said.text and "held twice" not in said.text


@pytest.mark.parametrize(
    ("settings", "packed", "why"),
    [
        ({"dtype": "float32"}, False, "dtype='float32' was given; quantization='gguf' would keep them packed"),
        ({"quantization": "none"}, False, "quantization='none'"),
        ({"quantization": "gguf"}, True, ""),
        ({"quantization": "gguf", "dtype": "float32"}, True, ""),
    ],
)
def test_an_explicit_choice_is_kept_and_said(
    mixed: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    packed: bool,
    why: str,
) -> None:
    cpu_with_formats(monkeypatch, ["Q4_0"])
    with started(mixed, **settings) as llm:
        assert llm.engine.parts.quantization == ("gguf (Q4_0)" if packed else "none")
    line = told(said)
    assert line.startswith("quantization gguf (Q4_0): kept packed" if packed else "quantization none: dequantized to")
    assert why in line


def test_a_table_that_is_held_twice_stands_in_the_budget(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    cpu_with_formats(monkeypatch, ["Q4_0"], ["linear"])
    with started(mixed) as llm:
        model: Any = llm.engine.parts.runner.model
        assert model._head.packed is not model._embedding.packed
        assert "the embedding table is held twice, once more for the head" in llm.engine.parts.memory.table()
    assert "the backend has no look-up for it in fp32" in said.text


def _unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeDecoder, "load", lambda *_, **__: pytest.fail("weights were read"))


@pytest.mark.parametrize(
    ("formats", "settings", "texts"),
    [
        ([], {}, ["accepted: none", "Q4_0 (11 tensors", "Q8_0 (2 tensors", "Q5_1 (2 tensors"]),
        (["Q4_1"], {}, ["accepted: Q4_1", "not among the backend's weight formats"]),
        (["Q4_0"], {"names": []}, ["accepted: Q4_0", "the backend has no product for it in fp32"]),
    ],
)
def test_blocks_that_the_backend_has_no_product_for_are_refused_before_weights_are_read(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, formats: list[str], settings: dict[str, Any], texts: list[str]
) -> None:
    cpu_with_formats(monkeypatch, formats, settings.get("names", BOTH))
    _unread(monkeypatch)
    with pytest.raises(UnsupportedError, match="backend cpu does not support quantization='gguf'") as caught:
        LLM(mixed, **SETTINGS, quantization="gguf")
    assert all(text in str(caught.value) for text in texts), str(caught.value)


def test_blocks_asked_for_of_a_model_that_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_with_formats(monkeypatch, ["Q4_0"])
    _unread(monkeypatch)
    plain = quantized_file(tmp_path / "plain.gguf", {"": "F16"})
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 320, "max_position_embeddings": 64, "rms_norm_eps": 1e-6} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model, kind in ((tmp_path, "dummy"), (plain, "gguf")):
        with pytest.raises(ConfigError, match=rf"quantization='gguf' keeps .*\({kind}\) has none: leave it out"):
            LLM(model, **SETTINGS, quantization="gguf", load_format=kind)


def test_a_file_of_plain_numbers_has_no_line(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    with started(quantized_file(tmp_path / "plain.gguf", {"": "F16"}), quantization="none") as llm:
        assert llm.engine.parts.quantization == "none"
    assert not [m for m in said.messages if m.startswith("quantization")]


def test_checked_calls_keep_the_table_shared(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_with_formats(monkeypatch, ["Q4_0", "Q8_0"])
    monkeypatch.setenv("PAGEDKV_CHECK", "1")
    with started(mixed) as llm:
        model: Any = llm.engine.parts.runner.model
        assert model._head.packed is model._embedding.packed
        assert len(answers(llm)) == 2

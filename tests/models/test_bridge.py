"""What the bridge accepts and refuses before any weight is read, and what it says."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedkv.errors import ConfigError, ModelError
from pagedkv.models.bridge import BridgedCheckpoint, BridgedDecoder, Peak
from pagedkv.models.checkpoint import open_checkpoint
from tests.helpers.plain import OpsOnlyBackend
from tests.helpers.tiny_bridged import BRIDGED, bridged_model, config_folder
from tests.helpers.tiny_models import tiny_model

_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}


def opened(folder: Path, **names: Any) -> BridgedCheckpoint:
    checkpoint = open_checkpoint(str(folder), **{"load_format": "dummy", **names})
    assert isinstance(checkpoint, BridgedCheckpoint)
    return checkpoint


# -- refused by name ---------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}, "mamba.*recurrent"),
    ({"model_type": "rwkv", **_TINY}, "rwkv.*recurrent"),
    ({"model_type": "jamba", **_TINY}, "jamba.*recurrent"),
    ({"model_type": "recurrent_gemma", **_TINY}, "recurrent_gemma.*recurrent"),
    ({"model_type": "falcon_h1", **_TINY}, "falcon_h1.*recurrent"),
    ({"model_type": "lfm2", **_TINY, "layer_types": ["conv", "full_attention"]}, "layers of kind conv"),
    ({"model_type": "t5", "d_model": 32, "num_layers": 2, "vocab_size": 64}, "t5.*encoder and a decoder"),
    ({"model_type": "bart", "d_model": 32, "vocab_size": 64}, "bart.*encoder and a decoder"),
    ({"model_type": "vit"}, "vit.*no causal language model"),
    ({"model_type": "gemma3"}, "gemma3.*more than text"),
    ({"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]}, "only GPT2LMHeadModel writes text"),
    ({"model_type": "gpt2", "add_cross_attention": True}, "cross attention"),
    ({"model_type": "gpt2", "quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
    (
        {"model_type": "bert", **_TINY, "max_position_embeddings": 64},
        "bert: BertSelfAttention attends to tokens that come later",
    ),
    (
        {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64},
        "bloom: 2 of its 2 layers do not route",
    ),
    (
        {"model_type": "mpt", "d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 64},
        "mpt: 2 of its 2 layers do not route",
    ),
    (
        {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 2, "n_head": 2},
        "openai-gpt: 2 of its 2 layers do not route",
    ),
    (
        {"model_type": "xglm", "d_model": 32, "num_layers": 2, "vocab_size": 64},
        "xglm: its attention cannot be found",
    ),
    ({"model_type": "doge", **_TINY}, "doge.*a mask of its own making"),
    ({"model_type": "deepseek_v32", **_TINY}, "deepseek_v32.*layers of kind indexed_attention"),
    ({"model_type": "falcon", **_TINY, "alibi": True}, "falcon: alibi"),
    (
        {"model_type": "llama4_text", **_TINY, "head_dim": 16, "num_key_value_heads": 2},
        "llama4_text.*mask.*depends on more than positions",
    ),
    (
        {"model_type": "not_a_model", "auto_map": {"AutoModelForCausalLM": "modeling.Net"}},
        "not_a_model.*code of its own",
    ),
    ({"model_type": "gpt2", "n_positions": 0}, "max_position_embeddings is 0"),
    ({"model_type": "gpt2", "n_layer": 10**9}, "num_hidden_layers is 1000000000"),
    ({"model_type": "gpt2", "n_embd": -4}, "gpt2: it cannot be made without weights: transformers"),
    ({"model_type": "gpt_neo"}, "gpt_neo: it cannot be made without weights: transformers raised KeyError: 'pagedkv'"),
    ({"model_type": "blt"}, "blt.*(more than text|num_hidden_layers is None)"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=lambda x: x["model_type"] if isinstance(x, dict) else "")
def test_a_model_that_cannot_use_blocks_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=f"(?s){words}") as caught:
        opened(config_folder(tmp_path, **fields))
    assert str(tmp_path) in str(caught.value)


def test_transformers_that_is_not_there_is_named_with_what_to_run(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, model_type="gpt2", **_TINY)
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from pagedkv.models.checkpoint import open_checkpoint\n"
        f"open_checkpoint({str(folder)!r}, load_format='dummy')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "model_type gpt2 has no native decoder here" in done.stderr
    assert "pip install 'transformers>=5'" in done.stderr


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, model_type="gpt2", **_TINY)
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle files \(pytorch_model.bin\)"):
        opened(folder, load_format="auto")


# -- which runs it -----------------------------------------------------------------------------------------------------


def test_the_choice_is_said_and_an_explicit_one_stands(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagedkv.models")
    llama = config_folder(tmp_path, **json.loads((tiny_model(tmp_path) / "config.json").read_text()))
    gpt2 = config_folder(tmp_path, model_type="gpt2", **_TINY)
    assert type(open_checkpoint(str(llama), load_format="dummy")).__name__ == "DummyCheckpoint"
    assert "model_type llama runs natively" in caplog.text
    opened(gpt2)
    assert (
        "model_type gpt2 runs through transformers' own modules, over the paged cache: it has no native" in caplog.text
    )
    opened(llama, model_impl="transformers")
    assert "model_type llama runs through" in caplog.text
    with pytest.raises(ModelError, match="model_type 'gpt2' is not supported"):
        open_checkpoint(str(gpt2), load_format="dummy", model_impl="native")


def test_gguf_files_run_natively_only(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="model_impl='transformers' runs folders"):
        open_checkpoint(str(tmp_path / "model.gguf"), model_impl="transformers")


# -- what is found without weights -------------------------------------------------------------------------------------


def test_layers_are_described_as_the_model_calls_attention(tmp_path: Path) -> None:
    gpt2 = opened(config_folder(tmp_path, **BRIDGED["gpt2"])).config.layers
    assert [layer.scale for layer in gpt2] == pytest.approx([12**-0.5 / n for n in (1, 2, 3)])
    oss = opened(config_folder(tmp_path, **BRIDGED["gpt_oss"])).config
    assert [layer.window for layer in oss.layers] == [4, None, 4]
    assert all(layer.sinks for layer in oss.layers)
    (first, *_), mla = oss.layers, opened(config_folder(tmp_path, **BRIDGED["deepseek_v3"])).config.layers
    assert (first.q_heads, first.kv_heads, first.k_dim) == (4, 2, 16)
    assert {(layer.k_dim, layer.v_dim) for layer in mla} == {(20, 10)}
    falcon = opened(config_folder(tmp_path, **BRIDGED["falcon_new"])).config.layers
    assert {(layer.q_heads, layer.kv_heads) for layer in falcon} == {(4, 2)}


def test_softcaps_and_windows_of_a_native_family(tmp_path: Path) -> None:
    fields = {"model_type": "gemma2", **_TINY, "head_dim": 16, "num_key_value_heads": 1, "sliding_window": 7}
    layers = opened(config_folder(tmp_path, **fields, query_pre_attn_scalar=9), model_impl="transformers").config.layers
    assert [(layer.window, layer.softcap, layer.scale) for layer in layers] == [(7, 50.0, 1 / 3), (None, 50.0, 1 / 3)]


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 64), ("longrope", 32)])
def test_rope_that_depends_on_the_batch_ends_where_it_would_begin_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, limit: int
) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
    fields = {"model_type": "olmo2", **_TINY, "max_position_embeddings": 64, "rope_parameters": rope}
    assert opened(config_folder(tmp_path, **fields)).config.max_position == limit
    assert f"rope type {kind} turns all keys anew when a sequence passes {limit} positions" in caplog.text


def test_memory_is_known_before_loading(tmp_path: Path) -> None:
    folder = bridged_model(tmp_path, "starcoder2", tie_word_embeddings=False)
    checkpoint = opened(folder, load_format="auto")
    decoder = BridgedDecoder.load(checkpoint, OpsOnlyBackend(), "fp32")
    assert decoder.nbytes == 4 * checkpoint.config.num_numbers
    stored = load_file(folder / "model.safetensors").values()
    assert checkpoint.weight_bytes == sum(t.nbytes for t in stored)
    assert checkpoint.config.num_parameters == sum(t.numel() for t in stored)
    hidden, inner, logits = 64 * 48 * 4, 64 * 80 * 4, 8 * 320 * 4
    planned = checkpoint.workspace(64, 8, "fp32")
    assert planned > 2 * hidden + 2 * inner + 2 * logits  # residual and input; before and after the activation
    assert planned < 20 * (hidden + inner) + 4 * logits
    assert checkpoint.workspace(640, 8, "fp32") > 8 * (planned - 3 * logits)
    assert checkpoint.workspace(64, 8, "bf16") < planned


@pytest.mark.parametrize("family", ["gpt2", "starcoder2", "cohere", "olmoe", "gpt_oss", "deepseek_v3"])
def test_no_forward_takes_more_memory_than_planned(tmp_path: Path, family: str) -> None:
    checkpoint = opened(bridged_model(tmp_path, family), load_format="auto")
    decoder = BridgedDecoder.load(checkpoint, OpsOnlyBackend(), "fp32")
    ids = torch.arange(200) % 97
    decoder.forward(ids, ids, lambda layer, q, k, v, out: out.zero_(), ids[:16])
    peak = Peak([*decoder._model.parameters(), *decoder._model.buffers()])
    with peak:
        decoder.forward(ids, ids, lambda layer, q, k, v, out: out.zero_(), ids[:16])
    planned = checkpoint.workspace(200, 16, "fp32")
    assert peak.most < planned < 4 * peak.most


# -- weights -----------------------------------------------------------------------------------------------------------


def _changed(folder: Path, change: Any) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


def _load(folder: Path, dtype: str = "fp32") -> BridgedDecoder:
    return BridgedDecoder.load(opened(folder, load_format="auto"), OpsOnlyBackend(), dtype)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "model.layers.1.mlp.c_fc.weight"
    with pytest.raises(ModelError, match=f"1 tensors are missing: {name}"):
        _load(_changed(bridged_model(tmp_path, "starcoder2"), lambda tensors: tensors.pop(name)))
    with pytest.raises(ModelError, match=r"mlp\.c_fc"):
        _load(_changed(bridged_model(tmp_path, "starcoder2"), lambda t: t.update({name: torch.zeros(3, 3)})))
    with pytest.raises(ModelError, match="exceed the range of float16"):
        _load(_changed(bridged_model(tmp_path, "starcoder2"), lambda t: t.update({name: t[name] * 1e9})), "fp16")
    _load(_changed(bridged_model(tmp_path, "starcoder2"), lambda t: t.update({"extra.weight": torch.zeros(2)})))
    assert "1 tensors have no place in the model: extra.weight" in caplog.text


@pytest.mark.parametrize(
    ("stored", "known"), [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16"), (None, None)]
)
def test_the_stored_dtype_is_the_files_not_the_skeletons(tmp_path: Path, stored: str | None, known: str | None) -> None:
    fields = {} if stored is None else {"dtype": stored}
    folder = config_folder(tmp_path, model_type="gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=64, **fields)
    assert opened(folder).config.dtype == known

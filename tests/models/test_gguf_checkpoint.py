"""From a GGUF file to a configuration and Hugging Face tensors: against transformers' models and the gguf package."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pagedkv.api.errors import ModelError
from pagedkv.models.checkpoint import GgufCheckpoint, open_checkpoint
from pagedkv.models.gguf import GgufFile, TensorInfo
from pagedkv.models.gguf_tensors import hf_names
from pagedkv.models.hf_config import parse_hf_config
from pagedkv.ops.gguf_quants import tensor_type
from tests.helpers.gguf_files import (
    ARCHITECTURE_KEYS,
    byte_vocabulary,
    from_state_dict,
    interleaved,
    tiny_tensors,
    write_gguf,
)
from tests.helpers.tiny_models import build_model

Kind = gguf.GGMLQuantizationType
BASE = ARCHITECTURE_KEYS | byte_vocabulary()


def opened(tmp_path: Path, architecture: str = "llama", **changes: Any) -> GgufCheckpoint:
    """A tiny file with some keys changed; None removes a key, `_` stands for a dot."""
    keys = BASE | {key.replace("__", "."): value for key, value in changes.items()}
    keys = {key: value for key, value in keys.items() if value is not None}
    return GgufCheckpoint(write_gguf(tmp_path / "a.gguf", architecture, keys, tiny_tensors()))


@pytest.mark.parametrize("family", ["llama", "llama_bias", "llama_tied", "qwen2", "qwen3"])
def test_tensors_and_configuration_are_those_of_the_hugging_face_model(tmp_path: Path, family: str) -> None:
    model = build_model(family)
    config, state = model.config, model.state_dict()
    architecture = config.model_type
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    keys = BASE | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if architecture != "qwen2" else 12,
        "attention.value_length": config.head_dim if architecture != "qwen2" else 12,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    tensors = from_state_dict(state, architecture, 4, config.num_key_value_heads)
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "a.gguf", architecture, keys, tensors))
    assert checkpoint.names() == state.keys()
    for name, value in state.items():
        tensor = checkpoint.tensor(name, torch.float32)
        assert tensor.is_contiguous()
        torch.testing.assert_close(tensor, value, rtol=0, atol=0, msg=name)
    expected = parse_hf_config(config.to_dict(), None)
    found = dataclasses.replace(
        checkpoint.config,
        rms_norm_eps=expected.rms_norm_eps,
        bos_token_id=256,
        eos_token_ids=(257,),
        dtype=expected.dtype,
    )
    assert checkpoint.config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)  # float32 in the file
    assert found == expected
    assert checkpoint.config.dtype == "fp32"
    assert checkpoint.quantization is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.BF16, Kind.F16])
def test_quantized_rows_are_converted_and_put_in_order(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    keys = BASE | {"embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2, "block_count": 1}
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (80, 64), "ffn_up": (80, 64), "ffn_down": (64, 80)}
    plain = {f"blk.0.{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    tensors = {
        name: interleaved(rows, 4 if "_q" in name else 2) if "attn_q" in name or "attn_k" in name else rows
        for name, rows in plain.items()
    }
    norms = {f"blk.0.{name}_norm.weight": np.ones(64, np.float32) for name in ("attn", "ffn")}
    rest = {
        "token_embd.weight": rng.standard_normal((320, 64), dtype=np.float32),
        "output_norm.weight": np.ones(64, np.float32),
    }
    types = {name: kind for name in tensors if "ffn_down" not in name}
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "a.gguf", "llama", keys, tensors | norms | rest, types))
    for name in types:
        expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(plain[name], kind), kind))
        found = checkpoint.tensor(hf_name(name), dtype)
        torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0, msg=name)


def test_what_the_file_mostly_holds_is_named(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"token_embd.weight": np.zeros((320, 64), np.float32)}
    tensors = {name: np.zeros((*array.shape[:-1], 64), np.float32) for name, array in tensors.items()}
    types = {name: Kind.Q4_1 for name, array in tensors.items() if array.ndim == 2}
    keys = BASE | {"embedding_length": 64, "feed_forward_length": 64}
    tensors |= {
        f"blk.{i}.{name}.weight": np.zeros((64, 64), np.float32)
        for i in range(3)
        for name in ("ffn_gate", "ffn_up", "ffn_down", "attn_q", "attn_output")
    }
    tensors |= {
        f"blk.{i}.{name}.weight": np.zeros((32, 64), np.float32) for i in range(3) for name in ("attn_k", "attn_v")
    }
    path = write_gguf(tmp_path / "a.gguf", "llama", keys, tensors, types)
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.format, checkpoint.quantization, checkpoint.config.dtype) == ("gguf", "Q4_1", None)
    assert checkpoint.weight_bytes == sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)


def hf_name(name: str) -> str:
    info = TensorInfo(name=name, shape=(1,), type=tensor_type(0), offset=0, nbytes=4)
    ((ours, expert),) = hf_names(name, info, "llama")
    assert expert is None
    return ours


def test_names_are_those_of_the_gguf_package() -> None:
    names = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.11.self_attn.q_proj.bias",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.3.mlp.down_proj.weight",
    ]
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 12)
    theirs = [table.get_name(name, (".weight", ".bias")) for name in names]
    assert None not in theirs
    assert [hf_name(str(name)) for name in theirs] == names
    assert hf_name("blk.0.ffn_quux.weight") == "blk.0.ffn_quux.weight"
    assert hf_name("blk.0") == "blk.0"


def test_rope_scaling_is_mapped(tmp_path: Path) -> None:
    assert opened(tmp_path).config.rope.kind == "default"
    linear = opened(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0).config.rope
    assert (linear.kind, linear.factor) == ("linear", 4.0)
    old = opened(tmp_path, rope__scale_linear=2.0).config.rope
    assert (old.kind, old.factor) == ("linear", 2.0)
    off = opened(tmp_path, rope__scaling__type="none", rope__scaling__factor=4.0).config.rope
    assert (off.kind, off.factor) == ("default", 1.0)
    yarn = opened(
        tmp_path,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__attn_factor=0.5,
        rope__scaling__original_context_length=64,
        rope__scaling__yarn_beta_fast=16.0,
    ).config.rope
    assert (yarn.kind, yarn.factor, yarn.original_max_position, yarn.beta_fast, yarn.beta_slow) == (
        "yarn",
        4.0,
        64,
        16.0,
        1.0,
    )
    assert yarn.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4.0) + 1.0))
    with pytest.raises(ModelError, match=r"rope.scaling.type.*'longrope'; none, linear and yarn"):
        opened(tmp_path, rope__scaling__type="longrope", rope__scaling__factor=4.0)


def test_frequency_factors_are_read(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 6, dtype=np.float32)
    path = write_gguf(tmp_path / "a.gguf", "llama", BASE, tiny_tensors() | {"rope_freqs.weight": factors})
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.config.rope.freq_factors == tuple(factors.tolist())
    assert not any("rope" in name for name in checkpoint.names())
    write_gguf(path, "llama", BASE, tiny_tensors() | {"rope_freqs.weight": factors[:5]})
    with pytest.raises(ModelError, match=r"rope_freqs.weight' has shape \[5\], not \[6\]"):
        GgufCheckpoint(path)
    write_gguf(path, "llama", BASE, tiny_tensors() | {"rope_freqs.weight": factors - 1})
    with pytest.raises(ModelError, match="not above 0"):
        GgufCheckpoint(path)


def test_windows_and_heads_per_layer(tmp_path: Path) -> None:
    assert opened(tmp_path, attention__sliding_window=64).config.windows == (64, 64, 64)
    assert opened(tmp_path, attention__sliding_window=0).config.windows == (None, None, None)
    assert opened(tmp_path, attention__head_count_kv=[2, 2, 2]).config.num_kv_heads == 2
    with pytest.raises(ModelError, match="head_count_kv' differs between layers"):
        opened(tmp_path, attention__head_count_kv=[2, 4, 2])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"expert_count": 8}, "llama.expert_used_count' is None"),
    "too many used": ({"expert_count": 8, "expert_used_count": 9}, "expert_used_count' is 9 of 8"),
    "sigmoid router": (
        {"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2},
        "llama.expert_gating_func' is 2",
    ),
    "logit scale": ({"logit_scale": 0.5}, "llama.logit_scale' is 0.5"),
    "softcap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "unknown key": ({"quantum_flux": 1}, "llama.quantum_flux"),
    "window pattern": ({"attention__sliding_window_pattern": [True, False, True]}, "sliding_window_pattern"),
    "partial rope": ({"rope__dimension_count": 6}, "rope.dimension_count"),
    "uneven heads": ({"attention__head_count_kv": 3}, "does not divide"),
    "value length": ({"attention__value_length": 6}, "value_length"),
    "no layers": ({"block_count": None}, "llama.block_count' is None"),
    "many layers": ({"block_count": 1_000_000_000}, "block_count' is 1000000000"),
    "layers missing": ({"block_count": 4}, "9 tensors are missing: model.layers.3"),
    "layers left over": ({"block_count": 2}, "9 tensors have no place"),
    "shape": ({"feed_forward_length": 96}, r"shape \[80, 48\], but .* implies \[96, 48\]"),
    "eps": ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
    "split": ({"split.count": 3}, "3 parts.*llama-gguf-split --merge"),
    "adapter": ({"general.type": "adapter"}, "holds a 'adapter'"),
    "attention factor": ({"rope__scaling__attn_factor": 2.0}, "attn_factor' is 2 without yarn"),
    "eos": ({"tokenizer.ggml.eos_token_id": 320}, "no id of the vocabulary"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        opened(tmp_path, **changes)


def test_neutral_values_are_accepted(tmp_path: Path) -> None:
    config = opened(tmp_path, expert_count=0, logit_scale=1.0, attention__causal=True, vocab_size=320).config
    assert config == opened(tmp_path).config


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="architecture 'mamba' cannot be run; supported in GGUF are llama, qwen2, qwen3"
    ):
        opened(tmp_path, "mamba")


def test_unreadable_tensor_types_are_listed(tmp_path: Path) -> None:
    path = opened(tmp_path).path
    content = bytearray(path.read_bytes())
    at = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    content[at] = 11  # Q3_K
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"tensor types Q3_K cannot be read; .*F32 \(28\), Q3_K \(1\)"):
        GgufCheckpoint(path)


def test_all_end_of_text_ids_are_found(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary()
    tokens = list(vocabulary["tokenizer.ggml.tokens"])
    tokens[300], tokens[301] = "<|eot_id|>", "<end_of_turn>"
    ends = opened(
        tmp_path,
        **{"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eom_token_id": 6},
    ).config.eos_token_ids
    assert ends == (5, 6, 262, 300, 301)


def test_a_stated_vocabulary_size_that_is_wrong_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pagedkv.models"):
        assert opened(tmp_path, vocab_size=999).config.vocab_size == 320
    assert "999" in caplog.text


def test_values_beyond_fp16_are_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["blk.1.ffn_up.weight"][3, 5] = 1e6
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "a.gguf", "llama", BASE, tensors))
    name = "model.layers.1.mlp.up_proj.weight"
    assert checkpoint.tensor(name, torch.bfloat16)[3, 5] == torch.tensor(1e6).bfloat16()
    with pytest.raises(ModelError, match=r"blk.1.ffn_up.weight.*fp16 cannot"):
        checkpoint.tensor(name, torch.float16)


def test_an_unknown_tensor_and_a_closed_file(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    with pytest.raises(ModelError, match="no tensor 'x'"):
        checkpoint.tensor("x", torch.float32)
    checkpoint.close()
    with pytest.raises(ModelError, match="closed"):
        checkpoint.tensor("model.norm.weight", torch.float32)


def test_the_demo_model_dequantizes_as_in_the_gguf_package() -> None:
    try:
        checkpoint = open_checkpoint("demo")
    except ModelError as error:
        pytest.skip(str(error))
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (
        30,
        9,
        3,
        64,
        49152,
    )
    assert (config.tie_word_embeddings, config.eos_token_ids, config.rope.theta) == (True, (2, 0), 100000.0)
    assert (checkpoint.quantization, checkpoint.weight_bytes) == ("Q4_1", 96_576_768)
    wanted = {
        "blk.7.attn_k.weight": 3,
        "blk.29.ffn_down.weight": 0,
        "blk.0.attn_q.weight": 9,
        "blk.3.attn_norm.weight": 0,
    }
    file = GgufFile(checkpoint.path)  # that it finds tensors where the gguf package does is tested on small files
    for name, heads in wanted.items():
        info = file.tensors[name]
        stored = file.raw(info).reshape(*info.shape[:-1], -1)
        expected = gguf.quants.dequantize(stored, Kind[info.type.name])
        found = checkpoint.tensor(hf_name(name), torch.float32).numpy()
        np.testing.assert_array_equal(interleaved(found, heads) if heads else found, expected, err_msg=name)

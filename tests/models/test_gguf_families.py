"""Models written as llama.cpp's converter writes them, read back and run: logits against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pagedkv.models.checkpoint import GgufCheckpoint
from pagedkv.models.gguf import GgufFile
from pagedkv.models.gguf_config import parse_gguf_config
from pagedkv.models.native import NativeDecoder
from tests.helpers.gguf_files import (
    ARCHITECTURE_KEYS,
    byte_vocabulary,
    convert,
    interleaved,
    random_k_blocks,
    tiny_tensors,
    write_gguf,
)
from tests.helpers.plain import DenseAttention, OpsOnlyBackend
from tests.helpers.tiny_models import build_model

Kind = gguf.GGMLQuantizationType
GEMMA3_LAYERS = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama_bias", {"head_dim": 12}),
    "qwen2": ("qwen2", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3",
        {
            "query_pre_attn_scalar": 8,
            "num_hidden_layers": 7,
            "layer_types": GEMMA3_LAYERS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", {}),
    "qwen3moe": ("qwen3_moe", {}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.6],
    "long_factor": [1.0, 1.3, 2.0, 3.5, 6.0, 11.0],
}


def _check(model: Any, checkpoint: GgufCheckpoint, count: int, max_model_len: int | None = None) -> None:
    decoder = NativeDecoder.load(checkpoint, OpsOnlyBackend(), "fp32", max_model_len=max_model_len)
    ids = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(0))
    logits = decoder.forward(ids, torch.arange(count), DenseAttention(decoder.config.layer_specs()), None)
    with torch.inference_mode():
        expected = model(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_converted_model_gives_transformers_logits(tmp_path: Path, name: str) -> None:
    family, changes = CASES[name]
    model = build_model(family, **changes)
    _check(model, GgufCheckpoint(convert(model, tmp_path / "a.gguf")), 40)


@pytest.mark.parametrize(("count", "max_model_len"), [(40, 64), (90, None)])
def test_longrope_factors_and_the_attention_factor(tmp_path: Path, count: int, max_model_len: int | None) -> None:
    model = build_model("phi3_longrope", max_position_embeddings=256, rope_parameters=dict(LONGROPE))
    _check(model, GgufCheckpoint(convert(model, tmp_path / "a.gguf")), count, max_model_len)


def test_experts_are_parts_of_one_tensor(tmp_path: Path) -> None:
    model = build_model("mixtral")
    checkpoint = GgufCheckpoint(convert(model, tmp_path / "a.gguf"))
    assert checkpoint.config.architecture == "MixtralForCausalLM"
    state = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    for expert in range(5):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        assert torch.equal(checkpoint.tensor(name, torch.float32), state[expert, 80:])
    assert checkpoint.weight_bytes == sum(parameter.nbytes for parameter in model.parameters()), (
        "no part is counted more than once"
    )


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_types_of_experts_and_of_rotated_heads(tmp_path: Path, kind: Kind) -> None:
    """Expert parts and reordered rows of a K type are those that the gguf package dequantizes."""
    keys = (
        ARCHITECTURE_KEYS | byte_vocabulary() | {"block_count": 1, "embedding_length": 256, "feed_forward_length": 256}
    )
    shapes = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256)}
    shapes |= {"ffn_gate_exps": (3 * 256, 256), "ffn_up_exps": (3 * 256, 256), "ffn_down_exps": (3 * 256, 256)}
    stored = {
        f"blk.0.{name}.weight": random_k_blocks(kind.name, *shape, seed=at)
        for at, (name, shape) in enumerate(shapes.items())
    }
    expected = {name: gguf.quants.dequantize(rows, kind) for name, rows in stored.items()}
    stored = {n: rows.reshape(3, 256, -1) if "exps" in n else rows for n, rows in stored.items()}
    plain = {name: np.ones(256, np.float32) for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")}
    plain |= {"output_norm.weight": np.ones(256, np.float32), "token_embd.weight": np.ones((320, 256), np.float32)}
    plain["blk.0.ffn_gate_inp.weight"] = np.ones((3, 256), np.float32)
    keys |= {"expert_count": 3, "expert_used_count": 2}
    path = write_gguf(tmp_path / "a.gguf", "llama", keys, stored | plain, dict.fromkeys(stored, kind))
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.quantization == kind.name
    up = checkpoint.tensor("model.layers.0.mlp.experts.2.up_proj.weight", torch.float32).numpy()
    np.testing.assert_array_equal(up, expected["blk.0.ffn_up_exps.weight"][512:])
    heads = checkpoint.tensor("model.layers.0.self_attn.k_proj.weight", torch.float32).numpy()
    np.testing.assert_array_equal(interleaved(heads, 2), expected["blk.0.attn_k.weight"])


def _config(tmp_path: Path, architecture: str, layers: int = 3, **changes: Any) -> Any:
    """What is read of a tiny file; `_` in a key stands for a dot."""
    keys = ARCHITECTURE_KEYS | byte_vocabulary() | {"block_count": layers, "attention.key_length": 12}
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    tensors = tiny_tensors(layers=layers)
    if architecture.startswith("gemma"):
        norms = ("post_attention_norm", "post_ffw_norm")
        tensors |= {f"blk.{i}.{name}.weight": np.ones(48, np.float32) for i in range(layers) for name in norms}
    return parse_gguf_config(GgufFile(write_gguf(tmp_path / "a.gguf", architecture, keys, tensors)))


def test_what_gemmas_files_leave_to_the_reader(tmp_path: Path) -> None:
    two = _config(tmp_path, "gemma2")
    assert (two.attention_softcap, two.logit_softcap, two.windows) == (50.0, 30.0, (4096, None, 4096))
    assert two.local_rope is None
    assert two.attention_scale == pytest.approx(12**-0.5)
    large = _config(tmp_path, "gemma2", layers=46, attention__key_length=16)
    assert (large.head_dim, large.attention_scale) == (16, pytest.approx((48 / 4) ** -0.5)), "the 27B's own scale"
    three = _config(tmp_path, "gemma3", layers=7, attention__sliding_window=8, rope__freq_base=1e6)
    assert three.windows == (8, 8, 8, 8, 8, None, 8)
    assert three.local_rope is not None
    assert (three.rope.theta, three.local_rope.theta, three.logit_softcap) == (1e6, 1e4, None)
    flags = [True, False, True]
    pattern = _config(
        tmp_path,
        "gemma3",
        attention__sliding_window=8,
        attention__sliding_window_pattern=flags,
        rope__freq_base_swa=500.0,
    )
    assert (pattern.windows, pattern.local_rope.theta) == ((8, None, 8), 500.0)


def test_granites_switch_of_rope(tmp_path: Path) -> None:
    plain = _config(tmp_path, "granite", logit_scale=8.0, attention__scale=0.25)
    assert (plain.no_rope_layers, plain.logit_divisor, plain.attention_scale) == ((), 8.0, 0.25)
    assert _config(tmp_path, "granite", rope__scaling__finetuned=True).no_rope_layers == ()
    assert _config(tmp_path, "granite", rope__scaling__finetuned=False).no_rope_layers == (0, 1, 2)
    assert _config(tmp_path, "llama", rope__scaling__finetuned=False).no_rope_layers == ()

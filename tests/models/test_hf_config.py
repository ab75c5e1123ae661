"""The strict reader of config.json: what it accepts, what it makes of it, and what it refuses by name."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from pagedkv.api.errors import ModelError
from pagedkv.models.hf_config import parse_hf_config
from tests.helpers.tiny_models import FAMILIES, build_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
QWEN = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# config.json of HuggingFaceTB/SmolLM2-135M-Instruct, as published
SMOLLM2 = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
  "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
  "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
  "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
  "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152}""")

# config.json of Qwen/Qwen2.5-0.5B-Instruct, as published
QWEN25 = json.loads("""{
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
  "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
  "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
  "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.43.1",
  "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""")


def _with(base: dict[str, Any] = LLAMA, **changes: Any) -> dict[str, Any]:
    return {**base, **changes}


def _refused(config: Any, *texts: str, generation: Any = None) -> None:
    with pytest.raises(ModelError) as caught:
        parse_hf_config(config, generation)
    for text in texts:
        assert text in str(caught.value)


def test_a_plain_llama() -> None:
    config = parse_hf_config(LLAMA, None)
    assert (config.architecture, config.dtype, config.head_dim, config.windows) == (
        "LlamaForCausalLM",
        "bf16",
        16,
        (None, None),
    )
    assert (config.rope.kind, config.rope.theta, config.rope.dim) == ("default", 10000.0, 16)
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm or config.tie_word_embeddings)
    assert config.eos_token_ids == ()
    assert config.bos_token_id is None
    specs = config.layer_specs()
    assert [(s.q_heads, s.kv_heads, s.k_dim, s.scale) for s in specs] == [(4, 2, 16, 0.25)] * 2


def test_published_configs_are_read() -> None:
    smol = parse_hf_config(SMOLLM2, {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2})
    assert (smol.head_dim, smol.tie_word_embeddings, smol.rope.theta, smol.max_position) == (64, True, 100000.0, 8192)
    assert (smol.bos_token_id, smol.eos_token_ids) == (1, (2,))
    qwen = parse_hf_config(QWEN25, {"eos_token_id": [151645, 151643], "top_p": 0.8})
    assert (qwen.qkv_bias, qwen.o_bias, set(qwen.windows)) == (True, False, {None})
    assert qwen.eos_token_ids == (151645, 151643)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_itself_writes_is_read(tmp_path: Path, family: str) -> None:
    model = build_model(family)
    model.config.save_pretrained(tmp_path)
    config = parse_hf_config(json.loads((tmp_path / "config.json").read_text()), None)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert config.num_heads * config.head_dim == attention.o_proj.in_features
    assert config.qk_norm == hasattr(attention, "q_norm")
    assert config.o_bias == (attention.o_proj.bias is not None)
    assert config.fused == hasattr(attention, "qkv_proj") == hasattr(mlp, "gate_up_proj")
    if not config.fused:
        assert config.num_kv_heads * config.head_dim == attention.k_proj.out_features
        assert config.qkv_bias == (attention.k_proj.bias is not None)
    if config.experts_of(0) is None:
        assert config.mlp_bias == (mlp.down_proj.bias is not None)
    else:
        assert mlp.experts.down_proj.shape == (
            config.experts.num,
            config.hidden_size,
            config.experts.intermediate_size,
        )


def test_end_ids_of_both_files_all_count() -> None:
    config = parse_hf_config(_with(eos_token_id=5, bos_token_id=1), {"eos_token_id": [7, 5, 9]})
    assert config.eos_token_ids == (7, 5, 9)
    assert parse_hf_config(_with(eos_token_id=[2, 3]), {"eos_token_id": 3}).eos_token_ids == (3, 2)
    assert parse_hf_config(LLAMA, {"bos_token_id": 4}).bos_token_id == 4
    _refused(_with(eos_token_id=1000), "eos_token_id", "999")
    _refused(_with(eos_token_id=[1, True]), "eos_token_id")
    _refused(LLAMA, "generation_config.json", "eos_token_id", generation={"eos_token_id": "</s>"})
    _refused(LLAMA, "generation_config.json", generation=[1])


def test_unknown_fields_are_refused_with_their_values_unless_null() -> None:
    _refused(
        _with(final_logit_softcapping=30.0, clip_qkv=8), "final_logit_softcapping = 30.0", "clip_qkv = 8", "remove"
    )
    _refused(_with(causal=False), "causal = False")
    _refused(_with(scale_depth=0), "scale_depth = 0")
    assert parse_hf_config(_with(final_logit_softcapping=None), None) == parse_hf_config(LLAMA, None)


@pytest.mark.parametrize(
    ("field", "neutral", "other"),
    [
        ("rope_interleaved", False, True),
        ("is_encoder_decoder", False, True),
        ("is_causal", True, False),
        ("pruned_heads", {}, {"0": [1]}),
        ("partial_rotary_factor", 1.0, 0.5),
        ("sliding_window", None, 64),
        ("quantization_config", None, {"quant_method": "awq"}),
        ("auto_map", {"AutoTokenizer": "x.Y"}, {"AutoModelForCausalLM": "modeling_own.Own"}),
        ("hidden_act", "silu", "gelu"),
        ("use_qk_norm", False, True),
    ],
)
def test_fields_that_are_known_at_their_neutral_value_only(field: str, neutral: Any, other: Any) -> None:
    assert parse_hf_config(_with(**{field: neutral}), None) == parse_hf_config(LLAMA, None)
    _refused(_with(**{field: other}), field)


def test_other_kinds_of_model_are_refused_by_name() -> None:
    _refused(_with(model_type="gemma"), "gemma", "llama")
    _refused(_with(model_type="gemma3", text_config={}, vision_config={}), "gemma3", "text_config", "text-only")
    _refused(_with(model_type=None), "model_type")
    _refused(_with(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification")
    _refused(_with(architectures=["Qwen2ForCausalLM"]), "Qwen2ForCausalLM")
    _refused(_with(quantization_config={"quant_method": "gptq", "bits": 4}), "quantization_config", "gptq", "GGUF")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": True},
        {"num_attention_heads": "4"},
        {"num_attention_heads": 4.0},
        {"num_attention_heads": 5},
        {"num_key_value_heads": 3},
        {"hidden_size": -64},
        {"hidden_size": None},
        {"hidden_size": 66},
        {"head_dim": 15},
        {"vocab_size": 2**40},
        {"intermediate_size": 10**30},
        {"num_hidden_layers": 10**6},
        {"max_position_embeddings": 0},
        {"rms_norm_eps": math.nan},
        {"rms_norm_eps": -1e-5},
        {"rms_norm_eps": "1e-5"},
        {"rope_theta": math.inf},
        {"rope_theta": 0},
        {"tie_word_embeddings": 1},
        {"attention_bias": "false"},
        {"torch_dtype": "float8_e4m3fn"},
        {"dtype": "float16"},
        {"rope_scaling": [1]},
        {"rope_scaling": "linear"},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "linear_attention"]},
    ],
    ids=str,
)
def test_inconsistent_or_hostile_values_are_refused_by_name(changes: dict[str, Any]) -> None:
    _refused(_with(**changes), next(iter(changes)))


def test_a_message_does_not_grow_with_a_hostile_value() -> None:
    with pytest.raises(ModelError) as caught:
        parse_hf_config(_with(unknown="\x1b[2J" * 10**5), None)
    assert len(str(caught.value)) < 600
    assert "\x1b" not in str(caught.value)


def test_no_object_is_refused() -> None:
    _refused([LLAMA], "config.json", "JSON object")


def test_the_older_and_the_newer_rope_fields_mean_the_same() -> None:
    old = parse_hf_config(_with(rope_theta=5e5, rope_scaling=LLAMA3), None)
    new = parse_hf_config(_with(rope_parameters={**LLAMA3, "rope_theta": 5e5}), None)
    assert old == new
    assert (old.rope.kind, old.rope.factor, old.rope.original_max_position) == ("llama3", 8.0, 64)
    assert (old.rope.low_freq_factor, old.rope.high_freq_factor) == (1.0, 4.0)
    oldest = parse_hf_config(_with(rope_scaling={"type": "linear", "factor": 2}), None)
    assert (oldest.rope.kind, oldest.rope.factor) == ("linear", 2.0)


def test_yarn_reaches_factor_times_its_original_length() -> None:
    given = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = parse_hf_config(_with(rope_scaling=given), None)
    assert (config.rope.kind, config.rope.original_max_position, config.max_position) == ("yarn", 128, 512)
    assert parse_hf_config(_with(max_position_embeddings=4096, rope_scaling=given), None).max_position == 4096
    whole = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}
    assert parse_hf_config(_with(rope_scaling=whole), None).rope.factor == 4.0
    outside = {"rope_type": "yarn", "factor": 2.0}
    config = parse_hf_config(_with(rope_scaling=outside, original_max_position_embeddings=32), None)
    assert config.rope.original_max_position == 32


@pytest.mark.parametrize(
    ("rope", "text"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"type": "su", "short_factor": [1.0]}, "su"),
        ({"type": "mrope", "mrope_section": [1, 2]}, "mrope"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "linear", "factor": True}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "beta_fast"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({**LLAMA3, "original_max_position_embeddings": -1}, "original_max_position_embeddings"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 1e6, "original_max_position_embeddings": 10**6}, "factor"),
        ({"rope_type": "yarn", "factor": math.nan}, "factor"),
        ({"rope_type": ["yarn"]}, "rope type"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_rope_that_is_not_understood_is_refused_by_name(rope: dict[str, Any], text: str) -> None:
    _refused(_with(rope_scaling=rope), text)
    _refused(_with(rope_parameters=rope), text)


def test_contradictions_within_the_rope_fields_are_refused() -> None:
    linear = {"rope_type": "linear", "factor": 2.0}
    _refused(_with(rope_scaling=linear, rope_parameters={**linear, "factor": 4.0}), "disagree")
    _refused(_with(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6}), "rope_theta")
    _refused(_with(original_max_position_embeddings=32, rope_scaling=LLAMA3), "original_max_position_embeddings")


def test_windows_of_each_family() -> None:
    assert parse_hf_config(_with(MISTRAL, sliding_window=8), None).windows == (8, 8)
    assert parse_hf_config(_with(MISTRAL, sliding_window=None), None).windows == (None, None)
    assert parse_hf_config(MISTRAL, None).windows == (4096, 4096), "what transformers assumes"
    _refused(_with(MISTRAL, sliding_window=8, layer_types=["full_attention", "sliding_attention"]), "layer_types")
    _refused(_with(MISTRAL, sliding_window=0), "sliding_window")
    on = _with(QWEN, use_sliding_window=True, sliding_window=8)
    assert parse_hf_config(_with(on, max_window_layers=1), None).windows == (None, 8)
    assert parse_hf_config(on, None).windows == (None, None), "max_window_layers is 28 where it is absent"
    types = ["sliding_attention", "full_attention"]
    assert parse_hf_config(_with(on, max_window_layers=1, layer_types=types), None).windows == (8, None)
    assert parse_hf_config(_with(QWEN, sliding_window=8, max_window_layers=0), None).windows == (None, None)
    _refused(_with(QWEN, sliding_window=8, layer_types=types), "layer_types")


def test_biases_of_each_family() -> None:
    llama = parse_hf_config(_with(attention_bias=True, mlp_bias=True), None)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    assert parse_hf_config(_with(QWEN, attention_bias=True), None).o_bias is False
    _refused(_with(QWEN, attention_bias=False), "attention_bias")
    _refused(_with(QWEN, mlp_bias=True), "mlp_bias")
    _refused(_with(MISTRAL, attention_bias=True), "attention_bias")


def test_what_is_assumed_or_stretched_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pagedkv.models")
    parse_hf_config(_with(MISTRAL, rope_theta=1e4), None)
    parse_hf_config(
        _with(rope_theta=1e4, rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 128}), None
    )
    text = caplog.text
    assert "no sliding_window; taken as 4096" in text
    assert "yarn reaches 512 positions" in text
    assert "rope_theta" not in text


def test_what_a_family_leaves_out() -> None:
    old = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "torch_dtype", "architectures")}
    assert parse_hf_config(old, None).num_kv_heads == 4
    assert parse_hf_config(old, None).dtype is None
    _refused({k: v for k, v in QWEN.items() if k != "num_key_value_heads"}, "num_key_value_heads")
    qwen3 = _with(model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    assert parse_hf_config(qwen3, None).head_dim == 128
    assert parse_hf_config(_with(qwen3, head_dim=32), None).qk_norm


GEMMA2 = {
    **{name: value for name, value in LLAMA.items() if name != "hidden_act"},
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "sliding_window": 32,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "cache_implementation": "hybrid",
}
GEMMA3 = {
    **{name: value for name, value in GEMMA2.items() if "softcapping" not in name},
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "sliding_window_pattern": 2,
    "num_hidden_layers": 4,
}
PHI3 = {
    **LLAMA,
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 128,
    "rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2] * 8},
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "sliding_window": 100,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_window_layers": 2,
    "use_sliding_window": False,
    "sliding_window": None,
}
GRANITE = {
    **LLAMA,
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "embedding_multiplier": 12,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
}
SMOLLM3 = {
    **LLAMA,
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "num_hidden_layers": 8,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0],
    "max_window_layers": 28,
    "use_sliding_window": False,
    "sliding_window": None,
}


def test_gemma() -> None:
    two = parse_hf_config(GEMMA2, None)
    assert (two.windows, two.attention_softcap, two.logit_softcap) == ((32, None), 50.0, 30.0)
    assert (two.attention_scale, two.embedding_multiplier, two.norm_offset) == (0.125, 8.0, 1.0)
    assert (two.tie_word_embeddings, two.post_norms, two.activation) == (True, True, "gelu_tanh")
    absent = parse_hf_config({k: v for k, v in GEMMA2.items() if "softcapping" not in k}, None)
    assert (absent.attention_softcap, absent.logit_softcap) == (50.0, 30.0), "what transformers assumes"
    assert parse_hf_config(_with(GEMMA2, attn_logit_softcapping=None), None).attention_softcap is None
    three = parse_hf_config(GEMMA3, None)
    assert three.windows == (32, None, 32, None)
    assert (three.attention_softcap, three.logit_softcap, three.qk_norm) == (None, None, True)
    thetas = [rope.theta for i in range(4) if (rope := three.rope_of(i)) is not None]
    assert thetas == [1e4, 1e6, 1e4, 1e6]
    scaled = parse_hf_config(_with(GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0}), None)
    assert (scaled.rope.factor, scaled.local_rope) == (8.0, three.local_rope)
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    newer = {k: v for k, v in GEMMA3.items() if not k.startswith("rope_")} | {"rope_parameters": nested}
    assert parse_hf_config(newer, None) == scaled
    _refused(_with(GEMMA2, hidden_activation="relu"), "hidden_activation")
    _refused(_with(GEMMA2, use_bidirectional_attention=True), "use_bidirectional_attention")
    _refused(_with(GEMMA3, attn_logit_softcapping=50.0), "attn_logit_softcapping")
    nested["sliding_attention"]["rope_type"] = "linear"
    _refused(newer, "rope_type")


def test_phi3() -> None:
    config = parse_hf_config(PHI3, None)
    assert (config.rope.kind, config.rope.factor, config.rope.original_max_position) == ("longrope", 4.0, 128)
    assert (config.rope.short_factors, config.rope.long_factors) == ((1.0,) * 8, (2.0,) * 8)
    assert (config.fused, config.windows, config.max_position) == (True, (100, 100), 512)
    quarter = dict(PHI3["rope_scaling"], short_factor=[1.0] * 6, long_factor=[1.0] * 6)
    assert parse_hf_config(_with(PHI3, partial_rotary_factor=0.75, rope_scaling=quarter), None).rope.dim == 12
    plain = parse_hf_config(_with(PHI3, rope_scaling=None), None)
    assert (plain.rope.kind, plain.rope.dim) == ("default", 16)
    _refused(_with(PHI3, rope_scaling={"type": "su", "short_factor": [1.0] * 8}), "long_factor", "8 numbers")
    _refused(_with(PHI3, rope_scaling=dict(PHI3["rope_scaling"], long_factor=[0.0] * 8)), "long_factor")
    _refused(_with(PHI3, auto_map={"AutoModelForCausalLM": "other.Own"}), "auto_map")
    _refused(_with(LLAMA, rope_scaling=PHI3["rope_scaling"]), "su")


def test_experts() -> None:
    mixtral = parse_hf_config(MIXTRAL, None)
    assert mixtral.experts is not None
    assert (mixtral.experts.num, mixtral.experts.per_token, mixtral.experts.intermediate_size) == (8, 2, 96)
    assert (mixtral.experts.normalize, mixtral.rope.theta, mixtral.windows) == (True, 1e6, (None, None))
    attention, mlp = 64 * 16 * 2 * (4 + 2), 8 * 64 * (3 * 96 + 1)
    assert mixtral.num_parameters == 2 * (attention + mlp) + 2 * 1000 * 64
    qwen = parse_hf_config(QWEN3_MOE, None)
    assert qwen.experts is not None
    assert (qwen.experts.num, qwen.experts.per_token, qwen.experts.normalize) == (16, 4, True)
    renamed = {("num_local_experts" if k == "num_experts" else k): v for k, v in QWEN3_MOE.items()}
    assert parse_hf_config(renamed, None) == qwen
    mixed = parse_hf_config(_with(QWEN3_MOE, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[1]), None)
    assert [mixed.experts_of(i) is not None for i in range(6)] == [False, False, False, True, False, True]
    _refused(_with(MIXTRAL, num_experts_per_tok=9), "num_experts_per_tok", "8")
    _refused(_with(QWEN3_MOE, mlp_only_layers="all"), "mlp_only_layers")
    _refused(_with(QWEN3_MOE, shared_expert_intermediate_size=8), "shared_expert_intermediate_size = 8")
    windowed = parse_hf_config(_with(QWEN3_MOE, use_sliding_window=True, sliding_window=8), None)
    assert windowed.windows == (8, 8)


def test_granite_and_smollm3() -> None:
    granite = parse_hf_config(GRANITE, None)
    assert (granite.embedding_multiplier, granite.residual_multiplier) == (12.0, 0.22)
    assert (granite.attention_scale, granite.logit_divisor) == (0.015625, 8.0)
    assert granite.layer_specs()[0].scale == 0.015625
    _refused(_with(GRANITE, logits_scaling=0), "logits_scaling")
    _refused(_with(LLAMA, embedding_multiplier=2.0), "embedding_multiplier")
    smol = parse_hf_config(SMOLLM3, None)
    assert (smol.no_rope_layers, smol.tie_word_embeddings, smol.rope.theta) == ((3, 7), True, 2e6)
    assert [smol.rope_of(i) is None for i in range(8)] == [False, False, False, True] * 2
    derived = parse_hf_config({k: v for k, v in SMOLLM3.items() if k != "no_rope_layers"}, None)
    assert derived == smol
    windowed = parse_hf_config(_with(SMOLLM3, use_sliding_window=True, sliding_window=9), None)
    assert windowed.windows == (None, None, None, 9) * 2
    _refused(_with(SMOLLM3, no_rope_layers=[1, 1]), "no_rope_layers", "8 entries")

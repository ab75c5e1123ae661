"""The native decoder against transformers, on tiny random models of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv.api.errors import ConfigError, ModelError
from pagedkv.models.native import NativeDecoder
from tests.helpers.plain import DenseAttention, OpsOnlyBackend, StateCheckpoint
from tests.helpers.tiny_models import BOS, FAMILIES, hf_logits, tiny_model

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2},
    "yarn_mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False},
}


def _ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [BOS, *torch.randint(0, 256, (count - 1,), generator=generator).tolist()]


def _load(folder: Path, dtype: str = "fp32", **kwargs: Any) -> NativeDecoder:
    return NativeDecoder.load(StateCheckpoint.open(folder), OpsOnlyBackend(), dtype, **kwargs)


def _forward(model: NativeDecoder, ids: list[int], chunks: tuple[int, ...] | None = None) -> torch.Tensor:
    attend = DenseAttention(model.config.layer_specs())
    logits, start = [], 0
    for count in chunks or (len(ids),):
        positions = torch.arange(start, start + count)
        logits.append(model.forward(torch.tensor(ids[start : start + count]), positions, attend, None))
        start += count
    return torch.cat(logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_transformers_does(tmp_path: Path, family: str) -> None:
    folder, ids = tiny_model(tmp_path, family), _ids(40)
    logits = _forward(_load(folder), ids)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hf_logits(folder, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ROPES)
def test_every_rope_kind_past_its_original_length(tmp_path: Path, kind: str) -> None:
    folder = tiny_model(tmp_path, rope_parameters=dict(ROPES[kind]), head_dim=32)
    ids = _ids(120)
    expected = hf_logits(folder, ids)
    torch.testing.assert_close(_forward(_load(folder), ids), expected, atol=1e-4, rtol=1e-4)
    plain = hf_logits(tiny_model(tmp_path, head_dim=32), ids)
    assert (plain - expected)[20:].abs().max() > 0.1, "the scaling must matter here"


def test_a_window_matters_and_is_the_families_own(tmp_path: Path) -> None:
    ids = _ids(30)
    for family in ("mistral", "qwen2"):
        windowed, full = tiny_model(tmp_path, f"{family}_window"), tiny_model(tmp_path, family)
        assert any(_load(windowed).config.windows)
        assert not any(_load(full).config.windows)
    folder = tiny_model(tmp_path, "qwen2_window", layer_types=["sliding_attention", "full_attention", "full_attention"])
    model = _load(folder)
    assert model.config.windows == (4, None, None)
    torch.testing.assert_close(_forward(model, ids), hf_logits(folder, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunks", [(1,) * 12, (5, 7), (11, 1)])
def test_chunks_give_the_whole_prompts_logits(tmp_path: Path, chunks: tuple[int, ...]) -> None:
    model, ids = _load(tiny_model(tmp_path, "qwen3")), _ids(12)
    torch.testing.assert_close(_forward(model, ids, chunks), _forward(model, ids), atol=1e-4, rtol=1e-4)


def test_only_the_asked_rows_get_logits(tmp_path: Path) -> None:
    model, ids = _load(tiny_model(tmp_path)), _ids(12)
    whole = _forward(model, ids)
    rows = torch.tensor([11, 0, 3, 3])
    attend = DenseAttention(model.config.layer_specs())
    some = model.forward(torch.tensor(ids), torch.arange(12), attend, rows)
    torch.testing.assert_close(some, whole[rows], atol=1e-5, rtol=1e-5)
    none = model.forward(torch.tensor(ids), torch.arange(12), DenseAttention(model.config.layer_specs()), rows[:0])
    assert none.shape == (0, model.config.vocab_size)


def test_a_step_without_tokens_is_legal(tmp_path: Path) -> None:
    model = _load(tiny_model(tmp_path, "qwen3"))
    empty = torch.empty(0, dtype=torch.int64)
    calls: list[int] = []
    logits = model.forward(empty, empty, lambda layer, q, k, v, out: calls.append(layer), None)
    assert logits.shape == (0, 320)
    assert calls == [0, 1, 2]


def test_a_repeated_step_does_not_see_the_one_before(tmp_path: Path) -> None:
    """The array that attention writes to is kept between calls, larger than the second call needs."""
    model = _load(tiny_model(tmp_path))
    first = _forward(model, _ids(9))
    _forward(model, _ids(30, seed=1))
    assert torch.equal(_forward(model, _ids(9)), first)


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("fp16", "float16")])
@pytest.mark.parametrize("family", ["llama_bias", "qwen3", "gemma2", "gemma3", "mixtral", "granite"])
def test_half_precision_is_as_close_as_transformers_is(tmp_path: Path, family: str, dtype: str, name: str) -> None:
    folder, ids = tiny_model(tmp_path, family), _ids(24)
    exact = hf_logits(folder, ids)
    ours = (_forward(_load(folder, dtype), ids) - exact).square().mean().sqrt()
    theirs = (hf_logits(folder, ids, dtype=name) - exact).square().mean().sqrt()
    assert 0 < ours < 1.5 * theirs
    assert ours < 0.1 * exact.std()


def test_bytes_are_those_of_the_weights_and_a_tied_head_counts_once(tmp_path: Path) -> None:
    for family in ("llama_bias", "qwen3"):
        checkpoint = StateCheckpoint.open(tiny_model(tmp_path, family))
        assert checkpoint.config.tie_word_embeddings == (family == "qwen3")
        tensors = [t for n, t in checkpoint.tensors.items() if n != "lm_head.weight" or family == "llama_bias"]
        assert NativeDecoder.load(checkpoint, OpsOnlyBackend(), "fp32").nbytes == sum(t.nbytes for t in tensors)
        assert NativeDecoder.load(checkpoint, OpsOnlyBackend(), "bf16").nbytes == sum(t.nbytes for t in tensors) // 2


@pytest.mark.parametrize(("family", "looked_up"), [("llama", 320 * 48 * 4), ("llama_tied", 0)])
def test_a_step_reads_all_but_a_table_that_is_only_looked_up_in(tmp_path: Path, family: str, looked_up: int) -> None:
    model = NativeDecoder.load(StateCheckpoint.open(tiny_model(tmp_path, family)), OpsOnlyBackend(), "fp32")
    assert model.nbytes - model.bytes_per_step == looked_up


def test_a_tied_head_survives_an_op_that_consumes_its_weights(tmp_path: Path) -> None:
    """`pack` may destroy what it is given; the embedding table must not be it."""

    class Consuming:
        def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            kept = torch.nn.Linear(1, 1)
            kept.weight, kept.bias = (None if t is None else torch.nn.Parameter(t.clone()) for t in (weight, bias))
            weight.fill_(float("nan"))
            kept.nbytes = kept.weight.nbytes
            return kept

        def __call__(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
            return torch.nn.functional.linear(x, packed.weight, packed.bias)

    folder, ids = tiny_model(tmp_path, "qwen2"), _ids(10)
    backend = OpsOnlyBackend({"linear": Consuming()})
    model = NativeDecoder.load(StateCheckpoint.open(folder), backend, "fp32")
    torch.testing.assert_close(_forward(model, ids), hf_logits(folder, ids), atol=1e-4, rtol=1e-4)
    assert model.nbytes - model.bytes_per_step == 320 * 48 * 4, "the head has a copy of the table"
    shapes = {tuple(spec.dims.items()) for name, spec in backend.asked if name == "linear"}
    assert (("n", 96), ("k", 48)) in shapes, "q, k and v are one product"
    assert (("n", 160), ("k", 48)) in shapes, "gate and up are one product"


def test_tensors_are_read_one_by_one_each_once(tmp_path: Path) -> None:
    checkpoint = StateCheckpoint.open(tiny_model(tmp_path, "qwen3_bias"))
    steps: list[tuple[int, int]] = []
    NativeDecoder.load(checkpoint, OpsOnlyBackend(), "fp32", progress=lambda done, total: steps.append((done, total)))
    assert sorted(checkpoint.read) == sorted(checkpoint.names())
    assert steps == [(i + 1, len(checkpoint.read)) for i in range(len(checkpoint.read))]


def _refused(checkpoint: StateCheckpoint, *texts: str, dtype: str = "fp32") -> None:
    with pytest.raises(ModelError) as caught:
        NativeDecoder.load(checkpoint, OpsOnlyBackend(), dtype)
    for text in texts:
        assert text in str(caught.value)


def test_missing_leftover_and_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    name = "model.layers.1.self_attn.k_proj"
    checkpoint = StateCheckpoint.open(folder)
    weight = checkpoint.tensors.pop(f"{name}.weight")
    _refused(checkpoint, f"{name}.weight")
    checkpoint.tensors |= {f"{name}.weight": weight, f"{name}.bias": weight[:, 0]}
    _refused(checkpoint, f"{name}.bias")
    del checkpoint.tensors[f"{name}.bias"]
    checkpoint.tensors[f"{name}.weight"] = weight[:-1]
    _refused(checkpoint, f"{name}.weight", "[23, 48]", "[24, 48]")


def test_fewer_embedding_rows_than_the_vocabulary_are_refused(tmp_path: Path) -> None:
    checkpoint = StateCheckpoint.open(tiny_model(tmp_path, "qwen3"))
    checkpoint.tensors["model.embed_tokens.weight"] = checkpoint.tensors["model.embed_tokens.weight"][:300]
    _refused(checkpoint, "model.embed_tokens.weight", "[300, 48]", "[320, 48]")


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    checkpoint = StateCheckpoint.open(tiny_model(tmp_path))
    del checkpoint.tensors["lm_head.weight"]
    _refused(checkpoint, "lm_head.weight")


def test_stored_rope_buffers_and_a_repeated_tied_head_are_no_leftovers(tmp_path: Path) -> None:
    folder, ids = tiny_model(tmp_path, "qwen3"), _ids(6)
    checkpoint = StateCheckpoint.open(folder)
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    checkpoint.tensors["lm_head.weight"] = torch.zeros(320, 48)
    model = NativeDecoder.load(checkpoint, OpsOnlyBackend(), "fp32")
    torch.testing.assert_close(_forward(model, ids), hf_logits(folder, ids), atol=1e-4, rtol=1e-4)


def test_weights_past_the_range_of_float16_are_refused(tmp_path: Path) -> None:
    checkpoint = StateCheckpoint.open(tiny_model(tmp_path))
    checkpoint.tensors["model.layers.2.mlp.down_proj.weight"][3, 3] = 70000.0
    _refused(checkpoint, "model.layers.2.mlp.down_proj.weight", "bfloat16", dtype="fp16")
    assert NativeDecoder.load(checkpoint, OpsOnlyBackend(), "bf16").nbytes > 0


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fp8"):
        _load(tiny_model(tmp_path), "fp8")

"""An engine over a quantized cache: the logits of transformers with keys and values rounded likewise (U84)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.conformance import quantized
from pagedkv.conformance.quantized import FLOAT8
from pagedkv.errors import UnsupportedError
from tests.helpers.engine_rig import engine, folder, greedy, kept_logits, some_prompts, token_ids, transformers_logits

NAMES = {"int8": "int8/token_head", "fp8": "fp8_e4m3fn/tensor", "fp8_e5m2": "fp8_e5m2/tensor"}
ITEMS = 16 * 2 * 3
"""The tiny model: 2 KV heads in each of 3 layers, blocks of 16 tokens."""
DIM = 12
LOOPBACK: dict[str, Any] = {"backend": "loopback", "backend_options": {}, "block_size": 16, "num_blocks": 12}


def rounded(kv_dtype: str, x: torch.Tensor) -> torch.Tensor:
    """Keys or values [batch, heads, tokens, dim] as a cache gives them back, by the kit's own formula."""
    numbers = x.permute(0, 2, 1, 3).numpy()
    made = np.ones(numbers.shape[:-1], np.float32) if kv_dtype in FLOAT8 else quantized.token_scales(numbers)
    read = quantized.decoded(kv_dtype, quantized.codes(kv_dtype, numbers, made), made)
    return torch.from_numpy(read).permute(0, 2, 1, 3)


def shaken(kv_dtype: str, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same off by random parts of half a step: a share of the row's largest number, or of each number."""
    largest = x.abs() if kv_dtype in FLOAT8 else x.abs().amax(-1, keepdim=True)
    step = largest * (2.0 ** -FLOAT8[kv_dtype].mantissa if kv_dtype in FLOAT8 else 1 / 127)
    return x.double() + step * (torch.rand(x.shape, generator=generator) - 0.5)


Change = Callable[[torch.Tensor], torch.Tensor]


def logits_of(change: Change, ids: list[int]) -> torch.Tensor:
    """The last token's logits of the tiny model in transformers, its attention in float64 over changed keys, values."""
    model = _model()
    _change.append(change)
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    _change.clear()
    return found


_change: list[Change] = []


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    group = query.shape[1] // key.shape[1]
    k, v = (_change[0](x).repeat_interleave(group, dim=1) for x in (key, value))
    scores = query.double() @ k.transpose(2, 3) * scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).to(query.dtype), None


@functools.cache
def _model() -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("changed", _attend)
    return AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32, attn_implementation="changed").eval()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_a_model_that_rounds_its_keys_and_values(name: str) -> None:
    prompts, count = some_prompts([21, 3]), 4
    with engine(**LOOPBACK, kv_cache_dtype=name) as llm:
        kept = kept_logits(llm)
        answers = token_ids(llm.generate(prompts, greedy(count), use_tqdm=False))
    assert len(kept) >= len(prompts) * count
    for (label, length), row in kept.items():
        ids = (prompts[int(label)] + answers[int(label)])[:length]
        wanted = logits_of(functools.partial(rounded, NAMES[name]), ids)
        assert float((row - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_as_near_to_the_plain_ones_as_the_step_allows(name: str) -> None:
    """Rounding is off by at most half a step: the logits move a few times what such errors do at random."""
    (prompt,) = some_prompts([21])
    with engine(**LOOPBACK, kv_cache_dtype=name) as llm:
        kept = kept_logits(llm)
        llm.generate([prompt], greedy(1), use_tqdm=False)
    plain = transformers_logits(prompt)[-1]
    off = float((kept["0", len(prompt)] - plain).abs().max())
    generator = torch.Generator().manual_seed(0)
    at_random = [
        float((logits_of(lambda x: shaken(NAMES[name], x, generator), prompt) - plain).abs().max()) for _ in range(8)
    ]
    assert 1e-4 < off < 3 * max(at_random)
    assert float((logits_of(lambda x: x.double(), prompt) - plain).abs().max()) < 1e-4, "the yardstick itself is off"


@pytest.mark.parametrize("name", NAMES)
def test_a_cached_prefix_gives_the_same_tokens(name: str) -> None:
    (prompt,) = some_prompts([37])
    with engine(**LOOPBACK, kv_cache_dtype=name) as llm:
        first, second = (llm.generate([prompt], greedy(6), use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


@pytest.mark.parametrize(("name", "head"), [("int8", 2 * DIM + 8), ("fp8", 2 * DIM)])
def test_u84_blocks_are_counted_by_the_backends_own_bytes(name: str, head: int) -> None:
    """By hand: a byte for each number, and for int8 two scales of four bytes for each token and head."""
    per_block = ITEMS * head
    settings = LOOPBACK | {"num_blocks": None, "kv_cache_dtype": name, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    with engine(**settings, kv_cache_memory="1MiB", swap_blocks=3) as llm:
        memory = llm.engine.parts.memory
        assert memory.cost.per_block == per_block
        assert memory.num_blocks == min((2**20 - memory.cost.fixed) // per_block, 2 * 256 // 16 + 1)
        assert memory.host is not None and memory.host.cost.per_block == per_block
    tight = 10 * per_block + memory.cost.fixed
    with engine(**settings, kv_cache_memory=tight + per_block - 1, swap_space=f"{tight}B") as llm:
        memory = llm.engine.parts.memory
        assert memory.num_blocks == 10
        assert memory.host is not None and memory.host.blocks >= 9
        assert llm.engine.scheduler.price is not None and llm.engine.scheduler.price.block_bytes == per_block


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_u84_swapped_blocks_come_back_with_their_scales(name: str) -> None:
    prompts, params = some_prompts([14, 14]), greedy(24)
    roomy = LOOPBACK | {"kv_cache_dtype": name, "block_size": 4, "num_blocks": 40, "max_model_len": 40}
    with engine(**roomy, swap_space=0) as llm:
        wanted = token_ids(llm.generate(prompts, params, use_tqdm=False))
    with engine(**roomy | {"num_blocks": 12}, swap_blocks=30, preemption_mode="swap") as llm:
        assert token_ids(llm.generate(prompts, params, use_tqdm=False)) == wanted
        assert llm.metrics().swaps >= 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("int8", "cache int8/token_head: keys and values are rounded to int8, a byte each, each token and head with"),
        ("fp8", "cache fp8_e4m3fn/tensor: keys and values are rounded to fp8_e4m3fn, a byte each, scales 1.0, as none"),
    ],
)
def test_the_start_says_that_the_cache_is_quantized(name: str, line: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagedkv"), engine(**LOOPBACK, kv_cache_dtype=name) as llm:
        assert llm.engine.parts.choice.kv_dtype == NAMES[name]
    assert line in caplog.text


def test_auto_is_never_quantized(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagedkv"), engine(**LOOPBACK) as llm:
        assert llm.engine.parts.choice.kv_dtype == "fp32"
    assert "rounded to" not in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_where_it_is_not_declared_it_is_refused_by_name(name: str) -> None:
    refused = f"cpu does not support kv_dtype='{NAMES[name]}'; accepted: fp32, bf16, fp16"
    with pytest.raises(UnsupportedError, match=refused), engine(kv_cache_dtype=name):
        pass

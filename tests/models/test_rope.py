"""Rope tables against a formula in float64 and against transformers' own tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pagedkv.api.errors import ModelError
from pagedkv.models.config import RopeConfig
from pagedkv.models.rope import RopeTable, inverse_frequencies

YARN: dict[str, Any] = {"kind": "yarn", "factor": 4.0, "original_max_position": 2048}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"kind": "linear", "factor": 2.5},
    "llama3": {
        "kind": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position": 8192,
    },
    "yarn": YARN,
    "yarn_mscale": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4, "truncate": False},
    "yarn_given": {**YARN, "attention_factor": 0.7, "beta_fast": 20.0, "beta_slow": 3.0},
}


def _transformers(rope: RopeConfig, max_position: int) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    names = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim")
    given = {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **given}
    if rope.kind == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.original_max_position is not None:
        parameters["original_max_position_embeddings"] = rope.original_max_position
    config = LlamaConfig(head_dim=rope.dim, max_position_embeddings=max_position, rope_parameters=parameters)
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_transformers_at_near_and_far_positions(kind: str) -> None:
    rope = RopeConfig(theta=500000.0, dim=64, **KINDS[kind])
    theirs = _transformers(rope, 131072)
    inverse, scaling = inverse_frequencies(rope)
    assert torch.equal(inverse, theirs.inv_freq)
    assert scaling == pytest.approx(theirs.attention_scaling, rel=1e-12)
    positions = torch.tensor([0, 1, 5, 2047, 2048, 5000, 40000])
    cos, sin = RopeTable(rope, 131072, "cpu").lookup(positions)
    expected_cos, expected_sin = theirs(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos, expected_cos[0, :, :32], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(sin, expected_sin[0, :, :32], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("attention_factor", [None, 1.3])
def test_longrope_takes_the_factors_of_the_longest_text(attention_factor: float | None) -> None:
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    short, long = [1.0 + 0.1 * i for i in range(12)], [1.0 + i for i in range(12)]
    given = {} if attention_factor is None else {"attention_factor": attention_factor}
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=4096,
        original_max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": short,
            "long_factor": long,
            **given,
        },
    )
    rope = RopeConfig(
        theta=1e4,
        dim=24,
        kind="longrope",
        factor=4.0,
        original_max_position=1024,
        short_factors=tuple(short),
        long_factors=tuple(long),
        attention_factor=attention_factor,
    )
    theirs = Phi3RotaryEmbedding(config)
    for length in (1024, 1025):
        positions = torch.arange(length)
        cos, sin = RopeTable(rope, length, "cpu").lookup(positions)
        expected_cos, expected_sin = theirs(torch.zeros(1), positions[None])
        torch.testing.assert_close(cos, expected_cos[0, :, :12], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(sin, expected_sin[0, :, :12], atol=1e-6, rtol=1e-6)
    assert inverse_frequencies(rope, 1025)[1] == pytest.approx(
        attention_factor or (1 + math.log(4) / math.log(1024)) ** 0.5
    )


def test_default_frequencies_by_hand() -> None:
    inverse, scaling = inverse_frequencies(RopeConfig(theta=10000.0, dim=8))
    assert inverse.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert scaling == 1.0
    factors = RopeConfig(theta=10000.0, dim=8, freq_factors=(1.0, 2.0, 4.0, 8.0))
    assert inverse_frequencies(factors)[0].tolist() == pytest.approx([1.0, 0.05, 0.0025, 0.000125])


def test_an_entrys_bits_do_not_depend_on_how_the_table_grew() -> None:
    rope = RopeConfig(theta=10000.0, dim=10)
    slowly, at_once, reserved = (RopeTable(rope, 10, "cpu") for _ in range(3))
    for position in (0, 3, 700, 1023, 1024, 2500, 5000):
        slowly.lookup(torch.tensor([position]))
    reserved.reserve(4321)
    positions = torch.arange(5001)
    tables = [table.lookup(positions) for table in (slowly, at_once, reserved)]
    for cos, sin in tables[1:]:
        assert torch.equal(cos, tables[0][0])
        assert torch.equal(sin, tables[0][1])
    torch.testing.assert_close(tables[0][0].square() + tables[0][1].square(), torch.ones(5001, 5))


def test_a_position_outside_the_table_is_an_error_and_no_position_is_fine() -> None:
    table = RopeTable(RopeConfig(theta=10000.0, dim=4), 8, "cpu")
    assert table.lookup(torch.empty(0, dtype=torch.int64))[0].shape == (0, 2)
    assert table.lookup(torch.tensor([3]))[0].shape == (1, 2)
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        table.lookup(torch.tensor([-1]))


def test_off_the_host_the_whole_table_is_made_at_once() -> None:
    """Looking at positions would wait for the device, so the table may not depend on them."""
    table = RopeTable(RopeConfig(theta=10000.0, dim=4), 3000, "meta")
    assert table.nbytes >= 3000 * 2 * 2 * 4
    assert table.lookup(torch.empty(7, dtype=torch.int64, device="meta"))[0].shape == (7, 2)


def test_incomplete_or_unknown_kinds_are_refused() -> None:
    with pytest.raises(ModelError, match="low_freq_factor"):
        inverse_frequencies(RopeConfig(theta=1e4, dim=8, kind="llama3", factor=2.0, original_max_position=8))
    with pytest.raises(ModelError, match="original_max_position_embeddings"):
        inverse_frequencies(RopeConfig(theta=1e4, dim=8, kind="longrope"))
    with pytest.raises(ModelError, match="dynamic"):
        inverse_frequencies(RopeConfig(theta=1e4, dim=8, kind="dynamic"))  # type: ignore[arg-type]

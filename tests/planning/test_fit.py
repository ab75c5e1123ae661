"""What fits: never above the ceiling, monotone, the largest there is, and published figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.api import MemoryInfo
from pagedkv.engine.setup import budget
from pagedkv.errors import ConfigError, OutOfDeviceMemory
from pagedkv.planning.cost import layer_bytes, number_bytes, token_bytes
from pagedkv.planning.fit import Fit, largest
from pagedkv.planning.stand_in import StandIn
from tests.helpers.planning_rig import GIB, LLAMA_2_7B, LLAMA_3_8B, capabilities, fit_of, write_config

KIB = 1 << 10


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-3-8B's heads with less of everything else: 2 KiB a token in bf16, 2 layers."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    return write_config(tmp_path_factory.mktemp("small"), **LLAMA_3_8B | sizes | heads)


def with_memory(fit: Fit, memory: MemoryInfo, **request: object) -> Fit:
    """The same on another device: nothing is opened or negotiated again."""
    backend = StandIn(capabilities(), memory)
    agreed = dataclasses.replace(fit.agreed, request=dataclasses.replace(fit.agreed.request, **request))
    return dataclasses.replace(fit, target=dataclasses.replace(fit.target, backend=backend), agreed=agreed)


@pytest.fixture(scope="module")
def one(small: Path) -> Fit:
    return fit_of(small, MemoryInfo(free=GIB, total=GIB))


MEMORY = st.integers(1 << 20, 8 * GIB)


@st.composite
def situations(draw: st.DrawFn) -> tuple[MemoryInfo, float | None]:
    total = draw(MEMORY)
    memory = MemoryInfo(total=total, free=draw(st.integers(0, total)), unified=draw(st.booleans()))
    return memory, draw(st.none() | st.floats(0.05, 1.0))


@settings(max_examples=60, deadline=None)
@given(situation=situations(), length=st.sampled_from([1, 17, 512, 4096]))
def test_u102_what_fits_stays_below_the_ceiling_and_one_more_does_not(one, situation, length) -> None:
    memory, fraction = situation
    fit = with_memory(one, memory, fraction=fraction)
    ceiling = min(memory.free, int((0.9 if fraction is None else fraction) * memory.total) - memory.total + memory.free)
    count = fit.most(length)
    if count:
        assert fit.needs(count, length) <= ceiling == fit.ceiling()
    if 0 < count < 1 << 16:
        assert fit.needs(count + 1, length) > ceiling
    longest = fit.longest(3)
    if longest:
        assert fit.needs(3, longest) <= ceiling
    if 0 < longest < 4096:
        assert fit.needs(3, longest + 1) > ceiling


@settings(max_examples=60, deadline=None)
@given(
    total=MEMORY,
    more=st.integers(0, GIB),
    fraction=st.floats(0.05, 0.95),
    above=st.floats(0, 0.05),
    length=st.integers(1, 4096),
    longer=st.integers(0, 2000),
)
def test_monotone_in_memory_share_length_and_sequences(one, total, more, fraction, above, length, longer) -> None:
    base = with_memory(one, MemoryInfo(free=total, total=total), fraction=fraction)
    larger = with_memory(one, MemoryInfo(free=total + more, total=total + more), fraction=fraction)
    bolder = with_memory(one, MemoryInfo(free=total, total=total), fraction=fraction + above)
    count = base.most(length)
    assert larger.most(length) >= count
    assert bolder.most(length) >= count
    assert base.most(min(4096, length + longer)) <= count
    assert base.longest(2) <= base.longest(1)
    assert base.needs(2, length) > base.needs(1, length)


@settings(max_examples=100, deadline=None)
@given(bound=st.integers(0, 5000), limit=st.integers(1, 4000), guess=st.integers(-5, 10_000))
def test_the_largest_is_found_from_any_guess(bound, limit, guess) -> None:
    assert largest(lambda n: n <= bound, limit, guess) == min(bound, limit)


@pytest.mark.parametrize(("size", "per_token", "at_2048"), [(LLAMA_2_7B, 512, 1.0), (LLAMA_3_8B, 128, 0.25)])
def test_published_figures(tmp_path: Path, size, per_token: int, at_2048: float) -> None:
    """hardware.md, G: 2 x 32 x 32 x 128 x 2 B = 512 KiB a token and 1.00 GiB at 2048 tokens; a quarter with 8 heads."""
    fit = fit_of(write_config(tmp_path / "model", **size), MemoryInfo(free=80 * GIB, total=80 * GIB))
    group = fit.agreed.spec.groups[0]
    assert token_bytes(group.layers, "fp16") == per_token * KIB
    assert fit.cost(fit.agreed.spec).per_block == 16 * per_token * KIB
    one, none = fit.asked(1, 2048), fit.asked(1, 1)
    blocks = (fit.needs(1, 2048) - one[1].needed) - (fit.needs(1, 1) - none[1].needed)
    assert blocks == at_2048 * GIB - 16 * per_token * KIB, "2048 tokens fill 128 blocks, one token fills one"


def test_weights_of_llama_2_7b_are_13_5_gb_in_fp16(tmp_path: Path) -> None:
    """Its published size: 6,738,415,616 parameters."""
    fit = fit_of(write_config(tmp_path / "model", **LLAMA_2_7B), MemoryInfo(free=80 * GIB, total=80 * GIB))
    assert fit.agreed.weights.nbytes == 2 * 6_738_415_616


@pytest.mark.parametrize(("ranks", "heads"), [(2, 4), (4, 2), (8, 1), (16, 1)])
def test_tensor_parallel_divides_the_kv_heads_and_repeats_the_last(tmp_path: Path, ranks: int, heads: int) -> None:
    fit = fit_of(write_config(tmp_path / "model", **LLAMA_3_8B), MemoryInfo(free=80 * GIB, total=80 * GIB), ranks=ranks)
    layers = fit.agreed.spec.groups[0].layers
    assert {layer.kv_heads for layer in layers} == {heads}
    assert {layer.q_heads for layer in layers} == {32 // ranks}
    assert token_bytes(layers, "bf16") == 2 * 32 * heads * 128 * 2
    vocabulary = 2 * 128256 * 4096
    matrices = 32 * (2 * 4096 * 4096 // ranks + 2 * 4096 * heads * 128 + 3 * 4096 * 14336 // ranks)
    assert fit.agreed.weights.nbytes == 2 * (vocabulary + matrices + (2 * 32 + 1) * 4096)


@pytest.mark.parametrize("ranks", [3, 5, 64])
def test_ranks_that_do_not_divide_are_refused_with_what_they_do_not_divide(tmp_path: Path, ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {ranks} does not divide query heads 32|KV heads 8"):
        fit_of(write_config(tmp_path / "model", **LLAMA_3_8B), MemoryInfo(free=GIB, total=GIB), ranks=ranks)


def test_bytes_of_quantized_dtypes_count_their_scales(one: Fit) -> None:
    layer = one.agreed.spec.groups[0].layers[0]
    assert layer_bytes(layer, "int8/token_head") == 4 * (2 * 64 + 2 * 4)
    assert layer_bytes(layer, "fp8_e4m3fn/tensor") == 4 * 2 * 64
    with pytest.raises(ConfigError, match="int5"):
        number_bytes("int5/token_head")


def test_layers_that_share_their_cache_own_no_bytes(one: Fit) -> None:
    first, second = one.agreed.spec.groups[0].layers
    shared = dataclasses.replace(second, kv_of=first.index)
    assert token_bytes((first, shared), "bf16") == 4 * (64 + 64) * 2


def test_swap_in_shared_memory_is_part_of_the_sum(small: Path) -> None:
    """U102: on shared memory host blocks come from the same budget."""
    memory = MemoryInfo(free=GIB, total=GIB, unified=True)
    without, beside = fit_of(small, memory), fit_of(small, memory, swap_blocks=1000)
    block = without.cost(without.agreed.spec).per_block
    assert beside.settings().total <= int(0.9 * GIB)
    assert beside.settings().total - beside.settings().cache > without.agreed.request.needed + 999 * block
    assert beside.settings().num_blocks < without.settings().num_blocks


@pytest.mark.parametrize("size", [{"kv_cache_memory": "64MiB"}, {"num_blocks": 100}])
def test_u103_an_absolute_size_wins_over_the_share(small: Path, size) -> None:
    fit = fit_of(small, MemoryInfo(free=GIB, total=GIB), gpu_memory_utilization=0.3, **size)
    plan = fit.settings()
    assert plan.cache <= 64 << 20
    assert plan.num_blocks == (100 if "num_blocks" in size else (64 << 20) // plan.cost.per_block)


def test_u103_one_short_sequence_takes_what_it_can_use(small: Path) -> None:
    plan = fit_of(small, MemoryInfo(free=GIB, total=GIB), max_model_len=200, max_num_seqs=1).settings()
    assert plan.num_blocks == -(-200 // 16) + 1


def test_u113_weights_larger_than_the_budget_give_no_negative_size(small: Path) -> None:
    fit = fit_of(small, MemoryInfo(free=1 << 20, total=GIB))
    with pytest.raises(OutOfDeviceMemory) as caught:
        fit.settings()
    assert caught.value.free == 0
    assert fit.most(1) == fit.longest(1) == 0


def test_the_engines_own_budget_is_what_is_asked(one: Fit) -> None:
    spec, request = one.asked(7, 300)
    assert one.plan(7, 300) == budget(request, one.cost(spec), one.target.backend, "made-up")

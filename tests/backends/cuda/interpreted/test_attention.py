"""The kernels of attention against float64, over poisoned caches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.api.errors import UnsupportedError
from pagedkv_cuda.kernels.attention import Choice
from pagedkv_cuda.kernels.tiles import Tile
from tests.backends.cuda.interpreted.bench import Bench, Setup

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DECODE = {"rows": [(17, 1), (1, 1), (48, 1)], "num_decode": 3}
MIXED = {"rows": [(33, 1), (40, 24), (19, 19)], "num_decode": 1}
PREFIX = {"rows": [(50, 30), (16, 16)]}

CASES = {
    "decode": Setup(**DECODE),
    "decode, bf16": Setup(**DECODE, dtype=BF16, heads=(8, 1), block_size=32),
    "decode, fp16, dim 128": Setup(**DECODE, dtype=FP16, dims=(128, 128)),
    "prefix": Setup(**PREFIX),
    "prefix, bf16, group of 7": Setup(**PREFIX, dtype=BF16, heads=(7, 1)),
    "mixed, fp16": Setup(**MIXED, dtype=FP16),
    "mixed, heads that divide unevenly": Setup(**MIXED, heads=(5, 2)),
    "dims 80 and 96": Setup(**MIXED, dims=(80, 96)),
    "dim 256, blocks of 256": Setup(**DECODE, dims=(256, 256), block_size=256),
    "dim 192 and 128, blocks of 48": Setup(**MIXED, dims=(192, 128), block_size=48),
    "window": Setup(**MIXED, layer={"window": 5}),
    "window of one, softcap": Setup(**DECODE, dtype=FP16, layer={"window": 1, "softcap": 2.0}),
    "softcap, sinks": Setup(**MIXED, dtype=BF16, layer={"softcap": 5.0, "sinks": True}),
    "alibi": Setup(**MIXED, layer={"alibi": True}),
    "alibi, sinks, window": Setup(**PREFIX, layer={"alibi": True, "sinks": True, "window": 20}),
    "not causal": Setup(**MIXED, layer={"causal": False}),
    "cross: more queries than keys, none": Setup(rows=[(3, 5), (0, 2)], layer={"causal": False}),
    "causal, queries before every key": Setup(rows=[(3, 5), (0, 1)], layer={"sinks": True}),
    "several queries a row": Setup(rows=[(20, 3), (35, 2), (3, 3)], num_decode=3, decode_q=3, layer={"window": 7}),
    "16-bit cache under fp32": Setup(**MIXED, stored=BF16),
    "int8 by token": Setup(**MIXED, dtype=BF16, stored=torch.int8),
    "int8 by head": Setup(**DECODE, dtype=FP32, stored=torch.int8, scales="head"),
    "e4m3 by token": Setup(**MIXED, dtype=FP16, stored=torch.float8_e4m3fn),
    "e4m3 by tensor": Setup(**DECODE, dtype=BF16, stored=torch.float8_e4m3fn, scales="tensor"),
    "e5m2 by tensor": Setup(**MIXED, dtype=FP16, stored=torch.float8_e5m2, scales="tensor", dims=(96, 96)),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_float64(name):
    bench = Bench(CASES[name])
    bench.attend()
    bench.check()


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
def test_descriptors_equal_float64(block_size, stored):
    setup = Setup(**MIXED, dtype=FP16, dims=(80, 64), block_size=block_size, stored=stored, layer={"window": 30})
    bench = Bench(setup)
    bench.attend(target=90, choice=Choice(descriptors=True))
    bench.check()


@pytest.mark.parametrize("stored", [None, torch.int8])
def test_boxes_of_several_blocks_make_a_step(stored):
    """Steps over 64 keys out of four blocks of 16: several, cut by the window, by the end, and by splits."""
    rows = [(150, 1), (70, 1), (16, 1)]
    bench = Bench(Setup(rows=rows, num_decode=3, dtype=BF16, stored=stored, layer={"window": 101}))
    bench.table[1:, :] = np.where(bench.table[1:, :] == 0, 99, bench.table[1:, :])  # past a row's end: no block at all
    bench.attend(target=90, choice=Choice(tile=Tile(16, 64, 4, 3), span=128))
    bench.check()


@pytest.mark.parametrize("layer", [{}, {"sinks": True, "softcap": 9.0}, {"window": 70}])
def test_splits_are_merged(layer):
    bench = Bench(Setup(rows=[(300, 1), (5, 1), (130, 1)], num_decode=3, dtype=FP32, block_size=32, layer=layer))
    bench.attend(choice=Choice(span=32, tile=Tile(16, 32, 4, 2)))  # ten splits: more than are merged at once
    bench.check()


def test_a_fixed_span_makes_a_row_independent_of_the_others():
    alone, beside = (
        Bench(Setup(rows=rows, num_decode=len(rows), block_size=32)) for rows in ([(200, 1)], [(200, 1), (290, 1)])
    )
    for bench in (alone, beside):
        bench.table[1, :7] = np.arange(1, 8)
    beside.cache, beside.q[:1] = alone.cache, alone.q[:1]
    beside.table[2] = 1
    one, two = (bench.attend(choice=Choice(span=64), lse=False)[0] for bench in (alone, beside))
    assert torch.equal(one, two)


def test_lse_changes_no_bit():
    with_lse, without = (Bench(CASES["mixed, fp16"]) for _ in range(2))
    assert torch.equal(with_lse.attend(), without.attend(lse=False))
    assert (without.lse == 7.0).all()


def test_no_more_splits_than_scratch_holds():
    bench = Bench(Setup(**DECODE, scratch=0))
    with pytest.raises(UnsupportedError, match="2 splits"):
        bench.attend(choice=Choice(span=32))
    with pytest.raises(UnsupportedError, match="multiple of 32"):
        bench.attend(choice=Choice(span=48))
    bench.attend()
    bench.check()


def test_a_query_beside_a_nan_of_a_neighbour_in_memory():
    """Entries of one row lie between those of another, and the other's hold NaN."""
    bench = Bench(Setup(**PREFIX))
    bench.cache.keys[bench.table[2]] = float("nan")
    bench.cache.values[bench.table[2]] = float("nan")
    bench.attend()
    out, _ = bench.expected()
    np.testing.assert_allclose(bench.out[:30].double().numpy(), out[:30], rtol=0, atol=5e-6)
    assert bench.out[30 : bench.tokens].isnan().all()


@pytest.mark.parametrize("choice", [Choice(), Choice(descriptors=True)])
def test_what_lies_behind_every_window_may_hold_nan(choice):
    """Also where it shares a tile of keys, or a block, with what is seen."""
    bench = Bench(Setup(rows=[(45, 1), (60, 4)], num_decode=1, block_size=16, layer={"window": 6}))
    for row, (context, count) in enumerate(bench.setup.rows):
        behind = np.arange(context - count - 6 + 1)
        block, slot = bench.table[row + 1, behind // 16], behind % 16
        bench.cache.keys[block, :, slot] = bench.cache.values[block, :, slot] = float("nan")
    bench.attend(target=90, choice=choice)
    bench.check()

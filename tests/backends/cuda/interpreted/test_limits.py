"""Tiles by compute capability, sizes of launches, and what these kernels refuse."""

from __future__ import annotations

import pytest
import torch

from pagedkv.api.errors import UnsupportedError
from pagedkv_cuda.kernels.attention import LARGEST_GROUP, Choice, scratch_floats
from pagedkv_cuda.kernels.grids import MOST_PROGRAMS, one_axis, power_of_two
from pagedkv_cuda.kernels.tiles import FAMILIES, SHARED_LIMIT, family, table, target_of, tile_for
from tests.backends.cuda.interpreted.bench import Bench, Setup

ROWS = [(17, 1), (3, 1)]


def test_every_family_has_every_tile():
    for name in set(FAMILIES.values()):
        for kernel in ("few", "many"):
            for itemsize in ("1", "2", "4"):
                tiles = table()[name][kernel][itemsize]
                assert list(tiles) == ["64", "128", "256"]
                for tile in tiles.values():
                    assert all(size & (size - 1) == 0 for size in tile[:3]) and min(tile[:2]) >= 16


@pytest.mark.parametrize("target", SHARED_LIMIT)
@pytest.mark.parametrize(("dim", "same_as"), [(16, 64), (65, 128), (192, 256)])
def test_a_head_dim_takes_the_next_larger_tile(target, dim, same_as):
    assert tile_for("many", target, 2, dim) == tile_for("many", target, 2, same_as)


def test_an_unknown_capability_takes_the_nearest_older_family():
    assert (family(88), family(95), family(110), family(130)) == (family(87), family(90), family(103), family(121))


def test_turing_is_refused_with_the_way_out():
    with pytest.raises(UnsupportedError, match=r'7\.5.*"kernels": "torch"'):
        family(75)


def test_host_tensors_take_tiles_of_a_known_capability():
    assert target_of(torch.device("cpu")) in FAMILIES


def test_head_dims_end_at_256():
    with pytest.raises(UnsupportedError, match="head dim 320"):
        Bench(Setup(rows=ROWS, dims=(320, 320))).attend()


def test_u114_groups_end_where_a_tile_does():
    with pytest.raises(UnsupportedError, match=f"these kernels take {LARGEST_GROUP}"):
        Bench(Setup(rows=ROWS, heads=(LARGEST_GROUP + 1, 1), dims=(16, 16))).attend()


def test_a_tall_group_is_one_tile():
    bench = Bench(Setup(rows=ROWS, heads=(LARGEST_GROUP, 1), dims=(16, 16), num_decode=2))
    bench.attend()
    bench.check()


def test_few_queries_that_fit_no_tile_go_to_tiles_of_many():
    bench = Bench(Setup(rows=[(17, 3), (3, 1)], heads=(64, 1), dims=(16, 16), num_decode=2, decode_q=3))
    bench.attend()
    bench.check()


def test_descriptors_are_refused_where_they_cannot_be():
    bench = Bench(Setup(rows=ROWS, block_size=48))
    for target in (80, 90):
        with pytest.raises(UnsupportedError, match="descriptors for blocks of 48"):
            bench.attend(target=target, choice=Choice(descriptors=True))


def test_u114_a_launch_has_one_axis_and_an_end():
    assert one_axis(70_000, "append") == (70_000,)  # y and z would end at 65,535
    with pytest.raises(UnsupportedError, match="split the batch"):
        one_axis(MOST_PROGRAMS + 1, "append")


def test_powers_of_two():
    assert [power_of_two(number) for number in (1, 16, 17, 80, 256)] == [16, 16, 32, 128, 256]


def test_scratch_holds_values_and_logarithms_of_every_split():
    assert scratch_floats(q_heads=2, v_dim=4, rows=3, decode_q=2) == 3 * 2 * 2 * 64 * 5

"""U113: one report with all parts, others' memory counted once, no negative size, and ways out with their numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pagedkv.api import MemoryInfo
from pagedkv.config import EngineConfig
from pagedkv.engine.memory import MemoryPlan
from pagedkv.errors import OutOfDeviceMemory
from pagedkv.planning.advice import advise
from pagedkv.planning.fit import Fit
from tests.helpers.planning_rig import GIB, LLAMA_3_8B, fit_of, write_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_config(tmp_path / "model", **LLAMA_3_8B)


def planned(fit: Fit, graphs: int = 0) -> MemoryPlan:
    request = dataclasses.replace(fit.agreed.request, graphs=graphs)
    agreed = dataclasses.replace(fit.agreed, request=request)
    return dataclasses.replace(fit, agreed=agreed).settings()


def test_u113_another_process_that_holds_half_is_counted_once(folder: Path) -> None:
    beside = planned(fit_of(folder, MemoryInfo(free=40 * GIB, total=80 * GIB)))
    assert beside.total <= int(0.9 * 80 * GIB) - 40 * GIB < beside.total + beside.cost.per_block


def test_u113_what_graphs_hold_is_a_part_of_the_report(folder: Path) -> None:
    fit = fit_of(folder, MemoryInfo(free=40 * GIB, total=40 * GIB))
    without, recorded = planned(fit), planned(fit, graphs=2 * GIB)
    assert recorded.total <= int(0.9 * 40 * GIB)
    assert without.num_blocks - recorded.num_blocks == 2 * GIB // without.cost.per_block
    lines = [line.split() for line in recorded.table().splitlines()]
    assert [line[0] for line in lines] == ["memory", "weights", "workspace", "graphs", "cache", "together"]
    assert lines[3][1:3] == ["2.0", "GiB"]


def test_u113_weights_beyond_the_budget_end_with_numbers_and_ways_out(folder: Path) -> None:
    fit = fit_of(folder, MemoryInfo(free=12 * GIB, total=12 * GIB))
    with pytest.raises(OutOfDeviceMemory) as caught:
        planned(fit)
    assert caught.value.free == 0 and "weights    15.0 GiB" in str(caught.value)
    assert not [word for word in str(caught.value).split() if word[:1] == "-"], "no negative size"
    ways = advise(fit, EngineConfig.of(model=str(folder), swap_blocks=0))
    assert [way.setting for way in ways] == ["max_model_len", "max_num_seqs", "kv_cache_dtype", "weights"]
    assert "a model of at most 9.4 GiB" in str(ways[-1]), "10.8 GiB, less workspace and one sequence of 1 GiB"


def test_u113_the_way_out_works(folder: Path) -> None:
    fit = fit_of(folder, MemoryInfo(free=20 * GIB, total=20 * GIB), max_num_seqs=8)
    by_setting = {
        way.setting: way for way in advise(fit, EngineConfig.of(model=str(folder), swap_blocks=0, max_num_seqs=8))
    }
    length = int(by_setting["max_model_len"].value or 0)
    shorter = fit_of(folder, MemoryInfo(free=20 * GIB, total=20 * GIB), max_num_seqs=8, max_model_len=length)
    assert shorter.settings().num_blocks == 8 * -(-length // 16) + 1

"""Choosing tiles, with a made-up clock."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from pagedkv_cuda.kernels import tune
from pagedkv_cuda.kernels.tiles import TABLE, Tile, table, tile_for


def test_the_fastest_tile_of_each_entry_is_kept_and_other_families_stay(caplog):
    def measure(kernel, size, dim, tile):
        if tile.block_n * dim > 8192:
            raise RuntimeError("out of shared memory")
        return abs(tile.block_m - 32) + abs(tile.block_n - 64) + abs(tile.warps - 8) + abs(tile.stages - 3)

    with caplog.at_level(logging.INFO, "pagedkv.backends.cuda.tune"):
        *_, made = tune.tuned(90, measure)
    assert made["90"]["many"]["2"] == {"64": [32, 64, 8, 3], "128": [32, 64, 8, 3], "256": [32, 32, 8, 3]}
    assert made["90"]["few"]["4"]["64"] == [16, 64, 8, 3]
    assert {name: made[name] for name in made if name != "90"} == {name: table()[name] for name in made if name != "90"}
    assert "out of shared memory" in caplog.text


def test_where_nothing_runs_the_old_tile_stays_and_that_is_said(caplog):
    def measure(*_):
        raise RuntimeError("no kernel image")

    with caplog.at_level(logging.WARNING, "pagedkv.backends.cuda.tune"):
        assert list(tune.tuned(80, measure))[-1] == table()
    assert "few, 2 bytes, dim 128: no tile ran, the old one stays" in caplog.text


@pytest.mark.parametrize("kernel", ["few", "many"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_candidate_is_too_large_and_the_shipped_tile_is_one(kernel, size):
    for dim in (64, 128, 256):
        tiles = list(tune.candidates(kernel, 86, size, dim))
        assert tile_for(kernel, 86, size, dim) in tiles
        assert all(2 * tile.block_n * dim * size < 99 * 1024 for tile in tiles)  # keys and values alone
        fewer = list(tune.candidates(kernel, 86, size, dim, 48 * 1024))
        assert set(fewer) < set(tiles)


def test_an_error_of_the_device_ends_the_run_and_what_was_measured_is_kept(tmp_path, monkeypatch):
    def measure(kernel, size, dim, tile):
        if size == "2":
            raise torch.AcceleratorError("illegal memory access")
        return float(tile.stages)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "target_of", lambda device: 90)
    monkeypatch.setattr(tune, "shared_of", lambda device: None)
    monkeypatch.setattr(tune, "on_card", measure)
    with pytest.raises(torch.AcceleratorError):
        tune.main(tmp_path / "tiles.json")
    kept = json.loads((tmp_path / "tiles.json").read_text("utf-8"))
    assert kept["90"]["few"]["1"]["64"][3] == 1 and kept["90"]["few"]["2"] == table()["90"]["few"]["2"]


def test_a_call_is_timed_between_events_of_the_device(monkeypatch):
    """The median of what the events say, the first call left out."""
    clock = iter(float(tick) for tick in range(10_000))
    said = []

    class Event:
        def __init__(self, device, enable_timing):
            assert device == "cuda" and enable_timing

        def record(self):
            self.at = next(clock)

        def synchronize(self):
            said.append("waited")

        def elapsed_time(self, other):
            return other.at - self.at

    calls = []
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(tune, "workload", lambda *given: lambda: calls.append(next(clock)))
    assert tune.on_card("few", "2", 64, Tile(16, 16, 4, 2)) == 2.0  # began, the call, ended
    assert len(calls) == tune.REPEATS + 1 and len(said) == tune.REPEATS


def test_the_table_is_written_as_it_is_kept():
    assert tune.spelt(json.loads(TABLE.read_text("utf-8"))) == TABLE.read_text("utf-8")


@pytest.mark.parametrize("size", tune.DTYPES)
def test_a_workload_computes_attention(size, monkeypatch):
    monkeypatch.setattr(tune, "HEADS", (1, 1))
    seen = []
    monkeypatch.setattr(
        tune, "attend", lambda q, out, cache, layer, rows, scratch, choice: seen.append((q, cache, rows))
    )
    tune.workload("few", size, 64, Tile(16, 16, 4, 2), torch.device("cpu"))()
    q, cache, rows = seen[0]
    assert (q.dtype, cache.keys.dtype) == tune.DTYPES[size]
    assert rows.block_table.unique().numel() == rows.block_table.numel() == len(cache.keys) - 1
    assert len(q) == rows.num_tokens == int(rows.cu_q[-1])


def test_without_a_card_the_way_out_is_said_and_nothing_is_written(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(tmp_path / "tiles.json") == 1
    assert "run this on the machine with the card" in caplog.text and not list(tmp_path.iterdir())

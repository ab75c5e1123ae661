"""Choosing tiles, with a made-up clock."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from pagedkv_cuda.kernels import tune
from pagedkv_cuda.kernels.tiles import TABLE, Tile, table


def test_the_fastest_tile_of_each_entry_is_kept_and_other_families_stay(caplog):
    def measure(kernel, size, dim, tile):
        if tile.block_n * dim > 8192:
            raise RuntimeError("out of shared memory")
        return abs(tile.block_m - 32) + abs(tile.block_n - 64) + abs(tile.warps - 8) + abs(tile.stages - 3)

    with caplog.at_level(logging.INFO, "pagedkv.backends.cuda.tune"):
        made = tune.tuned("90", measure)
    assert made["90"]["many"]["2"] == {"64": [32, 64, 8, 3], "128": [32, 64, 8, 3], "256": [32, 32, 8, 3]}
    assert made["90"]["few"]["4"]["64"] == [16, 64, 8, 3]
    assert {name: made[name] for name in made if name != "90"} == {name: table()[name] for name in made if name != "90"}
    assert "out of shared memory" in caplog.text


def test_where_nothing_runs_the_old_tile_stays_and_that_is_said(caplog):
    def measure(*_):
        raise RuntimeError("no kernel image")

    with caplog.at_level(logging.WARNING, "pagedkv.backends.cuda.tune"):
        assert tune.tuned("80", measure) == table()
    assert "few, 2 bytes, dim 128: no tile ran, the old one stays" in caplog.text


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

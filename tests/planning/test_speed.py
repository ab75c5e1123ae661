"""Predicted speeds: bytes and operations counted by hand, ends in order, limits that give way as they should."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagedkv.api import MemoryInfo
from pagedkv.config import EngineConfig
from pagedkv.engine.setup import build
from pagedkv.models.checkpoint import DEMO_INSTALL, DEMO_PACKAGE
from pagedkv.planning import rates as rates_module
from pagedkv.planning.plan import planned, speed_of
from pagedkv.planning.rates import product_rate, rates_of, read_bandwidth
from pagedkv.planning.speed import Rates, Speed, Work, work_of
from tests.helpers.planning_rig import GIB, LLAMA_2_7B, TINY, fit_of, write_config
from tests.helpers.pooled import declare

ENOUGH = MemoryInfo(free=80 * GIB, total=80 * GIB)
ROOM = {"bandwidth": 1e12, "peak": 1e14, "source": "a test"}


def work(folder: Path, **settings: object) -> Work:
    fit = fit_of(folder, ENOUGH, **settings)
    return work_of(fit.checkpoint, fit.agreed)


def test_the_work_of_llama_2_7b_counted_by_hand(tmp_path: Path) -> None:
    found = work(write_config(tmp_path / "model", **LLAMA_2_7B))
    vocabulary, norms = 32000 * 4096, 65 * 4096
    body = 6_738_415_616 - 2 * vocabulary
    assert found.body == 2 * body
    assert found.head == 2 * vocabulary
    assert found.step_bytes == 2 * (body + vocabulary), "the embedding table is looked up only"
    assert body > norms
    # 32 layers, 32 heads, two products of 128 with each visible key: 1 + 2 + 3 of 3 tokens.
    assert found.attention(3) == 32 * 32 * 2 * (128 + 128) * 6


def test_a_model_that_makes_vectors_has_no_head_and_decodes_nothing(tmp_path: Path) -> None:
    whole, folder = write_config(tmp_path / "whole", **TINY), write_config(tmp_path / "model", **TINY)
    declare(folder)
    text, vectors = work(whole), work(folder)
    assert (vectors.body, vectors.head) == (text.body, 0), "the same layers"
    assert text.step_bytes - vectors.step_bytes == 320 * 48 * 4
    with planned(EngineConfig.of(model=str(folder), backend="cpu", backend_options={"threads": 1})) as plan:
        assert plan.prediction is not None and plan.prediction.decode == ()


@pytest.mark.parametrize("pooling", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_the_bytes_of_a_step_are_the_engines(tmp_path: Path, tied: bool, pooling: bool) -> None:
    folder = write_config(tmp_path / "model", **TINY | {"tie_word_embeddings": tied})
    if pooling:
        declare(folder)
    settings = {"model": str(folder), "backend": "cpu", "backend_options": {"threads": 1}, "max_num_seqs": 2}
    with planned(EngineConfig.of(**settings), speed=False) as plan:
        found = work_of(plan.fit.checkpoint, plan.fit.agreed)
    parts = build(EngineConfig.of(**settings, load_format="dummy", skip_tokenizer_init=True))
    try:
        assert found.step_bytes == parts.runner.model.bytes_per_step
    finally:
        parts.runner.close()


def test_a_window_limits_what_a_query_sees(tmp_path: Path) -> None:
    found = work(write_config(tmp_path / "model", **TINY | {"model_type": "mistral", "sliding_window": 2}))
    # 1 + 2 + 2 + 2 keys for 4 tokens; 3 layers, 4 heads of 12.
    assert found.attention(4) == 3 * 4 * 2 * (12 + 12) * 7


def test_of_experts_a_step_reads_those_that_its_tokens_take(tmp_path: Path) -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    found = work(write_config(tmp_path / "model", **TINY | experts), dtype="float32")
    assert found.expert_bytes == 3 * 8 * 3 * 48 * 80 * 4
    assert found.weights_read(1) == pytest.approx(found.step_bytes - 0.75 * found.expert_bytes)
    assert found.weights_read(1) < found.weights_read(4) < found.weights_read(100) <= found.step_bytes
    dense = work(write_config(tmp_path / "dense", **TINY))
    assert found.body == pytest.approx(dense.body + 2 * 3 * (3 * 48 * 80 + 8 * 48)), "two experts and a router"


def test_a_step_is_weights_and_cache_over_the_bandwidth_and_the_hosts_part(tmp_path: Path) -> None:
    found = work(write_config(tmp_path / "model", **LLAMA_2_7B))
    speed = Speed(work=found, rates=Rates(**ROOM, basis="here"))
    low, high = 1000 * 512 * 1024 / 1e12, found.step_bytes / 1e12
    slow = high / 0.40 + low / 0.25 + 32 * 0.00018 + 0.00015
    fast = high / 0.89 + low / 0.45 + 32 * 0.00008 + 0.00004
    told = speed.decode(1, 1000)
    assert (told.low, told.high) == (pytest.approx(1 / slow), pytest.approx(1 / fast))


def test_limits_give_way_as_they_should(tmp_path: Path) -> None:
    found = work(write_config(tmp_path / "model", **LLAMA_2_7B))
    base = Speed(work=found, rates=Rates(**ROOM, basis="published"))
    faster = Speed(work=found, rates=Rates(**ROOM | {"bandwidth": 2e12}, basis="published"))
    stronger = Speed(work=found, rates=Rates(**ROOM | {"peak": 2e14}, basis="published"))
    assert faster.decode(1, 100).low > base.decode(1, 100).low == stronger.decode(1, 100).low
    assert stronger.prefill(2048).high > base.prefill(2048).high == faster.prefill(2048).high
    assert base.decode(8, 100).low > base.decode(1, 100).low, "weights are read once for all"
    assert base.decode(8, 4000).high < base.decode(8, 100).high
    assert base.prefill(4000).high < base.prefill(1000).high, "attention grows with the square"
    for batch in (1, 8, 64):
        told = base.decode(batch, 512)
        assert told.low < told.middle < told.high
        assert told.middle**2 == pytest.approx(told.low * told.high)


def test_rates_of_this_machine_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "QUICK_BYTES", 1 << 16)
    monkeypatch.setattr(rates_module, "SIDE", 16)
    settings = {"model": str(write_config(tmp_path / "model", **TINY)), "max_num_seqs": 4}
    threads = torch.get_num_threads()
    with planned(EngineConfig.of(**settings, backend="cpu", backend_options={"threads": 1})) as plan:
        assert plan.prediction is not None
        rates = plan.prediction.rates
        assert (rates.basis, rates.bandwidth > 0, rates.peak > 0) == ("here", True, True)
        assert [batch for batch, _ in plan.prediction.decode] == [1, 8, 32]
        assert speed_of(plan.fit, rates).prefill(plan.prediction.context) == plan.prediction.prefill
        assert read_bandwidth(plan.fit.target.backend, 1 << 12) > 0 < product_rate(plan.fit.target.backend, "fp32")
    torch.set_num_threads(threads)


def test_no_speed_is_made_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(write_config(tmp_path / "model", **TINY | {"head_dim": 16}))
    with caplog.at_level("INFO", "pagedkv.planning"):
        with planned(EngineConfig.of(model=folder, backend="null")) as plan:
            assert plan.prediction is None
        assert "backend null is for tests" in caplog.text
        with planned(EngineConfig.of(model=folder, dtype="float16"), device="310p") as plan:
            assert rates_of(plan.fit.target, "fp32") is None
            assert plan.prediction is not None and plan.prediction.rates.basis == "published"
    assert "there is no rate of Huawei Ascend 310P" in caplog.text


@pytest.fixture(scope="module")
def demo() -> Iterator[Speed]:
    """The demo model on the machine of docs/performance.md: 30.6 GB/s, and 150 GFLOP/s at best of torch's products."""
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        pytest.skip(f"the demo model is not installed: {DEMO_INSTALL}")
    config = EngineConfig.of(model="demo", backend="cpu", backend_options={"threads": 1}, quantization="gguf")
    with planned(config, speed=False) as plan:
        yield speed_of(plan.fit, Rates(bandwidth=30.6e9, peak=150e9, basis="here", source="docs/kernel-figures.md"))


@pytest.mark.parametrize(("batch", "gap"), [(1, 8.5), (8, 28.6), (16, 45.6), (32, 80.2)])
def test_what_performance_md_measured_between_tokens_lies_inside(demo: Speed, batch: int, gap: float) -> None:
    told = demo.decode(batch, 128 + 64)
    assert told.low < batch / (gap / 1000) < told.high


@pytest.mark.parametrize(
    ("tokens", "batch", "milliseconds"), [(128, 1, 161.8), (128, 8, 1054.1), (512, 1, 659), (2048, 1, 3452)]
)
def test_what_performance_md_measured_to_the_first_token_lies_inside(
    demo: Speed, tokens: int, batch: int, milliseconds: float
) -> None:
    told = demo.prefill(tokens, batch)
    assert told.low < batch * tokens / (milliseconds / 1000) < told.high

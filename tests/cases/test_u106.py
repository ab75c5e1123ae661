"""U106: where the device's memory is the host's, swap is off unless asked for, and then it is said and counted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.api import PoolCost
from pagedkv.config import EngineConfig
from pagedkv.engine.memory import choose_host
from pagedkv.errors import ConfigError, OutOfDeviceMemory
from pagedkv_jetson.descriptor import JetsonDescriptor
from tests.backends.jetson import trees
from tests.backends.jetson.double import double
from tests.helpers.cpu_plugins import cpu_plugin
from tests.helpers.engine_rig import engine, greedy, solo, some_prompts, token_ids

SMALL = {"num_blocks": 10, "block_size": 4, "max_model_len": 32}
PROMPTS = some_prompts([8, 8, 8], seed=106)


@pytest.mark.parametrize("given", [{}, {"swap_space": "auto"}, {"swap_space": 0}, {"swap_blocks": 0}])
def test_u106_on_shared_memory_swap_is_off_by_default(
    given: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pagedkv")
    with engine(**SMALL, **given) as llm:
        assert llm.engine.parts.memory.host is None
        assert token_ids(llm.generate(PROMPTS, greedy(16), use_tqdm=False)) == [solo(p, greedy(16)) for p in PROMPTS]
        assert llm.metrics().preemptions >= 1
        assert llm.metrics().swaps == 0
    assert not [record for record in caplog.records if record.levelname == "WARNING" and "swap" in record.message]
    assert ("swap_space=auto is 0 here" in caplog.text) == (given.get("swap_space") == "auto")


@pytest.mark.parametrize("given", [{"swap_space": "1MiB"}, {"swap_blocks": 50}])
def test_u106_an_explicit_value_is_accepted_with_a_warning_and_counted_once(
    given: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with engine(**SMALL) as llm:
        without = llm.engine.parts.memory
    caplog.set_level("INFO", "pagedkv")
    with engine(**SMALL, **given, preemption_mode="swap") as llm:
        memory = llm.engine.parts.memory
        assert memory.host is not None
        assert memory.total == without.total + memory.host.nbytes
        assert token_ids(llm.generate(PROMPTS, greedy(16), use_tqdm=False)) == [solo(p, greedy(16)) for p in PROMPTS]
        assert llm.metrics().swaps >= 1
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [message for message in warned if "is the same memory that the cache of cpu lies in" in message] == warned
    assert len(warned) == 1
    assert "blocks in this same memory, made when needed" in caplog.text, "a line of the budget"


@pytest.mark.parametrize("given", [{"swap_space": "1GiB"}, {"swap_space": 4}, {"swap_blocks": 7}])
def test_u106_a_backend_without_host_memory_refuses_an_explicit_value(
    given: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(cpu_plugin(tmp_path, "unified", placements=frozenset({"device"}))))
    refused = pytest.raises(ConfigError, match="backend unified has no host memory beside its own; leave it out")
    with refused, engine(**SMALL, **given, backend="unified"):
        pass
    for off in ({}, {"swap_space": 0}, {"swap_blocks": 0}, {"swap_space": "auto"}):
        with engine(**SMALL, **off, backend="unified") as llm:
            assert llm.engine.parts.memory.host is None


def test_u106_a_value_that_holds_no_block_is_refused() -> None:
    refused = pytest.raises(ConfigError, match=r"swap_space='100B' holds no block of .*; raise it")
    with refused, engine(**SMALL, swap_space="100B"):
        pass


def test_u106_it_is_taken_from_what_the_cache_can_have() -> None:
    settings = {"num_blocks": None, "kv_cache_memory": "64KiB", "swap_space": "1000TiB"}
    with (
        pytest.raises(OutOfDeviceMemory, match=r"0 B are left .* what swap_space may take of it \(1024000"),
        engine(**settings),
    ):
        pass


@pytest.mark.parametrize("given", [{}, {"swap_space": "auto"}, {"swap_space": 0}, {"swap_space": "2GiB"}])
def test_u106_a_board_with_shared_memory_has_nothing_to_swap_to(given: dict[str, object], tmp_path: Path) -> None:
    (device,) = JetsonDescriptor(trees.board(tmp_path, "orin-nx-16")).probe()
    can = JetsonDescriptor(tmp_path).describe(device)
    assert device.unified and "host" not in can.placements
    backend = double(tmp_path)
    config = EngineConfig.of(model="demo", **given)

    def host() -> object:
        return choose_host(config, can.placements, backend.memory(), lambda: PoolCost(per_block=1, fixed=0), "jetson")

    if given.get("swap_space") == "2GiB":
        with pytest.raises(ConfigError, match="backend jetson has no host memory beside its own; leave it out"):
            host()
    else:
        assert host() is None
    backend.close()

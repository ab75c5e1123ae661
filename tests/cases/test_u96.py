"""U96: a backend that cannot tell its memory, has none, or fails to answer; with and without an explicit size."""

from __future__ import annotations

import pytest

from pagedkv import LLM
from pagedkv.api import MemoryInfo
from pagedkv.errors import BackendError, ConfigError, OutOfDeviceMemory
from pagedkv_cpu.backend import CpuBackend
from tests.helpers.engine_rig import SETTINGS, drained, folder, greedy, solo
from tests.helpers.memory_rig import GIB, Telling, planned

UNKNOWN = Telling(MemoryInfo())


def test_u96_unknown_memory_asks_for_an_explicit_size_and_takes_it() -> None:
    with pytest.raises(ConfigError, match=r'cannot tell how much memory it has: set kv_cache_memory="1GiB"'):
        planned(UNKNOWN)
    assert planned(UNKNOWN, num_blocks=100).num_blocks == 100
    assert planned(UNKNOWN, kv_cache_bytes=GIB).num_blocks == 1023, "1024 of 1 MiB less 1 MiB fixed"
    assert "unknown" in planned(UNKNOWN, num_blocks=100).table()


@pytest.mark.parametrize("known", [MemoryInfo(total=8 * GIB), MemoryInfo(free=8 * GIB), MemoryInfo(reclaimable=None)])
def test_u96_half_an_answer_is_no_guess(known: MemoryInfo) -> None:
    with pytest.raises(ConfigError):
        planned(Telling(known))


@pytest.mark.parametrize("size", [{}, {"num_blocks": 100}, {"kv_cache_bytes": GIB}, {"fraction": 0.5}])
def test_u96_no_memory_is_refused_with_the_numbers(size: dict[str, int]) -> None:
    with pytest.raises(OutOfDeviceMemory) as caught:
        planned(Telling(MemoryInfo(free=0, total=0)), **size)
    assert caught.value.free == 0
    assert caught.value.requested is not None and caught.value.requested > 0
    assert "2.0 GiB" in str(caught.value), "the weights are named"


@pytest.mark.parametrize("size", [{}, {"num_blocks": 100}])
def test_u96_an_answer_that_raises_names_the_backend(size: dict[str, int]) -> None:
    broken = Telling(RuntimeError("no such counter"))
    with pytest.raises(BackendError, match="backend telling failed to report its memory: RuntimeError"):
        planned(broken, **size)
    later = Telling(MemoryInfo(free=8 * GIB, total=8 * GIB), RuntimeError("no such counter"))
    if size:
        assert planned(later, **size).num_blocks == 100, "an explicit size asks once"
    else:
        with pytest.raises(BackendError, match="no such counter"):
            planned(later)


def test_u96_the_engine_says_so_and_runs_with_an_explicit_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "memory", lambda self: MemoryInfo())
    with pytest.raises(ConfigError, match="cannot tell how much memory"):
        LLM(folder(), **SETTINGS | {"num_blocks": None})
    with LLM(folder(), **SETTINGS) as llm:
        prompt = [1, 2, 3]
        assert llm.generate(prompt, greedy(3), use_tqdm=False)[0].outputs[0].token_ids == solo(prompt, greedy(3))
        drained(llm)

    def broken(self: CpuBackend) -> MemoryInfo:
        raise OSError("/proc is not there")

    monkeypatch.setattr(CpuBackend, "memory", broken)
    with pytest.raises(BackendError, match="backend cpu failed to report its memory"):
        LLM(folder(), **SETTINGS)

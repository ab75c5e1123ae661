"""U27: the default for host memory goes by what there is, so that small hosts start, too."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from pagedkv.engine.memory import AUTO_SWAP
from tests.helpers.engine_rig import SETTINGS, engine, folder, greedy, solo, some_prompts
from tests.helpers.swap_rig import backend

MIB = 1 << 20


def _ram(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2 * available, available=available))


@pytest.mark.parametrize(
    ("available", "most"), [(512 * MIB, 128 * MIB), (8 << 30, 2 << 30), (64 << 30, AUTO_SWAP), (2048, 0)]
)
@pytest.mark.parametrize("given", [{}, {"swap_space": "auto"}])
def test_u27_unset_takes_a_quarter_of_what_is_available_and_at_most_4_gib(
    available: int, most: int, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _ram(monkeypatch, available)
    with engine(**backend("late"), **given) as llm:
        host = llm.engine.parts.memory.host
        assert (host is None) == (most == 0)
        if host is not None:
            assert most - 2 * host.cost.per_block - host.cost.fixed * 99 <= host.nbytes <= most
        (prompt,) = some_prompts([9])
        assert llm.generate(prompt, greedy(4), use_tqdm=False)[0].outputs[0].token_ids == solo(prompt, greedy(4))
        assert llm.metrics().host.free == 0, "made on demand: nobody asked for any yet"


def test_u27_all_defaults_start_where_512_mib_are_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the machine's own memory: swap is off, and the cache fits beside the weights."""
    from pagedkv import LLM

    _ram(monkeypatch, 512 * MIB)
    with LLM(folder(), backend="cpu", backend_options=SETTINGS["backend_options"]) as llm:
        memory = llm.engine.parts.memory
        assert memory.host is None
        assert memory.total <= 512 * MIB
        (prompt,) = some_prompts([9])
        assert llm.generate(prompt, greedy(4), use_tqdm=False)[0].outputs[0].token_ids == solo(prompt, greedy(4))

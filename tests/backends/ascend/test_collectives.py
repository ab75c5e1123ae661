"""How long ranks wait for each other, and what a failure of collectives is told with."""

from __future__ import annotations

import pytest
import torch

from pagedkv.api import World
from pagedkv.api.errors import ConfigError
from pagedkv.api.torch import DEFAULT_TIMEOUT
from pagedkv_ascend import environment
from pagedkv_ascend.runtime import NpuRuntime
from tests.backends.ascend.double import double


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.COLLECTIVES:
        monkeypatch.delenv(name, raising=False)


def test_u110_the_users_limit_of_meeting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert double().collectives_timeout() == DEFAULT_TIMEOUT
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "600")
    assert double().collectives_timeout() == 600


def test_u110_a_failure_is_told_with_the_device_and_every_variable_of_its_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HCCL_IF_IP", "10.0.0.7")
    note = environment.collectives_note(3)
    assert note.startswith("NPU 3, ") and "HCCL_IF_IP=10.0.0.7" in note and "HCCL_SOCKET_IFNAME=not set" in note
    assert double(note=note).collectives_note() == note


def test_ranks_meet_by_hccl_and_a_group_of_one_needs_nobody() -> None:
    assert NpuRuntime.collectives == "hccl"
    backend = double(world=World(rank=1, size=2))
    alone = backend.communicator((1,))
    assert alone.all_reduce(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match="2 ranks need a place to meet"):
        backend.communicator((0, 1))
    backend.close()

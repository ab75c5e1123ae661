"""U110: ranks that cannot meet end with a bare code; here within a limit, with rank, device, variables and that limit.

On the Ascend backend's double, with gloo in hccl's place: emulation, as hccl was never run.
"""

from __future__ import annotations

import pytest

from pagedkv_ascend import environment
from tests.backends.ascend import meeting
from tests.backends.ascend.meeting import LIMIT, Ended, Ran

SLACK = 10.0
"""Seconds of a slow machine beyond the limit, unset it is 300."""


@pytest.fixture(scope="module")
def ran() -> Ran:
    return meeting.run()


def told(answer: Ended, rank: int, interface: str) -> None:
    """What U110 asks of an error's text."""
    assert f"rank {rank}" in answer.text and f"NPU {rank}" in answer.text
    assert f"{LIMIT} s" in answer.text
    for name in environment.COLLECTIVES:
        assert f"{name}=" in answer.text
    assert f"HCCL_SOCKET_IFNAME={interface}" in answer.text and f"HCCL_CONNECT_TIMEOUT={LIMIT}" in answer.text
    assert "\n" not in answer.text
    assert answer.seconds < LIMIT + SLACK


@pytest.mark.parametrize(("rank", "interface"), [(0, "nonet0"), (1, "not set")])
def test_u110_a_wrong_interface_ends_both_ranks_and_is_named_by_the_one_that_has_it(
    ran: Ran, rank: int, interface: str
) -> None:
    answer = ran.ranks[rank].answers["wrong"]
    assert answer.kind == "BackendUnavailable"
    told(answer, rank, interface)
    assert ("Unable to find address for: nonet0" in answer.text) == (rank == 0)
    assert not answer.later, "nothing was started, so that the instance can try again"


@pytest.mark.parametrize("rank", [0, 1])
def test_u110_a_rank_whose_other_has_ended_before_the_meeting_ends_within_the_limit(ran: Ran, rank: int) -> None:
    answer = ran.ranks[rank].answers["alone"]
    assert ran.left == 3
    assert answer.kind == "BackendUnavailable" and f"within {LIMIT} s" in answer.text
    assert "start every rank with this rendezvous" in answer.text
    assert ("rank 0 does not listen there" in answer.text) == (rank == 1)
    told(answer, rank, "not set")
    assert answer.seconds > LIMIT / 2, "it has waited"


def test_u110_a_rank_that_dies_ends_the_other_ones_instance(ran: Ran) -> None:
    first, second = ran.ranks
    assert second.process.exitcode == 4 and "part" not in second.answers
    answer = first.answers["part"]
    assert answer.kind == "DeviceError" and "all_reduce among ranks [0, 1] failed" in answer.text
    told(answer, 0, "not set")
    assert answer.later == f"DeviceError: {answer.text}", "the instance ends with it"
    assert first.process.exitcode == 0

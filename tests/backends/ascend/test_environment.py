"""The variables of torch-npu and CANN: every row of the table, what is refused, and that the user's own stay."""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType

import pytest

from pagedkv.api.errors import ConfigError
from pagedkv.plugins import check_options, parse_options
from pagedkv_ascend import environment
from pagedkv_ascend.descriptor import AscendDescriptor
from tests.backends.ascend import machine

NAMED = {one.name: one for one in environment.variables()}
ISSUES = (
    "TASK_QUEUE_ENABLE HCCL_OP_BLOCK_LIST HCCL_CONNECT_TIMEOUT HCCL_EXEC_TIMEOUT HCCL_BUFFSIZE HCCL_ALGO "
    "HCCL_OP_EXPANSION_MODE HCCL_IF_IP HCCL_SOCKET_IFNAME HCCL_INTRA_ROCE_ENABLE HCCL_INTRA_PCIE_ENABLE "
    "HCCL_DETERMINISTIC PYTORCH_NPU_ALLOC_CONF ASCEND_RT_VISIBLE_DEVICES ASCEND_LAUNCH_BLOCKING"
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    machine.bare(monkeypatch)
    return monkeypatch


def value(profile: environment.Profile, name: str) -> tuple[str, str]:
    (found,) = [(one.value, one.whose) for one in profile.settings if one.variable.name == name]
    return found


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_variable_has_type_help_and_source() -> None:
    assert NAMED.keys() >= set(ISSUES.split())
    for one in environment.variables():
        assert one.type in {"int", "number", "word", "text", *environment._FORMS} and one.help and one.source, one.name
        assert not one.default or one.why_not(one.default) is None, one.name
    assert "no reader of this variable was found" in NAMED["HCCL_OP_BLOCK_LIST"].help


@pytest.mark.parametrize("name", ["HCCL_INTRA_ROCE_ENABLE", "HCCL_ALGO", "HCCL_IF_IP"])
def test_what_has_no_default_shows_none(name: str) -> None:
    assert value(environment.profile({}), name) == ("", "default")


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("TASK_QUEUE_ENABLE", ("0", "1", "2")),
        ("PYTORCH_NPU_ALLOC_CONF", ("expandable_segments:True", "page_size:1g, max_split_size_mb:64")),
        ("PYTORCH_NPU_ALLOC_CONF", ("roundup_power2_divisions:[256:1,512:2,>:8],per_process_memory_fraction:0.5",)),
        ("PYTORCH_NPU_ALLOC_CONF", ("expandable_segments:False,max_split_size_mb:64", "")),
        ("ASCEND_LAUNCH_BLOCKING", ("0", "1")),
        ("HCCL_OP_BLOCK_LIST", ("AllReduce,AllGather", "")),
        ("HCCL_CONNECT_TIMEOUT", ("120", "7200")),
        ("HCCL_EXEC_TIMEOUT", ("0", "0.05", "1836", "2147483647")),
        ("HCCL_BUFFSIZE", ("1", "200", "100000")),
        ("HCCL_ALGO", ("level0:NA;level1:H-D_R",)),
        ("HCCL_OP_EXPANSION_MODE", ("AI_CPU", "AIV", "HOST", "HOST_TS")),
        ("HCCL_DETERMINISTIC", ("true", "false", "strict")),
        ("HCCL_IF_IP", ("10.0.0.1", "fe80::1%eth0")),
        ("HCCL_SOCKET_IFNAME", ("eth", "=eth0,endvnic", "^eth,enp", "^=eth0.7")),
        ("HCCL_INTRA_ROCE_ENABLE", ("0", "1")),
        ("HCCL_INTRA_PCIE_ENABLE", ("0", "1")),
        ("ASCEND_RT_VISIBLE_DEVICES", ("0", "0,1,7")),
    ],
)
def test_what_the_vendor_documents_is_accepted(clean: pytest.MonkeyPatch, name: str, fine: tuple[str, ...]) -> None:
    for text in fine:
        clean.setenv(name, text)
        assert value(environment.profile({}), name) == (text, "yours")


ALLOCATOR_KEYS = ", ".join(environment.allocator_keys())


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("TASK_QUEUE_ENABLE", "3", "it is 0, 1 or 2"),
        ("TASK_QUEUE_ENABLE", "on", "it is a whole number"),
        ("ASCEND_LAUNCH_BLOCKING", "2", "it is 0 or 1"),
        ("HCCL_CONNECT_TIMEOUT", "60", "it is 120 to 7200"),
        ("HCCL_CONNECT_TIMEOUT", "7201", "it is 120 to 7200"),
        ("HCCL_CONNECT_TIMEOUT", "5m", "it is a whole number"),
        ("HCCL_CONNECT_TIMEOUT", "", "it is a whole number"),
        ("HCCL_EXEC_TIMEOUT", "-1", "it is 0 to 2147483647"),
        ("HCCL_EXEC_TIMEOUT", "2147483648", "it is 0 to 2147483647"),
        ("HCCL_EXEC_TIMEOUT", "1e3", "it is a number"),
        ("HCCL_BUFFSIZE", "0", "it is 1 or more"),
        ("HCCL_BUFFSIZE", "200MB", "it is a whole number"),
        ("HCCL_OP_EXPANSION_MODE", "aiv", f"it is {environment.spell(NAMED['HCCL_OP_EXPANSION_MODE'].among)}"),
        ("HCCL_DETERMINISTIC", "1", "it is true, false, strict, TRUE, FALSE or STRICT"),
        ("HCCL_IF_IP", "localhost", "it is an IP address of this machine"),
        (
            "HCCL_SOCKET_IFNAME",
            "eth0, eth1",
            "it is beginnings of network interfaces, eth,enp; names behind =; behind ^ those that are left out",
        ),
        ("HCCL_INTRA_ROCE_ENABLE", "true", "it is a whole number"),
        (
            "PYTORCH_NPU_ALLOC_CONF",
            "max_split_size:64",
            f"torch-npu's allocator has no setting max_split_size, its settings are {ALLOCATOR_KEYS}",
        ),
        (
            "PYTORCH_NPU_ALLOC_CONF",
            "expandable_segments",
            "expandable_segments has no value, write expandable_segments:VALUE",
        ),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:true", "expandable_segments:true: it is True or False"),
        ("PYTORCH_NPU_ALLOC_CONF", "page_size:2m", "page_size:2m: it is 1g"),
        ("PYTORCH_NPU_ALLOC_CONF", "segment_size_mb:8", "segment_size_mb:8: it is 20 to 512"),
        (
            "PYTORCH_NPU_ALLOC_CONF",
            "expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.8",
            "expandable_segments:True excludes max_split_size_mb, garbage_collection_threshold",
        ),
        ("ASCEND_RT_VISIBLE_DEVICES", "0,0", "it names 0 twice, each rank needs an NPU of its own"),
    ],
)
def test_what_cannot_be_is_one_line_of_the_variable_or_of_the_option(
    clean: pytest.MonkeyPatch, name: str, text: str, why: str
) -> None:
    clean.setenv(name, text)
    with pytest.raises(ConfigError) as raised:
        environment.profile({})
    assert str(raised.value) == f"{name}={text!r}: {why}; unset {name}, or correct it"
    option = NAMED[name].option
    if option:
        clean.delenv(name)
        with pytest.raises(ConfigError) as raised:
            environment.profile({option: text})
        assert str(raised.value) == f"backend option {option}={text!r}: {why}; correct it, or leave it out"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "1"},
            "HCCL_INTRA_PCIE_ENABLE and HCCL_INTRA_ROCE_ENABLE are both 1, and CANN takes one of them: unset "
            "HCCL_INTRA_ROCE_ENABLE, or leave its option out",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_NPU_ALLOC_CONF": "page_size:1g"},
            "PYTORCH_ALLOC_CONF and PYTORCH_NPU_ALLOC_CONF are both set, and torch-npu takes one of them: unset "
            "PYTORCH_NPU_ALLOC_CONF, or leave its option out",
        ),
    ],
)
def test_settings_that_exclude_each_other(clean: pytest.MonkeyPatch, settings: dict[str, str], said: str) -> None:
    for name, text in settings.items():
        environment.profile({})
        clean.setenv(name, text)
    with pytest.raises(ConfigError) as raised:
        environment.profile({})
    assert str(raised.value) == said
    clean.setenv("HCCL_INTRA_ROCE_ENABLE", "0")
    clean.delenv("PYTORCH_ALLOC_CONF", raising=False)
    environment.profile({})


def test_an_option_and_a_variable_may_exclude_each_other_too(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="are both set"):
        environment.profile({"npu_alloc_conf": "page_size:1g"})


# -- options -----------------------------------------------------------------------------------------------------------


def test_the_variables_names_are_aliases_of_the_options(caplog: pytest.LogCaptureFixture) -> None:
    given = {"TASK_QUEUE_ENABLE": 2, "hccl_connect_timeout": 600, "use_ascend_memory_pool": False}
    checked = check_options(AscendDescriptor(), given)
    assert (checked["task_queue_enable"], checked["hccl_connect_timeout"]) == (2, 600)
    assert checked["use_ascend_memory_pool"] is False and checked["npu_alloc_conf"] is None
    assert "backend option TASK_QUEUE_ENABLE is called task_queue_enable today" in caplog.text
    texts = ["hccl_exec_timeout=600", "use_ascend_memory_pool=off", "hccl_op_block_list=AllReduce"]
    assert parse_options(AscendDescriptor(), texts) == {
        "hccl_exec_timeout": 600,
        "use_ascend_memory_pool": False,
        "hccl_op_block_list": "AllReduce",
    }


def test_every_option_of_the_issue_is_there() -> None:
    named = {option.name: option for option in AscendDescriptor.options}
    wanted = "task_queue_enable hccl_op_block_list hccl_connect_timeout hccl_exec_timeout hccl_buffsize npu_alloc_conf"
    assert named.keys() >= {*wanted.split(), "use_ascend_memory_pool"}
    assert named["use_ascend_memory_pool"].default is True
    assert all(option.default is None for name, option in named.items() if name != "use_ascend_memory_pool")


@pytest.mark.parametrize(
    ("option", "wrong"), [("task_queue_enable", "2"), ("task_queue_enable", True), ("hccl_algo", 1)]
)
def test_an_option_of_another_type_is_refused(option: str, wrong: object) -> None:
    with pytest.raises(ConfigError, match=f"option '{option}' must be"):
        check_options(AscendDescriptor(), {option: wrong})


# -- setting them ------------------------------------------------------------------------------------------------------


def test_options_are_set_and_said_and_nothing_else_is(
    clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagedkv")
    before = dict(os.environ)
    clean.setattr(os, "environ", dict(before))
    environment.profile({"task_queue_enable": 2, "hccl_buffsize": 400, "hccl_algo": None}).apply()
    assert {name: os.environ[name] for name in os.environ.keys() - before.keys()} == {
        "TASK_QUEUE_ENABLE": "2",
        "HCCL_BUFFSIZE": "400",
    }
    assert [r.getMessage() for r in caplog.records] == [
        "TASK_QUEUE_ENABLE=2, set for the backend option task_queue_enable",
        "HCCL_BUFFSIZE=400, set for the backend option hccl_buffsize",
    ]


def test_the_users_own_value_stays_and_a_warning_says_so(
    clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clean.setenv("HCCL_CONNECT_TIMEOUT", "300")
    profile = environment.profile({"hccl_connect_timeout": 600})
    profile.apply()
    assert os.environ["HCCL_CONNECT_TIMEOUT"] == "300"
    assert value(profile, "HCCL_CONNECT_TIMEOUT") == ("300", "yours")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "WARNING",
            "HCCL_CONNECT_TIMEOUT=300 of your environment stays, the backend option hccl_connect_timeout=600 is left "
            "aside: unset HCCL_CONNECT_TIMEOUT, or leave the option out",
        )
    ]
    caplog.clear()
    environment.profile({"hccl_connect_timeout": 300}).apply()
    assert not caplog.records, "equal values are no trouble"


def test_what_an_option_set_is_not_taken_for_the_users(
    clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clean.setattr(os, "environ", dict(os.environ))
    environment.profile({"task_queue_enable": 2}).apply()
    assert value(environment.profile({}), "TASK_QUEUE_ENABLE") == ("2", environment.OURS)
    later = environment.profile({"task_queue_enable": 0})
    later.apply()
    assert os.environ["TASK_QUEUE_ENABLE"] == "2" and value(later, "TASK_QUEUE_ENABLE") == ("2", environment.OURS)
    assert (
        "TASK_QUEUE_ENABLE=2 of an earlier backend in this process stays, the backend option task_queue_enable=0 is "
        "left aside: start another process for it"
    ) in caplog.text


def test_too_late_is_said_of_what_is_read_at_import(
    clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clean.setattr(os, "environ", dict(os.environ))
    clean.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    environment.profile({"task_queue_enable": 2, "hccl_buffsize": 400}).apply()
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "TASK_QUEUE_ENABLE=2 comes too late: torch-npu reads it when it is loaded, and it is loaded already; set it "
        "before the process starts"
    ]


def test_u110_what_shapes_the_meeting_is_noted(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("HCCL_IF_IP", "10.0.0.9")
    clean.setenv("HCCL_CONNECT_TIMEOUT", "600")
    assert environment.collectives_note(3) == (
        "NPU 3, HCCL_IF_IP=10.0.0.9, HCCL_SOCKET_IFNAME=not set, HCCL_CONNECT_TIMEOUT=600, HCCL_EXEC_TIMEOUT=not set, "
        "ASCEND_RT_VISIBLE_DEVICES=not set"
    )
    assert environment.connect_timeout() == 600.0
    clean.delenv("HCCL_CONNECT_TIMEOUT")
    assert environment.connect_timeout() is None


@pytest.mark.parametrize(
    ("text", "on"),
    [("", False), ("expandable_segments:True", True), ("page_size:1g,expandable_segments:False", False)],
)
def test_expandable_segments(clean: pytest.MonkeyPatch, text: str, on: bool) -> None:
    clean.setenv("PYTORCH_NPU_ALLOC_CONF", text)
    assert environment.expandable_segments() is on

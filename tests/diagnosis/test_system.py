"""System, processor, memory and limits, read from folders that look like other machines."""

from __future__ import annotations

import pytest

from pagedkv.diagnosis import system
from tests.helpers.fake_machine import GIB, machine, meminfo

WSL1 = "4.4.0-19041-Microsoft\n"
WSL2 = "5.15.153.1-microsoft-standard-WSL2\n"


@pytest.mark.parametrize(("release", "version"), [(WSL1, 1), (WSL2, 2), ("6.8.0-generic\n", None)])
def test_the_windows_subsystem_is_known_by_its_kernel(tmp_path, release, version):
    facts = system.system(machine(tmp_path, {"proc/sys/kernel/osrelease": release}))
    assert (facts["wsl"], facts["release"]) == (version, release.strip())
    assert [finding.level for finding in system.system_findings(facts)] == (["warning"] if version == 1 else [])


@pytest.mark.parametrize(
    ("files", "container"),
    [
        ({}, None),
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({"proc/1/cgroup": "0::/kubepods/burstable/pod1\n"}, "kubepods"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, None),
    ],
)
def test_containers_are_known_by_what_their_makers_leave(tmp_path, files, container):
    assert system.system(machine(tmp_path, files))["container"] == container


def test_the_distribution_is_the_pretty_name(tmp_path):
    root = machine(tmp_path, {"etc/os-release": 'NAME=Fake\nPRETTY_NAME="Fake OS 7"\n'})
    assert system.system(root)["distribution"] == "Fake OS 7"


def test_instruction_sets_are_those_that_kernels_use(tmp_path):
    root = machine(tmp_path, {"proc/cpuinfo": "model name : Fast One\nflags : fpu avx2 fma f16c nonsense\n"})
    facts = system.processor(root)
    assert (facts["name"], facts["instructions"], facts["quota"]) == ("Fast One", ["avx2", "fma", "f16c"], None)


@pytest.mark.parametrize(
    "files",
    [
        {"sys/fs/cgroup/cpu.max": "150000 100000"},
        {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/x": "", "sys/fs/cgroup/a/cpu.max": "150000 100000"},
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/job",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
        },
    ],
    ids=["own group", "above", "version 1"],
)
def test_a_quota_is_found_in_every_form(tmp_path, files):
    facts = system.processor(machine(tmp_path, files))
    assert facts["quota"] == 1.5
    facts |= {"cores": 8, "affinity": 4}
    cut, quota = system.processor_findings(facts, "docker")
    assert "4 of 8 cores" in cut.what and cut.level == quota.level == "note"
    assert quota.command == "docker update --cpus 8 CONTAINER"


def test_no_quota_is_no_finding(tmp_path):
    facts = system.processor(machine(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000"}))
    assert facts["quota"] is None
    assert list(system.processor_findings(facts | {"affinity": facts["cores"]})) == []


@pytest.mark.parametrize(
    "files",
    [
        {
            "sys/fs/cgroup/memory.max": str(4 * GIB),
            "sys/fs/cgroup/memory.current": str(3 * GIB),
            "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        },
        {
            "proc/self/cgroup": "7:memory:/job",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(3 * GIB),
            "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(1 << 62),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
        },
    ],
    ids=["version 2", "version 1"],
)
def test_the_limit_of_a_control_group_is_what_can_be_used(tmp_path, files):
    facts = system.memory(machine(tmp_path, {"proc/meminfo": meminfo(64, 40, swap=2), **files}))
    assert facts == {
        "total": 64 * GIB,
        "available": 40 * GIB,
        "swap_total": 2 * GIB,
        "swap_used": 2 * GIB,
        "cgroup_limit": 4 * GIB,
        "cgroup_left": 2 * GIB,  # 4 - 3 used, 1 of them file pages that the kernel drops first
        "usable": 2 * GIB,
    }
    (limit,) = system.memory_findings(facts)
    assert limit.level == "note" and "4.0 GiB of 64.0 GiB" in limit.what


def test_shortage_is_said_as_shortage_with_who_can_end_it(tmp_path):
    root = machine(tmp_path / "a", {"proc/meminfo": meminfo(64, 0.25)})
    (short,) = system.memory_findings(system.memory(root))
    assert short.level == "warning" and "256.0 MiB of 64.0 GiB" in short.what and short.command.startswith("ps ")
    group = {"memory.max": str(2 * GIB), "memory.current": str(2 * GIB - 1024)}
    files = {f"sys/fs/cgroup/{name}": text for name, text in group.items()}
    root = machine(tmp_path / "b", {"proc/meminfo": meminfo(64, 40), **files})
    commands = {
        "docker": "docker update --memory SIZE CONTAINER",
        "podman": "podman update --memory SIZE CONTAINER",
        "kubepods": "kubectl set resources deployment NAME --limits=memory=SIZE",
        None: "sudo systemctl set-property UNIT MemoryMax=SIZE",
    }
    for container, command in commands.items():
        first, _ = system.memory_findings(system.memory(root), container)
        assert first.command == command and "1.0 KiB of the 2.0 GiB of its control group" in first.what


def test_memory_that_nobody_tells_is_unknown(tmp_path):
    facts = system.memory(tmp_path)
    assert set(facts.values()) == {None} and list(system.memory_findings(facts)) == []


@pytest.mark.parametrize(
    ("facts", "pins", "said"),
    [
        ({}, True, []),
        ({"open_files": 256}, False, [("warning", "ulimit -n 4096")]),
        ({"address_space": 4 * GIB}, False, [("warning", "ulimit -v unlimited")]),
        ({"locked_memory": 65536}, False, []),
        ({"locked_memory": 65536}, True, [("note", "ulimit -l unlimited")]),
    ],
)
def test_limits_that_will_be_hit(facts, pins, said):
    unlimited = {"open_files": None, "address_space": None, "locked_memory": None}
    found = list(system.limit_findings(unlimited | facts, 64 * GIB, pins))
    assert [(finding.level, finding.command) for finding in found] == said


def test_the_limits_of_this_process_are_the_shells():
    resource = pytest.importorskip("resource")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert system.limits()["open_files"] == (None if soft == resource.RLIM_INFINITY else soft)

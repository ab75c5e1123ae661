"""Which GPUs CUDA would see, what the table of generations says of them, and which built code runs there."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedkv_cuda import limits
from pagedkv_cuda.devices import VISIBLE, Gpu, available, has_driver, is_tegra, is_wsl, visible


def gpu(number, *, uuid=None, mig=False, mig_parent=False):
    """An H100, or a slice of one."""
    return Gpu(
        number=number,
        name="NVIDIA H100",
        uuid=uuid or f"GPU-{number}{number}-aa",
        capability=(9, 0),
        total=80 << 30,
        free=79 << 30,
        mig=mig,
        mig_parent=mig_parent,
    )


PLAIN = [gpu(0), gpu(1), gpu(2, uuid="GPU-2b-aa"), gpu(3, uuid="GPU-2c-aa")]
SLICED = [
    gpu(0, mig_parent=True),
    gpu(0, uuid="MIG-a1", mig=True),
    gpu(0, uuid="MIG-a2", mig=True),
    gpu(1),
]


@pytest.mark.parametrize(
    ("variable", "numbers"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , 3", [1, 3]),
        ("1,9,0", [1]),  # the first unknown entry ends the list
        ("-1,0", []),
        ("0,0,1", []),  # one that is named twice empties it
        ("0,9,9", []),
        ("1 of 4,+2", [1, 2]),  # a number is read as far as it goes
        ("2,GPU-11", [2]),  # kinds do not mix
        ("GPU-11", [1]),
        ("GPU-2b,GPU-2c-aa", [2, 3]),
        ("GPU-2", []),  # two begin with it
        ("GPU-11,GPU-11-aa", []),  # the same twice
        ("GPU-11,3", [1]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices(variable, numbers):
    assert [one.number for one in visible(PLAIN, variable)] == numbers


ENTRIES = st.sampled_from(
    ["0", "1", "3", " 2 ", "9", "-1", "+1", "2x", "x", "", "GPU-00", "GPU-11-aa", "GPU-2b", "GPU-2", "GPU-9", "MIG-a1"]
)


@given(st.lists(ENTRIES, max_size=4).map(",".join))
def test_torch_reads_the_variable_the_same_way(variable):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VISIBLE, variable)
        parsed = torch.cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        parsed = torch.cuda._transform_uuid_to_ordinals(parsed, [one.uuid for one in PLAIN])
    seen = list(itertools.takewhile(lambda number: number < len(PLAIN), parsed))
    assert [one.number for one in visible(PLAIN, variable)] == seen


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, ["MIG-a1"]),  # one slice at most, and no whole GPU beside it
        ("MIG-a2", ["MIG-a2"]),
        ("MIG-a2,MIG-a1", ["MIG-a2"]),
        ("0", ["MIG-a1"]),
        ("1", ["GPU-11-aa"]),
        ("GPU-00-aa", ["MIG-a1"]),
        ("GPU-11-aa", ["GPU-11-aa"]),
        ("MIG-", []),  # two begin with it
        ("", []),
    ],
)
def test_slices_of_a_gpu_in_mig_mode(variable, uuids):
    assert [one.uuid for one in visible(SLICED, variable)] == uuids


def test_gpus_whose_uuids_are_not_told_are_numbered_all_the_same():
    silent = [gpu(number, uuid="?") for number in range(3)]
    assert [one.number for one in visible(silent, "2,0")] == [2, 0]


@pytest.mark.parametrize(
    ("capability", "name", "score"),
    [
        ((7, 0), None, 0),
        ((7, 5), "Turing", 10),
        ((8, 0), "Ampere", 80),
        ((8, 6), "Ampere", 80),
        ((8, 7), "Ampere", 50),
        ((8, 9), "Ada", 80),
        ((9, 0), "Hopper", 80),
        ((10, 0), "Blackwell", 80),
        ((10, 3), "Blackwell", 50),
        ((12, 0), "Blackwell", 80),
        ((13, 0), "Blackwell", 50),
    ],
)
def test_the_table_of_generations(capability, name, score):
    found = limits.generation(capability)
    assert (None if found is None else found.name, limits.score(capability)) == (name, score)


def test_bf16_starts_with_ampere_and_every_row_has_advice():
    for row in limits.generations():
        assert ("bf16" in row.dtypes) == row.triton == (row.capabilities[0] >= (8, 0)), row
        assert row.advice and set(row.native_dtypes) <= set(row.dtypes)
        assert bool(row.why_not) != row.triton


BUILT = ["sm_80", "sm_86", "sm_89"]


@pytest.mark.parametrize(
    ("capability", "built", "tegra", "runs"),
    [
        ((8, 7), BUILT, False, True),
        ((8, 7), BUILT, True, False),  # no binary compatibility on Tegra
        ((8, 7), [*BUILT, "sm_87"], True, True),
        ((8, 7), [*BUILT, "compute_80"], True, True),
        ((9, 0), BUILT, False, False),
        ((9, 0), ["sm_90a"], False, True),
        ((10, 0), ["sm_90a", "sm_100a"], False, True),
        ((10, 3), ["sm_90a", "sm_100a"], False, False),
        ((12, 1), ["sm_120"], False, True),
        ((8, 0), ["sm_86"], False, False),
        ((10, 3), ["sm_100f"], False, True),  # a family
        ((12, 1), ["sm_120f"], False, True),
        ((12, 0), ["compute_100f"], False, False),
        ((13, 0), ["sm_120", "compute_120"], False, True),  # PTX runs on every later one
        ((9, 0), ["compute_80"], False, True),
        ((7, 5), [], False, False),
    ],
)
def test_u104_built_code_and_capability(capability, built, tegra, runs):
    assert limits.runs_on(capability, built, tegra=tegra) is runs


def test_the_machine_is_told_by_its_files(tmp_path):
    assert not (is_tegra(tmp_path) or is_wsl(tmp_path) or has_driver(tmp_path)) and available(tmp_path) is None
    for name, content in {
        "proc/device-tree/compatible": b"nvidia,p3767-0005\0nvidia,tegra234\0",
        "proc/version": b"Linux version 6.6.36.6-microsoft-standard-WSL2",
        "proc/driver/nvidia/version": b"NVRM version",
        "proc/meminfo": b"MemTotal:  1000 kB\nMemAvailable:    600 kB\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert is_tegra(tmp_path) and is_wsl(tmp_path) and has_driver(tmp_path)
    assert available(tmp_path) == 600 * 1024

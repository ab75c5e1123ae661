"""NPUs as the driver's library lists them, and as ASCEND_RT_VISIBLE_DEVICES leaves them; the library is dcmi.c."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv_ascend import devices
from pagedkv_ascend.devices import DriverMissing, Npu
from tests.backends.ascend import machine

GIB = 1 << 30


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return machine.driver(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return machine.driver(tmp_path_factory.mktemp("old"), "-DOLD")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    machine.bare(monkeypatch)
    return monkeypatch


# -- the list ----------------------------------------------------------------------------------------------------------


def test_npus_come_by_logical_number_with_chip_and_memory(root: Path, fake: pytest.MonkeyPatch) -> None:
    first = Npu(number=0, chip="910B3", total=64 * GIB, free=60 * GIB)
    assert devices.every(root) == [first, Npu(number=1, chip="910B3", total=64 * GIB, free=60 * GIB)]
    fake.setenv("FAKE_DEVICES", "2")
    assert [npu.number for npu in devices.every(root)] == [0, 1, 2, 3], "two chips on a card, as Atlas A3 has them"


@pytest.mark.parametrize(
    ("name", "npu_name", "chip"),
    [
        ("910B3", "", "910B3"),
        ("Ascend910B4-1", "NA", "910B4-1"),
        ("Ascend910", "9392", "910_9392"),
        ("310P3", "310P3", "310P3"),
        ("910", "910_9362", "910_9362"),
        ("", "", ""),
    ],
)
def test_the_chips_name(root: Path, fake: pytest.MonkeyPatch, name: str, npu_name: str, chip: str) -> None:
    fake.setenv("FAKE_CHIP", name)
    fake.setenv("FAKE_NPU_NAME", npu_name)
    assert devices.every(root)[0].chip == chip


def test_older_drivers_have_other_functions(old: Path, root: Path, fake: pytest.MonkeyPatch) -> None:
    assert [npu.chip for npu in devices.every(old)] == ["910B3", "910B3"]
    fake.setenv("FAKE_NO_V2", "1")
    assert [npu.chip for npu in devices.every(root)] == ["910B3", "910B3"]


@pytest.mark.parametrize(
    ("size", "used", "answers", "memory"),
    [
        ("65536", "65536", "0", (64 * GIB, 0)),
        ("65536", "70000", "0", (64 * GIB, 0)),
        ("0", "0", "0", (None, None)),
        ("0", "4096", "0", (None, None)),
        ("65536", "0", "-8255", (None, None)),
    ],
)
def test_u113_no_size_is_negative_and_zero_is_unknown(
    root: Path, fake: pytest.MonkeyPatch, size: str, used: str, answers: str, memory: tuple[int | None, int | None]
) -> None:
    fake.setenv("FAKE_SIZE", size)
    fake.setenv("FAKE_USED", used)
    fake.setenv("FAKE_MEMORY", answers)
    npu = devices.every(root)[0]
    assert (npu.total, npu.free) == memory


@pytest.mark.parametrize(
    ("at", "number", "words"),
    [
        ("num", None, "card 11: the driver answers dcmi_get_device_num_in_card with -8008, no such device"),
        ("id", None, "card 11, device 0: the driver answers dcmi_get_device_logic_id with -8008"),
        ("chip", 0, "the driver answers dcmi_get_device_chip_info with -8008, no such device: start the container"),
    ],
)
def test_one_that_is_lost_leaves_the_others(
    root: Path, fake: pytest.MonkeyPatch, at: str, number: int | None, words: str
) -> None:
    fake.setenv("FAKE_LOST", "11")
    fake.setenv("FAKE_LOST_AT", at)
    found = {npu.number: npu for npu in devices.every(root)}
    assert found.keys() == {1, number}
    assert found[number].against.startswith(words) and found[1].against == ""


@pytest.mark.parametrize(("said", "numbers"), [("0", [0, None]), ("-1", [None, None])])
def test_numbers_that_cannot_be_are_no_numbers(
    root: Path, fake: pytest.MonkeyPatch, said: str, numbers: list[int | None]
) -> None:
    fake.setenv("FAKE_ID", said)
    found = devices.every(root)
    assert [npu.number for npu in found] == numbers
    assert f"gives it number {said}, which cannot be its own" in found[-1].against


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("-8002", "with -8002, not permitted: run as root or as a member of the driver's group"),
        ("-8009", "with -8009, no answer of the device: start the container with /dev/davinci_manager in it"),
        ("-8005", "with -8005: look at npu-smi info"),
    ],
)
def test_a_driver_that_refuses_says_what_to_do(root: Path, fake: pytest.MonkeyPatch, code: str, words: str) -> None:
    fake.setenv("FAKE_INIT", code)
    with pytest.raises(DriverMissing, match="dcmi_init") as raised:
        devices.every(root)
    assert words in str(raised.value)


@pytest.mark.parametrize("count", ["0", "-3"])
def test_no_cards(root: Path, fake: pytest.MonkeyPatch, count: str) -> None:
    fake.setenv("FAKE_CARDS", count)
    assert devices.every(root) == []


def test_more_cards_than_there_is_room_for_are_as_many_as_there_is(root: Path, fake: pytest.MonkeyPatch) -> None:
    fake.setenv("FAKE_CARDS", "100")
    assert len(devices.every(root)) == devices.MOST


def test_a_library_that_is_none(tmp_path: Path, fake: pytest.MonkeyPatch) -> None:
    with pytest.raises(DriverMissing, match=r"libdcmi\.so.*install the driver, or start the container with"):
        devices.every(tmp_path)
    library = tmp_path / machine.DRIVER / "libdcmi.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")
    with pytest.raises(DriverMissing, match=r"usr/local/dcmi/libdcmi\.so: .*install the driver"):
        devices.every(tmp_path)


def test_a_library_that_lacks_a_function(tmp_path: Path, fake: pytest.MonkeyPatch) -> None:
    with pytest.raises(DriverMissing, match=r"^the driver's libdcmi\.so has no dcmi_init: update the NPU driver$"):
        devices.every(machine.driver(tmp_path, "-DEMPTY"))


def test_signs_of_a_driver(tmp_path: Path) -> None:
    assert not devices.installed(tmp_path) and devices.nodes(tmp_path) == []
    (tmp_path / "dev").mkdir()
    for name in ("davinci10", "davinci2", "davinci_manager"):
        (tmp_path / "dev" / name).touch()
    assert devices.installed(tmp_path) and devices.nodes(tmp_path) == [2, 10]


# -- the variable ------------------------------------------------------------------------------------------------------

FOUR = [Npu(number=number, chip="910B3") for number in (0, 1, 2, 5)]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [(None, [0, 1, 2, 5]), ("1", [1]), ("0,1,2,5", [0, 1, 2, 5]), ("2,5", [2, 5]), ("02", [2])],
)
def test_which_npus_are_left(fake: pytest.MonkeyPatch, text: str | None, numbers: list[int]) -> None:
    if text is not None:
        fake.setenv("ASCEND_RT_VISIBLE_DEVICES", text)
    assert [npu.number for npu in devices.visible(FOUR)] == numbers


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0,3", "there is no NPU 3, there are 0, 1, 2, 5"),
        ("3,4,7", "there is no NPU 3, 4, 7, there are 0, 1, 2, 5"),
        ("1,1", "it names 1 twice, each rank needs an NPU of its own"),
        ("2,1", "its numbers must ascend, CANN knows no other order"),
        ("0, 1", "' 1' is no number of an NPU, it is a list like 0,1,3 without blanks or ranges"),
        ("0-2", "'0-2' is no number of an NPU, it is a list like 0,1,3 without blanks or ranges"),
        ("npu0", "'npu0' is no number of an NPU, it is a list like 0,1,3 without blanks or ranges"),
        ("0,-1,2", "'-1' is no number of an NPU, it is a list like 0,1,3 without blanks or ranges"),
        ("0,,2", "an empty item is no number of an NPU, it is a list like 0,1,3 without blanks or ranges"),
        ("0,", "an empty item is no number of an NPU, it is a list like 0,1,3 without blanks or ranges"),
        ("٣", "'٣' is no number of an NPU, it is a list like 0,1,3 without blanks or ranges"),
        ("", "it names no NPU"),
    ],
)
def test_what_is_wrong_with_a_list_is_one_line(fake: pytest.MonkeyPatch, text: str, why: str) -> None:
    fake.setenv("ASCEND_RT_VISIBLE_DEVICES", text)
    with pytest.raises(ValueError) as raised:
        devices.visible(FOUR)
    said = f"ASCEND_RT_VISIBLE_DEVICES={text!r}: {why}; unset ASCEND_RT_VISIBLE_DEVICES, or correct it"
    assert str(raised.value) == said


def test_of_one_npu_the_line_is_in_the_singular(fake: pytest.MonkeyPatch) -> None:
    fake.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    with pytest.raises(ValueError, match="there is no NPU 1, there is 0;"):
        devices.visible(FOUR[:1])


def as_the_vendor_reads(text: str, there: set[int]) -> list[int]:
    """CANN's page: numbers up to the first other character or number that is not there; nothing is said."""
    found: list[int] = []
    for item in text.split(","):
        if not (item.isascii() and item.isdigit()) or int(item) not in there:
            break
        found.append(int(item))
    return found


@given(st.text(alphabet="0125, -x", max_size=8))
def test_a_list_that_is_accepted_means_to_the_vendor_what_it_means_here(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_RT_VISIBLE_DEVICES", text)
        assert os.environ["ASCEND_RT_VISIBLE_DEVICES"] == text
        try:
            found = [npu.number for npu in devices.visible(FOUR)]
        except ValueError:
            return
    assert found == as_the_vendor_reads(text, {0, 1, 2, 5}) == sorted(set(found))

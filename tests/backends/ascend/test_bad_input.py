"""Everything that can be wrong with a machine, a model or a setting for the Ascend backend: one line, by each way.

The machine is a folder with the stand-in for the driver's library and empty files for CANN's; which packages it has is
told to `pagedkv_ascend.packages`, here and, by a `sitecustomize`, in the processes that probes and doctor start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pagedkv import LLM, plugins
from pagedkv.api import DeviceInfo, LayerSpec
from pagedkv.api.errors import BackendUnavailable, ConfigError, UnsupportedError
from pagedkv.cli.main import pagedkv
from pagedkv.core.negotiation import Requirements, negotiate
from pagedkv.diagnosis.findings import command_in
from pagedkv_ascend.capabilities import SOFTCAP
from pagedkv_ascend.descriptor import AscendDescriptor
from tests.backends.ascend import machine
from tests.helpers.tiny_models import FAMILIES

SITE = """
import json, os
from pathlib import Path
from pagedkv_ascend import packages
from pagedkv_ascend.descriptor import AscendDescriptor
AscendDescriptor.__init__.__defaults__ = (Path(os.environ["FAKE_ROOT"]),)
packages.version = json.loads(os.environ["FAKE_PACKAGES"]).get
packages.torch_toolkit = lambda: None
"""
NPU = "Ascend910B3, Atlas A2"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
CORRECT = f"unset {VISIBLE}, or correct it"
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LIST = "is no number of an NPU, it is a list like 0,1,3 without blanks or ranges"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A machine, the one line that is said of it, and the command in it; {root}: of the machine."""

    said: str
    command: str = ""
    kind: str = NPU
    toolkit: str | None = None
    packages: Mapping[str, str] = field(default_factory=lambda: machine.GOOD)
    variables: Mapping[str, str] = field(default_factory=dict)
    sourced: bool = True


def devices(text: str, why: str) -> Row:
    """A list of visible devices and what is wrong with it."""
    said = f"{VISIBLE}={text!r}: {why}; {CORRECT}"
    return Row(said=said, command=f"unset {VISIBLE}", kind="none visible", variables={VISIBLE: text})


ROWS = {
    "no-torch-npu": Row(
        said="torch-npu is not installed: pip install '.[ascend]' in the clone",
        command="pip install '.[ascend]'",
        packages={"torch": "2.13.0"},
    ),
    "torch-of-another-release": Row(
        said="torch-npu 2.13.0 is made for torch 2.13, torch 2.14.1 is installed: pip install 'torch==2.13.*', or a "
        "torch-npu 2.14",
        command="pip install 'torch==2.13.*'",
        packages={"torch": "2.14.1", "torch-npu": "2.13.0"},
    ),
    "torch-with-another-accelerator": Row(
        said="torch 2.13.0+cu130 is built with cuda 13.0, beside which torch-npu does not load: install in its place "
        "the build of torch 2.13 for processors alone, whose version ends in +cpu",
        toolkit="cuda 13.0",
        packages={"torch": "2.13.0+cu130", "torch-npu": "2.13.0"},
    ),
    "both-tritons": Row(
        said="triton and triton-ascend overwrite each other's files: pip uninstall -y triton triton-ascend, and "
        "install again the one that is needed, this backend needs neither",
        command="pip uninstall -y triton triton-ascend",
        packages={**machine.GOOD, "triton": "3.9.0", "triton-ascend": "3.2.0"},
    ),
    "cann-not-on-the-path": Row(
        said="torch-npu needs libhccl.so, and {root}/usr/local/Ascend/cann/lib64 is not on the library path: source "
        "{root}/usr/local/Ascend/cann/set_env.sh",
        command="source {root}/usr/local/Ascend/cann/set_env.sh",
        sourced=False,
    ),
    "cann-elsewhere": Row(
        said="ASCEND_HOME_PATH=/gone is no folder: unset ASCEND_HOME_PATH, then source "
        "{root}/usr/local/Ascend/cann/set_env.sh",
        command="unset ASCEND_HOME_PATH",
        variables={"ASCEND_HOME_PATH": "/gone"},
    ),
    "chip-without-the-operator": Row(
        said="the Atlas inference series has no npu_fused_infer_attention_score: choose backend cpu",
        kind="Ascend310P3, Atlas inference series",
        variables={"FAKE_CHIP": "310P3"},
    ),
    "driver-does-not-answer": Row(
        said="the driver answers dcmi_init with -8009, no answer of the device: start the container with "
        "/dev/davinci_manager in it, or reset the NPU",
        kind="no NPU can be asked",
        variables={"FAKE_INIT": "-8009"},
    ),
    "no-npu": Row(said="the driver lists no NPU: look at npu-smi info", kind="no NPU", variables={"FAKE_CARDS": "0"}),
    "devices-with-gaps": devices("0,3", "there is no NPU 3, there are 0, 1"),
    "devices-twice": devices("0,0", "it names 0 twice, each rank needs an NPU of its own"),
    "devices-in-words": devices("npu0", f"'npu0' {LIST}"),
    "devices-as-a-range": devices("0-1", f"'0-1' {LIST}"),
    "devices-with-blanks": devices("0, 1", f"' 1' {LIST}"),
    "devices-descending": devices("1,0", "its numbers must ascend, CANN knows no other order"),
    "devices-with-an-empty-item": devices("0,,1", f"an empty item {LIST}"),
    "no-devices": devices("", "it names no NPU"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = machine.driver(tmp_path_factory.mktemp("machine"))
    machine.cann(folder)
    return folder


@pytest.fixture
def on(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Goes to a machine: what follows sees it, in this process and in those it starts."""

    def go(row: Row) -> str:
        machine.bare(monkeypatch)
        if row.sourced:
            machine.sourced(root / machine.CANN, monkeypatch)
        for name, text in row.variables.items():
            monkeypatch.setenv(name, text)
        monkeypatch.setattr(AscendDescriptor.__init__, "__defaults__", (root,))
        machine.installed(monkeypatch, row.toolkit, **row.packages)
        (tmp_path / "sitecustomize.py").write_text(SITE)
        told = {"FAKE_ROOT": str(root), "FAKE_PACKAGES": json.dumps(row.packages), "PYTHONPATH": str(tmp_path)}
        for name, text in told.items():
            monkeypatch.setenv(name, text)
        return row.said.format(root=root)

    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    return go


GOOD = Row(said="native, Atlas A2")


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_each_machine_has_its_line(on: Any, root: Path, row: Row) -> None:
    said = on(row)
    assert command_in(said) == row.command.format(root=root)
    with pytest.raises(BackendUnavailable) as raised:
        plugins.select("ascend")
    head = f"backend 'ascend' (pagedkv 0.1.0), chosen by argument, cannot be used: device 0 ({row.kind}): {said}"
    assert str(raised.value).split("; device 1 ")[0] == head
    assert "\n" not in str(raised.value)


def test_u108_cann_without_a_library(on: Any, root: Path) -> None:
    on(GOOD)
    library = root / machine.CANN / "lib64/libgraph.so"
    library.rename(library.with_suffix(".away"))
    try:
        with pytest.raises(BackendUnavailable) as raised:
            plugins.select("ascend")
    finally:
        library.with_suffix(".away").rename(library)
    home = root / machine.CANN
    assert (
        f"CANN 9.1.0 in {home} is without libgraph.so, which torch-npu needs: install the whole toolkit of CANN, then "
        f"source {home}/set_env.sh"
    ) in str(raised.value)


def test_nothing_is_wrong(on: Any) -> None:
    said = on(GOOD)
    chosen = plugins.select("ascend")
    assert (chosen.device.kind, chosen.device.score, chosen.device.reason) == (NPU, 80, said)


# -- settings and models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"block_size": 24},
            "backend ascend does not support block_size=24; accepted: multiples of 16 from 16 to 512; leave it unset "
            "for 32",
        ),
        ({"dtype": "float32"}, "backend ascend does not support dtype='fp32'; accepted: bf16, fp16"),
    ],
)
def test_settings_are_refused_before_a_file_is_opened(on: Any, settings: dict[str, Any], said: str) -> None:
    on(GOOD)
    with pytest.raises(UnsupportedError) as raised:
        LLM("nowhere", backend="ascend", skip_tokenizer_init=True, **settings)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("settings", "pattern", "reason"),
    [
        ({}, "feature=softcap", SOFTCAP),
        (
            {"kv_cache_dtype": "float16"},
            "dtype=bf16, kv_dtype=fp16",
            "the operators read a cache of the queries' dtype",
        ),
    ],
)
def test_what_a_model_cannot_do_here_is_said_with_the_reason(
    on: Any, tmp_path: Path, settings: dict[str, Any], pattern: str, reason: str
) -> None:
    on(GOOD)
    given = {"backend": "ascend", "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True}
    with pytest.raises(UnsupportedError) as raised:
        LLM(str(softcapped(tmp_path)), **given, **settings)
    said = f"backend ascend excludes the combination {pattern}: {reason}; change one of them"
    assert said in raised.value.reasons


def softcapped(home: Path) -> Path:
    """A model with a softcap, by its configuration alone."""
    (home / "config.json").write_text(json.dumps({**SHAPE, **FAMILIES["gemma2"]}))
    return home


@pytest.mark.parametrize("kind", ["Ascend310P3, Atlas inference series", "Ascend910A, Atlas training series"])
def test_u115_a_chip_without_bf16_converts_by_itself_and_refuses_it_by_name(kind: str) -> None:
    """By what `describe` offers: no instance opens on these chips."""
    can = AscendDescriptor().describe(DeviceInfo.of(index=0, kind=kind))
    layers = (LayerSpec(index=0, q_heads=8, kv_heads=2, k_dim=64, v_dim=64, scale=0.125),)
    choice = negotiate(can, Requirements(layers=layers, checkpoint_dtype="bf16"), backend="ascend")
    said = "dtype fp16: the checkpoint's bf16 is not available on ascend, so the preferred one of ascend"
    assert (choice.dtype, choice.block_size) == ("fp16", 32) and said in choice.notes
    with pytest.raises(UnsupportedError) as raised:
        negotiate(can, Requirements(layers=layers, dtype="bf16"), backend="ascend")
    assert raised.value.reasons[0] == "backend ascend does not support dtype='bf16'; accepted: fp16"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task_queue_enable": 3}, "backend option task_queue_enable=3: it is 0, 1 or 2; correct it, or leave it out"),
        ({"hccl_buffsize": 0}, "backend option hccl_buffsize=0: it is 1 or more; correct it, or leave it out"),
        (
            {"npu_alloc_conf": "expandable_segments:True,max_split_size_mb:64"},
            "backend option npu_alloc_conf='expandable_segments:True,max_split_size_mb:64': expandable_segments:True "
            "excludes max_split_size_mb; correct it, or leave it out",
        ),
    ],
)
def test_options_are_refused_before_torch_npu_is_loaded(on: Any, options: dict[str, Any], said: str) -> None:
    on(GOOD)
    with pytest.raises(ConfigError) as raised:
        plugins.create(plugins.select("ascend"), options)
    assert str(raised.value) == said


# -- the commands ------------------------------------------------------------------------------------------------------


def test_backends_says_the_line_of_the_machine_and_every_one_of_the_model(on: Any) -> None:
    on(GOOD)
    wanted = ["--model", "demo", "--block-size", "24", "--dtype", "float32"]
    result = CliRunner().invoke(pagedkv, ["backends", "--json", *wanted])
    (found,) = [one for one in json.loads(result.stdout) if one["name"] == "ascend"]
    assert (found["status"], found["score"], found["devices"][0]["reason"]) == ("ok", 80, "native, Atlas A2")
    assert found["model"]["reasons"] == [
        "backend ascend does not support dtype='fp32'; accepted: bf16, fp16",
        "backend ascend does not support block_size=24; accepted: multiples of 16 from 16 to 512; leave it unset for "
        "32",
    ]


def test_doctor_says_the_line_and_what_mends_it(on: Any) -> None:
    row = ROWS["cann-not-on-the-path"]
    on(row)
    result = CliRunner().invoke(pagedkv, ["doctor", "--backend", "ascend", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 2 and report["choice"]["backend"] is None
    first = report["findings"][0]
    assert (first["level"], first["what"]) == ("broken", "backend ascend cannot be used")
    assert "torch-npu needs libhccl.so, and" in first["why"]
    assert first["command"].startswith("source ") and first["command"].endswith("set_env.sh")
    (shown,) = [one["diagnose"] for one in report["backends"]]
    assert shown["NPU 0"] == f"{NPU}, 60.0 GiB free of 64.0 GiB" and "libhccl.so" in shown["change"]

#!/usr/bin/env python3
"""What torch-npu's own wheels say, with no NPU and no CANN at hand: `make ascend-check`.

    schemas    every operator that the Ascend backend calls or plans for, as the libraries in the wheels spell it,
               against tests/backends/ascend/schemas; --refresh writes those files anew
    wheel      the wheel itself, imported over stub libraries: its schemas, and the shapes that its own functions give
               for the calls that the backend makes
    extra      whether pip finds a set of packages for pagedkv[ascend]
    all        the three

Nothing of Ascend runs here: names, types and shapes are checked, never numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "backends" / "ascend" / "schemas"
BUILD = ROOT / "build" / "ascend"
VERSIONS = ("2.10.0.post4", "2.13.0", "2.14.0")
IMPORTED = "2.13.0"
"""The version that is imported: that of the torch which the tests run with."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OPERATORS = (
    "npu::npu_fused_infer_attention_score",
    "npu::npu_fused_infer_attention_score_v2",
    "npu::_npu_fused_infer_attention_score_get_max_workspace",
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace",
    "npu::npu_scatter_pa_kv_cache",
    "npu::npu_scatter_pa_cache",
    "npu::npu_gather_pa_kv_cache",
    "npu::npu_incre_flash_attention",
    "npu::npu_prompt_flash_attention",
    "npu::npu_attention_update",
    "npu::npu_quantize",
    "npu::npu_dynamic_quant",
    "npu::npu_quant_scatter_",
    "npu::npu_rms_norm",
    "npu::npu_rotary_mul",
    "npu::npu_swiglu",
    "atb::_npu_reshape_and_cache",
    "atb::_npu_reshape_and_cache_siso",
    "atb::_npu_paged_attention",
    "atb::_npu_paged_attention_get_workspace",
    "atb::_npu_paged_attention_v2",
    "atb::_npu_paged_attention_splitfuse",
    "atb::npu_paged_cache_load",
)
"""What is called, and what facts about Ascend were written down for: a change of either is worth a look."""
LIBRARIES = {"npu": "torch_npu/lib/libtorch_npu.so", "atb": "torch_npu/lib/libop_plugin_atb.so"}
MACHINE = "manylinux_2_28_aarch64"
"""Whose libraries hold every schema as one string; compilers for x86-64 cut some into instructions."""
TEXT = re.compile(rb"(?<=\0)_?npu_\w+(?:\.\w+)?\([^\0]*\) -> [^\0]+(?=\0)")


# -- schemas -----------------------------------------------------------------------------------------------------------


def fetch(version: str, machine: str, seconds: float = 300) -> Path:
    """The wheel of a version for a machine, downloaded once; `subprocess` errors where it cannot be had."""
    folder = BUILD / "wheels"
    if found := sorted(folder.glob(f"torch_npu-{version}-*{machine}.whl")):
        return found[0]
    command = [*PIP, "download", "-q", "--no-deps", "--only-binary=:all:", "--platform", machine]
    command += ["--python-version", "3.11", "-d", str(folder), f"torch-npu=={version}"]
    subprocess.run(command, check=True, timeout=seconds)
    return next(folder.glob(f"torch_npu-{version}-*{machine}.whl"))


def schemas(wheel: Path) -> list[str]:
    """The schema of each of OPERATORS with all its overloads, sorted, as torch spells them."""
    found = set()
    with zipfile.ZipFile(wheel) as archive:
        for namespace, library in LIBRARIES.items():
            texts = (f"{namespace}::{text.decode()}" for text in TEXT.findall(archive.read(library)))
            found |= {str(torch._C.parse_schema(text)) for text in texts if re.split(r"[.(]", text)[0] in OPERATORS}
    return sorted(found)


def written(version: str, lines: Iterable[str]) -> str:
    """The text of a fixture."""
    head = f"# torch-npu {version}: schemas in the libraries of its wheel, by `ci/ascend.py schemas --refresh`\n"
    return head + "".join(f"{line}\n" for line in lines)


def check_schemas(refresh: bool) -> list[str]:
    """Write the fixtures, or say what differs from them."""
    wrong = []
    for version in VERSIONS:
        text, path = written(version, schemas(fetch(version, MACHINE))), FIXTURES / f"{version}.txt"
        if refresh:
            path.write_text(text, "utf-8")
        elif path.read_text("utf-8") != text:
            old, new = set(path.read_text("utf-8").splitlines()), set(text.splitlines())
            wrong += [f"{version}: only in the wheel: {line}" for line in sorted(new - old)]
            wrong += [f"{version}: only in {path.name}: {line}" for line in sorted(old - new)]
        print(f"schemas  {version:13}  {len(text.splitlines()) - 1} schemas")
    return wrong


# -- the wheel ---------------------------------------------------------------------------------------------------------


def unpacked(version: str, seconds: float = 300) -> Path:
    """A folder with the wheel for this machine and nothing else; `subprocess` errors where it cannot be had."""
    folder = BUILD / version
    if not folder.is_dir():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as fresh:
            command = [*PIP, "install", "-q", "--no-deps", "--only-binary=:all:", "--target", f"{fresh}/wheel"]
            subprocess.run([*command, f"torch-npu=={version}"], check=True, timeout=seconds)
            shutil.move(f"{fresh}/wheel", folder)
    return folder


def probed(version: str, fixture: Path | None = None, seconds: float = 300) -> dict[str, Any]:
    """What `ascend/probe.py` says of the wheel, in a process of its own; {"failed": output} where it ended early."""
    wheel, stubs = unpacked(version), BUILD / f"stubs-{version}"
    scripts = ROOT / "ci" / "ascend"
    build = [sys.executable, str(scripts / "stubs.py"), str(wheel), str(stubs)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL, timeout=seconds)
    path = os.pathsep.join(map(str, (wheel, ROOT, ROOT / "backends")))
    own = {"PYTHONPATH": path, "LD_LIBRARY_PATH": str(stubs), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, str(scripts / "probe.py"), str(fixture or FIXTURES / f"{version}.txt")]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-4000:]}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def check_wheel() -> list[str]:
    """Print what was checked; what is not as it should be."""
    said = probed(IMPORTED)
    if "failed" in said:
        return [f"wheel {IMPORTED}: it does not get through: {said['failed']}"]
    for what, count in said["checked"].items():
        print(f"wheel    {IMPORTED:13}  {count} of {what}")
    return [f"wheel {IMPORTED}: {line}" for line in said["wrong"]]


def check_extra() -> list[str]:
    """Ask pip what it would install, and install nothing."""
    command = [*PIP, "install", "--dry-run", "-c", str(ROOT / "ci" / "constraints.txt"), f"{ROOT}[ascend]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r"Would install .*torch[-_]npu-(\S+)", done.stdout)
    print(f"extra    {found.group(1) if found else '-':13}  of torch-npu for pagedkv[ascend]")
    return [] if found else [f"pagedkv[ascend] does not resolve: {(done.stdout + done.stderr)[-2000:]}"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refresh", action="store_true", help="write the fixtures instead of comparing with them")
    parser.add_argument("what", choices=("schemas", "wheel", "extra", "all"))
    given = parser.parse_args(arguments)
    wrong = []
    if given.what in ("schemas", "all"):
        wrong += check_schemas(given.refresh)
    if given.what in ("wheel", "all"):
        wrong += check_wheel()
    if given.what in ("extra", "all"):
        wrong += check_extra()
    for line in wrong:
        print("DIFFERS", line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""What torch-npu's own wheels say, with no NPU and no CANN at hand: `make ascend-check`.

    schemas    every operator that the Ascend backend calls or plans for, as the libraries in the wheels spell it,
               against tests/backends/ascend/schemas; --refresh writes those files anew

Nothing of Ascend runs here: names, types and shapes are checked, never numbers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "backends" / "ascend" / "schemas"
BUILD = ROOT / "build" / "ascend"
VERSIONS = ("2.10.0.post4", "2.13.0", "2.14.0")
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
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--platform", machine, "--python-version", "3.11", "-d", str(folder)]
    subprocess.run([*command, f"torch-npu=={version}"], check=True, timeout=seconds)
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refresh", action="store_true", help="write the fixtures instead of comparing with them")
    parser.add_argument("what", choices=("schemas",))
    given = parser.parse_args(arguments)
    wrong = check_schemas(given.refresh)
    for line in wrong:
        print("DIFFERS", line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

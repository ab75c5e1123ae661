"""The packages that this backend stands on, looked at without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from pagedkv_cuda.limits import TRITON_LEAST, Capability, Generation, parse

EXTRA = "pip install 'pagedkv[cuda]'"
TRITONS = ("triton", "pytorch-triton")
"""Distributions that bring the module triton; the second comes with nightly builds of torch."""


def version(distribution: str) -> str | None:
    """The installed version; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA version that torch was built for ("13.0"), from its version file; None without it or without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    if not file.exists():
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", file.read_text("utf-8"), re.MULTILINE)
    return found[1] if found else None


def triton() -> str | None:
    """The installed version of Triton; None where there is none."""
    return next((found for found in map(version, TRITONS) if found is not None), None)


def why_no_torch(driver_cuda: Capability | None) -> str | None:
    """What speaks against this torch, one line with the way out; `driver_cuda`: the newest CUDA the driver knows."""
    installed = version("torch")
    if installed is None:
        return "torch is not installed: pip install torch"
    built = torch_cuda()
    if built is None:
        return f"torch {installed} is built without CUDA: install a CUDA build of torch in its place"
    if driver_cuda is not None and int(built.split(".")[0]) > driver_cuda[0]:
        return (
            f"the driver knows CUDA up to {driver_cuda[0]}.{driver_cuda[1]}, torch {installed} is built for {built}: "
            f"update the driver, or install a torch built for CUDA {driver_cuda[0]}"
        )
    return None


def why_too_old(generation: Generation) -> str | None:
    """What speaks against this torch on GPUs of a generation that is younger than it."""
    built = torch_cuda()
    if not generation.least_cuda or built is None or parse(built) >= parse(generation.least_cuda):
        return None
    return (
        f"torch {version('torch')} is built for CUDA {built}, which knows no {generation.name}: install a torch built "
        f"for CUDA {generation.least_cuda} or later"
    )


def why_no_triton(extra: str = EXTRA) -> str | None:
    """What speaks against this Triton, one line with the way out; `extra`: what installs it."""
    if version("triton-ascend") is not None:
        return (
            "triton and triton-ascend overwrite each other's files: pip uninstall triton-ascend, then "
            "pip install --force-reinstall triton"
        )
    installed = triton()
    if installed is None:
        return f"triton is not installed: {extra}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if numbers < TRITON_LEAST:
        return f"triton {installed} is too old, {TRITON_LEAST[0]}.{TRITON_LEAST[1]} is the least: pip install -U triton"
    return None

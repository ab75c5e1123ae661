"""Opens an NPU: the first module of this backend that loads torch, and torch-npu after the environment is set."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from pagedkv.api import BackendUnavailable, World
from pagedkv_ascend import environment, packages
from pagedkv_ascend.backend import AscendBackend
from pagedkv_ascend.capabilities import declared
from pagedkv_ascend.limits import Chip
from pagedkv_ascend.runtime import NpuRuntime

_log = logging.getLogger("pagedkv.backends.ascend")


def open_backend(device: int, chip: Chip, options: Mapping[str, Any], *, world: World) -> AscendBackend:
    """An instance on this device, numbered as ASCEND_RT_VISIBLE_DEVICES lists them. Raises `BackendUnavailable`."""
    environment.profile(options).apply()
    load_torch_npu()
    npu: Any = torch.npu  # type: ignore[attr-defined]
    count = npu.device_count()
    if device >= count:
        raise BackendUnavailable(
            f"NPU {device} is not among the {count} that torch-npu sees: look at npu-smi info and at "
            "ASCEND_RT_VISIBLE_DEVICES"
        )
    try:
        runtime = NpuRuntime(device, pooled=pooled(options))
    except RuntimeError as error:
        raise BackendUnavailable(f"NPU {device} does not open ({error}): look at npu-smi info") from error
    _log.info("%s, %s, torch-npu %s", npu.get_device_name(device), chip.series, packages.version("torch-npu"))
    _log.warning("not yet run on hardware: certify this backend here (`pagedkv certify`) before you rely on it")
    note = environment.collectives_note(device)
    return AscendBackend(declared(chip), runtime, world=world, note=note)


def load_torch_npu() -> None:
    """Import torch-npu, whose loading by `import torch` is off in this process. Raises `BackendUnavailable`."""
    try:
        import torch_npu  # type: ignore[import-not-found]  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailable(packages.why_not_imported(error)) from error


def pooled(options: Mapping[str, Any]) -> bool:
    """Whether the cache gets a memory pool of its own."""
    wanted = bool(options.get("use_ascend_memory_pool", True))
    if wanted and environment.expandable_segments():
        _log.warning(
            "use_ascend_memory_pool is off, as PYTORCH_NPU_ALLOC_CONF sets expandable_segments:True, with which a pool "
            "of its own was never tried: leave one of them out"
        )
        return False
    return wanted

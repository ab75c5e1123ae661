"""What a figure was measured on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pagedkv import __version__

if TYPE_CHECKING:
    from pagedkv.engine.setup import Parts


def processor() -> str:
    """The processor's name; the machine's type where the system gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # only Linux has the file
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    own = psutil.Process()
    return len(own.cpu_affinity()) if hasattr(own, "cpu_affinity") else psutil.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Processor, memory in bytes, system and versions."""
    import torch

    return {
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pagedkv": __version__,
    }


def engine_facts(parts: Parts) -> dict[str, Any]:
    """The model and what was chosen for it."""
    return {
        "model": parts.config.model,
        "backend": parts.backend_name,
        "backend_distribution": f"{parts.distribution} {parts.version}",
        "dtype": parts.choice.dtype,
        "kv_cache_dtype": parts.choice.kv_dtype,
        "block_size": parts.choice.block_size,
        "prefix_caching": parts.config.enable_prefix_caching,
        "max_num_seqs": parts.config.max_num_seqs,
        "max_num_batched_tokens": parts.config.max_num_batched_tokens,
        "max_model_len": parts.max_model_len,
    }

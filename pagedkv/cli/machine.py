"""What a figure was measured on."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import psutil

from pagedkv import __version__
from pagedkv.conformance.machine import cores, processor

if TYPE_CHECKING:
    from pagedkv.engine.setup import Parts


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
        "quantization": parts.quantization,
        "kv_cache_dtype": parts.choice.kv_dtype,
        "block_size": parts.choice.block_size,
        "prefix_caching": parts.config.enable_prefix_caching,
        "max_num_seqs": parts.config.max_num_seqs,
        "max_num_batched_tokens": parts.config.max_num_batched_tokens,
        "max_model_len": parts.max_model_len,
    }

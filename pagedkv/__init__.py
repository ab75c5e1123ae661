"""pagedkv: language models with a paged KV cache on whatever hardware is there.

    from pagedkv import LLM, SamplingParams

Names are loaded on first use, so that `import pagedkv.api` costs a backend author neither torch nor the engine.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv.async_llm import AsyncLLM
    from pagedkv.engine.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from pagedkv.engine.scoring import Score
    from pagedkv.llm import LLM
    from pagedkv.sampling.guided import GuidedDecodingParams, StructuredOutputsParams
    from pagedkv.sampling.params import SamplingParams
    from pagedkv.sampling.pooling import PoolingParams

__version__ = "0.1.0"

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
"""No vendor's extension is loaded by `import torch`: where its libraries are missing, torch itself would not load. The
backend that is chosen loads its own."""

_HOMES = {
    "LLM": "pagedkv.llm",
    "AsyncLLM": "pagedkv.async_llm",
    "CompletionOutput": "pagedkv.engine.outputs",
    "EmbeddingOutput": "pagedkv.engine.outputs",
    "EmbeddingRequestOutput": "pagedkv.engine.outputs",
    "Logprob": "pagedkv.engine.outputs",
    "RequestMetrics": "pagedkv.engine.outputs",
    "RequestOutput": "pagedkv.engine.outputs",
    "Score": "pagedkv.engine.scoring",
    "GuidedDecodingParams": "pagedkv.sampling.guided",
    "PoolingParams": "pagedkv.sampling.pooling",
    "SamplingParams": "pagedkv.sampling.params",
    "StructuredOutputsParams": "pagedkv.sampling.guided",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "GuidedDecodingParams",
    "Logprob",
    "PoolingParams",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

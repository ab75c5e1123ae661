"""Models that are a config.json and nothing else, and plans for them over memory that a test makes up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagedkv import plugins
from pagedkv.api import Capabilities, MemoryInfo
from pagedkv.config import EngineConfig
from pagedkv.engine.setup import agree
from pagedkv.planning.devices import Device, devices
from pagedkv.planning.fit import Fit
from pagedkv.planning.model import open_part, without_weights
from pagedkv.planning.stand_in import Absent, StandIn
from pagedkv.planning.target import Target

GIB = 1 << 30

LLAMA_2_7B: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
LLAMA_3_8B = LLAMA_2_7B | {
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


def write_config(folder: Path, **fields: Any) -> Path:
    """A folder whose only file is the configuration of a Llama."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def some_device() -> Device:
    """Any row of the table."""
    return devices()[0]


def capabilities() -> Capabilities:
    """What a backend that is not installed is expected to do, in every dtype."""
    offered = Absent(some_device()).describe(some_device().info)
    return Capabilities.of(
        dtypes=("bf16", "fp16", "fp32"),
        kv_dtypes=("bf16", "fp16", "fp32"),
        block_sizes=offered.block_sizes,
        head_dims=offered.head_dims,
        preferred_block_size=16,
        features=offered.features,
        placements=offered.placements,
    )


def fit_of(folder: Path, memory: MemoryInfo, *, ranks: int = 1, backend: Any = None, **settings: Any) -> Fit:
    """The model of `folder` on a device with this memory, its cache counted by formula unless a backend is given."""
    config = EngineConfig.of(model=str(folder), **{"swap_blocks": 0, **settings})
    asked = backend or StandIn(capabilities(), memory)
    selected = plugins.Selected(
        descriptor=Absent(some_device()),
        name="made-up",
        distribution="tests",
        version="0",
        device=some_device().info,
        why="a test",
        explicit=True,
    )
    target = Target(selected=selected, backend=asked, device=some_device(), cost="by formula", real=False)
    checkpoint = open_part(without_weights(config), ranks)
    return Fit(target=target, checkpoint=checkpoint, agreed=agree(config, selected, asked, checkpoint))

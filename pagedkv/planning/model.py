"""A model as far as its configuration tells, whole or one rank's part of it: no weight is read."""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path

from pagedkv.api.errors import ConfigError
from pagedkv.config import EngineConfig
from pagedkv.models.checkpoint import DEMO, Checkpoint, open_checkpoint
from pagedkv.models.config import ModelConfig

_log = logging.getLogger("pagedkv.planning")

NOT_BUILT = "tensor parallel execution is not built yet: this plans one rank, and nothing here can run it"


def without_weights(config: EngineConfig) -> EngineConfig:
    """The settings for a model whose weights need not be there; a GGUF file holds its own configuration."""
    path = Path(config.model).expanduser()
    has_config = not path.exists() or (path / "config.json").exists()
    only_config = config.model != DEMO and not path.is_file() and has_config
    return dataclasses.replace(config, load_format="dummy") if only_config else config


def open_part(config: EngineConfig, ranks: int) -> Checkpoint:
    """The model of `config`, or the part that each of `ranks` ranks would hold. Raises `ModelError`, `ConfigError`."""
    checkpoint = open_checkpoint(
        config.model, load_format=config.load_format, revision=config.revision, model_impl=config.model_impl
    )
    if ranks == 1:
        return checkpoint  # type: ignore[return-value]
    if not isinstance(checkpoint, Checkpoint):
        raise ConfigError("--tensor-parallel-size plans models of the native decoder only; leave it out")
    _log.warning("%s", NOT_BUILT)
    part = copy.copy(checkpoint)
    part.config = shard(checkpoint.config, ranks)
    return part


def shard(config: ModelConfig, ranks: int) -> ModelConfig:
    """One rank's part: its heads and its slice of each feed-forward; embeddings, head and norms are counted whole.

    KV heads are divided, and held by several ranks where there are fewer of them than ranks.
    Raises `ConfigError` where something does not divide.
    """
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    experts = config.experts
    problems = [
        f"{what} {count}"
        for what, count in (
            ("query heads", heads),
            ("feed-forward width", inner),
            *([] if experts is None else [("width of an expert", experts.intermediate_size)]),
        )
        if count % ranks
    ]
    if kv_heads % ranks and ranks % kv_heads:
        problems.append(f"KV heads {kv_heads}")
    if problems:
        raise ConfigError(f"--tensor-parallel-size {ranks} does not divide {', '.join(problems)} of this model")
    if experts is not None:
        experts = dataclasses.replace(experts, intermediate_size=experts.intermediate_size // ranks)
    return dataclasses.replace(
        config,
        num_heads=heads // ranks,
        num_kv_heads=max(1, kv_heads // ranks),
        intermediate_size=inner // ranks,
        experts=experts,
    )

"""The options that shape an engine, the same for every command that makes one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import click

from pagedkv.plugins import parse_options, select

_COUNT: Mapping[str, Any] = {"type": int, "metavar": "N"}

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "backend": {
        "help": "Backend to use; else PAGEDKV_BACKEND, else the best one that is there.",
        "metavar": "NAME",
    },
    "device": {"help": "Index of the backend's device; else its best one.", **_COUNT},
    "backend_option": {
        "help": "An option of the backend; may be repeated.",
        "metavar": "NAME=VALUE",
        "multiple": True,
    },
    "dtype": {"help": "Dtype of the model: auto, float32, bfloat16 or float16.", "metavar": "DTYPE"},
    "quantization": {
        "help": "gguf keeps a GGUF file's weights packed, none dequantizes them; else as dtype and backend have it.",
        "metavar": "NAME",
    },
    "kv_cache_dtype": {"help": "Dtype of the cache; auto takes the model's, int8 and fp8 round.", "metavar": "DTYPE"},
    "block_size": {"help": "Tokens in a block of the cache.", **_COUNT},
    "max_model_len": {"help": "Longest sequence, prompt and output together.", **_COUNT},
    "max_num_seqs": {"help": "Sequences that run at the same time, at most.", **_COUNT},
    "max_num_batched_tokens": {"help": "Tokens computed in one step, at most.", **_COUNT},
    "enable_chunked_prefill": {"help": "Compute long prompts in several steps.", "is_flag": True},
    "enable_prefix_caching": {"help": "Compute once what prompts begin with alike.", "is_flag": True},
    "gpu_memory_utilization": {
        "help": "Share of the device's memory, whatever the device, that weights, workspace and cache may fill.",
        "type": float,
        "metavar": "SHARE",
    },
    "kv_cache_memory": {"help": 'Memory of the cache, such as "4GiB"; a plain number is bytes.', "metavar": "SIZE"},
    "num_blocks": {"help": "Blocks of the cache, instead of its memory.", **_COUNT},
    "swap_space": {
        "help": 'Host memory for blocks that the cache has no room for: "4GiB", a number of GiB, auto, or 0.',
        "metavar": "SIZE",
    },
    "swap_blocks": {"help": "The same as a number of blocks.", **_COUNT},
    "enable_host_caching": {"help": "Keep what is evicted from the prefix cache in that memory.", "is_flag": True},
    "preemption_mode": {
        "help": "Of a request that must make room: swap, recompute, or auto for the cheaper one.",
        "metavar": "MODE",
    },
    "max_preemptions": {"help": "How often one request may have to make room.", **_COUNT},
    "enforce_eager": {
        "help": "Run all steps eagerly, or record decode into graphs; else as the backend has it.",
        "is_flag": True,
    },
    "max_seq_len_to_capture": {"help": "Longest context of a recorded decode step.", **_COUNT},
    "batch_invariant": {"help": "The same tokens whatever else is in the batch.", "is_flag": True},
    "tokenizer": {"help": "Take the tokenizer from another folder, file or hub id.", "metavar": "MODEL"},
    "load_format": {"help": "auto, safetensors, gguf, or dummy for random weights.", "metavar": "FORMAT"},
    "model_impl": {
        "help": "What runs the model: auto, native, or transformers (its modules over the paged cache).",
        "metavar": "NAME",
    },
    "revision": {"help": "Branch, tag or commit of a hub id.", "metavar": "NAME"},
    "engine_seed": {"help": "Seed of the requests that bring none.", **_COUNT},
}
"""Setting -> how its flag reads it, in the order of the help text. What is not given is left to the engine."""


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the engine's options; those that were given arrive as the keyword `settings`, a dict."""
    return some_options(*OPTIONS)(command)


def some_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The same with these options only."""

    def give(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_settings(*args: Any, **kwargs: Any) -> Any:
            given = {name: kwargs.pop(name) for name in names}
            return command(*args, settings={name: v for name, v in given.items() if v not in (None, ())}, **kwargs)

        for name in reversed(names):
            option = click.option(_flag(name, OPTIONS[name]), **{"default": None, **OPTIONS[name]})
            with_settings = option(with_settings)
        return with_settings

    return give


def _flag(name: str, settings: Mapping[str, Any]) -> str:
    words = name.replace("_", "-")
    return f"--{words}/--no-{words}" if settings.get("is_flag") else f"--{words}"


def engine_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under the names of `EngineConfig`, options of the backend converted to their types.

    Which options there are, only the backend knows: with --backend-option it is chosen here, once, and then kept.
    """
    named = dict(settings)
    texts = named.pop("backend_option", ())
    if "engine_seed" in named:
        named["seed"] = named.pop("engine_seed")
    if texts:
        selected = select(named.get("backend"), device=named.get("device"))
        named |= {"backend": selected.name, "device": selected.device.index}
        named["backend_options"] = parse_options(selected.descriptor, texts)
    return named

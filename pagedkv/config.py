"""Engine settings: the names people bring with them, checked once at the edge.

`EngineConfig.of(**names)` is the way in: it accepts today's names, says today's name for an old one, refuses what is
not built yet, and suggests the right name for a wrong one.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedkv.api.errors import ConfigError

_log = logging.getLogger("pagedkv.config")

DTYPES = {
    "auto": None,
    "float32": "fp32",
    "float": "fp32",
    "fp32": "fp32",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp16": "fp16",
}
"""What users write for a dtype, and the contract's word for it; None leaves the choice to negotiation."""

KV_DTYPES = DTYPES | {
    "int8": "int8/token_head",
    "fp8": "fp8_e4m3fn/tensor",
    "fp8_e4m3": "fp8_e4m3fn/tensor",
    "fp8_e5m2": "fp8_e5m2/tensor",
    "int8/token_head": "int8/token_head",
    "fp8_e4m3fn/tensor": "fp8_e4m3fn/tensor",
    "fp8_e5m2/tensor": "fp8_e5m2/tensor",
}
"""The same for the cache, which may be quantized."""

MODEL_IMPLS = ("auto", "native", "transformers")
"""What runs a model: this package's own decoder, or transformers' modules over the paged cache."""

QUANTIZATIONS = ("gguf", "none")
"""Weights in the blocks of their GGUF file, or dequantized; unset, dtype and backend decide."""

MODES = ("auto", "swap", "recompute")
"""What becomes of a preempted sequence: its blocks are copied to host memory, or computed again."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)} | {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}

_WITHOUT_EFFECT = {
    "max_parallel_loading_workers": (None, "one process loads the weights"),
    "disable_custom_all_reduce": (False, "there is one worker"),
    "distributed_executor_backend": (None, "there is one worker"),
}
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "kv_tiers": (None, (), []),
    "trust_remote_code": (False,),
    "speculative_config": (None,),
    "enable_lora": (False,),
}
_SWITCHES = (
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enable_host_caching",
    "skip_tokenizer_init",
    "batch_invariant",
    "enforce_eager",
)
_MAY_BE_UNSET = ("batch_invariant", "enforce_eager")
_LEAST = {"num_blocks": 2, "device": 0, "max_overtakes": 0, "swap_blocks": 0, "max_preemptions": 1}
_OLD_NAMES = {
    "max_context_len_to_capture": "max_seq_len_to_capture",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that shapes an engine; None leaves a value to the model or the backend, and the start log says which.

    `kv_cache_memory` and `num_blocks` (the null block counted) size the cache outright; `gpu_memory_utilization` is the
    share of the device's memory that weights, workspace and cache may fill together. `model_impl`: "native", or
    "transformers" for its own modules over our cache; "auto" takes the native decoder where there is one.
    `quantization`: "gguf" keeps a GGUF file's weights in their blocks, which the backend multiplies as they are and for
    which it may round activations to 8 bits; "none" dequantizes them. Unset, they stay where `dtype` is unset too and
    the backend has the product.
    `kv_cache_dtype`: "int8" and "fp8" ("fp8_e4m3"; "fp8_e5m2") store keys and values in a byte each, where the backend
    does; "auto" never does.
    `swap_space`: host memory for blocks of preempted sequences and of prompts that the device's cache has no room for
    ("4GiB"; a plain number is GiB; "auto"; 0 for none), or `swap_blocks` of them. Unset, "auto" where the device has
    memory of its own, else 0. `preemption_mode`: "auto" goes by price, "swap" and "recompute" do not. `copy_bandwidth`
    (bytes a second) and `prefill_rate` (tokens a second) take the place of what is measured for that price.
    `enforce_eager=True` records no decode steps, `False` asks for them; `max_seq_len_to_capture`: the longest context
    that a recorded step serves. Unset, the backend says both.
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    load_format: str = "auto"
    model_impl: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    backend: str | None = None
    device: int | None = None
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float | None = None
    kv_cache_memory: int | str | None = None
    num_blocks: int | None = None
    swap_space: int | float | str | None = None
    swap_blocks: int | None = None
    enable_host_caching: bool = True
    preemption_mode: str = "auto"
    max_preemptions: int = 4
    copy_bandwidth: int | str | None = None
    prefill_rate: float | None = None
    batch_invariant: bool | None = None
    enforce_eager: bool | None = None
    max_seq_len_to_capture: int | None = None
    max_overtakes: int = 16
    seed: int = 0

    @classmethod
    def of(cls, **names: Any) -> EngineConfig:
        """Settle names, then check values. Names that may be the backend's own end up in `backend_options`."""
        settled = _settle(names)
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = {name: settled.pop(name) for name in list(settled) if name not in known}
        options = settled.pop("backend_options", None)
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f'backend_options={options!r} must be a mapping such as {{"name": value}}')
        settled["backend_options"] = _Options(options or {}, unknown)
        for name in ("model", "tokenizer"):
            if isinstance(settled.get(name), os.PathLike):
                settled[name] = os.fspath(settled[name])
        return cls(**settled)

    def __post_init__(self) -> None:
        problems = [*self._bad_numbers(), *self._bad_switches(), *self._bad_choices(), *self._bad_cache()]
        problems += self._bad_swap()
        if problems:
            raise ConfigError("; ".join(problems))

    def _bad_numbers(self) -> list[str]:
        at_least_one = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_seq_len_to_capture")
        problems = [
            f"{name}={value!r} must be a whole number of at least {least}"
            for name, least in [*((n, 1) for n in at_least_one), *_LEAST.items()]
            if (value := getattr(self, name)) is not None and (not _is_int(value) or value < least)
        ]
        if self.block_size is not None and (not _is_int(self.block_size) or self.block_size < 1):
            problems.append(f"block_size={self.block_size!r} must be a whole number of tokens, at least 1")
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            problems.append(f"gpu_memory_utilization={share!r} must be above 0 and at most 1")
        if not problems and self.max_num_batched_tokens < self.max_num_seqs:
            problems.append(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "every running sequence needs one token a step; lower max_num_seqs or raise max_num_batched_tokens"
            )
        if not _is_int(self.seed):
            problems.append(f"seed={self.seed!r} must be a whole number")
        return problems

    def _bad_switches(self) -> list[str]:
        problems = [
            f"{name}={value!r} must be True or False"
            for name in _SWITCHES
            if not isinstance(value := getattr(self, name), bool) and not (name in _MAY_BE_UNSET and value is None)
        ]
        return problems + [
            f"{name}={value!r} must be text"
            for name in ("tokenizer", "revision", "backend")
            if (value := getattr(self, name)) is not None and not isinstance(value, str)
        ]

    def _bad_choices(self) -> list[str]:
        problems = [
            f"{name}={value!r} is not one of {', '.join(known)}"
            for name, known in (("dtype", DTYPES), ("kv_cache_dtype", KV_DTYPES))
            if not isinstance(value := getattr(self, name), str) or value not in known
        ]
        if self.load_format not in ("auto", "safetensors", "gguf", "dummy"):
            problems.append(f"load_format={self.load_format!r} is not one of auto, safetensors, gguf, dummy")
        if self.model_impl not in MODEL_IMPLS:
            problems.append(f"model_impl={self.model_impl!r} is not one of {', '.join(MODEL_IMPLS)}")
        if self.model_impl == "transformers" and self.batch_invariant:
            problems.append(
                "batch_invariant=True cannot be kept with model_impl='transformers', whose products depend on the "
                "batch; leave one of them out"
            )
        if self.quantization not in (None, *QUANTIZATIONS):
            known = f"only {' and '.join(QUANTIZATIONS)} are known; leave it out to let dtype and backend decide"
            problems.append(f"quantization={self.quantization!r} is not built yet: {known}")
        if not isinstance(self.model, str) or not self.model:
            problems.append(f"model={self.model!r} must be a folder, a .gguf file, a hub id, or demo")
        return problems

    def _bad_cache(self) -> list[str]:
        if self.kv_cache_memory is not None and self.num_blocks is not None:
            return ["kv_cache_memory and num_blocks both size the cache: give one of them"]
        try:
            _ = self.kv_cache_bytes
        except ConfigError as error:
            return [str(error)]
        return []

    def _bad_swap(self) -> list[str]:
        problems = []
        if self.swap_space is not None and self.swap_blocks is not None:
            problems.append("swap_space and swap_blocks both size the host memory for blocks: give one of them")
        if self.preemption_mode not in MODES:
            problems.append(f"preemption_mode={self.preemption_mode!r} is not one of {', '.join(MODES)}")
        rate = self.prefill_rate
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0):
            problems.append(f"prefill_rate={rate!r} must be tokens a second, above 0")
        for name in ("swap_bytes", "copy_bytes"):
            try:
                getattr(self, name)
            except ConfigError as error:
                problems.append(str(error))
        return problems

    @property
    def swap_bytes(self) -> int | None:
        """`swap_space` in bytes; None where it is left to the engine: unset or "auto"."""
        space = self.swap_space
        if space is None or space == "auto":
            return None
        advice = 'give GiB as a plain number, text such as "512MiB", "auto", or 0 for none'
        if isinstance(space, str) and not re.fullmatch(r"\s*\d+(\.\d+)?\s*", space):
            try:
                return parse_bytes(space, "swap_space")
            except ConfigError as error:
                raise ConfigError(f"swap_space={space!r} is not a size: {advice}") from error
        try:
            gib = -1.0 if isinstance(space, bool) else float(space)
        except (TypeError, ValueError):
            gib = -1.0
        if not 0 <= gib < 1 << 20:
            raise ConfigError(f"swap_space={space!r} must be GiB: {advice}")
        return int(gib * 1024**3)

    @property
    def copy_bytes(self) -> int | None:
        """`copy_bandwidth` in bytes a second."""
        return None if self.copy_bandwidth is None else parse_bytes(self.copy_bandwidth, "copy_bandwidth")

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes."""
        return None if self.kv_cache_memory is None else parse_bytes(self.kv_cache_memory, "kv_cache_memory")


class _Options(dict[str, Any]):
    """Backend options, with the names that the engine did not know and that the backend may (`stray`)."""

    def __init__(self, options: Mapping[str, Any], stray: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.stray = dict(stray)


def claim_options(config: EngineConfig, accepted: Mapping[str, str], backend: str) -> dict[str, Any]:
    """The options for the chosen backend; `accepted` maps its option names and their aliases to the option's name.

    A name that was given to the engine and that neither it nor the backend knows is a `ConfigError` with a suggestion.
    """
    options = dict(config.backend_options)
    for name, value in getattr(config.backend_options, "stray", {}).items():
        if name not in accepted:
            raise ConfigError(_unknown(name, accepted, backend))
        option = accepted[name]
        if any(accepted.get(given) == option for given in options):
            raise ConfigError(f"option {option} of backend {backend} is given twice, also as {name}; give it once")
        _log.info("%s is an option of backend %s: backend_options={%r: ...}", name, backend, option)
        options[option] = value
    return options


def known_names() -> list[str]:
    """Settings of the engine, those that are not built or have no effect among them."""
    return [f.name for f in dataclasses.fields(EngineConfig)] + [*_WITHOUT_EFFECT, *_NOT_BUILT]


def _unknown(name: str, accepted: Mapping[str, str], backend: str) -> str:
    known = [*known_names(), *accepted]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known names are {', '.join(sorted(known))}"
    return f"{name} is neither a setting of the engine nor an option of backend {backend}: {hint}"


def _settle(names: Mapping[str, Any]) -> dict[str, Any]:
    """Old names to today's, names without effect said and dropped, unbuilt ones refused."""
    settled: dict[str, Any] = {}
    for old, value in names.items():
        name = _OLD_NAMES.get(old, old)
        if name != old:
            _log.warning("%s is now called %s", old, name)
            if name in names:
                raise ConfigError(f"{name} is given twice, also under its old name {old}; give it once")
        if name == "worker_use_ray":
            _log.warning('worker_use_ray is now called distributed_executor_backend="ray"')
            name, value = "distributed_executor_backend", "ray" if value else None
        if name == "distributed_executor_backend" and value == "ray":
            raise ConfigError('distributed_executor_backend="ray" is not built yet; leave it out')
        if name in _NOT_BUILT:
            _refuse_unbuilt(name, value)
        elif name in _WITHOUT_EFFECT:
            _say_without_effect(name, value)
        else:
            settled[name] = value
    return settled


def _refuse_unbuilt(name: str, value: Any) -> None:
    if not any(value is neutral or value == neutral for neutral in _NOT_BUILT[name]):
        raise ConfigError(f"{name}={value!r} is not built yet; leave it at {_NOT_BUILT[name][0]!r}")


def _say_without_effect(name: str, value: Any) -> None:
    default, why = _WITHOUT_EFFECT[name]
    if value != default:
        _log.info("%s=%r has no effect: %s", name, value, why)


def parse_bytes(value: int | str, name: str) -> int:
    """Bytes of "4GiB", "512 MiB", "2GB" or a plain number (bytes)."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f'{name}={value!r} must be bytes or text such as "4GiB"')
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{name}={value!r} is not a size: give bytes or one of {', '.join(u for u in _UNITS if u)}")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ConfigError(f"{name}={value!r} must be above 0")
    return size


def show_bytes(size: int | None) -> str:
    """Bytes for people: "3.9 GiB"."""
    if size is None:
        return "unknown"
    for unit, scale in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if abs(size) >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

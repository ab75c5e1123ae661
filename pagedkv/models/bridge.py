"""The bridge to transformers: a decoder that has no native form here runs as its own modules over our cache.

This is the only module that imports transformers, and only once it is used. The modules reach the cache through the
library's registry of attention functions; one packed row of tokens goes in, with positions, without padding, and the
library's own caches are off. What attention needs is found by a forward without weights before anything is read.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagedkv.api import AttentionBackend, LayerSpec
from pagedkv.api.errors import ModelError, PagedKVError
from pagedkv.models.bridge_attention import FARTHEST, Marker, Port
from pagedkv.models.bridge_check import check
from pagedkv.models.decoder import Attend
from pagedkv.models.packing import Progress, torch_dtype
from pagedkv.models.safetensors_files import SafetensorsFiles
from pagedkv.models.tokenizer import Tokenizer, load_hf_tokenizer, read_json
from pagedkv.models.weight_plan import WeightPlan

_log = logging.getLogger("pagedkv.models")

NAME = "pagedkv"
"""What our attention is called in the library's registries."""

INSTALL = "pip install 'transformers>=5'"
OLDEST = 5

MOST_LAYERS = 4096
"""More is damage or an attack, and would be made one by one."""

DUMMY_SEED = 0
PROBE_TOKENS = 8
PROBE_DTYPE = torch.bfloat16
"""Grouped expert products exist in this dtype only where there are no weights."""

SPARE = 1.25
"""Working memory planned for each byte seen: fused operations take some that a dry run does not show."""

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "dense", "moe"})

TokenizerLoader = Callable[[Any], Tokenizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgedConfig:
    """What the engine needs to know of a bridged model; the rest stays in transformers' own configuration."""

    pooling: ClassVar[None] = None  # vectors come from the native decoder only

    architecture: str
    model_type: str
    vocab_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    num_parameters: int
    num_numbers: int
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The attention calls of one forward, as the contract describes them."""
        return self.layers


# -- the library -------------------------------------------------------------------------------------------------------


def available() -> bool:
    """Whether transformers is installed; it is not imported."""
    return importlib.util.find_spec("transformers") is not None


def library(model_type: str = "this model") -> Any:
    """transformers, with our attention in its registries. Raises `ModelError` when it is missing or too old."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"{model_type} has no native decoder here and would run through transformers, which cannot be imported "
            f"({error}). Run: {INSTALL}"
        ) from error
    if int(transformers.__version__.split(".")[0]) < OLDEST:
        raise ModelError(f"the bridge needs transformers {OLDEST} or newer, not {transformers.__version__}: {INSTALL}")
    transformers.AttentionInterface.register(NAME, _attention)
    transformers.AttentionMaskInterface.register(NAME, _mask)
    return transformers


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any
) -> tuple[Tensor, None]:
    """What the registry calls: the port that the decoder put on its modules does the rest."""
    return module.pagedkv_port(module, query, key, value, attention_mask, named), None


def _mask(*, mask_function: Any, device: Any = "cpu", **others: Any) -> Tensor:
    """No mask is built; what stands in its place knows the rule that was asked for."""
    return Marker.of(mask_function, device)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence the library's own reports, which are given here in ours."""
    logs = transformers.utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity(logs.CRITICAL)
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()


@contextmanager
def _named(what: str, *, ours: bool = True) -> Iterator[None]:
    """Turn what the library raises into a `ModelError` that begins with `what`; our own too, unless not `ours`."""
    try:
        yield
    except ModelError as error:
        if not ours:
            raise
        raise ModelError(f"{what}: {error}") from error
    except (PagedKVError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{what}: transformers raised {type(error).__name__}: {reason}") from error


# -- which models ------------------------------------------------------------------------------------------------------


def _read_config(transformers: Any, folder: Path) -> Any:
    """The library's configuration object. Raises `ModelError` for kinds that cannot be bridged, by name."""
    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        code = " and brings code of its own, which is never run" if raw.get("auto_map") else ""
        raise ModelError(
            f"model_type is known neither here nor to transformers {transformers.__version__}{code}. "
            "A newer transformers may know it: pip install -U transformers"
        )
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if reason := _kind_against(transformers, config, raw):
        raise ModelError(f"it cannot run on a paged KV cache: {reason}.")
    return config


def _kind_against(transformers: Any, config: Any, raw: Mapping[str, Any]) -> str | None:
    """Why this kind of model is none for the bridge, as far as its configuration tells; None when it may be."""
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder:
        return "it is an encoder and a decoder, and cross attention is not built yet"
    if type(config) not in classes:
        return "transformers has no causal language model of this kind"
    own = classes[type(config)].__name__
    if (named := raw.get("architectures")) and named != [own]:
        return f"architectures is {named}, and only {own} writes text"
    if config.get_text_config() is not config or any(hasattr(config, n) for n in ("vision_config", "audio_config")):
        return "it takes more than text, and inputs other than tokens are not built yet"
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        return f"num_hidden_layers is {layers!r}, and a number from 1 to {MOST_LAYERS} is needed"
    if getattr(config, "add_cross_attention", False):
        return "it has cross attention, which is not built yet"
    if raw.get("quantization_config"):
        return "its weights are quantized in a way that is not built yet; use the unquantized model or a GGUF"
    if classes[type(config)]._is_stateful:
        return "it keeps a recurrent or convolution state, and only keys and values have blocks here"
    kinds = {str(k) for n in ("layer_types", "layers_block_type") for k in getattr(config, n, None) or ()}
    if others := kinds - ATTENTION_LAYERS:
        return f"it has layers of kind {', '.join(sorted(others))}, which need more than blocks of keys and values"
    return None


def _max_position(config: Any) -> int | None:
    """How far positions go, None when nothing says so.

    Rope that changes with the longest sequence of a batch is used up to where it starts to.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= 2**24:
        raise ModelError(f"max_position_embeddings is {limit!r}, a number of positions is needed")
    rope = getattr(config, "rope_parameters", None) or {}
    for one in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind, original = one.get("rope_type"), one.get("original_max_position_embeddings") or limit
        if kind in BATCH_DEPENDENT_ROPE and (kind == "dynamic" or original < limit):
            limit = min(limit, int(original))
            if kind == "dynamic":  # up to there it is plain rope, and plain rope looks at no batch
                one["rope_type"] = "default"
            _log.warning(
                "rope type %s turns all keys anew when a sequence passes %d positions, which cached keys cannot "
                "follow: requests end there",
                kind,
                limit,
            )
    return limit


def _ids(folder: Path, name: str) -> tuple[int, ...]:
    """Token ids named in generation_config.json and config.json."""
    found: dict[int, None] = {}
    for file in ("generation_config.json", "config.json"):
        value = read_json(folder / file).get(name) if (folder / file).is_file() else None
        for i in value if isinstance(value, list) else [value]:
            if isinstance(i, int) and not isinstance(i, bool) and i >= 0:
                found[i] = None
    return tuple(found)


# -- the model without weights -----------------------------------------------------------------------------------------


class Skeleton:
    """A model on the meta device: its attention calls, its size, its working memory; no weights."""

    def __init__(self, transformers: Any, config: Any, max_position: int) -> None:
        with _named("it cannot be made without weights", ours=False), torch.device("meta"):
            self.model = _build(transformers, config, PROBE_DTYPE)
        self.port = _connect(self.model)
        with _named("its attention cannot be found out by a forward without weights", ours=False):
            logits = self.port.record(lambda: self._forward(PROBE_TOKENS, 1), max_position)
        self.vocab_size = int(logits.shape[-1])
        self._check_calls(config)
        if "position_ids" not in inspect.signature(self.model.forward).parameters:
            raise ModelError("it takes no position_ids, so tokens of several sequences cannot share a batch row")
        numbers = [*self.model.parameters(), *self.model.buffers()]
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.num_numbers = sum(p.numel() for p in numbers)

    def _forward(self, tokens: int, rows: int) -> Tensor:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        # A mask of ones says "no padding" where there are no values from which it could be seen.
        return _logits(self.model, ids, ids, ids[0, :rows], attention_mask=torch.ones_like(ids))

    def _check_calls(self, config: Any) -> None:
        layers, calls = config.num_hidden_layers, len(self.port.specs)
        if calls < layers:
            raise ModelError(
                f"{layers - calls} of its {layers} layers do not route attention through transformers' "
                "registry of attention functions, so they cannot use a paged cache. The missing part is a form of its "
                "own attention (or of a layer without any) over blocks"
            )

    def workspace(self, tokens: int, rows: int, dtype: str) -> int:
        """Bytes that one forward of `tokens` tokens and `rows` rows of logits takes, an upper bound with some spare."""
        peak = Peak([*self.model.parameters(), *self.model.buffers()])
        attend: Attend = lambda layer, q, k, v, out: None  # noqa: E731
        with peak:
            self.port.run(attend, lambda: self._forward(tokens, min(rows, tokens)))
        scale = torch_dtype(dtype).itemsize / PROBE_DTYPE.itemsize
        return int(peak.most * scale * SPARE) + rows * self.vocab_size * 4


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors alive at once, `weights` and what is seen of them aside."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._alive: dict[int, int] = {}
        self._weights = frozenset(t.untyped_storage()._cdata for t in weights)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._weights:
            return
        if key in self._alive:
            self._alive[key] += 1
        else:
            self._alive[key] = 1
            self._now += size
            self.most = max(self.most, self._now)
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._alive[key] -= 1
        if not self._alive[key]:
            del self._alive[key]
            self._now -= size


def _build(transformers: Any, config: Any, dtype: torch.dtype) -> Any:
    """The causal language model of a configuration, weights as initialized, ready to infer."""
    _register_own_attention(config)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
    )
    return model.eval()


def _connect(model: Any) -> Port:
    """A port for the model's attention, found by every module of it."""
    port = Port()
    for module in model.modules():
        module.pagedkv_port = port
    return port


def _check_halves(model: Any, dtype: torch.dtype) -> None:
    """`ModelError` for a module left in the other half precision: it may convert on its own, where a device cannot."""
    halves = {torch.bfloat16, torch.float16} - {dtype}
    left = next((name for name, parameter in model.named_parameters() if parameter.dtype in halves), None)
    if left is not None:
        own, wanted = (str(one).removeprefix("torch.") for one in (model.get_parameter(left).dtype, dtype))
        raise ModelError(f"{left} is left in {own} where the model runs in {wanted}; convert it, or choose dtype {own}")


@torch.inference_mode()
def _logits(model: Any, ids: Tensor, positions: Tensor, rows: Tensor | None, **named: Any) -> Tensor:
    """Logits [n, V] of the tokens `rows` of one packed row of ids [1, T]."""
    keep = {} if rows is None else {"logits_to_keep": rows}
    result = model(input_ids=ids, position_ids=positions, use_cache=False, **keep, **named).logits[0]
    if rows is not None and len(result) != len(rows):  # a model that knows no logits_to_keep computed them all
        result = result.index_select(0, rows)
    return result  # type: ignore[no-any-return]


# -- models with a registry of their own -------------------------------------------------------------------------------


def _register_own_attention(config: Any) -> None:
    """Falcon chooses among attention classes of its own, in its own table: ours is added to it."""
    if config.model_type != "falcon":
        return
    if config.alibi:
        raise ModelError("alibi: true adds a position bias in attention, which the bridge does not have")
    from transformers.models.falcon import modeling_falcon as falcon

    falcon.FALCON_ATTENTION_CLASSES.setdefault(NAME, _falcon_attention(falcon))


def _falcon_attention(falcon: Any) -> type[Any]:
    """Falcon's attention with the registry's call in place of its products."""
    parent: Any = falcon.FalconAttention

    class PagedFalconAttention(parent):  # type: ignore[misc]
        """Projects, splits and rotates as Falcon does; keys of a group stay one, as they are stored."""

        def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Any]:
            if self.config._attn_implementation != NAME:
                return super().forward(hidden_states, *args, **named)  # type: ignore[no-any-return]
            q, k, v = (heads.transpose(1, 2) for heads in self._split_heads(self.query_key_value(hidden_states)))
            if self.new_decoder_architecture:  # the split repeats each key for its group of queries
                group = self.num_heads // self.num_kv_heads
                k, v = k[:, ::group], v[:, ::group]
            q, k = falcon.apply_rotary_pos_emb(q, k, *named["position_embeddings"])
            out, _ = _attention(self, q, k, v, named["attention_mask"], scaling=self.inv_norm_factor)
            return self.dense(out.flatten(2)), None

    return PagedFalconAttention


def _stored_dtype(config: Any) -> str | None:
    """What the configuration says the weights are stored in, None where it says nothing we know."""
    stored = getattr(config, "dtype", None)
    stored = getattr(torch, stored, None) if isinstance(stored, str) else stored
    return None if stored is None else DTYPES.get(stored)


# -- opening and loading -----------------------------------------------------------------------------------------------


class BridgedCheckpoint:
    """A folder in Hugging Face layout whose model runs through transformers. Opening it reads no weights."""

    quantization: str | None = None
    formats: Mapping[str, str] = MappingProxyType({})

    def __init__(self, folder: Path, load_tokenizer: TokenizerLoader | None = None, *, dummy: bool = False) -> None:
        self.path = folder
        self.format = "dummy" if dummy else "safetensors"
        self._load_tokenizer = load_tokenizer
        kind = str(read_json(folder / "config.json").get("model_type"))
        self._library = library(f"model_type {kind}")
        self._files = None if dummy else SafetensorsFiles(folder)
        with _quiet(self._library), _named(f"{folder}: model_type {kind[:60]}"):
            self._config = _read_config(self._library, folder)
            dtype = _stored_dtype(self._config)  # making the skeleton writes its own over it
            limit = _max_position(self._config)
            self.skeleton = Skeleton(self._library, self._config, limit or FARTHEST)
            if limit is None:
                raise ModelError("config.json has no max_position_embeddings, a number of positions is needed")
        self.config = self._describe(kind, limit, dtype)
        self.weight_bytes = self._files.weight_bytes if self._files else self.skeleton.num_numbers * 2

    def _describe(self, kind: str, limit: int, dtype: str | None) -> BridgedConfig:
        begins = _ids(self.path, "bos_token_id")
        return BridgedConfig(
            architecture=type(self.skeleton.model).__name__,
            model_type=kind,
            vocab_size=self.skeleton.vocab_size,
            max_position=limit,
            layers=self.skeleton.port.specs,
            num_parameters=self.skeleton.num_parameters,
            num_numbers=self.skeleton.num_numbers,
            dtype=dtype,
            bos_token_id=begins[0] if begins else None,
            eos_token_ids=_ids(self.path, "eos_token_id"),
        )

    def names(self) -> frozenset[str]:
        """The tensors in the files; none for made-up weights."""
        return frozenset(self._files.where) if self._files else frozenset()

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A copy of a stored tensor in `dtype`."""
        if self._files is None:
            raise ModelError(f"{self.path}: made-up weights have no tensors by name")
        return self._files.tensor(name).to(dtype, copy=True)

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer, or the one named when it was opened."""
        load = self._load_tokenizer
        return load(self.config) if load else load_hf_tokenizer(self.path, self.config.eos_token_ids)

    def plan(self, backend: AttentionBackend, dtype: str, against: str | None) -> WeightPlan:
        """All weights are plain numbers of `dtype`."""
        return WeightPlan(nbytes=self.config.num_numbers * torch_dtype(dtype).itemsize)

    def workspace(self, tokens: int, rows: int, dtype: str) -> int:
        """Bytes that one step takes at most besides weights and cache."""
        return self.skeleton.workspace(tokens, rows, dtype)

    def decoder(
        self, backend: AttentionBackend, dtype: str, plan: WeightPlan, max_model_len: int, progress: Progress | None
    ) -> BridgedDecoder:
        """Read the weights, or make them up."""
        if self._files is None:
            _log.warning("load_format='dummy': the weights are random, so the text will make no sense")
        return BridgedDecoder.load(self, backend, dtype, progress=progress)

    def build(self, dtype: torch.dtype) -> Any:
        """The model with its weights, on the CPU. Raises `ModelError` for weights that are missing or misshapen."""
        with _quiet(self._library), _named(f"{self.path}: loading through transformers"):
            if self._files is None:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(DUMMY_SEED)
                    return _build(self._library, self._config, dtype)
            _register_own_attention(self._config)
            model, report = self._library.AutoModelForCausalLM.from_pretrained(
                self.path,
                config=self._config,
                dtype=dtype,
                attn_implementation=NAME,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # or it raises without a name; what is mismatched is refused below
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        self._check_report(report)
        return model.eval()

    def _check_report(self, report: Mapping[str, Any]) -> None:
        for problem in ("missing_keys", "mismatched_keys"):
            if names := sorted(str(name) for name in report.get(problem) or ()):
                raise ModelError(
                    f"{self.path}: {len(names)} tensors are {problem.split('_')[0]}: {', '.join(names[:5])}. "
                    "Check that config.json and the weights belong together, or download the model again."
                )
        if names := sorted(str(name) for name in report.get("unexpected_keys") or ()):
            _log.warning("%s: %d tensors have no place in the model: %s", self.path, len(names), ", ".join(names[:5]))

    def close(self) -> None:
        """Let go of the files."""
        if self._files:
            self._files.close()


class BridgedDecoder:
    """A model of transformers over a paged cache, with the surface of `NativeDecoder`. Make one with `load`.

    `nbytes` counts parameters and buffers, all of which a step is taken to read; `sinks` maps a layer to its learned
    sinks [Hq], for the backend to bind. Not for two threads at once.
    """

    def __init__(self, config: BridgedConfig, model: Any) -> None:
        self.config = config
        self.nbytes = self.bytes_per_step = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
        self._model = model
        self._port = _connect(model)
        self._port.specs = config.layers
        self.sinks: Mapping[int, Tensor] = self._port.sinks
        self.why_no_graph: str | None = "it runs through transformers, whose modules may wait for the device in a step"

    @classmethod
    def load(
        cls, checkpoint: BridgedCheckpoint, backend: AttentionBackend, dtype: str, *, progress: Progress | None = None
    ) -> BridgedDecoder:
        """Read the weights and compare the bridged model with transformers' own attention on two short texts.

        Raises `ModelError` for weights that do not fit, and for a model that computes something else over a cache.
        """
        report = progress or (lambda done, total: None)
        report(0, 1)
        model = checkpoint.build(torch_dtype(dtype))
        _check_halves(model, torch_dtype(dtype))
        if dtype == "fp16" and not all(bool(p.isfinite().all()) for p in model.parameters()):
            raise ModelError("the weights exceed the range of float16; choose dtype bfloat16 or float32")
        decoder = cls(checkpoint.config, model.to(backend.torch_device))
        decoder._check(torch_dtype(dtype), backend.torch_device)
        report(1, 1)
        return decoder

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Logits [n, V] in float32 of the tokens `rows` [n] (None: all T).

        ids, positions [T] int64 on the backend's device. Calls `attend` once a layer, in order.
        """
        run = self._port.run(attend, lambda: _logits(self._model, ids[None], positions[None], rows))
        logits: Tensor = run.float()
        return logits

    def _check(self, dtype: torch.dtype, device: str) -> None:
        config = self.config
        with _named(f"model_type {config.model_type}, compared with itself after loading"):
            check(self.forward, self._alone, config.layers, self._port.sinks, config.vocab_size, dtype, device)

    def _alone(self, ids: Sequence[int]) -> Tensor:
        """Logits [T, V] of one text with the library's own attention and nothing of ours."""
        config = self._model.config
        config._attn_implementation = "eager"
        try:
            text = torch.tensor([list(ids)], dtype=torch.int64, device=next(self._model.parameters()).device)
            with torch.inference_mode():
                logits: Tensor = self._model(input_ids=text, use_cache=False).logits[0].float()
        finally:
            config._attn_implementation = NAME
        return logits

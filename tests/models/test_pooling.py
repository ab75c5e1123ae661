"""What models declare of vectors, and what is refused of it in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from pagedkv import LLM
from pagedkv.api.errors import ModelError
from pagedkv.models.checkpoint import open_checkpoint
from pagedkv.models.config import ModelConfig
from pagedkv.models.native import workspace_bytes
from pagedkv.models.pooling import Pooling
from tests.helpers.engine_rig import SETTINGS, some_prompts
from tests.helpers.gguf_files import ARCHITECTURE_KEYS, byte_vocabulary, convert, tiny_tensors, write_gguf
from tests.helpers.pooled import by_hand, declare, edit, modules, pooled, tiny_copy, write
from tests.helpers.tiny_models import build_model

TODAY = "sentence_transformers"


def read(where: Path, **settings: Any) -> ModelConfig:
    """The configuration, with no weight read."""
    checkpoint = open_checkpoint(str(where), **settings)
    checkpoint.close()
    assert isinstance(checkpoint.config, ModelConfig)
    return checkpoint.config


def refused(where: Path, *words: str, **settings: Any) -> None:
    with pytest.raises(ModelError) as error:
        read(where, **settings)
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize(("mode", "kind"), [("mean", "mean"), ("lasttoken", "last"), ("cls", "cls")])
@pytest.mark.parametrize("normalize", [False, True])
def test_both_forms_of_the_files_say_the_same(
    tmp_path: Path, older: bool, mode: str, kind: Any, normalize: bool
) -> None:
    where = tiny_copy(tmp_path)
    declare(where, mode, older=older, normalize=normalize)
    assert read(where).pooling == Pooling(kind=kind, normalize=normalize, size=48)


def test_the_names_of_today_and_a_list_of_one_mode_are_read(tmp_path: Path) -> None:
    """Since version 5 classes have longer paths; a mode may stand in a list."""
    where = tiny_copy(tmp_path)
    declare(where)
    listed = modules("Transformer", "Pooling", "Normalize")
    names = ("base.modules.transformer", "sentence_transformer.modules.pooling", "base.modules.normalize")
    for entry, name in zip(listed, names, strict=True):
        entry["type"] = f"{TODAY}.{name}.{entry['type'].rpartition('.')[2]}"
    write(where / "modules.json", listed)
    write(where / "1_Pooling" / "config.json", {"embedding_dimension": 48, "pooling_mode": ["lasttoken"]})
    write(where / "2_Normalize" / "config.json", {"module_input_name": "sentence_embedding"})
    assert read(where).pooling == Pooling(kind="last", normalize=True, size=48)


def test_with_no_mode_at_all_the_mean_is_taken_as_sentence_transformers_does(tmp_path: Path) -> None:
    where = tiny_copy(tmp_path)
    declare(where)
    write(where / "1_Pooling" / "config.json", {"word_embedding_dimension": 48})
    assert read(where).pooling == Pooling(kind="mean", normalize=True, size=48)


def test_what_is_averaged() -> None:
    kinds: dict[Any, range] = {"mean": range(7), "last": range(6, 7), "cls": range(1)}
    for kind, positions in kinds.items():
        assert Pooling(kind=kind, normalize=True, size=4).positions(7) == positions


def test_a_folder_without_those_files_makes_text(tmp_path: Path) -> None:
    assert read(tiny_copy(tmp_path)).pooling is None


@pytest.mark.parametrize(
    ("path", "content", "words"),
    [
        ("modules.json", {"a": 1}, ["modules.json", "no JSON list"]),
        ("modules.json", modules("Transformer", "Pooling", "Dense"), ["'Dense'", "all that is built"]),
        ("modules.json", modules("Transformer"), ["are not Transformer and Pooling"]),
        ("modules.json", ["Transformer", "Pooling"], ["all that is built"]),
        ("modules.json", [{"type": "a.Transformer", "path": "0"}, {"type": "a.Pooling"}], ["lies in '0'"]),
        ("modules.json", [{"type": "Transformer"}, {"type": "Pooling", "path": "../x"}], ["'../x' is no folder"]),
        ("modules.json", [{"type": "Transformer"}, {"type": "Pooling", "path": "/etc"}], ["'/etc' is no folder"]),
        ("modules.json", [{"type": "Transformer"}, {"type": "Pooling", "path": 3}], ["3 is no folder"]),
        (
            "1_Pooling/config.json",
            {"embedding_dimension": 48, "pooling_mode": "max"},
            ["'max'", "lasttoken, mean, cls"],
        ),
        ("1_Pooling/config.json", {"embedding_dimension": 48, "pooling_mode": ["mean", "cls"]}, ["mean + cls"]),
        ("1_Pooling/config.json", {"embedding_dimension": 48, "pooling_mode": [["mean"]]}, ["one at a time"]),
        (
            "1_Pooling/config.json",
            {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            ["max + mean"],
        ),
        ("1_Pooling/config.json", {"embedding_dimension": 47, "pooling_mode": "mean"}, ["47", "hidden_size is 48"]),
        ("1_Pooling/config.json", {"pooling_mode": "mean"}, ["vectors of None numbers"]),
        ("1_Pooling/config.json", [], ["no JSON object"]),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, ["token_embeddings", "not built"]),
        ("sentence_bert_config.json", {"do_lower_case": True}, ["do_lower_case", "set it to false"]),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, path: str, content: Any, words: list[str]) -> None:
    where = tiny_copy(tmp_path)
    declare(where)
    write(where / path, content)
    refused(where, *words)


def test_a_pooling_config_that_is_missing_is_named(tmp_path: Path) -> None:
    where = tiny_copy(tmp_path)
    declare(where)
    (where / "1_Pooling" / "config.json").unlink()
    refused(where, "1_Pooling", "cannot be read as JSON")


@pytest.mark.parametrize("sizes", [[0], [49], ["8"], 8, [True]])
def test_sizes_outside_the_vector_are_refused(tmp_path: Path, sizes: Any) -> None:
    where = tiny_copy(tmp_path, matryoshka_dimensions=sizes)
    declare(where)
    refused(where, "matryoshka_dimensions", "whole numbers from 1 to 48")


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_models_that_read_both_ways_are_refused(tmp_path: Path, field: dict[str, bool]) -> None:
    where = tiny_copy(tmp_path, **field)
    declare(where)
    refused(where, *field, "encoders", "Qwen3-Embedding")


def test_encoders_and_other_ways_to_run_a_model_are_refused(tmp_path: Path) -> None:
    """An encoder would otherwise go to transformers' own modules, which the cache cannot serve."""
    where = tiny_copy(tmp_path, model_type="bert", architectures=["BertModel"])
    declare(where)
    refused(where, "model_type 'bert'", "encoders", "do not run here")
    edit(where, model_type="llama", architectures=["LlamaForCausalLM"])
    refused(where, "native decoder only", model_impl="transformers")


def test_a_bare_class_needs_somebody_to_say_how_vectors_are_made(tmp_path: Path) -> None:
    where = tiny_copy(tmp_path, "qwen3", architectures=["Qwen3Model"])
    refused(where, "Qwen3Model", "modules.json and a pooling config")
    declare(where, "lasttoken")
    assert read(where).pooling == Pooling(kind="last", normalize=True, size=48)
    edit(where, architectures=["Qwen3ForSequenceClassification"])
    refused(where, "Qwen3ForSequenceClassification")


def test_names_without_their_prefix_are_found_and_extra_ones_still_refused(tmp_path: Path) -> None:
    """The bare model's file, whose tensors have no "model." in front."""
    from safetensors.torch import save_file

    bare, whole = pooled("llama", "mean", bare=True, older=True), pooled("llama", "mean")
    names = set(load_file(bare / "model.safetensors"))
    assert "embed_tokens.weight" in names and not any(name.startswith("model.") for name in names)
    ours, theirs = open_checkpoint(str(bare)), open_checkpoint(str(whole))
    stated = load_file(whole / "model.safetensors")
    for name in ours.names():  # type: ignore[union-attr]
        dtype = stated[name].dtype
        assert (ours.tensor(name, dtype) == theirs.tensor(name, dtype)).all()  # type: ignore[union-attr]
    assert "lm_head.weight" not in ours.names() | theirs.names()  # type: ignore[union-attr]
    where = tiny_copy(tmp_path)
    declare(where)
    tensors = load_file(bare / "model.safetensors")
    save_file(
        tensors | {"layers.0.extra": tensors["norm.weight"].clone()}, where / "model.safetensors", {"format": "pt"}
    )
    refused(where, "model.layers.0.extra", "no place")


def test_what_is_left_to_the_caller_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = tiny_copy(tmp_path)
    declare(where)
    write(where / "config_sentence_transformers.json", {"default_prompt_name": "query", "prompts": {"query": "Q: "}})
    pooling = {"embedding_dimension": 48, "pooling_mode": "mean", "include_prompt": False}
    write(where / "1_Pooling" / "config.json", pooling)
    assert read(where).pooling is not None
    assert "default prompt 'query' is put in front of no text here" in caplog.text
    assert "include_prompt is false, but all tokens of a text are pooled" in caplog.text


def test_the_workspace_of_vectors_counts_them_instead_of_logits(tmp_path: Path) -> None:
    """Of r rows: 48 numbers instead of 320, each in the model's dtype and in float32."""
    where = tiny_copy(tmp_path)
    text = read(where)
    declare(where)
    vectors = read(where)
    for tokens, rows in ((64, 8), (64, 64)):
        less = workspace_bytes(text, tokens, rows, "bf16") - workspace_bytes(vectors, tokens, rows, "bf16")
        assert less == rows * (320 - 48) * (2 + 4)
    assert text.num_parameters - vectors.num_parameters == 320 * 48


# -- GGUF --------------------------------------------------------------------------------------------------------------


def gguf_file(path: Path, **keys: Any) -> Path:
    return write_gguf(path / "a.gguf", "llama", ARCHITECTURE_KEYS | byte_vocabulary() | keys, tiny_tensors())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (gguf.PoolingType.NONE, None),
        (gguf.PoolingType.MEAN, "mean"),
        (gguf.PoolingType.CLS, "cls"),
        (gguf.PoolingType.LAST, "last"),
    ],
)
def test_the_pooling_types_of_gguf(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: gguf.PoolingType, expected: Any
) -> None:
    caplog.set_level("INFO", "pagedkv.models")
    pooling = read(gguf_file(tmp_path, pooling_type=int(kind))).pooling
    assert pooling == (expected and Pooling(kind=expected, normalize=True, size=48))
    assert ("do not say whether vectors are normalized; they are" in caplog.text) == (expected is not None)


def test_pooling_types_of_gguf_that_are_refused(tmp_path: Path) -> None:
    refused(gguf_file(tmp_path, pooling_type=int(gguf.PoolingType.RANK)), "4 (rank)", "Use an embedding model")
    refused(gguf_file(tmp_path, pooling_type=9), "is 9", "3 (last)")
    refused(gguf_file(tmp_path, pooling_type=1, **{"attention.causal": False}), "attention.causal", "encoders")


def test_a_gguf_file_gives_the_vectors_of_transformers(tmp_path: Path) -> None:
    """Qwen3-Embedding's form: the last token of a qwen3 without output.weight; here beside the same model's folder."""
    path = convert(build_model("qwen3"), tmp_path / "a.gguf")
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    keys = {name.removeprefix("qwen3."): value for name, value in keys.items() if name != "general.architecture"}
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    keys |= {"pooling_type": int(gguf.PoolingType.LAST), "attention.key_length": 16, "attention.value_length": 16}
    where = write_gguf(tmp_path / "b.gguf", "qwen3", keys, tensors)
    prompts = some_prompts([12, 30], seed=11)
    with LLM(where, **SETTINGS) as llm:
        found = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    folder = pooled("qwen3", "lasttoken")
    np.testing.assert_allclose(found, [by_hand(folder, prompt, "lasttoken") for prompt in prompts], atol=1e-5)


def test_random_weights_need_no_weights_but_the_files_that_declare(tmp_path: Path) -> None:
    where = tiny_copy(tmp_path)
    declare(where)
    (where / "model.safetensors").unlink()
    with LLM(where, load_format="dummy", **SETTINGS) as llm:
        (output,) = llm.embed([1, 2, 3], use_tqdm=False)
    assert np.linalg.norm(output.outputs.embedding) == pytest.approx(1.0, rel=1e-6)
    assert json.loads((where / "config.json").read_text())["hidden_size"] == len(output.outputs.embedding)

"""Tokenizers of folders in Hugging Face layout, against transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from pagedkv.api.errors import ModelError
from pagedkv.models.tokenizer import load_hf_tokenizer
from tests.helpers.tiny_models import BOS, EOS, write_tokenizer

TEXTS = ["", "a", "hello <s> world</s>", "é🙂\n", "<|tool|> x  y"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A word-piece-like tokenizer with <s> and </s>, as Llama's, that adds <s> by its own rule."""
    alphabet = [chr(code) for code in range(32, 127)] + ["▁", "▁h", "he", "l"]
    vocab = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>", *dict.fromkeys(alphabet)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "h"), ("h", "e")], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "texts": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "objects": {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"},
    "no bos": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
    "both": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
    "eos only": {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True},
    "more tokens": {
        "eos_token": "<|tool|>",
        "added_tokens_decoder": {"102": {"content": "<|tool|>", "special": True, "normalized": False}},
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_ids_and_texts_equal_those_of_transformers(folder: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    size = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config = json.loads(json.dumps(CONFIGS[name]).replace('"102"', f'"{size}"'))
    write(folder, "tokenizer_config.json", config | {"tokenizer_class": "PreTrainedTokenizerFast"})
    ours, theirs = load_hf_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.special_ids == set(theirs.all_special_ids) | {0, 1, 2}
    assert ours.vocab_size == len(theirs)


def test_the_byte_tokenizer_of_the_tiny_models(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_hf_tokenizer(tmp_path, [EOS, 7])
    assert tokenizer.encode("hé") == [BOS, *"hé".encode()]
    assert tokenizer.eos_token_ids == (EOS, 7)
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_a_limit_left_in_the_file_does_not_cut_prompts(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_hf_tokenizer(folder).encode("x" * 10)) == 12


def test_ids_that_do_not_belong_together_are_refused(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {"5000": {"content": "<new>"}}})
    with pytest.raises(ModelError, match="'<new>' the id 5000"):
        load_hf_tokenizer(folder)


def test_a_special_token_outside_the_vocabulary_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, "tokenizer_config.json", {"pad_token": "[PAD]"})
    with caplog.at_level(logging.WARNING, "pagedkv.models"):
        assert load_hf_tokenizer(folder).vocab_size == 101
    assert "pad_token '[PAD]'" in caplog.text


def test_where_the_chat_template_is_looked_for(folder: Path) -> None:
    assert load_hf_tokenizer(folder).chat_template is None
    write(folder, "chat_template.json", {"chat_template": "json"})
    assert load_hf_tokenizer(folder).chat_template == "json"
    write(folder, "tokenizer_config.json", {"chat_template": "config"})
    assert load_hf_tokenizer(folder).chat_template == "config"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(folder, "tokenizer_config.json", {"chat_template": several})
    assert load_hf_tokenizer(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}jinja", encoding="utf-8")
    assert load_hf_tokenizer(folder).chat_template == "{{ bos_token }}jinja"


def test_special_tokens_of_an_older_folder(folder: Path) -> None:
    write(folder, "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    tokenizer = load_hf_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.model", "only a SentencePiece file .*tokenizer.json is needed.*save_pretrained"),
        ("vocab.json", "only a vocabulary and merges file"),
        ("other", "no tokenizer.json"),
    ],
)
def test_a_folder_without_tokenizer_json_says_what_to_do(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=message):
        load_hf_tokenizer(tmp_path)


def test_damaged_files_are_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer_config.json: cannot be read as JSON"):
        load_hf_tokenizer(folder)
    write(folder, "tokenizer_config.json", [1])
    with pytest.raises(ModelError, match="no JSON object"):
        load_hf_tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"model": 3}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer.json: cannot be read as a tokenizer"):
        load_hf_tokenizer(folder)

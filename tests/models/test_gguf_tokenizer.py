"""Tokenizers built from GGUF metadata: against transformers, sentencepiece, and the rules of the field."""

from __future__ import annotations

import io
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.api.errors import ModelError, RequestInvalid
from pagedkv.models.checkpoint import open_checkpoint
from pagedkv.models.gguf import GgufFile
from pagedkv.models.gguf_tokenizer import load_gguf_tokenizer
from pagedkv.models.tokenizer import Tokenizer
from tests.helpers.gguf_files import byte_vocabulary, write_gguf

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\nand lines\r\n\ttabs ",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "日本語のテキスト、中文字符。 한국어",
    "emoji 🙂👩‍👩‍👧 ﷽ \u200b end",
    "don't I'LL we're they've it's",
    "1234567890 3.14159 1,000,000 x2y3",
    "def f(x):\n    return x ** 2  # comment\n\n\nclass A: pass",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|> c<|im_",
    "\x00\x01 control \x7f",
    "https://example.org/a?b=c&d=%20#e",
]


def tokenizer_of(tmp_path: Path, **changes: Any) -> Tokenizer:
    """A byte-level file with some of the `tokenizer.` keys changed; None removes one."""
    keys = byte_vocabulary() | {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    keys = {key: value for key, value in keys.items() if value is not None}
    return load_gguf_tokenizer(GgufFile(write_gguf(tmp_path / "t.gguf", "llama", keys, {})))


@lru_cache
def demo() -> tuple[Tokenizer, Any]:
    """Our tokenizer of the demo file and that of transformers."""
    from transformers import PreTrainedTokenizerFast

    try:
        checkpoint = open_checkpoint("demo")
    except ModelError as error:
        pytest.skip(str(error))
    path = checkpoint.path
    return checkpoint.tokenizer(), PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_tokenizer_equals_that_of_transformers(text: str) -> None:
    ours, theirs = demo()
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet=" \n\t019a'é.<|", max_size=30))
def test_the_demo_tokenizer_on_any_text(text: str) -> None:
    from tokenizers import pre_tokenizers

    ours, theirs = demo()
    # transformers splits this file like GPT-2; the model's own tokenizer.json takes digits out one by one before that.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_the_demo_tokenizers_special_tokens() -> None:
    ours, theirs = demo()
    assert ours.special_ids == set(range(17))
    assert (ours.bos_token_id, ours.vocab_size, ours.eos_token_ids) == (1, 49152, (2, 0))
    assert ours.chat_template == theirs.chat_template
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]


CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>&'\"</b>\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_demo_chat_template_equals_that_of_transformers(messages: list[dict[str, str]], prompt: bool) -> None:
    ours, theirs = demo()
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected


def test_merges_and_bytes(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.encode("hello") == [258, ord("o")]  # "hell" is the merge of rank 2, then the byte
    assert tokenizer.encode(" world") == [259, 260, ord("l"), ord("d")]
    assert tokenizer.encode("é") == [0xC3, 0xA9]


def test_an_empty_prompt_gives_no_token_where_none_is_added_u46(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path).encode("") == []
    assert tokenizer_of(tmp_path, ggml__add_bos_token=True).encode("") == [261]


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path) -> None:
    both = tokenizer_of(tmp_path, ggml__add_bos_token=True, ggml__add_eos_token=True)
    assert both.encode("h") == [261, ord("h"), 262]
    assert both.encode("h", add_special_tokens=False) == [ord("h")]
    assert both.encode_batch(["h", ""]) == [[261, ord("h"), 262], [261, 262]]
    llama3 = tokenizer_of(tmp_path, ggml__pre="llama-bpe")
    assert llama3.encode("h") == [261, ord("h")]
    assert tokenizer_of(tmp_path, ggml__pre="llama-bpe", ggml__add_bos_token=False).encode("h") == [ord("h")]
    with pytest.raises(ModelError, match="add_bos_token is set, but there is no bos_token_id"):
        tokenizer_of(tmp_path, ggml__add_bos_token=True, ggml__bos_token_id=None)


def test_control_tokens_are_matched_and_skipped(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    ids = tokenizer.encode("h<|im_end|>h")
    assert ids == [ord("h"), 262, ord("h")]
    assert tokenizer.decode(ids) == "hh"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "h<|im_end|>h"
    assert tokenizer.special_ids == {261, 262}


def test_user_defined_tokens_are_matched_and_kept(tmp_path: Path) -> None:
    vocabulary = byte_vocabulary()
    tokens, types = list(vocabulary["tokenizer.ggml.tokens"]), list(vocabulary["tokenizer.ggml.token_type"])
    tokens[270], types[270] = "<think>", 4
    tokenizer = tokenizer_of(tmp_path, ggml__tokens=tokens, ggml__token_type=types)
    assert tokenizer.encode("h<think>") == [ord("h"), 270]
    assert tokenizer.decode([ord("h"), 270]) == "h<think>"


PIECES = {
    "gpt-2": ["x", " 1234", "'s", "   ", " é", "\n", "\n", "b"],
    "smollm": ["x", " ", "1", "2", "3", "4", "'s", "   ", " é", "\n", "\n", "b"],
    "llama-bpe": ["x", " ", "123", "4", "'s", "   ", " é", "\n\n", "b"],
    "qwen2": ["x", " ", "1", "2", "3", "4", "'s", "   ", " é", "\n\n", "b"],
    "gpt-4o": ["x", " ", "123", "4", "'s", "   ", " é", "\n\n", "b"],
}


@pytest.mark.parametrize("rule", PIECES)
def test_text_is_split_as_the_rule_says(tmp_path: Path, rule: str) -> None:
    tokenizer = tokenizer_of(tmp_path, ggml__pre=rule)
    pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str("x 1234's    é\n\nb")
    starts = [bounds[0] for _, bounds in pieces]
    text = "x 1234's    é\n\nb"
    assert [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)] == PIECES[rule]


def test_gpt_4o_splits_where_case_changes_and_keeps_contractions(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, ggml__pre="gpt-4o")
    pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str("camelCase I'll DON'T")
    assert [text.replace("Ġ", " ") for text, _ in pieces] == ["camel", "Case", " I'll", " DON'T"]


def test_an_unknown_rule_or_kind_is_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match=r"splitting rule 'viking' is not known.*smollm"):
        tokenizer_of(tmp_path, ggml__pre="viking")
    with pytest.raises(ModelError, match=r"tokenizer 'rwkv' is not known \(known: gpt2, llama\)"):
        tokenizer_of(tmp_path, ggml__model="rwkv")
    with caplog.at_level(logging.WARNING, "pagedkv.models"):
        assert tokenizer_of(tmp_path, ggml__pre=None).encode("h") == [ord("h")]
    assert "names no splitting rule" in caplog.text


def test_damaged_vocabularies_are_refused(tmp_path: Path) -> None:
    tokens = list(byte_vocabulary()["tokenizer.ggml.tokens"])
    with pytest.raises(ModelError, match="token 'a' twice"):
        tokenizer_of(tmp_path, ggml__tokens=[*tokens[:-1], "a"])
    with pytest.raises(ModelError, match="319 tokens, but 320 token types"):
        tokenizer_of(tmp_path, ggml__tokens=tokens[:-1])
    with pytest.raises(ModelError, match="cannot be built"):
        tokenizer_of(tmp_path, ggml__merges=["he zz"])
    with pytest.raises(ModelError, match="merges' is not an array"):
        tokenizer_of(tmp_path, ggml__merges=None)


@pytest.mark.parametrize("text", [None, 3, b"bytes", "lone \ud800 surrogate"])
def test_what_is_no_text_is_refused(tmp_path: Path, text: Any) -> None:
    with pytest.raises(RequestInvalid) as caught:
        tokenizer_of(tmp_path).encode(text)
    assert caught.value.field == "prompt"


@lru_cache
def sentencepiece_model() -> Any:
    import sentencepiece as spm

    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "lazy",
        "dogs",
        "while",
        "paged",
        "caches",
        "keep",
        "keys",
        "and",
        "values",
        "of",
        "every",
        "token",
        "žluť",
        "kůň",
    ]
    lines = [" ".join(words[(i * 7 + j * j) % len(words)] for j in range(12)) for i in range(400)]
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=420, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        split_digits=True, minloglevel=2,
    )  # fmt: skip
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_keys(model: Any) -> dict[str, Any]:
    size = model.get_piece_size()
    kinds = [(model.is_unknown, 2), (model.is_control, 3), (model.is_unused, 5), (model.is_byte, 6)]
    types = [next((kind for check, kind in kinds if check(index)), 1) for index in range(size)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(index) for index in range(size)],
        "tokenizer.ggml.scores": [model.get_score(index) for index in range(size)],
        "tokenizer.ggml.token_type": types,
    }


@lru_cache
def sentencepiece_tokenizer(folder: Path) -> Tokenizer:
    keys = sentencepiece_keys(sentencepiece_model())
    return load_gguf_tokenizer(GgufFile(write_gguf(folder / "s.gguf", "llama", keys, {})))


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_pieces_give_sentencepieces_ids(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    model, tokenizer = sentencepiece_model(), sentencepiece_tokenizer(tmp_path_factory.getbasetemp())
    ids = model.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids) == model.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40) | st.text(alphabet="the quickbrownžlf 1\n", max_size=60))
def test_sentencepiece_on_any_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    model, tokenizer = sentencepiece_model(), sentencepiece_tokenizer(tmp_path_factory.getbasetemp())
    assert tokenizer.encode(text, add_special_tokens=False) == model.encode(text)


def test_sentencepiece_special_tokens_and_prefix(tmp_path: Path) -> None:
    model = sentencepiece_model()
    keys = sentencepiece_keys(model)
    tokenizer = load_gguf_tokenizer(GgufFile(write_gguf(tmp_path / "a.gguf", "llama", keys, {})))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.special_ids) == (1, (2,), {0, 1, 2})
    # After a special token a text begins anew, as in llama.cpp.
    assert tokenizer.encode("</s>fox", add_special_tokens=False) == [2, *model.encode("fox")]
    keys["tokenizer.ggml.add_space_prefix"] = False
    plain = load_gguf_tokenizer(GgufFile(write_gguf(tmp_path / "b.gguf", "llama", keys, {})))
    assert plain.encode(" fox", add_special_tokens=False) == model.encode("fox")
    assert plain.decode(model.encode("fox")) == " fox"


def test_sentencepiece_files_that_would_normalize_or_are_damaged_are_refused(tmp_path: Path) -> None:
    keys = sentencepiece_keys(sentencepiece_model())
    changes = [
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces is set"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2]}, "precompiled_charsmap is set"),
        ({"tokenizer.ggml.scores": [0.0] * 3}, "scores of the vocabulary are damaged"),
        ({"tokenizer.ggml.scores": [float("nan")] * 420}, "scores of the vocabulary are damaged"),
        ({"tokenizer.ggml.tokens": [*keys["tokenizer.ggml.tokens"][:-1], "x" * 300]}, "300 characters long"),
    ]
    for change, message in changes:
        with pytest.raises(ModelError, match=message):
            load_gguf_tokenizer(GgufFile(write_gguf(tmp_path / "a.gguf", "llama", keys | change, {})))

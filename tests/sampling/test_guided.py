"""Guided decoding without an engine: what may be asked for, what is refused, and which tokens may come next."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from pydantic import BaseModel
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pagedkv import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from pagedkv.api import Event
from pagedkv.errors import RequestInvalid
from pagedkv.ops import REFERENCE
from pagedkv.sampling.guided import MAX_CONJUNCTS, MAX_PATTERN_PROPERTIES, MAX_TEXT, Grammars, Guide
from pagedkv.sampling.sampler import DeviceOps, Sampler

ENDS = (257, 259)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A token a byte, ids as bytes, and four special ones."""
    alphabet = _byte_letters()
    backend = tokenizers.Tokenizer(models.BPE(vocab={alphabet[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(f"<|{i}|>", special=True) for i in range(256, 260)])
    return backend


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: its own where it prints, else the next one from U+0100 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in own else chr(next(others)) for b in range(256)]


def grammars(
    backend: tokenizers.Tokenizer | None = None, vocab_size: int = 260, ends: Sequence[int] = ENDS
) -> Grammars:
    backend = backend or byte_tokenizer()
    return Grammars(backend.to_str, backend.get_vocab_size(), vocab_size, ends)


@pytest.fixture(scope="module")
def over_bytes() -> Callable[..., Guide]:
    """A guide over `byte_tokenizer`, after some text."""
    made = grammars()

    def start(text: str | bytes = "", **names: Any) -> Guide:
        output = list(text.encode() if isinstance(text, str) else text)
        return made.compiled(GuidedDecodingParams(**names)).start(output)

    return start


def allowed(guide: Guide) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(guide.allowed(), bitorder="little")).tolist())


# -- parameters --------------------------------------------------------------------------------------------------------


class City(BaseModel):
    name: str
    people: int


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"json": {"type": "integer"}}, {"json": '{"type":   "integer"}'}),
        ({"json": City}, {"json": City.model_json_schema()}),
        ({"choice": ["a", "b"]}, {"choice": ("a", "b")}),
        ({"regex": "a+"}, {"regex": "a+", "json": None, "json_object": False}),
        ({"json_object": True}, {"json_object": True, "grammar": None}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)
def test_the_same_wish_is_the_same_value(one: dict[str, Any], other: dict[str, Any]) -> None:
    params, same = GuidedDecodingParams(**one), SamplingParams(guided_decoding=other).guided_decoding
    assert params == same and hash(params) == hash(same) and params.llguidance == same.llguidance
    assert dataclasses.replace(params) == copy.deepcopy(params) == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.regex = "b"  # type: ignore[misc]


def test_all_sampling_params_travel_to_another_process() -> None:
    full: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -3, "max_tokens": 99, "min_tokens": 2,
        "stop_token_ids": [4, 5], "skip_special_tokens": False, "n": 3, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"3": 1.5}, "allowed_token_ids": [1, 2],
        "bad_words": ["no", [7, 8]], "stop": ["end"], "include_stop_str_in_output": True, "logprobs": 2,
        "prompt_logprobs": 1,
    }  # fmt: skip
    for guided in (
        {"json": City},
        {"regex": "é+"},
        {"choice": ["x"]},
        {"grammar": 'start: "a"'},
        {"json_object": True},
    ):
        params = SamplingParams(**full, guided_decoding=guided)
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            back = pickle.loads(pickle.dumps(params, protocol))
            assert back == params and hash(back) == hash(params)
            assert back.guided_decoding.llguidance == params.guided_decoding.llguidance
        assert dataclasses.replace(params, seed=1).guided_decoding == params.guided_decoding


def test_the_newer_name_is_the_same_setting() -> None:
    assert StructuredOutputsParams is GuidedDecodingParams
    params = SamplingParams(structured_outputs={"regex": "a"})
    assert params == SamplingParams(guided_decoding={"regex": "a"}) and params.structured_outputs is None
    with pytest.raises(RequestInvalid, match="two names of one setting"):
        SamplingParams(structured_outputs={"regex": "a"}, guided_decoding={"regex": "a"})


CHAIN = 1500


def chained(step: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    definitions = {f"r{i}": step(f"#/$defs/r{i + 1}") for i in range(CHAIN)}
    return {"$defs": {**definitions, f"r{CHAIN}": {"type": "string"}}, "$ref": "#/$defs/r0"}


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(count)]


NESTED: Any = {}
for _ in range(3000):
    NESTED = {"items": NESTED}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"json_object": False}, "got none"),
        ({"json": {}, "regex": "a"}, "got json, regex"),
        ({"jsn": {}}, "no setting 'jsn'; known are json"),
        ({1: 2}, "mapping of its settings"),
        ("[a-z]", "mapping of its settings"),
        ({"json": "{"}, "json Expecting property name"),
        ({"json": "[" * 100_000}, "json .*recursion"),
        ({"json": "[1]"}, "json must be a JSON schema, an object, got list"),
        ({"json": True}, "got bool"),
        ({"json": ""}, "json must be a text that is not empty"),
        ({"json": {"a": float("nan")}}, "Out of range float"),
        ({"json": {"a": {1, 2}}}, "not JSON serializable"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"type": "object", "if": {}}}, 'Unimplemented keys: .*"if"'),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, "Unsatisfiable"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "does not fetch resources"),
        ({"json": {"$ref": "http://127.0.0.1:9/schema"}}, "does not fetch resources"),
        ({"json": NESTED}, "recursion"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": ""}, "not empty"),
        ({"regex": 5}, "regex must be a text"),
        ({"regex": "\ud800"}, "surrogates not allowed"),
        ({"choice": []}, "at least one text"),
        ({"choice": "ab"}, "at least one text, got 'ab'"),
        ({"choice": ["a", 1]}, "at least one text"),
        ({"choice": 7}, "not iterable"),
        ({"choice": ["\ud800"]}, "choice cannot be used: "),
        ({"json": {"const": "\ud800"}}, "surrogates not allowed"),
        ({"grammar": "start: other"}, "unknown name"),
        ({"grammar": "hello"}, "grammar Failed to convert"),
        ({"grammar": "root ::= other"}, "Rule 'other' not found"),
        ({"grammar": "root ::= " + "(" * 3000}, "grammar .*recursion"),
        ({"grammar": "start: X\n%import .other.X"}, "Unknown common regex"),
        ({"json_object": 1}, "must be True or False"),
    ],
)
def test_bad_input_is_named_when_the_parameters_are_made(given: Any, reason: str) -> None:
    with pytest.raises(RequestInvalid, match=reason) as caught:
        SamplingParams(guided_decoding=given)
    assert caught.value.field == "guided_decoding" and len(str(caught.value)) < 2000


def test_the_end_is_not_ignored() -> None:
    with pytest.raises(RequestInvalid, match="ignore_eos forbids") as caught:
        SamplingParams(guided_decoding={"regex": "a"}, ignore_eos=True)
    assert caught.value.field == "guided_decoding"


def test_positional_values_are_refused() -> None:
    with pytest.raises(RequestInvalid, match="named settings only"):
        GuidedDecodingParams({"type": "object"})  # type: ignore[misc]


# -- hostile -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"regex": "a" * (MAX_TEXT + 1)}, "more than"),
        ({"choice": ["a" * MAX_TEXT]}, "more than"),
        ({"json": {"allOf": patterns(40)}}, f"{MAX_CONJUNCTS} at most"),
        ({"json": {"allOf": [{"properties": {"a": p}} for p in patterns(40)]}}, "at most"),
        ({"json": {"$defs": {"p": {"anyOf": patterns(40)}}, "$ref": "#/$defs/p", "minLength": 3}}, "at most"),
        ({"grammar": 'start: "a" %json ' + json.dumps({"allOf": patterns(40)})}, "at most"),
        ({"grammar": "start: T\nT: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(40))}, "with &: write fewer"),
        ({"json": {"patternProperties": {f"^{i}$": {} for i in range(MAX_PATTERN_PROPERTIES + 1)}}}, "write fewer"),
        (
            {"json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(12)]}},
            "large",
        ),
    ],
)
def test_what_would_take_seconds_or_for_ever_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(RequestInvalid, match=reason):
        GuidedDecodingParams(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"json": chained(lambda ref: {"properties": {"a": {"$ref": ref}}})},
        {"json": chained(lambda ref: {"items": {"anyOf": [{"$ref": ref}, {"type": "null"}]}})},
        {"grammar": "\n".join(["start: r0", *(f'r{i}: "a" r{i + 1}' for i in range(5000)), 'r5000: "b"'])},
        {"grammar": "\n".join(["start: R0", *(f'R{i}: "a" R{i + 1}' for i in range(5000)), 'R5000: "b"'])},
    ],
)
def test_long_chains_of_references_do_not_end_the_process(given: Any) -> None:
    """On the stack of an ordinary thread, each is a segmentation fault."""
    try:
        guide = grammars().compiled(GuidedDecodingParams(**given)).start(())
    except RequestInvalid as error:
        assert "too big" in str(error)
    else:
        assert allowed(guide)


@pytest.mark.parametrize(
    "given",
    [
        {"grammar": "start: T\nT: " + " & ".join(f"/.*a.{{{i}}}.*/" for i in range(MAX_CONJUNCTS))},
        {"json": {"type": "integer", "multipleOf": 987654321}},
        {"grammar": "start: start"},
    ],
)
def test_what_is_too_complex_for_the_tokens_is_refused_when_compiled(given: Any) -> None:
    with pytest.raises(RequestInvalid, match=r"cannot be used: \w") as caught:
        grammars().compiled(GuidedDecodingParams(**given))
    assert caught.value.field == "guided_decoding"


def test_many_patterns_are_fine_where_nothing_is_merged(over_bytes: Callable[..., Guide]) -> None:
    properties = {f"p{i}": {"description": "one of many", **pattern} for i, pattern in enumerate(patterns(40))}
    optional = {"anyOf": [{"type": "string", "pattern": "^[ab]$"}, {"type": "null"}], "default": None, "title": "O"}
    schema = {"type": "object", "properties": {**properties, "o": optional}, "allOf": [], "$defs": {}}
    schema.pop("allOf")
    assert allowed(over_bytes(json=schema)) == {ord("{")}


def test_a_matcher_that_gives_up_allows_nothing_and_says_why(over_bytes: Callable[..., Guide]) -> None:
    guide = over_bytes(regex="(a?){3000}a{3000}")
    assert guide.trouble == "" and ord("a") in allowed(guide)
    guide.append(ord("a"))
    assert allowed(guide) == set() and "too many expressions" in guide.trouble
    wrong = over_bytes("b", regex="a+")
    assert allowed(wrong) == set() and "doesn't satisfy the grammar" in wrong.trouble


# -- which tokens may come ---------------------------------------------------------------------------------------------


def test_choices_allow_their_next_bytes_and_the_ends_after_the_last(over_bytes: Callable[..., Guide]) -> None:
    choices = ["yes", "yesterday", "né", "no", 'a"b\\n', "/*#|", "tab\tline\n", "\U0001f600"]
    texts = [choice.encode() for choice in choices]
    for before in sorted({text[:n] for text in texts for n in range(len(text) + 1)}):
        expected = {text[len(before)] for text in texts if text.startswith(before) and len(text) > len(before)}
        expected |= set(ENDS) if before in texts else set()
        assert allowed(over_bytes(before, choice=choices)) == expected, before


@pytest.mark.parametrize(
    ("names", "text", "expected"),
    [
        ({"regex": "[a-c]{2}d?"}, "", b"abc"),
        ({"regex": "[a-c]{2}d?"}, "ab", b"d."),
        ({"regex": "[a-c]{2}d?"}, "abd", b"."),
        ({"regex": "^a$"}, "", b"a"),
        ({"regex": "(x/y)*"}, "x", b"/"),
        ({"json": {"const": "é!"}}, '"é', b"!"),
        ({"json": {"type": "boolean"}}, "", b"tf"),
        ({"json": {"type": "boolean"}}, "true", b"."),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 9}}, "", b"3456789"),
        ({"json_object": True}, "", b"{"),
        ({"json_object": True}, "{", b'"} \t\r\n'),
        ({"json_object": True}, '{"a":1}', b"."),
        ({"json_object": True}, "{" + " " * 64, b'"}'),
        ({"json": {"const": {"a": 1}, "x-guidance": {"whitespace_flexible": False}}}, '{"a":', b"1"),
        ({"grammar": 'start: "a" (b | "c")\nb: "d"+'}, "a", b"dc"),
        ({"grammar": 'root ::= "a" [0-2] | "b"\n'}, "", b"ab"),
        ({"grammar": 'root ::= "a" [0-2] | "b"\n'}, "a", b"012"),
        ({"grammar": 'start: "a" <[256]>'}, "a", b"\x00"),
        ({"grammar": 'start: "%json" /[%&]/ "&&&&&&&&&&"'}, "%json", b"%&"),
        ({"grammar": 'start: "a" %json {"enum": ["/%json &&&&&&&&&&", "\\"/"]}'}, 'a"', b"/\\"),
    ],
)
def test_next_bytes_by_hand(
    over_bytes: Callable[..., Guide], names: dict[str, Any], text: str, expected: bytes
) -> None:
    """In `expected` a point stands for the ends, and NUL for token 256."""
    ids = {byte for byte in expected if byte and byte != ord(".")}
    ids |= set(ENDS) if b"." in expected else set()
    ids |= {256} if b"\x00" in expected else set()
    assert allowed(over_bytes(text, **names)) == ids


def test_only_valid_utf8_comes(over_bytes: Callable[..., Guide]) -> None:
    first = allowed(over_bytes(regex="[^a]"))
    assert first == {*range(97), *range(98, 128), *range(0xC2, 0xF5)}  # RFC 3629: C0, C1 and F5 to FF never appear
    assert allowed(over_bytes(b"\xe2\x82", regex=".")) == set(range(0x80, 0xC0))


def test_an_end_token_that_is_text_too_ends_the_form_and_is_no_part_of_it() -> None:
    made = grammars(ends=[257, ord("A")])
    pair = made.compiled(GuidedDecodingParams(regex="[A-C]{2}"))
    assert allowed(pair.start(())) == set(b"BC")
    assert allowed(pair.start(b"BC")) == {257, ord("A")}
    assert allowed(made.compiled(GuidedDecodingParams(regex="[B-C]*")).start(b"B")) == {257, *b"ABC"}


def test_tokens_of_several_characters_and_ids_that_only_one_side_knows() -> None:
    """Byte-level BPE, with a vocabulary that is larger or smaller than the model's."""
    words = ["he", "hel", "llo", "lo", "hello", "Ġwor", "world", "Ġhello"]
    vocab = {letter: i for i, letter in enumerate(_byte_letters())} | {
        word: 300 - 44 + i for i, word in enumerate(words)
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    end = backend.token_to_id("<end>")
    texts = {i: word.replace("Ġ", " ") for word, i in vocab.items() if i >= 256} | {i: chr(i) for i in range(128)}
    possible = ["".join(parts) for parts in itertools.product(("hello", " hello", "llo", "world"), repeat=3)]
    for vocab_size in (end + 1, end + 100, end + 3):
        made = grammars(backend, vocab_size, [end]).compiled(GuidedDecodingParams(regex="(hello| hello|llo|world)*"))
        for before in ("", "hello", "world"):
            guide = made.start([ord(letter) for letter in before])
            expected = {i for i, text in texts.items() if any(whole.startswith(before + text) for whole in possible)}
            assert len(guide.allowed()) == -(-vocab_size // 8) and allowed(guide) == expected | {end}
    small = grammars(backend, 200, [10]).compiled(GuidedDecodingParams(choice=["hello"])).start(())
    assert len(small.allowed()) == 25 and allowed(small) == {ord("h")}


def test_a_sentencepiece_tokenizer_with_bytes_to_fall_back_on() -> None:
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "ab"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("<unk>", "</s>")])
    made = grammars(backend, len(pieces), [1]).compiled(GuidedDecodingParams(regex=" (ab|b)|a[éê]"))
    assert allowed(made.start(())) == {ids[text] for text in ("▁", "<0x20>", "▁a", "a", "<0x61>")}
    assert allowed(made.start([ids["▁"]])) == {ids[text] for text in ("a", "ab", "<0x61>", "b", "<0x62>")}
    assert allowed(made.start([ids["a"], ids["<0xC3>"]])) == {ids["<0xA9>"], ids["<0xAA>"]}
    assert allowed(made.start([ids["▁a"], ids["b"]])) == {1}


def test_a_model_that_cannot_be_guided() -> None:
    whole = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    for made, reason in (
        (grammars(ends=()), "the model names none"),
        (grammars(whole, 3, [2]), "cannot use its tokenizer"),
    ):
        with pytest.raises(RequestInvalid, match=reason):
            made.compiled(GuidedDecodingParams(regex="a"))


def test_what_llguidance_warns_of_is_told(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "object", "minProperties": 1, "uniqueItems": True, "x-guidance": {"lenient": True}}
    with caplog.at_level(logging.WARNING, "pagedkv.sampling"):
        grammars().compiled(GuidedDecodingParams(json=schema))
    assert "guided_decoding: " in caplog.text and "nimplemented" in caplog.text


def test_a_grammar_is_compiled_once() -> None:
    made = grammars()
    first = made.compiled(GuidedDecodingParams(choice=["a"]))
    assert made.compiled(SamplingParams(guided_decoding={"choice": ["a"]}).guided_decoding) is first
    one, other = first.start(()), first.start(())
    one.append(ord("a"))
    assert (allowed(one), allowed(other)) == (set(ENDS), {ord("a")})


# -- in the sampler ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True])
def test_draws_of_a_guided_row_and_of_its_neighbour(over_bytes: Callable[..., Guide], there: bool) -> None:
    """Here, and where a backend samples with its own ops."""
    device = DeviceOps(
        greedy=REFERENCE["greedy"], sample=REFERENCE["sample"], to_host=lambda ids: (Event(), ids.numpy())
    )
    sampler, plain = (Sampler(4, 260, 0, device if there else None) for _ in range(2))
    params = SamplingParams(temperature=1.5, guided_decoding={"regex": "(ab|cd)+e"})
    sampler.set_row(1, params, ENDS, 5, guide=over_bytes(regex="(ab|cd)+e"))
    for made in (sampler, plain):
        made.set_row(2, SamplingParams(temperature=1.5), ENDS, 6)
    text, rows = [], np.array([1, 2])
    for index in range(60):
        logits = torch.randn(2, 260, generator=torch.Generator().manual_seed(index))
        kept = logits.clone()
        guided, free = sampler(logits, rows, np.array([index, index])).tolist()
        assert torch.equal(logits, kept)
        assert free == plain(logits[1:], rows[1:], np.array([index]))[0]
        if guided in ENDS:
            break
        text.append(guided)
    assert bytes(text[-1:]) == b"e" and set(bytes(text[:-1]).decode().replace("ab", "").replace("cd", "")) == set()


def test_a_broken_row_stays_one(over_bytes: Callable[..., Guide]) -> None:
    sampler = Sampler(1, 260, 0)
    sampler.set_row(1, SamplingParams(guided_decoding={"regex": "a"}), ENDS, 5, guide=over_bytes(regex="a"))
    logits = torch.zeros(1, 260)
    logits[0, 7] = torch.nan
    assert sampler(logits, np.array([1]), np.array([0])).tolist() == [-1]

"""The stream against a decode of everything, on a byte-level and on a byte-fallback tokenizer (U44)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pagedkv.sampling.detokenizer import IncrementalDetokenizer

MARK = "\N{REPLACEMENT CHARACTER}"
TEXT = "Příliš žluťoučký kůň 叫んだ 😀👩‍👩‍👧 the quick brown fox — úpěl ďábelské ódy 日本語 🎉"
WORDS = ["a", "▁a", "▁Hello", "▁", "▁kůň", ".", "▁叫", "\n"]


class Wrapped:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.inner = tokenizer
        self.longest = 0

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        return self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)


def byte_level() -> Wrapped:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return Wrapped(tokenizer)


def byte_fallback() -> Wrapped:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    return Wrapped(tokenizer)


LEVEL, FALLBACK = byte_level(), byte_fallback()


def level_bytes(data: bytes) -> list[int]:
    """One byte-level token for each byte."""
    return [LEVEL.inner.token_to_id(_visible(byte)) for byte in data]


def _visible(byte: int) -> str:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in printable else chr(256 + [b for b in range(256) if b not in printable].index(byte))


def fallback_bytes(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


def word(name: str) -> int:
    return 3 + 256 + WORDS.index(name)


def stream(tokenizer: Wrapped, prompt: list[int], ids: list[int], skip: bool = True, cuts: Sequence[int] = ()) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    parts = [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]
    return "".join(parts) + detokenizer.finish()


def expected(tokenizer: Wrapped, prompt: list[int], ids: list[int], skip: bool = True) -> str:
    whole, before = tokenizer.decode(prompt + ids, skip), tokenizer.decode(prompt, skip)
    assert whole.startswith(before), "the prompt must end on a character's boundary"
    return whole[len(before) :]


any_level_ids = st.lists(st.integers(0, LEVEL.inner.get_vocab_size() - 1), max_size=60)
some_text = st.text(alphabet=st.sampled_from(sorted(set(TEXT))), max_size=40)


@given(prompt=some_text, ids=any_level_ids, skip=st.booleans(), cuts=st.lists(st.integers(0, 99), max_size=5))
@settings(max_examples=250, deadline=None)
def test_any_byte_level_tokens_in_any_chunks(prompt: str, ids: list[int], skip: bool, cuts: list[int]) -> None:
    before = LEVEL.encode(prompt)
    assert stream(LEVEL, before, ids, skip, cuts) == expected(LEVEL, before, ids, skip)


@given(prompt=some_text, text=some_text, cuts=st.lists(st.integers(0, 99), max_size=5))
@settings(max_examples=100, deadline=None)
def test_text_comes_back_and_no_chunk_holds_a_mark(prompt: str, text: str, cuts: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(LEVEL, LEVEL.encode(prompt), True)
    parts = [detokenizer.push([token]) for token in LEVEL.encode(text)]
    assert not any(MARK in part for part in parts)
    assert "".join(parts) == text
    assert detokenizer.finish() == ""


unit = st.one_of(
    st.sampled_from(WORDS).map(lambda name: [word(name)]),
    st.sampled_from("ř叫😀éa").map(lambda char: fallback_bytes(char.encode())),
    st.sampled_from([[1], [2]]),
)


@given(
    prompt=st.lists(unit, max_size=12),
    output=st.lists(unit, max_size=25),
    skip=st.booleans(),
    cuts=st.lists(st.integers(0, 99), max_size=5),
)
@settings(max_examples=250, deadline=None)
def test_byte_fallback_tokens_in_any_chunks(
    prompt: list[list[int]], output: list[list[int]], skip: bool, cuts: list[int]
) -> None:
    before, ids = list(chain.from_iterable(prompt)), list(chain.from_iterable(output))
    assert stream(FALLBACK, before, ids, skip, cuts) == expected(FALLBACK, before, ids, skip)


@given(
    runs=st.lists(st.tuples(st.sampled_from([b"\xff", b"\xe5\x8f", b"\xf0\x9f\x98", b"\xff" * 9]), unit), max_size=8)
)
@settings(max_examples=100, deadline=None)
def test_broken_runs_of_byte_fallback(runs: list[tuple[bytes, list[int]]]) -> None:
    """A broken run between words is what decode makes of it, a mark for each byte."""
    ids = [token for data, _ in runs for token in [word("▁a"), *fallback_bytes(data), word(".")]]
    assert stream(FALLBACK, [word("▁Hello")], ids) == expected(FALLBACK, [word("▁Hello")], ids)


@pytest.mark.parametrize("char", ["😀", "叫", "ř"])
@pytest.mark.parametrize(("tokenizer", "tokens"), [(LEVEL, level_bytes), (FALLBACK, fallback_bytes)])
def test_u44_a_character_of_byte_tokens_arrives_whole(tokenizer, tokens, char: str) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, tokens(b"x"), True)
    ids = tokens(char.encode())
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + [char]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize(("tokenizer", "tokens"), [(LEVEL, level_bytes), (FALLBACK, fallback_bytes)])
def test_u44_cut_inside_a_character_leaves_one_mark(tokenizer, tokens, missing: int) -> None:
    """The characters before it in the same run of bytes stay as they are."""
    detokenizer = IncrementalDetokenizer(tokenizer, tokens(b"x"), True)
    text = "".join(detokenizer.push([i]) for i in tokens("ř叫😀🎉".encode()[:-missing]))
    assert text == "ř叫😀"
    assert detokenizer.finish() == MARK
    assert detokenizer.finish() == ""


def test_a_tokenizer_that_declares_byte_fallback_gives_one_mark_at_once() -> None:
    tokenizer = byte_fallback()
    tokenizer.byte_fallback = True  # type: ignore[attr-defined]
    assert stream(tokenizer, [word("a")], fallback_bytes("😀".encode()[:3])) == MARK


def test_invalid_bytes_are_shown_once_they_are_known_to_be_invalid() -> None:
    detokenizer = IncrementalDetokenizer(LEVEL, [], True)
    assert detokenizer.push(level_bytes(b"\xe5\x8f")) == ""
    assert detokenizer.push(level_bytes(b"a")) == MARK + "a"


def test_a_broken_byte_does_not_take_back_what_was_shown() -> None:
    detokenizer = IncrementalDetokenizer(FALLBACK, [word("a")], True)
    parts = [detokenizer.push([i]) for i in [*fallback_bytes("😀".encode()), *fallback_bytes(b"\xe5"), word("▁a")]]
    assert parts == ["", "", "", "😀", "", MARK + " a"]


def test_the_first_output_word_keeps_its_space() -> None:
    assert stream(FALLBACK, [word("▁Hello")], [word("▁a"), word("▁a")]) == " a a"
    assert stream(FALLBACK, [], [word("▁a"), word("▁a")]) == "a a"
    assert stream(FALLBACK, [1], [word("▁a")]) == "a"


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*LEVEL.encode("a"), LEVEL.inner.token_to_id("</s>"), *LEVEL.encode("b")]
    assert stream(LEVEL, [], ids, skip=True) == "ab"
    assert stream(LEVEL, [], ids, skip=False) == "a</s>b"


def test_a_prompt_that_ends_inside_a_character_is_completed() -> None:
    data = "a叫".encode()
    assert stream(LEVEL, level_bytes(data[:3]), level_bytes(data[3:])) == "叫"


def test_a_mark_that_ends_the_prompt_is_not_said_again() -> None:
    assert stream(LEVEL, level_bytes(f"a{MARK}".encode()), level_bytes(b"bc")) == "bc"


@pytest.mark.parametrize("kind", ["text", "invalid", "special", "emoji"])
def test_the_window_stays_short(kind: str) -> None:
    """Constant work per token: no decode sees more than a few dozen tokens, however long the text."""
    tokenizer = byte_fallback() if kind == "emoji" else byte_level()
    ids = {
        "text": tokenizer.encode(TEXT * 20) if kind == "text" else [],
        "invalid": level_bytes(b"\xff") * 500,
        "special": [0, 1] * 250,
        "emoji": fallback_bytes("😀叫ř".encode() * 60),
    }[kind]
    prompt = [word("a")] if kind == "emoji" else level_bytes(b"x")
    want = expected(tokenizer, prompt, ids)
    tokenizer.longest = 0
    assert stream(tokenizer, prompt, ids) == want
    assert tokenizer.longest <= 32

"""`LLM.chat`: the model's template writes the prompt, everything is checked before anything runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from pagedkv import LLM
from pagedkv.errors import ModelError, RequestInvalid, RequestTooLong
from tests.helpers.engine_rig import SETTINGS, drained, folder, greedy, transformers_greedy

HELLO = [{"role": "user", "content": "Hello"}]
LONGER = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "kůň 日本"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}]
WITH_TOOLS = "{{ tools | tojson }}|{% for m in messages %}{{ m.content }}{% endfor %}|{{ mood }}"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(folder(), **SETTINGS) as made:
        yield made
        drained(made)


def transformers_ids(messages: list[dict[str, str]], **names: Any) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder())
    return tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, **{"add_generation_prompt": True} | names
    )


def test_conversations_are_answered_as_transformers_does(llm: LLM) -> None:
    outputs = llm.chat([HELLO, LONGER], greedy(6), use_tqdm=False)
    for output, messages in zip(outputs, (HELLO, LONGER), strict=True):
        assert output.prompt_token_ids == transformers_ids(messages)
        assert output.outputs[0].token_ids == transformers_greedy(output.prompt_token_ids, 6)
    (single,) = llm.chat(HELLO, greedy(6), use_tqdm=False)
    assert single.prompt == "[user]Hello\n[assistant]"
    assert single.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_without_a_generation_prompt_the_last_message_goes_on(llm: LLM) -> None:
    (output,) = llm.chat(HELLO, greedy(2), use_tqdm=False, add_generation_prompt=False)
    assert output.prompt_token_ids == transformers_ids(HELLO, add_generation_prompt=False)
    assert output.prompt == "[user]Hello\n"


def test_text_parts_are_one_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], greedy(1), use_tqdm=False)
    assert output.prompt_token_ids == transformers_ids(HELLO)


def test_a_template_of_the_call_gets_tools_and_variables(llm: LLM) -> None:
    (output,) = llm.chat(
        HELLO,
        greedy(1),
        use_tqdm=False,
        tools=TOOLS,
        chat_template=WITH_TOOLS,
        chat_template_kwargs={"mood": "calm"},
    )
    assert output.prompt == ('[{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}]|Hello|calm')
    assert output.prompt_token_ids == list(output.prompt.encode()), "no special tokens are added behind the template"


def test_tools_that_the_template_ignores_are_said(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("pagedkv")
    logger.addHandler(caplog.handler)
    try:
        llm.chat(HELLO, greedy(1), use_tqdm=False, tools=TOOLS)
    finally:
        logger.removeHandler(caplog.handler)
    assert "no place for tools" in caplog.text


def test_a_template_of_the_call_runs_in_the_sandbox(llm: LLM) -> None:
    hostile = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ModelError, match="chat template failed: SecurityError"):
        llm.chat(HELLO, greedy(1), use_tqdm=False, chat_template=hostile)
    with pytest.raises(RequestInvalid, match="refuses these messages: no jokes"):
        llm.chat(HELLO, greedy(1), use_tqdm=False, chat_template="{{ raise_exception('no jokes') }}")


BAD: list[tuple[Any, str]] = [
    ("Hello", 'messages of type str: give a list such as [{"role": "user"'),
    ({"role": "user", "content": "x"}, "messages of type dict: give a list"),
    ([[]], "the conversation is empty"),
    (["Hello"], r"messages[0] must be a mapping such as"),
    ([{"content": "x"}], 'messages[0] needs a "role"'),
    ([{"role": 3, "content": "x"}], 'messages[0] needs a "role"'),
    ([*HELLO, {"role": "assistant"}], 'messages[1] has no "content"'),
    ([{"role": "user", "content": 3}], '"content" of messages[0] must be text, not int'),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "holds a part of type 'image_url'"),
    ([{"role": "user", "content": ["x"]}], "holds a part of type 'str'"),
    ([{"role": "user", "content": "\ud800"}], "lone surrogate"),
    ([HELLO, [{"role": "user"}]], 'conversation 1: messages[0] has no "content"'),
    ([HELLO, {"role": "user"}], "conversation 1: a conversation is a list of messages, not dict"),
]


@pytest.mark.parametrize(("messages", "message"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_messages_are_named_and_nothing_is_queued(llm: LLM, messages: Any, message: str) -> None:
    steps = llm.engine.stats.steps
    with pytest.raises(RequestInvalid) as caught:
        llm.chat(messages, greedy(2), use_tqdm=False)
    assert message in str(caught.value)
    drained(llm)
    assert llm.engine.stats.steps == steps


@pytest.mark.parametrize(
    ("names", "field"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [print]}, "tools"),
        ({"chat_template": 3}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ],
)
def test_bad_arguments_are_named(llm: LLM, names: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        llm.chat(HELLO, greedy(2), use_tqdm=False, **names)
    assert caught.value.field == field


def test_a_conversation_that_cannot_fit_says_which_and_the_numbers(llm: LLM) -> None:
    long = [{"role": "user", "content": "x" * 300}]
    with pytest.raises(RequestTooLong, match=r"^conversation 1: .*max_model_len is 256"):
        llm.chat([HELLO, long], greedy(2), use_tqdm=False)
    drained(llm)


def test_no_conversations_are_no_outputs(llm: LLM) -> None:
    assert llm.chat([], greedy(2), use_tqdm=False) == []


def test_a_model_without_a_template_or_tokenizer_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", None)
    with pytest.raises(ModelError, match="has no chat template"):
        llm.chat(HELLO, greedy(2), use_tqdm=False)
    (output,) = llm.chat(HELLO, greedy(1), use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert output.prompt == "Hello"
    monkeypatch.setattr(llm.engine, "tokenizer", None)
    with pytest.raises(RequestInvalid, match="needs a tokenizer"):
        llm.chat(HELLO, greedy(2), use_tqdm=False)

"""Conversations as prompts: checked, written by the model's chat template, and encoded."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pagedkv.api.errors import RequestInvalid
from pagedkv.models.tokenizer import Tokenizer

_log = logging.getLogger("pagedkv.engine")


def is_conversation(messages: Any) -> bool:
    """Whether `messages` is one conversation rather than a list of them. Raises `RequestInvalid` if it is neither."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes | bytearray):
        raise RequestInvalid(
            f'messages of type {type(messages).__name__}: give a list such as [{{"role": "user", "content": "Hello"}}]',
            field="messages",
        )
    return len(messages) > 0 and not isinstance(messages[0], list | tuple)


def chat_prompt(
    tokenizer: Tokenizer | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The conversation as a prompt: {"prompt": text, "prompt_token_ids": ids}.

    `chat_template` takes the place of the model's own and is no more trusted than that one. `variables` are passed to
    the template. Raises `RequestInvalid` naming the message, `ModelError` when there is no template or it fails.
    """
    if tokenizer is None:
        raise RequestInvalid(
            "a conversation needs a tokenizer, and there is none: leave skip_tokenizer_init out", field="messages"
        )
    checked = _check_messages(messages)
    _check_variables(variables)
    _check_tools(tools, checked, chat_template or tokenizer.chat_template)
    if chat_template is not None and not isinstance(chat_template, str):
        raise RequestInvalid("chat_template must be the text of a Jinja template", field="chat_template")
    text = tokenizer.apply_chat_template(
        checked, add_generation_prompt, chat_template=chat_template, tools=tools, **(variables or {})
    )
    # The template has written the special tokens already.
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes | bytearray):
        raise RequestInvalid(f"a conversation is a list of messages, not {type(messages).__name__}", field="messages")
    if not messages:
        raise RequestInvalid("the conversation is empty: give at least one message", field="messages")
    return [_check_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestInvalid(
            f'{where} must be a mapping such as {{"role": "user", "content": "Hello"}}, not {type(message).__name__}',
            field="messages",
        )
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestInvalid(f'{where} needs a "role", such as "user", "assistant" or "system"', field="messages")
    # Clients send back what is null in an answer; templates ask whether a name is there.
    given = {name: value for name, value in message.items() if value is not None}
    calls = _tool_calls(given.pop("tool_calls", ()), where)
    content = given.get("content")
    if content is None and not (calls or given.get("function_call")):
        raise RequestInvalid(f'{where} has no "content"', field="messages")
    if calls:
        # Templates write a missing text as "None" unless they expect it.
        return {**given, "content": _text_of(content, where) or "", "tool_calls": calls}
    return {**given, "content": _text_of(content, where)}


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls with their arguments as mappings, which templates write as JSON; the API has them as JSON text."""
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes | bytearray):
        raise RequestInvalid(f'"tool_calls" of {where} must be a list', field="messages")
    return [_tool_call(call, f"tool_calls[{number}] of {where}") for number, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestInvalid(
            f'{where} must be a mapping such as {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}',
            field="messages",
        )
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), where)}}


def _arguments(arguments: Any, where: str) -> Mapping[str, Any]:
    if arguments is None or arguments == "":
        return {}
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise RequestInvalid(f'"arguments" of {where} are not JSON: {error}', field="messages") from error
    if not isinstance(read, Mapping):
        raise RequestInvalid(f'"arguments" of {where} must be a JSON object', field="messages")
    return read


def _text_of(content: Any, where: str) -> str | None:
    """Text as it is; a list of text parts as one text, since many templates know no parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise RequestInvalid(f'"content" of {where} must be text, not {type(content).__name__}', field="messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            raise RequestInvalid(
                f'"content" of {where} holds a part of type {kind!r}; only {{"type": "text", "text": ...}} is read',
                field="messages",
            )
        texts.append(part["text"])
    return "".join(texts)


def _check_variables(variables: Any) -> None:
    own = ("messages", "template", "tools", "add_generation_prompt", "chat_template")
    if variables is None:
        return
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RequestInvalid(
            'chat_template_kwargs must be a mapping such as {"enable_thinking": False}', field="chat_template_kwargs"
        )
    taken = [name for name in own if name in variables]
    if taken:
        raise RequestInvalid(
            f"chat_template_kwargs cannot hold {taken[0]!r}, which has an argument of its own",
            field="chat_template_kwargs",
        )


def _check_tools(tools: Any, messages: Sequence[Mapping[str, Any]], template: Any) -> None:
    if isinstance(template, str) and "tool_calls" not in template and any("tool_calls" in each for each in messages):
        _log.warning("the chat template has no place for tool calls: the model does not see them")
    if tools is None:
        return
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not all(isinstance(t, Mapping) for t in tools):
        raise RequestInvalid(
            'tools must be a list of mappings such as {"type": "function", "function": {"name": ..., ...}}',
            field="tools",
        )
    if tools and isinstance(template, str) and "tools" not in template:
        _log.warning("the chat template has no place for tools: the model does not see them")

"""What a body says the model shall go on from, as the engine takes it: token ids, and the salt of its tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedkv.api.errors import RequestInvalid
from pagedkv.engine.chat import chat_prompt
from pagedkv.models.tokenizer import Tokenizer
from pagedkv.server.bodies import ChatBody, TokenizeBody

Prompt = Mapping[str, Any]
"""{"prompt_token_ids": ids} with "prompt": text where there was one, and "cache_salt"."""


def separate(prompt: Any, field: str = "prompt") -> list[str] | list[list[int]]:
    """One entry a prompt of what a body holds: a text, texts, ids, or lists of ids. Raises `RequestInvalid`."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestInvalid(f"{field} is empty: give a text, or at least one token", field=field)
    if isinstance(prompt[0], int):
        return [list(prompt)]
    return list(prompt)


def encoded(
    prompts: Sequence[str] | Sequence[list[int]], tokenizer: Tokenizer | None, salt: str | None, special: bool = True
) -> list[Prompt]:
    """Prompts of texts or ids. Raises `RequestInvalid`."""
    made: list[Prompt] = []
    for number, prompt in enumerate(prompts):
        where = "prompt" if len(prompts) == 1 else f"prompt {number}"
        if isinstance(prompt, str):
            if tokenizer is None:
                raise RequestInvalid("text needs a tokenizer, and this server has none: send ids", field="prompt")
            made.append({"prompt": prompt, "prompt_token_ids": tokenizer.encode(prompt, add_special_tokens=special)})
        else:
            made.append({"prompt_token_ids": prompt})
        if not made[-1]["prompt_token_ids"]:
            raise RequestInvalid(f"{where} is empty: give at least one token", field="prompt")
    return [{**prompt, "cache_salt": salt} for prompt in made]


def conversation(
    body: ChatBody | TokenizeBody, tokenizer: Tokenizer, salt: str | None, template: str | None, tools: Any
) -> Prompt:
    """A conversation as the template writes it. Raises `RequestInvalid`, or `ModelError` where there is no template.

    The role "developer" is the newer name of "system"; templates that do not know it would pass its messages over.
    """
    variables = dict(body.chat_template_kwargs or {})
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    messages = body.messages or []
    if "developer" not in str(template or tokenizer.chat_template):
        messages = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
    prompt = chat_prompt(
        tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        chat_template=template,
        variables=variables,
    )
    return {**prompt, "cache_salt": salt}

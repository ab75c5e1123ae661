"""POST /tokenize and /detokenize: what the model's tokenizer makes of a text, and of ids."""

from __future__ import annotations

from typing import Any

from pagedkv.api.errors import RequestInvalid
from pagedkv.server.bodies import DetokenizeBody, TokenizeBody
from pagedkv.server.front import Caller, Front
from pagedkv.server.prompts import conversation


async def tokenize(front: Front, body: TokenizeBody, caller: Caller) -> dict[str, Any]:
    """The ids of a text or a conversation, and how many there are."""
    front.check_model(body.model)
    body.check_names(caller.label)
    tokenizer, template = front.tokenizer, front.config.chat_template
    if (body.prompt is None) == (body.messages is None):
        raise RequestInvalid("give either prompt or messages", field="prompt")
    if body.prompt is None:
        prompt = await front.in_thread(lambda: conversation(body, tokenizer, None, template, body.tools))
        ids = list(prompt["prompt_token_ids"])
    else:
        text = body.prompt
        ids = await front.in_thread(lambda: tokenizer.encode(text, body.add_special_tokens))
    answer = {"count": len(ids), "max_model_len": front.facts.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await front.in_thread(lambda: [tokenizer.decode([token], False) for token in ids])
    return answer


async def detokenize(front: Front, body: DetokenizeBody, caller: Caller) -> dict[str, Any]:
    """The text of ids."""
    front.check_model(body.model)
    body.check_names(caller.label)
    tokenizer, size = front.tokenizer, front.facts.vocab_size
    outside = next((token for token in body.tokens if not 0 <= token < size), None)
    if outside is not None:
        raise RequestInvalid(f"token id {outside} is outside the vocabulary of {size}", field="tokens")
    return {"prompt": await front.in_thread(lambda: tokenizer.decode(body.tokens, body.skip_special_tokens))}

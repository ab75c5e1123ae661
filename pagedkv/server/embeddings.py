"""POST /v1/embeddings: vectors of one or several texts, by models that declare how they pool."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from pagedkv.api.errors import RequestInvalid
from pagedkv.sampling.pooling import PoolingParams
from pagedkv.server.answers import collected, usage
from pagedkv.server.bodies import EmbeddingBody
from pagedkv.server.errors import HTTPError, told_as
from pagedkv.server.front import Caller, Front
from pagedkv.server.prompts import encoded, separate
from pagedkv.server.replies import JsonReply
from pagedkv.server.stream import Stream


async def embed(front: Front, body: EmbeddingBody, caller: Caller) -> Response:
    """Check, queue, and answer. Raises what is wrong with the request."""
    model = front.check_model(body.model)
    body.check_names(caller.label)
    if not front.facts.pooling:
        raise HTTPError(
            400,
            f"{model} declares no pooling, so there are no vectors of it: serve an embedding model",
            code="unsupported",
        )
    params = PoolingParams(dimensions=body.dimensions)
    entries = separate(body.input, "input")
    front.admit(len(entries), "input")
    salt, tokenizer = caller.salt(body.cache_salt), front.facts.tokenizer
    with told_as("input", {}):
        prompts = await front.in_thread(lambda: encoded(entries, tokenizer, salt))
        front.log_request(caller, "embeddings", body, sum(len(prompt["prompt_token_ids"]) for prompt in prompts))
        streams = await front.submit(prompts, params, caller, priority=body.priority, stream=False)

    async def whole() -> dict[str, Any]:
        await asyncio.gather(*(collected(stream) for stream in streams))
        data = [_described(number, stream, body.encoding_format) for number, stream in enumerate(streams)]
        counts = usage(streams, 0)
        return {
            "object": "list",
            "data": data,
            "model": model,
            "usage": {name: counts[name] for name in ("prompt_tokens", "total_tokens")},
        }

    return JsonReply(streams, front.metrics.refused, whole)


def _described(number: int, stream: Stream, form: str) -> dict[str, Any]:
    vector = None if stream.ending is None else stream.ending.embedding
    if vector is None:
        raise RequestInvalid(
            f"the model gives no usable hidden states (NaN or infinite) for input {number}", field="input"
        )
    return {"object": "embedding", "index": number, "embedding": _written(vector, form)}


def _written(vector: Sequence[float], form: str) -> Any:
    """Numbers, or the base64 of little-endian float32."""
    if form == "float":
        return list(vector)
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()

"""Our errors as HTTP has them: a status, and the object that clients of the OpenAI API read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pagedkv.api.errors import EngineDead, PagedKVError, RequestError, RequestInvalid, RequestTooLong

_LONGEST = 2000  # characters of a message, which may show a value of the body


class HTTPError(PagedKVError):
    """A refusal of the server's own: `status`, and what stands in the error object and the headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class Unavailable(HTTPError):
    """503: no new work now; `retry_after` in seconds."""

    def __init__(self, message: str, *, retry_after: int | None = None, code: str | None = None) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(503, message, type="service_unavailable", code=code, headers=headers)


class QueueFull(HTTPError):
    """429: as many requests wait as may."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        headers = {"Retry-After": str(retry_after)}
        super().__init__(429, message, type="rate_limit_error", code="queue_full", headers=headers)


class TimedOut(HTTPError):
    """504: a request took longer than it may."""

    def __init__(self, message: str) -> None:
        super().__init__(504, message, type="timeout_error", code="request_timeout")


def error_body(
    message: str, type: str = "invalid_request_error", param: str | None = None, code: str | int | None = None
) -> dict[str, Any]:
    """The error object of the OpenAI API."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def as_http(error: BaseException) -> HTTPError:
    """What an error of ours is over HTTP; one that nobody foresaw says no more than that."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, RequestTooLong):
        return HTTPError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestInvalid):
        return HTTPError(400, str(error), param=error.field or None, code="invalid_value")
    if isinstance(error, EngineDead):
        return Unavailable(str(error), code="engine_dead")
    if isinstance(error, RequestError):
        return HTTPError(400, str(error))
    if isinstance(error, PagedKVError):  # a setting or the model forbids it
        return HTTPError(400, str(error), code="unsupported")
    return HTTPError(500, "the server failed; its log says where", type="server_error", code="internal_error")


def body_of(error: BaseException) -> dict[str, Any]:
    """The error object of any error."""
    http = as_http(error)
    message = str(http)
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]} ... ({len(message)} characters)"
    return error_body(message, http.type, http.param, http.code)


@contextlib.contextmanager
def told_as(prompt: str, names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the engine, which has names of its own, in the names of a body.

    `prompt` is the field that holds the prompt, `names` has the client's name of other fields by the engine's.
    """
    try:
        yield
    except RequestTooLong as error:
        raise HTTPError(400, str(error), param=prompt, code="context_length_exceeded") from error
    except RequestInvalid as error:
        all_names = {"prompt_token_ids": prompt, "prompt": prompt, **names}
        name = all_names.get(error.field, error.field)
        words = rf"\b{re.escape(error.field)}\b( (json_object|json|regex|choice|grammar)\b)?"
        message = re.sub(words, lambda _: name, str(error)) if error.field in names else str(error)
        raise RequestInvalid(message, field=name) from error

"""What a request passes before any endpoint sees it: ASGI middleware, each refusal an error object of the OpenAI API.

    label ─▶ Host ─▶ CORS, if asked for ─▶ key, form and length of the body ─▶ the body, read up to its limit ─▶ app

All but the last look at headers alone, so a wrong key costs no body. What an app sends, and the news that its client
left, go through untouched.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import uuid
from collections.abc import Callable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedkv.api.errors import ConfigError
from pagedkv.server.errors import HTTPError, body_of
from pagedkv.server.keys import Keys
from pagedkv.server.settings import ServerConfig

_log = logging.getLogger("pagedkv.server")

OPEN = "/health"
"""The one path that needs no key, for GET."""
BODILESS = ("GET", "HEAD", "OPTIONS")
"""Methods whose body nothing here reads."""

_LABEL = b"x-request-id"
_LABELS = re.compile(rb"[ -~]{1,128}")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]*)?", re.IGNORECASE)
_ALLOWED = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")
_JSON = re.compile(rb'application/json\s*(;\s*charset\s*=\s*("utf-?8"|utf-?8)\s*)?', re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,18}")

Check = Callable[[Scope], None]
"""Looks at a request's head. Raises `HTTPError`."""
Count = Callable[[BaseException], None]
"""Is told of every error that a client gets."""


def guarded(
    app: ASGIApp, config: ServerConfig, keys: Keys, *, count: Count = lambda error: None, body_timeout: float = 60.0
) -> ASGIApp:
    """Put `app` behind the guard, which leaves `request_id` and `tenant` in `scope["state"]`.

    A server that listens on this machine's own addresses alone answers to their names and to `allowed_hosts`; one that
    listens wider answers to every name, unless some are allowed. A body has at most `max_body_size` bytes, all of them
    sent within `body_timeout` seconds. Raises `ConfigError` for a name or an origin that no request could match.
    """
    hosts = [_allowed_host(host) for host in config.allowed_hosts]
    origins = [_allowed_origin(origin) for origin in config.allowed_origins]
    app = _Body(app, count, config.max_body_size, body_timeout)
    app = _Checked(app, count, _key_check(keys), _check_form, _length_check(config.max_body_size))
    if origins:
        app = _with_cors(app, origins, keys)
    everyone = not (config.loopback or hosts) or "*" in hosts
    return _Labelled(_Checked(app, count, _host_check(hosts, everyone=everyone)))


def _with_cors(app: ASGIApp, origins: Sequence[str], keys: Keys) -> ASGIApp:
    """Outside of the check for keys: a browser asks first without one, and lets a page read refusals too if told so."""
    if "*" in origins and not keys.names:
        _log.warning(
            "every web page may use this server (--allowed-origin '*', and no key): name the origins, or set a key"
        )
    return CORSMiddleware(
        app,
        origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("X-Request-Id", "Retry-After"),
    )


def check_names(config: ServerConfig) -> None:
    """Raise what `guarded` would of hosts and origins: before a model is loaded, so that nobody waits to be told."""
    for host in config.allowed_hosts:
        _allowed_host(host)
    for origin in config.allowed_origins:
        _allowed_origin(origin)


# -- layers ------------------------------------------------------------------------------------------------------------


class _Labelled:
    """Every answer has an X-Request-Id: the client's own where it is a fit one, which is a label and nothing more."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none, and none gets past the checks
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http":
            label = _label(scope)
            scope.setdefault("state", {})["request_id"] = label.decode("ascii")
            send = _labelling(send, label)
        await self._app(scope, receive, send)


def _label(scope: Scope) -> bytes:
    given = _values(scope, _LABEL)
    return given[0] if len(given) == 1 and _LABELS.fullmatch(given[0]) else uuid.uuid4().hex.encode()


def _labelling(send: Send, label: bytes) -> Send:
    async def labelled(message: Message) -> None:
        if message["type"] == "http.response.start":
            others = [header for header in message.get("headers", ()) if header[0].lower() != _LABEL]
            message = {**message, "headers": [*others, (_LABEL, label)]}
        await send(message)

    return labelled


class _Checked:
    """Lets through what passes every check."""

    def __init__(self, app: ASGIApp, count: Count, *checks: Check) -> None:
        self._app, self._count, self._checks = app, count, checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                for check in self._checks:
                    check(scope)
            except HTTPError as error:
                await _refuse(error, self._count, scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Body:
    """Reads the body, so that the app gets a whole one within the limits, or is not called."""

    def __init__(self, app: ASGIApp, count: Count, limit: int, timeout: float) -> None:
        self._app, self._count, self._limit, self._timeout = app, count, limit, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in BODILESS:
            try:
                body = await asyncio.wait_for(self._read(receive), self._timeout)
            except HTTPError as error:
                await _refuse(error, self._count, scope, receive, send)
                return
            except asyncio.TimeoutError:
                await _refuse(_too_slow(self._timeout), self._count, scope, receive, send)
                return
            if body is None:  # the client left: nobody waits for an answer
                return
            receive = _again(body, receive)
        await self._app(scope, receive, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None: its client left. Raises `HTTPError` at the first byte beyond the limit."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            if len(body) + len(message.get("body", b"")) > self._limit:
                raise _too_large(self._limit)
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return whole.pop() if whole else await receive()

    return again


async def _refuse(error: HTTPError, count: Count, scope: Scope, receive: Receive, send: Send) -> None:
    count(error)
    await JSONResponse(body_of(error), error.status, error.headers)(scope, receive, send)


# -- checks ------------------------------------------------------------------------------------------------------------


def _host_check(allowed: Sequence[str], *, everyone: bool) -> Check:
    """Against DNS rebinding: a web page whose name was turned to this machine asks under that name."""

    def check(scope: Scope) -> None:
        hosts = _values(scope, b"host")
        if len(hosts) != 1:
            raise HTTPError(400, f"the request has {len(hosts) or 'no'} Host headers: send one", code="invalid_host")
        if everyone:
            return
        found = _HOST.fullmatch(hosts[0].decode("latin-1"))
        if found is None:
            raise HTTPError(400, "the Host header is no name and port", code="invalid_host")
        name = _canonical(found[1])
        if not (_is_local(name) or any(_matches(name, one) for one in allowed)):
            raise HTTPError(
                421,
                f"this server does not answer to the name {name}: ask for it as localhost, or let it be started with "
                f"--allowed-host {name}",
                code="foreign_host",
            )

    return check


def _canonical(host: str) -> str:
    """A name in lower case without the root's dot; an address in its one spelling, without brackets."""
    name = host.strip("[]").lower().removesuffix(".")
    return str(_address(name) or name)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_local(name: str) -> bool:
    """Whether a name or an address always means the machine that asks."""
    address = _address(name)
    return address.is_loopback if address else name == "localhost" or name.endswith(".localhost")


def _matches(name: str, allowed: str) -> bool:
    return name == allowed or (allowed.startswith("*.") and name.endswith(allowed[1:]))


def _allowed_host(host: str) -> str:
    name = _canonical(host)
    if host != "*" and not _ALLOWED.fullmatch(name) and _address(name) is None:
        raise ConfigError(f"allowed host {host!r}: give a name or an address without port, *.NAME, or * for every name")
    return name


def _allowed_origin(origin: str) -> str:
    if not _ORIGIN.fullmatch(origin):
        raise ConfigError(
            f"allowed origin {origin!r}: give it as browsers send it, such as https://chat.example.org:8443, in lower "
            "case and without a path, or * for every origin"
        )
    return origin


def _key_check(keys: Keys) -> Check:
    def check(scope: Scope) -> None:
        given = _values(scope, b"authorization")
        tenant = keys.find(given[0] if given else None) if len(given) < 2 else None
        if tenant is not None:
            scope.setdefault("state", {})["tenant"] = tenant
        elif (scope["method"], _path(scope)) != ("GET", OPEN):
            raise _unknown_key(bool(given))

    return check


def _unknown_key(given: bool) -> HTTPError:
    wrong = "the key in the Authorization header is none of this server's"
    return HTTPError(
        401,
        f"{wrong if given else 'this server needs a key'}: send the header Authorization: Bearer KEY",
        type="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": 'Bearer realm="pagedkv"' + (', error="invalid_token"' if given else "")},
    )


def _check_form(scope: Scope) -> None:
    if scope["method"] in BODILESS:
        return
    if any(value.lower() != b"identity" for value in _values(scope, b"content-encoding")):
        message = "a body with a Content-Encoding is not read: send it as it is"
        raise HTTPError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "identity"})
    types = _values(scope, b"content-type")
    if len(types) != 1 or not _JSON.fullmatch(types[0]):
        raise HTTPError(
            415,
            "the body must be JSON in UTF-8 and say so: send the header Content-Type: application/json",
            code="unsupported_media_type",
            headers={"Accept": "application/json"},
        )


def _length_check(limit: int) -> Check:
    def check(scope: Scope) -> None:
        for length in _values(scope, b"content-length"):
            if not _LENGTH.fullmatch(length):
                raise HTTPError(400, "the Content-Length header is no number of bytes", code="invalid_length")
            if int(length) > limit:
                raise _too_large(limit)

    return check


# Both leave bytes of the body on their way, which the next request would be read from.
def _too_large(limit: int) -> HTTPError:
    message = f"the body has more than {limit} bytes, the most that this server takes (--max-body-size)"
    return HTTPError(413, message, code="body_too_large", headers={"Connection": "close"})


def _too_slow(timeout: float) -> HTTPError:
    message = f"the body was not complete after {timeout:g} s: send the request again"
    return HTTPError(408, message, type="timeout_error", code="body_timeout", headers={"Connection": "close"})


# -- the head of a request ---------------------------------------------------------------------------------------------


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))

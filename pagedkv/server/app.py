"""The routes: each checks nothing itself, but hands its body to the module of its family."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedkv import __version__
from pagedkv.api.errors import PagedKVError
from pagedkv.server.bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from pagedkv.server.chat import chat
from pagedkv.server.completions import complete
from pagedkv.server.embeddings import embed
from pagedkv.server.errors import HTTPError, Unavailable
from pagedkv.server.front import Caller, Front
from pagedkv.server.openapi import (
    TEXT,
    ChatAnswer,
    CompletionAnswer,
    DetokenizeAnswer,
    EmbeddingAnswer,
    ModelAnswer,
    ModelsAnswer,
    StatusAnswer,
    TokenizeAnswer,
    VersionAnswer,
    answers,
)
from pagedkv.server.problems import StrictRequest, refusal
from pagedkv.server.remote import State
from pagedkv.server.replies import Json, error_reply
from pagedkv.server.tokens import detokenize, tokenize

_log = logging.getLogger("pagedkv.server.http")
_FRESH = 1.0  # seconds that a scrape waits for the engine's numbers of now
_PROBES = ("/health", "/ready")
_QUIET = (*_PROBES, "/metrics")
_LONGEST = 200  # characters of a path


class _Route(APIRoute):
    """Reads bodies strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own, with another way to read JSON."""
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return strictly


router = APIRouter(route_class=_Route)


@router.post("/v1/completions", response_model=None, responses=answers(CompletionAnswer, events=True))
async def completions(body: CompletionBody, request: Request) -> Response:
    """Go on from a prompt, or several."""
    return await complete(front_of(request), body, caller_of(request))


@router.post("/v1/chat/completions", response_model=None, responses=answers(ChatAnswer, events=True))
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """The next message of a conversation."""
    return await chat(front_of(request), body, caller_of(request))


@router.post("/v1/embeddings", response_model=None, responses=answers(EmbeddingAnswer))
async def embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Vectors of texts, by a model that declares how it pools."""
    return await embed(front_of(request), body, caller_of(request))


@router.post("/tokenize", response_model=None, responses=answers(TokenizeAnswer))
async def tokenized(body: TokenizeBody, request: Request) -> Response:
    """The ids of a text or a conversation."""
    return Json(await tokenize(front_of(request), body, caller_of(request)))


@router.post("/detokenize", response_model=None, responses=answers(DetokenizeAnswer))
async def detokenized(body: DetokenizeBody, request: Request) -> Response:
    """The text of ids."""
    return Json(await detokenize(front_of(request), body, caller_of(request)))


@router.get("/v1/models", response_model=None, responses=answers(ModelsAnswer))
async def models(request: Request) -> Response:
    """The names that this server answers to."""
    front = front_of(request)
    return Json({"object": "list", "data": [_model(front, name) for name in front.names]})


@router.get("/v1/models/{name:path}", response_model=None, responses=answers(ModelAnswer))
async def model(name: str, request: Request) -> Response:
    """One of them."""
    front = front_of(request)
    return Json(_model(front, front.check_model(name)))


@router.get("/version", response_model=None, responses=answers(VersionAnswer))
async def version() -> Response:
    """This package's version."""
    return Json({"version": __version__})


@router.get("/health", response_model=None, responses=answers(StatusAnswer))
async def health(request: Request) -> Response:
    """Whether the engine's steps go on, as it was last heard to say itself."""
    front = front_of(request)
    if front.engine.state is not State.RUNNING:
        raise Unavailable(front.engine.why, code=f"engine_{front.engine.state.value}")
    return Json({"status": "draining" if front.draining else "ok"})


@router.get("/ready", response_model=None, responses=answers(StatusAnswer))
async def ready(request: Request) -> Response:
    """Whether a token can be had: one is written."""
    await front_of(request).ready()
    return Json({"status": "ready"})


@router.get("/metrics", response_model=None, response_class=PlainTextResponse, responses=TEXT)
async def metrics(request: Request) -> Response:
    """All series, for Prometheus."""
    front = front_of(request)
    await front.engine.fresh_metrics(_FRESH)
    text, media_type = front.metrics.text()
    return Response(text, headers={"Content-Type": media_type})


ROUTES: Mapping[str, tuple[str, ...]] = {
    route.path: tuple(route.methods or ()) for route in router.routes if isinstance(route, APIRoute)
}
"""Path templates, and their methods."""


def create_app(front: Front) -> FastAPI:
    """All routes over one front."""
    app = FastAPI(title="pagedkv", version=__version__, docs_url=None, redoc_url=None)
    app.state.front = front
    app.include_router(router)
    _errors(app)
    return app


def front_of(request: Request) -> Front:
    """The server's state."""
    front: Front = request.app.state.front
    return front


def caller_of(request: Request) -> Caller:
    """Who asks, as the guard in front of all routes found out."""
    state: dict[str, Any] = request.scope["state"]
    return Caller(label=state["request_id"], salt=state["tenant"].cache_salt)


def _model(front: Front, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "pagedkv",
        "root": name,
        "parent": None,
        "max_model_len": front.facts.max_model_len,
    }


# -- errors ------------------------------------------------------------------------------------------------------------


def _errors(app: FastAPI) -> None:
    @app.exception_handler(PagedKVError)
    async def ours(request: Request, error: Exception) -> Response:
        if request.url.path not in _PROBES:  # which ask again and again while there is no engine
            front_of(request).metrics.refused(error)
        return error_reply(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: Exception) -> Response:
        found = error.errors() if isinstance(error, RequestValidationError) else []
        return await ours(request, refusal(found))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = str(error.detail) if isinstance(error, HTTPException) else "it failed"
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        if status == 404:
            detail = f"there is nothing at {request.url.path[:_LONGEST]!a}"
        elif status == 405:
            detail = f"{request.method[:_LONGEST]} is not for this path: use {headers.get('Allow', 'another method')}"
        return await ours(request, HTTPError(status, detail, headers=headers))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        _log.error("request %s failed", request.scope.get("state", {}).get("request_id", "?"), exc_info=error)
        front_of(request).metrics.refused(error)
        return error_reply(error)


# -- what every request leaves behind ----------------------------------------------------------------------------------


class Access:
    """One log line a request, and its place in the metrics. Bodies and query strings are in neither."""

    def __init__(self, app: ASGIApp, count: Callable[[str | None, str, int, float], None]) -> None:
        self._app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and look at the status."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            seconds = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", None)
            self._count(route, scope["method"], status, seconds)
            level = logging.DEBUG if route in _QUIET else logging.INFO
            label = scope.get("state", {}).get("request_id", "-")
            path = ascii(scope["path"][:_LONGEST])[1:-1]
            _log.log(level, "%s %s %s in %.3f s, request %s", scope["method"], path, status or "left", seconds, label)

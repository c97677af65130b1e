"""The HTTP application: routes, limits, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from nextn import __version__
from nextn.errors import RequestError
from nextn.server.bridge import Bridge, Busy, Damaged, Unavailable
from nextn.server.fields import Strict
from nextn.server.metrics import CONTENT_TYPE
from nextn.server.middleware import (
    CLIENT_GONE,
    OPEN_PATHS,
    CutOff,
    KeyRequired,
    RequestIds,
    unavailable,
)
from nextn.server.openapi import describe
from nextn.server.places import Place, Places
from nextn.server.prepare import Prepared, Preparer
from nextn.server.protocol import (
    REQUEST_ID,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from nextn.server.stream import EventStream, WholeAnswer, error_response

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_COUNTED = ("pages", "pages_used", "pages_cached", "pages_free", "running", "waiting")
"""What /debug/integrity tells of the engine's statistics."""

MAX_BODY_BYTES = 8 * 1024 * 1024
"""Default limit of a request's body; a larger one is refused with 413 before it is parsed."""

MAX_TOKENIZING = 32
"""Most requests to /tokenize and /detokenize at once: each holds a body, and then a thread."""

BODY_SECONDS = 60.0
"""Default limit of the time that a client may take to send its body; later it is refused with 408."""


def create_app(
    bridge: Bridge,
    served_names: Sequence[str],
    *,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    body_seconds: float = BODY_SECONDS,
) -> FastAPI:
    """The application over `bridge`, which starts and stops with it.

    served_names: names that a request's `model` may give, the first being the one that answers carry.
    api_key: what everything but /health and /health/live asks for. cors_origins: web pages that may call.
    """

    app = FastAPI(
        title="nextn",
        version=__version__,
        lifespan=lambda _: _running(bridge),
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect's address would come from the client's Host header
        exception_handlers=dict(_HANDLERS),
    )
    _add_routes(app, _Endpoints(bridge, tuple(served_names), max_body_bytes, body_seconds))
    _add_middleware(app, bridge, api_key, cors_origins)
    return app


@asynccontextmanager
async def _running(bridge: Bridge) -> AsyncIterator[None]:
    bridge.start()
    yield
    await bridge.stop()


def _add_middleware(app: FastAPI, bridge: Bridge, api_key: str | None, cors_origins: Sequence[str]) -> None:
    """The last one added is the outermost: ids on every answer; a page is told why its key was refused."""
    if api_key is not None:
        app.add_middleware(KeyRequired, api_key=api_key)
    app.add_middleware(CutOff, bridge=bridge)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    app.add_middleware(RequestIds, metrics=bridge.metrics, paths=paths)


def _add_routes(app: FastAPI, endpoints: _Endpoints) -> None:
    for path, get in (
        ("/health", endpoints.health),
        ("/health/live", endpoints.live),
        ("/version", endpoints.version),
        ("/metrics", endpoints.metrics),
        ("/debug/integrity", endpoints.integrity),
        ("/v1/models", endpoints.models),
        ("/v1/models/{name:path}", endpoints.model),
    ):
        app.add_api_route(path, get, methods=["GET"], response_model=None)
        if path in OPEN_PATHS:  # load balancers ask so; the document would name the operation twice
            app.add_api_route(path, get, methods=["HEAD"], response_model=None, include_in_schema=False)
    posts: tuple[tuple[str, Callable[..., Any], type[Strict]], ...] = (
        ("/v1/completions", endpoints.completions, CompletionBody),
        ("/v1/chat/completions", endpoints.chat, ChatBody),
        ("/tokenize", endpoints.tokenize, TokenizeBody),
        ("/detokenize", endpoints.detokenize, DetokenizeBody),
    )
    for path, post, _ in posts:
        app.add_api_route(path, post, methods=["POST"], response_model=None)
    describe(app, {path: body for path, _, body in posts})


class _Endpoints:
    """The routes' functions."""

    def __init__(
        self, bridge: Bridge, served_names: tuple[str, ...], max_body_bytes: int, body_seconds: float
    ) -> None:
        self.bridge = bridge
        self.served_names = served_names
        self.max_body_bytes = max_body_bytes
        self.body_seconds = body_seconds
        self.created = int(time.time())
        self.tokenizing = Places(self._check_tokenizing)

    @cached_property
    def preparer(self) -> Preparer:
        """What reads bodies for the engine; raises Unavailable while that is loading."""
        return Preparer(self.bridge.engine, self.served_names, self.bridge.max_open)

    async def health(self) -> Response:
        """Whether requests are taken: 200, else 503."""
        state = self.bridge.state
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    async def live(self) -> Response:
        """Whether the process does its work: 200 while it loads and ends too, 503 when its engine failed."""
        state = self.bridge.state
        return JSONResponse({"status": state}, status_code=503 if state == "engine failed" else 200)

    async def version(self) -> Response:
        """The version of nextn."""
        return JSONResponse({"version": __version__})

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(self.bridge.metrics.text(), media_type=CONTENT_TYPE)

    async def integrity(self) -> Response:
        """Whether the engine's pages and requests add up: the counts, or 500 with what is wrong."""
        try:
            stats = await self.bridge.check_integrity()
        except Damaged as error:
            raise ApiError(500, str(error), code="integrity") from None
        counts = {name: int(stats[name]) for name in _COUNTED if name in stats}
        return JSONResponse({"status": "ok"} | counts)

    async def models(self) -> Response:
        """The names under which the model is served."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.served_names]})

    async def model(self, name: str) -> Response:
        """One of them."""
        self.preparer.check_model(name)
        return JSONResponse(self._model(name))

    async def completions(self, request: Request) -> Response:
        """Continue a text or token ids."""
        return await self._complete(request, self.preparer.completion)

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._complete(request, self.preparer.chat)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        return await self._tokenizing(request, self.preparer.tokenize)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        return await self._tokenizing(request, self.preparer.detokenize)

    async def _tokenizing(self, request: Request, work: Callable[[bytes], dict[str, object]]) -> Response:
        """What `work` makes of the body; it needs a thread, and others do too, so few may come at once."""
        with self.tokenizing.reserve() as place:
            return JSONResponse(await asyncio.to_thread(work, await self._read(request, place)))

    def _check_tokenizing(self, count: int) -> None:
        """Raise Busy unless so many more texts may be tokenized now; slow senders give way."""
        self.tokenizing.make_room(self.tokenizing.reserved + count - MAX_TOKENIZING)
        if self.tokenizing.reserved + count > MAX_TOKENIZING:
            raise Busy(f"at most {MAX_TOKENIZING} texts are tokenized at once; try again", 1)

    async def _read(self, request: Request, place: Place) -> bytes:
        """The body, within its limits; only as JSON, which a foreign web page may not send unasked."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the content-type must be application/json", code="unsupported_media_type")
        content = await self._unless_stopping(self._collect(request), self.body_seconds, place.lost)
        if content is None:
            reason = f"did not come within {self.body_seconds:g} s"
            if place.lost.is_set():
                reason = "came slowly, and others needed its place; try again"
            raise ApiError(408, f"the body {reason}", code="request_timeout", headers={"Connection": "close"})
        place.has_body()
        return content

    async def _unless_stopping(
        self, work: Coroutine[Any, Any, _T], seconds: float | None = None, lost: asyncio.Event | None = None
    ) -> _T | None:
        """What `work` gives; None if that takes too long or too long for others, and 503 at once if the
        server ends meanwhile."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self.bridge.until_stopping())
        waiting: set[asyncio.Future[Any]] = {working, stopping}
        if lost is not None:
            waiting.add(asyncio.ensure_future(lost.wait()))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=seconds)
            if working.done():
                return working.result()
            if stopping.done():
                raise unavailable("the server is shutting down")
            return None
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _collect(self, request: Request) -> bytes:
        content = bytearray()
        async for piece in request.stream():
            content += piece
            if len(content) > self.max_body_bytes:
                raise ApiError(
                    413, f"the body is larger than {self.max_body_bytes} bytes", code="request_too_large"
                )
        return bytes(content)

    async def _complete(self, request: Request, prepare: Callable[[bytes], Prepared]) -> Response:
        with self.bridge.places.reserve() as place:  # a full server does not read what it will turn away
            content = await self._read(request, place)
            prepared = await self._unless_stopping(self._prepare(prepare, content, place))
            assert prepared is not None  # it may take its time
            place.keep(0)
            try:
                ticket = await self.bridge.submit(prepared.requests)
            except RequestError as error:
                raise prepared.body.error(error) from None
        body = prepared.body
        if not body.stream:
            return WholeAnswer(ticket, prepared.reply)
        return EventStream(
            ticket,
            prepared.reply,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )

    async def _prepare(self, prepare: Callable[[bytes], Prepared], content: bytes, place: Place) -> Prepared:
        """The requests of a body; their grammar is waited for without a thread, which others may need."""
        prepared = await asyncio.to_thread(prepare, content)
        place.keep(len(prepared.requests))
        if (compiling := prepared.compiling) is not None:
            compiled = asyncio.wrap_future(compiling.future)
            while seconds := compiling.patience():
                await asyncio.wait({compiled}, timeout=seconds)
        self.preparer.constrain(prepared)
        return prepared

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "nextn",
            "max_model_len": self.bridge.engine.max_model_len,
        }


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_busy(_: Request, error: Exception) -> Response:
    assert isinstance(error, Busy)
    headers = {"Retry-After": str(error.retry_after)}
    return error_response(ApiError(429, str(error), code="too_many_requests", headers=headers))


async def _on_unavailable(_: Request, error: Exception) -> Response:
    return error_response(unavailable(str(error)))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers) if error.headers else None
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return error_response(ApiError(error.status_code, message, code=code, headers=headers))


async def _on_client_gone(_: Request, __: Exception) -> Response:
    """The client left while it sent its body; nobody reads this answer."""
    return Response(status_code=CLIENT_GONE)


async def _on_defect(_: Request, __: Exception) -> Response:
    """Anything unforeseen; the server logs its traceback. Starlette answers it outside the middleware."""
    request_id = REQUEST_ID.get() or ""
    logger.error("%s failed with what no code foresees; the traceback follows", request_id)
    message = "internal error; the server's log has the details"
    headers = {"x-request-id": request_id}
    return error_response(ApiError(500, message, code="internal_error", headers=headers))


_HANDLERS: Mapping[Any, Callable[[Request, Exception], Coroutine[Any, Any, Response]]] = {
    ApiError: _on_api_error,
    Busy: _on_busy,
    Unavailable: _on_unavailable,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_client_gone,
    Exception: _on_defect,
}

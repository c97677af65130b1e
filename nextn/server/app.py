"""The HTTP application: routes, limits, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from nextn import __version__
from nextn.errors import RequestError
from nextn.server.bridge import Bridge, Busy, Unavailable
from nextn.server.fields import Strict
from nextn.server.metrics import CONTENT_TYPE
from nextn.server.middleware import CutOff, KeyRequired, RequestIds, unavailable
from nextn.server.openapi import describe
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

MAX_BODY_BYTES = 8 * 1024 * 1024
"""Default limit of a request's body; a larger one is refused with 413 before it is parsed."""

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

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        bridge.start()
        yield
        await bridge.stop()

    app = FastAPI(
        title="nextn",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect's address would come from the client's Host header
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_client_gone,
            Exception: _on_defect,
        },
    )
    endpoints = _Endpoints(bridge, tuple(served_names), max_body_bytes, body_seconds)
    _add_routes(app, endpoints)
    # The last one added is the outermost: ids on every answer, and a page is told why its key was refused.
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
    return app


def _add_routes(app: FastAPI, endpoints: _Endpoints) -> None:
    for path, get in (
        ("/health", endpoints.health),
        ("/health/live", endpoints.live),
        ("/version", endpoints.version),
        ("/metrics", endpoints.metrics),
        ("/v1/models", endpoints.models),
        ("/v1/models/{name:path}", endpoints.model),
    ):
        app.add_api_route(path, get, methods=["GET"], response_model=None)
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
        self.preparer = Preparer(bridge.engine, served_names, bridge.max_open)

    async def health(self) -> Response:
        """Whether requests are taken: 200, else 503."""
        if self.bridge.is_ready:
            return JSONResponse({"status": "ok"})
        status = "stopping" if self.bridge.failure is None else "engine failed"
        return JSONResponse({"status": status}, status_code=503)

    async def live(self) -> Response:
        """Whether the process does its work: 200 while it starts and ends too, 503 when its engine failed."""
        if self.bridge.failure is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "engine failed"}, status_code=503)

    async def version(self) -> Response:
        """The version of nextn."""
        return JSONResponse({"version": __version__})

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(self.bridge.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self) -> Response:
        """The names under which the model is served."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.served_names]})

    async def model(self, name: str) -> Response:
        """One of them."""
        self.preparer.check_model(name)
        return JSONResponse(self._model(name))

    async def completions(self, request: Request) -> Response:
        """Continue a text or token ids."""
        content = await self._read(request)
        return await self._answer(await asyncio.to_thread(self.preparer.completion, content))

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        content = await self._read(request)
        return await self._answer(await asyncio.to_thread(self.preparer.chat, content))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        return JSONResponse(await asyncio.to_thread(self.preparer.tokenize, await self._read(request)))

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        return JSONResponse(await asyncio.to_thread(self.preparer.detokenize, await self._read(request)))

    async def _read(self, request: Request) -> bytes:
        """The body, within its limits; only as JSON, which a foreign web page may not send unasked."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the content-type must be application/json", code="unsupported_media_type")
        reading = asyncio.ensure_future(self._collect(request))
        stopping = asyncio.ensure_future(self.bridge.until_stopping())
        try:
            await asyncio.wait(
                {reading, stopping}, return_when=asyncio.FIRST_COMPLETED, timeout=self.body_seconds
            )
            if reading.done():
                return reading.result()
            if stopping.done():
                raise unavailable("the server is shutting down")  # the rest might never come
            raise ApiError(
                408,
                f"the body did not come within {self.body_seconds:g} s",
                code="request_timeout",
                headers={"Connection": "close"},
            )
        finally:
            reading.cancel()
            stopping.cancel()
            await asyncio.gather(reading, stopping, return_exceptions=True)

    async def _collect(self, request: Request) -> bytes:
        content = bytearray()
        async for piece in request.stream():
            content += piece
            if len(content) > self.max_body_bytes:
                raise ApiError(
                    413, f"the body is larger than {self.max_body_bytes} bytes", code="request_too_large"
                )
        return bytes(content)

    async def _answer(self, prepared: Prepared) -> Response:
        try:
            ticket = await self.bridge.submit(prepared.requests)
        except Busy as error:
            raise ApiError(429, str(error), code="too_many_requests", headers={"Retry-After": "1"}) from None
        except Unavailable as error:
            raise unavailable(str(error)) from None
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


async def _on_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    headers = dict(error.headers) if error.headers else None
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return error_response(ApiError(error.status_code, message, code=code, headers=headers))


async def _on_client_gone(_: Request, __: Exception) -> Response:
    """The client left while it sent its body; nobody reads this answer."""
    return Response(status_code=400)


async def _on_defect(_: Request, __: Exception) -> Response:
    """Anything unforeseen; the server logs its traceback. Starlette answers it outside the middleware."""
    request_id = REQUEST_ID.get() or ""
    logger.error("%s failed with what no code foresees; the traceback follows", request_id)
    message = "internal error; the server's log has the details"
    headers = {"x-request-id": request_id}
    return error_response(ApiError(500, message, code="internal_error", headers=headers))

"""The HTTP application: routes, limits, the API key, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nextn import __version__
from nextn.engine.request import Request as EngineRequest
from nextn.errors import RequestError
from nextn.server.bridge import Bridge, Busy, Unavailable
from nextn.server.protocol import (
    COMPLETION_MAX_TOKENS,
    ApiError,
    Body,
    ChatBody,
    ChatReply,
    CompletionBody,
    Reply,
    parse_body,
)
from nextn.server.stream import EventStream, WholeAnswer, error_response
from nextn.text import Tokenizer

MAX_BODY_BYTES = 8 * 1024 * 1024
"""Default limit of a request's body; a larger one is refused with 413 before it is parsed."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A body that has passed every check, as requests for the engine."""

    body: Body
    reply: Reply
    requests: list[EngineRequest]


def create_app(
    bridge: Bridge,
    served_names: Sequence[str],
    *,
    api_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The application over `bridge`, which starts and stops with it.

    served_names: names that a request's `model` may give, the first being the one that answers carry.
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
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_client_gone,
            Exception: _on_defect,
        },
    )
    endpoints = _Endpoints(bridge, tuple(served_names), max_body_bytes)
    app.add_api_route("/health", endpoints.health, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models", endpoints.models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{name:path}", endpoints.model, methods=["GET"], response_model=None)
    app.add_api_route(
        "/v1/completions",
        endpoints.completions,
        methods=["POST"],
        response_model=None,
        openapi_extra=_described(CompletionBody),
    )
    app.add_api_route(
        "/v1/chat/completions",
        endpoints.chat,
        methods=["POST"],
        response_model=None,
        openapi_extra=_described(ChatBody),
    )
    if api_key is not None:
        app.add_middleware(_KeyRequired, api_key=api_key)
    app.add_middleware(_CutOff, bridge=bridge)
    return app


class _Endpoints:
    """The routes' functions."""

    def __init__(self, bridge: Bridge, served_names: tuple[str, ...], max_body_bytes: int) -> None:
        self.bridge = bridge
        self.served_names = served_names
        self.max_body_bytes = max_body_bytes
        self.created = int(time.time())

    async def health(self) -> Response:
        """200 while requests are taken, else 503."""
        if self.bridge.is_ready:
            return JSONResponse({"status": "ok"})
        status = "stopping" if self.bridge.failure is None else "engine failed"
        return JSONResponse({"status": status}, status_code=503)

    async def models(self) -> Response:
        """The names under which the model is served."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.served_names]})

    async def model(self, name: str) -> Response:
        """One of them."""
        self._check_model(name)
        return JSONResponse(self._model(name))

    async def completions(self, request: Request) -> Response:
        """Continue a text or token ids."""
        content = await self._read(request)
        return await self._answer(await asyncio.to_thread(self._prepare_completion, content))

    async def chat(self, request: Request) -> Response:
        """Answer a chat."""
        content = await self._read(request)
        return await self._answer(await asyncio.to_thread(self._prepare_chat, content))

    async def _read(self, request: Request) -> bytes:
        """The body, within its limit; only as JSON, which a foreign web page may not send unasked."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the content-type must be application/json", code="unsupported_media_type")
        reading = asyncio.ensure_future(self._collect(request))
        stopping = asyncio.ensure_future(self.bridge.until_stopping())
        try:
            await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            raise _unavailable("the server is shutting down")  # the rest might never come
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

    def _prepare_completion(self, content: bytes) -> _Prepared:
        body = parse_body(CompletionBody, content)
        self._check_model(body.model)
        reply = Reply(body.model or self.served_names[0], len(body.prompt))
        try:
            requests = [
                self._request(
                    body,
                    self._tokens(body, prompt) if isinstance(prompt, str) else prompt,
                    default=COMPLETION_MAX_TOKENS,
                )
                for prompt in body.prompt
            ]
        except RequestError as error:
            raise body.error(error) from None
        return _Prepared(body, reply, requests)

    def _prepare_chat(self, content: bytes) -> _Prepared:
        body = parse_body(ChatBody, content)
        self._check_model(body.model)
        reply = ChatReply(body.model or self.served_names[0], 1)
        messages = [{"role": message.role, "content": message.content} for message in body.messages]
        try:
            text = self._tokenizer().chat_text(messages, **(body.chat_template_kwargs or {}))
            tokens = self._tokens(body, text, add_special_tokens=False)  # the template wrote BOS
            requests = [self._request(body, tokens, default=None)]
        except RequestError as error:
            raise body.error(error) from None
        return _Prepared(body, reply, requests)

    def _tokens(self, body: Body, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a prompt; what cannot fit is refused unseen, since megabytes would cost many seconds."""
        tokenizer, longest = self._tokenizer(), self.bridge.engine.max_model_len
        fewest = tokenizer.fewest_tokens(text)
        if fewest > longest:
            raise ApiError(
                400,
                f"this model's maximum context length is {longest} tokens, but the prompt has at least "
                f"{fewest}; shorten the prompt",
                param=body.field_name("prompt"),
                code="context_length_exceeded",
            )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _request(self, body: Body, tokens: list[int], *, default: int | None) -> EngineRequest:
        """One request for the engine; `default` tokens to generate, None meaning what fits."""
        longest, asked = self.bridge.engine.max_model_len, body.token_limit
        room = longest - len(tokens)
        if room < 1 or (asked or 0) > room:
            generated = "" if asked is None else f", {asked} to generate"
            raise ApiError(
                400,
                f"this model's maximum context length is {longest} tokens, but {len(tokens) + (asked or 1)} "
                f"were asked for ({len(tokens)} in the prompt{generated}); shorten the prompt or the output",
                param=body.field_name("max_tokens" if room >= 1 else "prompt"),
                code="context_length_exceeded",
            )
        limit = asked if asked is not None else room if default is None else min(default, room)
        params = body.sampling_params(limit)
        self.bridge.engine.validate(tokens, params)
        return EngineRequest(uuid.uuid4().hex, tokens, params)

    async def _answer(self, prepared: _Prepared) -> Response:
        try:
            ticket = await self.bridge.submit(prepared.requests)
        except Busy as error:
            raise ApiError(429, str(error), code="too_many_requests", headers={"Retry-After": "1"}) from None
        except Unavailable as error:
            raise _unavailable(str(error)) from None
        except RequestError as error:
            raise prepared.body.error(error) from None
        if prepared.body.stream:
            return EventStream(ticket, prepared.reply, include_usage=prepared.body.include_usage)
        return WholeAnswer(ticket, prepared.reply)

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.bridge.engine.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer; send token ids to /v1/completions", "prompt")
        return tokenizer

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.served_names:
            listed = ", ".join(self.served_names)
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist; this server has {listed}",
                param="model",
                code="model_not_found",
            )

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "nextn",
            "max_model_len": self.bridge.engine.max_model_len,
        }


class _KeyRequired:
    """ASGI middleware: everything but /health needs the key, compared in constant time."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self.expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self.expected):
                error = ApiError(
                    401,
                    "the API key is missing or wrong",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class _CutOff:
    """ASGI middleware: a request that is cancelled because the server ends is no defect.

    It gets 503 if nothing of its answer has been sent; without this the log would show a traceback for it.
    """

    def __init__(self, app: ASGIApp, bridge: Bridge) -> None:
        self.app = app
        self.bridge = bridge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            if self.bridge.is_ready or scope["type"] != "http":
                raise
            if not started:
                await error_response(_unavailable("the server is shutting down"))(scope, receive, send)


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="unavailable", headers={"Retry-After": "5"})


def _described(body: type[Body]) -> dict[str, Any]:
    """The body's schema for /openapi.json; the body itself is read under the limits above."""
    schema = body.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


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
    """Anything unforeseen; the server logs its traceback."""
    return error_response(
        ApiError(500, "internal error; the server's log has the details", code="internal_error")
    )

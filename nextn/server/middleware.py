"""ASGI middleware: the request's id, the API key, and requests that the end of the server cuts off."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nextn.server.bridge import Bridge
from nextn.server.metrics import Metrics
from nextn.server.protocol import REQUEST_ID, ApiError
from nextn.server.stream import error_response
from nextn.server.traffic import RefusalLog

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/health/live"})
"""What needs no key: probes, which say nothing but whether the server is there."""

CLIENT_GONE = 499
"""Status, as nginx has it, under which a client counts that left before its answer began; nobody gets it."""

_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestIds:
    """Gives each request its id, a client's own if it is harmless, and says how the request went."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self.app = app
        self.metrics = metrics
        self.paths = paths
        self.refusals = RefusalLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            self.refusals.flush()  # the end of the lifespan
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        REQUEST_ID.set(request_id)
        started, status = time.monotonic(), 0

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
                self._answered(scope, status)
            await send(message)

        level = logging.DEBUG
        try:
            await self.app(scope, receive, marked)
            if not status:
                status = CLIENT_GONE
                self._answered(scope, status)
        except Exception:  # a defect, which Starlette answers outside of this
            level = logging.WARNING
            if not status:
                status = 500
                self._answered(scope, status)
            raise
        finally:
            level = logging.WARNING if status == 500 else level
            logger.log(
                level,
                "%s %s %r: %d after %.3f s",
                request_id,
                scope["method"],
                scope["path"][:200],
                status,
                time.monotonic() - started,
            )

    def _answered(self, scope: Scope, status: int) -> None:
        """Count an answer under its route; what came to none may be anything."""
        path = getattr(scope.get("route"), "path", None) or scope["path"]
        path = path if path in self.paths else "other"
        self.metrics.answered(path, status)
        refused = (400 <= status < 500 and status != CLIENT_GONE) or status == 503
        if refused and path not in OPEN_PATHS:
            self.refusals.record(path, status)


class KeyRequired:
    """Everything but probes needs the key, which is compared in constant time; "bearer" in any case."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self.expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.encode("latin-1"), self.expected)
            if not same or scheme.lower() != "bearer":
                error = ApiError(
                    401,
                    "the API key is missing or wrong",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class CutOff:
    """A request that is cancelled because the server ends is no defect.

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
            if self.bridge.state in ("loading", "ok") or scope["type"] != "http":
                raise
            if not started:
                await error_response(unavailable("the server is shutting down"))(scope, receive, send)


def unavailable(message: str) -> ApiError:
    """503 for a server that is loading or ending, or whose engine has failed.

    The connection is closed, so that a client's next try may find another server behind the same name.
    """
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError(503, message, code="unavailable", headers=headers)

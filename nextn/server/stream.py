"""Answers over HTTP, whole or as server-sent events; a client that goes away aborts its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nextn.engine.request import FinishReason, Output
from nextn.server.protocol import ApiError
from nextn.server.replies import Chunk, Reply
from nextn.server.ticket import Ticket


def error_response(error: ApiError) -> Response:
    """The error as an HTTP answer."""
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


class WholeAnswer(Response):
    """One JSON body, sent when every choice has ended."""

    def __init__(self, ticket: Ticket, reply: Reply) -> None:
        super().__init__()
        self._ticket = ticket
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._ticket, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response = JSONResponse(await self._collect())
        except ApiError as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _collect(self) -> dict[str, object]:
        reply = self._reply
        chunks: list[list[Chunk]] = [[] for _ in reply.choices]
        while self._ticket.is_open:
            index, output = await self._ticket.next()
            reply.usage.record(index, output)
            reason = _finish_reason(output, self._ticket, self._reply)
            chunks[index] += reply.choices[index].take(output)
            if reason is not None:
                chunks[index].append(reply.choices[index].ending(reason))
        return reply.whole(choice.whole(own) for choice, own in zip(reply.choices, chunks, strict=True))


class EventStream(Response):
    """Server-sent events: chunks as text becomes safe to show, then `[DONE]`; an error is the last event."""

    def __init__(
        self, ticket: Ticket, reply: Reply, *, include_usage: bool, continuous_usage: bool = False
    ) -> None:
        super().__init__()
        self._ticket = ticket
        self._reply = reply
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._ticket, self._answer(send))

    async def _answer(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for event in self._events():
                await send({"type": "http.response.body", "body": _frame(event), "more_body": True})
            last = b"data: [DONE]\n\n"
        except ApiError as error:
            last = _frame(error.body)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _events(self) -> AsyncIterator[Mapping[str, object]]:
        """The chunks in order; raises ApiError where the engine gives up."""
        reply = self._reply
        for choice in reply.choices:
            if (opening := choice.opening()) is not None:
                yield self._chunk(opening)
        while self._ticket.is_open:
            index, output = await self._ticket.next()
            reply.usage.record(index, output)
            reason = _finish_reason(output, self._ticket, self._reply)
            for chunk in reply.choices[index].take(output):
                yield self._chunk(chunk)
            if reason is not None:
                yield self._chunk(reply.choices[index].ending(reason))
        if self._include_usage:
            yield reply.chunk(()) | {"usage": reply.usage.final_body()}

    def _chunk(self, choice: Chunk) -> dict[str, object]:
        chunk = self._reply.chunk((choice,))
        if not self._include_usage:
            return chunk
        return chunk | {"usage": self._reply.usage.body() if self._continuous_usage else None}


def _frame(event: Mapping[str, object]) -> bytes:
    return b"data: " + to_json(event) + b"\n\n"


def _finish_reason(output: Output, ticket: Ticket, reply: Reply) -> FinishReason | None:
    """OpenAI knows 'stop' and 'length'; anything else that ends a request is an error, maybe the client's."""
    if output.finish_reason not in ("error", "abort"):
        return output.finish_reason
    message = output.error or "the request was aborted"
    if ticket.is_overrun:
        raise ApiError(408, message, code="slow_reader")
    if ticket.is_stopping:
        raise ApiError(503, message, code="unavailable")
    if output.error_field is not None:
        raise ApiError(400, message, param=reply.field_name(output.error_field), code="invalid_value")
    raise ApiError(500, message, code="engine_error")


async def _while_connected(receive: Receive, ticket: Ticket, answer: Coroutine[Any, Any, None]) -> None:
    """Run `answer` until it is done or the client is gone; then abort whatever has not ended."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()
    finally:
        answering.cancel()
        leaving.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)
        ticket.close()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""The life of a serving process: it listens, loads, serves, and ends with a status that says how it went."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeVar

import uvicorn
from fastapi import FastAPI

from nextn import __version__
from nextn.config import EngineConfig
from nextn.errors import ConfigError, NextnError
from nextn.server.app import create_app
from nextn.server.bridge import Bridge, EngineLike
from nextn.server.connection import Connection
from nextn.server.traffic import TrafficLog
from nextn.server.watchdog import END_SECONDS, Watchdog, leave

logger = logging.getLogger(__name__)

_EngineT = TypeVar("_EngineT", bound=EngineLike)

STALLED_SECONDS = 60
"""A connection on whose other side nobody takes a byte for so long, or is there at all, is closed."""

_WRITING_SECONDS = 5.0
"""How long clients have to take their errors when all else is over, and when the server was told to hurry."""
_HURRIED_WRITING_SECONDS = 1.0
_HURRIED_END_SECONDS = 1.75
"""After these the watchdog ends the process; with its tick, and 1 s if nobody reads the log, within 3 s."""


_FULL_EVERY = 60.0
"""Seconds between two lines that say so while no connection can be accepted."""


class Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready and ends open requests before it closes connections.

    ready: printed, with {url} filled in, as soon as requests are taken.
    """

    def __init__(self, config: uvicorn.Config, bridge: Bridge, ready: str, shutdown_timeout: float) -> None:
        super().__init__(config)
        self.ready = ready
        self.end_by: float | None = None
        """When the process must have ended, by `time.monotonic`."""
        self._bridge = bridge
        self._shutdown_timeout = shutdown_timeout
        self._signals = 0
        self._silent_until = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        bridge.on_ready = self._announce
        bridge.on_failure = self.end

    def end(self) -> None:
        """Leave the main loop."""
        self.end_by = min(self.end_by or math.inf, time.monotonic() + END_SECONDS)
        self.should_exit = True

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """The first lets open requests finish, the second ends them, the third ends the process.

        It may interrupt anything in the main thread, so it neither logs nor takes a lock.
        """
        self._signals += 1
        now = time.monotonic()
        if self._signals == 1:
            self.end_by = min(self.end_by or math.inf, now + self._shutdown_timeout + END_SECONDS)
            self.should_exit = True
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._bridge.refuse)
        elif self._signals == 2:
            self.end_by = now + _HURRIED_END_SECONDS
            self.force_exit = True
            self._bridge.hurry()
        else:
            os._exit(128 + number)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`, whose handler outlives the loop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        await super().startup(sockets=sockets)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        grace = self._shutdown_timeout if self._bridge.failure is None else 0.0
        last = time.monotonic() + grace
        if self._bridge.num_open:
            logger.info(
                "ending: %d open requests have %g s to finish; a second signal ends them at once",
                self._bridge.num_open,
                grace,
            )
        await self._bridge.stop(grace)
        now = time.monotonic()
        if self.force_exit:  # uvicorn would then not wait for errors that are about to be written
            while self.server_state.tasks and time.monotonic() < now + _HURRIED_WRITING_SECONDS:
                await asyncio.sleep(0.01)
        self.config.timeout_graceful_shutdown = math.ceil(max(_WRITING_SECONDS, last - now))
        await super().shutdown(sockets=sockets)
        if self.force_exit:  # uvicorn leaves this out then, and its task's end would be logged as an error
            await self.lifespan.shutdown()
        self.end_by = min(self.end_by or math.inf, time.monotonic() + END_SECONDS)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say now and then that no connection can be accepted; asyncio would, thousands of times a second."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._silent_until:
            self._silent_until = loop.time() + _FULL_EVERY
            logger.warning("no more files can be opened (%s); new connections wait", error.strerror)

    def _announce(self) -> None:
        if not self.started or self._bridge.state != "ok" or not self.ready:
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(self.ready.format(url=f"http://{shown}:{port}/v1"), file=sys.stderr, flush=True)
        self.ready = ""


@contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets bound to the addresses of `host`, closed at the end; raises ConfigError if there are none.

    They do not listen yet. An address that this machine lacks (::1 of localhost, say) is left out if there is
    another. Port 0 becomes a free one, the same for all.
    """
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        lacking: OSError | None = None
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(infos):
                chosen = sockets[0].getsockname()[1] if sockets else port
                try:
                    made = _bound(family, (address[0], chosen, *address[2:]))
                except OSError as error:
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
                    lacking = error
                else:
                    sockets.append(stack.enter_context(made))
            if lacking is not None and not sockets:
                raise lacking
        except (OSError, UnicodeError) as error:
            raise _cannot_listen(host, port, error) from None
        yield sockets


def _bound(family: int, address: tuple[str | int, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # take the port over from connections that have ended; elsewhere: from anybody
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        _drop_stalled(made)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def _drop_stalled(listener: socket.socket) -> None:
    """Let the system close connections, which inherit this, whose client does not read or has vanished.

    Otherwise a request would go on for a machine that was switched off, and an answer could wait in memory
    for ever.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, STALLED_SECONDS // 2))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, STALLED_SECONDS // 6))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_SECONDS * 1000)


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else "not a host name"
    return ConfigError(f"cannot listen on --host {host} --port {port}: {reason}; choose another")


def serve(
    load: Callable[[], _EngineT],
    config: EngineConfig,
    served_names: Sequence[str],
    *,
    sockets: list[socket.socket],
    api_key: str | None,
    log_level: str,
    ready: Callable[[_EngineT], str],
    shutdown_timeout: float,
    step_timeout: float,
    about: Callable[[_EngineT], Mapping[str, str]] = lambda _: {},
    cors_origins: Sequence[str] = (),
) -> NoReturn:
    """Serve what `load` builds until a signal (status 0) or until the engine fails (1), and end the process.

    On its main thread, and without the interpreter's own end: that takes seconds, in which signals have their
    defaults back, and a thread or device may hang in it. `ready` gives what is printed, with
    {url} filled in, `about` the labels of nextn_info. Raises ConfigError if another process took the port
    meanwhile, and what `load` raises on purpose.
    """

    def build() -> EngineLike:
        engine = load()
        server.ready = ready(engine)
        bridge.metrics.identify({"version": __version__, "model": served_names[0], **about(engine)})
        return engine

    bridge = _bridge(build, config)
    app = create_app(bridge, served_names, api_key=api_key, cors_origins=cors_origins)
    server = Server(_uvicorn_config(app, log_level), bridge, "", shutdown_timeout)
    _listen(sockets, server.config.backlog)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.on_signal)
    Watchdog(bridge, step_timeout, lambda: server.end_by).start()
    server.run(sockets=sockets)
    if isinstance(bridge.failure, NextnError) and not bridge.is_loaded:
        raise bridge.failure
    leave(0 if bridge.failure is None else 1)


def _bridge(load: Callable[[], EngineLike], config: EngineConfig) -> Bridge:
    max_open = config.max_running_requests + config.max_waiting_requests
    bridge = Bridge(None, load=load, max_open=max_open, report=TrafficLog())
    text = "Requests that the engine decodes or prefills at most."
    bridge.metrics.watch("nextn_requests_running_limit", text, lambda: config.max_running_requests)
    return bridge


def _uvicorn_config(app: FastAPI, log_level: str) -> uvicorn.Config:
    """Without a limit on connections but the process's limit of open files: at it, new ones wait.

    Requests are bounded by the bridge and the application from when their bodies are read; uvicorn's
    limit_concurrency is no help, as above it /health would be refused as well. A connection on which no
    request has come stays open; where strangers can connect, a proxy in front must bound them.
    """
    return uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        log_level="warning" if log_level == "info" else log_level,
        access_log=False,  # the application logs its answers, with their ids
        server_header=False,
    )


def _listen(sockets: Sequence[socket.socket], backlog: int) -> None:
    for each in sockets:
        try:
            each.listen(backlog)
        except OSError as error:  # of two servers that started at the same time, the later one
            host, port = each.getsockname()[:2]
            raise _cannot_listen(host, port, error) from None

"""`nextn-serve`: read the flags, load the model, serve until a signal or until the engine fails."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from nextn.config import EngineConfig
from nextn.engine.flags import add_engine_flags, engine_config
from nextn.errors import ConfigError, NextnError
from nextn.server.app import create_app
from nextn.server.bridge import Bridge, EngineLike

if TYPE_CHECKING:
    from nextn.engine.engine import Engine

logger = logging.getLogger(__name__)

SHUTDOWN_GRACE_SECONDS = 5.0
"""After SIGTERM or SIGINT, how long open requests may go on before they are ended with an error."""

_LEVELS = ("debug", "info", "warning", "error")


def build_parser() -> argparse.ArgumentParser:
    """Every flag of nextn-serve; the list is frozen by a test."""
    parser = argparse.ArgumentParser(
        prog="nextn-serve",
        description="Serve a DeepSeek-V3-family model over the OpenAI HTTP API, with NextN tree speculation.",
        allow_abbrev=False,
    )
    add_engine_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one (default: 127.0.0.1)"
    )
    group.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0 takes any free one (default: 8000)"
    )
    group.add_argument(
        "--api-key",
        help="key that requests must carry as 'Authorization: Bearer KEY', all but /health and /health/live; "
        "other users of this machine can see it in process lists (default: none is asked for)",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file whose text is that key (default: the environment variable NEXTN_API_KEY holds it, if any)",
    )
    group.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="origin of web pages that may call this server from a browser, such as https://example.org; "
        "may be given several times (default: none may)",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        help="name of the model in the API; may be given several times (default: the last part of MODEL)",
    )
    group.add_argument(
        "--log-level", choices=_LEVELS, default="info", help="least severity that is logged (default: info)"
    )
    return parser


class TrafficLog:
    """One log line for each stretch of traffic, from differences of the engine's counters."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def __call__(self, stats: Mapping[str, float], seconds: float) -> None:
        """Log what happened since the last call, in `seconds` of work."""
        since = {name: value - self._before.get(name, 0) for name, value in stats.items()}
        line = (
            f"running {stats['running']:.0f}, waiting {stats['waiting']:.0f}, "
            f"{since['generated_tokens'] / max(seconds, 1e-9):.1f} tokens/s"
        )
        if since["cycles"]:
            line += f", acceptance length {since['emitted'] / since['cycles']:.2f}"
        if stats["pages"]:
            line += f", cache {100 * stats['pages_used'] / stats['pages']:.0f} % used"
        logger.info("%s", line)
        self._before = dict(stats)


class Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready and ends open requests before it closes connections."""

    def __init__(self, config: uvicorn.Config, bridge: Bridge, ready: str) -> None:
        super().__init__(config)
        self._bridge = bridge
        self._ready = ready
        bridge.on_failure = self.end

    def end(self) -> None:
        """Leave the main loop."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the server; unlike uvicorn, do not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(self._ready.format(url=f"http://{shown}:{port}/v1"), file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._bridge.num_open:
            logger.info(
                "ending: %d open requests have %g s to finish", self._bridge.num_open, SHUTDOWN_GRACE_SECONDS
            )
        await self._bridge.stop(grace=SHUTDOWN_GRACE_SECONDS)
        await super().shutdown(sockets=sockets)


@contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets bound to the addresses of `host`, closed at the end; raises ConfigError if there are none.

    They do not listen, so that clients are refused and do not hang while the model loads. An address that
    this machine lacks (::1 of localhost, say) is left out if there is another. Port 0 becomes a free one,
    the same for all.
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
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) else "not a host name"
    return ConfigError(f"cannot listen on --host {host} --port {port}: {reason}; choose another")


def serve(
    engine: EngineLike,
    config: EngineConfig,
    served_names: Sequence[str],
    *,
    sockets: list[socket.socket],
    api_key: str | None,
    log_level: str,
    ready: str,
    cors_origins: Sequence[str] = (),
) -> int:
    """Serve `engine` on `sockets` until a signal (0) or until it fails (1); close the sockets.

    `ready` is printed with {url} filled in. Raises ConfigError if another process took the port meanwhile.

    Open requests are bounded by the bridge, connections only by the process's limit of open files: at it,
    new ones wait. uvicorn's limit_concurrency is no help, as above it /health would be refused as well. A
    connection on which no request has come stays open, and one that sends its body holds what has come of
    it (at most `MAX_BODY_BYTES`, for `BODY_SECONDS`); where strangers can connect, a proxy in front must
    bound both.
    """
    bridge = Bridge(
        engine,
        max_open=config.max_running_requests + config.max_waiting_requests,
        report=TrafficLog(),
    )
    app = create_app(bridge, served_names, api_key=api_key, cors_origins=cors_origins)
    uvicorn_config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning" if log_level == "info" else log_level,
        access_log=False,  # the application logs its answers, with their ids
        server_header=False,
        timeout_graceful_shutdown=int(SHUTDOWN_GRACE_SECONDS),
    )
    for each in sockets:
        try:
            each.listen(uvicorn_config.backlog)
        except OSError as error:  # of two servers that loaded at the same time, the later one
            host, port = each.getsockname()[:2]
            raise _cannot_listen(host, port, error) from None
    Server(uvicorn_config, bridge, ready).run(sockets=sockets)
    return 0 if bridge.failure is None else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Console script; 2 on a wrong flag, an address in use or an unusable model, 1 when the engine fails."""
    parser = build_parser()
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    try:
        config = engine_config(args)
        names = _served_names(args)
        _check_server_flags(args)
        key = _api_key(args)
        with bound(args.host, args.port) as sockets:  # before the load, which may take minutes
            engine = _load(args.model, config)
            return serve(
                engine,
                config,
                names,
                sockets=sockets,
                api_key=key,
                cors_origins=args.cors_origin,
                log_level=args.log_level,
                ready=ready_line(names[0], engine, config),
            )
    except NextnError as error:
        print(f"nextn-serve: {error}", file=sys.stderr)
        return 2


def _check_server_flags(args: argparse.Namespace) -> None:
    if args.host == "":
        raise ConfigError("--host is empty; give an address (0.0.0.0 is every one), or leave it out")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port} must be 0 to 65535")
    for origin in args.cors_origin:
        if not re.fullmatch(r"https?://[^/\s?#*@]+", origin):
            raise ConfigError(
                f"--cors-origin {origin!r} is no origin; give a scheme and a host, such as https://example.org"
            )


def _api_key(args: argparse.Namespace) -> str | None:
    """The key of the flag, the file or the environment; raises ConfigError for two flags or an empty key."""
    if args.api_key is not None and args.api_key_file is not None:
        raise ConfigError("--api-key and --api-key-file exclude each other; leave one of them out")
    if args.api_key is not None:
        source, key = "--api-key", args.api_key
    elif args.api_key_file is not None:
        source = f"--api-key-file {args.api_key_file}"
        try:
            key = Path(args.api_key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"{source} cannot be read: {reason}") from None
    else:
        source, key = "NEXTN_API_KEY", os.environ.get("NEXTN_API_KEY")
    if key is None:
        return None
    if not key.strip():
        raise ConfigError(f"{source} is empty; give a key, or leave it out")
    return str(key.strip())


def _load(model: str, config: EngineConfig) -> Engine:
    """Build the engine; the imports stand here so that help and wrong flags need not wait for torch."""
    from nextn.engine.engine import Engine
    from nextn.engine.llm import resolve_model
    from nextn.engine.worker import leave_a_core_free

    leave_a_core_free()
    return Engine.from_config(resolve_model(model), config)


def ready_line(name: str, engine: Engine, config: EngineConfig) -> str:
    """What is served and how, in one line with {url} to fill in."""
    spec = engine.spec
    tree = "plain decoding" if spec is None else f"draft tree {spec} (num-steps/topk/draft-tokens)"
    tokens = engine.pool.num_pages * config.page_size
    name = name.replace("{", "{{").replace("}", "}}")
    return (
        f"nextn-serve is ready: model {name} at {{url}}; {tree}; "
        f"the cache holds {tokens} tokens, a request at most {engine.max_model_len}"
    )


def _served_names(args: argparse.Namespace) -> list[str]:
    names: list[str] = args.served_model_name or [Path(args.model).resolve().name]
    if not all(names):
        raise ConfigError("--served-model-name is empty; give a name")
    return names


if __name__ == "__main__":
    sys.exit(main())

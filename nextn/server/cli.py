"""`nextn-serve`: read the flags, listen, load the model, serve until a signal or until the engine fails.

What takes long to import is imported in functions, when signals are taken care of already.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from nextn.config import EngineConfig
from nextn.engine.flags import add_engine_flags, engine_config
from nextn.errors import ConfigError, NextnError

if TYPE_CHECKING:
    from nextn.engine.engine import Engine

_SHUTDOWN_SECONDS = 30.0
_STEP_SECONDS = 300.0
_MAX_SECONDS = 86_400

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
    _add_access_flags(group)
    _add_time_flags(group)
    group.add_argument(
        "--log-level", choices=_LEVELS, default="info", help="least severity that is logged (default: info)"
    )
    return parser


def _add_access_flags(group: argparse._ArgumentGroup) -> None:
    """Where the server is found, under which names, and by whom."""
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


def _add_time_flags(group: argparse._ArgumentGroup) -> None:
    """How long requests and steps may take."""
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        metavar="SECONDS",
        default=_SHUTDOWN_SECONDS,
        help="how long open requests may go on after SIGTERM or SIGINT, while new ones are refused; a second "
        f"signal ends them at once (default: {_SHUTDOWN_SECONDS:g})",
    )
    group.add_argument(
        "--step-timeout",
        type=float,
        metavar="SECONDS",
        default=_STEP_SECONDS,
        help="how long one step of the engine may take before the server logs what hangs, gives every open "
        f"request an error and ends; 0 is for ever (default: {_STEP_SECONDS:g})",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Console script; 2 on a wrong flag, an address in use or an unusable model, 1 when the engine fails."""
    with _signals_end():
        return _run(argv)


@contextmanager
def _signals_end() -> Iterator[None]:
    """Until the server takes signals they end the process; else a container's first would ignore them."""
    before = {number: signal.signal(number, _end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> NoReturn:
    """It may interrupt anything, so it takes no lock and does not wait for the interpreter's end."""
    name = signal.Signals(number).name
    with suppress(OSError):
        os.write(2, f"nextn-serve: {name} came before the server was there; the process ends\n".encode())
    os._exit(0)


def _run(argv: Sequence[str] | None) -> int:
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
        from nextn.server.process import bound, serve

        with bound(args.host, args.port) as sockets:  # before the load, which may take minutes
            serve(
                lambda: _load(args.model, config),
                config,
                names,
                sockets=sockets,
                api_key=key,
                cors_origins=args.cors_origin,
                log_level=args.log_level,
                ready=lambda engine: ready_line(names[0], engine, config),
                about=about,
                shutdown_timeout=args.shutdown_timeout,
                step_timeout=args.step_timeout,
            )
    except NextnError as error:
        print(f"nextn-serve: {error}", file=sys.stderr)
        return 2


def _check_server_flags(args: argparse.Namespace) -> None:
    if args.host == "":
        raise ConfigError("--host is empty; give an address (0.0.0.0 is every one), or leave it out")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port} must be 0 to 65535")
    for flag, seconds in (
        ("--shutdown-timeout", args.shutdown_timeout),
        ("--step-timeout", args.step_timeout),
    ):
        if not 0 <= seconds <= _MAX_SECONDS:
            raise ConfigError(f"{flag} {seconds:g} must be 0 to {_MAX_SECONDS} seconds")
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
    from nextn.engine.llm import load_engine

    return load_engine(model, config)


def about(engine: Engine) -> dict[str, str]:
    """How the model is served, as labels of a metric."""
    dtype = str(engine.worker.state.cache.dtype).removeprefix("torch.")
    return {"spec": "off" if engine.spec is None else str(engine.spec), "dtype": dtype}


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

"""What an attack on the server's life cycle found: each test is one promise that did not hold."""

from __future__ import annotations

import json
import logging
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nextn.server import watchdog
from nextn.server.watchdog import Watchdog
from nextn.text import Tokenizer
from tests.server.fake import FakeEngine, running_server, wait_until

ROOT = Path(__file__).parents[2]


def test_numbers_that_are_no_token_leave_nothing_in_memory(tokenizer: Tokenizer) -> None:
    """/detokenize takes a million of them a request, and there are 2^64."""
    assert tokenizer.decode(range(10**9, 10**9 + 10_000)) == ""
    assert len(tokenizer._bytes) <= tokenizer.vocab_size


@pytest.mark.parametrize("later", [b"\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_client_that_sent_more_behind_its_request_and_leaves_aborts_it(
    engine: FakeEngine, later: bytes
) -> None:
    """A whole answer, to which nothing is written that could fail."""
    engine.script = lambda _: [40] * 10**6
    engine.max_model_len, engine.step_seconds = 10**7, 0.005
    content = json.dumps({"prompt": [5, 6], "max_tokens": 10**6}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with running_server(engine, shutdown_timeout=0.0) as running:
        address = ("127.0.0.1", int(running.url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=20) as connection:
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            wait_until(lambda: engine.steps > 5)  # so the server waits for the client's leaving
            connection.sendall(later)
            time.sleep(0.2)
        wait_until(lambda: bool(engine.aborted), 1.0)


class _Stuck(logging.Handler):
    """A log that nobody takes any more: a full pipe, a terminal that was stopped with Ctrl-S."""

    def __init__(self) -> None:
        super().__init__()
        self.is_writing, self.go_on = threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.is_writing.set()
        self.go_on.wait(20)


class _Ended:
    """A bridge of which nothing is known but that its time is up."""

    is_ended, failure, turn = False, None, None


def test_an_end_that_is_overdue_comes_though_the_log_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that hangs in it, be it the loop's, holds the handler's lock."""
    left, stuck = threading.Event(), _Stuck()
    monkeypatch.setattr(watchdog.os, "_exit", lambda _: left.set())
    monkeypatch.setattr(watchdog.logging, "shutdown", lambda: stuck.acquire() and stuck.release())
    log = logging.getLogger("nextn.server")
    log.addHandler(stuck)
    try:
        threading.Thread(target=log.error, args=("the loop hangs in this",), daemon=True).start()
        assert stuck.is_writing.wait(20)
        looking = Watchdog(_Ended(), 0.0, lambda: 0.0)  # type: ignore[arg-type]
        threading.Thread(target=looking._check_end, daemon=True).start()
        assert left.wait(2.0)
    finally:
        stuck.go_on.set()
        log.removeHandler(stuck)


@contextmanager
def _scripted(code: str, **options: Any) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    """The server around the scripted engine after `code`, as soon as it is ready: process, port, log."""
    program = f"import os, sys\n{code}\nfrom tests.server import scripted\nsys.exit(scripted.main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as popen:
        assert popen.stdout is not None
        assert popen.stderr is not None
        lines, log = popen.stderr, list[str]()
        reader = threading.Thread(target=lambda: log.extend(lines))
        try:
            port = int(popen.stdout.readline())
            reader.start()
            wait_until(lambda: popen.poll() is not None or any("ready at " in line for line in log))
            assert popen.poll() is None, log
            yield popen, port, log
        finally:
            popen.kill()
            if reader.ident is not None:
                reader.join(20)


def test_a_second_signal_has_status_0_even_while_the_interpreter_is_torn_down() -> None:
    """With torch in it that takes seconds; signals then have their defaults back, and no limit holds."""
    slow = (
        "import nextn.errors, time\n"
        "class Slow:\n"
        "    def __del__(self, write=os.write, sleep=time.sleep):\n"
        "        write(2, b'torn down\\n'); sleep(5)\n"
        "nextn.errors.kept = Slow()"
    )
    with _scripted(slow) as (popen, _, log):
        popen.send_signal(signal.SIGTERM)
        wait_until(lambda: popen.poll() is not None or "torn down\n" in log)
        if popen.poll() is None:
            popen.send_signal(signal.SIGTERM)
        assert popen.wait(20) == 0


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_NOFILE"), reason="no limit of open files")
def test_connections_beyond_the_limit_of_open_files_do_not_flood_the_log() -> None:
    """They wait, or are closed: whichever, it costs next to nothing."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    with _scripted(limited) as (_, port, log):
        connections = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(80)]
        try:
            time.sleep(1.0)
            assert len(log) < 100
        finally:
            for connection in connections:
                connection.close()

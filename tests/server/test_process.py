"""The server as a process: signals at each moment, hangs, failures, and what status it ends with."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import nextn
import nextn.server.process
from tests.server.fake import wait_until

ROOT = Path(__file__).parents[2]
BODY: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 10**6, "logprobs": 0}  # so that streams have chunks


@dataclass
class Answer:
    """An HTTP answer that is read in a thread of its own until the connection ends."""

    connection: socket.socket
    received: bytes = b""
    thread: threading.Thread | None = None

    def read(self) -> None:
        """Take everything, as long as it comes."""
        try:
            while piece := self.connection.recv(65536):
                self.received += piece
        except OSError:
            return

    def whole(self) -> str:
        """All of it, when it has ended."""
        assert self.thread is not None
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.received.decode()


@dataclass
class Process:
    """A server in a process of its own."""

    popen: subprocess.Popen[str]
    port: int
    stack: ExitStack
    log: list[str] = field(default_factory=list)

    def get(self, path: str) -> tuple[int, str]:
        """Status of an answer and what it says."""
        answer = httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=60)
        return answer.status_code, answer.text

    def post(self) -> httpx.Response:
        """An answer to a completion."""
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=BODY, timeout=60)

    def listens(self) -> bool:
        """Whether it answers at all."""
        return self._health() is not None

    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self._health() == 200

    def _health(self) -> int | None:
        try:
            return self.get("/health")[0]
        except httpx.TransportError:
            return None

    def ask(self, *, stream: bool) -> Answer:
        """Send a completion over a connection of its own and read what comes."""
        content = json.dumps(BODY | {"stream": stream}).encode()
        connection = self.stack.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=60))
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json"
        )
        connection.sendall(f"{head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = Answer(connection)
        answer.thread = threading.Thread(target=answer.read, daemon=True)
        answer.thread.start()
        return answer

    def open(self, count: int) -> list[Answer]:
        """So many streams that have begun."""
        answers = [self.ask(stream=True) for _ in range(count)]
        wait_until(lambda: all(b"data: " in answer.received for answer in answers))
        return answers

    def send(self, *numbers: signal.Signals) -> None:
        """Signals, one when the one before has been seen to work."""
        for count, number in enumerate(numbers):
            if count:
                wait_until(lambda: not self.is_ready())
            self.popen.send_signal(number)

    def hang_loop(self) -> None:
        """Let its event loop hang."""
        before = self.log.count("hanging\n")
        self.popen.send_signal(signal.SIGUSR1)
        self.hangs(before)

    def hangs(self, before: int = 0) -> None:
        """Wait until something hangs, beside what did before."""
        wait_until(lambda: self.log.count("hanging\n") > before)

    def end(self) -> tuple[int, str]:
        """Its status, when it has ended, and all that it wrote."""
        status = self.popen.wait(60)
        self.stack.close()
        return status, "".join(self.log)


@contextmanager
def _started(command: list[str]) -> Iterator[Process]:
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert popen.stderr is not None
    log: list[str] = []
    lines = popen.stderr
    reader = threading.Thread(target=lambda: log.extend(lines))
    with popen, ExitStack() as stack:
        stack.callback(reader.join, 60)
        reader.start()
        try:
            yield Process(popen, 0, stack, log)
        finally:
            popen.kill()


@contextmanager
def _server(**options: Any) -> Iterator[Process]:
    """The server around the scripted engine, as soon as it is ready or its options want something else."""
    with _started([sys.executable, "-m", "tests.server.scripted", json.dumps(options)]) as process:
        assert process.popen.stdout is not None
        process.port = int(process.popen.stdout.readline())
        if "load" not in options:
            wait_until(lambda: any("ready at " in line for line in process.log))
        elif options["load"] == "hang":
            wait_until(process.listens)
        yield process


def _errors(answer: Answer) -> list[dict[str, Any]]:
    """The errors in an answer, which must end it."""
    body = answer.whole().partition("\r\n\r\n")[2]
    assert "[DONE]" not in body
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith(("data: ", "{"))]
    errors = [json.loads(event)["error"] for event in events if '"error"' in event]
    assert '"error"' in events[-1]
    return errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_answers_finish_and_turns_new_ones_away(
    tmp_path: Path, number: signal.Signals
) -> None:
    gate = tmp_path / "gate"
    with _server(gate=str(gate)) as server:
        whole = server.ask(stream=False)
        (stream,) = server.open(1)
        server.send(number)
        wait_until(lambda: server.get("/health") == (503, '{"status":"stopping"}'))
        assert server.get("/health/live") == (200, '{"status":"stopping"}')
        refused = server.post()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        gate.touch()
        assert stream.whole().count("[DONE]") == 1
        assert "error" not in stream.whole()
        assert '"finish_reason":"stop"' in whole.whole()
        status, log = server.end()
    assert status == 0
    assert "Traceback" not in log


def test_an_idle_server_ends_in_peace_and_says_nothing() -> None:
    with _server() as server:
        server.send(signal.SIGTERM)
        status, log = server.end()
    assert status == 0
    assert log.splitlines()[1:] == []


@pytest.mark.parametrize("count", [1, 60])
def test_what_is_not_finished_in_time_gets_one_error(count: int) -> None:
    with _server(shutdown_timeout=0.3, step_seconds=0.005 * count) as server:
        whole = server.ask(stream=False)
        streams = server.open(count)
        server.send(signal.SIGTERM)
        for answer in [whole, *streams]:
            (error,) = _errors(answer)
            assert (error["code"], error["message"]) == ("unavailable", "the server is shutting down")
        assert whole.whole().startswith("HTTP/1.1 503 ")
        status, log = server.end()
    assert status == 0
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("hang", "numbers"),
    [
        ("", (signal.SIGTERM, signal.SIGINT)),
        ("step", (signal.SIGINT, signal.SIGINT)),
        ("prepare", (signal.SIGTERM, signal.SIGTERM)),
    ],
)
def test_a_second_signal_ends_open_answers_at_once(hang: str, numbers: tuple[signal.Signals, ...]) -> None:
    """Whatever the engine, or a request that is being read, may hang in."""
    with _server(hang=hang, shutdown_timeout=10_000) as server:
        answers = [server.ask(stream=False)]
        if hang == "prepare":
            server.hangs()
        else:
            answers += server.open(1)
        server.send(*numbers)
        for answer in answers:
            (error,) = _errors(answer)
            assert error["code"] == "unavailable"
        status, log = server.end()
    assert status == 0
    assert "Traceback" not in log


def test_a_third_signal_ends_the_process_even_if_the_event_loop_hangs() -> None:
    with _server(shutdown_timeout=10_000) as server:
        server.hang_loop()
        server.send(signal.SIGTERM)
        while server.popen.poll() is None:
            server.popen.send_signal(signal.SIGTERM)
            threading.Event().wait(0.02)
        status, _ = server.end()
    assert status in (128 + signal.SIGTERM, 1)  # 1: signals that came together counted as one


def test_an_event_loop_that_hangs_ends_with_its_stack_when_the_time_is_up() -> None:
    with _server(shutdown_timeout=0.1, end=0.2) as server:
        server.hang_loop()
        server.send(signal.SIGTERM)
        status, log = server.end()
    assert status == 1
    assert "in hang_here" in log


def test_a_request_that_hangs_while_it_is_read_does_not_keep_the_process() -> None:
    with _server(hang="prepare", shutdown_timeout=0.1, end=0.5) as server:
        answer = server.ask(stream=False)
        server.hangs()
        server.send(signal.SIGTERM)
        (error,) = _errors(answer)
        assert error["code"] == "unavailable"
        status, log = server.end()
    assert status == 0
    assert "Traceback" not in log


def test_a_step_that_hangs_ends_every_request_with_an_error_and_the_process_with_its_stack() -> None:
    with _server(hang="step", step_timeout=0.5) as server:
        answers = [server.ask(stream=stream) for stream in (True, False, True)]
        for answer in answers:
            (error,) = _errors(answer)
            assert (error["code"], error["type"]) == ("engine_error", "server_error")
        assert answers[1].whole().startswith("HTTP/1.1 500 ")
        status, log = server.end()
    assert status == 1
    assert "--step-timeout 0.5 s" in log
    assert "Thread engine:" in log
    assert "in hang_here" in log


def test_a_step_that_hangs_while_the_event_loop_hangs_too_ends_the_process() -> None:
    with _server(hang="step", step_timeout=0.5, end=0.2) as server:
        server.open(1)
        server.hang_loop()
        status, log = server.end()
    assert status == 1
    assert log.count("in hang_here") >= 2


def test_a_step_that_hangs_with_the_interpreter_s_lock_ends_the_process_with_its_stack() -> None:
    with _server(hang="lock", step_timeout=0.5, end=0.5) as server:
        server.open(1)
        status, log = server.end()
    assert status not in (0, None)
    assert "Timeout" in log
    assert "in step" in log


@pytest.mark.parametrize("count", [1, 50])
def test_a_failing_engine_ends_every_request_with_an_error_and_the_process_with_its_traceback(
    count: int,
) -> None:
    with _server(fail_at=60) as server:
        answers = [server.ask(stream=bool(index % 2)) for index in range(count)]
        for answer in answers:
            (error,) = _errors(answer)
            assert error["type"] == "server_error"
        status, log = server.end()
    assert status == 1
    assert log.count("Traceback") == 1
    assert "the device is on fire" in log


def test_an_error_on_the_event_loop_s_side_ends_every_request_and_the_process_with_status_1() -> None:
    """One that would lose a step's outputs, and so let an answer hang for ever."""
    with _server(record_fails_at=60) as server:
        answers = [server.ask(stream=stream) for stream in (True, False, True)]
        for answer in answers:
            (error,) = _errors(answer)
            assert (error["code"], error["type"]) == ("engine_error", "server_error")
        status, log = server.end()
    assert status == 1
    assert log.count("Traceback") == 1
    assert "a defect in counting" in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_command_imports_ends_it_with_a_sentence(number: signal.Signals) -> None:
    """The first process of a container would ignore it otherwise, and Python show a traceback."""
    slow = (
        "import sys, time\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('asyncio', 'fastapi', 'pydantic', 'torch', 'uvicorn'):\n"
        "            print('importing', file=sys.stderr, flush=True)\n"
        "            time.sleep(60)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from nextn.server.cli import main\n"
        "sys.exit(main(['--port', '0']))"
    )
    with _started([sys.executable, "-c", slow]) as server:
        wait_until(lambda: server.log == ["importing\n"])
        server.send(number)
        status, log = server.end()
    assert status == 0
    sentence = f"nextn-serve: {number.name} came before the server was there; the process ends"
    assert log.splitlines() == ["importing", sentence]


def test_while_it_loads_a_server_is_alive_but_not_ready_and_a_signal_ends_it() -> None:
    with _server(load="hang") as server:
        assert server.get("/health") == (503, '{"status":"loading"}')
        assert server.get("/health/live") == (200, '{"status":"loading"}')
        assert "nextn_ready 0.0" in server.get("/metrics")[1]
        assert server.get("/v1/models")[0] == 503
        assert server.get("/debug/integrity")[0] == 503
        refused = server.post()
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            503,
            "the model is still loading",
        )
        server.send(signal.SIGINT)
        status, log = server.end()
    assert status == 0
    refusals = "1 x 503 /v1/models, 1 x 503 /debug/integrity, 1 x 503 /v1/completions"
    assert log == f"hanging\nINFO:nextn.server.traffic:refused: {refusals}\n"


def test_a_model_that_cannot_be_loaded_is_a_sentence_and_a_defect_a_traceback() -> None:
    with _server(load="error") as server:
        status, log = server.end()
        assert status == 1  # Python's, of the error that `serve` raises
        assert log.splitlines()[-1] == "nextn.errors.ConfigError: the checkpoint is a sandwich"
        assert "could not be loaded" not in log
    with _server(load="defect") as server:
        status, log = server.end()
        assert status == 1
        assert "the model could not be loaded" in log
        assert "the weights are on fire" in log
    done = subprocess.run(
        [sys.executable, "-m", "nextn.server.cli", "/no/such/directory", "--port", "0"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("nextn-serve: MODEL '/no/such/directory' is not a directory")


def test_a_signal_while_a_client_sends_its_body_is_answered_and_not_logged() -> None:
    """Half a body: nobody waits for the rest, and its end is no defect."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with _server() as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(head + b"Content-Length: 300\r\nExpect: 100-continue\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")  # so the body is being read
            connection.sendall(b'{"pro')
            server.send(signal.SIGTERM)
            received = b""
            while piece := connection.recv(65536):
                received += piece
        status, log = server.end()
    assert received.startswith(b"HTTP/1.1 503 ")
    assert status == 0
    assert log.splitlines()[1:] == ["INFO:nextn.server.traffic:refused: 1 x 503 /v1/completions"]


@pytest.mark.parametrize("hang", ["", "step"])
def test_a_log_that_nobody_reads_does_not_keep_a_process_that_is_to_end(hang: str) -> None:
    """Its pipe is full, so whoever logs hangs with the log's locks: the loop, the engine, the watchdog."""
    reads, writes = os.pipe()
    options = json.dumps({"hang": hang, "step_timeout": 0.5, "end": 2.0, "shutdown_timeout": 10_000})
    command = [sys.executable, "-m", "tests.server.scripted", options]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writes, text=True, cwd=ROOT) as popen,
        ExitStack() as stack,
    ):
        stack.callback(popen.kill)
        assert popen.stdout is not None
        server = Process(popen, int(popen.stdout.readline()), stack)
        wait_until(server.is_ready)
        os.set_blocking(writes, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writes, b"x" * 4096)
        os.set_blocking(writes, True)
        server.ask(stream=True)
        if not hang:
            server.send(signal.SIGTERM, signal.SIGTERM)
        started = time.monotonic()
        assert popen.wait(20) in (0, 1)
        assert time.monotonic() - started < 10
    os.close(reads)
    os.close(writes)


def test_the_metrics_say_what_is_served_and_how_much_fits() -> None:
    with _server() as server:
        figures = server.get("/metrics")[1].splitlines()
        server.send(signal.SIGTERM)
        assert server.end()[0] == 0
    labels = f'dtype="float32",model="fake",spec="off",version="{nextn.__version__}"'
    assert f"nextn_info{{{labels}}} 1.0" in figures
    assert "nextn_ready 1.0" in figures
    assert "nextn_requests_running_limit 16.0" in figures
    assert "nextn_requests_open_limit 1040.0" in figures


def test_a_client_that_reads_nothing_does_not_hold_up_the_end() -> None:
    with _server(shutdown_timeout=0.2, writing=0.5) as server:
        content = json.dumps(BODY | {"stream": True}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            connection.recv(1000)
            threading.Event().wait(0.5)
            server.send(signal.SIGTERM)
            status, log = server.end()
    assert status == 0
    assert "Traceback" not in log


def test_the_demo_finishes_what_it_has_begun() -> None:
    """The real command and engine, told to end while a prompt is computed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        "-m",
        "nextn.server.cli",
        "demo",
        "--port",
        str(port),
        "--num-pages",
        "64",
        "--page-size",
        "16",
    ]
    with _started([sys.executable, *command]) as server:
        server.port = port
        wait_until(server.is_ready, 100)
        content = {"prompt": list(range(5, 505)), "max_tokens": 20, "ignore_eos": True, "n": 2}
        answers: list[httpx.Response] = []
        url = f"http://127.0.0.1:{port}/v1/completions"
        asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=content, timeout=100)))
        asking.start()
        wait_until(lambda: "nextn_requests_running 2.0" in server.get("/metrics")[1], 100)
        server.send(signal.SIGTERM)
        asking.join(100)
        assert answers[0].json()["usage"]["completion_tokens"] == 40
        status, log = server.end()
    assert status == 0
    assert "Traceback" not in log


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_a_connection_whose_client_takes_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system, whatever the server has already handed over to it."""
    monkeypatch.setattr(nextn.server.process, "STALLED_SECONDS", 1)
    monkeypatch.setattr(socket, "TCP_KEEPINTVL", socket.TCP_KEEPCNT)  # 1 // 6 is no interval
    with nextn.server.process.bound("127.0.0.1", 0) as (listener, *_):
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            accepted.settimeout(60)
            with pytest.raises(TimeoutError, match="Connection timed out"):
                accepted.sendall(bytes(2**28))

"""The command: refused flags, the ready line, log lines, exit statuses."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from nextn.config import SpecConfig
from nextn.engine.flags import engine_config
from nextn.server.cli import TrafficLog, build_parser, main

ROOT = Path(__file__).parents[2]

PROGRAM = """
import logging, sys
from nextn.config import EngineConfig
from nextn.server.cli import serve
from tests.server.fake import FakeEngine

logging.basicConfig(level="INFO")
engine = FakeEngine(None, lambda _: [40] * 20, fail_at=int(sys.argv[1]) or None)
sys.exit(serve(engine, EngineConfig(), ["fake"], host="127.0.0.1", port=0, api_key=None, log_level="info",
               ready="ready at {url}"))
"""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topk", "1"], "--draft-tokens must be 3"),
        (["--draft-tokens", "65"], "64"),
        (["--num-steps", "1", "--topk", "2", "--draft-tokens", "8"], "--draft-tokens 3 or less"),
        (["--spec", "off", "--topk", "2"], "--spec off and --topk 2 exclude each other"),
        (["--spec", "auto", "--num-steps", "2"], "exclude each other"),
        (["--mem-fraction", "1.5"], "--mem-fraction"),
        (["--page-size", "0"], "--page-size"),
        (["--port", "99999"], "--port 99999"),
        (["--api-key", ""], "--api-key"),
        (["--served-model-name", ""], "--served-model-name"),
        (["/no/such/directory"], "/no/such/directory"),
    ],
)
def test_a_wrong_combination_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(flags) == 2
    written = capsys.readouterr().err.splitlines()
    assert words in written[-1]
    assert written[-1].startswith("nextn-serve: ")
    assert not any("Traceback" in line for line in written)


@pytest.mark.parametrize(
    "flags", [["--num-step", "2"], ["--top-k", "4"], ["--topk", "four"], ["--spec", "on"]]
)
def test_unknown_flags_and_values_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("flags", "spec"),
    [
        ([], SpecConfig(2, 4, 4)),
        (["--num-steps", "3", "--topk", "2", "--draft-tokens", "6"], SpecConfig(3, 2, 6)),
        (["--num-steps", "3"], SpecConfig(3, 4, 4)),
        (["--spec", "auto"], SpecConfig(2, 4, 4)),
        (["--spec", "off"], None),
    ],
)
def test_tree_flags_become_the_tree_s_shape(flags: list[str], spec: SpecConfig | None) -> None:
    assert engine_config(build_parser().parse_args(flags)).spec == spec


def test_auto_says_that_there_is_no_cost_table(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine_config(build_parser().parse_args(["--spec", "auto"]))
    assert "no cost table" in caplog.text
    assert "2/4/4" in caplog.text


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXTN_API_KEY", "from-env")
    assert build_parser().parse_args([]).api_key == "from-env"
    assert build_parser().parse_args(["--api-key", "given"]).api_key == "given"


def test_the_traffic_log_shows_differences(caplog: pytest.LogCaptureFixture) -> None:
    names = ("running", "waiting", "generated_tokens", "cycles", "emitted", "pages", "pages_used")
    log = TrafficLog()
    with caplog.at_level(logging.INFO):
        log(dict(zip(names, (2, 1, 100, 50, 100, 8, 2), strict=True)), 2.0)
        log(dict(zip(names, (1, 0, 400, 150, 400, 8, 4), strict=True)), 10.0)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "running 2, waiting 1, 50.0 tokens/s, acceptance length 2.00, cache 25 % used"
    assert second == "running 1, waiting 0, 30.0 tokens/s, acceptance length 3.00, cache 50 % used"


def _start(fail_at: int) -> tuple[subprocess.Popen[str], str]:
    """The server around a scripted engine in a process of its own, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(fail_at)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "ready at " in line:
            return process, line.split()[-1]
    raise AssertionError(f"the server ended with {process.wait()}")


def test_a_failing_engine_ends_the_process_with_its_traceback() -> None:
    process, url = _start(fail_at=2)
    with process:
        answer = httpx.post(url + "/completions", json={"prompt": [5, 6]}, timeout=60)
        assert answer.status_code == 500
        _, written = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" in written
    assert "the device is on fire" in written


def test_a_signal_ends_the_server_in_peace() -> None:
    process, url = _start(fail_at=0)
    with process:
        assert httpx.post(url + "/completions", json={"prompt": [5, 6]}, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, written = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in written

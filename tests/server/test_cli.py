"""The command: refused flags, the ready line, log lines, exit statuses."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
from pathlib import Path

import pytest

from nextn.config import EngineConfig, SpecConfig
from nextn.engine.flags import engine_config
from nextn.errors import ConfigError
from nextn.server.cli import _api_key, build_parser, main
from nextn.server.process import bound, serve
from nextn.server.traffic import TrafficLog
from tests.server.fake import FakeEngine


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
        (["--host", ""], "--host is empty"),
        (["--host", "a..b"], "--host a..b"),
        (["--host", "192.0.2.1", "--port", "0"], "--host 192.0.2.1"),
        (["--api-key", ""], "--api-key"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout -1 must be 0 to 86400 seconds"),
        (["--step-timeout", "nan"], "--step-timeout nan"),
        (["--cors-origin", "*"], "--cors-origin '*' is no origin"),
        (["--cors-origin", "https://a.example/"], "--cors-origin"),
        (["--served-model-name", ""], "--served-model-name"),
        ([""], "MODEL is empty"),
        (["--draft-model", ""], "--draft-model is empty"),
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


def test_the_command_gives_signals_back_as_it_found_them(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    assert main(["--port", "99999"]) == 2
    assert [signal.getsignal(number) for number in numbers] == before
    assert "--port 99999" in capsys.readouterr().err


def test_a_port_in_use_is_found_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr("nextn.server.cli._load", lambda model, _: loaded.append(model))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--port", port]) == 2
    written = capsys.readouterr().err.splitlines()
    assert written[-1].startswith("nextn-serve: ")
    assert f"--port {port}: {os.strerror(errno.EADDRINUSE)}" in written[-1]
    assert loaded == []


def test_a_port_lost_to_another_that_starts_is_a_sentence_too() -> None:
    """Of two servers that start at the same time both get the address, and one may listen on it."""
    with bound("127.0.0.1", 0) as sockets, socket.socket() as other:
        port = sockets[0].getsockname()[1]
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(ConfigError, match=f"--port {port}"):
            serve(
                lambda: FakeEngine(None, lambda _: []),
                EngineConfig(),
                ["fake"],
                sockets=sockets,
                api_key=None,
                log_level="info",
                ready=lambda _: "{url}",
                shutdown_timeout=0.0,
                step_timeout=0.0,
            )


def test_a_host_without_address_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    with (
        pytest.raises(ConfigError, match="--host nobody --port 0: Name or service not known"),
        bound("nobody", 0),
    ):
        pass


def test_all_addresses_of_a_host_have_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the machine lacks are left out."""
    hosts = ("127.0.0.1", "192.0.2.1", "127.0.0.2")
    infos = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: infos)
    with bound("several", 0) as sockets:
        names = [each.getsockname() for each in sockets]
    assert [name[0] for name in names] == ["127.0.0.1", "127.0.0.2"]
    assert names[0][1] == names[1][1] != 0
    assert all(each.fileno() == -1 for each in sockets)


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


def _key(*flags: str) -> str | None:
    return _api_key(build_parser().parse_args(list(flags)))


def test_the_key_comes_from_a_flag_a_file_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NEXTN_API_KEY", raising=False)
    assert _key() is None
    monkeypatch.setenv("NEXTN_API_KEY", "from-env")
    assert _key() == "from-env"
    assert _key("--api-key", "given") == "given"
    (tmp_path / "key").write_text("from-file\n", encoding="utf-8")
    assert _key("--api-key-file", str(tmp_path / "key")) == "from-file"
    with pytest.raises(ConfigError, match="exclude each other"):
        _key("--api-key-file", str(tmp_path / "key"), "--api-key", "x")


@pytest.mark.parametrize(("content", "words"), [(b"", "is empty"), (b" \n", "is empty"), (b"\xff", "UTF-8")])
def test_a_key_file_without_key_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        _key("--api-key-file", str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="cannot be read"):
        _key("--api-key-file", str(tmp_path / "none"))


def test_an_empty_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave the server open where somebody meant to close it."""
    monkeypatch.setenv("NEXTN_API_KEY", "")
    with pytest.raises(ConfigError, match="NEXTN_API_KEY is empty"):
        _key()


def test_the_traffic_log_shows_differences(caplog: pytest.LogCaptureFixture) -> None:
    names = ("running", "waiting", "generated_tokens", "cycles", "emitted", "pages", "pages_used")
    names += (
        "pages_cached",
        "cached_tokens",
        "queried_tokens",
        "prompt_tokens",
        "preemptions",
        "turned_away",
    )
    log = TrafficLog()
    with caplog.at_level(logging.INFO):
        log(dict(zip(names, (2, 1, 100, 50, 100, 8, 2, 0, 0, 40, 40, 0, 0), strict=True)), 2.0)
        log(dict(zip(names, (1, 0, 400, 150, 400, 8, 4, 2, 30, 80, 140, 2, 7), strict=True)), 10.0)
        log(dict(zip(names, (0, 0, 400, 150, 400, 8, 0, 6, 30, 80, 140, 2, 8), strict=True)), 10.0)
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first == (
        "running 2, waiting 1, 50.0 tokens/s, prefill 20 tokens/s, acceptance length 2.00, "
        "cache 25 % used, 0 % kept, hit rate 0 %"
    )
    assert second == (
        "running 1, waiting 0, 30.0 tokens/s, prefill 10 tokens/s, acceptance length 3.00, "
        "cache 50 % used, 25 % kept, hit rate 75 %, preempted 2, turned away 7"
    )
    assert third == (
        "running 0, waiting 0, 0.0 tokens/s, prefill 0 tokens/s, cache 0 % used, 75 % kept, turned away 1"
    )

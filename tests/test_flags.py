"""The list of flags is frozen: adding, renaming or dropping one is a decision, made here as well."""

from __future__ import annotations

import argparse

import pytest

from nextn.engine.flags import add_engine_flags, engine_config
from nextn.errors import ConfigError
from nextn.server.cli import build_parser

ENGINE_FLAGS = {
    "--chunked-prefill-size",
    "--device",
    "--draft-hidden",
    "--draft-model",
    "--draft-tokens",
    "--dtype",
    "--load-format",
    "--max-model-len",
    "--max-prefill-ms",
    "--max-running-requests",
    "--max-waiting-requests",
    "--mem-fraction",
    "--no-coupled-drafting",
    "--no-cuda-graphs",
    "--no-prefix-cache",
    "--num-pages",
    "--num-steps",
    "--page-size",
    "--seed",
    "--spec",
    "--topk",
}
SERVER_FLAGS = {
    "--api-key",
    "--api-key-file",
    "--cors-origin",
    "--host",
    "--log-level",
    "--port",
    "--served-model-name",
    "--shutdown-timeout",
    "--step-timeout",
}


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}


def test_engine_flags_are_these() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    assert _flags(parser) == ENGINE_FLAGS


def test_server_flags_are_these() -> None:
    assert _flags(build_parser()) == ENGINE_FLAGS | SERVER_FLAGS


def test_every_flag_has_a_help_text_with_its_default() -> None:
    for action in build_parser()._actions:
        assert action.help
        if not isinstance(action, argparse._HelpAction):
            assert "default" in action.help, action.option_strings


@pytest.mark.parametrize("flags", [[""], ["--draft-model", ""]])
def test_an_empty_name_is_not_the_working_directory(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        engine_config(build_parser().parse_args(flags))

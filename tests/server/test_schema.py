"""Schemathesis over the OpenAPI document: no case makes the server fail, hang or answer out of shape."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from nextn.text import Tokenizer
from tests.server.byte_bpe import write_tokenizer
from tests.server.fake import FakeEngine, running_server

pytest.importorskip("schemathesis")

PROGRAM = Path(sys.executable).with_name("schemathesis")
TEMPLATE = Path(__file__).parent.parent / "data" / "chat" / "v31.jinja"
CHECKS = "not_a_server_error,response_schema_conformance,status_code_conformance"


@pytest.mark.parametrize(
    ("phases", "examples"),
    [
        ("fuzzing", 8),
        pytest.param("examples,coverage,fuzzing", 100, marks=pytest.mark.full),
    ],
)
def test_no_case_of_the_document_makes_the_server_fail(tmp_path: Path, phases: str, examples: int) -> None:
    template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "tokenizer", chat_template=template))
    engine = FakeEngine(tokenizer, lambda _: [40] * 30, max_model_len=4096)
    with running_server(engine, max_open=64) as running:
        done = subprocess.run(
            [
                *(str(PROGRAM), "run", f"{running.url}/openapi.json"),
                *("--phases", phases, "--max-examples", str(examples), "--checks", CHECKS),
                *("--request-timeout", "20", "--suppress-health-check", "all", "--seed", "1"),
            ],
            cwd=tmp_path,  # it keeps what it found beside it
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "passed" in done.stdout
        assert httpx.get(running.url + "/health").status_code == 200
        assert running.bridge.num_open == 0

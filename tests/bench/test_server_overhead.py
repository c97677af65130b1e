"""The server's cost is measured with an engine that is scripted; it has to be one that the server takes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.server_overhead import ScriptedEngine, alone, overhead, paced
from nextn.demo import path as demo_path
from nextn.server.bridge import EngineLike
from nextn.text import Tokenizer

TOKENIZER = Tokenizer(Path(demo_path()))


def test_the_scripted_engine_has_all_that_the_server_needs() -> None:
    engine = ScriptedEngine(TOKENIZER, 1)
    needed = {name for name in {*EngineLike.__annotations__, *vars(EngineLike)} if not name.startswith("_")}
    assert needed
    assert not {name for name in needed if not hasattr(engine, name)}


def test_every_case_is_answered_and_has_a_cost() -> None:
    rows = asyncio.run(overhead(TOKENIZER, 1))
    assert len(rows) == 6
    assert all(row["request_us"] > 0 for row in rows)  # type: ignore[operator]


def test_paced_steps_last_as_long_as_they_are_told_to() -> None:
    assert alone(TOKENIZER, 2, 0.002, 20) >= 2.0
    assert asyncio.run(paced(TOKENIZER, 2, 0.002, 20)) >= 2.0

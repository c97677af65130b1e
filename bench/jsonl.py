"""Results as JSON lines, written as they come: a run that is cut short keeps what it has measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result", bound=Mapping[str, object])


def write_jsonl(path: Path | None, results: Iterable[Result]) -> list[Result]:
    """Take results one by one, each written before the next is measured; all of them.

    The first one makes the folder if need be, and replaces an older file. No path: nothing is written.
    """
    taken: list[Result] = []
    for result in results:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if taken else "w", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        taken.append(result)
    return taken

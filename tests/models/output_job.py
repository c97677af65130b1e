"""Writes one small checkpoint directory; as a program, it dies at a given step as a killed process does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nextn.models import output
from nextn.models.output import (
    NewFile,
    NewTensor,
    describe_plan,
    output_directory,
    plan_files,
    write_description,
    write_files,
)

SHAPES = {"F32": (5,), "F8_E4M3": (3, 7), "BF16": (2, 9)}
PIECE = 8


def content(name: str, nbytes: int, salt: int) -> bytes:
    """A tensor's bytes."""
    return bytes((7 * i + sum(name.encode()) + salt) % 251 for i in range(nbytes))


def small_files(
    made: Callable[[str], object] = lambda name: None, salt: int = 0, count: int = 4
) -> list[NewFile]:
    """Files of three tensors; made: called with a tensor's name when its pieces are asked for."""

    def new(name: str, dtype: str) -> NewTensor:
        def pieces() -> Iterator[bytes]:
            made(name)
            data = content(name, tensor.nbytes, salt)
            for start in range(0, len(data), PIECE):
                yield data[start : start + PIECE]

        tensor = NewTensor(name, dtype, SHAPES[dtype], pieces)
        return tensor

    groups = [
        [new(f"layer.{i}.{dtype}", dtype) for dtype in ("F8_E4M3", "F32", "BF16")] for i in range(count)
    ]
    return plan_files(groups, shard_size=100)


def write(
    out: Path,
    *,
    force: bool = False,
    made: Callable[[str], object] = lambda name: None,
    salt: int = 0,
    count: int = 4,
) -> None:
    """Write the directory `out`."""
    files = small_files(made, salt, count)
    plan = describe_plan(files, {}, salt=salt)
    with output_directory(out, plan=plan, force=force, is_ours=is_output) as staging:
        write_files(staging, files)
        write_description(staging, files, {"salt": salt})


def is_output(directory: Path) -> bool:
    """Whether a directory is one of these."""
    return (directory / "config.json").is_file()


def die_at(step: int) -> list[int]:
    """End this process before its call number `step` that changes the disk; returns the calls so far."""
    calls = [0]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if calls[0] == step:
                os._exit(9)
            calls[0] += 1
            return function(*args, **options)

        return call

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir"), (Path, "rmdir")):
        setattr(owner, name, counted(getattr(owner, name)))
    return calls


if __name__ == "__main__":
    output._SYNC_BYTES = 1  # a journal entry after every tensor
    calls = die_at(int(sys.argv[2]))
    write(Path(sys.argv[1]), count=2, force=True)
    print(*calls)

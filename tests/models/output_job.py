"""Writes small checkpoint directories; as a program, in processes that die at a step as killed ones do."""

from __future__ import annotations

import json
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
    threads: int = 1,
) -> None:
    """Write the directory `out`, tensors one after the other unless there are more threads."""
    files = small_files(made, salt, count)
    plan = describe_plan(files, {}, salt=salt)
    with output_directory(out, plan=plan, force=force, is_ours=is_output) as staging:
        write_files(staging, files, threads=threads)
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


def run_until(out: str, step: int, threads: int) -> int:
    """Write two files as `out` in a process of its own that ends at a step.

    Returns its exit status: 9 if it died, or 100 plus the number of its steps if it came to its end.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            calls = die_at(step)
            write(Path(out), count=2, force=True, threads=threads)
            status = 100 + calls[0]
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    output._SYNC_BYTES = 1  # a journal entry after every tensor
    for line in sys.stdin:  # one process imports all modules, and its children need not
        print(run_until(*json.loads(line)), flush=True)

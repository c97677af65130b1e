"""Writes checkpoint directories: streamed, sharded, resumable, and complete or not there at all.

What is written lies in `.NAME.partial` beside the output until the last byte is on the disk; a run that is
killed leaves it there, and the next run with the same plan goes on with it, tensor by tensor.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from nextn import __version__
from nextn.errors import CheckpointError
from nextn.models.checkpoint import (
    Checkpoint,
    lay_out,
    read_header,
    shorten,
    tensor_bytes,
    write_index,
    write_json,
    write_tensors,
)
from nextn.models.progress import format_bytes

logger = logging.getLogger(__name__)

SHARD_BYTES = 4_300_000_000
"""Most bytes of a file, about as in the original checkpoint's 163 shards."""

_SYNC_BYTES = 1 << 30
_JOURNAL = "journal.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, slots=True)
class NewTensor:
    """One tensor to write: its safetensors dtype code, its shape, and where its bytes come from.

    pieces: the bytes in order; may be called again, and must give the same bytes then. Made in a thread of
        its own, one ahead, so a piece's memory is not used again.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[bytes | memoryview]]

    @property
    def nbytes(self) -> int:
        """Size on disk in bytes."""
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class NewFile:
    """One safetensors file to write; its tensors' pieces are asked for in this order."""

    name: str
    tensors: tuple[NewTensor, ...]

    @property
    def entries(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype code and shape by name."""
        return {tensor.name: (tensor.dtype, tensor.shape) for tensor in self.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor.nbytes for tensor in self.tensors)


def plan_files(groups: Iterable[Sequence[NewTensor]], shard_size: int = SHARD_BYTES) -> list[NewFile]:
    """Cut groups of tensors into files of at most `shard_size` bytes of data; a group stays in one file.

    A larger group gets a file of its own. Named as on the hub: model-00001-of-00163.safetensors, or
    model.safetensors alone.
    """
    shards: list[list[NewTensor]] = [[]]
    size = 0
    for group in groups:
        nbytes = sum(tensor.nbytes for tensor in group)
        if shards[-1] and size + nbytes > shard_size:
            shards.append([])
            size = 0
        shards[-1] += group
        size += nbytes
    count = len(shards)
    names = (
        [f"model-{number:05d}-of-{count:05d}" for number in range(1, count + 1)] if count > 1 else ["model"]
    )
    return [NewFile(f"{name}.safetensors", tuple(shard)) for name, shard in zip(names, shards, strict=True)]


def parse_size(text: str) -> int:
    """Bytes of a size on the command line, such as 500MB, 4G or 1000000 (an `argparse` type)."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or a number and KB, MB or GB")
    return int(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]]


def describe_plan(files: Sequence[NewFile], sources: Iterable[Path], **options: object) -> dict[str, Any]:
    """Everything that decides the output's bytes: what is written, and from which state of which files.

    A source that is written anew has another size or time of change, and a plan made before is void.
    """
    return {
        "version": __version__,
        "options": options,
        "sources": {str(file): _stamp(file) for file in sorted(set(sources))},
        "files": {file.name: file.entries for file in files},
    }


def require_unchanged(plan: dict[str, Any]) -> None:
    """Raise `CheckpointError` if a source is no longer what it was when the plan was made."""
    changed = [name for name, stamp in plan["sources"].items() if _stamp(Path(name)) != list(stamp)]
    if changed:
        raise CheckpointError(f"files changed while they were read: {shorten(changed)}; run it again")


def _stamp(file: Path) -> list[int]:
    """Size and time of change."""
    try:
        state = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    return [state.st_size, state.st_mtime_ns]


def refuse_output(out: Path, *, force: bool, is_ours: Callable[[Path], bool]) -> None:
    """Raise `CheckpointError` unless `out` may be written: absent, empty, or to be replaced (`force`).

    is_ours: whether a filled directory is an earlier output of the same kind; no other is ever replaced.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(f"{out} exists and is not a directory")
    if any(out.iterdir()):
        if not force:
            raise CheckpointError(f"{out} is not empty; --force replaces an earlier output")
        if not is_ours(out):
            raise CheckpointError(f"{out} is not an earlier output, so --force does not replace it")


def refuse_overlap(source: Path, out: Path) -> None:
    """Raise `CheckpointError` if one directory is, or lies in, the other."""
    a, b = source.resolve(), out.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise CheckpointError(f"{out} must lie outside {source}, and not around it")


@contextmanager
def output_directory(
    out: Path, *, plan: object, force: bool, is_ours: Callable[[Path], bool], resume: bool = True
) -> Iterator[Path]:
    """A directory to write into that takes `out`'s place when the block ends well.

    plan: a JSON value that says all that decides the output's bytes (`describe_plan`). What an earlier run
    left is gone on with if its plan is the same (and `resume`), else discarded. One writer at a time.
    If the block fails or the process dies, `out` is as it was, and what was written stays in `.NAME.partial`
    beside it for the next run. A link to a directory stays a link. Raises `CheckpointError`.
    """
    target = out.resolve()
    work = target.with_name(f".{target.name}.partial")
    staging, old = work / "output", work / "replaced"
    try:
        with _locked(work, out):
            try:
                if old.exists() and not target.exists():
                    old.rename(target)  # a run died between the two renames
                refuse_output(out, force=force, is_ours=is_ours)
                _prepare(work, staging, plan, resume)
                yield staging
                _sync_tree(staging)
                refuse_output(out, force=force, is_ours=is_ours)
                _replace(target, staging, old)
            finally:
                has_progress = staging.exists() and any(_is_progress(file) for file in staging.iterdir())
                if not has_progress and not (old.exists() and not target.exists()):
                    _remove(work)
    except OSError as error:
        raise _write_error(out, error) from error


@contextmanager
def _locked(work: Path, out: Path) -> Iterator[None]:
    """Hold the lock on a working directory, which is made if it is absent."""
    lock = work / "lock"
    while True:
        work.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # another writer has just finished and removed the directory
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"{out} is being written by another process") from None
            if not _is_same(descriptor, lock):
                continue
            yield
            return
        finally:
            os.close(descriptor)


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _prepare(work: Path, staging: Path, plan: object, resume: bool) -> None:
    """Leave in `work` what an earlier run with the same plan wrote, or nothing but the plan."""
    file, text = work / "plan.json", json.dumps(plan, sort_keys=True)
    stored = file.read_bytes() if file.is_file() else b""
    if resume and staging.is_dir() and stored == text.encode():
        logger.info("%s: going on with what an earlier run wrote", staging.parent)
        for path in staging.iterdir():
            if not _is_progress(path):
                path.unlink()  # written at the end of a run, or half-written
        return
    if staging.exists():
        logger.info("%s: discarding what an earlier run wrote, since its plan was another", staging.parent)
        shutil.rmtree(staging)
    _write_durably(file, text.encode())
    staging.mkdir()


def _is_progress(file: Path) -> bool:
    """Whether a file in the staging directory is of use to a next run."""
    return file.suffix in (".safetensors", ".part") or file.name == _JOURNAL


def _replace(target: Path, staging: Path, old: Path) -> None:
    """Put `staging` in `target`'s place; if that fails, what was there returns."""
    if old.exists():
        shutil.rmtree(old)
    if target.exists():
        target.rename(old)
    try:
        staging.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    _sync(target.parent)


def _remove(work: Path) -> None:
    """Remove a working directory, its lock last; another writer may be making it anew at the same time."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
    (work / "lock").unlink()
    with suppress(OSError):
        work.rmdir()


def write_files(
    staging: Path, files: Sequence[NewFile], advance: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Write all `files` into the directory `staging`, going on where an earlier run with them was cut off.

    A file has the name NAME.part until it is whole and on the disk. A journal says which of its tensors are
    on the disk; it is written about every GiB. advance: called with the bytes of data as they are done, also
    those of earlier runs. Raises `CheckpointError`, before anything is written if the disk has too little
    room.
    """
    journal = staging / _JOURNAL
    try:
        todo = [file for file in files if not _is_whole(staging / file.name, file)]
        done = _read_journal(journal, staging, todo[0]) if todo else 0
        _require_space(staging, todo)
        advance(sum(file.nbytes for file in files) - sum(file.nbytes for file in todo))
        with ThreadPoolExecutor(max_workers=1) as maker:
            for file in todo:
                _write_file(staging, file, done, maker, advance)
                done = 0
        journal.unlink(missing_ok=True)
    except OSError as error:
        raise _write_error(staging, error) from error


def _write_file(
    staging: Path, file: NewFile, done: int, maker: ThreadPoolExecutor, advance: Callable[[int], None]
) -> None:
    """Write one file, of which the first `done` tensors are in its .part already."""
    part, unsynced = staging / f"{file.name}.part", 0

    def after(stream: BinaryIO, count: int) -> None:
        nonlocal unsynced
        unsynced += file.tensors[count - 1].nbytes
        if unsynced >= _SYNC_BYTES:
            stream.flush()
            os.fsync(stream.fileno())
            _write_journal(staging / _JOURNAL, file.name, count)
            unsynced = 0

    advance(sum(tensor.nbytes for tensor in file.tensors[:done]))
    pieces = _made_ahead(file.tensors[done:], maker)
    write_tensors(part, file.entries, pieces, advance, done=done, after=after)
    _sync(part)
    part.rename(staging / file.name)


def _made_ahead(
    tensors: Sequence[NewTensor], maker: ThreadPoolExecutor
) -> Callable[[str], Iterator[bytes | memoryview]]:
    """The tensors' pieces, to be asked for in their order; the next one is made while one is written."""

    def made() -> Iterator[tuple[str, bytes | memoryview]]:
        for tensor in tensors:
            yield tensor.name, b""  # so that each tensor has a group, and none is begun before its turn
            for piece in tensor.pieces():
                yield tensor.name, piece

    def ahead() -> Iterator[tuple[str, bytes | memoryview]]:
        source = made()
        coming = maker.submit(next, source, None)
        while (item := coming.result()) is not None:
            coming = maker.submit(next, source, None)
            yield item

    groups = groupby(ahead(), key=itemgetter(0))

    def pieces(name: str) -> Iterator[bytes | memoryview]:
        key, group = next(groups)
        assert key == name, f"{name} was asked for when it was the turn of {key}"
        return (piece for _, piece in group)

    return pieces


def _is_whole(path: Path, file: NewFile) -> bool:
    """Whether a finished file is there; a .part is renamed only after all of it is on the disk."""
    layout = lay_out(file.entries)
    if not path.is_file() or path.stat().st_size != layout.nbytes:
        return False
    with path.open("rb") as stream:
        return stream.read(len(layout.header)) == layout.header


def _write_journal(journal: Path, name: str, count: int) -> None:
    """Note that the first `count` tensors of a file's .part are on the disk."""
    body = json.dumps([name, count])
    _write_durably(journal, f"{zlib.crc32(body.encode()):08x} {body}".encode())


def _read_journal(journal: Path, staging: Path, file: NewFile) -> int:
    """How many tensors of `file`'s .part are on the disk; 0 unless journal and .part both say so."""
    part = staging / f"{file.name}.part"
    if not journal.is_file() or not part.is_file():
        return 0
    check, _, body = journal.read_bytes().partition(b" ")
    if check != b"%08x" % zlib.crc32(body):
        return 0
    name, count = json.loads(body)
    if name != file.name or not 0 < count <= len(file.tensors):
        return 0
    layout = lay_out(file.entries)
    needed = max(layout.places[tensor.name][1] for tensor in file.tensors[:count])
    with part.open("rb") as stream:
        starts_well = stream.read(len(layout.header)) == layout.header
    return count if starts_well and needed <= part.stat().st_size <= layout.nbytes else 0


def _require_space(staging: Path, todo: Sequence[NewFile]) -> None:
    """Refuse to begin what the disk cannot hold; what is there of the first file is written over."""
    if not todo:
        return
    needed = sum(lay_out(file.entries).nbytes for file in todo)
    part = staging / f"{todo[0].name}.part"
    if part.is_file():
        needed -= part.stat().st_blocks * 512
    free = shutil.disk_usage(staging).free
    if needed > free:
        raise CheckpointError(
            f"{staging} needs {format_bytes(needed)} more, and {format_bytes(free)} are free on its disk"
        )


def verify_files(
    directory: Path, files: Sequence[NewFile], advance: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Read the files in `directory` back and compare names, dtypes, shapes and every byte of data.

    The pieces are made again, so that what a conversion wrote is compared with a second conversion. A file
    that differs is removed, lest a later run goes on with it. advance: called with the number of bytes after
    each piece. Raises `CheckpointError` naming file and tensor.
    """
    written = Checkpoint(directory)
    expected = {tensor.name for file in files for tensor in file.tensors}
    if written.names() != expected:
        different = shorten(sorted(written.names() ^ expected))
        raise CheckpointError(f"{directory}: other tensors were written than planned: {different}")
    for file in files:
        try:
            _verify_file(directory / file.name, file, advance)
        except CheckpointError:
            (directory / file.name).unlink(missing_ok=True)
            raise


def _verify_file(path: Path, file: NewFile, advance: Callable[[int], None]) -> None:
    _forget_cached(path)
    header = read_header(path)
    found = {name: (stored.dtype, stored.shape) for name, stored in header.items()}
    if found != file.entries:
        names = [name for name in sorted(found | file.entries) if found.get(name) != file.entries.get(name)]
        raise CheckpointError(f"{path} holds other tensors than planned: {shorten(names)}")
    with path.open("rb") as stream:
        for tensor in file.tensors:
            stream.seek(header[tensor.name].begin)
            for piece in tensor.pieces():
                data = stream.read(memoryview(piece).nbytes)
                if data != piece:
                    raise CheckpointError(f"{path}: {tensor.name} differs from what was to be written")
                advance(len(data))
            if stream.tell() != header[tensor.name].end:
                raise CheckpointError(f"{path}: {tensor.name} is longer than what was to be written")


def _forget_cached(path: Path) -> None:
    """Ask the system to read a file from its disk again, where it can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def write_description(
    directory: Path, files: Sequence[NewFile], config: object, *, index: bool | None = None
) -> None:
    """Write config.json, and the index of `files` (default: where there are several; one needs none)."""
    write_json(directory / "config.json", config)
    if len(files) > 1 if index is None else index:
        table = {tensor.name: file.name for file in files for tensor in file.tensors}
        write_index(directory, table, sum(file.nbytes for file in files))


def other_files(source: Path) -> list[Path]:
    """Tokenizer, remote code, generation config and the like: all files of a directory without weights.

    config.json, which a writer makes anew, is none of them, nor are folders. Raises `CheckpointError` for a
    link to nothing, as in a download that is not complete.
    """
    files = [
        file
        for file in sorted(source.iterdir())
        if not file.is_dir()
        and file.suffix not in _WEIGHT_SUFFIXES
        and not file.name.endswith(".index.json")
        and file.name != "config.json"
    ]
    broken = [file.name for file in files if not file.exists()]
    if broken:
        raise CheckpointError(f"{source} holds links to files that do not exist: {shorten(broken)}")
    return [file for file in files if file.is_file()]


def copy_other_files(source: Path, directory: Path) -> int:
    """Copy `other_files`; returns how many there were."""
    files = other_files(source)
    for file in files:
        shutil.copyfile(file, directory / file.name)
    return len(files)


def _write_error(path: Path, error: OSError) -> CheckpointError:
    """What to say about a failed write; for a full disk also how much room there is."""
    text = f"{path} cannot be written: {error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = next(parent for parent in (path, *path.resolve().parents) if parent.is_dir())
        text += (
            f" ({format_bytes(shutil.disk_usage(place).free)} are free); what was written is kept, and the "
            "same command goes on with it"
        )
    return CheckpointError(text)


def _write_durably(file: Path, data: bytes) -> None:
    """Write a small file whole or not at all."""
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_bytes(data)
    _sync(temporary)
    temporary.rename(file)


def _sync_tree(directory: Path) -> None:
    """Flush a directory's files and its table of names to the disk."""
    for path in (*directory.iterdir(), directory):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

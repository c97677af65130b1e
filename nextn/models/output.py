"""Writes checkpoint directories: streamed, sharded, resumable, and complete or not there at all.

What is written lies in `.NAME.partial` beside the output until the last byte is on the disk; a run that is
killed leaves it there, and the next run with the same plan goes on with it, tensor by tensor. Several threads
make tensors and write them, each at its place in the file, so that reading, arithmetic and the disk overlap.
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
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nextn import __version__
from nextn.config import ModelConfig
from nextn.errors import CheckpointError, NextnError
from nextn.models.checkpoint import (
    Checkpoint,
    Stamp,
    StoredTensor,
    lay_out,
    read_config,
    read_header,
    require_unchanged,
    shorten,
    stamp_of,
    tensor_nbytes,
    write_index,
    write_json,
)
from nextn.models.progress import Progress, format_bytes
from nextn.models.reader import in_threads, processors

logger = logging.getLogger(__name__)

SHARD_BYTES = 4_300_000_000
"""Most bytes of a file, about as in the original checkpoint's 163 shards."""

_SYNC_BYTES = 1 << 29
_MAX_WRITERS = 16
_MOST_THREADS = 256
_JOURNAL = "nextn_journal.json"
_WORK_NAMES = {"lock", "plan.json", "plan.json.tmp", "output", "replaced"}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".part")

RECORDS = {"nextn-export": "nextn_export.json", "nextn-convert": "nextn_conversion.json"}
"""By command, the file that says what its output was made from; --force replaces a directory only with it."""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """One tensor to write: its safetensors dtype code, its shape, and where its bytes come from.

    pieces: the bytes in order, as the file has them; may be called again, from any thread, and must give the
        same bytes then. A piece has been taken when the next one is asked for.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[bytes | memoryview]]

    @property
    def nbytes(self) -> int:
        """Size on disk in bytes."""
        return tensor_nbytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class NewFile:
    """One safetensors file to write; its tensors are begun in this order, whatever their layout."""

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
    """Bytes of a size on the command line, such as 500MB, 4.3G or 1000000 (an `argparse` type)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text.upper())
    size = Fraction(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]] if match else 0
    if size == 0 or size % 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or a number and KB, MB or GB")
    return int(size)


def parse_threads(text: str) -> int:
    """A number of threads on the command line (an `argparse` type)."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads from 1 to {_MOST_THREADS}")
    return int(text)


def run_command(prog: str, work: Callable[[], str | None]) -> int:
    """Do a command's work, print what it returns, and return the exit status.

    An error is a sentence on stderr and status 1, an interrupt one and status 130.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        summary = work()
    except (NextnError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; the same command goes on with what was written", file=sys.stderr)
        return 130
    if summary is not None:
        print(summary.encode(errors="backslashreplace").decode())  # a path need not be UTF-8
    return 0


def open_source(path: Path, out: Path, *, command: str, force: bool) -> Source:
    """The checkpoint `path`, of which `command` may make `out`; raises `CheckpointError` otherwise."""
    refuse_overlap(path, out)
    refuse_output(out, force=force, is_ours=partial(is_output_of, command))
    return Source(path)


class Source:
    """A checkpoint that another one is made of, and what its files were like before they were read.

    path, config (the JSON object), cfg, checkpoint; others: files without weights (`other_files`).
    Raises `CheckpointError`, as reading them does.
    """

    def __init__(self, path: Path) -> None:
        ModelConfig.from_dir(path)  # has the sentences for a directory without a config that would do
        file = path / "config.json"
        self._stamps = {file: stamp_of(file)}
        self.path, self.config = path, read_config(file)
        self.cfg = ModelConfig.from_dict(self.config)
        self.checkpoint, self.others = Checkpoint(path), other_files(path)
        self._stamps |= {file: stamp_of(file) for file in self.others}

    @property
    def stamps(self) -> dict[Path, Stamp]:
        """What all files that were read so far, or will be copied, were like before that."""
        return self.checkpoint.stamps | self._stamps


def write_output(
    out: Path,
    files: Sequence[NewFile],
    config: Mapping[str, Any],
    source: Source,
    *,
    command: str,
    dtype: str,
    index: bool | None = None,
    force: bool,
    verify: bool,
    progress: bool,
    threads: int | None,
) -> float:
    """Write the directory `out`, made of `source`: `files` and the source's other files (`write_directory`).

    command, dtype: what is done, a key of RECORDS and its option. force: replace an earlier output of this
    command. Returns the seconds that writing took. Raises `CheckpointError`, also if the source changed.
    """
    stamps = source.stamps
    refuse_sources_in(out, stamps)
    plan = describe_plan(files, stamps, command=command, dtype=dtype)

    def finish(staging: Path) -> None:
        write_json(staging / RECORDS[command], {"source": source.path.resolve().name, "stored_as": dtype})
        require_unchanged(stamps)

    return write_directory(
        output_directory(out, plan=plan, force=force, is_ours=partial(is_output_of, command)),
        files, config, source.others, f"{command} {source.path.name}", index=index, verify=verify,
        progress=progress, threads=threads, finish=finish,
    )  # fmt: skip


def write_directory(
    output: AbstractContextManager[Path],
    files: Sequence[NewFile],
    config: Mapping[str, Any],
    others: Iterable[Path],
    label: str,
    *,
    index: bool | None = None,
    verify: bool = False,
    progress: bool = False,
    threads: int | None = None,
    finish: Callable[[Path], None] = lambda staging: None,
) -> float:
    """Fill an `output_directory`: copies of `others`, `files`, and what describes them.

    label: what is being done. index: as in `write_description`. verify: read the weights back and compare
    them. threads: see `write_files`. finish: called with the directory when all else is in it.
    Returns the seconds that writing took, without the comparison. Raises `CheckpointError`.
    """
    total = sum(file.nbytes for file in files) * (1 + verify)
    with serial_operations(), output as staging, Progress(label, total, shown=progress) as meter:
        copy_files(others, staging)
        write_files(staging, files, meter.advance, threads)
        seconds = meter.seconds
        if verify:
            verify_files(staging, files, meter.advance, threads)
        write_description(staging, files, config, index=index)
        finish(staging)
    return seconds


def is_output_of(command: str, directory: Path) -> bool:
    """Whether a directory holds the record of an output of this command."""
    try:
        record = json.loads((directory / RECORDS[command]).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.keys() == {"source", "stored_as"}


@contextmanager
def serial_operations() -> Iterator[None]:
    """PyTorch without threads of its own, while several threads make tensors.

    Its threads would share the processors with these, and wait for each other after each small operation.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def describe_plan(
    files: Sequence[NewFile], sources: Mapping[Path, Stamp], **options: object
) -> dict[str, Any]:
    """Everything that decides the output's bytes: what is written, and from which state of which files.

    sources: what each was like before it was read. One that is written anew has another size or time of
    change, and a plan made before is void.
    """
    return {
        "version": __version__,
        "options": options,
        "sources": {str(file): list(sources[file]) for file in sorted(sources)},
        "files": {file.name: file.entries for file in files},
    }


def _is_never_ours(directory: Path) -> bool:
    return False


def refuse_output(
    out: Path, *, force: bool = False, is_ours: Callable[[Path], bool] = _is_never_ours
) -> None:
    """Raise `CheckpointError` unless `out` may be written: absent, empty, or to be replaced (`force`).

    is_ours: whether a filled directory is an earlier output of the same kind; no other is ever replaced.
    """
    with _as_sentence(f"{out} cannot be written"):
        target = out.resolve()
        if not target.exists():
            return
        if not target.is_dir():
            raise CheckpointError(f"{out} exists and is not a directory")
        if os.path.ismount(target):
            raise CheckpointError(f"{out} is a mount point, which cannot be replaced; name a directory in it")
        if any(target.iterdir()):
            if force and not is_ours(target):
                raise CheckpointError(f"{out} is not an earlier output, so --force does not replace it")
            if force and not os.access(target, os.W_OK):
                raise CheckpointError(f"{out} may not be written by this user, so --force cannot replace it")
            if not force:
                hint = "; --force replaces this earlier output" if is_ours(target) else ""
                raise CheckpointError(f"{out} is not empty{hint}")


def refuse_overlap(source: Path, out: Path) -> None:
    """Raise `CheckpointError` if one directory is, or lies in, the other."""
    with _as_sentence(f"{out} cannot be written"):
        a, b = source.resolve(), out.resolve()
        if a == b or a in b.parents or b in a.parents:
            raise CheckpointError(f"{out} must lie outside {source}, and not around it")
        if not {a, *a.parents}.isdisjoint(_places(b)):
            raise CheckpointError(f"{source} lies where {out} is put together; rename it")


def refuse_sources_in(out: Path, sources: Iterable[Path]) -> None:
    """Raise `CheckpointError` if a file that is read is a link into `out`, which would be replaced."""
    inside = [str(file) for file in sources if out.resolve() in file.resolve().parents]
    if inside:
        raise CheckpointError(f"{out} holds what is read: {shorten(inside)} lead there")


def _places(target: Path) -> tuple[Path, Path]:
    """Where an output is put together, and where what it replaces lies between two renames."""
    return target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.earlier")


@contextmanager
def _as_sentence(text: str) -> Iterator[None]:
    """Turn failures to look at a path (a loop of links is a RuntimeError) into one sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{text}: {error}") from None


@contextmanager
def output_directory(
    out: Path,
    *,
    plan: object,
    force: bool = False,
    is_ours: Callable[[Path], bool] = _is_never_ours,
    resume: bool = True,
) -> Iterator[Path]:
    """A directory to write into that takes `out`'s place when the block ends well.

    plan: a JSON value that says all that decides the output's bytes (`describe_plan`). What an earlier run
    left is gone on with if its plan is the same (and `resume`), else discarded. One writer at a time.
    If the block fails or the process dies, `out` is as it was, and what was written stays in `.NAME.partial`
    beside it for the next run. (A process that dies between two renames leaves what `out` was in
    `.NAME.earlier`; the next run puts it back.) A link to a directory stays a link. Raises `CheckpointError`.
    """
    with _as_sentence(f"{out} cannot be written"):
        target = out.resolve()
    work, earlier = _places(target)
    staging = work / "output"
    try:
        with _locked(work, out) as is_locked:
            try:
                _put_back(target, earlier, is_ours)
                refuse_output(out, force=force, is_ours=is_ours)
                _prepare(work, staging, plan, resume)
                yield staging
                _sync_tree(staging)
                refuse_output(out, force=force, is_ours=is_ours)
                if not is_locked():
                    raise CheckpointError(f"{work} was removed while {out} was put together; run it again")
                _replace(target, staging, earlier)
            finally:
                if not is_locked():
                    pass  # it may be another run's by now
                elif resume and staging.exists() and any(_is_progress(file) for file in staging.iterdir()):
                    logger.info("what was written is kept in %s; remove it to give up", work)
                else:
                    _remove(work)
    except OSError as error:
        raise _write_error(out, error) from error


@contextmanager
def _locked(work: Path, out: Path) -> Iterator[Callable[[], bool]]:
    """Hold the lock on a working directory, which is made if it is absent; gives whether it is held still."""
    lock = work / "lock"
    while True:
        work.mkdir(parents=True, exist_ok=True)
        try:
            _require_own(work)
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
            yield partial(_is_same, descriptor, lock)
            return
        finally:
            os.close(descriptor)


def _require_own(work: Path) -> None:
    """Refuse a directory that was not made here: a writer's own has a lock as its first and last file."""
    names = set(os.listdir(work))
    if work.is_symlink() or (names and not {"lock"} <= names <= _WORK_NAMES):
        raise CheckpointError(f"{work} is in the way, and nothing that an earlier run left; rename it")


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _prepare(work: Path, staging: Path, plan: object, resume: bool) -> None:
    """Leave in `work` what an earlier run with the same plan wrote, or nothing but the plan."""
    shutil.rmtree(work / "replaced", ignore_errors=True)
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


def _put_back(target: Path, earlier: Path, is_ours: Callable[[Path], bool]) -> None:
    """Undo the first rename of a run that died before its second one, or finish what it did after that."""
    if not os.path.lexists(earlier):
        return
    if not is_ours(earlier):
        raise CheckpointError(f"{earlier} is in the way, and nothing that an earlier run left; rename it")
    if not target.exists() or not any(target.iterdir()):
        earlier.rename(target)
        logger.info("%s: put back, from where an earlier run had moved it", target)
    elif is_ours(target):  # the run died after its second rename
        shutil.rmtree(earlier)
        logger.info("%s: removed what an earlier run had replaced", earlier)


def _replace(target: Path, staging: Path, earlier: Path) -> None:
    """Put `staging` in `target`'s place; what was there is `earlier` meanwhile, and returns if that fails."""
    if target.exists() and any(target.iterdir()):
        target.rename(earlier)
    try:
        staging.rename(target)
    except BaseException:
        if earlier.exists() and not target.exists():
            earlier.rename(target)
        raise
    _sync(target.parent)
    if earlier.exists():
        try:
            earlier.rename(staging.with_name("replaced"))
        except OSError as error:  # the new output is in place, whatever becomes of the old one
            logger.warning("%s is what was replaced and cannot be removed (%s); remove it", earlier, error)


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
    staging: Path,
    files: Sequence[NewFile],
    advance: Callable[[int], None] = lambda nbytes: None,
    threads: int | None = None,
) -> None:
    """Write all `files` into the directory `staging`, going on where an earlier run with them was cut off.

    A file has the name NAME.part until it is whole and on the disk. A journal says how many tensors of the
    first one that is not whole are on the disk; it is written about every half GiB. advance: called from
    several threads with the bytes of data as they are done, also those of earlier runs. threads: that make
    and write tensors, a piece at a time each (default: one a processor, 16 at most). Raises
    `CheckpointError`, before anything is written if the disk has too little room.
    """
    journal = staging / _JOURNAL
    try:
        todo = [file for file in files if not _is_whole(staging / file.name, file)]
        done = _read_journal(journal, staging, todo[0]) if todo else 0
        _require_space(staging, todo)
        if not done:
            journal.unlink(missing_ok=True)  # it may speak of a file that is begun anew
        advance(sum(file.nbytes for file in files) - sum(file.nbytes for file in todo))
        if todo:
            advance(sum(tensor.nbytes for tensor in todo[0].tensors[:done]))
        _Writer(staging, todo, done, advance).run(threads or default_threads())
        journal.unlink(missing_ok=True)
    except OSError as error:
        raise _write_error(staging, error) from error


def default_threads() -> int:
    """Threads that write an output: one a processor, and no more than keep any disk busy."""
    return min(_MAX_WRITERS, processors())


def _runs(tensors: Sequence[NewTensor], first: int) -> list[list[int]]:
    """Which tensors, from `first` on, one thread makes one after the other: a weight and then its scale.

    At least one run, if of nothing: somebody must finish the file.
    """
    numbers = range(first, len(tensors))
    groups = groupby(numbers, key=lambda number: tensors[number].name.removesuffix("_scale_inv"))
    return [list(group) for _, group in groups] or [[]]


class _Part:
    """A file while it is written, as NAME.part. The first `done` of its tensors are there already.

    pending: numbers of the tensors that are not written yet. unsynced: bytes written since the last flush.
    """

    def __init__(self, staging: Path, file: NewFile, done: int) -> None:
        self.file, self.done = file, done
        self.path, self.layout = staging / f"{file.name}.part", lay_out(file.entries)
        self.pending = set(range(done, len(file.tensors)))
        self.unsynced = 0
        self.is_whole = False
        self.stream: BinaryIO | None = None

    def open(self) -> None:
        """Open the file; a new one gets its header."""
        self.stream = self.path.open("r+b" if self.done else "wb", buffering=0)
        if not self.done:
            self.write(self.layout.header, 0)

    def close(self) -> None:
        """Close the file if it is open."""
        if self.stream is not None:
            self.stream.close()

    def write(self, data: bytes | memoryview, position: int) -> None:
        """Write bytes at a place; from any thread."""
        assert self.stream is not None, f"{self.path} is not open"
        left = memoryview(data)
        while left:
            count = os.pwrite(self.stream.fileno(), left, position)
            left, position = left[count:], position + count

    def count_written(self) -> int:
        """How many of the first tensors are written."""
        return min(self.pending, default=len(self.file.tensors))

    @property
    def is_due(self) -> bool:
        """Whether it is time to bring what is written to the disk."""
        return not self.pending or self.unsynced >= _SYNC_BYTES

    def sync(self) -> None:
        """Bring what is written so far to the disk."""
        assert self.stream is not None, f"{self.path} is not open"
        if not _is_same(self.stream.fileno(), self.path):
            raise CheckpointError(f"{self.path} was removed while it was written; run it again")
        os.fsync(self.stream.fileno())
        # Their pages are used again for the next bytes; fresh ones cost more, and would push out other files.
        os.posix_fadvise(self.stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Give the file, which is whole and on the disk, its name."""
        self.close()
        self.path.rename(self.path.with_name(self.file.name))
        self.is_whole = True


class _Writer:
    """Several threads on their way through files: each takes the next tensor, makes it and writes it.

    Whoever has written the last bytes of a file, or of half a GiB, flushes it while the others go on; they
    wait when the next half is there, so that a GiB at most is lost with the process.
    """

    def __init__(
        self, staging: Path, files: Sequence[NewFile], done: int, advance: Callable[[int], None]
    ) -> None:
        self._journal, self._advance = staging / _JOURNAL, advance
        self._parts = [_Part(staging, file, 0 if at else done) for at, file in enumerate(files)]
        self._lock, self._flushing = threading.Lock(), threading.Lock()

    def run(self, threads: int) -> None:
        """Write everything; an error in any thread is raised when all have ended."""
        try:
            in_threads(self._work, self._tasks(), threads)
        finally:
            for part in self._parts:
                part.close()

    def _tasks(self) -> Iterator[tuple[_Part, list[int]]]:
        for part in self._parts:
            part.open()
            for run in _runs(part.file.tensors, part.done):
                yield part, run

    def _work(self, tasks: Iterator[tuple[_Part, list[int]]], stop: threading.Event) -> None:
        for part, run in tasks:
            if all(self._write(part, part.file.tensors[number], stop) for number in run):
                self._finish(part, run)

    def _write(self, part: _Part, tensor: NewTensor, stop: threading.Event) -> bool:
        """Write one tensor, or a part of it if the others stop; returns whether it is there."""
        begin, end = part.layout.places[tensor.name]
        written = 0
        for piece in tensor.pieces():
            if stop.is_set():
                return False
            written += len(piece)
            if begin + written > end:
                break  # it would run into the next tensor
            part.write(piece, begin + written - len(piece))
            self._advance(len(piece))
        if begin + written != end:
            raise CheckpointError(
                f"{part.path}: {tensor.name} came as {written} bytes instead of {end - begin}"
            )
        return True

    def _finish(self, part: _Part, run: Sequence[int]) -> None:
        """Note that some tensors are written, and flush what is due."""
        with self._lock:
            part.pending.difference_update(run)
            part.unsynced += sum(part.file.tensors[number].nbytes for number in run)
            if not part.is_due:
                return
        with self._flushing:
            with self._lock:
                if part.is_whole or not part.is_due:
                    return  # another thread came first
                count, part.unsynced = part.count_written(), 0
            part.sync()
            if count == len(part.file.tensors):
                part.finish()
            elif part is next(part for part in self._parts if not part.is_whole):
                _write_journal(self._journal, part.file.name, count)


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
    """Refuse to begin what the disk cannot hold; what is there of the files is written over."""
    needed = sum(lay_out(file.entries).nbytes for file in todo)
    parts = [staging / f"{file.name}.part" for file in todo]
    needed -= sum(part.stat().st_blocks * 512 for part in parts if part.is_file())
    free = shutil.disk_usage(staging).free
    if needed > free:
        raise CheckpointError(
            f"{staging} needs {format_bytes(needed)} more, and {format_bytes(free)} are free on its disk"
        )


def verify_files(
    directory: Path,
    files: Sequence[NewFile],
    advance: Callable[[int], None] = lambda nbytes: None,
    threads: int | None = None,
) -> None:
    """Read the files in `directory` back and compare names, dtypes, shapes and every byte of data.

    The pieces are made again, so that what a conversion wrote is compared with a second conversion. A file
    that differs, or cannot be read, is removed, lest a later run goes on with it. advance, threads: as in
    `write_files`. Raises `CheckpointError` naming file and tensor.
    """
    written = Checkpoint(directory)
    expected = {tensor.name for file in files for tensor in file.tensors}
    if written.names() != expected:
        different = shorten(sorted(written.names() ^ expected))
        raise CheckpointError(f"{directory}: other tensors were written than planned: {different}")

    bad: set[Path] = set()

    def tasks() -> Iterator[list[tuple[NewTensor, StoredTensor]]]:
        for file in files:
            with _noted_if_different(directory / file.name, bad):
                header = _verified_header(directory / file.name, file)
            for run in _runs(file.tensors, 0):
                yield [(file.tensors[number], header[file.tensors[number].name]) for number in run]

    def work(taken: Iterator[list[tuple[NewTensor, StoredTensor]]], stop: threading.Event) -> None:
        for run in taken:
            for tensor, stored in run:
                with _noted_if_different(stored.file, bad):
                    _verify_tensor(tensor, stored, advance, stop)

    try:
        in_threads(work, tasks(), threads or default_threads())
    finally:
        for file in bad:  # only now, since other threads may have been reading it
            file.unlink(missing_ok=True)


class _Difference(CheckpointError):
    """A written file is not what was to be written."""


@contextmanager
def _noted_if_different(file: Path, bad: set[Path]) -> Iterator[None]:
    """Add a file to `bad` if it turns out to differ, or not to be readable, and not if a source does."""
    try:
        yield
    except (_Difference, OSError):
        bad.add(file)
        raise


def _verified_header(path: Path, file: NewFile) -> Mapping[str, StoredTensor]:
    """Where the tensors of a written file lie, which are those planned; its pages are no longer cached."""
    forget_cached(path)
    header = read_header(path)
    found = {name: (stored.dtype, stored.shape) for name, stored in header.items()}
    if found != file.entries:
        names = [name for name in sorted(found | file.entries) if found.get(name) != file.entries.get(name)]
        raise _Difference(f"{path} holds other tensors than planned: {shorten(names)}")
    return header


def _verify_tensor(
    tensor: NewTensor, stored: StoredTensor, advance: Callable[[int], None], stop: threading.Event
) -> None:
    """Compare one tensor with what was written, unless the others stop."""
    with stored.file.open("rb") as stream:
        stream.seek(stored.begin)
        for piece in tensor.pieces():
            if stop.is_set():
                return
            if stream.read(len(piece)) != bytes(piece):  # a memoryview is compared item by item
                raise _Difference(f"{stored.file}: {tensor.name} differs from what was to be written")
            advance(len(piece))
        if stream.tell() != stored.end:
            raise _Difference(f"{stored.file}: {tensor.name} is longer than what was to be written")


def forget_cached(path: Path) -> None:
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

    config.json and records, which a writer makes anew, are none of them, nor are folders. Raises
    `CheckpointError` for a link to nothing, as in a download that is not complete.
    """
    own = {"config.json", _JOURNAL, *RECORDS.values()}
    with _as_sentence(f"{source} cannot be read"):
        files = [
            file
            for file in sorted(source.iterdir())
            if not file.is_dir()
            and file.suffix not in _WEIGHT_SUFFIXES
            and not file.name.endswith(".index.json")
            and file.name not in own
        ]
        broken = [file.name for file in files if not file.exists()]
        if broken:
            raise CheckpointError(f"{source} holds links to files that do not exist: {shorten(broken)}")
        return [file for file in files if file.is_file()]


def copy_files(files: Iterable[Path], directory: Path) -> None:
    """Copy files into a directory; raises `CheckpointError` naming one that cannot be read."""
    for file in files:
        with (directory / file.name).open("wb") as stream:
            for piece in _pieces_of(file):
                stream.write(piece)


def _pieces_of(file: Path) -> Iterator[bytes]:
    """A file's bytes in pieces of a MiB."""
    with _as_sentence(f"{file} cannot be read"), file.open("rb") as stream:
        while piece := stream.read(1 << 20):
            yield piece


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

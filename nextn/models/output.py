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
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nextn import __version__
from nextn.config import ModelConfig
from nextn.errors import CheckpointError, NextnError
from nextn.models.checkpoint import (
    Checkpoint,
    Stamp,
    lay_out,
    read_config,
    read_header,
    shorten,
    stamp_of,
    tensor_nbytes,
    write_index,
    write_json,
    write_tensors,
)
from nextn.models.progress import Progress, format_bytes

logger = logging.getLogger(__name__)

SHARD_BYTES = 4_300_000_000
"""Most bytes of a file, about as in the original checkpoint's 163 shards."""

_SYNC_BYTES = 1 << 30
_JOURNAL = "nextn_journal.json"
_WORK_NAMES = {"lock", "plan.json", "plan.json.tmp", "output", "replaced"}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".part")

RECORDS = {"nextn-export": "nextn_export.json", "nextn-convert": "nextn_conversion.json"}
"""By command, the file that says what its output was made from; --force replaces a directory only with it."""


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
        return tensor_nbytes(self.dtype, self.shape)


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
    """Bytes of a size on the command line, such as 500MB, 4.3G or 1000000 (an `argparse` type)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text.upper())
    size = Fraction(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2]] if match else 0
    if size == 0 or size % 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or a number and KB, MB or GB")
    return int(size)


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
) -> float:
    """Write the directory `out`: `files`, what describes them, and the source's other files.

    command, dtype: what is done, a key of RECORDS and its option. index: as in `write_description`.
    force: replace an earlier output of this command. verify: read the weights back and compare them.
    Returns the seconds that writing took, without the comparison. Raises `CheckpointError`.
    """
    refuse_sources_in(out, source.stamps)
    plan = describe_plan(files, source.stamps, command=command, dtype=dtype)
    total = sum(file.nbytes for file in files) * (1 + verify)
    label = f"{command} {source.path.name}"
    output = output_directory(out, plan=plan, force=force, is_ours=partial(is_output_of, command))
    with serial_operations(), output as staging, Progress(label, total, shown=progress) as meter:
        copy_files(source.others, staging)
        write_files(staging, files, meter.advance)
        seconds = meter.seconds
        if verify:
            verify_files(staging, files, meter.advance)
        write_description(staging, files, config, index=index)
        write_json(staging / RECORDS[command], {"source": source.path.resolve().name, "stored_as": dtype})
        require_unchanged(plan)
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
    """PyTorch without threads of its own, while one thread makes pieces and another writes them.

    Its threads would share the processors with these two, and wait for each other after each small operation.
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


def require_unchanged(plan: dict[str, Any]) -> None:
    """Raise `CheckpointError` if a source is no longer what it was before it was read."""
    changed = [name for name, stamp in plan["sources"].items() if list(stamp_of(Path(name))) != stamp]
    if changed:
        raise CheckpointError(f"files changed while they were read: {shorten(changed)}; run it again")


def refuse_output(out: Path, *, force: bool, is_ours: Callable[[Path], bool]) -> None:
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
    out: Path, *, plan: object, force: bool, is_ours: Callable[[Path], bool], resume: bool = True
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
        is_last = count == len(file.tensors)
        if (is_last or unsynced >= _SYNC_BYTES) and not _is_same(stream.fileno(), part):
            raise CheckpointError(f"{part} was removed while it was written; run it again")
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
    that differs, or cannot be read, is removed, lest a later run goes on with it. advance: called with the
    number of bytes after each piece. Raises `CheckpointError` naming file and tensor.
    """
    written = Checkpoint(directory)
    expected = {tensor.name for file in files for tensor in file.tensors}
    if written.names() != expected:
        different = shorten(sorted(written.names() ^ expected))
        raise CheckpointError(f"{directory}: other tensors were written than planned: {different}")
    for file in files:
        try:
            _verify_file(directory / file.name, file, advance)
        except (_Difference, OSError):  # and not what stopped the second conversion
            (directory / file.name).unlink(missing_ok=True)
            raise


class _Difference(CheckpointError):
    """A written file is not what was to be written."""


def _verify_file(path: Path, file: NewFile, advance: Callable[[int], None]) -> None:
    _forget_cached(path)
    header = read_header(path)
    found = {name: (stored.dtype, stored.shape) for name, stored in header.items()}
    if found != file.entries:
        names = [name for name in sorted(found | file.entries) if found.get(name) != file.entries.get(name)]
        raise _Difference(f"{path} holds other tensors than planned: {shorten(names)}")
    with path.open("rb") as stream:
        for tensor in file.tensors:
            stream.seek(header[tensor.name].begin)
            for piece in tensor.pieces():
                data = stream.read(memoryview(piece).nbytes)
                if data != piece:
                    raise _Difference(f"{path}: {tensor.name} differs from what was to be written")
                advance(len(data))
            if stream.tell() != header[tensor.name].end:
                raise _Difference(f"{path}: {tensor.name} is longer than what was to be written")


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

"""Output directories: complete or not there, gone on with after any end of the process, never mixed up."""

from __future__ import annotations

import argparse
import errno
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from nextn.errors import CheckpointError
from nextn.models import output
from nextn.models.checkpoint import lay_out, read_header, require_unchanged, stamp_of
from nextn.models.output import (
    RECORDS,
    SHARD_BYTES,
    NewFile,
    NewTensor,
    copy_files,
    default_threads,
    describe_plan,
    other_files,
    output_directory,
    parse_size,
    parse_threads,
    plan_files,
    refuse_overlap,
    verify_files,
    write_files,
)
from nextn.models.progress import Progress
from nextn.models.reader import processors
from tests.models import output_job
from tests.models.checkpoints import snapshot
from tests.models.output_job import is_output, small_files

ROOT = Path(__file__).parent.parent.parent
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F8_E4M3": 1}


@pytest.fixture(autouse=True)
def journal_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal entry after every tensor, here and in what tests call."""
    monkeypatch.setattr(output, "_SYNC_BYTES", 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, bytes]]:
    """What undisturbed runs write, by salt."""
    folder = tmp_path_factory.mktemp("whole")
    for salt in (0, 1):
        output_job.write(folder / str(salt), salt=salt)
    return {salt: snapshot(folder / str(salt)) for salt in (0, 1)}


def tensor(name: str, dtype: str, size: int, fill: bytes = b"x") -> NewTensor:
    return NewTensor(name, dtype, (size,), lambda: [fill * (size * ITEM_BYTES[dtype])])


# Files


def test_shards_hold_at_most_their_size_and_no_group_is_split() -> None:
    """Groups fill shards in order; a group that is larger than a shard gets one of its own."""
    groups = [[tensor(f"t{i}", "F32", size)] for i, size in enumerate((100, 100, 1000, 10))]
    files = plan_files(groups, shard_size=850)
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [[t.name for t in file.tensors] for file in files] == [["t0", "t1"], ["t2"], ["t3"]]
    pair = [[tensor("w", "F32", 10), tensor("s", "F32", 1)]] * 2
    assert [len(file.tensors) for file in plan_files(pair, shard_size=80)] == [2, 2]
    assert [file.name for file in plan_files(groups, shard_size=10**6)] == ["model.safetensors"]


def test_tensors_are_aligned_to_their_items_whatever_the_order_in_which_they_are_made(tmp_path: Path) -> None:
    """Odd sizes of narrow dtypes do not push wider ones off their own item size; others read the file."""
    file = tmp_path / "model.safetensors"
    entries = {"a": ("F8_E4M3", (3,)), "b": ("BF16", (1,)), "c": ("F32", (1,)), "d": ("F64", (0,))}
    order: list[str] = []

    def new(name: str) -> NewTensor:
        def pieces() -> list[bytes]:
            order.append(name)
            return [name.encode() * size] if (size := made.nbytes) else []

        made = NewTensor(name, *entries[name], pieces)
        return made

    write_files(tmp_path, [NewFile(file.name, tuple(map(new, entries)))], threads=1)
    assert order == list(entries)
    header, data = read_header(file), file.read_bytes()
    assert {name: (t.dtype, t.shape) for name, t in header.items()} == entries
    for name, stored in header.items():
        assert stored.begin % ITEM_BYTES[stored.dtype] == 0
        assert data[stored.begin : stored.end] == name.encode() * stored.nbytes
    assert len(data) == lay_out(entries).nbytes
    with safe_open(file, framework="np") as read:
        assert set(read.keys()) == set(entries)
        assert read.metadata() == {"format": "pt"}


def test_a_file_without_tensors_is_a_file(tmp_path: Path) -> None:
    """Nothing to write is written all the same."""
    write_files(tmp_path, plan_files([]))
    assert read_header(tmp_path / "model.safetensors") == {}


@pytest.mark.parametrize("count", [7, 9])
def test_pieces_that_do_not_fill_a_tensor_are_refused(tmp_path: Path, count: int) -> None:
    """Too few or too many bytes name the file and the tensor, and no file looks whole."""
    bad = NewTensor("w", "F32", (2,), lambda: [bytes(count)])
    with pytest.raises(CheckpointError, match=rf"model.*: w came as {count} bytes instead of 8"):
        write_files(tmp_path, [NewFile("model.safetensors", (bad, tensor("x", "F8_E4M3", 100)))])
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("threads", [1, 3])
def test_each_thread_has_one_piece_at_a_time(tmp_path: Path, threads: int) -> None:
    """Memory is bounded by so many pieces, whatever the size of tensors and files; these begin in order."""
    lock = threading.Lock()
    begun: list[str] = []
    made, written, most = 0, 0, 0

    def new(name: str) -> NewTensor:
        def pieces() -> Iterator[bytes]:
            nonlocal made, most
            with lock:
                begun.append(name)
            for _ in range(20):
                with lock:
                    made += 1000
                    most = max(most, made - written)
                yield bytes(1000)

        return NewTensor(name, "F8_E4M3", (20, 1000), pieces)

    def advance(nbytes: int) -> None:
        nonlocal written
        with lock:
            written += nbytes

    names = [f"t{number}" for number in range(9)]
    files = plan_files([[new(name)] for name in names], shard_size=40_000)
    write_files(tmp_path, files, advance, threads)
    assert made == written == 180_000
    assert most <= threads * 1000
    assert sorted(begun) == names
    assert threads > 1 or begun == names


def test_a_weight_and_its_scale_are_made_by_one_thread(tmp_path: Path) -> None:
    """The scale comes of the pass over the weight: whoever made the one has the other."""
    makers: dict[str, int] = {}

    def new(name: str) -> NewTensor:
        def pieces() -> Iterator[bytes]:
            makers[name] = threading.get_ident()
            yield b"x"

        return NewTensor(name, "F8_E4M3", (1,), pieces)

    pairs = [[new(f"w{number}.weight"), new(f"w{number}.weight_scale_inv")] for number in range(30)]
    write_files(tmp_path, plan_files(pairs), threads=4)
    assert all(makers[pair[0].name] == makers[pair[1].name] for pair in pairs)


@pytest.mark.parametrize("threads", [2, 5])
def test_several_threads_write_what_one_writes(
    tmp_path: Path, whole: dict[int, dict[str, bytes]], threads: int
) -> None:
    """Also one that goes on with what another number of them has left, and also when they read it back."""
    output_job.write(tmp_path / "out", threads=threads)
    assert snapshot(tmp_path / "out") == whole[0]
    verify_files(tmp_path / "out", small_files(), threads=threads)
    for name in ("layer.0.F32", "layer.1.F8_E4M3", "layer.3.BF16"):
        with pytest.raises(Stop):
            output_job.write(tmp_path / name, made=stop_at(name), threads=threads)
        output_job.write(tmp_path / name)
        assert snapshot(tmp_path / name) == whole[0]


def test_the_journal_speaks_of_the_first_file_that_is_not_whole(tmp_path: Path) -> None:
    """A slow tensor holds up its own file only; what others wrote behind it is no prefix, and made again."""
    finished = threading.Event()
    made: list[str] = []

    def slow(name: str) -> None:
        made.append(name)
        if name == "layer.0.F32":
            assert finished.wait(10)
            raise Stop
        if name == "layer.3.BF16":
            finished.set()

    with pytest.raises(Stop):
        write_files(tmp_path, small_files(slow), threads=2)
    whole_files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert whole_files[:2] == [f"model-0000{number}-of-00004.safetensors" for number in (2, 3)]
    made.clear()
    write_files(tmp_path, small_files(made.append), threads=1)
    assert [name for name in made if "layer.0" in name] == ["layer.0.F32", "layer.0.BF16"]
    assert not any("layer.1" in name or "layer.2" in name for name in made)


def test_a_file_that_is_begun_anew_has_no_journal_of_old(tmp_path: Path) -> None:
    """An earlier file is gone: the next run writes it, and dies when it has begun the journal's file."""
    with pytest.raises(Stop):
        write_files(tmp_path, small_files(stop_at("layer.1.BF16")), threads=1)
    assert (tmp_path / output._JOURNAL).exists()
    next(tmp_path.glob("model-00001-*.safetensors")).unlink()
    with pytest.raises(Stop):
        write_files(tmp_path, small_files(stop_at("layer.1.F8_E4M3")), threads=1)
    write_files(tmp_path, small_files(), threads=1)
    verify_files(tmp_path, small_files())


def test_one_thread_flushes_while_another_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the disk but who has a flush to do."""
    fsync, others_wrote = os.fsync, threading.Event()

    def slow(descriptor: int) -> None:
        if path_of(descriptor).name.startswith("model-00001-"):
            assert others_wrote.wait(10)
        fsync(descriptor)

    def made(name: str) -> None:
        if name == "layer.1.F8_E4M3":
            others_wrote.set()

    monkeypatch.setattr(output, "_SYNC_BYTES", 1 << 29)
    monkeypatch.setattr(os, "fsync", slow)
    write_files(tmp_path, small_files(made), threads=2)
    verify_files(tmp_path, small_files())


# Commands


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("5KB", 5000), ("2M", 2 * 10**6), ("4gb", 4 * 10**9), ("4.3G", SHARD_BYTES)],
)
def test_sizes_are_decimal(text: str, size: int) -> None:
    """A number and an optional unit; a whole count of bytes comes of it."""
    assert parse_size(text) == size


def test_threads_are_a_number_that_a_machine_may_have() -> None:
    """Zero, a thousand and what is no number are refused; without an option it is the processors' count."""
    assert parse_threads("1") == 1
    assert parse_threads("256") == 256
    for text in ("", "0", "-1", "1.5", "257", "two"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no number of threads from 1 to 256"):
            parse_threads(text)
    assert 1 <= default_threads() == min(16, processors())


@pytest.mark.parametrize("text", ["", "0", "GB", "-1", "1.5", "0.0001K", "1.GB", "3TB", "9" * 40 + ".5"])
def test_other_sizes_are_refused(text: str) -> None:
    """No guess is made about anything else."""
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


# Ends of the process


@pytest.fixture(scope="module")
def job() -> Iterator[Callable[..., int]]:
    """Writes two files in a process that dies before the call number `step` that changes the disk."""
    command = [sys.executable, "-m", "tests.models.output_job"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(out: Path, step: int, threads: int) -> int:
            print(json.dumps([str(out), step, threads]), file=requests, flush=True)
            return int(answers.readline())

        yield run
        requests.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_process_killed_at_any_step_leaves_all_or_nothing_and_the_next_run_completes_it(
    tmp_path: Path, job: Callable[[Path, int, int], int], replaces: bool, threads: int
) -> None:
    """Before every call that changes the disk: the output is absent or whole, the old one or the new one.

    Between the two renames of a replacement neither has the name, and the next run puts the old one back.
    Several threads need not take as many steps each time.
    """
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    output_job.write(tmp_path / "old" / "out", salt=1)
    steps = job(tmp_path / "new" / "out", 10**6, threads) - 100
    assert steps > (25 if threads == 1 else 15)
    old, new = snapshot(tmp_path / "old" / "out"), snapshot(tmp_path / "new" / "out")

    def end_at(step: int) -> str:
        out = tmp_path / str(step) / "out"
        if replaces:
            shutil.copytree(tmp_path / "old", out.parent)
        else:
            out.parent.mkdir()
        status = job(out, step, threads)
        assert status == 9 or (threads > 1 and 100 < status <= 100 + step)
        state = snapshot(out) if out.exists() else None
        assert state in (None, new, old if replaces else None), step
        if replaces and state is None:
            assert snapshot(out.with_name(".out.earlier")) == old
            if step % 2:
                shutil.rmtree(out.with_name(".out.partial"))  # as one who gives up does
        output_job.write(out, force=replaces or state is not None, count=2, threads=threads)
        assert snapshot(out) == new, step
        assert [path.name for path in out.parent.iterdir()] == ["out"], step
        return ("none", "old", "new")[[None, old, new].index(state)]

    ended = {end_at(step) for step in range(steps + replaces)}
    expected = {"old", "none", "new"} if replaces else {"none", "new"}
    assert ended == expected if threads == 1 else ended <= expected


class Stop(Exception):
    """What a test raises from the middle of a run."""


def stop_at(name: str) -> Callable[[str], None]:
    """Raise before the tensor `name` is made."""

    def made(tensor_name: str) -> None:
        if tensor_name == name:
            raise Stop

    return made


def interrupted(out: Path, name: str = "layer.2.BF16") -> Path:
    """A run that ends when it comes to `name`; returns the directory in which its work lies."""
    with pytest.raises(Stop):
        output_job.write(out, made=stop_at(name))
    assert not out.exists()
    return out.with_name(f".{out.name}.partial")


def test_the_next_run_goes_on_at_the_tensor_where_the_last_one_ended(
    tmp_path: Path, whole: dict[int, dict[str, bytes]]
) -> None:
    """Whole files and tensors that are on the disk are not made again; the bytes are the same."""
    interrupted(tmp_path / "out")
    made: list[str] = []
    output_job.write(tmp_path / "out", made=made.append)
    names = [t.name for file in small_files() for t in file.tensors]
    assert made == names[names.index("layer.2.BF16") :]
    assert snapshot(tmp_path / "out") == whole[0]


def test_progress_counts_what_an_earlier_run_wrote(tmp_path: Path) -> None:
    """The bar of a run that goes on ends at the total too."""
    with pytest.raises(Stop):
        write_files(tmp_path, small_files(stop_at("layer.2.BF16")))
    done = []
    write_files(tmp_path, small_files(), done.append)
    assert sum(done) == sum(file.nbytes for file in small_files())


def damage(change: Callable[[bytes], bytes], pattern: str) -> Callable[[Path], None]:
    def apply(work: Path) -> None:
        (file,) = work.glob(pattern)
        file.write_bytes(change(file.read_bytes()))

    return apply


def journal_of(name: str, count: int) -> Callable[[Path], None]:
    return lambda work: output._write_journal(work / "output" / output._JOURNAL, name, count)


PART = "output/*.part"
JOURNAL = f"output/{output._JOURNAL}"
FIRST = "output/model-00001-of-00004.safetensors"
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "part truncated": damage(lambda data: data[:-1], PART),
    "part too long": damage(lambda data: data + bytes(10_000), PART),
    "part empty": damage(lambda data: b"", PART),
    "part of another layout": damage(lambda data: data[:20] + b"?" + data[21:], PART),
    "part gone": lambda work: next(work.glob(PART)).unlink(),
    "journal truncated": damage(lambda data: data[:-3], JOURNAL),
    "journal empty": damage(lambda data: b"", JOURNAL),
    "journal with another count": damage(lambda data: data.replace(b"2]", b"3]"), JOURNAL),
    "journal of noise": damage(lambda data: b"\xff\x00" * 40, JOURNAL),
    "journal gone": lambda work: (work / JOURNAL).unlink(),
    "journal of another file": journal_of("model-00001-of-00004.safetensors", 2),
    "journal beyond the file": journal_of("model-00003-of-00004.safetensors", 17),
    "file truncated": damage(lambda data: data[:-1], FIRST),
    "file of another layout": damage(lambda data: data[:20] + b"?" + data[21:], FIRST),
    "file gone": lambda work: (work / FIRST).unlink(),
    "plan gone": lambda work: (work / "plan.json").unlink(),
    "plan damaged": damage(lambda data: data[:-1], "plan.json"),
    "output gone": lambda work: shutil.rmtree(work / "output"),
    "all gone": shutil.rmtree,
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_work_is_made_again(tmp_path: Path, whole: dict[int, dict[str, bytes]], kind: str) -> None:
    """Whatever happened to what an earlier run left, the output is that of an undisturbed run."""
    DAMAGES[kind](interrupted(tmp_path / "out"))
    output_job.write(tmp_path / "out")
    assert snapshot(tmp_path / "out") == whole[0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_plan_begins_anew(tmp_path: Path, whole: dict[int, dict[str, bytes]]) -> None:
    """What was begun from other sources or with other options is not gone on with."""
    interrupted(tmp_path / "out")
    made: list[str] = []
    output_job.write(tmp_path / "out", made=made.append, salt=1)
    assert len(made) == 12
    assert snapshot(tmp_path / "out") == whole[1]


def test_a_writer_may_refuse_to_go_on(tmp_path: Path) -> None:
    """For what no plan describes, an earlier run's work is discarded."""
    interrupted(tmp_path / "out")
    plan = describe_plan(small_files(), {}, salt=0)
    with output_directory(
        tmp_path / "out", plan=plan, force=False, is_ours=is_output, resume=False
    ) as staging:
        assert not list(staging.iterdir())


def test_a_plan_is_void_when_a_source_changes(tmp_path: Path) -> None:
    """Size and time of change belong to it; a change while the source is read is an error."""
    file = tmp_path / "source"
    file.write_text("a")

    def described(count: int = 4, dtype: str = "bf16") -> dict[str, Any]:
        return describe_plan(small_files(count=count), {file: stamp_of(file)}, dtype=dtype)

    plan = described()
    assert plan == described()
    assert plan != described(dtype="fp8")
    assert plan != described(count=3)
    file.write_text("ab")
    assert plan != described()
    stamps = {file: stamp_of(file)}
    require_unchanged(stamps)
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"changed while they were read: .*source"):
        require_unchanged(stamps)
    stamps = {file: stamp_of(file)}
    file.write_text("ba")
    os.utime(file, ns=(1, 1))  # as cp -p and rsync -t do
    with pytest.raises(CheckpointError, match="changed while"):
        require_unchanged(stamps)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        require_unchanged(stamps)


def test_there_is_one_writer_at_a_time(tmp_path: Path, whole: dict[int, dict[str, bytes]]) -> None:
    """A second one is refused with a sentence, and does not disturb the first."""

    def second(name: str) -> None:
        if name == "layer.1.F32":
            with pytest.raises(CheckpointError, match="out is being written by another process"):
                output_job.write(tmp_path / "out")

    tried: list[str] = []
    output_job.write(tmp_path / "out", made=lambda name: (second(name), tried.append(name)))
    assert "layer.1.F32" in tried
    assert snapshot(tmp_path / "out") == whole[0]


def test_a_lock_that_was_replaced_before_it_was_taken_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer ended, and a third one began, between opening the file and locking it."""
    flock, locked = fcntl.flock, []
    lock = tmp_path / ".out.partial" / "lock"

    def late(descriptor: int, operation: int) -> None:
        if not locked:
            lock.unlink()
            lock.touch()
        locked.append(os.path.samestat(os.fstat(descriptor), lock.stat()))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    output_job.write(tmp_path / "out")
    assert locked == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# What was there before


def test_a_block_that_fails_before_any_file_leaves_no_trace(tmp_path: Path) -> None:
    """There is nothing to go on with, so nothing stays beside the output."""
    with (
        pytest.raises(Stop),
        output_directory(tmp_path / "a" / "out", plan={}, force=False, is_ours=is_output),
    ):
        raise Stop
    assert not list((tmp_path / "a").iterdir())


def test_only_an_earlier_output_is_replaced(tmp_path: Path, whole: dict[int, dict[str, bytes]]) -> None:
    """A filled directory is refused; force replaces one of the same kind whole, and nothing else."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "diary.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not empty$"):
        output_job.write(out)
    with pytest.raises(CheckpointError, match="is not an earlier output"):
        output_job.write(out, force=True)
    assert snapshot(out) == {"diary.txt": b"mine"}
    (out / "diary.txt").unlink()
    output_job.write(out)  # an empty directory is welcome
    (out / "stale.txt").write_text("old")
    with pytest.raises(CheckpointError, match="is not empty; --force"):
        output_job.write(out)
    output_job.write(out, force=True, salt=1)
    assert snapshot(out) == whole[1]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a directory"):
        output_job.write(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_an_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    """Somebody fills the output's directory during a long run: it is not overwritten."""
    out = tmp_path / "out"

    def appear(name: str) -> None:
        out.mkdir(exist_ok=True)
        (out / "diary.txt").write_text("mine")

    with pytest.raises(CheckpointError, match="is not empty"):
        output_job.write(out, made=appear)
    assert snapshot(out) == {"diary.txt": b"mine"}


@pytest.mark.parametrize("before", ["nothing", "empty", "earlier output"])
def test_a_link_stays_a_link(tmp_path: Path, whole: dict[int, dict[str, bytes]], before: str) -> None:
    """A link to a directory on another disk: that directory is written, and work lies beside it."""
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    real.parent.mkdir()
    link.symlink_to(real)
    if before == "empty":
        real.mkdir()
    elif before == "earlier output":
        output_job.write(real, salt=1)
    with pytest.raises(Stop):
        output_job.write(link, made=stop_at("layer.2.F32"), force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
    output_job.write(link, force=True)
    assert link.is_symlink()
    assert snapshot(real) == whole[0]
    assert [path.name for path in real.parent.iterdir()] == ["real"]


@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "Device or resource busy"), KeyboardInterrupt()])
def test_a_failed_replacement_puts_the_earlier_output_back(
    tmp_path: Path,
    whole: dict[int, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    """When the new directory cannot take its place after the old one has left it, the old one returns."""
    out, rename = tmp_path / "out", Path.rename
    output_job.write(out, salt=1)

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "output":
            raise error
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises((CheckpointError, KeyboardInterrupt), match=r"Device or resource busy|^$"):
            output_job.write(out, force=True)
    assert snapshot(out) == whole[1]
    made: list[str] = []
    output_job.write(out, force=True, made=made.append)
    assert snapshot(out) == whole[0]
    assert not made, "all was written when the renaming failed"


def test_an_old_output_that_cannot_be_removed_is_named_and_the_new_one_counts(
    tmp_path: Path,
    whole: dict[int, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run is a success; the next one removes it, as it does for a run that died at that point."""
    out, rename = tmp_path / "out", Path.rename
    output_job.write(out, salt=1)

    def refuse(path: Path, target: Path) -> Path:
        if Path(target).name == "replaced":
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        output_job.write(out, force=True)
    earlier = tmp_path / ".out.earlier"
    assert snapshot(out) == whole[0]
    assert snapshot(earlier) == whole[1]
    assert str(earlier) in caplog.text
    output_job.write(out, salt=1, force=True)
    assert snapshot(out) == whole[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


MINE = {"letter.txt": b"mine"}


def fill(directory: Path, *more: str) -> None:
    directory.mkdir()
    for name in (*MINE, *more):
        (directory / name).write_bytes(b"mine")


@pytest.mark.parametrize("kind", ["a directory", "a directory with a lock", "a link", "what was replaced"])
def test_a_directory_of_a_name_that_a_run_needs_is_kept(tmp_path: Path, kind: str) -> None:
    """Who has a `.NAME.partial` or `.NAME.earlier` of his own keeps it; nothing is written into it either."""
    place = tmp_path / (".out.earlier" if kind == "what was replaced" else ".out.partial")
    mine = tmp_path / "mine" if kind == "a link" else place
    fill(mine, *(["lock"] if kind == "a directory with a lock" else []))
    if kind == "a link":
        place.symlink_to(mine)
    before = snapshot(mine)
    with pytest.raises(CheckpointError, match=rf"{place} is in the way"):
        output_job.write(tmp_path / "out")
    assert snapshot(mine) == before
    place.rename(tmp_path / "elsewhere")
    output_job.write(tmp_path / "out")


def test_a_mount_point_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No directory can take its place, and the work beside it would lie on another disk."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    made: list[str] = []
    with pytest.raises(CheckpointError, match=r"out is a mount point.*; name a directory in it"):
        output_job.write(tmp_path / "out", made=made.append)
    assert not made
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    output_job.write(tmp_path / "out" / "model")


@pytest.mark.parametrize("kind", ["long name", "loop", "file"])
def test_paths_that_cannot_be_looked_at_are_sentences(tmp_path: Path, kind: str) -> None:
    """As an output, as a source, as what both must not share."""
    path = tmp_path / ("x" * 300 if kind == "long name" else kind)
    if kind == "loop":
        path.symlink_to(path)
    elif kind == "file":
        path.write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written: |is not a directory"):
        output_job.write(path)
    with pytest.raises(CheckpointError, match="cannot be read: "):
        other_files(path)
    if kind == "loop":
        with pytest.raises(CheckpointError, match="cannot be written: "):
            refuse_overlap(tmp_path / "source", path)


@pytest.mark.parametrize("where", [".out.partial/output", ".out.earlier"])
def test_a_source_does_not_lie_where_the_output_is_put_together(tmp_path: Path, where: str) -> None:
    """It would be discarded, or moved."""
    with pytest.raises(CheckpointError, match=r"lies where .*out is put together"):
        refuse_overlap(tmp_path / where, tmp_path / "out")


@pytest.mark.parametrize("where", [".", "inside", ".."])
def test_output_and_source_do_not_contain_each_other(tmp_path: Path, where: str) -> None:
    """Writing into, onto or around the source is refused."""
    with pytest.raises(CheckpointError, match="must lie outside"):
        refuse_overlap(tmp_path / "source", tmp_path / "source" / where)
    refuse_overlap(tmp_path / "source", tmp_path / "source2")


# Disks


def test_a_disk_with_too_little_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[int, dict[str, bytes]]
) -> None:
    """The sentence says how much is needed and free; what an earlier run wrote needs no room any more."""
    needed = sum(len(data) for name, data in whole[0].items() if name.endswith(".safetensors"))
    free = [needed - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    made: list[str] = []
    with pytest.raises(CheckpointError, match=r"needs 0\.00 MB more, and 0\.00 MB are free"):
        output_job.write(tmp_path / "out", made=made.append)
    assert not made
    assert not list(tmp_path.iterdir())
    free[0] = needed
    interrupted(tmp_path / "out")
    free[0] = needed // 2 + 1  # two of four files are there
    output_job.write(tmp_path / "out")
    assert snapshot(tmp_path / "out") == whole[0]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("room", [0, 250, 310])
def test_a_disk_that_fills_up_is_a_sentence_and_the_next_run_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[int, dict[str, bytes]],
    room: int,
    threads: int,
) -> None:
    """In the header, or between pieces: no output, and the same command completes it once there is room."""
    pwrite, left = os.pwrite, [room]

    def full(descriptor: int, data: memoryview, position: int) -> int:
        if path_of(descriptor).name.startswith("model-00002"):
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, position)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"No space left on device.* are free\).*goes on with it"):
            output_job.write(tmp_path / "out", threads=threads)
    assert not (tmp_path / "out").exists()
    output_job.write(tmp_path / "out", threads=threads)
    assert snapshot(tmp_path / "out") == whole[0]


def test_short_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[int, dict[str, bytes]]
) -> None:
    """The system may take fewer bytes than it is given."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, data[:3], at))
    output_job.write(tmp_path / "out")
    assert snapshot(tmp_path / "out") == whole[0]


def path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


@pytest.mark.parametrize("pattern", ["model-00003-of-00004.safetensors.part", "config.json"])
def test_a_disk_that_fails_when_it_is_flushed_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """Bytes that only the cache took are not taken for written, in weights and in small files."""
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if path_of(descriptor).match(pattern):
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*Input/output error"):
        output_job.write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_everything_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[int, dict[str, bytes]]
) -> None:
    """Weights before they are called whole, all files and their directory, then the renaming itself."""
    monkeypatch.setattr(output, "_SYNC_BYTES", 1 << 30)  # so that nobody flushes for the journal
    fsync, flushed = os.fsync, []

    def note(descriptor: int) -> None:
        flushed.append((path_of(descriptor), (tmp_path / "out").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    output_job.write(tmp_path / "out")
    staging = tmp_path / ".out.partial" / "output"
    assert flushed[-2:] == [(staging, False), (tmp_path, True)]
    parts = {f"{name}.part" for name in whole[0] if name.endswith(".safetensors")}
    assert {(staging / name, False) for name in (*whole[0], *parts)} <= set(flushed[:-2])


class Terminal(io.StringIO):
    """A stderr that is one."""

    def isatty(self) -> bool:
        return True


def test_an_error_has_a_line_of_its_own_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bar's line ends, whether the work did or failed; and somebody says where it is kept."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())

    def cut_off(nbytes: int) -> None:
        with Progress("writing", 10) as meter:
            if nbytes:
                meter.advance(nbytes)
            raise Stop

    with pytest.raises(Stop):
        cut_off(5)
    assert terminal.getvalue().endswith("GB/s\x1b[K\n")
    with pytest.raises(Stop):
        cut_off(0)
    assert terminal.getvalue().count("\n") == 1, "a bar that was not shown has no line"
    with Progress("writing", 10) as meter:
        meter.advance(10)
    assert terminal.getvalue().endswith("(100 %), 0.00 GB/s\x1b[K\n")
    with caplog.at_level("INFO", "nextn.models.output"):
        interrupted(tmp_path / "out")
    assert f"is kept in {tmp_path / '.out.partial'}; remove it to give up" in caplog.text
    monkeypatch.setattr(sys, "stderr", None)
    with Progress("writing", 10) as meter:
        meter.advance(10)


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    """There is a file where the output's parent should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="out cannot be written: "):
        output_job.write(tmp_path / "file" / "out")


# Reading back

FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "byte": (
        damage(lambda data: data[:-1] + bytes([data[-1] ^ 1]), "model-00002-*"),
        r"00002.*: layer\.1\.\w+ differs",
    ),
    "dtype": (
        damage(lambda data: data.replace(b'"BF16"', b'"I16" '), "model-00003-*"),
        r"00003.*layer\.2\.BF16",
    ),
    "name": (damage(lambda data: data.replace(b"layer.2.", b"layer.5."), "model-00003-*"), r"layer\.2\.BF16"),
    "truncated": (damage(lambda data: data[:-1], "model-00004-*"), "00004.*truncated"),
    "missing": (lambda path: next(path.glob("model-00004-*")).unlink(), "lacks 1 of 4 shards"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_reading_back_finds_every_fault(tmp_path: Path, fault: str) -> None:
    """Names, dtypes, sizes and each byte; the next run makes the file again."""
    write_files(tmp_path, small_files())
    before = snapshot(tmp_path)
    done: list[int] = []
    verify_files(tmp_path, small_files(), done.append)
    assert sum(done) == sum(file.nbytes for file in small_files())
    change, message = FAULTS[fault]
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        verify_files(tmp_path, small_files())
    for file in tmp_path.glob("*.safetensors"):
        if file.read_bytes() != before[file.name]:
            assert fault in ("name", "truncated")  # found from the headers, and not whole for a next run
    write_files(tmp_path, small_files())
    assert snapshot(tmp_path) == before


def test_reading_back_finds_pieces_of_another_length(tmp_path: Path) -> None:
    """A second making that gives fewer bytes, or more, is another tensor."""
    write_files(tmp_path, [NewFile("model.safetensors", (tensor("w", "F32", 2),))])
    for count in (4, 12):
        other = NewTensor("w", "F32", (2,), lambda count=count: [b"x" * count])
        with pytest.raises(CheckpointError, match=r"w (differs|is longer)"):
            verify_files(tmp_path, [NewFile("model.safetensors", (other,))])
        write_files(tmp_path, [NewFile("model.safetensors", (tensor("w", "F32", 2),))])


def test_a_source_that_fails_the_comparison_costs_no_written_file(tmp_path: Path) -> None:
    """Only a file that differs is removed, or one that cannot be read."""
    write_files(tmp_path, small_files())
    before = snapshot(tmp_path)

    def gone(name: str) -> None:
        if name == "layer.2.F32":
            raise CheckpointError("the source cannot be read")

    with pytest.raises(CheckpointError, match="the source cannot be read"):
        verify_files(tmp_path, small_files(gone))
    assert snapshot(tmp_path) == before


def test_other_files_are_copied_but_for_weights_and_config(tmp_path: Path) -> None:
    """Tokenizer and code come along; weights of any format, indices, config.json and folders do not."""
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "figures").mkdir(parents=True)
    out.mkdir()
    own = {"tokenizer.json", "modeling.py", "generation_config.json"}
    made_anew = {"config.json", "model.safetensors.index.json", *RECORDS.values()}
    for name in (*own, *made_anew, "a.safetensors", "b.bin", "a.safetensors.part"):
        (source / name).write_text(name)

    def copied() -> int:
        copy_files(files := other_files(source), out)
        return len(files)

    assert copied() == 3
    assert snapshot(out) == {name: name.encode() for name in own}
    (source / "part.safetensors").symlink_to(tmp_path / "absent")
    assert copied() == 3
    (source / "merges.txt").symlink_to(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"links to files that do not exist: merges\.txt"):
        copied()

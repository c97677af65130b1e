"""How a checkpoint is read: which files, which bytes, how much memory, and what a fault on the way does."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from nextn.config import EngineConfig, ModelConfig
from nextn.errors import CheckpointError
from nextn.kernels.comm import TensorParallel
from nextn.models import reader
from nextn.models.checkpoint import Checkpoint, read_header
from nextn.models.export import export_nextn
from nextn.models.loader import default_readers, load_checkpoint
from nextn.models.random_checkpoint import write_random_checkpoint
from nextn.models.reader import KEPT_BYTES, SLOTS, LargeRoom, Reader, host_bound, in_threads
from nextn.models.specs import TensorSpec
from nextn.models.weights import Models, build_models
from tests.compare import assert_close
from tests.models.checkpoints import capturing, read_all, rewrite, small_config, specs_of

MIB = 1 << 20
CPU = torch.device("cpu")
COPIES = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
_opened: list[str] | None = None


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and str(args[0]).endswith(".safetensors"):
        _opened.append(Path(args[0]).name)


sys.addaudithook(_watch)  # sees every open of this process, by whatever function


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """The .safetensors files that are opened meanwhile, once for each time."""
    global _opened
    _opened = names = []
    try:
        yield names
    finally:
        _opened = None


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint of two layers and NextN in many shards."""
    path = tmp_path_factory.mktemp("checkpoints") / "small"
    write_random_checkpoint(small_config(), path, shard_size=400_000)
    return path


def build(path: Path, **options: Any) -> Models:
    cfg = ModelConfig.from_dir(path)
    return build_models(path, cfg, EngineConfig(**options), CPU, torch.float32, 64, progress=False)


def load(path: Path, specs: list[TensorSpec], **options: Any) -> Any:
    return load_checkpoint(path, specs, skip=lambda name: name in COPIES, progress=False, **options)


def plain_specs(shapes: dict[str, tuple[int, ...]], take: Callable[[Tensor], None]) -> list[TensorSpec]:
    """Specs of free names and shapes, all given to `take`."""
    whole = {name: tuple(slice(0, size) for size in shape) for name, shape in shapes.items()}
    return [
        TensorSpec(name, shape, "embedding", lambda weight, scale: take(weight), whole[name])
        for name, shape in shapes.items()
    ]


# Which files are opened


def files_of(path: Path, wanted: Callable[[str], bool]) -> set[str]:
    checkpoint = Checkpoint(path)
    return {checkpoint.file_of(name).name for name in checkpoint.names() if wanted(name)}


def is_target(name: str) -> bool:
    return not name.startswith("model.layers.2.")


def test_the_target_alone_opens_only_its_own_shards(small: Path) -> None:
    """Without a draft, files that hold nothing but the NextN layer stay closed."""
    with opened_files() as names:
        build(small, spec=None)
    assert set(names) == files_of(small, is_target)
    assert files_of(small, lambda name: True) - set(names)


def test_the_layer_alone_opens_only_its_own_shards(small: Path, tmp_path: Path) -> None:
    """Taken from another full checkpoint, the NextN layer costs that one's last shards only, copies aside."""
    other = tmp_path / "other"
    shutil.copytree(small, other)
    for file in other.glob("*.safetensors"):
        file.rename(file.with_name(f"other-{file.name}"))
    index = json.loads((other / "model.safetensors.index.json").read_text())
    table = {name: f"other-{file}" for name, file in index["weight_map"].items()}
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    with opened_files() as names:
        build(small, draft_model=str(other))
    needed = files_of(other, lambda name: not is_target(name) and name not in COPIES)
    assert {name for name in names if name.startswith("other-")} == needed
    assert needed < files_of(other, lambda name: True)


def test_an_exported_layer_is_one_file(small: Path, tmp_path: Path) -> None:
    """And the target's own layer is not touched when the draft comes from elsewhere."""
    export_nextn(small, tmp_path / "draft", progress=False)
    with opened_files() as names:
        build(small, draft_model=str(tmp_path / "draft"))
    assert set(names) == {"nextn_layer_parameters.safetensors"} | files_of(small, is_target)


def test_a_file_is_opened_once_for_its_header_and_once_for_each_run_of_its_tensors(small: Path) -> None:
    """No file is opened again and again for each tensor."""
    specs, _ = capturing(specs_of(small_config()))
    with opened_files() as names:
        report = load(small, specs)
    for name in set(names):
        assert names.count(name) <= 2, name
    assert report.files == len(set(names))


# Which bytes are read


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_reads_its_rows_and_no_others(small: Path, ranks: int) -> None:
    """Rows of other ranks are left on the disk; of a part that is cut by columns, whole rows are read."""
    for rank in range(ranks):
        specs, _ = capturing(specs_of(small_config(), tp=TensorParallel(rank, ranks)))
        expected = 0
        checkpoint = Checkpoint(small)
        for spec in specs:
            stored, scale = checkpoint.find(spec.name), None
            assert stored is not None
            if spec.scale_name in checkpoint:
                scale = checkpoint.find(spec.scale_name)
            block = 128 if scale is not None else 1
            start, stop = spec.shard[0].start // block * block, spec.shard[0].stop
            expected += stored.nbytes // stored.shape[0] * (stop - start)
            if scale is not None:
                expected += scale.nbytes // scale.shape[0] * (-(-stop // block) - start // block)
        report = load(small, specs)
        assert report.read_bytes == expected
        if ranks > 1:
            assert expected < 0.8 * sum(tensor.nbytes for tensor in read_all(small).values())


@pytest.mark.parametrize("slot", [1, 1000, 1 << 24])
def test_parts_are_cut_alike_whatever_fits_into_a_slot(
    small: Path, monkeypatch: pytest.MonkeyPatch, slot: int
) -> None:
    """Columns are cut from any number of rows at a time, down to one that is larger than the slot."""
    monkeypatch.setattr(reader, "SLOT_BYTES", slot)
    specs, got = capturing(specs_of(small_config(), tp=TensorParallel(1, 2)))
    load(small, specs)
    stored, cut = read_all(small), 0
    for spec in specs:
        weight, scale = got[spec.name]
        if scale is None and f"{spec.name}_scale_inv" in stored:
            continue  # dequantised, because the part cuts through blocks
        assert_close(weight, stored[spec.name][spec.shard], "bitwise", what=spec.name)
        cut += len(spec.shape) == 2 and spec.shard[1].start > 0
    assert cut > 0


class LateEvent:
    """A CUDA event whose copies happen only when it is waited for, as they may on a busy GPU."""

    pending: ClassVar[list[Callable[[], object]]] = []

    def record(self) -> None:
        self.copies, LateEvent.pending = LateEvent.pending, []

    def synchronize(self) -> None:
        while self.copies:
            self.copies.pop(0)()


@pytest.mark.parametrize("slot", [1000, 40_000, 1 << 24])
@pytest.mark.parametrize("columns", [slice(0, 256), slice(64, 192)])
def test_a_slot_is_not_used_again_before_its_copy_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot: int, columns: slice
) -> None:
    """The way of a GPU, on a CPU: copies that come as late as events allow still bring the right bytes."""
    wanted = torch.arange(700 * 256, dtype=torch.int32).view(torch.float32).view(700, 256)
    save_file({"w": wanted}, tmp_path / "model.safetensors")
    monkeypatch.setattr(reader, "SLOT_BYTES", slot)
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(Reader, "_buffer", lambda self, nbytes: torch.empty(nbytes, dtype=torch.uint8))
    own, copy = Reader(CPU, LargeRoom(0)), Tensor.copy_

    def late(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            LateEvent.pending.append(lambda: copy(target, source))
            return target
        return copy(target, source)

    monkeypatch.setattr(Tensor, "copy_", late)
    own._is_cuda = True
    stored = read_header(tmp_path / "model.safetensors")["w"]
    part = own.read(stored, (slice(100, 700), columns))
    scale = own.to_device(torch.full((3, 3), 2.0))
    for used in own._slots:
        if used.free is not None:
            used.free.synchronize()
    own.close()
    assert_close(part, wanted[100:, columns], "bitwise")
    assert_close(scale, torch.full((3, 3), 2.0), "bitwise")
    assert len(own._slots) == SLOTS or slot > 10**6


# How much memory is used


def rss() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A checkpoint of zeros that takes no room on the disk."""
    table, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * shape[0] * shape[1]
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(table).encode()
    path.mkdir()
    with (path / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + offset)
    return path


@pytest.mark.parametrize(
    ("count", "mib", "readers"),
    [(48, 16, 1), (48, 16, 4), (5, 160, 4)],
    ids=["one reader", "four readers", "larger than a reader keeps"],
)
def test_host_memory_stays_within_the_stated_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, mib: int, readers: int
) -> None:
    """Measured at every tensor: however large the checkpoint, a load needs what `host_bound` says."""
    monkeypatch.setattr("nextn.models.loader._TASK_BYTES", 1)  # a task a tensor: all readers have work
    shapes = {f"w{number}": (mib * 64, 8192) for number in range(count)}
    path = sparse(tmp_path / "model", shapes)
    peak, before = 0, rss()

    def take(weight: Tensor) -> None:
        nonlocal peak
        peak = max(peak, rss() - before)

    report = load(path, plain_specs(shapes, take), threads=readers)
    bound = host_bound(readers, mib * MIB)
    assert report.nbytes == count * mib * MIB > bound
    assert mib * MIB < peak + MIB
    assert peak < bound + 8 * MIB
    if mib * MIB > KEPT_BYTES:
        assert peak < 2 * mib * MIB  # one at a time, though four readers wait for it


def test_the_bound_counts_readers_and_one_large_tensor() -> None:
    """80 MiB a reader; a tensor above 64 MiB once."""
    assert host_bound(8, 14 * MIB) == 8 * 80 * MIB
    assert host_bound(8, 1853 * MIB) == 8 * 80 * MIB + 1853 * MIB
    assert 1 <= default_readers() <= 8


def test_a_large_tensor_needs_its_room(tmp_path: Path) -> None:
    """The shared memory is used by its holder only."""
    path = sparse(tmp_path / "model", {"w": (80 * 64, 8192)})
    large = LargeRoom(80 * MIB)
    own, stored = Reader(CPU, large), read_header(path / "model.safetensors")["w"]
    region = (slice(0, 80 * 64), slice(0, 8192))
    with pytest.raises(AssertionError, match="outside of its room"):
        own.read(stored, region)
    with own.room(80 * MIB):
        assert own.read(stored, region).shape == (80 * 64, 8192)
        assert large.lock.locked()
    assert not large.lock.locked()
    own.close()


def test_no_file_stays_open(small: Path) -> None:
    """After a load, and after one that failed, the process has the descriptors that it had."""
    before = set(os.listdir("/proc/self/fd"))
    specs, _ = capturing(specs_of(small_config()))
    load(small, specs, threads=4)

    def fail(weight: Tensor, scale: Tensor | None) -> None:
        raise CheckpointError("no room")

    with pytest.raises(CheckpointError, match="no room"):
        load(small, [replace(spec, load=fail) for spec in specs], threads=4)
    assert set(os.listdir("/proc/self/fd")) == before


# Faults on the way


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """The header was whole; the data end early: an error with file and tensor, and no crash."""
    shapes = {f"w{number}": (64, 8192) for number in range(4)}
    path = sparse(tmp_path / "model", shapes)
    file = path / "model.safetensors"

    def take(weight: Tensor) -> None:
        os.truncate(file, 2 * MIB)

    with pytest.raises(CheckpointError, match=r"model\.safetensors ended inside w\d; the file is truncated"):
        load(path, plain_specs(shapes, take), threads=1)


def test_a_disk_that_fails_is_an_error_with_the_tensors_name(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system says is passed on; other readers end too."""
    specs, _ = capturing(specs_of(small_config()))
    calls = threading.Semaphore(20)
    preadv = os.preadv

    def failing(*args: Any) -> int:
        if not calls.acquire(blocking=False):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError, match=r"cannot be read at model\..*: .*Input/output error"):
        load(small, specs, threads=3)


def test_short_reads_are_continued(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may return fewer bytes than asked for."""
    preadv = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [buffers[0][: max(1, len(buffers[0]) // 3)]], offset)

    monkeypatch.setattr(os, "preadv", short)
    specs, got = capturing(specs_of(small_config()))
    load(small, specs)
    stored = read_all(small)
    for name, (weight, _) in got.items():
        assert_close(weight, stored[name], "bitwise", what=name)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_an_error_or_harmless(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Any bytes changed, lost or added in a header: a `CheckpointError`, or a header that fits its file."""
    source = sorted(small.glob("*.safetensors"))[-1].read_bytes()
    end = 8 + int.from_bytes(source[:8], "little")
    start = data.draw(st.integers(0, end - 1))
    length = data.draw(st.integers(0, 8))
    text = data.draw(
        st.binary(max_size=8) | st.sampled_from([b'"', b"{", b"-1", b"1e9", b"null", b"[[", b"0.5"])
    )
    file = tmp_path / "damaged.safetensors"
    file.write_bytes(source[:start] + text + source[start + length :])
    with suppress(CheckpointError):
        for tensor in read_header(file).values():
            assert 0 < tensor.begin <= tensor.end <= file.stat().st_size


def test_a_shard_that_is_replaced_while_it_is_loaded_is_an_error(small: Path, tmp_path: Path) -> None:
    """By a file of the same size and time even: some tensors would be of the one, some of the other."""
    model, replaced = tmp_path / "model", []
    shutil.copytree(small, model)
    shard = sorted(model.glob("*.safetensors"))[-1]

    def replace_shard(weight: Tensor, scale: Tensor | None) -> None:
        if not replaced:
            other = tmp_path / "other"
            shutil.copy2(shard, other)
            replaced.append(other.rename(shard))

    specs = [replace(spec, load=replace_shard) for spec in specs_of(small_config())]
    with pytest.raises(CheckpointError, match=rf"changed while they were read: .*{shard.name}; run it again"):
        load(model, specs)
    load(model, specs)


@pytest.mark.parametrize("value", [-1e-3, 0.0, -0.0])
def test_negative_scales_are_damage_and_zeros_are_none(small: Path, tmp_path: Path, value: float) -> None:
    """No quantising gives a negative one; a block of zeros may have had no largest value."""
    name = "model.layers.0.self_attn.q_a_proj.weight_scale_inv"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][0, 0] = value

    model = rewrite(small, tmp_path / "model", change)
    specs, got = capturing(specs_of(small_config()))
    if value < 0:
        with pytest.raises(CheckpointError, match=rf"model\.safetensors is corrupt: {name} holds negative"):
            load(model, specs)
    else:
        load(model, specs)
        scale = got[name.removesuffix("_scale_inv")][1]
        assert scale is not None
        assert scale[0, 0] == 0


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_an_error_ends_all_threads_before_it_is_raised(raised: type[BaseException]) -> None:
    """Who is in the middle of a task sees the event; nobody begins another one."""
    begun: list[int] = []
    both = threading.Barrier(2)

    def work(tasks: Iterator[int], stop: threading.Event) -> None:
        for task in tasks:
            begun.append(task)
            both.wait(10)
            if task == 1:
                raise raised
            assert stop.wait(10)

    with pytest.raises(raised):
        in_threads(work, range(9), 2)
    assert sorted(begun) == [0, 1]
    assert not any("ThreadPool" in thread.name for thread in threading.enumerate())


def test_an_interrupt_of_the_caller_ends_all_threads() -> None:
    """As Ctrl-C does: the signal comes to the main thread, which waits."""
    ended: list[bool] = []

    def work(tasks: Iterator[int], stop: threading.Event) -> None:
        for task in tasks:
            if task == 0:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            ended.append(stop.wait(10))

    with pytest.raises(KeyboardInterrupt):
        in_threads(work, range(9), 2)
    assert ended in ([True], [True, True])


def test_each_task_is_taken_once() -> None:
    """However many threads there are, in all their results together."""
    assert in_threads(lambda tasks, stop: sum(tasks), [1, 2, 3], 1) == [6]
    assert sum(in_threads(lambda tasks, stop: sum(tasks), range(100), 5)) == 4950


def test_a_task_that_cannot_be_given_out_is_an_error_too() -> None:
    """What makes the tasks fails in the thread that asks for one."""

    def tasks() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        in_threads(lambda taken, stop: list(taken), tasks(), 3)

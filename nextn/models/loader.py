"""Loads tensors from a checkpoint into whatever asks for them through `TensorSpec`s.

First a plan is made from headers alone, and every fault in it is reported in one error that names the
tensors; only then is data read: this rank's slices, by several threads, while modules take them one at a
time. Whether a weight is FP8 is decided tensor by tensor from what is on disk, never from config.json.
Host memory is bounded by `reader.host_bound`, whatever the size of the checkpoint.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nextn.errors import CheckpointError
from nextn.kernels.ref.gemm import Block, scale_shape
from nextn.models.checkpoint import Checkpoint, StoredTensor, require_unchanged, shorten
from nextn.models.fp8 import dequantize_blocks
from nextn.models.progress import Progress
from nextn.models.reader import LargeRoom, Reader, in_threads, processors
from nextn.models.specs import TensorSpec

_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
_TASK_BYTES = 1 << 30
_MAX_READERS = 8
_FOREIGN_FORMATS = {
    ".weight_scale_2": "NVFP4", ".weight_packed": "4-bit compressed-tensors", ".qweight": "GPTQ or AWQ",
    ".absmax": "bitsandbytes", ".weight_scale": "FP8 with one scale a tensor or channel",
    ".input_scale": "FP8 with fixed activation scales",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadItem:
    """One tensor to read: where it goes, where it lies, and its scale if it is FP8."""

    spec: TensorSpec
    weight: StoredTensor
    scale: StoredTensor | None

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """What is to be read: the weight, and its scale."""
        return (self.weight,) if self.scale is None else (self.weight, self.scale)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded: tensors of the model, how many of them FP8, tensors skipped.

    nbytes: of this rank's weights, as stored. read_bytes: taken from files, with scales and with columns that
    another rank keeps. files: opened for data.
    """

    tensors: int
    fp8_tensors: int
    skipped: int
    nbytes: int
    read_bytes: int
    files: int
    seconds: float


def load_checkpoint(
    path: Path,
    specs: Iterable[TensorSpec],
    *,
    skip: Callable[[str], bool],
    block_size: Block = (128, 128),
    device: torch.device | None = None,
    progress: bool = True,
    threads: int | None = None,
) -> LoadReport:
    """Load every tensor of `specs` from the directory `path`, exactly once each.

    skip: names that may lie in the checkpoint although no spec asks for them; any other is an error.
    block_size: rows and columns of the weight that share one FP8 scale.
    device: where `spec.load` wants its tensors (default: the CPU). threads: readers (default: up to 8), each
    of which reads and moves tensors; `spec.load` is called from them, but never by two at a time, since a
    module may reallocate itself when it meets a tensor that is not FP8.
    Host memory: at most `host_bound(threads, largest part)` beside what `spec.load` fills.
    Raises `CheckpointError` naming files and tensors, also those that were replaced meanwhile: what has been
    loaded is of no use then.
    """
    checkpoint = Checkpoint(path)
    items, skipped = plan_load(checkpoint, specs, skip=skip, block_size=block_size)
    total = sum(part_bytes(item) for item in items)
    place, readers = device or torch.device("cpu"), threads or default_readers()
    with Progress(f"loading {path.name}", total, shown=progress) as meter:
        read_bytes = _run(_tasks(items), place, readers, block_size, meter)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
            torch.cuda.empty_cache()  # the parts on their way are no memory of the model
    require_unchanged(checkpoint.stamps)
    fp8 = sum(item.scale is not None for item in items)
    files = {stored.file for item in items for stored in item.stored}
    return LoadReport(len(items), fp8, skipped, total, read_bytes, len(files), meter.seconds)


def default_readers() -> int:
    """Readers of a load: one a processor, and no more than keep any storage busy."""
    return min(_MAX_READERS, processors())


def plan_load(
    checkpoint: Checkpoint, specs: Iterable[TensorSpec], *, skip: Callable[[str], bool], block_size: Block
) -> tuple[list[LoadItem], int]:
    """Find every spec's tensor and check it; reads headers only, of those files only that hold a part.

    Returns the items and the number of tensors skipped. Raises one `CheckpointError` with all faults found.
    """
    wanted = {}
    for spec in specs:
        assert spec.name not in wanted, f"two specs are named {spec.name}"
        wanted[spec.name] = spec
    faults = _Faults(checkpoint)
    needed = _needed_names(checkpoint, wanted, faults, skip)
    files = checkpoint.require_files(needed)
    found = [_plan_item(checkpoint, wanted[name], block_size, faults) for name in needed if name in wanted]
    items = [item for item in found if item is not None]
    _check_strays(checkpoint, files, skip, faults)
    faults.raise_if_any()
    names = checkpoint.names()
    used = len(items) + sum(item.scale is not None for item in items)
    return items, len(names) - used


class _Faults:
    """Faults by kind, so that thousands of bad tensors make one readable sentence a kind."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = checkpoint.source
        self._by_kind: dict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, text: str) -> None:
        self._by_kind[kind].append(text)

    def raise_if_any(self) -> None:
        if self._by_kind:
            parts = [f"{kind} ({len(texts)}): {shorten(texts)}" for kind, texts in self._by_kind.items()]
            raise CheckpointError(f"{self._source} does not fit the model: {'; '.join(parts)}")


def _needed_names(
    checkpoint: Checkpoint, wanted: dict[str, TensorSpec], faults: _Faults, skip: Callable[[str], bool]
) -> list[str]:
    """Names to look at: the specs' own and their scales'; notes missing and left-over names."""
    scales = {spec.scale_name for spec in wanted.values() if spec.kind == "linear"}
    for name in wanted:
        if name not in checkpoint:
            faults.add("missing", name)
    needed = [name for name in checkpoint.names() if name in wanted or name in scales]
    left = [name for name in checkpoint.names() if not (name in wanted or name in scales or skip(name))]
    _refuse_foreign(checkpoint, left)
    for name in left:
        faults.add("left over", name)
    return needed


def _refuse_foreign(checkpoint: Checkpoint, left: Sequence[str]) -> None:
    """One sentence for a quantised format that nextn does not read, instead of thousands of faults."""
    for suffix, kind in _FOREIGN_FORMATS.items():
        name = next((name for name in left if name.endswith(suffix)), None)
        if name is not None:
            raise CheckpointError(
                f"{checkpoint.source} holds weights in a format that nextn does not read: {kind} ({name}); "
                "use the model's original block FP8 checkpoint, or one in bf16"
            )


def _plan_item(
    checkpoint: Checkpoint, spec: TensorSpec, block_size: Block, faults: _Faults
) -> LoadItem | None:
    """Check one spec's tensor and its scale against their header entries; faults are noted."""
    weight = checkpoint.find(spec.name)
    has_scale = spec.kind == "linear" and spec.scale_name in checkpoint
    scale = checkpoint.find(spec.scale_name) if has_scale else None
    for name, stored, listed in ((spec.name, weight, True), (spec.scale_name, scale, has_scale)):
        if listed and stored is None:
            faults.add("in the index but not in its file", f"{name} ({checkpoint.file_of(name).name})")
    if weight is None or (has_scale and scale is None):
        return None
    if weight.shape != spec.shape:
        faults.add("wrong shape", f"{spec.name} is {list(weight.shape)} instead of {list(spec.shape)}")
    elif weight.dtype == "F8_E4M3":
        _check_fp8(spec, scale, block_size, faults)
    elif weight.dtype not in _FLOAT_DTYPES:
        known = ", ".join(("F8_E4M3", *_FLOAT_DTYPES))
        faults.add(f"wrong dtype, not one of {known}", f"{spec.name} is {weight.dtype}")
    elif scale is not None:
        faults.add("scale of a weight that is not FP8", f"{spec.scale_name} ({spec.name} is {weight.dtype})")
    return LoadItem(spec, weight, scale)


def _check_fp8(spec: TensorSpec, scale: StoredTensor | None, block_size: Block, faults: _Faults) -> None:
    if spec.kind != "linear":
        faults.add("FP8 where a checkpoint never has it", f"{spec.name} ({spec.kind})")
        return
    if scale is None:
        faults.add("FP8 without a scale", f"{spec.name} (no {spec.scale_name})")
        return
    blocks = scale_shape(spec.shape[0], spec.shape[1], block_size)
    if scale.shape != blocks:
        faults.add("wrong shape", f"{scale.name} is {list(scale.shape)} instead of {list(blocks)}")
    if scale.dtype not in _SCALE_DTYPES:
        faults.add(f"wrong dtype, not one of {', '.join(_SCALE_DTYPES)}", f"{scale.name} is {scale.dtype}")


def _check_strays(
    checkpoint: Checkpoint, files: Iterable[Path], skip: Callable[[str], bool], faults: _Faults
) -> None:
    """Note tensors that a file holds although the index places them elsewhere or nowhere."""
    for file in files:
        for name in checkpoint.header(file):
            if name not in checkpoint:
                if not skip(name):
                    faults.add("in a file but not in the index", f"{name} ({file.name})")
            elif checkpoint.file_of(name) != file:
                faults.add("stored twice", f"{name} ({file.name} and {checkpoint.file_of(name).name})")


def shard_range(part: slice, size: int) -> tuple[int, int]:
    """First and last-plus-one index of a shard's slice of a dimension of `size`."""
    start, stop, step = part.indices(size)
    assert step == 1, "a shard is a contiguous part"
    return start, stop


def is_block_aligned(spec: TensorSpec, block_size: Block) -> bool:
    """Whether this rank's part consists of whole scale blocks, so that it can stay FP8."""
    ranges = [shard_range(part, size) for part, size in zip(spec.shard, spec.shape, strict=True)]
    return all(
        start % block == 0 and (stop % block == 0 or stop == size)
        for (start, stop), size, block in zip(ranges, spec.shape, block_size, strict=True)
    )


def _tasks(items: Iterable[LoadItem]) -> list[list[LoadItem]]:
    """Cut the items into runs of neighbours in one file, of about a GiB, each read by one thread."""
    tasks: list[list[LoadItem]] = []
    size = _TASK_BYTES
    for item in sorted(items, key=lambda item: (item.weight.file, item.weight.begin)):
        if size >= _TASK_BYTES or item.weight.file != tasks[-1][-1].weight.file:
            tasks.append([])
            size = 0
        tasks[-1].append(item)
        size += part_bytes(item)
    return tasks


def _run(
    tasks: Sequence[list[LoadItem]], device: torch.device, readers: int, block_size: Block, meter: Progress
) -> int:
    """Work the tasks off with several readers; the first error stops the others and is raised.

    Returns the bytes read.
    """
    loading = threading.Lock()
    large = LargeRoom(max((_held_bytes(item, block_size) for task in tasks for item in task), default=0))

    def work(taken: Iterator[list[LoadItem]], stop: threading.Event) -> int:
        reader = Reader(device, large)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for task in taken:
                with closing(reader):
                    for item in task:
                        if stop.is_set():
                            break
                        _load_item(reader, item, block_size, loading)
                        meter.advance(part_bytes(item))
        return reader.read_bytes

    return sum(in_threads(work, tasks, max(1, min(readers, len(tasks)))))


def part_bytes(item: LoadItem) -> int:
    """Bytes of this rank's part of the weight, as stored."""
    return _bytes_of(item, _part(item.spec))


def _part(spec: TensorSpec) -> list[tuple[int, int]]:
    return [shard_range(part, size) for part, size in zip(spec.shard, spec.shape, strict=True)]


def _bytes_of(item: LoadItem, ranges: Sequence[tuple[int, int]]) -> int:
    count = math.prod(stop - start for start, stop in ranges)
    return item.weight.nbytes * count // max(1, math.prod(item.weight.shape))


def _held(item: LoadItem, block_size: Block) -> list[tuple[int, int]]:
    """What is read of a weight: this rank's part, and for FP8 from the last block boundary before it.

    A short block at its end still has a scale of its own.
    """
    ranges = _part(item.spec)
    if item.scale is None:
        return ranges
    return [(start - start % block, stop) for (start, stop), block in zip(ranges, block_size, strict=True)]


def _held_bytes(item: LoadItem, block_size: Block) -> int:
    return _bytes_of(item, _held(item, block_size))


def _load_item(reader: Reader, item: LoadItem, block_size: Block, loading: threading.Lock) -> None:
    """Read one tensor and give it to its module."""
    with reader.room(_held_bytes(item, block_size)):
        weight, scale = _read_item(reader, item, block_size)
        with loading:
            item.spec.load(weight, scale)


def _read_item(reader: Reader, item: LoadItem, block_size: Block) -> tuple[Tensor, Tensor | None]:
    """This rank's part of one tensor: FP8 with its scales, or a plain float tensor.

    A part that cuts through scale blocks (small models over several ranks) is dequantised, since its rows or
    columns would no longer line up with whole scales; in float64, where the product is exact.
    """
    held = _held(item, block_size)
    weight = reader.read(item.weight, [slice(start, stop) for start, stop in held])
    if item.scale is None:
        return weight, None
    blocks = [slice(a // size, -(-b // size)) for (a, b), size in zip(held, block_size, strict=True)]
    scale = reader.to_device(reader.read_scale(item.scale, blocks))
    if is_block_aligned(item.spec, block_size):
        return weight, scale
    ranges = zip(_part(item.spec), held, strict=True)
    inner = tuple(slice(start - a, stop - a) for (start, stop), (a, _) in ranges)
    return dequantize_blocks(weight, scale, block_size, torch.float64)[inner], None

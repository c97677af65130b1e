"""Loads tensors from a checkpoint into whatever asks for them through `TensorSpec`s.

First a plan is made from headers alone, and every fault in it is reported in one error that names the
tensors; only then is data read: this rank's slices, by several threads, while modules take them one at a
time. Whether a weight is FP8 is decided tensor by tensor from what is on disk, never from config.json.
"""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nextn.errors import CheckpointError
from nextn.kernels.ref.gemm import Block, dequantize, scale_shape
from nextn.models.checkpoint import Checkpoint, StoredTensor, shorten
from nextn.models.progress import Progress
from nextn.models.specs import TensorSpec

_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
_TASK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class LoadItem:
    """One tensor to read: where it goes, where it lies, and its scale if it is FP8."""

    spec: TensorSpec
    weight: StoredTensor
    scale: StoredTensor | None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded: tensors of the model, how many of them FP8, tensors skipped, bytes read, seconds."""

    tensors: int
    fp8_tensors: int
    skipped: int
    nbytes: int
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
    Raises `CheckpointError` naming files and tensors.
    """
    checkpoint = Checkpoint(path)
    items, skipped = plan_load(checkpoint, specs, skip=skip, block_size=block_size)
    total = sum(_region_bytes(item) for item in items)
    meter = Progress(f"loading {path.name}", total, shown=progress)
    loading = threading.Lock()

    def work(task: list[LoadItem], stop: threading.Event) -> None:
        with ExitStack() as stack:
            reader = _Reader(stack, device or torch.device("cpu"))
            for item in task:
                weight, scale = _read_item(reader, item, block_size)
                with loading:
                    if stop.is_set():
                        return
                    item.spec.load(weight, scale)
                meter.advance(_region_bytes(item))

    _run(_tasks(items), work, threads or min(8, os.cpu_count() or 1))
    meter.close()
    fp8 = sum(item.scale is not None for item in items)
    return LoadReport(len(items), fp8, skipped, total, meter.seconds)


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
    needed = []
    for name in checkpoint.names():
        if name in wanted or name in scales:
            needed.append(name)
        elif not skip(name):
            faults.add("left over", name)
    return needed


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
        size += _region_bytes(item)
    return tasks


def _run(
    tasks: Sequence[list[LoadItem]], work: Callable[[list[LoadItem], threading.Event], None], threads: int
) -> None:
    """Run the tasks in a pool; the first error stops the others and is raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=max(1, min(threads, len(tasks)))) as pool:
        futures = [pool.submit(work, task, stop) for task in tasks]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            stop.set()  # after an error or an interrupt the others end at their next tensor
            pool.shutdown(cancel_futures=True)


def _region_bytes(item: LoadItem) -> int:
    """Bytes of this rank's part of the weight, as stored."""
    ranges = [shard_range(part, size) for part, size in zip(item.spec.shard, item.spec.shape, strict=True)]
    count = math.prod(stop - start for start, stop in ranges)
    return item.weight.nbytes * count // max(1, math.prod(item.weight.shape))


class _Reader:
    """Opens files on demand for one task and reads slices from them onto a device."""

    def __init__(self, stack: ExitStack, device: torch.device) -> None:
        self._stack, self._device = stack, device
        self._files: dict[Path, Any] = {}

    def read(self, stored: StoredTensor, region: tuple[slice, ...]) -> Tensor:
        """The part `region` of one tensor, as stored; raises `CheckpointError` naming the file."""
        try:
            if stored.file not in self._files:
                opened = safe_open(stored.file, framework="pt")
                self._files[stored.file] = self._stack.enter_context(opened)
            part = self._files[stored.file].get_slice(stored.name)[region]
            assert isinstance(part, Tensor)
            return part.to(self._device, copy=True)  # the slice may be a view of the mapped file
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{stored.file} cannot be read at {stored.name}: {error}") from None


def _read_item(reader: _Reader, item: LoadItem, block_size: Block) -> tuple[Tensor, Tensor | None]:
    """This rank's part of one tensor: FP8 with its scales, or a plain float tensor.

    A part that cuts through scale blocks (small models over several ranks) is dequantised, since its rows or
    columns would no longer line up with whole scales; in float64, where the product is exact.
    """
    spec = item.spec
    ranges = [shard_range(part, size) for part, size in zip(spec.shard, spec.shape, strict=True)]
    if item.scale is None:
        return reader.read(item.weight, tuple(slice(start, stop) for start, stop in ranges)), None
    # From the last block boundary before the part; a short block at its end still has a scale of its own.
    outer = [(start - start % block, stop) for (start, stop), block in zip(ranges, block_size, strict=True)]
    weight = reader.read(item.weight, tuple(slice(start, stop) for start, stop in outer))
    blocks = tuple(slice(a // size, -(-b // size)) for (a, b), size in zip(outer, block_size, strict=True))
    scale = reader.read(item.scale, blocks).to(torch.float32)
    if not torch.isfinite(scale).all():
        raise CheckpointError(f"{item.scale.file} is corrupt: {item.scale.name} is not finite")
    if is_block_aligned(spec, block_size):
        return weight, scale
    inner = tuple(slice(start - a, stop - a) for (start, stop), (a, _) in zip(ranges, outer, strict=True))
    return dequantize(weight, scale, block_size, torch.float64)[inner], None

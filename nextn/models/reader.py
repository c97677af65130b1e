"""Reads parts of stored tensors into memory that is bounded and used again, and on to a device; in threads.

Plain reads, not a mapped file: a file that ends early or a disk that fails is then an error with a name,
where a mapping would end the process; and a GPU takes pinned buffers at the full speed of its link.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from nextn.errors import CheckpointError
from nextn.models.checkpoint import StoredTensor

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "BF16": torch.bfloat16,
    "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""Dtypes that weights and scales may have on disk, by their safetensors codes."""

SLOT_BYTES = 16 << 20
SLOTS = 4
KEPT_BYTES = 64 << 20
"""Most bytes of a tensor that a reader's own memory holds; of larger ones there is one at a time."""


Task = TypeVar("Task")
Result = TypeVar("Result")


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(
    work: Callable[[Iterator[Task], threading.Event], Result], tasks: Iterable[Task], threads: int
) -> list[Result]:
    """Call `work` in several threads, each with an iterator over the tasks that no other one has taken.

    Tasks are taken in their order. The first error, or an interrupt, is raised when all threads have ended:
    the iterators end, and an event tells who is in the middle of a long task.
    """
    source, lock = iter(tasks), threading.Lock()
    begin, stop = threading.Event(), threading.Event()

    def taken() -> Iterator[Task]:
        while not stop.is_set():
            with lock:
                try:
                    task = next(source)
                except StopIteration:
                    return
            yield task

    def run() -> Result:
        begin.wait()  # until the pool knows all threads: one that an interrupt hides from it does no work
        return work(taken(), stop)

    futures: list[Future[Result]] = []
    with ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            futures += [pool.submit(run) for _ in range(threads)]
            begin.set()
            waiting = set(futures)
            # With a pause: an interrupt is not seen if it comes just before one begins to wait.
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
        finally:
            stop.set()
            begin.set()
    return [future.result() for future in futures]


def host_bound(readers: int, largest: int) -> int:
    """Most bytes of host memory that `readers` readers use for tensors whose largest part has `largest`.

    On a CPU a reader keeps a tensor of at most KEPT_BYTES and a slot for rows that it cuts; one tensor larger
    than that is in memory at a time, whoever reads it. On a GPU a reader has SLOTS pinned slots and no more.
    Scales (a 4096th of their weights) come on top; so does what turns FP8 into another dtype: a module that
    does not keep it, and a part that cuts through scale blocks, which is float64 for a while.
    """
    return readers * (KEPT_BYTES + SLOT_BYTES) + (largest if largest > KEPT_BYTES else 0)


class LargeRoom:
    """Memory for one tensor above KEPT_BYTES, shared by all readers of a load; used again by the next one.

    largest: bytes of the largest one, if it is known; otherwise the memory grows.
    """

    def __init__(self, largest: int = 0) -> None:
        self._bytes = largest
        self._buffer: Tensor | None = None
        self.lock = threading.Lock()

    def view(self, nbytes: int) -> Tensor:
        """[nbytes] uint8; only for whoever holds the lock."""
        assert self.lock.locked(), "a large tensor is read outside of its room"
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = torch.empty(max(self._bytes, nbytes), dtype=torch.uint8)
        return self._buffer[:nbytes]


@dataclass(slots=True)
class _Slot:
    """A buffer between file and device, and the event after which a GPU no longer reads it."""

    buffer: Tensor  # [SLOT_BYTES] uint8, pinned for a GPU
    free: torch.cuda.Event | None = None


class Reader:
    """One thread's way from files to a device.

    What `read` returns on a CPU lies in this reader's memory, which its next `read` uses again; on a GPU it
    is a tensor of its own, filled in the order of the current stream. Open files last until `close`.
    read_bytes: bytes taken from files so far.
    """

    def __init__(self, device: torch.device, large: LargeRoom) -> None:
        self._device, self._large = device, large
        self._is_cuda = device.type == "cuda"
        self._kept: Tensor | None = None
        self._slots: list[_Slot] = []
        self._next = 0
        self._files: dict[Path, int] = {}
        self._stack = ExitStack()
        self.read_bytes = 0

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Hold what a tensor of `nbytes` needs, from before it is read until it has been taken."""
        if nbytes <= KEPT_BYTES:
            yield
            return
        with self._large.lock:
            yield

    def close(self) -> None:
        """Close the files opened so far; the reader can go on and open others."""
        self._files.clear()
        self._stack.close()

    def read(self, stored: StoredTensor, region: Sequence[slice]) -> Tensor:
        """The part `region` (of one or two dimensions) of one tensor, as stored, on the device.

        Rows outside the region are not read; columns are, since they share its pages on disk.
        """
        rows, width, columns = _layout(stored, region)
        whole = columns == slice(0, width)
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        dtype = DTYPES[stored.dtype]
        part = self._empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
        if whole and not self._is_cuda:
            self._fill(part, stored, rows.start * width * dtype.itemsize)
        else:
            step = max(1, SLOT_BYTES // (width * dtype.itemsize))
            for start in range(rows.start, rows.stop, step):
                stop = min(start + step, rows.stop)
                target = part[start - rows.start : stop - rows.start]
                slot, piece = self._slot((stop - start, width), dtype)
                self._fill(piece, stored, start * width * dtype.itemsize)
                self._send(slot, piece if whole else piece[:, columns], target)
        return part if len(region) == 2 else part.flatten()

    def read_host(self, stored: StoredTensor, region: Sequence[slice]) -> Tensor:
        """The same for a small tensor, in host memory of its own whatever the device."""
        rows, width, columns = _layout(stored, region)
        dtype = DTYPES[stored.dtype]
        part = torch.empty(rows.stop - rows.start, width, dtype=dtype)
        self._fill(part, stored, rows.start * width * dtype.itemsize)
        return part[:, columns]

    def read_scale(self, stored: StoredTensor, region: Sequence[slice]) -> Tensor:
        """The same for scales, in float32; raises `CheckpointError` for one that no quantising gives."""
        scale = self.read_host(stored, region).to(torch.float32)
        if not torch.isfinite(scale).all():
            raise CheckpointError(f"{stored.file} is corrupt: {stored.name} is not finite")
        if (scale < 0).any():
            raise CheckpointError(f"{stored.file} is corrupt: {stored.name} holds negative scales")
        return scale

    def to_device(self, small: Tensor) -> Tensor:
        """A small host tensor on the device, without waiting for it on a GPU."""
        if not self._is_cuda:
            return small
        slot, piece = self._slot(small.shape, small.dtype)
        piece.copy_(small)
        target = torch.empty(small.shape, dtype=small.dtype, device=self._device)
        self._send(slot, piece, target)
        return target

    def _empty(self, nbytes: int) -> Tensor:
        """Room for one part, [nbytes] uint8."""
        if self._is_cuda:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if nbytes > KEPT_BYTES:
            return self._large.view(nbytes)
        if self._kept is None:
            self._kept = torch.empty(KEPT_BYTES, dtype=torch.uint8)  # pages that stay unused cost nothing
        return self._kept[:nbytes]

    def _slot(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[_Slot, Tensor]:
        """The next slot, once its last data has left it, and a view of it."""
        nbytes = math.prod(shape) * dtype.itemsize
        count = SLOTS if self._is_cuda else 1
        if len(self._slots) < count:
            self._slots.append(_Slot(self._buffer(max(SLOT_BYTES, nbytes))))
        slot = self._slots[self._next]
        self._next = (self._next + 1) % count
        if slot.free is not None:
            slot.free.synchronize()
        if slot.buffer.nbytes < nbytes:  # a single row above SLOT_BYTES
            slot.buffer = self._buffer(nbytes)
        return slot, slot.buffer[:nbytes].view(dtype).view(tuple(shape))

    def _buffer(self, nbytes: int) -> Tensor:
        """Memory of a slot, [nbytes] uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._is_cuda)

    def _send(self, slot: _Slot, piece: Tensor, target: Tensor) -> None:
        """Copy a slot's rows to their place; rows with columns cut away are packed first for a GPU."""
        if self._is_cuda and not piece.is_contiguous():
            loose = piece
            slot, piece = self._slot(loose.shape, loose.dtype)
            piece.copy_(loose)
        target.copy_(piece, non_blocking=True)
        if self._is_cuda:
            slot.free = torch.cuda.Event()
            slot.free.record()

    def _fill(self, target: Tensor, stored: StoredTensor, offset: int) -> None:
        """Read a host tensor's bytes from `offset` within the stored one."""
        view = target.flatten().view(torch.uint8).numpy().data
        position = stored.begin + offset
        self.read_bytes += len(view)
        try:
            descriptor = self._open(stored.file)
            while view:
                count = os.preadv(descriptor, [view], position)
                if count == 0:
                    raise CheckpointError(f"{stored.file} ended inside {stored.name}; the file is truncated")
                view, position = view[count:], position + count
        except OSError as error:
            raise CheckpointError(f"{stored.file} cannot be read at {stored.name}: {error}") from None

    def _open(self, file: Path) -> int:
        if file not in self._files:
            descriptor = os.open(file, os.O_RDONLY)
            self._stack.callback(os.close, descriptor)
            self._files[file] = descriptor
        return self._files[file]


def _layout(stored: StoredTensor, region: Sequence[slice]) -> tuple[slice, int, slice]:
    """Rows to read, width of a stored row, columns to keep; a vector is one column."""
    assert len(stored.shape) == len(region) in (1, 2), f"{stored.name} has shape {stored.shape}"
    if len(region) == 1:
        return region[0], 1, slice(0, 1)
    return region[0], stored.shape[1], region[1]

"""How much of a stretch of steps the GPU computes: kernels and copies that a profiler saw, merged."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from nextn.errors import ConfigError

DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
LONGEST = 5


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel or copy on the device, in microseconds of the trace's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Microseconds without work on the device, between two launches."""

    us: float
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Busy:
    """What launches say: their span and the part in which at least one ran, in microseconds."""

    span_us: float
    busy_us: float
    launches: int
    pauses: list[Pause]

    @property
    def share(self) -> float:
        """Part of the time in which the device computed."""
        return self.busy_us / self.span_us if self.span_us else 0.0

    def share_in_decode(self, decode_share: float) -> float:
        """At least so much in decode steps, a `decode_share` of the span: all pauses count as theirs."""
        decode_us = self.span_us * decode_share
        return max(0.0, 1 - (self.span_us - self.busy_us) / decode_us) if decode_us else 0.0


def check_gpu() -> None:
    """Raise `ConfigError` where there is nothing to trace."""
    if not torch.cuda.is_available():
        raise ConfigError("--trace looks at a GPU; there is none here")


def record(path: Path, steps: Callable[[], None]) -> Busy:
    """Profile `steps` on the GPU, write the trace there and read it."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps()
        torch.cuda.synchronize()
    export(profiler, path)
    return read(path)


def export(profiler: profile, path: Path) -> None:
    """Write a trace in Chrome's format; the folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def read(path: Path) -> Busy:
    """A trace in Chrome's format, plain or gzipped."""
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return merge(
        Launch(str(each["name"]), float(each["ts"]), float(each["ts"]) + float(each["dur"]))
        for each in events
        if each.get("cat") in DEVICE_EVENTS
    )


def merge(launches: Iterable[Launch]) -> Busy:
    """The union of launches in any order, which may overlap."""
    ordered = sorted(launches, key=lambda each: each.start)
    if not ordered:
        return Busy(0.0, 0.0, 0, [])
    first = ordered[0].start
    total, reached, last, pauses = 0.0, first, "the start", []
    for each in ordered:
        if each.start > reached:
            pauses.append(Pause(each.start - reached, last, each.name))
        if each.end > reached:
            total += each.end - max(each.start, reached)
            reached, last = each.end, each.name
    pauses.sort(key=lambda pause: -pause.us)
    return Busy(reached - first, total, len(ordered), pauses[:LONGEST])

"""Decode steps as CUDA graphs: one graph a (batch bucket, shape), replayed without asking the host.

A bucket's batch is padded with the scratch row, which is not live: its tokens run no expert and are written
nowhere. A graph reads which rows it advances from buffers of its own, so that the same graph serves any rows.
All graphs share one memory pool: only one runs at a time, and nothing in it outlives a replay but the
results, which are copied to the host's pinned memory right behind the graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nextn.config import SpecConfig
from nextn.engine.phases import PhaseClock
from nextn.engine.state import RING, RowState, StepBatch
from nextn.engine.step import Mark, Simulation, StepOptions, catch_up, no_mark, plain_step, spec_step
from nextn.models.weights import Models
from nextn.tree.accept import Accepted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a captured step depends on besides its buffers.

    spec: None for plain decoding. simulated: whether the accepted lengths come from a benchmark, and
    fixed_token what it writes (see `Simulation`). catches_up: the step between plain ones and a tree that
    brings drafts up and emits nothing (`CATCH_UP`); all else is then at its default.
    """

    spec: SpecConfig | None
    any_sampled: bool = False
    any_filter: bool = False
    any_penalty: bool = False
    simulated: bool = False
    fixed_token: int | None = None
    catches_up: bool = False

    @property
    def nodes(self) -> int:
        """Tokens a row of its largest forward pass; a graph's memory grows with them."""
        if self.catches_up:
            return RING
        return self.spec.draft_tokens if self.spec else 1

    def __str__(self) -> str:
        if self.catches_up:
            return "catch-up"
        names = [name for name in ("sampled", "filter", "penalty") if getattr(self, f"any_{name}")]
        return " ".join([str(self.spec or "plain"), *names, *(["simulated"] if self.simulated else [])])


CATCH_UP = Shape(None, catches_up=True)
"""`catch_up` as a step: the same graph whatever the rows sample, and however far each draft is behind."""


def run_step(
    models: Models,
    state: RowState,
    batch: StepBatch,
    shape: Shape,
    options: StepOptions,
    lengths: Tensor | None = None,
    mark: Mark = no_mark,
) -> Tensor:
    """One step; [B, 1 + W] int64: how many tokens each row emitted, and which (W = 0 for `CATCH_UP`).

    lengths [1] int64 on the device: the length to accept, for a simulated shape.
    """
    if shape.catches_up:
        catch_up(models, state, batch)
        return batch.rows.new_zeros(batch.size, 1)
    simulation = None
    if shape.simulated:
        assert lengths is not None, "a simulated step needs lengths"
        simulation = Simulation(lengths, shape.fixed_token)
    if shape.spec is None:
        accepted = plain_step(models, state, batch, options, simulation=simulation, mark=mark)
    else:
        accepted = spec_step(models, state, batch, shape.spec, options, simulation=simulation, mark=mark)
    return pack(accepted)


def pack(accepted: Accepted) -> Tensor:
    """Lengths and tokens in one tensor, so that one copy brings them to the host.  # [B, 1 + W] int64"""
    return torch.cat((accepted.length.unsqueeze(1), accepted.tokens), dim=1)


def buckets(max_rows: int) -> tuple[int, ...]:
    """Batch sizes to capture: powers of two, and the largest batch itself."""
    sizes = []
    size = 1
    while size < max_rows:
        sizes.append(size)
        size *= 2
    return (*sizes, max_rows)


@dataclass(slots=True)
class _Captured:
    """A graph, the buffers it reads and the one it writes; `rows_now` is what the buffers hold."""

    graph: torch.cuda.CUDAGraph
    batch: StepBatch
    lengths: Tensor
    result: Tensor
    clock: PhaseClock
    rows_now: tuple[int, ...]


class StepGraphs:
    """Captured decode steps of one device. `capture` what will be needed; `run` captures what was missed."""

    def __init__(self, models: Models, state: RowState, options: StepOptions, max_rows: int) -> None:
        self._models, self._state, self._options = models, state, options
        self._buckets = buckets(max_rows)
        self._captured: dict[tuple[int, Shape, bool], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(state.device)

    def capture(self, shapes: Sequence[Shape]) -> None:
        """Capture every bucket of every shape, that of most tokens first: the others then fit its memory."""
        torch.cuda.empty_cache()  # what was only reserved is no memory of the graphs
        started, before = time.perf_counter(), _taken(self._state.device)
        work = [(bucket, shape) for bucket in self._buckets for shape in shapes]
        work.sort(key=lambda each: each[0] * each[1].nodes, reverse=True)
        said = started
        for count, (bucket, shape) in enumerate(work, start=1):
            self._get(bucket, shape)
            if time.perf_counter() - said > 2.0 and count < len(work):
                said = time.perf_counter()
                logger.info("capturing CUDA graphs: %d of %d (batch %d, %s)", count, len(work), bucket, shape)
        logger.info(
            "captured %d CUDA graphs (batches %s; %s) in %.1f s, %.2f GB",
            len(work),
            ", ".join(map(str, self._buckets)),
            ", ".join(map(str, shapes)),
            time.perf_counter() - started,
            (_taken(self._state.device) - before) / 1e9,
        )

    def run(
        self, rows: Sequence[int], shape: Shape, length: int | None = None, *, timed: bool = False
    ) -> tuple[Tensor, PhaseClock]:
        """Start one step of `rows`; its result buffer [B, 1 + W], valid until the next run, and its clock.

        length: of a simulated shape. The first len(rows) rows of the result are theirs. timed: run a graph
        with marks between its phases, which cost a little; the clock has nothing to say otherwise.
        """
        bucket = next(size for size in self._buckets if size >= len(rows))
        captured = self._get(bucket, shape, timed)
        if captured.rows_now != tuple(rows):
            padding = bucket - len(rows)
            numbers = [*rows, *[self._state.scratch_row] * padding]
            fresh = self._state.upload([*numbers, *[1] * len(rows), *[0] * padding]).view(2, bucket)
            captured.batch.rows.copy_(fresh[0])
            captured.batch.live.copy_(fresh[1])
            captured.rows_now = tuple(rows)
        if length is not None:
            captured.lengths.fill_(length)
        captured.graph.replay()
        return captured.result, captured.clock

    def _get(self, bucket: int, shape: Shape, timed: bool = False) -> _Captured:
        key = (bucket, shape, timed)
        if key not in self._captured:
            self._captured[key] = self._capture(bucket, shape, timed)
        return self._captured[key]

    def _capture(self, bucket: int, shape: Shape, timed: bool) -> _Captured:
        """Run the step once on the scratch row, which compiles what is not compiled yet, and record it."""
        state = self._state
        batch = StepBatch(
            rows=torch.full((bucket,), state.scratch_row, dtype=torch.int64, device=state.device),
            live=torch.zeros(bucket, dtype=torch.bool, device=state.device),
            pages=state.page_table.shape[1],
            any_sampled=shape.any_sampled,
            any_filter=shape.any_filter,
            any_penalty=shape.any_penalty,
        )
        lengths = torch.ones(1, dtype=torch.int64, device=state.device)

        clock = PhaseClock(state.device, captured=True)

        def step() -> Tensor:
            return run_step(self._models, state, batch, shape, self._options, lengths)

        def timed_step() -> Tensor:
            clock.clear()
            clock.mark("start")
            return run_step(self._models, state, batch, shape, self._options, lengths, clock.mark)

        graph, result = record(timed_step if timed else step, self._stream, self._pool)
        return _Captured(graph, batch, lengths, result, clock, ())


def record(
    step: Callable[[], Tensor],
    stream: torch.cuda.Stream,
    pool: Any = None,
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture `step` after a run outside of the graph; its result lives in the graph's memory."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        result = step()
    return graph, result


def _taken(device: torch.device) -> int:
    """Bytes of the device that are not free."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free

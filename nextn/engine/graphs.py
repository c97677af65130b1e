"""Steps as CUDA graphs: one a (batch bucket, shape), one a number of chains, replayed without the host.

A bucket's batch is padded with the scratch row, which is not live: its tokens run no expert and are written
nowhere. A graph reads which rows it advances from buffers of its own, so that the same graph serves any rows.
All graphs share one memory pool: only one runs at a time, and nothing in it outlives a replay but the
results, which are copied to the host's pinned memory right behind the graph.

A step with grammars is three graphs, because masks depend on the draft's tree: while the second, the target's
forward pass, runs, the host makes the masks that the third one needs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nextn.config import SpecConfig
from nextn.engine.grammar import mask_words
from nextn.engine.phases import PhaseClock
from nextn.engine.prefill import CHAIN, HEADER, MAX_CHAINS, chain_step
from nextn.engine.state import RING, RowState, StepBatch
from nextn.engine.step import (
    Mark,
    Simulation,
    StepOptions,
    accept_part,
    catch_up,
    draft_part,
    no_mark,
    pack,
    plain_step,
    spec_step,
    verify,
)
from nextn.models.weights import Models
from nextn.tree.tree import DraftTree

logger = logging.getLogger(__name__)

FLAGS = ("any_sampled", "any_filter", "any_penalty", "any_bias", "any_logprobs", "any_grammar")
"""Fields of a `Shape` and of a `StepBatch` that say which sampling work is done."""

NodeMasks = Callable[[Tensor], Tensor]
"""From the trees of a step, tokens and parents [2, B, D] int64, to which tokens may follow each node, [R, D,
words] int32, of the first R <= B rows. Both lie on the host; on a GPU machine in pinned memory."""


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
    any_bias: bool = False
    any_logprobs: bool = False
    any_grammar: bool = False
    simulated: bool = False
    fixed_token: int | None = None
    catches_up: bool = False

    @property
    def nodes(self) -> int:
        """Tokens a row of its largest forward pass; a graph's memory grows with them."""
        if self.catches_up:
            return RING
        return self.spec.draft_tokens if self.spec else 1

    @property
    def flags(self) -> dict[str, bool]:
        """The sampling work of the step: the flags of a `StepBatch`."""
        return {name: getattr(self, name) for name in FLAGS}

    @property
    def recorded(self) -> Shape:
        """The shape whose graph serves this one: options that change logits are recorded all or none.

        Sixty-four mixes of flags would each be a graph a batch size, recorded while requests wait. A row that
        does not ask for an option keeps its bits beside rows that do, so nobody sees the difference.
        """
        if not (self.any_filter or self.any_penalty or self.any_bias or self.any_grammar):
            return self
        return replace(self, any_sampled=True, any_filter=True, any_penalty=True, any_bias=True)

    def __str__(self) -> str:
        if self.catches_up:
            return "catch-up"
        names = [name.removeprefix("any_") for name, wanted in self.flags.items() if wanted]
        return " ".join([str(self.spec or "plain"), *names, *(["simulated"] if self.simulated else [])])


CATCH_UP = Shape(None, catches_up=True)
"""`catch_up` as a step: the same graph whatever the rows sample, and however far each draft is behind."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor on its way to the host."""

    copy: Tensor
    done: torch.cuda.Event | None

    @staticmethod
    def start(source: Tensor) -> HostCopy:
        """Copy what `source` holds when the device comes here, without waiting."""
        if not source.is_cuda:
            return HostCopy(source, None)
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        copy.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return HostCopy(copy, done)

    def wait(self) -> Tensor:
        """The copy, once it has come."""
        if self.done is not None:
            self.done.synchronize()
        return self.copy


def run_step(
    models: Models,
    state: RowState,
    batch: StepBatch,
    shape: Shape,
    options: StepOptions,
    lengths: Tensor | None = None,
    mark: Mark = no_mark,
    masks: NodeMasks | None = None,
) -> Tensor:
    """One step; [B, 1 + W] int64: how many tokens each row emitted, and which (W = 0 for `CATCH_UP`).

    With `any_logprobs` their log-probabilities follow, see `pack`.
    lengths [1] int64 on the device: the length to accept, for a simulated shape. masks: of all rows, called
    while the device verifies, for a shape with grammars.
    """
    if shape.catches_up:
        catch_up(models, state, batch)
        return batch.rows.new_zeros(batch.size, 1)
    if shape.any_grammar:
        assert not shape.simulated, "simulated tokens follow no grammar"
        assert masks is not None, "a step with grammars needs masks"
        return _masked_step(models, state, batch, shape, options, mark, masks)
    simulation = None
    if shape.simulated:
        assert lengths is not None, "a simulated step needs lengths"
        simulation = Simulation(lengths, shape.fixed_token)
    if shape.spec is None:
        accepted = plain_step(models, state, batch, options, simulation=simulation, mark=mark)
    else:
        accepted = spec_step(models, state, batch, shape.spec, options, simulation=simulation, mark=mark)
    return pack(accepted)


def _masked_step(
    models: Models,
    state: RowState,
    batch: StepBatch,
    shape: Shape,
    options: StepOptions,
    mark: Mark,
    masks: NodeMasks,
) -> Tensor:
    """A step in parts, launched op by op; the host makes the masks while the device verifies."""
    cycle = draft_part(models, state, batch, shape.spec, options)
    trees = HostCopy.start(_pack_trees(cycle.tree))
    if shape.spec is not None:
        mark("draft")
    states, logits = verify(models, state, batch, cycle)
    mark("verify")
    grammar = masks(trees.wait()).to(state.device, non_blocking=True)
    return pack(accept_part(models, state, batch, cycle, states, logits, options, grammar=grammar, mark=mark))


def _pack_trees(tree: DraftTree) -> Tensor:
    """Tokens and parents in one tensor, so that one copy brings them to the host: [2, B, D] int64."""
    return torch.stack((tree.tokens, tree.parents))


def buckets(max_rows: int) -> tuple[int, ...]:
    """Batch sizes to capture: powers of two, and the largest batch itself."""
    sizes = []
    size = 1
    while size < max_rows:
        sizes.append(size)
        size *= 2
    return (*sizes, max_rows)


def bucket_of(sizes: Sequence[int], count: int) -> int:
    """The smallest size that holds so many."""
    return next(size for size in sizes if size >= count)


@dataclass(frozen=True, slots=True)
class _MaskedParts:
    """What follows the draft's graph in a step with grammars.

    trees [2, B, D]: what the draft leaves for the host. masks [B, D, words] int32: what the host leaves for
    `accept`. kept: tensors in the graphs' memory that one part hands to another.
    """

    trees: Tensor
    verify: torch.cuda.CUDAGraph
    masks: Tensor
    accept: torch.cuda.CUDAGraph
    kept: list[Any]


@dataclass(slots=True)
class _Captured:
    """A graph, the buffers it reads and the one it writes; `rows_now` is what the buffers hold.

    parts: with grammars `graph` is the draft alone, and these follow.
    """

    graph: torch.cuda.CUDAGraph
    batch: StepBatch
    lengths: Tensor
    result: Tensor
    clock: PhaseClock
    rows_now: tuple[int, ...]
    parts: _MaskedParts | None = None


@dataclass(frozen=True, slots=True)
class _ChainGraph:
    """A graph of `chain_step`, the chains that it reads and the result that it writes."""

    graph: torch.cuda.CUDAGraph
    chains: Tensor
    result: Tensor


class StepGraphs:
    """Captured steps of one device. `capture` what will be needed; `prepare` captures what was missed."""

    def __init__(self, models: Models, state: RowState, options: StepOptions, max_rows: int) -> None:
        self._models, self._state, self._options = models, state, options
        self._buckets = buckets(max_rows)
        self._captured: dict[tuple[int, Shape, bool], _Captured] = {}
        self._chains: dict[int, _ChainGraph] = {}
        self._refused: set[tuple[int, Shape, bool]] = set()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(state.device)

    def capture(self, shapes: Sequence[Shape]) -> None:
        """Capture short prefills and every bucket of every shape, of most tokens first.

        What has fewer then fits the memory of what has more.
        """
        torch.cuda.empty_cache()  # what was only reserved is no memory of the graphs
        started, before = time.perf_counter(), _taken(self._state.device)
        for bucket in reversed(buckets(MAX_CHAINS)):
            self._chain_graph(bucket)
        logger.info("captured short prefills in %.1f s", time.perf_counter() - started)
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

    def prepare(self, rows: int, shape: Shape, *, timed: bool = False) -> bool:
        """Whether a step of so many rows can `run`; captures it if that was not foreseen.

        False where the memory is too small for it: then, and from then on, it has to be launched op by op.
        """
        key = (self._bucket(rows), shape.recorded, timed)
        if key in self._captured:
            return True
        if key in self._refused:
            return False
        started = time.perf_counter()
        try:
            self._get(*key)
        except torch.OutOfMemoryError as error:
            self._refused.add(key)
            logger.warning(
                "no memory to capture steps of batch %d, %s, which now run op by op and slower (%s); "
                "lower --mem-fraction",
                key[0], shape, str(error).splitlines()[0],
            )  # fmt: skip
            return False
        seconds = time.perf_counter() - started
        logger.info(
            "captured batch %d, %s, in %.1f s, at the first request that needs it", key[0], shape, seconds
        )
        return True

    def _bucket(self, rows: int) -> int:
        return bucket_of(self._buckets, rows)

    def run(
        self,
        rows: Sequence[int],
        shape: Shape,
        length: int | None = None,
        *,
        timed: bool = False,
        masks: NodeMasks | None = None,
    ) -> tuple[Tensor, PhaseClock]:
        """Start one step of `rows`; its result (see `run_step`), valid until the next run, and its clock.

        length: of a simulated shape. The first len(rows) rows of the result are theirs. timed: run a graph
        with marks between its phases, which cost a little; the clock has nothing to say otherwise. masks: of
        a shape with grammars; then this returns once they are made, in most cases before the step has run.
        """
        bucket = self._bucket(len(rows))
        captured = self._get(bucket, shape.recorded, timed)
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
        if captured.parts is not None:
            assert masks is not None, "a step with grammars needs masks"
            trees = HostCopy.start(captured.parts.trees)
            captured.parts.verify.replay()
            captured.parts.masks[: len(rows)].copy_(masks(trees.wait()), non_blocking=True)
            captured.parts.accept.replay()
        return captured.result, captured.clock

    def prefill(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Start a step of chains (see `chains_of`); its result is valid until the next run."""
        bucket = bucket_of(buckets(MAX_CHAINS), len(chains))
        captured = self._chain_graph(bucket)
        nothing = [self._state.scratch_row, *[0] * (captured.chains.shape[1] - 1)]
        numbers = list(chain.from_iterable([*chains, *[nothing] * (bucket - len(chains))]))
        captured.chains.copy_(self._state.upload(numbers).view_as(captured.chains))
        captured.graph.replay()
        return captured.result

    def _chain_graph(self, bucket: int) -> _ChainGraph:
        if bucket not in self._chains:
            state = self._state
            chains = torch.zeros(bucket, HEADER + 2 * CHAIN, dtype=torch.int64, device=state.device)
            chains[:, 0].fill_(state.scratch_row)
            graph, result = record(
                lambda: chain_step(self._models, state, chains, self._options), self._stream, self._pool
            )
            self._chains[bucket] = _ChainGraph(graph, chains, result)
        return self._chains[bucket]

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
            **shape.flags,
        )
        lengths = torch.ones(1, dtype=torch.int64, device=state.device)

        clock = PhaseClock(state.device, captured=True)
        if shape.any_grammar:
            return self._capture_parts(batch, shape, lengths, clock, timed)

        def step() -> Tensor:
            return run_step(self._models, state, batch, shape, self._options, lengths)

        def timed_step() -> Tensor:
            clock.clear()
            clock.mark("start")
            return run_step(self._models, state, batch, shape, self._options, lengths, clock.mark)

        graph, result = record(timed_step if timed else step, self._stream, self._pool)
        return _Captured(graph, batch, lengths, result, clock, ())

    def _capture_parts(
        self, batch: StepBatch, shape: Shape, lengths: Tensor, clock: PhaseClock, timed: bool
    ) -> _Captured:
        """Record the three parts of a step with grammars; each runs on what the part before has left."""
        assert not shape.simulated, "simulated tokens follow no grammar"
        models, state, options = self._models, self._state, self._options
        mark = clock.mark if timed else no_mark
        words = mask_words(models.cfg.vocab_size)
        masks = torch.full((batch.size, shape.nodes, words), -1, dtype=torch.int32, device=state.device)
        kept: list[Any] = [None, None]

        def draft() -> Tensor:
            if timed:
                clock.clear()
                clock.mark("start")
            kept[0] = draft_part(models, state, batch, shape.spec, options)
            trees = _pack_trees(kept[0].tree)
            if shape.spec is not None:
                mark("draft")
            return trees

        drafted = 1 if shape.spec is None else 2  # marks before verification

        def check() -> Tensor:
            clock.clear(keep=drafted)
            kept[1] = verify(models, state, batch, kept[0])
            mark("verify")
            logits: Tensor = kept[1][1]
            return logits

        def accept() -> Tensor:
            clock.clear(keep=drafted + 1)
            states, logits = kept[1]
            return pack(
                accept_part(models, state, batch, kept[0], states, logits, options, grammar=masks, mark=mark)
            )

        draft_graph, trees = record(draft, self._stream, self._pool)
        draft_graph.replay()  # capturing computes nothing, and the next part is run before it is captured
        verify_graph, _ = record(check, self._stream, self._pool)
        verify_graph.replay()
        accept_graph, result = record(accept, self._stream, self._pool)
        parts = _MaskedParts(trees, verify_graph, masks, accept_graph, kept)
        return _Captured(draft_graph, batch, lengths, result, clock, (), parts)


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

"""One process's share of the engine: models, device memory, and the steps it is told to run.

The worker turns the scheduler's host-side batches into tensors and the steps' tensors into host lists.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from nextn.config import EngineConfig, ModelConfig, SpecConfig
from nextn.engine.memory import plan_memory
from nextn.engine.request import SamplingParams
from nextn.engine.scheduler import Chunk, Running
from nextn.engine.state import RING, RowState, StepBatch
from nextn.engine.step import (
    Mark,
    PrefillWork,
    Simulation,
    StepOptions,
    catch_up,
    no_mark,
    plain_step,
    prefill_step,
    spec_step,
)
from nextn.errors import CapacityError, ConfigError
from nextn.models.inputs import PrefillInput
from nextn.models.weights import Models, build_models

logger = logging.getLogger(__name__)

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Emitted:
    """Tokens that a step brought for each row, and how many draft tokens it verified."""

    tokens: list[list[int]]
    drafted: int


class Worker:
    """Owns the models and the rows of one device."""

    def __init__(self, models: Models, state: RowState, options: StepOptions, max_model_len: int) -> None:
        self.models = models
        self.state = state
        self.options = options
        self.max_model_len = max_model_len
        # How many plain steps each row is ahead of its draft; the ring holds at most RING of them.
        self._lag = [0] * (state.scratch_row + 1)
        # How many of each row's pages the device's page table holds.
        self._pages = [0] * (state.scratch_row + 1)

    @staticmethod
    def build(model_dir: Path, cfg: ModelConfig, config: EngineConfig) -> Worker:
        """Load the weights and allocate the rows and the cache; raises `NextnError` with the figures."""
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        asked = config.max_model_len or cfg.max_position_embeddings
        if asked > cfg.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {asked} is above the model's max_position_embeddings "
                f"{cfg.max_position_embeddings}; use at most that"
            )
        slack = config.largest_tree + RING
        models = build_models(model_dir, cfg, config, device, dtype, asked + slack)
        memory = plan_memory(cfg, config, device, dtype, asked)
        try:
            state = RowState(
                cfg,
                max_rows=config.max_running_requests,
                max_len=memory.max_model_len + config.largest_tree,
                num_pages=memory.num_pages,
                page_size=config.page_size,
                dtype=dtype,
                device=device,
            )
        except RuntimeError as error:  # torch has no narrower class for a CPU allocation that fails
            raise CapacityError(
                f"a cache of {memory.num_pages} pages of {config.page_size} tokens for "
                f"{config.max_running_requests} requests cannot be allocated on {device}: {error}"
            ) from None
        options = StepOptions(coupled=config.coupled_drafting, post_norm=config.draft_hidden == "post-norm")
        return Worker(models, state, options, memory.max_model_len)

    @property
    def num_pages(self) -> int:
        """Pages in the cache."""
        return self.state.cache.shape[1]

    @property
    def can_draft(self) -> bool:
        """Whether there is a NextN layer."""
        return self.models.nextn is not None

    @torch.inference_mode()
    def start_row(self, entry: Running, seed: int) -> None:
        """Prepare the row of an admitted request."""
        request = entry.request
        self.state.set_row(entry.row, request.params, seed, 0, request.prompt_tokens, request.output_tokens)
        self.state.set_pages(entry.row, entry.pages)
        self._pages[entry.row] = len(entry.pages)
        self._lag[entry.row] = 0

    @torch.inference_mode()
    def set_pages(self, entry: Running) -> None:
        """Tell the device about pages that a row gained since it was last told."""
        self.state.set_pages(entry.row, entry.pages, self._pages[entry.row])
        self._pages[entry.row] = len(entry.pages)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> list[int]:
        """Run one prefill step; returns the first token of each chunk that `is_last`, in order."""
        tokens: list[int] = prefill_step(self.models, self.state, self._plan(chunks), self.options).tolist()
        return tokens

    @torch.inference_mode()
    def decode(
        self,
        entries: Sequence[Running],
        spec: SpecConfig | None,
        *,
        simulation: Simulation | None = None,
        mark: Mark = no_mark,
    ) -> Emitted:
        """Advance every entry by one cycle of shape `spec`, or by one plain token when it is None."""
        batch = self._batch(entries)
        if spec is None:
            self._keep_ring(entries, batch)
            accepted = plain_step(self.models, self.state, batch, self.options, mark=mark)
        else:
            if any(self._lag[entry.row] for entry in entries):
                self._catch_up(entries, batch)
            accepted = spec_step(
                self.models, self.state, batch, spec, self.options, simulation=simulation, mark=mark
            )
        # One copy to the host: the wait for it is the step's only one.
        rows = torch.cat((accepted.length.unsqueeze(1), accepted.tokens), dim=1).tolist()
        tokens = [row[1 : 1 + row[0]] for row in rows]
        return Emitted(tokens, spec.draft_tokens - 1 if spec else 0)

    def _keep_ring(self, entries: Sequence[Running], batch: StepBatch) -> None:
        """Before a plain step: make room in the ring of a row whose draft is RING tokens behind."""
        if not self.can_draft:
            return
        if any(self._lag[entry.row] >= RING for entry in entries):
            self._catch_up(entries, batch)
        for entry in entries:
            self._lag[entry.row] += 1

    def _catch_up(self, entries: Sequence[Running], batch: StepBatch) -> None:
        catch_up(self.models, self.state, batch)
        for entry in entries:
            self._lag[entry.row] = 0

    def _batch(self, entries: Sequence[Running]) -> StepBatch:
        """The decode step of `entries`, with pages for the longest prefix among them."""
        longest = max(entry.length for entry in entries)
        pages = max(1, -(-longest // self.state.page_size))
        return self._step_batch([entry.row for entry in entries], [e.request.params for e in entries], pages)

    def _step_batch(self, rows: list[int], params: Sequence[SamplingParams], pages: int) -> StepBatch:
        device = self.state.device
        return StepBatch(
            rows=torch.tensor(rows, dtype=torch.int64, device=device),
            live=torch.ones(len(rows), dtype=torch.bool, device=device),
            pages=pages,
            any_sampled=any(p.temperature > 0 for p in params),
            any_filter=any(p.needs_filters for p in params),
            any_penalty=any(p.needs_penalties for p in params),
        )

    def _plan(self, chunks: Sequence[Chunk]) -> PrefillWork:
        """Lay the chunks end to end."""
        device = self.state.device
        tokens: list[int] = []
        next_tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for chunk in chunks:
            entry, stop = chunk.entry, chunk.start + chunk.length
            tokens += entry.tokens[chunk.start : stop]
            # The token after the last one is sampled in the step; 0 only holds its place.
            next_tokens += [*entry.tokens[chunk.start + 1 : stop], 0 if chunk.is_last else entry.tokens[stop]]
            positions += range(chunk.start, stop)
            slots += self._slots(entry, chunk.start, stop)
        offsets = (0, *accumulate(chunk.length for chunk in chunks))
        ends = [offset - 1 for offset in offsets[1:]]
        final = [(chunk, end) for chunk, end in zip(chunks, ends, strict=True) if chunk.is_last]
        rows = [chunk.entry.row for chunk in chunks]
        width = max(1, *(-(-(chunk.start + chunk.length) // self.state.page_size) for chunk in chunks))

        def whole(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return PrefillWork(
            inputs=PrefillInput(
                tokens=whole(tokens),
                positions=whole(positions),
                slots=whole(slots),
                page_table=self.state.page_table[whole(rows), :width],
                cu_seqlens=offsets,
                prefix_lens=tuple(chunk.start for chunk in chunks),
            ),
            next_tokens=whole(next_tokens),
            rows=whole(rows),
            lengths=whole([chunk.start + chunk.length for chunk in chunks]),
            ends=whole(ends),
            last=whole([end for _, end in final]),
            last_rows=self._step_batch(
                [chunk.entry.row for chunk, _ in final],
                [chunk.entry.request.params for chunk, _ in final],
                width,
            ),
        )

    def _slots(self, entry: Running, start: int, stop: int) -> list[int]:
        size = self.state.page_size
        return [entry.pages[position // size] * size + position % size for position in range(start, stop)]


def leave_a_core_free() -> None:
    """Give torch every CPU core but one, unless OMP_NUM_THREADS says otherwise; for programs, not libraries.

    The event loop, or whatever else the machine does, then does not preempt a compute thread: all others
    would wait for it at every op, which costs far more than the core (measured in docs/log.md).
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))


def choose_device(name: str) -> torch.device:
    """'auto' is the first GPU if there is one; raises `ConfigError` for what cannot be used."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name!r} is not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"--device {name} needs a GPU and a CUDA build of torch; there is none here, use cpu"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"--device {name} does not exist; this machine has {torch.cuda.device_count()} GPU(s)"
            )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """'auto' is bfloat16 on a GPU and float32 on a CPU, where one row is a little slower but exact enough."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return DTYPES[name]

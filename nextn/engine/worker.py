"""One process's share of the engine: models, device memory, and the steps it is told to run.

The worker turns the scheduler's host-side batches into tensors; `launched` turns the steps' into host lists.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from nextn.config import EngineConfig, ModelConfig, SpecConfig
from nextn.engine.grammar import Matcher, mask_words, run_together
from nextn.engine.graphs import CATCH_UP, NodeMasks, Shape, StepGraphs, run_step
from nextn.engine.launched import PIPELINE_DEPTH, Launched, LaunchedPrefill
from nextn.engine.memory import plan_memory
from nextn.engine.phases import PhaseClock
from nextn.engine.prefill import CHAIN, PrefillWork, chains_of, fit_chains, prefill_step
from nextn.engine.request import SamplingParams
from nextn.engine.scheduler import Chunk, Running
from nextn.engine.state import RING, RowState, StepBatch
from nextn.engine.step import StepOptions, no_mark
from nextn.errors import CapacityError, ConfigError
from nextn.kernels.ops import has_kernels
from nextn.kernels.ref.router import MAX_EXPERTS
from nextn.models.inputs import PrefillInput
from nextn.models.weights import Models, build_models

logger = logging.getLogger(__name__)

HOPPER = (9, 0)
MAX_LATENT, MAX_ROPE = 512, 64
"""kv_lora_rank and qk_rope_head_dim of which attention's tiles fit a GPU's shared memory."""

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class SimulatedLength:
    """A benchmark's step: every row accepts `length` - 1 nodes and writes `fixed_token`, if there is one."""

    length: int
    fixed_token: int | None = None


class Worker:
    """Owns the models and the rows of one device."""

    def __init__(self, models: Models, state: RowState, options: StepOptions, max_model_len: int) -> None:
        self.models = models
        self.state = state
        self.options = options
        self.max_model_len = max_model_len
        self.graphs: StepGraphs | None = None
        # How many plain steps each row is ahead of its draft; the ring holds at most RING of them.
        self._lag = [0] * (state.scratch_row + 1)
        # How many of each row's pages the device's page table holds.
        self._pages = [0] * (state.scratch_row + 1)
        # Where each row stands in its grammar, and masks on their way to the device, by nodes of a tree.
        self._matchers: list[Matcher | None] = [None] * (state.scratch_row + 1)
        self._masks: dict[int, Tensor] = {}

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
        check_kernels(cfg, device, dtype)
        scratch = PIPELINE_DEPTH * config.largest_tree  # each step's nodes behind the last token
        slack = max(scratch + RING, CHAIN)  # a chain's padding has positions too
        models = build_models(model_dir, cfg, config, device, dtype, asked + slack)
        memory = plan_memory(cfg, config, device, dtype, asked)
        try:
            state = RowState(
                cfg,
                max_rows=config.max_running_requests,
                max_len=memory.max_model_len + scratch,
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
        worker = Worker(models, state, options, memory.max_model_len)
        if config.cuda_graphs and has_kernels(state.cache):
            try:
                worker.capture(config.spec if worker.can_draft else None, config.max_running_requests)
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"the CUDA graphs of {config.max_running_requests} requests do not fit beside model "
                    f"and cache ({str(error).splitlines()[0]}); lower --mem-fraction or "
                    "--max-running-requests, or give --no-cuda-graphs"
                ) from None
        return worker

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step has run."""
        return self.graphs is not None

    @property
    def num_pages(self) -> int:
        """Pages in the cache."""
        return self.state.cache.shape[1]

    @property
    def can_draft(self) -> bool:
        """Whether there is a NextN layer."""
        return self.models.nextn is not None

    @torch.inference_mode()
    def start_row(
        self, entry: Running, seed: int, banned: Sequence[int] = (), matcher: Matcher | None = None
    ) -> None:
        """Prepare the row of an admitted request.

        banned: the token ids that its min_tokens holds back. matcher: of its grammar, at the start.
        """
        request = entry.request
        prompt, output = request.prompt_tokens, request.output_tokens
        self.state.set_row(entry.row, request.params, seed, request.choice, prompt, output, banned)
        self._pages[entry.row] = 0
        self._set_pages(entry)
        self._lag[entry.row] = 0
        self._matchers[entry.row] = matcher

    def why_nothing_follows(self, entry: Running) -> str | None:
        """Why a running request's grammar allows no token behind its output, if that is so."""
        matcher = self._matchers[entry.row]
        if matcher is None:
            return None
        matcher.advance(entry.request.output_tokens)
        return matcher.check()

    def _node_masks(self, entries: Sequence[Running], trees: Tensor) -> Tensor:
        """Which tokens may follow each node, [R, D, words] int32 on the host, all ones without a grammar.

        trees [2, B, D] int64: tokens and parents, of the R entries first. The result is valid until the next
        call, so the step must have taken it by then: a row's decode steps with grammars do not run ahead.
        """
        nodes = trees.shape[2]
        if nodes not in self._masks:
            self._masks[nodes] = self._new_masks(self.state.scratch_row, nodes)
        return self._fill_masks(entries, trees, self._masks[nodes])

    def _first_masks(self, entries: Sequence[Running]) -> Tensor | None:
        """Masks of the tokens that follow a prefill, [F, 1, words] on the device; None without a grammar.

        In memory of their own, for the prefill before may not have taken its masks yet.
        """
        if all(entry.request.params.grammar is None for entry in entries):
            return None
        roots = torch.tensor([0, -1]).view(2, 1, 1).expand(-1, len(entries), -1)
        masks = self._fill_masks(entries, roots, self._new_masks(len(entries), 1))
        return masks.to(self.state.device, non_blocking=True)

    def _new_masks(self, rows: int, nodes: int) -> Tensor:
        """Memory for masks on the host, from which copies to a GPU do not wait."""
        shape = (rows, nodes, mask_words(self.models.cfg.vocab_size))
        with torch.inference_mode(False):  # other threads write it
            return torch.empty(shape, dtype=torch.int32, pin_memory=self.state.device.type == "cuda")

    def _fill_masks(self, entries: Sequence[Running], trees: Tensor, masks: Tensor) -> Tensor:
        """Write the first R of `masks` and return them; for the rest see `_node_masks`."""
        tokens, parents = trees.tolist()
        jobs = []
        for index, entry in enumerate(entries):
            matcher = self._matchers[entry.row]
            if matcher is None:
                masks[index] = -1
            else:
                matcher.advance(entry.request.output_tokens)
                jobs.append(partial(matcher.fill, tokens[index], parents[index], masks[index]))
        run_together(jobs)
        return masks[: len(entries)]

    def _set_pages(self, entry: Running) -> None:
        """Tell the device about pages that a row gained since it was last told."""
        self.state.set_pages(entry.row, entry.pages, self._pages[entry.row])
        self._pages[entry.row] = len(entry.pages)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> LaunchedPrefill:
        """Start a prefill step; on a GPU in bfloat16 the host goes on at once.

        `LaunchedPrefill.wait` brings the first token of each chunk that `is_last`. Their rows may decode in
        the next step, launched before that.
        """
        began = time.perf_counter()
        for chunk in chunks:
            self._set_pages(chunk.entry)
        scored = tuple(scored_positions(chunk) for chunk in chunks)
        clock, rated = PhaseClock(self.state.device), None
        chains = self._chains(chunks, scored)
        if chains is None:
            work = self._plan(chunks, scored)
            clock.mark("start")
            done = prefill_step(self.models, self.state, work, self.options)
            result, rated = done.result, done.prompt_logprobs
        else:
            assert self.graphs is not None
            clock.mark("start")
            result = self.graphs.prefill(chains)[: sum(chunk.is_last for chunk in chunks)]
        clock.mark("prefill")
        return LaunchedPrefill.start(chunks, result, scored, rated, clock, began)

    def _chains(self, chunks: Sequence[Chunk], scored: Sequence[range]) -> list[list[int]] | None:
        """A short step's chunks as chains, where steps are recorded; None where `prefill_step` must do it."""
        if self.graphs is None or any(scored):
            return None
        params = [chunk.entry.request.params for chunk in chunks if chunk.is_last]
        if any(each.logprobs is not None or each.grammar is not None for each in params):
            return None
        return chains_of(chunks)

    def launches_slowly(self, entries: Sequence[Running]) -> bool:
        """Whether launching a prefill step of these requests holds up the host, which decode steps do not."""
        return self.graphs is not None and not fit_chains((entry.length, entry.missing) for entry in entries)

    def settled_tokens(self, entry: Running) -> int:
        """How many leading tokens of a row have their entries in target and NextN cache, counted carefully.

        Or will have, by steps under way, before any step launched from now on runs. Plain steps leave the
        draft behind by `_lag` tokens at most, those under way included.
        """
        return max(0, entry.length - self._lag[entry.row])

    @torch.inference_mode()
    def launch(
        self,
        entries: tuple[Running, ...],
        spec: SpecConfig | None,
        *,
        simulation: SimulatedLength | None = None,
        timed: bool = False,
        eager: bool = False,
    ) -> Launched:
        """Start a decode step; on a GPU the host goes on at once and `Launched.wait` brings the tokens.

        timed: mark the ends of its phases. eager: launch op by op even where there are graphs.
        """
        began = time.perf_counter()
        shape = Shape(
            spec,
            **sampling_flags([entry.request.params for entry in entries]),
            simulated=simulation is not None,
            fixed_token=simulation.fixed_token if simulation else None,
        )
        for entry in entries:
            self._set_pages(entry)
        self._keep_draft(entries, spec, eager=eager)
        length = simulation.length if simulation else None
        masks = partial(self._node_masks, entries) if shape.any_grammar else None
        result, clock = self._run(entries, shape, length, timed=timed, eager=eager, masks=masks)
        drafted, width = (spec.draft_tokens - 1, spec.width) if spec else (0, 1)
        return Launched.start(entries, result, drafted, clock, width, began)

    def _run(
        self,
        entries: Sequence[Running],
        shape: Shape,
        length: int | None = None,
        *,
        timed: bool = False,
        eager: bool = False,
        masks: NodeMasks | None = None,
    ) -> tuple[Tensor, PhaseClock]:
        """Start a step of `entries`, by its graph where there are graphs; for the flags see `launch`."""
        rows = [entry.row for entry in entries]
        if self.graphs is not None and not eager and self.graphs.prepare(len(rows), shape, timed=timed):
            return self.graphs.run(rows, shape, length, timed=timed, masks=masks)
        lengths = None if length is None else self.state.upload([length])
        batch, clock = self._batch(entries), PhaseClock(self.state.device)
        clock.mark("start")
        mark = clock.mark if timed else no_mark
        return run_step(self.models, self.state, batch, shape, self.options, lengths, mark, masks), clock

    def capture(self, spec: SpecConfig | None, max_rows: int) -> None:
        """Record the steps that will be needed: short prefills, and decode steps, plain and of shape `spec`,
        greedy, sampled and with all options.

        Where there is a draft, plain steps leave it behind, so what brings it up is recorded too. Steps with
        log-probabilities or grammars are recorded when the first request asks for them.
        """
        specs = (None,) if spec is None else (None, spec)
        sampled = [Shape(s, any_sampled=any_sampled) for any_sampled in (False, True) for s in specs]
        shapes = [*sampled, *(Shape(s, any_filter=True).recorded for s in specs)]
        if self.can_draft:
            shapes.append(CATCH_UP)
        with torch.inference_mode():
            self.graphs = StepGraphs(self.models, self.state, self.options, max_rows)
            self.graphs.capture(shapes)

    def _keep_draft(self, entries: Sequence[Running], spec: SpecConfig | None, *, eager: bool) -> None:
        """Before a step: bring up drafts that plain steps left behind, or make room for one more such."""
        if not self.can_draft:
            return
        late = 0 if spec is not None else RING - 1
        if any(self._lag[entry.row] > late for entry in entries):
            self._run(entries, CATCH_UP, eager=eager)
            for entry in entries:
                self._lag[entry.row] = 0
        if spec is None:
            for entry in entries:
                self._lag[entry.row] += 1

    def _batch(self, entries: Sequence[Running]) -> StepBatch:
        """The decode step of `entries`, with pages for the longest prefix that any may have by now."""
        longest = max(entry.length + entry.ahead for entry in entries)
        pages = max(1, -(-longest // self.state.page_size))
        return self._step_batch([entry.row for entry in entries], [e.request.params for e in entries], pages)

    def _step_batch(self, rows: list[int], params: Sequence[SamplingParams], pages: int) -> StepBatch:
        return StepBatch(
            rows=self.state.upload(rows),
            live=torch.ones(len(rows), dtype=torch.bool, device=self.state.device),
            pages=pages,
            **sampling_flags(params),
        )

    def _plan(self, chunks: Sequence[Chunk], scored: Sequence[range]) -> PrefillWork:
        """Lay the chunks end to end; scored: of each, the positions whose next token is to be rated."""
        whole = self.state.upload
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
        places = [
            offset + place - chunk.start
            for chunk, offset, own in zip(chunks, offsets[:-1], scored, strict=True)
            for place in own
        ]
        rows = [chunk.entry.row for chunk in chunks]
        width = max(1, *(-(-(chunk.start + chunk.length) // self.state.page_size) for chunk in chunks))

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
            scored=whole(places) if places else None,
            grammar=self._first_masks([chunk.entry for chunk, _ in final]),
        )

    def _slots(self, entry: Running, start: int, stop: int) -> list[int]:
        size = self.state.page_size
        return [entry.pages[position // size] * size + position % size for position in range(start, stop)]


def sampling_flags(params: Sequence[SamplingParams]) -> dict[str, bool]:
    """Which sampling work at least one of the requests needs: the flags of a `StepBatch` and of a `Shape`."""
    return {
        "any_sampled": any(p.temperature > 0 for p in params),
        "any_filter": any(p.needs_filters for p in params),
        "any_penalty": any(p.needs_penalties for p in params),
        "any_bias": any(p.needs_bias for p in params),
        "any_logprobs": any(p.logprobs is not None for p in params),
        "any_grammar": any(p.grammar is not None for p in params),
    }


def scored_positions(chunk: Chunk) -> range:
    """Positions of a chunk whose next token is one of the prompt and still lacks a log-probability.

    Empty unless the request asks. What a preempted request had before it started again is not redone.
    """
    request = chunk.entry.request
    if request.params.prompt_logprobs is None:
        return range(0)
    first = max(chunk.start, len(request.prompt_logprobs) - 1)
    return range(first, min(chunk.start + chunk.length, len(request.prompt_tokens) - 1))


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
        raise ConfigError(f"--device {name!r} is not a device; use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"--device {name} needs a GPU and a CUDA build of torch; there is none here, use cpu"
            )
        if device.index:
            raise ConfigError(
                f"--device {name}: choose the GPU with CUDA_VISIBLE_DEVICES={device.index} and --device cuda"
            )
    return device


def check_kernels(cfg: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse at the start what the kernels cannot run, with what would do instead.

    Wider dtypes run the layers in plain torch, slowly, on any GPU; trees, noise and compaction are kernels
    there too.
    """
    if device.type != "cuda":
        return
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "a GPU needs Triton; install it with pip install 'nextn[gpu]', or give --device cpu"
        )
    if dtype != torch.bfloat16:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < HOPPER:
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the bfloat16 "
            f"kernels need {HOPPER[0]}.{HOPPER[1]} or newer (H100, H200). --dtype float32 runs on it, slowly"
        )
    if cfg.kv_lora_rank > MAX_LATENT or cfg.qk_rope_head_dim > MAX_ROPE:
        raise ConfigError(
            f"the kernels take latents of up to {MAX_LATENT} and rotated keys of up to {MAX_ROPE}, this "
            f"model has {cfg.kv_lora_rank} and {cfg.qk_rope_head_dim}; --dtype float32 runs it, slowly"
        )
    if cfg.n_routed_experts > MAX_EXPERTS:
        raise ConfigError(
            f"the kernels take at most {MAX_EXPERTS} routed experts, this model has {cfg.n_routed_experts}; "
            "--dtype float32 runs it, slowly"
        )
    if cfg.weight_block_size[1] % 16:
        raise ConfigError(
            f"the kernels take FP8 blocks of a multiple of 16 columns, this model has "
            f"{cfg.weight_block_size[1]}; --dtype float32 runs it, slowly"
        )
    from nextn.kernels.attention import runs_by_roles

    if (major, minor) == HOPPER and not runs_by_roles():
        logger.warning("attention takes its slower kernel: the faster one is for another release of Triton")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """'auto' is bfloat16 on a GPU and float32 on a CPU, where one row is a little slower but exact enough."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return DTYPES[name]

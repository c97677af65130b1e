"""What the memory is for and how many cache pages fit, worked out and said before the cache is allocated."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from nextn.config import MAX_TREE_NODES, EngineConfig, ModelConfig
from nextn.engine.launched import PIPELINE_DEPTH
from nextn.engine.prefill import LOGIT_SLICE
from nextn.engine.request import MAX_BANNED, MAX_BIASES
from nextn.engine.state import RING
from nextn.errors import CapacityError, ConfigError
from nextn.kernels.ref.attention import PIECES_BYTES, WORKSPACE_BYTES

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 1 << 30
"""The cache on a CPU, whatever `mem_fraction`; the system hands memory out only as pages are used."""

GRAPH_BYTES = 2 << 30
"""Kept free for captured steps, which are recorded after the cache is allocated, beside what the largest of
them computes with: all share that."""

SPLIT_ROWS = 64
"""Up to so many rows a product over the vocabulary comes in two parts that are added."""

GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Pages of the cache and the longest sequence (prompt and output) that they and the model allow."""

    num_pages: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Needs:
    """Bytes of everything but the cache.

    limit: what all may take together, weights: of torch, other: of the CUDA context and other processes. On a
    CPU these three are None: the system hands memory out as it is used.
    """

    limit: int | None
    weights: int | None
    other: int | None
    rows: int
    prefill: int
    decode: int
    graphs: int

    @property
    def left(self) -> int | None:
        """What remains for the cache; None where nobody limits it."""
        if self.limit is None or self.weights is None or self.other is None:
            return None
        return self.limit - self.weights - self.other - self.rows - self.prefill - self.decode - self.graphs


def plan_memory(
    cfg: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype, max_model_len: int
) -> MemoryPlan:
    """Divide what is left beside the weights into pages; raises `CapacityError` if not one request fits.

    Call it when the weights are loaded. The cache counts every layer, target and NextN.
    """
    page_bytes = config.page_size * cfg.latent_dim * dtype.itemsize * (cfg.num_hidden_layers + 1)
    reserve = config.largest_tree
    needs = _needs(cfg, config, device, dtype, max_model_len)
    budget = CPU_CACHE_BYTES if needs.left is None else needs.left
    num_pages = config.num_pages or budget // page_bytes
    if not config.prefix_cache and config.num_pages is None:
        # The scheduler admits a request only if every running one could still take a page more.
        useful = config.max_running_requests * (-(-(max_model_len + reserve) // config.page_size) + 1)
        num_pages = min(num_pages, useful)
    longest = num_pages * config.page_size - reserve
    if longest < 2:
        raise CapacityError(
            f"{max(num_pages, 0)} cache pages of {config.page_size} tokens ({page_bytes / 2**20:.1f} MiB "
            f"each) fit, which is too few for one request; raise --mem-fraction or --num-pages, or take a "
            f"smaller model"
        )
    if longest < max_model_len:
        if config.max_model_len is not None:
            raise ConfigError(
                f"--max-model-len {max_model_len} does not fit the cache of {num_pages * config.page_size} "
                f"tokens ({reserve} are kept for the tree); use at most {longest}"
            )
        logger.warning("max_model_len is cut from %d to %d: the cache holds no more", max_model_len, longest)
    plan = MemoryPlan(num_pages, min(longest, max_model_len))
    logger.info("%s", _table(cfg, config, device, needs, plan, page_bytes))
    return plan


def _needs(
    cfg: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype, max_model_len: int
) -> _Needs:
    """`mem_fraction` of a GPU, what is taken of it, and one step's work of each kind."""
    limit = weights = other = None
    if device.type != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        limit = int(total * config.mem_fraction)
        weights = torch.cuda.memory_allocated(device)
        other = total - free - torch.cuda.memory_reserved(device)
    recorded = device.type != "cpu" and config.cuda_graphs and dtype == torch.bfloat16
    kernels = device.type != "cpu" and dtype != torch.float64
    decode = _decode_bytes(cfg, config, kernels=kernels)
    return _Needs(
        limit,
        weights,
        other,
        rows=_row_bytes(cfg, config, dtype, max_model_len),
        prefill=_prefill_bytes(cfg, config, kernels=kernels),
        decode=decode,
        graphs=GRAPH_BYTES + decode if recorded else 0,
    )


def _table(
    cfg: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    needs: _Needs,
    plan: MemoryPlan,
    page_bytes: int,
) -> str:
    """The plan, a line for each part of the memory, and how many tokens fit."""
    rows, tokens = config.max_running_requests, plan.num_pages * config.page_size
    cache, layers = plan.num_pages * page_bytes, cfg.num_hidden_layers
    a_token = f"{page_bytes / config.page_size / 2**10:.1f} KiB a token in {layers} layers + NextN"
    parts = [
        ("weights", needs.weights, ""),
        ("other", needs.other, "CUDA context and other processes"),
        ("rows", needs.rows, f"{rows} requests"),
        ("prefill step", needs.prefill, f"{config.chunked_prefill_size} tokens"),
        ("decode step", needs.decode, f"{rows} x {config.largest_tree} tokens"),
        ("CUDA graphs", needs.graphs or None, ""),
        ("cache", cache, f"{plan.num_pages} pages x {config.page_size} tokens, {a_token}"),
    ]
    title = f"memory plan for {device}"
    if needs.limit is not None and needs.left is not None:
        title += f": --mem-fraction {config.mem_fraction} allows {needs.limit / GIB:.2f} GiB"
        spare = needs.left - cache
        parts.append(("unused", spare, "") if spare >= 0 else ("too much", -spare, "--num-pages asks for it"))
    known = [(name, size, note) for name, size, note in parts if size is not None]
    lines = [f"  {name:<13}{size / GIB:8.2f} GiB  {note}".rstrip() for name, size, note in known]
    each = min(tokens_each(plan.num_pages, config), plan.max_model_len)
    fits = (
        f"  {tokens} tokens fit: one request of up to {plan.max_model_len}, or {rows} of about {each} at once"
    )
    return "\n".join([title, *lines, fits])


def tokens_each(num_pages: int, config: EngineConfig) -> int:
    """Tokens that each of the most requests may have, if all are to run at the same time.

    As the scheduler admits them: with a spare page each, and room for a step behind the last token.
    """
    room = (num_pages // config.max_running_requests - 1) * config.page_size - config.largest_tree
    return max(0, room)


def _experts_a_token(cfg: ModelConfig) -> int:
    """Networks whose outputs a token sums: of a dense model its only one."""
    return cfg.num_experts_per_tok + cfg.n_shared_experts if cfg.n_routed_experts else 1


def _choice_bytes(cfg: ModelConfig, nodes: int, rows: int, positions: int, *, kernels: bool) -> int:
    """Most that choosing the tokens of `nodes` nodes of `rows` rows holds at a time, with every option.

    positions: that a row chooses for, each with its noise and, of one node, log-probabilities. Without
    kernels, filters sort: values, their places, the mass in float64, masks.
    """
    a_node = 4 + 4 + 4 if kernels else 48  # logits, logits adjusted, keys of the filters
    a_row = 4 + 1 + positions * (4 + 3 * 4)  # counts, marks of the prompt, noise, three kinds of logits
    parts = 2 * 4 * min(nodes, SPLIT_ROWS)  # of a product that is split
    return cfg.vocab_size * (nodes * a_node + rows * a_row + parts)


def _prefill_bytes(cfg: ModelConfig, config: EngineConfig, *, kernels: bool) -> int:
    """Most that one prefill step holds beside weights and cache, by its largest tensors, in bytes.

    Layers come first, then the first tokens of prompts that end, then log-probabilities of prompt tokens.
    """
    tokens, hidden = config.chunked_prefill_size, cfg.hidden_size
    experts = _experts_a_token(cfg)
    width = max(cfg.intermediate_size, cfg.moe_intermediate_size * experts)
    stream = 4 * 2 * hidden + 4 * hidden  # residual, its norm, states of both models; one product in float32
    queries = 4 * cfg.num_attention_heads * (2 * cfg.qk_head_dim + cfg.v_head_dim)
    feed_forward = experts * 2 * hidden + 4 * 2 * width + 2 * width  # summands, gate and up, their product
    layer = tokens * max(queries, feed_forward) + WORKSPACE_BYTES + PIECES_BYTES
    ending = min(tokens, config.max_running_requests)
    first = _choice_bytes(cfg, ending, ending, 1, kernels=kernels)
    rated = LOGIT_SLICE * cfg.vocab_size * 5 * 4  # logits, and what a softmax makes of them on the way
    return tokens * stream + max(layer, first, rated)


def _decode_bytes(cfg: ModelConfig, config: EngineConfig, *, kernels: bool) -> int:
    """Most that the largest batch of a decode step computes with, in a graph or op by op."""
    spec, rows = config.spec, config.max_running_requests
    nodes = rows * max(config.largest_tree, spec.topk if spec else 1)
    positions = config.largest_tree if config.max_draft_tokens or spec is None else spec.width
    choice = _choice_bytes(cfg, nodes, rows, positions, kernels=kernels)
    return choice + nodes * 4 * cfg.hidden_size * (_experts_a_token(cfg) + 16)


def _row_bytes(cfg: ModelConfig, config: EngineConfig, dtype: torch.dtype, max_model_len: int) -> int:
    """Bytes of the rows: ring, NextN state and draft tail, pages, penalties' counts and marks, biases."""
    vectors = (RING + 1) * cfg.hidden_size + MAX_TREE_NODES * cfg.latent_dim
    pages = -(-(max_model_len + PIPELINE_DEPTH * config.largest_tree) // config.page_size)
    numbers = 8 * (pages + RING + MAX_BIASES + MAX_BANNED) + 4 * MAX_BIASES + 256  # and a few single ones
    a_row = vectors * dtype.itemsize + numbers + 5 * cfg.vocab_size
    return (config.max_running_requests + 1) * a_row + 8 * MAX_TREE_NODES

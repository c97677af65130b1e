"""How many cache pages fit, worked out before the cache is allocated and said in one line."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from nextn.config import MAX_TREE_NODES, EngineConfig, ModelConfig
from nextn.engine.state import RING
from nextn.errors import CapacityError, ConfigError
from nextn.kernels.ref.attention import WORKSPACE_BYTES

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 1 << 30
"""The cache on a CPU, whatever `mem_fraction`; the system hands memory out only as pages are used."""

GRAPH_BYTES = 2 << 30
"""Kept free for captured decode steps, which are recorded after the cache is allocated."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Pages of the cache and the longest sequence (prompt and output) that they and the model allow."""

    num_pages: int
    max_model_len: int


def plan_memory(
    cfg: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype, max_model_len: int
) -> MemoryPlan:
    """Divide what is left beside the weights into pages; raises `CapacityError` if not one request fits.

    Call it when the weights are loaded. The cache counts every layer, target and NextN.
    """
    page_bytes = config.page_size * cfg.latent_dim * dtype.itemsize * (cfg.num_hidden_layers + 1)
    reserve = config.largest_tree
    # The scheduler admits a request only if every running one could still take a page more.
    useful = config.max_running_requests * (-(-(max_model_len + reserve) // config.page_size) + 1)
    num_pages = config.num_pages or min(_budget(cfg, config, device, dtype) // page_bytes, useful)
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
    logger.info(
        "cache: %d pages x %d = %d tokens, %.2f GiB (%.1f KiB a token, %d layers + NextN)",
        num_pages,
        config.page_size,
        num_pages * config.page_size,
        num_pages * page_bytes / 2**30,
        page_bytes / config.page_size / 2**10,
        cfg.num_hidden_layers,
    )
    return MemoryPlan(num_pages, min(longest, max_model_len))


def _budget(cfg: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes for the cache: `mem_fraction` of a GPU less what is taken and one step's work; fixed on a CPU."""
    if device.type == "cpu":
        return CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    taken = total - free - reusable
    steps = _prefill_bytes(cfg, config) + _decode_bytes(cfg, config, dtype)
    return int(total * config.mem_fraction) - taken - steps - _row_bytes(cfg, config, dtype)


def _prefill_bytes(cfg: ModelConfig, config: EngineConfig) -> int:
    """Most that one prefill step holds beside weights and cache, by its largest tensors, in bytes."""
    tokens, hidden = config.chunked_prefill_size, cfg.hidden_size
    experts = cfg.num_experts_per_tok + cfg.n_shared_experts if cfg.n_routed_experts else 1
    width = max(cfg.intermediate_size, cfg.moe_intermediate_size * experts)
    stream = 4 * 2 * hidden + 4 * hidden  # residual, its norm, states of both models; one product in float32
    queries = 4 * cfg.num_attention_heads * (2 * cfg.qk_head_dim + cfg.v_head_dim)
    feed_forward = experts * 2 * hidden + 4 * 2 * width + 2 * width  # summands, gate and up, their product
    return tokens * (stream + max(queries, feed_forward)) + WORKSPACE_BYTES


def _decode_bytes(cfg: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Most that the decode steps hold: their graphs and what the largest batch computes with."""
    nodes = config.max_running_requests * config.largest_tree
    experts = cfg.num_experts_per_tok + cfg.n_shared_experts if cfg.n_routed_experts else 1
    logits = 48 * cfg.vocab_size  # with filters: sorted values, their places, mass in float64, masks
    work = nodes * (logits + 4 * cfg.hidden_size * (experts + 16))
    return work + (GRAPH_BYTES if config.cuda_graphs and dtype == torch.bfloat16 else 0)


def _row_bytes(cfg: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of the rows: ring, NextN state and draft tail, and the penalties' counts and marks."""
    vectors = (RING + 1) * cfg.hidden_size + MAX_TREE_NODES * cfg.latent_dim
    return (config.max_running_requests + 1) * (vectors * dtype.itemsize + 5 * cfg.vocab_size)

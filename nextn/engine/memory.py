"""What the memory is for and how many cache pages fit, worked out and said before the cache is allocated."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from nextn.config import MAX_TREE_NODES, EngineConfig, ModelConfig
from nextn.engine.launched import PIPELINE_DEPTH
from nextn.engine.prefill import CHAIN, LOGIT_SLICE, MAX_CHAINS
from nextn.engine.request import MAX_BANNED, MAX_BIASES
from nextn.engine.state import RING
from nextn.errors import CapacityError, ConfigError
from nextn.kernels.ref.attention import PIECES_BYTES, WORKSPACE_BYTES
from nextn.kernels.ref.sampling import CPU_BLOCK

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 1 << 30
"""The cache on a CPU, whatever `mem_fraction`; the system hands memory out only as pages are used."""

GRAPH_BYTES = 2 << 30
"""Kept free for captured steps, which are recorded after the cache is allocated, beside what the largest of
them computes with: all share that."""

FEW_TOKENS = 64
"""Up to so many, a product's sum is cut into parts that are added: at most MOST_PARTS, two of the head's."""

MOST_PARTS = 16

ATTENTION_PROGRAMS = 160
"""At least as many as a GPU has SMs: each has room for one tile's result beside those of whole rows."""

TILE_QUERIES = 64
"""Queries of a tile, a node's heads among them."""

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
    shapes = _Shapes.of(cfg, dtype, kernels=kernels)
    decode = _decode_bytes(shapes, config)
    return _Needs(
        limit,
        weights,
        other,
        rows=_row_bytes(cfg, config, dtype, max_model_len),
        prefill=_prefill_bytes(shapes, config, max_model_len),
        decode=decode,
        graphs=GRAPH_BYTES + max(decode, _chain_bytes(shapes)) if recorded else 0,
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


@dataclass(frozen=True, slots=True)
class _Shapes:
    """What a model's tensors take in a step: bytes a token, with every dimension that they grow with.

    item: bytes of a number in the layers; wide: of one in logits and unrounded sums. experts: networks whose
    outputs a token sums, of a dense model its only one. kernels: logits are adjusted without a sort.
    """

    cfg: ModelConfig
    item: int
    wide: int
    experts: int
    kernels: bool

    @staticmethod
    def of(cfg: ModelConfig, dtype: torch.dtype, *, kernels: bool) -> _Shapes:
        """The shapes of a model in `dtype`."""
        experts = cfg.num_experts_per_tok + cfg.n_shared_experts if cfg.n_routed_experts else 1
        return _Shapes(cfg, dtype.itemsize, max(4, dtype.itemsize), experts, kernels)

    @property
    def stream(self) -> int:
        """What a layer holds of a token beside its attention or network, as Python releases it.

        Three states of the residual stream, two norms and attention's product; and until the layer ends, what
        came into it: the networks' outputs of the layer before, or what the NextN layer starts from, which
        are the target's states, those gathered of them, cleaned, and joined with the embedding. Then what
        layers share: rotary factors, latents, numbers.
        """
        cfg = self.cfg
        before = max(self.item * self.experts, 5 * self.item + self.wide)
        shared = self.item * (2 * cfg.qk_rope_head_dim + cfg.latent_dim) + 64
        return cfg.hidden_size * (5 * self.item + self.wide + before) + shared

    @property
    def network(self) -> int:
        """Gate and up, their product and the output, of the dense network or of all experts of a token."""
        cfg, item, wide = self.cfg, self.item, self.wide
        dense = cfg.intermediate_size * (2 * wide + item) + wide * cfg.hidden_size
        if not cfg.n_routed_experts:
            return dense
        routing = wide * cfg.n_routed_experts + 16 * cfg.num_experts_per_tok
        return max(dense, self.experts * item * (cfg.hidden_size + cfg.moe_intermediate_size) + routing)

    @property
    def prefill_attention(self) -> int:
        """The stacked down projection, queries before and after rotation, on their way, and the values."""
        cfg, item = self.cfg, self.item
        heads = 2 * cfg.qk_head_dim + 4 * cfg.qk_rope_head_dim + cfg.v_head_dim
        return item * cfg.num_attention_heads * heads + self.wide * ((cfg.q_lora_rank or 0) + cfg.latent_dim)

    @property
    def decode_attention(self) -> int:
        """Queries, absorbed too, values in latent space, and as they are; tiles' results come on top."""
        cfg = self.cfg
        values = cfg.latent_dim + cfg.kv_lora_rank + cfg.v_head_dim
        return cfg.num_attention_heads * (self.wide * cfg.qk_head_dim + self.item * values)

    def decode_forward(self, rows: int, nodes: int) -> int:
        """Most that a forward over `nodes` tokens of each row holds at a time."""
        cfg, tokens = self.cfg, rows * nodes
        tiles = ATTENTION_PROGRAMS + rows * -(-nodes * cfg.num_attention_heads // TILE_QUERIES)
        results = tiles * TILE_QUERIES * (self.item * cfg.kv_lora_rank + 4)
        parts = min(tokens, FEW_TOKENS) * MOST_PARTS * self.wide * cfg.hidden_size
        return tokens * (self.stream + max(self.decode_attention, self.network)) + results + parts

    def choice(self, nodes: int, rows: int, levels: int, rated: int) -> int:
        """Most that choosing the tokens of `nodes` nodes of `rows` rows holds at a time, with every option.

        levels: positions a row with noise. rated: tokens a row with log-probabilities. Without kernels,
        filters sort (values, their places, the mass in float64, masks) and noise is made of int64.
        """
        a_node = 3 * self.wide if self.kernels else 36 + 4 * self.wide  # logits, adjusted ones, filters' keys
        a_row = 4 + 1 + self.wide * (levels + 3 * rated)  # counts, marks of the prompt, noise, logits rated
        parts = 2 * self.wide * min(nodes, FEW_TOKENS)
        masks = nodes * self.cfg.vocab_size // 8 + 4 * nodes
        words = 0 if self.kernels else 112 * max(CPU_BLOCK, 4096 * rows * levels)
        return self.cfg.vocab_size * (nodes * a_node + rows * a_row + parts) + masks + words


def _prefill_bytes(shapes: _Shapes, config: EngineConfig, max_model_len: int) -> int:
    """Most that one prefill step holds beside weights and cache, by its largest tensors, in bytes.

    Layers come first, then the first tokens of prompts that end, whose logits and counts stay to the end,
    then the NextN layer, then log-probabilities of prompt tokens. Attention of float32 and float64 has no
    kernel: what it holds of a prompt at a time grows with the prompt and is not counted.
    """
    cfg, tokens = shapes.cfg, config.chunked_prefill_size
    one_head = 2 * max_model_len * (cfg.latent_dim + cfg.qk_nope_head_dim + cfg.v_head_dim)
    expanded = max(WORKSPACE_BYTES, one_head) + PIECES_BYTES
    layer = max(tokens * shapes.prefill_attention + expanded, tokens * shapes.network)
    ending = min(tokens, config.max_running_requests)
    kept = ending * cfg.vocab_size * (2 * shapes.wide + 4 + 1)
    states = tokens * 4 * shapes.item * cfg.hidden_size
    rated = states + min(LOGIT_SLICE, tokens) * cfg.vocab_size * 5 * shapes.wide  # a softmax on its way
    first = states + shapes.choice(ending, ending, 1, 1)
    return max(kept + tokens * shapes.stream + layer, kept + rated, first)


def _decode_bytes(shapes: _Shapes, config: EngineConfig) -> int:
    """Most that the largest batch of a decode step computes with, in a graph or op by op.

    The tree's forward and the choice of its tokens together, for graphs keep what parts hand on; or bringing
    the draft up, over more tokens but without a choice.
    """
    spec, rows = config.spec, config.max_running_requests
    nodes = max(config.largest_tree, spec.topk if spec else 1)
    levels = max(config.largest_tree if config.max_draft_tokens else 1, spec.num_steps + 1 if spec else 1)
    rated = config.largest_tree if config.max_draft_tokens or spec is None else spec.width
    step = shapes.choice(rows * nodes, rows, levels, rated) + shapes.decode_forward(rows, nodes)
    drafts = spec is not None or config.max_draft_tokens
    return max(step, shapes.decode_forward(rows, RING)) if drafts else step


def _chain_bytes(shapes: _Shapes) -> int:
    """Most that a short prefill computes with in its graph."""
    return shapes.choice(MAX_CHAINS, MAX_CHAINS, 1, 0) + shapes.decode_forward(MAX_CHAINS, CHAIN)


def _row_bytes(cfg: ModelConfig, config: EngineConfig, dtype: torch.dtype, max_model_len: int) -> int:
    """Bytes of the rows: ring, NextN state and draft tail, pages, penalties' counts and marks, biases."""
    vectors = (RING + 1) * cfg.hidden_size + MAX_TREE_NODES * cfg.latent_dim
    pages = -(-(max_model_len + PIPELINE_DEPTH * config.largest_tree) // config.page_size)
    numbers = 8 * (pages + RING + MAX_BIASES + MAX_BANNED) + 4 * MAX_BIASES + 256  # and a few single ones
    a_row = vectors * dtype.itemsize + numbers + 5 * cfg.vocab_size
    return (config.max_running_requests + 1) * a_row + 8 * MAX_TREE_NODES

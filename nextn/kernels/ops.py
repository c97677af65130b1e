"""Where each op runs: as a Triton kernel or as its plain-torch twin.

The layers' ops are kernels for bfloat16 on a GPU; what is chosen from logits, trees and compaction for any
dtype there, but for more than 64 children a node. What adjusts logits (filters, penalties, biases, grammars)
is a kernel up to 32 bits. Everything else runs the twin.

Triton is imported at the first call that needs it, so a CPU installation does without. Shapes and meanings
stand with the twins in kernels/ref. *Summands* [S, N, ...] are parts of a result whose sum over S is meant:
a kernel that splits a sum over programs leaves the adding to the kernel that reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nextn.kernels.ref import attention as ref_attention
from nextn.kernels.ref import gemm as ref_gemm
from nextn.kernels.ref import kv_cache as ref_kv_cache
from nextn.kernels.ref import mla as ref_mla
from nextn.kernels.ref import moe as ref_moe
from nextn.kernels.ref import norm as ref_norm
from nextn.kernels.ref import router as ref_router
from nextn.kernels.ref import sampling as ref_sampling
from nextn.kernels.ref import tree_ops as ref_tree_ops
from nextn.kernels.ref.gemm import Block
from nextn.kernels.ref.moe import ExpertWeights, SharedExperts
from nextn.kernels.ref.rope import RotaryTables
from nextn.kernels.ref.router import Method, Scoring
from nextn.kernels.ref.sampling import MAX_CHILDREN, SamplingBatch
from nextn.kernels.ref.tree_ops import BeamState, Pool

if TYPE_CHECKING:
    from nextn.kernels.attention import AttentionPlan
    from nextn.kernels.prefill import PrefillTiles

    Visibility = ref_attention.TreeView | AttentionPlan


def on_gpu(x: Tensor) -> bool:
    """Whether kernels can run on x; tests answer for the interpreter."""
    return x.is_cuda


def has_kernels(x: Tensor) -> bool:
    """Whether the model's ops on x run as kernels: bfloat16 on a GPU. Wider types are for proofs."""
    return on_gpu(x) and x.dtype == torch.bfloat16


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    block: Block,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x [..., in] times weight [rows, in] transposed.  # [..., rows] in out_dtype or x's dtype"""
    if has_kernels(x):
        from nextn.kernels.gemm import linear as kernel

        out = kernel(x.flatten(0, -2), weight, scale, block, out_dtype=out_dtype)
        return out.view(*x.shape[:-1], weight.shape[0])
    out = ref_gemm.linear(x, weight, scale, block)
    return out if out_dtype is None else out.to(out_dtype)


def linear_summands(x: Tensor, weight: Tensor, scale: Tensor | None, block: Block) -> Tensor:
    """The same product of x [N, in] as summands [S, N, rows]."""
    if has_kernels(x):
        from nextn.kernels.gemm import linear_summands as kernel

        return kernel(x, weight, scale, block)
    return ref_gemm.linear_summands(x, weight, scale, block)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size] normalised over the last dimension."""
    if has_kernels(x):
        from nextn.kernels.norm import rms_norm as kernel

        return kernel(x, weight, eps)
    return ref_norm.rms_norm(x, weight, eps)


def add_norm(
    residual: Tensor | None, summands: Tensor, weight: Tensor, eps: float, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """residual [N, hidden] plus summands [S, N, hidden] where `valid` [N], and the norm of that."""
    if has_kernels(weight):
        from nextn.kernels.norm import add_norm as kernel

        return kernel(residual, summands, weight, eps, valid)
    return ref_norm.add_norm(residual, summands, weight, eps, valid)


def join_norms(embedding: Tensor, hidden: Tensor, enorm: Tensor, hnorm: Tensor, eps: float) -> Tensor:
    """[enorm(embedding), hnorm(hidden)], both [N, hidden].  # [N, 2 hidden]"""
    if has_kernels(hidden):
        from nextn.kernels.norm import join_norms as kernel

        return kernel(embedding, hidden, enorm, hnorm, eps)
    return ref_norm.join_norms(embedding, hidden, enorm, hnorm, eps)


def silu_and_mul_summands(summands: Tensor, dtype: torch.dtype) -> Tensor:
    """silu of the first half times the second half of the sum of summands [S, N, 2I].  # [N, I] of dtype"""
    if on_gpu(summands) and dtype == torch.bfloat16:
        from nextn.kernels.norm import silu_and_mul_summands as kernel

        return kernel(summands)
    return ref_norm.silu_and_mul_summands(summands)


def prepare_latents(
    summands: Tensor,
    q_norm: Tensor | None,
    kv_norm: Tensor,
    eps: float,
    rotary: RotaryTables,
    positions: Tensor,
    slots: Tensor | None,
    valid: Tensor | None,
    cache_layer: Tensor,
    tail: Tensor,
) -> Tensor | None:
    """From the stacked down projection to cache entries in place and the queries' normed input."""
    args = (summands, q_norm, kv_norm, eps, rotary, positions, slots, valid, cache_layer, tail)
    if has_kernels(cache_layer):
        from nextn.kernels.mla import prepare_latents as kernel

        return kernel(*args)
    return ref_mla.prepare_latents(*args)


def absorb_queries(summands: Tensor, w_uk: Tensor, rotary: RotaryTables, positions: Tensor) -> Tensor:
    """Queries in latent space with their rotated part.  # [N, H, C]"""
    if has_kernels(w_uk):
        from nextn.kernels.mla import absorb_queries as kernel

        return kernel(summands, w_uk, rotary, positions)
    return ref_mla.absorb_queries(summands, w_uk, rotary, positions)


def plan_attention(
    page_table: Tensor,
    prefix_lens: Tensor,
    mask: Tensor,
    *,
    page_size: int,
    tail_len: int,
    dtype: torch.dtype,
) -> Visibility:
    """What the layers' `decode_attention` calls of one forward share."""
    if on_gpu(page_table) and dtype == torch.bfloat16:
        from nextn.kernels.attention import plan_attention as kernel

        return kernel(prefix_lens, tail_len, page_size=page_size)
    sizes = {"page_size": page_size, "tail_len": tail_len}
    return ref_attention.tree_view(page_table, prefix_lens, mask, dtype=dtype, **sizes)


def decode_attention(
    q: Tensor,
    cache_layer: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    tail: Tensor,
    mask: Tensor,
    scale: float,
    w_uv: Tensor,
    *,
    plan: Visibility,
) -> Tensor:
    """Absorbed attention of q [N, H, C] to prefix and tail, values projected up.  # [N, H * v]"""
    args = (q, cache_layer, page_table, prefix_lens, tail, mask, scale, w_uv)
    if isinstance(plan, ref_attention.TreeView):
        return ref_attention.decode_attention(*args, plan=plan)
    from nextn.kernels.attention import decode_attention as kernel

    return kernel(*args, plan=plan)


def plan_prefill_attention(
    cu_seqlens: tuple[int, ...],
    prefix_lens: tuple[int, ...],
    cache: Tensor,
    *,
    heads: int,
    nope: int,
    v: int,
) -> PrefillTiles | None:
    """What the layers' `prefill_attention` calls of one forward share; None where there are no kernels."""
    if not has_kernels(cache):
        return None
    from nextn.kernels.prefill import PrefillSizes
    from nextn.kernels.prefill import plan_prefill_attention as kernel

    return kernel(cu_seqlens, prefix_lens, PrefillSizes(heads, nope, v, cache.shape[-1]), cache.device)


def prefill_attention(
    q: Tensor,
    cache_layer: Tensor,
    page_table: Tensor,
    cu_seqlens: tuple[int, ...],
    prefix_lens: tuple[int, ...],
    latents: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    *,
    plan: PrefillTiles | None,
) -> Tensor:
    """Causal attention of new tokens q [T, H, nope + rope] to their prefix and themselves.  # [T, H, v]"""
    args = (q, cache_layer, page_table, cu_seqlens, prefix_lens, latents, w_uk, w_uv, scale)
    if has_kernels(q):
        from nextn.kernels.prefill import prefill_attention as kernel

        return kernel(*args, plan=plan)
    return ref_attention.prefill_attention(*args)


def route_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    *,
    scoring: Scoring,
    method: Method,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Weights [N, k] float32 (float64 for float64 x) and numbers [N, k] int64 of each token's experts.

    x [N, hidden], weight [experts, hidden], bias [experts] or None. Where not `valid` [N] bool, weights are 0
    and numbers -1. The rest is as in kernels/ref/router.route.
    """
    args = (x, weight, bias, valid)
    how: dict[str, Any] = {
        "scoring": scoring, "method": method, "top_k": top_k, "n_group": n_group, "topk_group": topk_group,
        "norm_topk_prob": norm_topk_prob, "scaling": scaling,
    }  # fmt: skip
    if has_kernels(x):
        from nextn.kernels.router import route_tokens as kernel

        return kernel(*args, **how)
    return ref_router.route_tokens(*args, **how)


def run_experts(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    experts: ExpertWeights,
    shared: SharedExperts | None,
    valid: Tensor | None,
    *,
    host: bool,
) -> Tensor:
    """Routed and shared experts of every token as summands [S, N, hidden] of x's dtype.

    x [N, hidden], weights [N, k] float32 or float64 and indices [N, k] int64 from `route_tokens`, valid [N]
    bool; tokens not valid run no routed expert. `host` allows plain torch to read the choice on the host.
    """
    if has_kernels(x):
        from nextn.kernels.moe import moe_summands as kernel

        return kernel(x, weights, indices, experts, shared)
    out = ref_moe.routed_experts(x, weights, indices, experts, valid, host=host)
    if shared is not None:
        out = out + ref_moe.shared_experts(x, shared, experts.block)
    return out.unsqueeze(0)


def best_children(
    logits: Tensor,
    batch: SamplingBatch,
    noise: Tensor | None,
    k: int,
    tau: float = 1.0,
    path: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best next tokens of each draft node and their values, both [B, M, k], from logits [B, M, V]."""
    if on_gpu(logits) and k <= MAX_CHILDREN:
        from nextn.kernels.vocab import best_children as kernel

        return kernel(*adjust_logits(logits, batch, path, positions), noise, k, tau)
    return ref_sampling.best_children(logits, batch, noise, k, tau, path, positions)


def pick_tokens(
    logits: Tensor,
    batch: SamplingBatch,
    noise: Tensor,
    level: Tensor,
    path: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The token that each node chooses, [B, M] int64, from logits [B, M, V] and the noise of its level."""
    if on_gpu(logits):
        from nextn.kernels.vocab import pick_tokens as kernel

        return kernel(*adjust_logits(logits, batch, path, positions), noise, level)
    return ref_sampling.pick_tokens(logits, batch, noise, level, path, positions)


def adjust_logits(
    logits: Tensor,
    batch: SamplingBatch,
    path: tuple[Tensor, Tensor] | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, SamplingBatch]:
    """Logits [B, M, V] with all but temperature and noise done, and the batch that says so."""
    if not batch.adjusts_logits:
        return logits, batch
    if on_gpu(logits) and logits.dtype != torch.float64:
        from nextn.kernels.adjust import adjust_logits as kernel

        return kernel(logits, batch, path, positions), batch.adjusted()
    own_path = ref_sampling.path_or_empty(logits, batch, path)
    return ref_sampling.adjust_logits(logits, batch, *own_path, positions), batch.adjusted()


def chosen_logprobs(
    logits: Tensor, adjusted: Tensor, batch: SamplingBatch, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Values and ids [B, M, 1 + 20] of each node's token and of the best in its place.

    adjusted: what `adjust_logits` makes of logits, both [B, M, V].
    """
    if on_gpu(logits) and logits.dtype != torch.float64:
        from nextn.kernels.vocab import chosen_logprobs as kernel

        return kernel(logits, adjusted, batch, tokens)
    return ref_sampling.chosen_logprobs(logits, adjusted, batch, tokens)


def level_noise(batch: SamplingBatch, first: Tensor, levels: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """Noise of `levels` positions from first [B] on.  # [B, levels, V], or 1 where all are greedy"""
    if on_gpu(first):
        from nextn.kernels.vocab import level_noise as kernel

        return kernel(batch, first, levels, vocab, dtype)
    return ref_sampling.level_noise(batch, first, levels, vocab, dtype)


def compact(cache: Tensor, source_slots: Tensor, target_slots: Tensor, valid: Tensor) -> None:
    """Copy source to target slots [B, W] where `valid`, in each layer of cache [L, pages, page_size, C]."""
    if on_gpu(cache):
        from nextn.kernels.kv_cache import compact as kernel

        return kernel(cache, source_slots, target_slots, valid)
    return ref_kv_cache.compact(cache, source_slots, target_slots, valid)


def expand(
    tokens: Tensor, values: Tensor, beam: BeamState | None, pool: Pool, level: int
) -> BeamState | None:
    """Add a level's candidates to `pool` and choose the next beam; None at the last level."""
    if on_gpu(tokens):
        from nextn.kernels.tree_ops import expand as kernel

        return kernel(tokens, values, beam, pool, level)
    return ref_tree_ops.expand(tokens, values, beam, pool, level)


def rerank(root: Tensor, pool: Pool, k: int, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, parents, depth, mask, values [B, D] of the root and the nodes - 1 best candidates."""
    if on_gpu(root):
        from nextn.kernels.tree_ops import rerank as kernel

        return kernel(root, pool, k, nodes)
    return ref_tree_ops.rerank(root, pool, k, nodes)


def accept_path(
    tokens: Tensor, parents: Tensor, target_tokens: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted path [B, W], its length [B] and the tokens that it emits [B, W]."""
    if on_gpu(tokens):
        from nextn.kernels.tree_ops import accept_path as kernel

        return kernel(tokens, parents, target_tokens, width)
    return ref_tree_ops.accept_path(tokens, parents, target_tokens, width)

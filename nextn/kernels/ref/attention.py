"""Multi-head latent attention over a paged latent cache: naive for prefill, absorbed for trees and chains.

Prefill expands keys and values from the latents block by block, with a running softmax (Milakov and
Gimelshein, 2018), so memory does not grow with the context. A tree's queries are already in latent space:
they attend the row's prefix pages and, in the tail, the entries of their bit set. Scores, softmax and sums
are float32, or float64 for float64 tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nextn.kernels.ref.dtypes import accumulation_dtype

QUERY_BLOCK = 512
KEY_BLOCK = 1024

WORKSPACE_BYTES = 512 << 20
"""Bound on the kernel's gathered entries and expanded keys and values together; one head of one request may
exceed it."""

PIECES_BYTES = 64 << 20
"""Bound on what one request's tiles add to that where they are cut into pieces."""

MAX_TREE_NODES = 64
"""Bits of a mask: nodes a row, and entries of a tail."""


@dataclass(frozen=True, slots=True)
class TreeView:
    """What each node of a decode sees; the same for every layer, so one forward makes it once."""

    slots: Tensor  # [B * P * page_size] int64, each row's slots; page 0's where a page is not read
    dead: Tensor  # entries of [B * (P * page_size + E)] that no node sees: numbers on a CPU, else bool
    bias: Tensor  # [B, M, 1, P * page_size + E], 0 where a node sees an entry and -inf elsewhere

    def blank(self, entries: Tensor) -> Tensor:
        """Zero the dead rows of entries [B * (P * page_size + E), C] in place.

        On a CPU their numbers are cheaper; on a GPU asking for them would cost a synchronisation.
        """
        if self.dead.dtype == torch.bool:
            return entries.masked_fill_(self.dead.unsqueeze(-1), 0)
        return entries.index_fill_(0, self.dead, 0)


def tree_view(
    page_table: Tensor,
    prefix_lens: Tensor,
    mask: Tensor,
    *,
    page_size: int,
    tail_len: int,
    dtype: torch.dtype,
) -> TreeView:
    """Visibility of page_table [B, P] up to prefix_lens [B], and of a tail by the bits of mask [B, M]."""
    device, rows, nodes = mask.device, *mask.shape
    length = page_table.shape[1] * page_size
    prefix = torch.arange(length, device=device) < prefix_lens[:, None]  # [B, P * page_size]
    # The shift copies the sign bit in from the left; the lowest bit is right for node 63 too.
    bits = ((mask.unsqueeze(-1) >> torch.arange(tail_len, device=device)) & 1).bool()  # [B, M, E]
    seen = torch.cat((prefix.unsqueeze(1).expand(rows, nodes, length), bits), -1)
    hidden = torch.zeros(seen.shape, dtype=accumulation_dtype(dtype), device=device)
    hidden.masked_fill_(~seen, float("-inf"))
    dead = ~torch.cat((prefix, bits.any(1)), -1).flatten()
    if not dead.is_cuda:
        dead = dead.nonzero().flatten()
    pages = torch.where(prefix[:, ::page_size], page_table, 0)
    slots = pages.unsqueeze(-1) * page_size + torch.arange(page_size, device=device)
    return TreeView(slots.flatten(), dead, hidden.unsqueeze(2))


def tree_attention(
    q: Tensor,
    cache_layer: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    tail: Tensor,
    mask: Tensor,
    scale: float,
    kv_lora_rank: int,
    *,
    view: TreeView | None = None,
) -> Tensor:
    """Absorbed attention of q [B, M, H, C] to a row's prefix and tail.  # [B, M, H, kv_lora_rank], q's dtype

    cache_layer [pages, page_size, C], page_table [B, P] int64, prefix_lens [B] int64, tail [B, E, C] with
    E <= 64, mask [B, M] int64 with at least one bit a node. Keys are whole entries, values their first
    `kv_lora_rank` elements. Entries beyond the prefix and tail entries without a bit may hold NaN. `view`
    is what `tree_view` returned for the same arguments, to share between layers.
    """
    rows, nodes, heads, width = q.shape
    page_size, tail_len = cache_layer.shape[1], tail.shape[1]
    if view is None:
        sizes = {"page_size": page_size, "tail_len": tail_len}
        view = tree_view(page_table, prefix_lens, mask, dtype=q.dtype, **sizes)
    cached = cache_layer.view(-1, width).index_select(0, view.slots).view(rows, -1, width)
    entries = torch.cat((cached, tail), 1)  # [B, P * page_size + E, C]
    # 0 * NaN is NaN, so what nobody sees must be finite before it meets a zero weight.
    view.blank(entries.flatten(0, 1))
    entries = entries.to(view.bias.dtype)
    queries = q.reshape(rows, nodes * heads, width).to(entries.dtype)
    scores = torch.bmm(queries, entries.transpose(1, 2)).view(rows, nodes, heads, -1)
    weights = torch.add(view.bias, scores, alpha=scale).softmax(-1)
    out = torch.bmm(weights.view(rows, nodes * heads, -1), entries[..., :kv_lora_rank])
    return out.view(rows, nodes, heads, kv_lora_rank).to(q.dtype)


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
    plan: TreeView | None = None,
) -> Tensor:
    """Absorbed attention of q [B * M, H, C] to prefix and tail, up-projected by w_uv.  # [B * M, H * v]

    cache_layer [pages, page_size, C], page_table [B, P] int64, prefix_lens [B] int64, tail [B, E, C], mask
    [B, M] int64 with at least one bit below E a node, w_uv [H, v, kv_lora]; C = kv_lora + rope. Cache entries
    beyond a prefix may hold NaN. `plan` is what `tree_view` returned for the same arguments, to share between
    layers. A head's values are rounded to q's dtype before w_uv.
    """
    rows, nodes = mask.shape
    queries = q.view(rows, nodes, *q.shape[1:])
    kv_lora = w_uv.shape[2]
    latents = tree_attention(
        queries, cache_layer, page_table, prefix_lens, tail, mask, scale, kv_lora, view=plan
    )
    latents = latents.view(rows * nodes, -1, kv_lora).transpose(0, 1)  # [H, N, kv_lora]
    values = torch.bmm(latents, w_uv.transpose(1, 2))  # [H, N, v]
    return values.transpose(0, 1).reshape(rows * nodes, -1)


class _RunningSoftmax(NamedTuple):
    """The keys so far: their largest score, sum of exponentials and weighted values."""

    peak: Tensor  # [H, Q, 1]
    total: Tensor  # [H, Q, 1]
    values: Tensor  # [H, Q, v]


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
) -> Tensor:
    """Naive causal attention of several requests' new tokens to their prefix and themselves.  # [T, H, v]

    q [T, H, nope + rope], cache_layer [pages, page_size, C], page_table [R, P], cu_seqlens R + 1 offsets,
    prefix_lens R lengths already cached, latents [T, C] of the new tokens (C = kv_lora + rope),
    w_uk [H, nope, kv_lora], w_uv [H, v, kv_lora]. Cache entries beyond a prefix may hold NaN.
    """
    out = q.new_empty(q.shape[0], q.shape[1], w_uv.shape[1])
    page_size = cache_layer.shape[1]
    for request, prefix in enumerate(prefix_lens):
        begin, end = cu_seqlens[request], cu_seqlens[request + 1]
        pages = page_table[request, : -(-prefix // page_size)]
        cached = cache_layer[pages].view(-1, latents.shape[-1])[:prefix]
        entries = torch.cat((cached, latents[begin:end]))  # [prefix + new, C]
        for start in range(begin, end, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, end)
            first = prefix + start - begin
            visible = entries[: first + stop - start]
            out[start:stop] = _causal_block(q[start:stop], visible, first, w_uk, w_uv, scale)
    return out


def _causal_block(q: Tensor, entries: Tensor, first: int, w_uk: Tensor, w_uv: Tensor, scale: float) -> Tensor:
    """Attention of queries [Q, H, nope + rope] at positions first, first + 1, ... to entries [K, C]."""
    work, device = accumulation_dtype(q.dtype), q.device
    queries = q.transpose(0, 1).to(work) * scale  # [H, Q, nope + rope]
    heads, count, _ = queries.shape
    running = _RunningSoftmax(
        queries.new_full((heads, count, 1), float("-inf")),
        queries.new_zeros(heads, count, 1),
        queries.new_zeros(heads, count, w_uv.shape[1]),
    )
    rows = torch.arange(first, first + count, device=device).unsqueeze(1)
    for start in range(0, entries.shape[0], KEY_BLOCK):
        block = entries[start : start + KEY_BLOCK]
        scores, values = _expand(queries, block, w_uk, w_uv)
        if start + block.shape[0] > first:
            columns = torch.arange(start, start + block.shape[0], device=device)
            scores = scores.masked_fill_(columns > rows, float("-inf"))
        running = _add_keys(running, scores, values)
    return (running.values / running.total).transpose(0, 1).to(q.dtype)


def _expand(queries: Tensor, block: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and values of the keys that block [K, C] stands for.  # [H, Q, K], [H, K, v]"""
    nope, kv_lora = w_uk.shape[1:]
    latent, rope = block[:, :kv_lora], block[:, kv_lora:]
    keys = torch.matmul(latent, w_uk.transpose(1, 2)).to(queries.dtype)  # [H, K, nope]
    values = torch.matmul(latent, w_uv.transpose(1, 2)).to(queries.dtype)
    scores = torch.matmul(queries[..., :nope], keys.transpose(1, 2))
    return scores.add_(torch.matmul(queries[..., nope:], rope.to(queries.dtype).t())), values


def _add_keys(running: _RunningSoftmax, scores: Tensor, values: Tensor) -> _RunningSoftmax:
    """Take in one block of keys. The first holds position 0, which every query sees, so peaks are finite."""
    peak = torch.maximum(running.peak, scores.amax(-1, keepdim=True))
    weights = (scores - peak).exp_()
    shrink = (running.peak - peak).exp()
    return _RunningSoftmax(
        peak,
        running.total * shrink + weights.sum(-1, keepdim=True),
        running.values * shrink + torch.matmul(weights, values),
    )

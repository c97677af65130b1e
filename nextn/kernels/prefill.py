"""Causal attention of prefill over the paged latent cache, on expanded keys and values.

For many queries expanded keys (nope + rope wide) cost a third of the absorbed ones' multiplications. cuBLAS
expands a bounded part of the heads and requests at a time; each part sees its whole context, so no partial
softmax is ever merged. One launch serves all requests of a part, its longest tiles first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nextn.kernels.launch import LOG2_E, dot_block, launch_options, wait_for_inputs
from nextn.kernels.ref.attention import WORKSPACE_BYTES

HEADS_AT_ONCE = 16  # heads that a part of several requests should hold, so that its launch fills the GPU
GATHER_ROWS = 32  # entries that one program of the gather moves
TILE_FIELDS = 4  # int32 numbers of a table row, whether request or tile
ITEM_BYTES = 2  # bfloat16
TMA_BOX = 256  # elements a side that one descriptor fetches at most


class PrefillConfig(NamedTuple):
    """Queries and keys of a tile, warps, pipeline stages, and whether whole key tiles come by TMA."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool


class PrefillSizes(NamedTuple):
    """What a layer's shapes contribute to a plan."""

    heads: int
    nope: int
    v: int
    width: int  # C = kv_lora + rope


class Part(NamedTuple):
    """Consecutive requests whose context is expanded together, `heads` heads at a time."""

    requests: slice
    entries: int  # prefix and new tokens of all, each request padded to whole key tiles
    longest: int  # of one
    heads: int
    request_row: int  # of its first request in the table
    tile_row: int  # of its first tile
    tiles: int


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """The work of one prefill, the same for every layer; `plan_prefill_attention` makes it."""

    parts: tuple[Part, ...]
    table: Tensor  # [rows, 4] int32 on the device: requests and tiles of all parts
    sizes: PrefillSizes
    config: PrefillConfig


def choose_config(sizes: PrefillSizes, longest_chunk: int) -> PrefillConfig:
    """Tile sizes for a layer's shape and the most new tokens of a request."""
    descriptors = all(16 <= size <= TMA_BOX and size & (size - 1) == 0 for size in (sizes.nope, sizes.v))
    wide = triton.next_power_of_2(sizes.nope) + triton.next_power_of_2(sizes.v) > 2 * 128
    block_n = 32 if wide else 64  # keys wider than DeepSeek's fill the shared memory with fewer of them
    if longest_chunk <= 64:
        return PrefillConfig(64, block_n, 4, 3, descriptors)
    return PrefillConfig(128, block_n, 8, 3, descriptors)


def workspace_bytes(entries: int, sizes: PrefillSizes) -> int:
    """Most temporary bytes of one call, its output aside; `entries` of all requests, padded to key tiles.

    Padding adds less than a key tile (`block_n` entries) a request. With entries of the longest request alone
    it is the bound for any batch if it exceeds WORKSPACE_BYTES; otherwise that is the bound.
    """
    one_head = entries * (sizes.width + sizes.nope + sizes.v) * ITEM_BYTES
    all_heads = entries * (sizes.width + sizes.heads * (sizes.nope + sizes.v)) * ITEM_BYTES
    return min(all_heads, max(WORKSPACE_BYTES, one_head))


def plan_prefill_attention(
    cu_seqlens: Sequence[int],
    prefix_lens: Sequence[int],
    sizes: PrefillSizes,
    device: torch.device,
    *,
    config: PrefillConfig | None = None,
) -> PrefillTiles:
    """Divide a prefill into parts and tiles and send their table to the device, without a synchronisation.

    cu_seqlens R + 1 offsets of the requests' new tokens, prefix_lens R lengths already cached.
    """
    assert len(cu_seqlens) == len(prefix_lens) + 1, "cu_seqlens holds one number more than prefix_lens"
    chunks = [end - begin for begin, end in pairwise(cu_seqlens)]
    config = config or choose_config(sizes, max(chunks, default=0))
    padded = [
        -(-(prefix + chunk) // config.block_n) * config.block_n
        for prefix, chunk in zip(prefix_lens, chunks, strict=True)
    ]
    parts: list[Part] = []
    rows: list[tuple[int, ...]] = []
    for requests in _request_groups(padded, sizes):
        entries, request_row, tiles = 0, len(rows), []
        for request in range(requests.start, requests.stop):
            begin, chunk, prefix = cu_seqlens[request], chunks[request], prefix_lens[request]
            rows.append((begin, chunk, prefix, entries))
            for start in range(0, chunk, config.block_m):
                count = min(config.block_m, chunk - start)
                tiles.append((begin + start, count, prefix + start, entries))
            entries += padded[request]
        tiles.sort(key=lambda tile: -tile[1] - tile[2])  # longest first, so that none starts last
        work = (_heads_at_once(entries, sizes), request_row, len(rows), len(tiles))
        parts.append(Part(requests, entries, max(padded[requests]), *work))
        rows += tiles
    table = torch.tensor(rows, dtype=torch.int32).view(-1, TILE_FIELDS)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return PrefillTiles(tuple(part for part in parts if part.tiles), table, sizes, config)


def _request_groups(entries: Sequence[int], sizes: PrefillSizes) -> list[slice]:
    """Cut requests of so many entries into runs that fit the workspace with `HEADS_AT_ONCE` heads."""
    heads = min(sizes.heads, HEADS_AT_ONCE)
    most = WORKSPACE_BYTES // ITEM_BYTES // (sizes.width + heads * (sizes.nope + sizes.v))
    groups: list[slice] = []
    start = total = 0
    for request, count in enumerate(entries):
        if request > start and total + count > most:
            groups.append(slice(start, request))
            start, total = request, 0
        total += count
    return [*groups, slice(start, len(entries))] if entries else []


def _heads_at_once(entries: int, sizes: PrefillSizes) -> int:
    """Heads whose keys and values fit the workspace beside the entries: at least one, in equal shares."""
    free = WORKSPACE_BYTES // ITEM_BYTES - entries * sizes.width
    most = max(1, free // max(1, entries * (sizes.nope + sizes.v)))
    rounds = -(-sizes.heads // most)
    return -(-sizes.heads // rounds)


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
    plan: PrefillTiles | None = None,
    config: PrefillConfig | None = None,
) -> Tensor:
    """Causal attention of several requests' new tokens to their prefix and themselves.  # [T, H, v] bf16

    q [T, H, nope + rope], cache_layer [pages, page_size, C], page_table [R, P] int64, cu_seqlens R + 1
    offsets, prefix_lens R lengths already cached, latents [T, C] of the new tokens (C = kv_lora + rope),
    w_uk [H, nope, kv_lora], w_uv [H, v, kv_lora], all bfloat16; no copy of the weights is made where w_uv
    follows w_uk in each head's rows, as views of kv_b do. Cache entries and page numbers beyond a prefix may
    be anything. `plan` is what `plan_prefill_attention` returned for these lengths, to share between layers;
    `config` goes into a plan made here.
    """
    sizes = PrefillSizes(q.shape[1], w_uk.shape[1], w_uv.shape[1], latents.shape[1])
    _check(q, cache_layer, page_table, latents, w_uk, w_uv)
    assert len(prefix_lens) == page_table.shape[0], "page_table has one row a request"
    assert (cu_seqlens[0], cu_seqlens[-1]) == (0, q.shape[0]), "cu_seqlens must span the tokens"
    assert scale > 0, "scores are scaled after their maximum is taken, so scale must be positive"
    if plan is None:
        plan = plan_prefill_attention(cu_seqlens, prefix_lens, sizes, q.device, config=config)
    else:
        assert config is None, "the plan has a configuration already"
        assert plan.sizes == sizes, f"the plan is for {plan.sizes}, not {sizes}"
    weight = stacked_weight(w_uk, w_uv)
    out = q.new_empty(q.shape[0], sizes.heads, sizes.v)
    for part in plan.parts:
        entries = gather_entries(cache_layer, page_table[part.requests], latents, part, plan)
        for head in range(0, sizes.heads, part.heads):
            heads = slice(head, min(head + part.heads, sizes.heads))
            # Passed on without a name, so that it is released before the next heads' turn.
            attend_expanded(
                q[:, heads], entries, expand_entries(entries, weight[heads]), out[:, heads], part, plan, scale
            )
    return out


def _check(
    q: Tensor, cache_layer: Tensor, page_table: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor
) -> None:
    """Shapes, strides and types that the kernels take for granted."""
    named = {"q": q, "cache_layer": cache_layer, "latents": latents, "w_uk": w_uk, "w_uv": w_uv}
    for name, x in named.items():
        assert x.dtype == torch.bfloat16, f"{name} must be bfloat16, is {x.dtype}"
        assert x.stride(-1) == 1, f"{name}'s last dimension must be contiguous"
    tokens, heads, query_width = q.shape
    width = latents.shape[1]
    kv_lora = w_uk.shape[2]
    assert w_uk.shape[0] == w_uv.shape[0] == heads, f"w_uk and w_uv must have {heads} heads"
    assert w_uv.shape[2] == kv_lora, f"w_uv must have {kv_lora} columns"
    assert latents.shape[0] == tokens, f"latents must have {tokens} rows"
    assert query_width - w_uk.shape[1] == width - kv_lora > 0, "queries and entries differ in rope width"
    assert cache_layer.shape[2] == width, f"the cache's entries must have {width} elements"
    assert page_table.dtype == torch.int64, "page_table must be int64"
    assert page_table.stride(1) == 1 or page_table.shape[1] <= 1, "a row of page_table must be contiguous"


def stacked_weight(w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """kv_b, of which both are normally views.  # [H, nope + v, kv_lora]"""
    (heads, nope, kv_lora), v = w_uk.shape, w_uv.shape[1]
    strides = ((nope + v) * kv_lora, kv_lora, 1)
    behind = w_uk.data_ptr() + nope * kv_lora * w_uk.element_size()
    if w_uk.stride() == w_uv.stride() == strides and w_uv.data_ptr() == behind:
        return w_uk.detach().as_strided((heads, nope + v, kv_lora), strides)
    return torch.cat((w_uk.detach(), w_uv.detach()), 1)


def gather_entries(
    cache_layer: Tensor, page_table: Tensor, latents: Tensor, part: Part, plan: PrefillTiles
) -> Tensor:
    """Prefix and new entries of a part's requests, each padded with zeros to whole key tiles.  # [K, C]"""
    width = latents.shape[1]
    entries = latents.new_empty(part.entries, width)
    _gather_entries_kernel[(triton.cdiv(part.longest, GATHER_ROWS), page_table.shape[0])](
        cache_layer,
        page_table,
        latents,
        plan.table[part.request_row :],
        entries,
        cache_layer.stride(0),
        cache_layer.stride(1),
        page_table.stride(0),
        latents.stride(0),
        PAGE_SIZE=cache_layer.shape[1],
        WIDTH=width,
        PADDING=plan.config.block_n,
        ROWS=GATHER_ROWS,
        COLUMNS=min(triton.next_power_of_2(width), 128),
        num_warps=4,
        **launch_options(),
    )
    return entries


def expand_entries(entries: Tensor, weight: Tensor) -> Tensor:
    """Keys and values of entries [K, C] by weight [h, nope + v, kv_lora].  # [K, h * (nope + v)]"""
    kv_lora = weight.shape[2]
    return torch.mm(entries[:, :kv_lora], weight.reshape(-1, kv_lora).t())


def attend_expanded(
    q: Tensor, entries: Tensor, expanded: Tensor, out: Tensor, part: Part, plan: PrefillTiles, scale: float
) -> None:
    """Attend some heads of a part: q [T, h, nope + rope], into out [T, h, v].

    entries [K, C] give the rope keys; expanded [K, h * (nope + v)] is what `expand_entries` made of them.
    """
    heads, rope = q.shape[1], q.shape[2] - plan.sizes.nope
    nope, v, kv_lora = plan.sizes.nope, plan.sizes.v, plan.sizes.width - rope
    config = plan.config
    keys = values = ropes = None
    if config.descriptors and _fits_descriptor(entries, kv_lora):
        keys = TensorDescriptor.from_tensor(expanded, [config.block_n, nope])
        values = TensorDescriptor.from_tensor(expanded, [config.block_n, v])
        ropes = TensorDescriptor.from_tensor(entries[:, kv_lora:], [config.block_n, rope])
    _prefill_attention_kernel[(part.tiles * heads,)](
        q,
        expanded,
        entries[:, kv_lora:],
        out,
        plan.table[part.tile_row :],
        keys,
        ropes,
        values,
        scale * LOG2_E,
        heads,
        q.stride(0),
        q.stride(1),
        expanded.stride(0),
        entries.stride(0),
        out.stride(0),
        out.stride(1),
        NOPE=nope,
        ROPE=rope,
        V=v,
        NOPE_BLOCK=dot_block(nope),
        ROPE_BLOCK=dot_block(rope),
        V_BLOCK=dot_block(v),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(),
    )


def _fits_descriptor(entries: Tensor, kv_lora: int) -> bool:
    """Whether TMA can address the rope keys of entries [K, C]: a power of two of them, 16-byte aligned."""
    width = entries.shape[1]
    rope = width - kv_lora
    return rope >= 16 and rope & (rope - 1) == 0 and width % 8 == kv_lora % 8 == 0


@triton.jit
def _gather_entries_kernel(  # type: ignore[no-untyped-def]
    cache_ptr,
    pages_ptr,
    latents_ptr,
    requests_ptr,
    entries_ptr,
    page_stride,
    slot_stride,
    table_stride,
    latent_stride,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    request = tl.program_id(1)
    token = tl.load(requests_ptr + request * 4)
    chunk = tl.load(requests_ptr + request * 4 + 1)
    prefix = tl.load(requests_ptr + request * 4 + 2)
    first_entry = tl.load(requests_ptr + request * 4 + 3)
    padded = tl.cdiv(prefix + chunk, PADDING) * PADDING
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = position < padded
    cached = position < prefix
    new = (position >= prefix) & (position < prefix + chunk)
    page = tl.load(pages_ptr + request * table_stride + position // PAGE_SIZE, mask=cached, other=0)
    source = page * page_stride + (position % PAGE_SIZE).to(tl.int64) * slot_stride
    latent = (token + position - prefix).to(tl.int64) * latent_stride
    target = (first_entry + position).to(tl.int64) * WIDTH
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (column < WIDTH)[None, :]
        old_ptr = cache_ptr + source[:, None] + column[None, :]
        old = tl.load(old_ptr, mask=cached[:, None] & inside, other=0.0)
        new_ptr = latents_ptr + latent[:, None] + column[None, :]
        fresh = tl.load(new_ptr, mask=new[:, None] & inside, other=0.0)
        entry = tl.where(cached[:, None], old, fresh)
        # Past the end both are zeros, and so will be the values made of them: 0 * NaN is NaN.
        tl.store(entries_ptr + target[:, None] + column[None, :], entry, mask=kept[:, None] & inside)


@triton.jit
def _load_block(  # type: ignore[no-untyped-def]
    ptr, stride, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """`rows` rows (None: ROWS) of WIDTH elements from `ptr`, padded with zeros to ROWS x COLUMNS."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    address = ptr + row[:, None] * stride + column[None, :]
    if rows is not None:
        block = tl.load(address, mask=(row < rows)[:, None] & (column < WIDTH)[None, :], other=0.0)
    elif WIDTH < COLUMNS:
        block = tl.load(address, mask=(column < WIDTH)[None, :], other=0.0)
    else:
        block = tl.load(address)
    return block


@triton.jit
def _load_keys(  # type: ignore[no-untyped-def]
    keys_desc,
    ropes_desc,
    values_desc,
    expanded_ptr,
    ropes_ptr,
    entry,
    column,
    expanded_stride,
    entry_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys, rope keys and values of BLOCK_N entries from `entry` on, by TMA where there are descriptors."""
    if keys_desc is not None:
        keys = keys_desc.load([entry, column])
        ropes = ropes_desc.load([entry, 0])
        values = values_desc.load([entry, column + NOPE])
    else:
        key_ptr = expanded_ptr + entry.to(tl.int64) * expanded_stride + column
        rope_ptr = ropes_ptr + entry.to(tl.int64) * entry_stride
        keys = _load_block(key_ptr, expanded_stride, None, NOPE, BLOCK_N, NOPE_BLOCK)
        ropes = _load_block(rope_ptr, entry_stride, None, ROPE, BLOCK_N, ROPE_BLOCK)
        values = _load_block(key_ptr + NOPE, expanded_stride, None, V, BLOCK_N, V_BLOCK)
    return keys, ropes, values


@triton.jit
def _add_keys(  # type: ignore[no-untyped-def]
    mixed, total, peak, q_nope, q_rope, keys, ropes, values, scale, visible, MASKED: tl.constexpr
):
    """Take one block of keys into the running softmax; query i sees the first `visible[i]` if MASKED."""
    scores = tl.dot(q_nope, tl.trans(keys))
    scores = tl.dot(q_rope, tl.trans(ropes), scores)
    if MASKED:
        column = tl.arange(0, keys.shape[0])
        scores = tl.where(column[None, :] < visible[:, None], scores, float("-inf"))
    # The first block holds position 0, which every query sees, so peaks are finite from then on.
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None])
    return mixed, total, new_peak


@triton.jit
def _prefill_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    expanded_ptr,
    ropes_ptr,
    out_ptr,
    tiles_ptr,
    keys_desc,
    ropes_desc,
    values_desc,
    scale,
    heads,
    q_token_stride,
    q_head_stride,
    expanded_stride,
    entry_stride,
    out_token_stride,
    out_head_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    V: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    head = tl.program_id(0) % heads
    tile_ptr = tiles_ptr + (tl.program_id(0) // heads) * 4
    token = tl.load(tile_ptr).to(tl.int64)
    rows = tl.load(tile_ptr + 1)
    first = tl.load(tile_ptr + 2)  # position of the first query
    first_entry = tl.load(tile_ptr + 3)  # of the request
    q_ptr += token * q_token_stride + head * q_head_stride
    q_nope = _load_block(q_ptr, q_token_stride, rows, NOPE, BLOCK_M, NOPE_BLOCK)
    q_rope = _load_block(q_ptr + NOPE, q_token_stride, rows, ROPE, BLOCK_M, ROPE_BLOCK)
    column = head * (NOPE + V)  # of the head's keys in `expanded`, and then its values
    mixed = tl.zeros([BLOCK_M, V_BLOCK], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Blocks that every query sees wholly, then those that cross the diagonal.
    whole = (first + 1) // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        keys, ropes, values = _load_keys(
            keys_desc, ropes_desc, values_desc, expanded_ptr, ropes_ptr, first_entry + start, column,
            expanded_stride, entry_stride, NOPE, ROPE, V, NOPE_BLOCK, ROPE_BLOCK, V_BLOCK, BLOCK_N,
        )  # fmt: skip
        mixed, total, peak = _add_keys(
            mixed, total, peak, q_nope, q_rope, keys, ropes, values, scale, total, False
        )
    for start in range(whole, first + rows, BLOCK_N):
        keys, ropes, values = _load_keys(
            keys_desc, ropes_desc, values_desc, expanded_ptr, ropes_ptr, first_entry + start, column,
            expanded_stride, entry_stride, NOPE, ROPE, V, NOPE_BLOCK, ROPE_BLOCK, V_BLOCK, BLOCK_N,
        )  # fmt: skip
        visible = first + 1 - start + tl.arange(0, BLOCK_M)
        mixed, total, peak = _add_keys(
            mixed, total, peak, q_nope, q_rope, keys, ropes, values, scale, visible, True
        )
    row = tl.arange(0, BLOCK_M)
    value = tl.arange(0, V_BLOCK)
    address = out_ptr + token * out_token_stride + head * out_head_stride
    address += row[:, None].to(tl.int64) * out_token_stride + value[None, :]
    result = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(address, result, mask=(row < rows)[:, None] & (value < V)[None, :])

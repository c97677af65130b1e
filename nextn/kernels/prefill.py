"""Causal attention of prefill over the paged latent cache, on expanded keys and values.

For many queries expanded keys (nope + rope wide) cost a third of the absorbed ones' multiplications. cuBLAS
expands a bounded part of the heads and requests at a time, each with its whole context. One launch serves all
requests of a part, its longest tiles first. A short chunk behind a long prefix has too few tiles for the GPU,
so these are cut into pieces of their keys, whose softmaxes a second launch merges in float32.
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

from nextn.kernels.attention import processors_of
from nextn.kernels.launch import LOG2_E, dot_block, launch_options, wait_for_inputs
from nextn.kernels.ref.attention import PIECES_BYTES, WORKSPACE_BYTES

HEADS_AT_ONCE = 16  # heads that a part of several requests should hold, so that its launch fills the GPU
GATHER_ROWS = 32  # entries that one program of the gather moves
TABLE_FIELDS = tl.constexpr(8)  # int32 numbers of a table row, whether request, piece or merge
MERGE_ROWS = 16  # queries that one program of the merge takes
ITEM_BYTES = 2  # bfloat16
TMA_BOX = 256  # elements a side that one descriptor fetches at most
MIN_PIECE = 4096  # keys that are worth a piece of their own, and the merge that it takes
MAX_PIECES = 16  # of one tile
MAX_WAVES = 4  # a request's tiles are cut into no more programs than run in so many waves
START_KEYS = 256  # keys that a program could do in the time that it takes to start and to end


class PrefillConfig(NamedTuple):
    """Queries and keys of a tile, warps, pipeline stages, whether whole key tiles come by TMA, keys a piece.

    piece: the fewest keys of a piece, so a tile of twice as many is the first that is cut.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool
    piece: int = MIN_PIECE


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
    piece_row: int  # of its first piece; most tiles are one
    pieces: int
    merge_row: int  # of its first tile that is several pieces
    merges: int
    slots: int  # pieces of these tiles, whose results are merged


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """The work of one prefill, the same for every layer; `plan_prefill_attention` makes it."""

    parts: tuple[Part, ...]
    table: Tensor  # [rows, TABLE_FIELDS] int32 on the device: requests, pieces and merges of all parts
    cu_seqlens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
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
    """Most temporary bytes of one call, its output and `PIECES_BYTES` aside; `entries` of all requests.

    Entries are padded to key tiles, less than one (`block_n` entries) a request. With entries of the longest
    request alone it is the bound for any batch if it exceeds WORKSPACE_BYTES; otherwise that is the bound.
    """
    one_head = entries * (sizes.width + sizes.nope + sizes.v) * ITEM_BYTES
    all_heads = entries * (sizes.width + sizes.heads * (sizes.nope + sizes.v)) * ITEM_BYTES
    return min(all_heads, max(WORKSPACE_BYTES, one_head))


@dataclass(frozen=True, slots=True)
class _Request:
    """One request's share of a plan, the same whatever the others are.

    begin: its first new token. entries: padded. cut: pieces of its longest tile. slot_bytes: of the results
    that are to be merged.
    """

    begin: int
    chunk: int
    prefix: int
    entries: int
    cut: int
    slot_bytes: int

    def pieces(self, rows: int, first: int, block_n: int) -> list[tuple[int, int]]:
        """Bounds of the keys of each piece of a tile of `rows` queries from position `first`.

        Bounds lie on whole key tiles before the diagonal, so every query sees the first key of its piece.
        """
        whole = (first + 1) // block_n
        share = -(-(self.prefix + self.chunk) // (block_n * self.cut))
        bounds = list(range(0, max(1, whole), share))
        return list(pairwise([*(bound * block_n for bound in bounds), first + rows]))


def _request(
    begin: int, chunk: int, prefix: int, sizes: PrefillSizes, config: PrefillConfig, sms: int
) -> _Request:
    entries = -(-(prefix + chunk) // config.block_n) * config.block_n
    programs = -(-chunk // config.block_m) * _heads_at_once(entries, sizes)
    cut = _cut(programs, prefix + chunk, config.piece, sms)
    slot_bytes = programs * cut * config.block_m * (sizes.v + 1) * 4
    if cut == 1 or slot_bytes > PIECES_BYTES:
        return _Request(begin, chunk, prefix, entries, 1, 0)
    return _Request(begin, chunk, prefix, entries, cut, slot_bytes)


def _cut(programs: int, keys: int, piece: int, sms: int) -> int:
    """Into how many pieces to cut tiles of so many keys: those that keep all SMs busy to the end.

    One program fills an SM, so programs run in waves.
    """
    most = min(MAX_PIECES, keys // piece, MAX_WAVES * sms // max(1, programs))

    def duration(cut: int) -> float:
        return -(-programs * cut // sms) * (keys / cut + START_KEYS)

    return min(range(1, max(1, most) + 1), key=duration)


def plan_prefill_attention(
    cu_seqlens: Sequence[int],
    prefix_lens: Sequence[int],
    sizes: PrefillSizes,
    device: torch.device,
    *,
    config: PrefillConfig | None = None,
    processors: int | None = None,
) -> PrefillTiles:
    """Divide a prefill into parts and pieces and send their table to the device, without a synchronisation.

    cu_seqlens R + 1 offsets of the requests' new tokens, prefix_lens R lengths already cached. processors: to
    keep busy; by default those that the device has.
    """
    assert len(cu_seqlens) == len(prefix_lens) + 1, "cu_seqlens holds one number more than prefix_lens"
    chunks = [end - begin for begin, end in pairwise(cu_seqlens)]
    config = config or choose_config(sizes, max(chunks, default=0))
    sms = processors or processors_of(device)
    requests = [
        _request(begin, chunk, prefix, sizes, config, sms)
        for begin, chunk, prefix in zip(cu_seqlens[:-1], chunks, prefix_lens, strict=True)
    ]
    rows: list[tuple[int, ...]] = []
    groups = _request_groups(requests, sizes)
    parts = [_lay_out(group, requests[group], sizes, config, rows) for group in groups]
    padded = [row + (0,) * (TABLE_FIELDS.value - len(row)) for row in rows]
    table = torch.tensor(padded, dtype=torch.int32).view(-1, TABLE_FIELDS.value)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    parts = [part for part in parts if part.pieces]
    return PrefillTiles(tuple(parts), table, tuple(cu_seqlens), tuple(prefix_lens), sizes, config)


def _lay_out(
    group: slice,
    requests: Sequence[_Request],
    sizes: PrefillSizes,
    config: PrefillConfig,
    rows: list[tuple[int, ...]],
) -> Part:
    """The part of some requests; appends its rows to the table.

    A request's row: token, new tokens, prefix, entry. A piece's: token, queries, first position, the
    request's entry, bounds of the keys, slot of the result (-1: it is the tile's). A merge's: token, queries,
    first slot, slots.
    """
    entries, request_row = 0, len(rows)
    tiles: list[tuple[int, int, int, int, list[tuple[int, int]]]] = []
    for request in requests:
        rows.append((request.begin, request.chunk, request.prefix, entries))
        for start in range(0, request.chunk, config.block_m):
            count, first = min(config.block_m, request.chunk - start), request.prefix + start
            pieces = request.pieces(count, first, config.block_n)
            tiles.append((request.begin + start, count, first, entries, pieces))
        entries += request.entries
    tiles.sort(key=lambda tile: -tile[1] - tile[2])  # longest first, so that none starts last
    piece_row, slots, merges = len(rows), 0, []
    for token, count, first, entry, pieces in tiles:
        is_cut = len(pieces) > 1
        if is_cut:
            merges.append((token, count, slots, len(pieces)))
        for begin, end in pieces:
            rows.append((token, count, first, entry, begin, end, slots if is_cut else -1))
            slots += is_cut
    merge_row = len(rows)
    rows += merges
    reserved = sum(request.slot_bytes for request in requests) if len(requests) > 1 else 0
    heads = _heads_at_once(entries, sizes, reserved)
    longest = max(request.entries for request in requests)
    return Part(
        group,
        entries,
        longest,
        heads,
        request_row,
        piece_row,
        merge_row - piece_row,
        merge_row,
        len(merges),
        slots,
    )


def _request_groups(requests: Sequence[_Request], sizes: PrefillSizes) -> list[slice]:
    """Cut requests into runs that fit the workspace with `HEADS_AT_ONCE` heads."""
    heads = min(sizes.heads, HEADS_AT_ONCE)
    entry = (sizes.width + heads * (sizes.nope + sizes.v)) * ITEM_BYTES
    groups: list[slice] = []
    start = total = 0
    for number, request in enumerate(requests):
        need = request.entries * entry + request.slot_bytes
        if number > start and total + need > WORKSPACE_BYTES:
            groups.append(slice(start, number))
            start, total = number, 0
        total += need
    return [*groups, slice(start, len(requests))] if requests else []


def _heads_at_once(entries: int, sizes: PrefillSizes, reserved: int = 0) -> int:
    """Heads whose keys and values fit the workspace beside the entries: at least one, in equal shares."""
    free = (WORKSPACE_BYTES - reserved) // ITEM_BYTES - entries * sizes.width
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
        lengths = (plan.cu_seqlens, plan.prefix_lens)
        assert lengths == (tuple(cu_seqlens), tuple(prefix_lens)), (
            "the plan is for chunks or prefixes of other lengths"
        )
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
        FIELDS=TABLE_FIELDS,
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
    partial = log_sums = None
    if part.slots:
        partial = q.new_empty((part.slots, heads, config.block_m, v), dtype=torch.float32)
        log_sums = q.new_empty((part.slots, heads, config.block_m), dtype=torch.float32)
    _prefill_attention_kernel[(part.pieces * heads,)](
        q,
        expanded,
        entries[:, kv_lora:],
        out,
        partial,
        log_sums,
        plan.table[part.piece_row :],
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
        FIELDS=TABLE_FIELDS,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(),
    )
    if partial is not None:
        _merge_pieces_kernel[(part.merges, heads, triton.cdiv(config.block_m, MERGE_ROWS))](
            partial,
            log_sums,
            out,
            plan.table[part.merge_row :],
            out.stride(0),
            out.stride(1),
            V=v,
            V_BLOCK=triton.next_power_of_2(v),
            BLOCK_M=config.block_m,
            ROWS=min(MERGE_ROWS, config.block_m),
            FIELDS=TABLE_FIELDS,
            num_warps=4,
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
    FIELDS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    request = tl.program_id(1)
    token = tl.load(requests_ptr + request * FIELDS)
    chunk = tl.load(requests_ptr + request * FIELDS + 1)
    prefix = tl.load(requests_ptr + request * FIELDS + 2)
    first_entry = tl.load(requests_ptr + request * FIELDS + 3)
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
    # Every query sees the first key of a piece, so peaks are finite from then on.
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None])
    return mixed, total, new_peak


@triton.jit(do_not_specialize=["heads"])  # parts of one prompt have other numbers of them
def _prefill_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    expanded_ptr,
    ropes_ptr,
    out_ptr,
    partial_ptr,
    log_sums_ptr,
    pieces_ptr,
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
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One piece of a tile's keys; into `out`, or into a slot of `partial` and `log_sums`, merged later."""
    wait_for_inputs(PDL)
    head = tl.program_id(0) % heads
    piece_ptr = pieces_ptr + (tl.program_id(0) // heads) * FIELDS
    token = tl.load(piece_ptr).to(tl.int64)
    rows = tl.load(piece_ptr + 1)
    first = tl.load(piece_ptr + 2)  # position of the first query
    first_entry = tl.load(piece_ptr + 3)  # of the request
    begin = tl.load(piece_ptr + 4)
    end = tl.load(piece_ptr + 5)
    q_ptr += token * q_token_stride + head * q_head_stride
    q_nope = _load_block(q_ptr, q_token_stride, rows, NOPE, BLOCK_M, NOPE_BLOCK)
    q_rope = _load_block(q_ptr + NOPE, q_token_stride, rows, ROPE, BLOCK_M, ROPE_BLOCK)
    column = head * (NOPE + V)  # of the head's keys in `expanded`, and then its values
    mixed = tl.zeros([BLOCK_M, V_BLOCK], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Blocks that every query sees wholly, then those that cross the diagonal.
    whole = tl.minimum((first + 1) // BLOCK_N * BLOCK_N, end)
    for start in range(begin, whole, BLOCK_N):
        keys, ropes, values = _load_keys(
            keys_desc, ropes_desc, values_desc, expanded_ptr, ropes_ptr, first_entry + start, column,
            expanded_stride, entry_stride, NOPE, ROPE, V, NOPE_BLOCK, ROPE_BLOCK, V_BLOCK, BLOCK_N,
        )  # fmt: skip
        mixed, total, peak = _add_keys(
            mixed, total, peak, q_nope, q_rope, keys, ropes, values, scale, total, False
        )
    for start in range(whole, end, BLOCK_N):
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
    result = mixed / total[:, None]
    stored = (row < rows)[:, None] & (value < V)[None, :]
    if partial_ptr is not None:
        slot = tl.load(piece_ptr + 6)
        if slot >= 0:
            place = (slot.to(tl.int64) * heads + head) * BLOCK_M
            tl.store(partial_ptr + place * V + row[:, None] * V + value[None, :], result, mask=stored)
            tl.store(log_sums_ptr + place + row, peak + tl.log2(total), mask=row < rows)
            return
    address = out_ptr + token * out_token_stride + head * out_head_stride
    address += row[:, None].to(tl.int64) * out_token_stride + value[None, :]
    tl.store(address, result.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _merge_pieces_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    log_sums_ptr,
    out_ptr,
    merges_ptr,
    out_token_stride,
    out_head_stride,
    V: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some queries of one tile and head: the mean of its pieces' results, weighted by their softmax sums."""
    wait_for_inputs(PDL)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    merge_ptr = merges_ptr + tl.program_id(0) * FIELDS
    token = tl.load(merge_ptr).to(tl.int64)
    rows = tl.load(merge_ptr + 1)
    slot = tl.load(merge_ptr + 2).to(tl.int64)
    count = tl.load(merge_ptr + 3)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    value = tl.arange(0, V_BLOCK)
    kept = (row < rows)[:, None] & (value < V)[None, :]
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, V_BLOCK], tl.float32)
    for index in range(count):
        place = ((slot + index) * heads + head) * BLOCK_M + row
        # Rows without a query hold anything; zeros keep them finite.
        peak = tl.load(log_sums_ptr + place, mask=row < rows, other=0.0)
        result = tl.load(partial_ptr + place[:, None] * V + value[None, :], mask=kept, other=0.0)
        new_best = tl.maximum(best, peak)
        shrink = tl.exp2(best - new_best)
        weight = tl.exp2(peak - new_best)
        mean = mean * shrink[:, None] + result * weight[:, None]
        total = total * shrink + weight
        best = new_best
    address = out_ptr + (token + row)[:, None] * out_token_stride + head * out_head_stride + value[None, :]
    tl.store(address, (mean / total[:, None]).to(out_ptr.dtype.element_ty), mask=kept)
